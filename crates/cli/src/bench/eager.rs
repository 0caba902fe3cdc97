//! `consort bench eager`: tensors beside what they are made of: raw group operations, plain loops, memory, a peer.
//!
//! Two ranks do the measuring (`eager_cases.rs`); this starts them and shows their figures.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

use super::options::seconds;
use super::process::Process;
use super::table::time;
use crate::report::{Machine, Report};

const EXAMPLES: &str = "\
Each case alternates with its limit in one run: `ratio` is the time over the limit's, the median of all pairs. Limits are
the raw operation of a group (plus a copy where the tensor is shared), a plain loop, a copy of the bytes that must move,
the product of matrices alone, and numpy where python3 has it.

Examples:
  consort bench eager
  consort bench eager --cases add,softmax --json";

/// Measure tensors beside raw operations, plain loops and memory
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How long each case is sampled
    #[arg(long, value_name = "SECS", default_value_t = 0.5)]
    seconds: f64,
    /// Only cases whose names begin with one of these
    #[arg(long, value_name = "NAME,..", default_value = "")]
    cases: String,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// How long all cases may take.
const LIMIT: Duration = Duration::from_secs(600);

/// Starts the ranks and shows what they measured.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    if seconds(args.seconds).is_none() {
        bail!("bench: --seconds: expected a number above 0 and up to 3600, got {}", args.seconds);
    }
    let mut command = Command::new("/proc/self/exe");
    let seconds = args.seconds.to_string();
    command.args(["run", "-n", "2", "--", "/proc/self/exe", super::EAGER, "--seconds", &seconds]);
    command.args(["--cases", &args.cases]);
    let mut process = Process::start(command).map_err(|error| Machine(format!("bench: {error:#}")))?;
    process.wait(LIMIT);
    let status = process.end();
    let said = process.output();
    if !status.is_some_and(|status| status.success()) {
        return Err(Machine(format!("bench: the ranks failed{}", process.said())).into());
    }
    let objects = said.lines().filter_map(|line| line.find('{').map(|at| &line[at..]));
    let figures: Vec<Value> = objects
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .context("bench: a figure cannot be read")?;
    if figures.is_empty() {
        bail!("bench: --cases: no case begins with `{}`", args.cases);
    }
    let mut text = String::new();
    if !args.json {
        text += &format!("{:<28} {:>10} {:>10} {:>7}  beside\n", "case", "time", "limit", "ratio");
    }
    for figure in figures {
        if args.json {
            text += &format!("{figure}\n");
            continue;
        }
        let number = |key: &str| figure[key].as_f64().unwrap_or(f64::NAN);
        text += &format!(
            "{:<28} {:>10} {:>10} {:>7.3}  {}\n",
            figure["case"].as_str().unwrap_or(""),
            time(number("us")),
            time(number("limit_us")),
            number("ratio"),
            figure["beside"].as_str().unwrap_or("")
        );
    }
    Ok(Report::fine(text))
}
