//! `consort bench compile`: compiled functions against eager ones, and against the targets.
//!
//! The ranks do the measuring (`compile_cases.rs`); this starts them and shows their figures.

use std::time::Duration;

use anyhow::bail;
use serde_json::Value;

use super::ranks::{Start, figures_of};
use super::table::{size, time};
use crate::report::{Report, wrong};

const EXAMPLES: &str = "\
The last column shows the targets, and `missed` for a target that is not met. docs/bench.md describes the cases.

Examples:
  consort bench compile
  consort bench compile --cases tp_,one_op --json
  consort bench compile --cases agree -n 8
  consort bench compile --cases one_op_comm --mpirun 'mpirun -n {ranks}'   a compiled call over MPI";

/// Measure compiled functions against eager ones
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Time per case
    #[arg(long, value_name = "SECS", default_value_t = 0.5)]
    seconds: f64,
    /// Only cases whose names begin with one of these
    #[arg(long, value_name = "NAME,..", default_value = "")]
    cases: String,
    /// Number of ranks, as processes
    #[arg(short = 'n', value_name = "RANKS", default_value_t = 2)]
    ranks: usize,
    /// The command that starts the ranks, which use MPI then, split at spaces; {ranks} becomes their number
    #[arg(long, value_name = "COMMAND")]
    mpirun: Option<String>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// How long all cases may take.
const LIMIT: Duration = Duration::from_secs(900);
/// The most ranks that are measured.
const MAX_RANKS: usize = 64;

/// The target of a field of a case: the largest value that passes.
const BARS: &[(&str, &str, f64)] = &[
    ("tp_brief", "compile_ms", 50.0),
    ("tp_brief", "peak_over_live", 1.05),
    ("tp_brief", "ratio", 1.0),
    ("tp_decode", "ratio", 1.0),
    ("tp_tiny", "ratio", 1.0),
    ("one_op", "overhead_us", 1.0),
    ("one_op_comm", "overhead_us", 1.0),
    ("b5_dead", "copied_bytes", 0.0),
    ("b5_needed", "copied_bytes", 4096.0),
    ("b6_in_place", "copied_bytes", 0.0),
    ("c2_ring", "copied_bytes", 0.0),
    ("a12_into", "copied_bytes", 0.0),
    ("ops_10k", "compile_ms", 5000.0),
    ("ops_100k", "compile_ms", 5000.0),
    ("ops_100k", "ratio", 12.0),
    ("agree", "agree_ms", 2.0),
];

/// Starts the ranks and shows what they measured.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    if !(1..=MAX_RANKS).contains(&args.ranks) {
        bail!(wrong("bench: -n", format!("a number from 1 to {MAX_RANKS}"), args.ranks));
    }
    let start = Start { entry: super::COMPILE, ranks: args.ranks, mpirun: args.mpirun.as_deref() };
    let figures = figures_of(&start, args.seconds, &args.cases, &[], LIMIT)?;
    if args.json {
        return Ok(Report::fine(figures.iter().map(|figure| format!("{figure}\n")).collect()));
    }
    let head = format!(
        "{:<12} {:>9} {:>9} {:>9} {:>8} {:>9}  wanted\n",
        "case", "compile", "call", "beside", "copied", "peak"
    );
    let has_targets = args.mpirun.is_none();
    Ok(Report::fine(head + &figures.iter().map(|figure| row(figure, has_targets)).collect::<String>()))
}

/// A row of the table; the targets are those of shared memory.
fn row(figure: &Value, has_targets: bool) -> String {
    let case = figure["case"].as_str().unwrap_or("");
    let shown = |key: &str, text: &dyn Fn(f64) -> String| figure[key].as_f64().map_or("-".to_string(), text);
    let us = |us: f64| time(us);
    let bytes = |bytes: f64| size(bytes as usize);
    let beside = if figure["eager_us"].is_number() { "eager_us" } else { "kernel_us" };
    let bars = BARS.iter().filter(|(of, _, _)| *of == case);
    let wanted: Vec<String> = bars
        .map(|(_, key, most)| {
            let got = figure[key].as_f64().unwrap_or(f64::NAN);
            match has_targets {
                true => format!("{key} {got} of {most}{}", if got <= *most { "" } else { " missed" }),
                false => format!("{key} {got}"),
            }
        })
        .collect();
    let row = format!(
        "{case:<12} {:>9} {:>9} {:>9} {:>8} {:>9}  {}",
        shown("compile_ms", &|ms| time(ms * 1e3)),
        shown("call_us", &us),
        shown(beside, &us),
        shown("copied_bytes", &bytes),
        shown("peak_bytes", &bytes),
        wanted.join(", "),
    );
    format!("{}\n", row.trim_end())
}
