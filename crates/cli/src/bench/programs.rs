//! `consort bench programs`: whole programs on two ranks, compiled, eager, and without what they communicate.
//!
//! The ranks do the measuring (`programs_cases.rs`); this starts them and shows their figures.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

use super::options::seconds;
use super::process::Process;
use super::table::{size, time};
use crate::report::{Machine, Report};

const EXAMPLES: &str = "\
The modes of a case take turns in one run; times are medians, on the slowest rank. `x` is the time over that of the case's
first mode. docs/bench.md says what each case is.

Examples:
  consort bench programs
  consort bench programs --cases tp_decode,halo --seconds 5 --json";

/// Measure whole programs on two ranks
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How long each case is sampled
    #[arg(long, value_name = "SECS", default_value_t = 3.0)]
    seconds: f64,
    /// Only cases whose names begin with one of these
    #[arg(long, value_name = "NAME,..", default_value = "")]
    cases: String,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Sizes for tests
    #[arg(long, hide = true)]
    small: bool,
}

/// How long all cases may take.
const LIMIT: Duration = Duration::from_secs(1800);

/// Starts the ranks and shows what they measured.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    if seconds(args.seconds).is_none() {
        bail!("bench: --seconds: expected a number above 0 and up to 3600, got {}", args.seconds);
    }
    let mut command = Command::new("/proc/self/exe");
    let seconds = args.seconds.to_string();
    command.args(["run", "-n", "2", "--", "/proc/self/exe", super::PROGRAMS, "--seconds", &seconds]);
    command.args(["--cases", &args.cases]);
    if args.small {
        command.arg("--small");
    }
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
    if args.json {
        return Ok(Report::fine(figures.iter().map(|figure| format!("{figure}\n")).collect()));
    }
    let mut text = format!(
        "{:<16} {:<16} {:>10} {:>7} {:>10} {:>7} {:>10} {:>4}\n",
        "case", "mode", "time", "x", "cpu", "breaks", "copied", "of"
    );
    let mut first = &Value::Null;
    for figure in &figures {
        if first["case"] != figure["case"] {
            first = figure;
        }
        let number = |figure: &Value, key: &str| figure[key].as_f64().unwrap_or(f64::NAN);
        text += &format!(
            "{:<16} {:<16} {:>10} {:>6.2}x {:>10} {:>7} {:>10} {:>4}\n",
            figure["case"].as_str().unwrap_or(""),
            figure["mode"].as_str().unwrap_or(""),
            time(1e3 * number(figure, "ms")),
            number(figure, "ms") / number(first, "ms"),
            time(1e3 * number(figure, "cpu_ms")),
            figure["breaks"].as_u64().map_or("-".to_string(), |breaks| breaks.to_string()),
            size(figure["copied_bytes"].as_u64().unwrap_or(0) as usize),
            figure["samples"].as_u64().unwrap_or(0),
        );
    }
    Ok(Report::fine(text))
}
