//! Random programs through all stages: verified, simplified, planned for each rank, checked for hazards, run by the plan
//! oracle under every timing, and by the executor on ranks: threads for all of them, processes for one in forty. Every
//! result must equal that of the program oracle. So are gradients of random programs, one for every four programs.
//!
//! CONSORT_PROGRAMS=N tries N programs, CONSORT_SEED=k only that one: a gradient, if k is 2^32 or more. The long run, which reports its progress:
//!
//! ```text
//! CONSORT_PROGRAMS=20000 cargo test --release -p consort-cli --test random -- --nocapture
//! ```
//!
//! The ranks that are processes are this test program itself: see `rank_program`.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "random/case.rs"]
mod case;
#[path = "../../passes/tests/grown/mod.rs"]
mod grown;
#[path = "random/job.rs"]
mod job;
#[allow(dead_code, reason = "the command uses the rest")]
#[path = "../src/exec/rank.rs"]
mod rank;
#[path = "common/said.rs"]
mod said;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use case::{Case, GRADIENTS, Outcome};

const PROGRAMS: u64 = 400;

/// One program in this many runs on processes too.
const ONE_IN: u64 = 40;

/// Programs that are tried in one process.
const BATCH: u64 = 50;

/// The last line of a process that has tried its whole batch.
const DONE: &str = "the whole batch was tried";

/// The program of a rank, if this process is one.
#[test]
fn rank_program() {
    if let Some(seed) = number("CONSORT_RANDOM_RANK") {
        job::play(seed);
    }
}

/// A batch, if this process was started for one: reports each program that fails.
#[test]
fn batch_program() {
    let Some(first) = number("CONSORT_RANDOM_BATCH") else { return };
    for seed in first..number("CONSORT_RANDOM_END").unwrap_or(first) {
        match try_program(seed) {
            Ok(None) => println!("\nSKIPPED CONSORT_SEED={seed}"),
            Ok(Some(Outcome::Same)) => {}
            Ok(Some(Outcome::Rounded)) => println!("\nROUNDED CONSORT_SEED={seed}"),
            Err(error) => println!("\nFAILED CONSORT_SEED={seed}: {error}"),
        }
    }
    println!("\n{DONE}");
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}: expected a number, got {text:?}")))
}

/// Whether this process was started by another one of this test.
fn is_child() -> bool {
    number("CONSORT_RANDOM_RANK").or(number("CONSORT_RANDOM_BATCH")).is_some()
}

/// Takes the program of a seed, if it has one, through all stages, including ranks that are threads.
fn try_program(seed: u64) -> Result<Option<Outcome>, String> {
    let tried = catch_unwind(AssertUnwindSafe(|| {
        let Some(case) = Case::new(seed)? else { return Ok(None) };
        case.check_plans()?;
        case.run_on_threads().map(Some)
    }));
    tried.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(format!("panicked: {}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("?")))
    })
}

/// The outcomes of many programs.
#[derive(Default)]
struct Tally {
    tried: u64,
    rounded: u64,
    skipped: u64,
    failures: Vec<String>,
    said: Option<Instant>,
}

impl Tally {
    /// Adds the output of a batch, without that of the test harness.
    fn add(&mut self, batch: &Range<u64>, said: &str) {
        self.tried += batch.end - batch.start;
        let lines = |word: &str| said.lines().filter(|line| line.starts_with(word)).count() as u64;
        self.rounded += lines("ROUNDED ");
        self.skipped += lines("SKIPPED ");
        self.failures.extend(said.split("\nFAILED ").skip(1).map(|failure| failure.trim_end().to_string()));
        if !said.contains(DONE) {
            self.failures.push(format!("programs {batch:?} ended badly\n{said}"));
        }
    }
}

/// Tries batches of programs on several threads, and reports progress every few seconds. A batch is a process of
/// its own: a crash does not affect the others, and its memory is freed.
fn try_all(
    what: &str,
    batches: &[Range<u64>],
    at_once: usize,
    f: impl Fn(&Range<u64>) -> String + Sync,
) -> Tally {
    let all: u64 = batches.iter().map(|batch| batch.end - batch.start).sum();
    let (start, next, tally) = (Instant::now(), AtomicUsize::new(0), Mutex::new(Tally::default()));
    let work = || {
        while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
            let said = f(batch);
            let mut tally = tally.lock().unwrap();
            let known = tally.failures.len();
            tally.add(batch, &said);
            for failure in &tally.failures[known..] {
                println!("{what}: {}", failure.lines().next().unwrap_or(""));
            }
            if tally.said.is_none_or(|said| said.elapsed() > Duration::from_secs(5)) {
                tally.said = Some(Instant::now());
                let failed = tally.failures.len();
                println!("{what}: {} of {all} in {:.0?}, {failed} failed", tally.tried, start.elapsed());
            }
        }
    };
    thread::scope(|scope| (0..at_once).for_each(|_| drop(scope.spawn(work))));
    let tally = tally.into_inner().unwrap();
    let Tally { rounded, skipped, .. } = tally;
    let failed = tally.failures.len();
    println!(
        "{what}: {all} programs in {:.1?}, {failed} failed, {rounded} rounded otherwise, {skipped} seeds without a gradient",
        start.elapsed()
    );
    assert!(failed == 0, "{failed} of {all} failed\n{}", tally.failures.join("\n\n"));
    tally
}

/// Runs a batch in a process of its own; returns its output.
fn try_batch(batch: &Range<u64>) -> String {
    let own = std::env::current_exe().unwrap();
    let output = Command::new(own)
        .args(["--exact", "batch_program", "--nocapture"])
        .env("CONSORT_RANDOM_BATCH", batch.start.to_string())
        .env("CONSORT_RANDOM_END", batch.end.to_string())
        .output()
        .unwrap();
    [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat()
}

#[test]
fn every_stage_keeps_the_results() {
    if is_child() {
        return;
    }
    if let Some(seed) = number("CONSORT_SEED") {
        println!("{:?}", try_program(seed).unwrap_or_else(|error| panic!("CONSORT_SEED={seed}: {error}")));
        return;
    }
    let count = number("CONSORT_PROGRAMS").unwrap_or(PROGRAMS);
    let batches = |all: Range<u64>| {
        let firsts = all.clone().step_by(BATCH as usize);
        firsts.map(move |first| first..all.end.min(first + BATCH))
    };
    let gradients = GRADIENTS..GRADIENTS + count.div_ceil(4);
    let batches: Vec<Range<u64>> = batches(0..count).chain(batches(gradients.clone())).collect();
    // Ranks are threads that mostly wait.
    let at_once = thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2));
    let Tally { tried, rounded, skipped, .. } = try_all("threads", &batches, at_once, try_batch);
    assert!(2 * skipped <= gradients.end - gradients.start, "{skipped} seeds without a gradient");
    assert!(rounded <= 1 + tried / 500, "{rounded} of {tried} results are off");
}

#[test]
fn processes_give_the_same() {
    if is_child() {
        return;
    }
    let count = number("CONSORT_PROGRAMS").unwrap_or(PROGRAMS).div_ceil(ONE_IN);
    let several = |seed: &u64| case::ranks(*seed).is_some_and(|ranks| (2..=4).contains(&ranks));
    let first = |from: u64, count: u64| (from..).filter(several).take(count as usize);
    let seeds: Vec<u64> = match number("CONSORT_SEED") {
        Some(seed) => Some(seed).filter(several).into_iter().collect(),
        None => first(0, count).chain(first(GRADIENTS, count.div_ceil(2))).collect(),
    };
    let jobs: Vec<Range<u64>> = seeds.into_iter().map(|seed| seed..seed + 1).collect();
    try_all("processes", &jobs, 1, |job| match job::run(job.start, case::ranks(job.start).unwrap_or(0)) {
        Ok(()) => DONE.to_string(),
        Err(error) => format!("\nFAILED CONSORT_SEED={}: {error}\n{DONE}", job.start),
    });
}
