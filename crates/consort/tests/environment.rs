//! Variables of the environment that `init` refuses.
//!
//! The ranks are this program itself: the test `a_rank`, which does nothing unless the environment says so.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::process::{Command, Output, Stdio};

const CHILD: &str = "ENVIRONMENT_TEST";

/// In a child, becomes a rank as the environment says, prints the errors, and exits with 7 if there are any.
#[test]
fn a_rank() {
    let Ok(how) = std::env::var(CHILD) else { return };
    let outcomes = match &how[..] {
        "init" => vec![consort::init().map(drop)],
        _ => consort::spawn(2, |_| Ok(())),
    };
    let failed = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
    let failed = failed.map(|error| eprintln!("{error}")).count();
    std::process::exit(if failed > 0 { 7 } else { 0 });
}

fn start(how: &str, variables: &[(&str, &str)]) -> std::process::Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_rank", "--nocapture"]).env(CHILD, how).envs(variables.iter().copied());
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn end(child: std::process::Child) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

const TOPICS: &str =
    "CONSORT_LOG: expected topics out of program, guards, breaks, recompiles, plan, all, got \"foo\"";

#[test]
fn a_log_that_does_not_exist_is_an_error_of_init() {
    let (code, text) = end(start("init", &[("CONSORT_LOG", "plan,foo")]));
    assert!(code == Some(7) && text.starts_with(&format!("init: {TOPICS}\n  at ")), "{text}");
    let (code, text) = end(start("spawn", &[("CONSORT_LOG", "plan,foo")]));
    assert!(code == Some(7) && text.matches(&format!("spawn: {TOPICS}")).count() == 2, "{text}");
    let (code, text) = end(start("init", &[("CONSORT_LOG_RANK", "first")]));
    let rank = "init: CONSORT_LOG_RANK: expected a rank, or `all`, got \"first\"";
    assert!(code == Some(7) && text.starts_with(rank), "{text}");
    for right in ["plan,breaks", "all", ""] {
        assert_eq!(end(start("init", &[("CONSORT_LOG", right)])).0, Some(0), "{right}");
    }
}
