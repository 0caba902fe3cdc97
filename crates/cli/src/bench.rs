//! `consort bench`: the speed of operations and of the launcher, against the limits of the machine and a peer.
//!
//! `comm` runs two teams of ranks, ours (`worker.rs`, `live.rs`) and the peer's (`benches/peer_mpi.c`), that follow one
//! protocol (`team.rs`). `points.rs` lets them take turns, `figures.rs` computes figures from the samples, `table.rs`
//! prints them. `launch.rs` times the start of a job, `eager.rs` tensors against the operations beneath them,
//! `programs.rs` whole programs, `train.rs` steps of training, `compile.rs` compiled functions against eager ones.

mod compile;
mod compile_cases;
mod compile_scale;
mod eager;
mod eager_cases;
mod figures;
mod launch;
mod live;
mod ops;
mod options;
mod points;
mod process;
mod programs;
mod programs_cases;
mod ranks;
mod table;
mod team;
mod tp_block;
mod train;
mod train_cases;
mod train_memory;
mod worker;

use crate::report::Report;

pub(crate) use compile_cases::{COMPILE, CompileArgs, run_compile_rank};
pub(crate) use eager_cases::{EAGER, EagerArgs, run_eager_rank};
pub(crate) use figures::median;
pub(crate) use launch::{START, run_start};
pub(crate) use programs_cases::{PROGRAMS, ProgramsArgs, run_programs_rank};
pub(crate) use table::{size, write_out};
pub(crate) use train_cases::{TRAIN, TrainArgs, run_train_rank};
pub(crate) use worker::{WORKER, WorkerArgs, cpu_time, run_worker};

/// Measure communication, tensors, compiled functions, programs, training, or the launcher
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Comm(options::CommArgs),
    Compile(compile::Args),
    Eager(eager::Args),
    Launch(launch::Args),
    Programs(programs::Args),
    Train(train::Args),
}

/// Runs the subcommand. Prints each figure when it is measured, before the report.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    match &args.what {
        What::Comm(args) => points::run(&args.check()?),
        What::Compile(args) => compile::run(args),
        What::Eager(args) => eager::run(args),
        What::Launch(args) => launch::run(args),
        What::Programs(args) => programs::run(args),
        What::Train(args) => train::run(args),
    }
}
