//! Hundreds of jobs of real processes, each with one fault on one rank, derived from a seed: every survivor gets one
//! clear error in time, the launcher names the first failure, and nothing is left behind.
//!
//! CONSORT_TRIALS=N runs N of them, CONSORT_SEED=k only that one. The ranks are this test program itself: see
//! `rank_program`. Deadlines are tested here, so times are compared; the tolerance on
//! a busy machine is in one place, `verdict.rs`.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "trials/calls.rs"]
mod calls;
#[path = "trials/job.rs"]
mod job;
#[path = "trials/leftovers.rs"]
mod leftovers;
#[path = "trials/plan.rs"]
mod plan;
#[path = "trials/rank.rs"]
mod rank;
#[path = "common/said.rs"]
mod said;
#[path = "trials/verdict.rs"]
mod verdict;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use leftovers::Leftovers;
use plan::{Fault, Plan};
use verdict::{Times, judge};

/// Concurrent trials: a few more than cores, because those that wait for a deadline are idle.
const AT_ONCE: usize = 4;
const TRIALS: u64 = 500;

/// The program of the ranks, if this process is one.
#[test]
fn rank_program() {
    if let Some(seed) = number("CONSORT_TRIAL") {
        rank::play(&Plan::new(seed));
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}: expected a number, got {text:?}")))
}

#[test]
fn every_fault_ends_in_one_error_in_time_and_leaves_nothing() {
    if number("CONSORT_TRIAL").is_some() {
        return;
    }
    let (first, count) = match number("CONSORT_SEED") {
        Some(seed) => (seed, 1),
        None => (0, number("CONSORT_TRIALS").unwrap_or(TRIALS)),
    };
    let start = Instant::now();
    let next = AtomicU64::new(first);
    let leftovers = Leftovers::new();
    let (times, failures) = (Mutex::new(Times::default()), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + count {
                return;
            }
            let plan = Plan::new(seed);
            let ended = job::run(&plan, leftovers.folder());
            let outcome = judge(&plan, &ended).and_then(|found| {
                leftovers.check(&ended)?;
                Ok(found)
            });
            match outcome {
                Ok(found) => times.lock().unwrap().add(plan.fault, found),
                Err(what) => {
                    failures.lock().unwrap().push(format!("CONSORT_SEED={seed}: {what}\n{plan}\n{ended}"))
                }
            }
        }
    };
    thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    println!("{count} trials in {:?}\n{}", start.elapsed(), times.lock().unwrap());
    let mut failures = failures.into_inner().unwrap();
    failures.extend(leftovers.check_at_the_end().err());
    failures.extend(times.lock().unwrap().check().err());
    assert!(failures.is_empty(), "{} trials failed:\n{}", failures.len(), failures.join("\n\n"));
}

#[test]
fn a_plan_follows_from_its_seed_and_every_fault_has_its_turn() {
    let faults: Vec<Fault> = (0..Fault::ALL.len() as u64).map(|seed| Plan::new(seed).fault).collect();
    assert_eq!(faults, Fault::ALL);
    for seed in 0..200 {
        assert_eq!(Plan::new(seed).to_string(), Plan::new(seed).to_string());
    }
}
