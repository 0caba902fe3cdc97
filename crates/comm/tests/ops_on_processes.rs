//! Operations between processes: the checks of `ops/checks.rs`, with ranks under the launcher.
//!
//! The ranks are this program itself. It has no test harness, since the launcher needs a program that it can enter.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "ops/checks.rs"]
mod checks;
#[path = "ops/elements.rs"]
mod elements;

use std::ffi::OsString;
use std::io::{stderr, stdout};
use std::time::Duration;

use consort_comm::launch::{Options, Orphans, Sink, enter, launch};

const ENTRY: &str = "__entry";
const RANK: &str = "__rank";

fn main() {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match arguments.split_first() {
        Some((first, rest)) if first == ENTRY => enter(rest).unwrap(),
        Some((first, _)) if first == RANK => {
            let world = consort_comm::init().unwrap();
            checks::check_all(&world.group(checks::HEAP, Duration::from_secs(60)).unwrap());
        }
        _ => checks::RANKS.into_iter().for_each(on_processes),
    }
}

fn on_processes(n: usize) {
    let program = vec![std::env::current_exe().unwrap().into(), RANK.into()];
    let entry = vec!["/proc/self/exe".into(), ENTRY.into()];
    let options = Options::new(n, program, entry, Duration::from_secs(300));
    let _orphans = Orphans::adopt().unwrap();
    let outcome = launch(&options, Sink::new(stdout()), Sink::new(stderr())).unwrap();
    assert_eq!(outcome.code, 0, "{n} ranks: {}", outcome.summary);
}
