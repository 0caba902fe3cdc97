//! The cases of compiled functions on ranks that are processes: 2 and 4 of them, started by `consort run`.
//!
//! The ranks are this test program itself: started with COMPILED_CASES in the environment, the test `rank_program` runs
//! the cases and all other tests are left out.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "../../consort/tests/compile/cases.rs"]
mod cases;

use std::process::{Command, exit};

/// The program of the ranks, where this process is one.
#[test]
fn rank_program() {
    if std::env::var_os("COMPILED_CASES").is_none() {
        return;
    }
    let outcome = consort::init().and_then(|mesh| {
        for (name, _, case) in cases::CASES {
            eprintln!("case {name}");
            case(mesh.clone())?;
        }
        Ok(())
    });
    exit(match outcome {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{error}");
            1
        }
    });
}

fn on_processes(n: usize) {
    if std::env::var_os("COMPILED_CASES").is_some() {
        return;
    }
    let own = std::env::current_exe().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_consort"))
        .args(["run", "-n", &n.to_string(), "--"])
        .arg(own)
        .args(["--exact", "rank_program", "--nocapture", "--test-threads=1"])
        .env("COMPILED_CASES", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let tail: Vec<&str> = text.lines().rev().take(60).collect();
    assert!(output.status.success(), "{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
    // A rank that found no test to run would be a success, too.
    for (name, ..) in cases::CASES {
        let began = text.lines().filter(|line| line.ends_with(&format!("] case {name}"))).count();
        assert_eq!(began, n, "{name}: expected it on {n} ranks\n{text}");
    }
}

#[test]
fn cases_hold_on_two_processes() {
    on_processes(2);
}

#[test]
fn cases_hold_on_four_processes() {
    on_processes(4);
}
