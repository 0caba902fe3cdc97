//! Data between processes: a rank that dies, stops, leaves or differs in the middle is named to all the others.

use std::process::exit;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, CommError, Group, World};
use consort_types::{Dtype, Reduce};

use super::job::{LONG, ranks, run};
use super::rank::{end_by, say};

const HEAP: usize = 16 << 20;

fn number(rank: usize, i: usize) -> i64 {
    (rank * 31 + i * 7) as i64 % 1000
}

fn buffer(group: &Group, numbers: &[i64], until: Instant) -> Buffer {
    let mut buffer = group.heap().alloc(numbers.len() * 8).unwrap();
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    buffer.bytes_mut(until).unwrap().copy_from_slice(&bytes);
    buffer
}

fn numbers(buffer: &Buffer) -> Vec<i64> {
    buffer.bytes().unwrap().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The program of a rank in these tests, with a fault on rank 1.
pub(crate) fn play(world: &World, part: &str) {
    let group = world.group(HEAP, LONG).unwrap();
    let until = Instant::now() + if part == "data stops" { Duration::from_millis(500) } else { LONG };
    let error = loop {
        match step(&group, part, until) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(group.barrier().map(drop).unwrap_err(), error, "every later call says so");
    say(&format!("error {}", error.to_string().replace('\n', "|")));
    exit(1);
}

fn step(group: &Group, part: &str, until: Instant) -> Result<(), CommError> {
    let (me, n) = (group.rank(), group.size());
    for round in 0..60 {
        let mut reduce = Reduce::Sum;
        if me == 1 && round == 30 {
            match part {
                "data dies" => end_by("KILL"),
                "data stops" => end_by("STOP"),
                "data leaves" => exit(0),
                _ => reduce = Reduce::Max,
            }
        }
        let count = if round % 2 == 0 { 3 } else { 40_000 };
        let mine: Vec<i64> = (0..count).map(|i| number(me, i + round)).collect();
        let got = group.all_reduce(buffer(group, &mine, until), Dtype::I64, reduce)?.wait(until)?;
        let want = |i: usize| (0..n).map(|rank| number(rank, i + round)).sum::<i64>();
        assert!(numbers(&got[0]).iter().enumerate().all(|(i, x)| *x == want(i)));
    }
    Ok(())
}

/// The errors of all ranks but rank 1.
fn errors(part: &str) -> Vec<String> {
    let ended = run(ranks(3, part));
    assert_ne!(ended.code, 0);
    [0, 2].map(|rank| ended.after(rank, "error ").to_string()).to_vec()
}

#[test]
fn a_rank_killed_in_a_collective_is_named_to_all() {
    for error in errors("data dies") {
        assert!(error.starts_with("rank 1 was killed by SIGKILL (signal 9)"), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_in_the_middle_is_named_to_all() {
    for error in errors("data leaves") {
        assert!(error.starts_with("rank 1 exited with code 0 without a goodbye"), "{error}");
    }
}

#[test]
fn a_stopped_rank_ends_the_others_at_their_deadline() {
    let errors = errors("data stops");
    for error in errors {
        // The first survivor that gives up tells the other.
        assert!(error.contains("the deadline passed; missing: rank 1|"), "{error}");
    }
}

#[test]
fn a_rank_that_differs_is_named_with_both_call_sites() {
    for error in errors("data differs") {
        assert!(
            error.starts_with("call 30 on world: the reduction must be the same on all ranks|"),
            "{error}"
        );
        assert!(error.contains("|  rank 1      all_reduce max i64, 24 bytes  "), "{error}");
        assert!(error.contains("|  ranks 0,2   all_reduce sum i64, 24 bytes  "), "{error}");
        assert_eq!(error.matches("run/data.rs:").count(), 2, "{error}");
    }
}
