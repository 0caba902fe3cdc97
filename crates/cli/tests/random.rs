//! Random programs through all stages: verified, simplified, planned for each rank, checked for hazards, run by the plan
//! oracle under every timing, and by the executor on ranks: threads for all of them, processes for one in forty. Every
//! result is that of the program oracle.
//!
//! CONSORT_PROGRAMS=N tries N programs, CONSORT_SEED=k only that one. The long run, which says how far it has come:
//!
//! ```text
//! CONSORT_PROGRAMS=20000 cargo test --release -p consort-cli --test random -- --nocapture
//! ```
//!
//! The ranks that are processes are this test program itself: see `rank_program`.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "random/case.rs"]
mod case;
#[path = "random/job.rs"]
mod job;
#[path = "../../runtime/tests/execute/naive.rs"]
mod naive;
#[allow(dead_code, reason = "the command uses the rest")]
#[path = "../src/exec/rank.rs"]
mod rank;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use case::{Case, Outcome};

const PROGRAMS: u64 = 400;

/// Of so many programs one runs on processes too.
const ONE_IN: u64 = 40;

/// The rank's part, where this process is one.
#[test]
fn rank_program() {
    if let Some(seed) = number("CONSORT_RANDOM_RANK") {
        job::play(seed);
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}: expected a number, got {text:?}")))
}

/// The seeds to try: so many from 0 on, or the one that was asked for.
fn seeds(count: u64) -> std::ops::Range<u64> {
    number("CONSORT_SEED").map_or(0..count, |seed| seed..seed + 1)
}

/// What came of many programs.
#[derive(Default)]
struct Tally {
    tried: u64,
    rounded: Vec<u64>,
    failures: Vec<String>,
    said: Option<Instant>,
}

/// Tries seeds on several threads, and says every few seconds how far it has come.
fn try_all(
    what: &str,
    seeds: &[u64],
    at_once: usize,
    f: impl Fn(u64) -> Result<Outcome, String> + Sync,
) -> Tally {
    let (start, next, tally) = (Instant::now(), AtomicU64::new(0), Mutex::new(Tally::default()));
    let work = || {
        while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let outcome = catch_unwind(AssertUnwindSafe(|| f(*seed))).unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                Err(format!("panicked: {}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("?")))
            });
            let mut tally = tally.lock().unwrap();
            tally.tried += 1;
            match outcome {
                Ok(Outcome::Same) => {}
                Ok(Outcome::Rounded) => tally.rounded.push(*seed),
                Err(error) => {
                    println!("CONSORT_SEED={seed}: {}", error.lines().next().unwrap_or(""));
                    tally.failures.push(format!("CONSORT_SEED={seed}: {error}"));
                }
            }
            if tally.said.is_none_or(|said| said.elapsed() > Duration::from_secs(5)) {
                tally.said = Some(Instant::now());
                let (tried, failed) = (tally.tried, tally.failures.len());
                println!("{what}: {tried} of {} in {:.0?}, {failed} failed", seeds.len(), start.elapsed());
            }
        }
    };
    thread::scope(|scope| (0..at_once).for_each(|_| drop(scope.spawn(work))));
    let tally = tally.into_inner().unwrap();
    let (tried, failed, rounded) = (tally.tried, tally.failures.len(), &tally.rounded);
    println!(
        "{what}: {tried} programs in {:.1?}, {failed} failed, rounded otherwise {rounded:?}",
        start.elapsed()
    );
    assert!(failed == 0, "{failed} of {tried} failed\n{}", tally.failures.join("\n\n"));
    tally
}

#[test]
fn every_stage_keeps_the_results() {
    if number("CONSORT_RANDOM_RANK").is_some() {
        return;
    }
    let seeds: Vec<u64> = seeds(number("CONSORT_PROGRAMS").unwrap_or(PROGRAMS)).collect();
    // Ranks are threads, most of which wait.
    let at_once = thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2));
    let tally = try_all("threads", &seeds, at_once, |seed| {
        let case = Case::new(seed)?;
        case.check_plans()?;
        case.run_on_threads()
    });
    let rounded = tally.rounded.len() as u64;
    assert!(rounded <= 1 + tally.tried / 500, "{rounded} of {} results are off", tally.tried);
}

#[test]
fn processes_give_the_same() {
    if number("CONSORT_RANDOM_RANK").is_some() {
        return;
    }
    let count = number("CONSORT_PROGRAMS").unwrap_or(PROGRAMS).div_ceil(ONE_IN);
    let several = |seed: &u64| (2..=4).contains(&case::ranks(*seed));
    let seeds: Vec<u64> = match number("CONSORT_SEED") {
        Some(seed) => Some(seed).filter(several).into_iter().collect(),
        None => (0..).filter(several).take(count as usize).collect(),
    };
    try_all("processes", &seeds, 1, |seed| job::run(seed, case::ranks(seed)).map(|()| Outcome::Same));
}
