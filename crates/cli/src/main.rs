//! The `consort` command line: reads the arguments, runs a subcommand, and turns its report into output and
//! an exit code. One file for each subcommand.
//!
//! Exit codes: 0 fine, 1 the program, the check or the arguments are wrong, 2 consort or the machine failed.
#![forbid(unsafe_code)]

mod bench;
mod check;
mod demo;
mod doctor;
mod exec;
mod explain;
mod files;
mod modes;
mod mpirun;
mod ops;
mod opt;
mod report;
mod run;
mod run_hosts;
mod source;

use std::ffi::OsString;
use std::io::{ErrorKind, Write, stderr, stdout};
use std::panic::{UnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use report::{Machine, Report};

#[derive(Parser)]
#[command(name = "consort", version, about = env!("CARGO_PKG_DESCRIPTION"))]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Ops(ops::Args),
    Opt(opt::Args),
    Check(check::Args),
    Explain(explain::Args),
    Exec(exec::Args),
    Run(run::Args),
    Demo(demo::Args),
    Bench(bench::Args),
    Doctor(doctor::Args),
    #[command(name = exec::EXEC, hide = true)]
    ExecRank(exec::RankArgs),
    #[command(name = bench::WORKER, hide = true)]
    BenchRank(bench::WorkerArgs),
    #[command(name = bench::START, hide = true)]
    StartRank,
    #[command(name = bench::EAGER, hide = true)]
    EagerRank(bench::EagerArgs),
    #[command(name = bench::PROGRAMS, hide = true)]
    ProgramsRank(bench::ProgramsArgs),
    #[command(name = demo::DEMO, hide = true)]
    DemoRank(demo::DemoArgs),
    #[command(name = demo::TRAIN, hide = true)]
    TrainRank(demo::TrainArgs),
    #[command(name = bench::TRAIN, hide = true)]
    BenchTrainRank(bench::TrainArgs),
    #[command(name = bench::COMPILE, hide = true)]
    CompileRank(bench::CompileArgs),
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    if let [_, entry, rest @ ..] = &arguments[..]
        && entry == run::ENTRY
    {
        // Every rank takes this path, which avoids building the parser of all subcommands.
        return end(|| run::run_entry(rest));
    }
    match Cli::try_parse_from(&arguments) {
        Ok(cli) => end(|| run(cli.command)),
        Err(error) => {
            // clap's own exit code for wrong arguments is 2, which means a failure of the machine here.
            let _ = error.print();
            ExitCode::from(u8::from(error.use_stderr()))
        }
    }
}

/// Runs something, writes its report, and returns its exit code.
fn end(run: impl FnOnce() -> anyhow::Result<Report> + UnwindSafe) -> ExitCode {
    let outcome = catch_unwind(run)
        .unwrap_or_else(|_| Err(Machine("consort panicked; this is a defect of consort".into()).into()));
    let report = outcome.unwrap_or_else(|error| Report::failed(&error));
    let mut code = report.code;
    if let Err(error) = stdout().write_all(report.text.as_bytes()).and_then(|()| stdout().flush())
        // A closed pipe is no error: the reader has stopped.
        && error.kind() != ErrorKind::BrokenPipe
    {
        let _ = writeln!(stderr(), "error: cannot write to the standard output: {error}");
        code = report::MACHINE;
    }
    // A failure to write to the standard error cannot be reported.
    let _ = stderr().write_all(report.notes.as_bytes());
    ExitCode::from(code)
}

fn run(command: Option<Command>) -> anyhow::Result<Report> {
    match command {
        None => Ok(Report::fine(Cli::command().render_help().to_string())),
        Some(Command::Ops(args)) => ops::run(&args),
        Some(Command::Opt(args)) => opt::run(&args),
        Some(Command::Check(args)) => check::run(&args),
        Some(Command::Explain(args)) => explain::run(&args),
        Some(Command::Exec(args)) => exec::run(&args),
        Some(Command::Run(args)) => run::run(args),
        Some(Command::Doctor(args)) => doctor::run(&args),
        Some(Command::ExecRank(args)) => exec::run_rank(&args),
        Some(Command::Bench(args)) => run::forwarding("bench", || bench::run(&args)),
        Some(Command::BenchRank(args)) => bench::run_worker(&args),
        Some(Command::StartRank) => bench::run_start(),
        Some(Command::EagerRank(args)) => bench::run_eager_rank(&args),
        Some(Command::ProgramsRank(args)) => bench::run_programs_rank(&args),
        Some(Command::Demo(args)) => run::forwarding("demo", || demo::run(&args)),
        Some(Command::DemoRank(args)) => demo::run_rank(&args),
        Some(Command::BenchTrainRank(args)) => bench::run_train_rank(args),
        Some(Command::TrainRank(args)) => demo::run_train_rank(&args),
        Some(Command::CompileRank(args)) => bench::run_compile_rank(&args),
    }
}
