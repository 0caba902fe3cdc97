//! `consort bench train`: steps of training, with and without communication, and beside a peer.
//!
//! The ranks do the measuring (`train_cases.rs`); this starts them, and peers in turns with them, and prints all figures.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::programs::{MAX_ROUNDS, Peer, merged};
use super::ranks::{Start, figures_of};
use super::table::{ratio, size, time};
use crate::report::{Report, wrong};

const EXAMPLES: &str = "\
A step with communication and the same step without alternate in one run, and so do one with `recompute` and one without;
times are medians, on the slowest rank. `x` is the time over that of the column before it. The last column shows the targets,
and `missed` for a target that is not met. In a checkout, `dp` is measured beside PyTorch if python3 has it. docs/bench.md
describes the cases.

Examples:
  consort bench train
  consort bench train --cases dp,zero -n 4 --batch 1 --adam --json
  consort bench train --cases dp --python VENV/bin/python
  consort bench train --cases dp --peer 'dp=chrt -r 1 torchrun --standalone --nproc-per-node 2 benches/peer_ddp.py'";

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
    /// The Python whose PyTorch is measured beside `dp` [default: python3, if it has PyTorch]
    #[arg(long, value_name = "PROGRAM")]
    python: Option<String>,
    /// A command to compare a case with, as in `bench programs`; of several variants, `ddp` counts
    #[arg(long = "peer", value_name = "CASE=COMMAND")]
    peers: Vec<String>,
    /// Number of rounds, alternating with the peers; figures are medians [default: 5 with a peer, else 1]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
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

/// The rounds if there is a peer.
const ROUNDS: usize = 5;

/// The peer of `dp`, in a checkout.
const SCRIPT: &str = "benches/peer_ddp.py";

/// The target of a field of a case, over another field if one is named: the largest value that passes.
const BARS: &[(&str, &str, &str, f64)] = &[
    ("dp", "ms", "no_collectives_ms", 1.1),
    ("dp", "ms", "peer_ms", 0.9),
    ("zero", "ms", "no_collectives_ms", 1.1),
    ("tp", "ms", "no_collectives_ms", 1.1),
    ("recompute", "ms", "kept_ms", 1.4),
    ("recompute", "saved_bytes", "kept_saved_bytes", 0.4),
    ("recompute", "compile_ms", "", 30.0),
    ("llama", "compile_ms", "", 30.0),
];
/// On this number of ranks `zero` has at most this part of the weights of `dp`, and one layer that is gathered.
const ZERO_BAR: (u64, f64) = (4, 0.3);

/// Starts the ranks and shows what they measured.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    if !RANKS.contains(&args.ranks) {
        bail!(wrong("bench: -n", "1, 2, 4 or 8", args.ranks));
    }
    if args.batch == 0 {
        bail!(wrong("bench: --batch", "a number above 0", args.batch));
    }
    if let Some(rounds) = args.rounds.filter(|rounds| !(1..=MAX_ROUNDS).contains(rounds)) {
        bail!(wrong("bench: --rounds", format!("a number from 1 to {MAX_ROUNDS}"), rounds));
    }
    let figures = measure(args)?;
    if args.json {
        return Ok(Report::fine(figures.iter().map(|figure| format!("{figure}\n")).collect()));
    }
    Ok(Report::fine(text(&figures)))
}

/// The medians of all rounds, each with that of its peer.
fn measure(args: &Args) -> anyhow::Result<Vec<Value>> {
    let mut peers: Vec<Peer> = args.peers.iter().map(|text| Peer::parse(text)).collect::<Result<_, _>>()?;
    if !peers.iter().any(|peer| peer.is_of("dp")) {
        peers.extend(torch(args)?);
    }
    let batch = args.batch.to_string();
    let mut more = vec!["--batch", &batch];
    more.extend(args.small.then_some("--small"));
    more.extend(args.adam.then_some("--adam"));
    let start = Start { entry: super::TRAIN, ranks: args.ranks, mpirun: None };
    let mut all = Vec::new();
    for _ in 0..args.rounds.unwrap_or(if peers.is_empty() { 1 } else { ROUNDS }) {
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
    Ok(figures)
}

/// The same step by PyTorch, if the Python that is named, or python3, has it; only for the steps that it does.
fn torch(args: &Args) -> anyhow::Result<Option<Peer>> {
    if args.adam || !args.cases.split(',').any(|start| "dp".starts_with(start)) {
        return Ok(None);
    }
    let python = args.python.as_deref().or((!args.small).then_some("python3"));
    let Some(python) = python else { return Ok(None) };
    if let Err(problem) = has_torch(python) {
        // Nobody asked for it.
        return if args.python.is_none() { Ok(None) } else { Err(problem) };
    }
    let rest = format!(
        "-m torch.distributed.run --standalone --nproc-per-node {} {SCRIPT} --seconds {} --batch {}",
        args.ranks, args.seconds, args.batch
    );
    let words = std::iter::once(python).chain(rest.split(' ')).map(String::from);
    Ok(Some(Peer::new("dp", words.collect())))
}

/// Fails unless a Python can run the peer here.
fn has_torch(python: &str) -> anyhow::Result<()> {
    if !Path::new(SCRIPT).exists() {
        bail!(wrong("bench: --python", format!("{SCRIPT} in this folder"), "none"));
    }
    let mut command = Command::new(python);
    command.args(["-c", "import torch.distributed as dist; assert dist.is_gloo_available()"]);
    let output = command.output().with_context(|| format!("bench: --python: cannot start `{python}`"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim_end().replace('\n', "\n  ");
        let got = format!("`{python}`\n  its output: {said}");
        bail!(wrong("bench: --python", "a Python that has PyTorch with gloo", got));
    }
    Ok(())
}

/// The table, and what `recompute` saves.
fn text(figures: &[Value]) -> String {
    let mut text = format!(
        "{:<10} {:>10} {:>14} {:>6} {:>10} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}  wanted\n",
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
    for figure in figures {
        let ms = |key: &str| figure[key].as_f64().map_or("-".to_string(), |ms| time(1e3 * ms));
        let bytes = |key: &str| figure[key].as_u64().map_or("-".to_string(), |bytes| size(bytes as usize));
        text += &format!(
            "{:<10} {:>10} {:>14} {:>6} {:>10} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}  {}\n",
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
            wanted(figure, figures).join(", "),
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
    text
}

/// The targets of a figure that were measured, and whether they are met.
fn wanted(figure: &Value, all: &[Value]) -> Vec<String> {
    let case = figure["case"].as_str().unwrap_or("");
    let verdict = |is_met: bool| if is_met { "" } else { " missed" };
    let mut wanted = Vec::new();
    for (_, key, over, most) in BARS.iter().filter(|(of, ..)| *of == case) {
        let beside = if over.is_empty() { Some(1.0) } else { figure[*over].as_f64() };
        let (Some(got), Some(beside)) = (figure[*key].as_f64(), beside) else { continue };
        let (got, slash) = (got / beside, if over.is_empty() { "" } else { "/" });
        wanted.push(format!("{key}{slash}{over} {got:.2} of {most}{}", verdict(got <= *most)));
    }
    let dp = all.iter().find(|other| other["case"] == "dp").map(|dp| &dp["weights_bytes"]);
    let (own, layer) = (figure["weights_bytes"].as_f64(), figure["layer_bytes"].as_f64());
    if let (Some(own), Some(layer), Some(dp)) = (own, layer, dp.and_then(Value::as_f64))
        && figure["ranks"] == ZERO_BAR.0
    {
        let most = ZERO_BAR.1 * dp + layer;
        wanted.push(format!("weights_bytes {own} of {most:.0}{}", verdict(own <= most)));
    }
    if let Some(copied) = figure["copied_bytes"].as_u64() {
        let reasons = figure["copies"].as_array().map_or(0, Vec::len);
        wanted.push(match reasons {
            0 => format!("copied_bytes {copied} of 0{}", verdict(copied == 0)),
            _ => format!("copied_bytes {copied} with reasons"),
        });
    }
    wanted
}

/// One number of a figure over another, if it has both.
fn over(figure: &Value, key: &str, of: &str) -> String {
    match (figure[key].as_f64(), figure[of].as_f64()) {
        (Some(a), Some(b)) => ratio(a / b),
        _ => "-".to_string(),
    }
}
