//! The flight recorder of real processes: what is known of a rank that was killed, stopped, that differs or that runs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use consort_comm::{EventKind, Group, World};
use consort_types::{Dtype, Reduce};
use serde_json::Value;

use super::job::{
    Ended, Job, LONG, OWN_ARGUMENTS, eventually, kill, own_program, ranks, run, shells, with_options,
};
use super::rank::{end_by, say};

/// Calls that all ranks make before something happens to rank 1.
const WARM: u64 = 30;

fn reduce(group: &Group, reduce: Reduce, until: Instant) -> Result<(), consort_comm::CommError> {
    let mut buffer = group.heap().alloc(40)?;
    buffer.bytes_mut(until)?.fill(0);
    group.all_reduce(buffer, Dtype::F32, reduce)?.wait(until).map(drop)
}

/// The program of a rank in these tests: endless calls, with a fault on rank 1.
pub(crate) fn play(world: &World, part: &str) {
    let group = world.group(1 << 20, LONG).unwrap();
    (0..WARM).for_each(|_| reduce(&group, Reduce::Sum, Instant::now() + LONG).unwrap());
    group.recorder().record(EventKind::Kernel, group.recorder().name("matmul"), 640);
    if part == "flight runs" {
        return run_on(world, &group);
    }
    let until = Instant::now() + if part == "flight stops" { Duration::from_millis(300) } else { LONG };
    let mut kind = Reduce::Sum;
    if group.rank() == 1 {
        match part {
            "flight dies" => end_by("KILL"),
            "flight stops" => end_by("STOP"),
            _ => kind = Reduce::Max,
        }
    }
    let error = reduce(&group, kind, until).unwrap_err();
    say(&format!("error {}", error.to_string().replace('\n', "|")));
    if let Some(flight) = world.flight_record() {
        say(&flight.to_string());
    }
    std::process::exit(1);
}

/// Rank 0 waits outside of the group until a file exists; the others wait for it in a call.
fn run_on(world: &World, group: &Group) {
    let until = Instant::now() + LONG;
    if group.rank() == 0 {
        say("warmed up");
        let done = PathBuf::from(std::env::var("FLIGHT_DONE").unwrap());
        eventually("the test is done", || done.exists());
    }
    reduce(group, Reduce::Sum, until).unwrap();
    world.barrier("all done", LONG).unwrap();
    say("done");
}

/// The line of the summary with this beginning, its columns two spaces apart.
fn line(text: &str, beginning: &str) -> String {
    let found = text.lines().find(|line| line.starts_with(beginning));
    let found = found.unwrap_or_else(|| panic!("no {beginning:?} in\n{text}"));
    found.split("   ").map(str::trim).filter(|cell| !cell.is_empty()).collect::<Vec<_>>().join("  ")
}

/// Rank 1 ended the warm calls and its kernel; rank 0 and 2 are in the next call.
fn check_missing(ended: &Ended) {
    assert!(ended.err.contains("last operation of each rank:\n"), "{}", ended.err);
    let row = line(&ended.err, "  rank 1 ");
    assert!(row.contains("  world kernel  matmul, 640 bytes  ") && row.contains("run/flight.rs:"), "{row}");
    assert!(row.contains("  finished ") && row.ends_with(" before"), "{row}");
    let divergence = line(&ended.err, "first divergence: ");
    let expected = "first divergence: world call 30: ranks 0,2 all_reduce sum f32, 40 bytes at ";
    assert!(
        divergence.starts_with(expected) && divergence.ends_with("; rank 1 has not started it"),
        "{divergence}"
    );
}

#[test]
fn the_last_operations_of_a_killed_rank_are_known() {
    let ended = run(ranks(3, "flight dies"));
    check_missing(&ended);
    let row = line(&ended.err, "  ranks 0,2 ");
    assert!(row.contains("  world call 30  ") && row.contains("  failed after "), "{row}");
    let last = ended.err.lines().last().unwrap();
    assert!(last.starts_with("error: run: first failure: rank 1 (process "), "{}", ended.err);
}

#[test]
fn the_last_operations_of_a_stopped_rank_are_known() {
    let ended = run(ranks(3, "flight stops"));
    check_missing(&ended);
    let summary = ended.err.find("error: run: first failure: ").unwrap();
    assert!(ended.err.find("first divergence: ").unwrap() < summary, "{}", ended.err);
}

#[test]
fn a_rank_that_differs_is_the_first_divergence() {
    let ended = run(ranks(3, "flight differs"));
    let divergence = line(&ended.err, "first divergence: ");
    assert!(divergence.starts_with("first divergence: world call 30: rank"), "{divergence}");
    assert!(divergence.contains("rank 1 all_reduce max f32, 40 bytes at "), "{divergence}");
    assert!(divergence.contains("ranks 0,2 all_reduce sum f32, 40 bytes at "), "{divergence}");
    assert_eq!(divergence.matches("run/flight.rs:").count(), 2, "{divergence}");
}

/// The events in a dump: each line is one.
fn events(path: &PathBuf) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The numbers of a rank's calls with a kind, in the order of the dump.
fn numbers(events: &[Value], rank: u64, kind: &str) -> Vec<u64> {
    let of_rank = events.iter().filter(|event| event["rank"] == rank && event["kind"] == kind);
    of_rank.map(|event| event["number"].as_u64().unwrap()).collect()
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("consort-run-{}.{name}", std::process::id()))
}

#[test]
fn the_dump_of_a_failure_holds_all_ranks_in_the_order_of_time() {
    let path = scratch("flight");
    let ended = run(with_options(3, "flight dies", &["--flight", path.to_str().unwrap()]));
    assert_eq!(ended.code, 137, "{}", ended.err);
    let events = events(&path);
    std::fs::remove_file(&path).unwrap();
    let times: Vec<u64> = events.iter().map(|event| event["time_ns"].as_u64().unwrap()).collect();
    assert!(times.is_sorted());
    for rank in 0..3 {
        let all = (0..if rank == 1 { WARM } else { WARM + 1 }).collect::<Vec<_>>();
        assert_eq!(numbers(&events, rank, "start"), all, "rank {rank}");
        assert_eq!(numbers(&events, rank, "finish"), (0..WARM).collect::<Vec<_>>(), "rank {rank}");
        assert_eq!(numbers(&events, rank, "kernel"), [0]);
        assert_eq!(numbers(&events, rank, "error").len(), usize::from(rank != 1));
    }
    let start = events.iter().find(|event| event["kind"] == "start").unwrap();
    assert_eq!((&start["op"], &start["bytes"]), (&"all_reduce sum f32".into(), &40.into()));
    assert_eq!(start["group"], "world");
    assert!(start["site"].as_str().unwrap().contains("run/flight.rs:"));
}

#[test]
fn a_running_job_is_asked_and_goes_on() {
    let (path, done) = (scratch("flight-asked"), scratch("flight-done"));
    let mut command = with_options(2, "flight runs", &["--flight", path.to_str().unwrap()]);
    let job = Job::start({
        command.env("FLIGHT_DONE", &done);
        command
    });
    job.line_with("warmed up");
    // The other rank may not be in its call yet: repeat until it is, one dump at a time.
    eventually("rank 1 is in the call", || {
        let _ = std::fs::remove_file(&path);
        kill("USR1", job.pid());
        eventually("the dump is there", || path.exists());
        let text = std::fs::read_to_string(&path).unwrap();
        text.lines().any(|line| {
            line.contains("\"rank\":1,")
                && line.contains("\"kind\":\"wait\"")
                && line.contains("\"number\":30,")
        })
    });
    std::fs::write(&done, "").unwrap();
    let ended = job.end();
    assert_eq!(ended.code, 0, "{}", ended.err);
    (0..2).for_each(|rank| assert!(ended.of(rank).contains(&"done"), "{ended:?}"));
    let last = ended.err.rfind("last operation of each rank:\n").unwrap();
    let summary = &ended.err[last..];
    assert!(line(summary, "  rank 0 ").contains("  matmul, 640 bytes  "), "{summary}");
    let row = line(summary, "  rank 1 ");
    assert!(row.contains("  world call 30  ") && row.contains("  waiting for "), "{summary}");
    assert!(line(summary, "first divergence: ").ends_with("; rank 0 has not started it"), "{summary}");
    assert_eq!(numbers(&events(&path), 1, "start"), (0..=WARM).collect::<Vec<_>>());
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_file(&done).unwrap();
}

#[test]
fn a_job_without_groups_has_nothing_to_tell() {
    // The ranks would print `asked` if they received the signal.
    let script = "trap 'echo asked' USR1; trap 'exit 3' TERM; echo here; sleep 600 & wait; wait";
    let job = Job::start(shells(2, script));
    (0..2).for_each(|_| drop(job.line_with("here")));
    kill("USR1", job.pid());
    kill("TERM", job.pid());
    let ended = job.end();
    assert_eq!(ended.code, 3, "{}", ended.err);
    assert!(ended.err.starts_with("no rank has recorded an operation yet\n"), "{}", ended.err);
    assert!(!ended.err.contains("last operation"), "{}", ended.err);
    assert!(ended.out.iter().all(|line| !line.contains("asked")), "{ended:?}");
}

#[test]
fn a_dump_that_cannot_be_written_is_said_before_the_failure() {
    let ended = run(with_options(2, "flight dies", &["--flight", "/no/such/folder/f"]));
    assert_eq!(ended.code, 137);
    let said = ended.err.find("error: run: --flight: /no/such/folder/f: No such file").unwrap();
    assert!(said < ended.err.find("error: run: first failure: rank 1").unwrap(), "{}", ended.err);
}

#[test]
fn a_dump_that_nobody_takes_does_not_keep_the_job() {
    let path = scratch("flight-pipe");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let ended = run(with_options(2, "flight dies", &["--flight", path.to_str().unwrap()]));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(ended.code, 137, "{}", ended.err);
    let expected =
        format!("error: run: --flight: {}: expected it to take the events within ", path.display());
    assert!(ended.err.contains(&expected), "{}", ended.err);
}

#[test]
fn under_another_launcher_rank_0_knows_what_all_did() {
    let (name, secret) = (format!("flight-{}", std::process::id()), "0123456789abcdef0123456789abcdef");
    let start = |rank: &str| {
        let mut command = std::process::Command::new(own_program());
        command.args(OWN_ARGUMENTS).env("RANK_PROGRAM", "flight dies").env("PMI_RANK", rank);
        command.env("PMI_SIZE", "2").env("CONSORT_JOB", &name).env("CONSORT_SECRET", secret);
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let (other, first) = (start("1"), start("0"));
    let outputs = [first, other].map(|child| child.wait_with_output().unwrap());
    let text = String::from_utf8_lossy(&outputs[0].stdout).into_owned();
    assert!(
        text.contains("\nerror rank 1 closed its connection without a goodbye, after start-up|"),
        "{text}"
    );
    assert!(line(&text, "  rank 1 ").contains("  matmul, 640 bytes  "), "{text}");
    assert!(line(&text, "first divergence: ").ends_with("; rank 1 has not started it"), "{text}");
}
