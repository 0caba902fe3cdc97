//! Runs cases on ranks that are processes, under the launcher. The ranks are the test program itself, which has no test
//! harness, since the launcher needs a program that it can enter.

use std::ffi::OsString;
use std::io::{stderr, stdout};
use std::time::Duration;

use consort_comm::launch::{Options, Orphans, Sink, enter, launch};

const ENTRY: &str = "__entry";
const RANK: &str = "__rank";

/// The whole of a test program: runs `rank` on each of these numbers of processes.
pub(crate) fn run(sizes: &[usize], rank: fn()) {
    run_each(sizes, &[""], |_| rank());
}

/// The same, in a job of its own for each of these names, which `rank` is told.
pub(crate) fn run_each(sizes: &[usize], names: &[&str], rank: impl Fn(&str)) {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match arguments.split_first() {
        Some((first, rest)) if first == ENTRY => enter(rest).unwrap(),
        Some((first, rest)) if first == RANK => rank(rest[0].to_str().unwrap()),
        _ => names.iter().for_each(|name| sizes.iter().for_each(|n| on_processes(*n, name))),
    }
}

fn on_processes(n: usize, name: &str) {
    let program = vec![std::env::current_exe().unwrap().into(), RANK.into(), name.into()];
    let entry = vec!["/proc/self/exe".into(), ENTRY.into()];
    let options = Options::new(n, program, entry, Duration::from_secs(300));
    let _orphans = Orphans::adopt().unwrap();
    let outcome = launch(&options, Sink::new(stdout()), Sink::new(stderr())).unwrap();
    assert_eq!(outcome.code, 0, "{n} ranks: {name}: {}", outcome.summary);
}
