//! `consort bench`: how fast operations and the launcher are, beside what the machine and a peer need.
//!
//! `comm` has two teams of ranks, ours (`worker.rs`, `live.rs`) and the peer's (`benches/peer_mpi.c`), that obey one
//! protocol (`team.rs`). `points.rs` lets them take turns, `figures.rs` makes figures of the samples, `table.rs` shows
//! them. `launch.rs` times the start of a job.

mod figures;
mod launch;
mod live;
mod ops;
mod options;
mod points;
mod process;
mod table;
mod team;
mod worker;

use crate::report::Report;

pub(crate) use worker::{WORKER, WorkerArgs, run_worker};

/// Measure operations between ranks, or the launcher
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Comm(options::CommArgs),
    Launch(launch::Args),
}

/// Runs the subcommand. Figures are written as they come, and do not wait for the report.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    match &args.what {
        What::Comm(args) => points::run(&args.check()?),
        What::Launch(args) => launch::run(args),
    }
}
