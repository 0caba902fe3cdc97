//! Gradients on ranks that are processes: 2 and 4 of them, under the launcher.
//!
//! The ranks are this program itself. It has no test harness, since the launcher needs a program that it can enter.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "gradients/cases.rs"]
mod cases;

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
        Some((first, _)) if first == RANK => run_cases(),
        _ => [2, 4].into_iter().for_each(on_processes),
    }
}

fn run_cases() {
    let mesh = consort::init().unwrap();
    for (name, case) in cases::CASES {
        case(mesh.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
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
