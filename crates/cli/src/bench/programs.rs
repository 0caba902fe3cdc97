//! `consort bench programs`: whole programs on two ranks, compiled, eager, and without what they communicate.
//!
//! The ranks do the measuring (`programs_cases.rs`); this starts them and shows their figures.

use std::time::Duration;

use serde_json::Value;

use super::ranks::figures_of;
use super::table::{size, time};
use crate::report::Report;

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
    let more: &[&str] = if args.small { &["--small"] } else { &[] };
    let figures = figures_of(super::PROGRAMS, 2, args.seconds, &args.cases, more, LIMIT)?;
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
