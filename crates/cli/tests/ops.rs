//! Operations between processes: the checks of `crates/comm/tests/ops` with ranks under the launcher.
//!
//! The ranks are this test program itself: started with CHECK_OPS in the environment, the test `rank_program` makes
//! the checks and all other tests are left out.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "../../comm/tests/ops/checks.rs"]
mod checks;
#[path = "../../comm/tests/ops/elements.rs"]
mod elements;

use std::process::Command;
use std::time::Duration;

/// What a rank says when all checks have been made.
const DONE: &str = "all operations were checked";

/// The program of the ranks, where this process is one.
#[test]
fn rank_program() {
    if std::env::var_os("CHECK_OPS").is_some() {
        let world = consort_comm::init().unwrap();
        checks::check_all(&world.group(checks::HEAP, Duration::from_secs(60)).unwrap());
        eprintln!("{DONE}");
    }
}

#[test]
fn every_operation_between_processes_equals_plain_loops() {
    if std::env::var_os("CHECK_OPS").is_some() {
        return;
    }
    for n in checks::RANKS {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
        command.args(["run", "-n", &n.to_string(), "--timeout", "300", "--"]);
        command.arg(std::env::current_exe().unwrap()).args(["--exact", "rank_program", "--nocapture"]);
        let output = command.env("CHECK_OPS", "1").output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{n} ranks: {}{}", text(&output.stdout), text(&output.stderr));
        // A rank that found no test to run would be a success, too.
        assert_eq!(text(&output.stderr).matches(DONE).count(), n, "{}", text(&output.stderr));
    }
}
