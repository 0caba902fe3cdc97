//! `consort bench train`: steps of training, with and without communication, and beside a peer.
//!
//! The ranks do the measuring (`train_cases.rs`); this starts them, and peers in turns with them, and prints all figures.

use std::time::Duration;

use anyhow::bail;
use serde_json::{Value, json};

use super::programs::{MAX_ROUNDS, Peer, merged};
use super::ranks::{Start, figures_of};
use super::table::{ratio, size, time};
use crate::report::{Report, wrong};

const EXAMPLES: &str = "\
A step with communication and the same step without alternate in one run, and so do one with `recompute` and one without;
times are medians, on the slowest rank. `x` is the time over that of the column before it. docs/bench.md describes the cases.

Examples:
  consort bench train
  consort bench train --cases dp,zero -n 4 --batch 1 --adam --json
  consort bench train --cases dp --rounds 5 --peer 'dp=torchrun --standalone --nproc-per-node 2 benches/peer_ddp.py'";

/// Measure steps of training
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Time per case
    #[arg(long, value_name = "SECS", default_value_t = 2.0)]
    seconds: f64,
    /// Only cases whose names begin with one of these
    #[arg(long, value_name = "NAME,..", default_value = "")]
    cases: String,
    /// Number of ranks, as processes
    #[arg(short = 'n', value_name = "RANKS", default_value_t = 2)]
    ranks: usize,
    /// Rows of data of a rank
    #[arg(long, value_name = "ROWS", default_value_t = 64)]
    batch: usize,
    /// Adam; without it plain gradient descent, as the peers have
    #[arg(long)]
    adam: bool,
    /// A command to compare a case with, as in `bench programs`; of several variants, `ddp` counts
    #[arg(long = "peer", value_name = "CASE=COMMAND")]
    peers: Vec<String>,
    /// Number of rounds, alternating with the peers; figures are medians
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: usize,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Sizes for tests
    #[arg(long, hide = true)]
    small: bool,
}

/// How long all cases may take.
const LIMIT: Duration = Duration::from_secs(900);
/// The numbers of ranks that are measured: divisors of the width.
const RANKS: [usize; 4] = [1, 2, 4, 8];

/// Starts the ranks and shows what they measured.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    if !RANKS.contains(&args.ranks) {
        bail!(wrong("bench: -n", "1, 2, 4 or 8", args.ranks));
    }
    if args.batch == 0 {
        bail!(wrong("bench: --batch", "a number above 0", args.batch));
    }
    if !(1..=MAX_ROUNDS).contains(&args.rounds) {
        bail!(wrong("bench: --rounds", format!("a number from 1 to {MAX_ROUNDS}"), args.rounds));
    }
    let peers: Vec<Peer> = args.peers.iter().map(|text| Peer::parse(text)).collect::<Result<_, _>>()?;
    let batch = args.batch.to_string();
    let mut more = vec!["--batch", &batch];
    more.extend(args.small.then_some("--small"));
    more.extend(args.adam.then_some("--adam"));
    let start = Start { entry: super::TRAIN, ranks: args.ranks, mpirun: None };
    let mut all = Vec::new();
    for _ in 0..args.rounds {
        all.extend(figures_of(&start, args.seconds, &args.cases, &more, LIMIT)?);
        for peer in &peers {
            all.extend(peer.figures()?);
        }
    }
    let all = merged(all, &["ms", "no_collectives_ms", "kept_ms", "compile_ms"]);
    let is_peer = |figure: &Value| figure["mode"].as_str().is_some_and(|mode| mode.starts_with("peer:"));
    let (peers, mut figures): (Vec<Value>, Vec<Value>) = all.into_iter().partition(is_peer);
    for figure in &mut figures {
        let mut of_case = peers.iter().filter(|peer| peer["case"] == figure["case"]);
        let ddp = of_case.clone().find(|peer| peer["mode"] == "peer:ddp");
        figure["peer_ms"] = json!(ddp.or_else(|| of_case.next()).map(|peer| peer["ms"].clone()));
    }
    if args.json {
        return Ok(Report::fine(figures.iter().map(|figure| format!("{figure}\n")).collect()));
    }
    let mut text = format!(
        "{:<10} {:>10} {:>14} {:>6} {:>10} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}\n",
        "case",
        "step",
        "no collectives",
        "x",
        "peer",
        "x",
        "state",
        "peak",
        "weights",
        "saved",
        "copied",
        "compile"
    );
    for figure in &figures {
        let ms = |key: &str| figure[key].as_f64().map_or("-".to_string(), |ms| time(1e3 * ms));
        let bytes = |key: &str| figure[key].as_u64().map_or("-".to_string(), |bytes| size(bytes as usize));
        text += &format!(
            "{:<10} {:>10} {:>14} {:>6} {:>10} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}\n",
            figure["case"].as_str().unwrap_or(""),
            ms("ms"),
            ms("no_collectives_ms"),
            over(figure, "ms", "no_collectives_ms"),
            ms("peer_ms"),
            over(figure, "ms", "peer_ms"),
            bytes("state_bytes"),
            bytes("peak_bytes"),
            bytes("weights_bytes"),
            bytes("saved_bytes"),
            bytes("copied_bytes"),
            ms("compile_ms"),
        );
    }
    for figure in figures.iter().filter(|figure| figure["kept_ms"].is_number()) {
        let [saved, of] = ["saved_bytes", "kept_saved_bytes"]
            .map(|key| size(figure[key].as_u64().unwrap_or_default() as usize));
        text += &format!(
            "{}: {} of the time of the same step without it, {} of its saved activations ({saved} of {of})\n",
            figure["case"].as_str().unwrap_or(""),
            over(figure, "ms", "kept_ms"),
            over(figure, "saved_bytes", "kept_saved_bytes"),
        );
    }
    Ok(Report::fine(text))
}

/// One number of a figure over another, if it has both.
fn over(figure: &Value, key: &str, of: &str) -> String {
    match (figure[key].as_f64(), figure[of].as_f64()) {
        (Some(a), Some(b)) => ratio(a / b),
        _ => "-".to_string(),
    }
}
