//! `consort demo`: small programs on several ranks, compiled, with broken graphs, and eager: compares their results and
//! speed.
//!
//! Ranks are processes of this binary (`demo/rank.rs`, with the programs in `demo/cases.rs`). They report progress and
//! results as lines of JSON; this starts them and prints the reports.

mod bar;
mod cases;
mod rank;
mod summary;
mod train;
mod train_rank;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use clap::ValueEnum;
use serde_json::Value;

use crate::mpirun::{SELF, over_mpi, wrong_count};
use crate::report::{MACHINE, Machine, Report, wrong};

use bar::Bar;
pub(crate) use rank::{DEMO, DemoArgs, run_rank};
pub(crate) use train_rank::{TRAIN, TrainArgs, run_train_rank};

const EXAMPLES: &str = "\
Each program runs traced (compiled, collectives in the graph), broken (compiled, a graph break at every collective) and
eager, and is compared with a single rank. The exit code is 1 if they differ, 2 if the machine fails.

Examples:
  consort demo              a tensor parallel model generates tokens on 2 ranks
  consort demo ring -n 4    ring attention on 4 ranks
  consort demo halo --json  one JSON object per line
  consort demo --mpirun 'mpirun -n {ranks}'   over MPI
  consort demo train        trains a model in three ways, and kills a rank in each";

/// Run a small program on several ranks, compiled and eager, and compare the results
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The program to run
    #[arg(value_enum, default_value_t = Which::Tp)]
    which: Which,
    /// Number of ranks
    #[arg(short = 'n', value_name = "N", default_value_t = 2)]
    ranks: usize,
    /// The command that starts the ranks, which use MPI then, split at spaces; {ranks} becomes their number
    #[arg(long, value_name = "COMMAND")]
    mpirun: Option<String>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Sizes for tests
    #[arg(long, hide = true)]
    small: bool,
    /// train: kill a rank after this step [default: in the middle; 0: none]
    #[arg(long, value_name = "STEP")]
    kill: Option<u64>,
    /// Add an error to the difference, to test how it is reported
    #[arg(long, hide = true)]
    wrong: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Which {
    /// A Llama-shaped model generates tokens, tensor parallel
    Tp,
    /// Ring attention: the sequence is sharded, keys and values travel around the ring
    Ring,
    /// A stencil on a sharded grid, with halo exchange between neighbours
    Halo,
    /// A convolution of an image sharded by rows
    Conv,
    /// A mixture of experts, one per rank; a router decides where tokens go
    Moe,
    /// A Llama-shaped model learns a text: data parallel, ZeRO and tensor parallel
    Train,
}

impl Which {
    fn name(self) -> &'static str {
        match self {
            Which::Tp => "tp",
            Which::Ring => "ring",
            Which::Halo => "halo",
            Which::Conv => "conv",
            Which::Moe => "moe",
            Which::Train => "train",
        }
    }
}

/// The most ranks of a demo.
const MAX_RANKS: usize = 16;
/// How long it may take, in seconds.
const LIMIT: &str = "300";

/// Starts the ranks and prints their reports.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    if !(1..=MAX_RANKS).contains(&args.ranks) {
        bail!(wrong("demo: -n", format!("a number from 1 to {MAX_RANKS}"), args.ranks));
    }
    if args.which == Which::Train {
        return train::run(args);
    }
    if args.kill.is_some() {
        bail!(wrong("demo: --kill", "the demo `train`", args.which.name()));
    }
    let mut rank = vec![DEMO, args.which.name()];
    rank.extend(args.small.then_some("--small"));
    rank.extend(args.wrong.then_some("--wrong"));
    let mut found: Vec<Value> = Vec::new();
    let mut bar = Bar::new();
    let (code, said) = run_ranks(&rank, args, |value| match value["done"].as_f64() {
        Some(done) => bar.show(done, value["doing"].as_str().unwrap_or("")),
        None => found.push(value),
    })?;
    bar.clear();
    if code > 1 || found.is_empty() {
        return Err(failed(&format!("the ranks failed\n{}", said.trim_end())));
    }
    let text = match args.json {
        true => found.iter().map(|value| format!("{value}\n")).collect(),
        false => summary::text(args.which, args.ranks, &found),
    };
    // The ranks' own output is what CONSORT_LOG asked for.
    Ok(Report { notes: said, ..Report::checked(text, code == 0) })
}

fn failed(what: &str) -> anyhow::Error {
    Machine(format!("demo: {what}")).into()
}

/// Runs a hidden entry of this binary as ranks, and hands over each line of JSON that they print. Returns the exit code, and the
/// text of their standard error.
fn run_ranks(rank: &[&str], args: &Args, mut seen: impl FnMut(Value)) -> anyhow::Result<(u8, String)> {
    let mut command = match &args.mpirun {
        Some(mpirun) => over_mpi("demo: --mpirun", mpirun, args.ranks)?,
        None => {
            let mut command = Command::new(SELF);
            command.args(["run", "--timeout", LIMIT, "-n", &args.ranks.to_string(), "--", SELF]);
            command
        }
    };
    command.args(rank);
    // A process group of its own: a signal from the terminal reaches it once, through this process.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(|error| failed(&format!("cannot start the ranks: {error}")))?;
    let (out, errors) = (child.stdout.take(), child.stderr.take());
    let mut ran = None;
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = errors.map(|mut errors| errors.read_to_string(&mut text));
        text
    });
    for line in BufReader::new(out.context("demo: no output")?).lines() {
        let line = line.map_err(|error| failed(&format!("cannot read from the ranks: {error}")))?;
        let value = line.find('{').and_then(|at| serde_json::from_str::<Value>(&line[at..]).ok());
        let Some(value) = value else { continue };
        ran = ran.or(value["ranks"].as_u64());
        seen(value);
    }
    let status = child.wait().map_err(|error| failed(&format!("cannot wait for the ranks: {error}")))?;
    if let Some(ran) = ran.filter(|ran| *ran != args.ranks as u64) {
        bail!(wrong_count("demo: --mpirun", args.ranks, ran));
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(MACHINE);
    Ok((code, errors.join().unwrap_or_default()))
}
