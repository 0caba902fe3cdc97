//! Without `consort run` rank 0 runs the coordinator: whatever happens to it, the others hear of rank 0 by name.

use std::process::{Child, Command, Stdio, exit};
use std::time::{Duration, Instant};

use consort_comm::World;
use consort_types::{Dtype, Reduce};

use super::job::{LONG, OWN_ARGUMENTS, own_program};
use super::rank::{end_by, say};

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// The program of a rank in these tests, with a fault on rank 0.
pub(crate) fn play(world: World, part: &str) {
    if part == "host data" {
        play_data(&world);
    }
    // Rank 0 may stop before it has told the others that all came.
    let deadline = if part == "host stops" { Duration::from_secs(2) } else { LONG };
    let warm = world.barrier("warm", deadline);
    if world.rank() != 0 {
        let error = warm.and_then(|()| world.barrier("work", deadline)).unwrap_err().to_string();
        assert_eq!(world.parity("later", "").unwrap_err().to_string(), error);
        say(&format!("error {}", error.replace('\n', "|")));
        exit(1);
    }
    match part {
        "host killed" => end_by("KILL"),
        "host exits" => exit(0),
        "host panics" => panic!("the planned panic"),
        "host leaves" => drop(world),
        _ => end_by("STOP"),
    }
}

/// Endless reductions, during which rank 0 dies.
fn play_data(world: &World) {
    let group = world.group(1 << 20, LONG).unwrap();
    let until = Instant::now() + LONG;
    for round in 0.. {
        if group.rank() == 0 && round == 30 {
            end_by("KILL");
        }
        let buffer = group.heap().alloc_from(&[0; 40]).unwrap();
        let reduced = group.all_reduce(buffer, Dtype::F32, Reduce::Sum);
        if let Err(error) = reduced.and_then(|pending| pending.wait(until)) {
            say(&format!("error {}", error.to_string().replace('\n', "|")));
            exit(1);
        }
    }
}

/// Starts a rank as another launcher would, or a user who sets the variables.
fn start(variables: [&str; 2], rank: usize, part: &str) -> Child {
    let mut command = Command::new(own_program());
    command.args(OWN_ARGUMENTS).env("RANK_PROGRAM", part);
    command.env(variables[0], rank.to_string()).env(variables[1], "3");
    let name = format!("host-{}-{}-{}", std::process::id(), variables[0], part.replace(' ', "-"));
    command.env("CONSORT_JOB", name).env("CONSORT_SECRET", SECRET);
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// The errors of ranks 1 and 2.
fn errors(variables: [&str; 2], part: &str) -> Vec<String> {
    let mut first = start(variables, 0, part);
    let others = [1, 2].map(|rank| start(variables, rank, part));
    let outputs = others.map(|child| child.wait_with_output().unwrap());
    // Does nothing if it has exited.
    first.kill().unwrap();
    first.wait().unwrap();
    let error = |output: &std::process::Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let found = text.lines().find_map(|line| line.strip_prefix("error "));
        assert_eq!(output.status.code(), Some(1), "{text}");
        found.unwrap_or_else(|| panic!("no error in {text}")).to_string()
    };
    outputs.iter().map(error).collect()
}

const PMI: [&str; 2] = ["PMI_RANK", "PMI_SIZE"];
const BY_HAND: [&str; 2] = ["CONSORT_RANK", "CONSORT_SIZE"];

#[test]
fn the_death_of_rank_0_is_told_by_its_name() {
    for variables in [PMI, BY_HAND] {
        for part in ["host killed", "host exits"] {
            for error in errors(variables, part) {
                let (during, after) =
                    error.split_once(": rank 0 closed its connection without a goodbye, after ").unwrap();
                let (is_warm, is_work) =
                    (during.starts_with("barrier \"warm\" at "), during.starts_with("barrier \"work\" at "));
                assert!(
                    is_warm && after.starts_with("parity|")
                        || is_work && after.starts_with("barrier \"warm\"|"),
                    "{error}"
                );
            }
        }
    }
}

#[test]
fn a_panic_and_a_goodbye_of_rank_0_are_told_by_its_name() {
    for (part, expected) in [
        ("host panics", ": rank 0 aborted: it panicked|"),
        ("host leaves", ": rank 0 said goodbye and does not come to barrier \"work\""),
    ] {
        for error in errors(PMI, part) {
            assert!(error.contains(expected), "{part}: {error}");
        }
    }
}

#[test]
fn a_stopped_rank_0_is_told_by_its_name_at_the_deadline() {
    let start = Instant::now();
    for error in errors(BY_HAND, "host stops") {
        let expected = ": expected an answer from rank 0 by the deadline, got none|";
        assert!(error.starts_with("barrier \"") && error.contains(expected), "{error}");
    }
    assert!(start.elapsed() < LONG);
}

#[test]
fn the_death_of_rank_0_in_a_collective_is_told_by_its_name() {
    for error in errors(PMI, "host data") {
        assert!(
            error.starts_with("rank 0 closed its connection without a goodbye, after start-up|"),
            "{error}"
        );
    }
}

#[test]
fn without_rank_0_the_others_say_what_they_wait_for() {
    let mut command = Command::new(own_program());
    command.args(OWN_ARGUMENTS).env("RANK_PROGRAM", "init").env("CONSORT_RANK", "1").env("CONSORT_SIZE", "2");
    command.env("CONSORT_JOB", format!("none-{}", std::process::id())).env("CONSORT_SECRET", SECRET);
    let output = command.env("CONSORT_DEADLINE", "0.05").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = "error init: expected a welcome from the coordinator within 50ms, got no coordinator|  \
        note: without `consort run` rank 0 runs the coordinator, and must have started; ";
    assert!(output.status.code() == Some(1) && text.contains(expected), "{text}");
}
