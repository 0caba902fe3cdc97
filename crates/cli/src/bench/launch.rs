//! `consort bench launch`: how long an empty job takes, against a peer's.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::json;

use super::figures::median;
use super::options::seconds;
use super::process::Process;
use super::table::time;
use crate::mpirun::{SELF, words};
use crate::report::{Machine, Report};

const EXAMPLES: &str = "\
Examples:
  consort bench launch -n 2
  consort bench launch -n 2 --peer 'mpirun -n {ranks} true'
  consort bench launch --mpirun 'mpirun -n {ranks}' --peer 'mpirun -n {ranks} target/peer_start'";

/// Measure how long `consort run -n N -- true` takes, or an mpirun of ranks that connect, against a peer
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Number of ranks
    #[arg(short = 'n', long = "ranks", value_name = "N", default_value_t = 2)]
    ranks: usize,
    /// The command that starts our ranks in place of `consort run`, split at spaces; {ranks} becomes the number of ranks
    #[arg(long, value_name = "COMMAND")]
    mpirun: Option<String>,
    /// The peer's command for the same, split at spaces; {ranks} becomes the number of ranks
    #[arg(long, value_name = "COMMAND")]
    peer: Option<String>,
    /// Time to sample for
    #[arg(long, value_name = "SECS", default_value_t = 5.0)]
    seconds: f64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The name of the entry that becomes a rank and ends. It is not for users.
pub(crate) const START: &str = "__start";

/// What a program does whose ranks have nothing to do.
pub(crate) fn run_start() -> anyhow::Result<Report> {
    consort::init()?;
    Ok(Report::fine(String::new()))
}

/// How long one start may take.
const LIMIT: Duration = Duration::from_secs(30);
/// The most samples.
const MAX_SAMPLES: usize = 500;

/// Measures the launcher and the peer in turns.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    let limit = seconds(args.seconds)?;
    let ranks = args.ranks.to_string();
    let ours = match &args.mpirun {
        None => [SELF, "run", "-n", &ranks, "--", "true"].map(String::from).to_vec(),
        Some(mpirun) => {
            let program = std::env::current_exe().context("bench: cannot find this program")?;
            let mut ours = words("bench: --mpirun", mpirun, args.ranks)?;
            ours.extend([program.to_string_lossy().into_owned(), START.into()]);
            ours
        }
    };
    let peer = args.peer.as_ref().map(|peer| words("bench: --peer", peer, args.ranks)).transpose()?;
    let (start, mut samples) = (Instant::now(), Vec::new());
    while samples.is_empty() || start.elapsed() < limit && samples.len() < MAX_SAMPLES {
        let first = if samples.len() % 2 == 1 { peer.as_deref().map(once_peer).transpose()? } else { None };
        let mine = once(&ours).map_err(|error| Machine(format!("bench: consort: {error:#}")))?;
        let second = if samples.len() % 2 == 0 { peer.as_deref().map(once_peer).transpose()? } else { None };
        samples.push((mine, first.or(second)));
    }
    let us = median(samples.iter().map(|(mine, _)| *mine)).unwrap_or(f64::NAN);
    let peer_us = median(samples.iter().filter_map(|(_, peer)| *peer));
    let ratio = median(samples.iter().filter_map(|(mine, peer)| Some(mine / (*peer)?)));
    let more = median(samples.iter().filter_map(|(mine, peer)| Some(mine - (*peer)?)));
    if args.json {
        let mut object =
            json!({"bench": "launch", "ranks": args.ranks, "us": us.round(), "samples": samples.len()});
        if let (Some(peer_us), Some(ratio)) = (peer_us, ratio) {
            object["peer_us"] = json!(peer_us.round());
            object["ratio"] = json!((ratio * 1e3).round() / 1e3);
            object["more_us"] = json!(more.unwrap_or(f64::NAN).round());
        }
        return Ok(Report::fine(format!("{object}\n")));
    }
    let beside = match (peer_us, ratio) {
        (Some(peer_us), Some(ratio)) => {
            format!(", peer {}, {ratio:.2}x, {} more", time(peer_us), time(more.unwrap_or(f64::NAN)))
        }
        _ => String::new(),
    };
    Ok(Report::fine(format!(
        "launch, {} ranks: {}{beside} (median of {})\n",
        args.ranks,
        time(us),
        samples.len()
    )))
}

fn once_peer(command: &[String]) -> anyhow::Result<f64> {
    once(command).context("bench: peer")
}

/// Runs a command to its end; returns how long that took, in microseconds.
fn once(command: &[String]) -> anyhow::Result<f64> {
    let [name, arguments @ ..] = command else { bail!("expected a command") };
    let mut starter = Command::new(name);
    starter.args(arguments);
    let start = Instant::now();
    let mut process = Process::start(starter)?;
    let ended = process.wait(LIMIT);
    let spent = start.elapsed();
    let command = command.join(" ");
    match process.end() {
        Some(status) if status.success() => Ok(spent.as_secs_f64() * 1e6),
        Some(status) if ended => bail!("`{command}` ended with {status}{}", process.said()),
        _ => bail!("`{command}` did not end in {LIMIT:?}{}", process.said()),
    }
}
