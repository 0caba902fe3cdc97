//! The deadline of calls that name none: from the command line, from the environment, or the default.

use std::process::exit;
use std::time::Duration;

use consort_comm::World;

use super::job::{ranks, run, with_options};
use super::rank::{end_by, say};

/// The program of a rank in these tests.
pub(crate) fn play(world: &World, part: &str) {
    say(&format!("deadline {:?}", world.deadline()));
    if part == "deadline passes" {
        if world.rank() == 1 {
            end_by("STOP");
        }
        let error = world.parity("key", "value").unwrap_err();
        say(&format!("error {}", error.to_string().replace('\n', "|")));
        exit(1);
    }
    if part == "deadline is endless" {
        world.barrier("all here", Duration::MAX).unwrap();
        drop(world.group(1 << 20, Duration::MAX).unwrap());
    }
}

#[test]
fn calls_that_name_no_deadline_have_that_of_the_command_line() {
    let ended = run(with_options(3, "deadline passes", &["--deadline", "0.5", "--grace", "0.2"]));
    assert_eq!(ended.code, 1, "{}", ended.err);
    for rank in [0, 2] {
        assert_eq!(ended.after(rank, "deadline "), "500ms");
        let error = ended.after(rank, "error ");
        assert!(error.starts_with("parity: the deadline passed; missing: rank 1|"), "{error}");
    }
}

#[test]
fn the_default_is_five_minutes_and_the_environment_changes_it() {
    let ended = run(ranks(1, "deadline"));
    assert_eq!((ended.code, ended.after(0, "deadline ")), (0, "300s"));
    let mut command = ranks(1, "deadline");
    command.env("CONSORT_DEADLINE", "2.5");
    assert_eq!(run(command).after(0, "deadline "), "2.5s");
    // The command line takes precedence over the environment.
    let mut command = with_options(1, "deadline", &["--deadline", "7"]);
    command.env("CONSORT_DEADLINE", "2.5");
    assert_eq!(run(command).after(0, "deadline "), "7s");
}

#[test]
fn a_deadline_that_is_none_is_an_error_on_every_rank() {
    for wrong in ["", "soon", "-1", "0", "inf"] {
        let mut command = ranks(2, "deadline");
        command.env("CONSORT_DEADLINE", wrong);
        let ended = run(command);
        assert_eq!(ended.code, 1, "{}", ended.err);
        let expected =
            format!("init: CONSORT_DEADLINE: expected a number of seconds above 0, got {wrong:?}|  note: ");
        (0..2).for_each(|rank| assert!(ended.after(rank, "error ").starts_with(&expected), "{ended:?}"));
    }
    let ended = run(with_options(2, "deadline", &["--deadline", "0"]));
    assert_eq!(ended.err, "error: run: --deadline: expected a number of seconds above 0, got 0\n");
    assert_eq!(ended.code, 1);
}

#[test]
fn the_longest_deadline_overflows_nothing() {
    let mut command = ranks(2, "deadline is endless");
    command.env("CONSORT_DEADLINE", "1e18");
    let ended = run(command);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    let ended = run(with_options(2, "init", &["--grace", "1e18", "--timeout", "1e18", "--deadline", "1e18"]));
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
}
