//! `consort bench eager`: tensors against raw group operations, plain loops, memory bandwidth and a peer.
//!
//! Two ranks do the measuring (`eager_cases.rs`); this starts them and shows their figures.

use std::time::Duration;

use super::ranks::{Start, figures_of};
use super::table::time;
use crate::report::Report;

const EXAMPLES: &str = "\
Each case alternates with its limit in one run: `ratio` is the time over that of the limit, the median of all pairs. Limits
are the raw operation of a group (plus a copy if the tensor is shared), a plain loop, a copy of the bytes that must move,
the matrix product alone, and numpy if python3 has it.

Examples:
  consort bench eager
  consort bench eager --cases add,softmax --json";

/// Measure eager tensors against raw group operations, plain loops and memory bandwidth
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Time per case
    #[arg(long, value_name = "SECS", default_value_t = 0.5)]
    seconds: f64,
    /// Only cases whose names begin with one of these
    #[arg(long, value_name = "NAME,..", default_value = "")]
    cases: String,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// How long all cases may take.
const LIMIT: Duration = Duration::from_secs(600);

/// Starts the ranks and shows what they measured.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    let figures = figures_of(
        &Start { entry: super::EAGER, ranks: 2, mpirun: None },
        args.seconds,
        &args.cases,
        &[],
        LIMIT,
    )?;
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
