//! `consort bench programs`: whole programs on two ranks, compiled, eager, and without communication.
//!
//! The ranks measure (`programs_cases.rs`); this starts them, and peers in turns with them, and prints all figures.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::figures::median;
use super::process::Process;
use super::ranks::{Start, figures_of};
use super::table::{size, time};
use crate::report::{Machine, Report, wrong};

const EXAMPLES: &str = "\
The modes of a case alternate in one run; times are medians, on the slowest rank. `x` is the time relative to the case's
first mode. docs/bench.md describes the cases.

Examples:
  consort bench programs
  consort bench programs --cases tp_decode,halo --seconds 5 --json
  consort bench programs --cases halo --rounds 5 --peer 'halo_jacobi=mpirun -n 2 target/peer_halo'";

/// Measure whole programs on two ranks
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Time per case
    #[arg(long, value_name = "SECS", default_value_t = 3.0)]
    seconds: f64,
    /// Only cases whose names begin with one of these
    #[arg(long, value_name = "NAME,..", default_value = "")]
    cases: String,
    /// A command to compare a case with, split at spaces; it prints JSON objects with `ms` or `us`, one per line, and
    /// `mode` if it has several
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

/// How long all cases may take, or a peer.
const LIMIT: Duration = Duration::from_secs(1800);
pub(super) const MAX_ROUNDS: usize = 1000;

/// A command that measures a case with its own implementation.
pub(super) struct Peer {
    case: String,
    command: Vec<String>,
}

impl Peer {
    pub(super) fn new(case: &str, command: Vec<String>) -> Peer {
        Peer { case: case.to_string(), command }
    }

    pub(super) fn is_of(&self, case: &str) -> bool {
        self.case == case
    }

    pub(super) fn parse(text: &str) -> anyhow::Result<Peer> {
        let (case, command) = text.split_once('=').unwrap_or(("", ""));
        let command: Vec<String> = command.split_whitespace().map(String::from).collect();
        if case.is_empty() || command.is_empty() {
            bail!(wrong("bench: --peer", "CASE=COMMAND", format!("`{text}`")));
        }
        Ok(Peer::new(case, command))
    }

    /// The figures that it prints, of its own case unless they name another.
    pub(super) fn figures(&self) -> anyhow::Result<Vec<Value>> {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        let mut process = Process::start(command).context("bench: --peer")?;
        process.wait(LIMIT);
        if !process.end().is_some_and(|status| status.success()) {
            return Err(Machine(format!("bench: peer of {}: it failed{}", self.case, process.said())).into());
        }
        let figures: Vec<Value> = process.output().lines().filter_map(|line| self.figure(line)).collect();
        match figures.is_empty() {
            true => bail!(wrong(
                format!("bench: peer of {}", self.case),
                "a line with `ms` or `us`",
                format!("none{}", process.said())
            )),
            false => Ok(figures),
        }
    }

    fn figure(&self, line: &str) -> Option<Value> {
        let value: Value = serde_json::from_str(line).ok()?;
        let ms = value["ms"].as_f64().or_else(|| Some(value["us"].as_f64()? / 1e3))?;
        let name = |keys: &[&str]| keys.iter().find_map(|key| value[*key].as_str());
        Some(json!({
            "bench": "programs", "case": name(&["case"]).unwrap_or(&self.case), "ranks": value["ranks"],
            "mode": format!("peer:{}", name(&["mode", "variant"]).unwrap_or(&self.command[0])),
            "ms": ms, "samples": value["samples"],
        }))
    }
}

/// One figure for each case and mode, with the medians of these fields over all rounds; grouped by case.
pub(super) fn merged(all: Vec<Value>, fields: &[&str]) -> Vec<Value> {
    let mut groups: Vec<Vec<Value>> = Vec::new();
    for figure in all {
        let is = |other: &Value, keys: &[&str]| keys.iter().all(|key| other[*key] == figure[*key]);
        match groups.iter_mut().find(|group| is(&group[0], &["case", "mode"])) {
            Some(group) => group.push(figure),
            None => {
                let last = groups.iter().rposition(|group| is(&group[0], &["case"]));
                groups.insert(last.map_or(groups.len(), |last| last + 1), vec![figure]);
            }
        }
    }
    let merge = |group: Vec<Value>| {
        let mut first = group[0].clone();
        for key in fields.iter().filter(|key| group[0][**key].is_number()) {
            first[*key] = json!(median(group.iter().filter_map(|figure| figure[*key].as_f64())));
        }
        if first["samples"].is_number() {
            first["samples"] =
                json!(group.iter().filter_map(|figure| figure["samples"].as_u64()).sum::<u64>());
        }
        first
    };
    groups.into_iter().map(merge).collect()
}

/// Starts the ranks and shows what they measured.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    let more: &[&str] = if args.small { &["--small"] } else { &[] };
    let peers: Vec<Peer> = args.peers.iter().map(|text| Peer::parse(text)).collect::<Result<_, _>>()?;
    if !(1..=MAX_ROUNDS).contains(&args.rounds) {
        bail!(wrong("bench: --rounds", format!("a number from 1 to {MAX_ROUNDS}"), args.rounds));
    }
    let mut all = Vec::new();
    for _ in 0..args.rounds {
        all.extend(figures_of(
            &Start { entry: super::PROGRAMS, ranks: 2, mpirun: None },
            args.seconds,
            &args.cases,
            more,
            LIMIT,
        )?);
        for peer in &peers {
            all.extend(peer.figures()?);
        }
    }
    let figures = merged(all, &["ms", "cpu_ms"]);
    if args.json {
        return Ok(Report::fine(figures.iter().map(|figure| format!("{figure}\n")).collect()));
    }
    let mut text = format!(
        "{:<16} {:<18} {:>10} {:>7} {:>10} {:>7} {:>10} {:>5}\n",
        "case", "mode", "time", "x", "cpu", "breaks", "copied", "of"
    );
    let mut first = &Value::Null;
    for figure in &figures {
        if first["case"] != figure["case"] {
            first = figure;
        }
        let number = |figure: &Value, key: &str| figure[key].as_f64().unwrap_or(f64::NAN);
        text += &format!(
            "{:<16} {:<18} {:>10} {:>6.2}x {:>10} {:>7} {:>10} {:>5}\n",
            figure["case"].as_str().unwrap_or(""),
            figure["mode"].as_str().unwrap_or(""),
            time(1e3 * number(figure, "ms")),
            number(figure, "ms") / number(first, "ms"),
            figure["cpu_ms"].as_f64().map_or("-".to_string(), |ms| time(1e3 * ms)),
            figure["breaks"].as_u64().map_or("-".to_string(), |breaks| breaks.to_string()),
            figure["copied_bytes"].as_u64().map_or("-".to_string(), |bytes| size(bytes as usize)),
            figure["samples"].as_u64().unwrap_or(0),
        );
    }
    Ok(Report::fine(text))
}
