//! Runs jobs of real processes with the built `consort`, and injects failures.
//!
//! The ranks are shells, or this test program itself: started with RANK_PROGRAM in the environment, the test
//! `rank_program` runs that part and all other tests are filtered out. Nothing here sleeps to synchronise: tests
//! wait for a line, a file or the end of a process, each with a deadline.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "run/data.rs"]
mod data;
#[path = "run/deadline.rs"]
mod deadline;
#[path = "run/failures.rs"]
mod failures;
#[path = "run/flight.rs"]
mod flight;
#[path = "run/hosted.rs"]
mod hosted;
#[path = "run/job.rs"]
mod job;
#[path = "run/limits.rs"]
mod limits;
#[path = "run/on_hosts.rs"]
mod on_hosts;
#[path = "run/output.rs"]
mod output;
#[path = "run/processes.rs"]
mod processes;
#[path = "run/rank.rs"]
mod rank;
#[path = "run/signals.rs"]
mod signals;
#[path = "run/strangers.rs"]
mod strangers;

/// The program of the ranks, if this process is one.
#[test]
fn rank_program() {
    if let Ok(part) = std::env::var("RANK_PROGRAM") {
        rank::play(&part);
    }
}
