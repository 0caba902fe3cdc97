//! `consort bench comm`: the teams take turns on every operation and size.

use std::process::Command;
use std::time::{Duration, Instant};

use super::figures::{Cost, Mode, Sample, figures};
use super::ops::Op;
use super::options::{Options, RANKS, Transport};
use super::table::{Output, heading, row, summary};
use super::team::{Answer, Team};
use super::worker::WORKER;
use crate::report::{Machine, Report};

/// How long a loop should last, unless one operation takes longer.
const LOOP: Duration = Duration::from_millis(2);
/// The fewest and the most iterations of a loop. With fewer, ranks would not take turns as roots, and their skew at the
/// start would be a large part of a large operation.
const ITERATIONS: (u64, u64) = (4, 1 << 16);
/// The most samples of a figure.
const MAX_SAMPLES: usize = 500;
/// With fewer clear samples than this, the time is extended, at most by the factor `PATIENCE`.
const MIN_SAMPLES: usize = 5;
const PATIENCE: u32 = 4;
/// Round trips of a word in the probe of a cache line.
const LINE_ROUNDS: u64 = 1000;

/// Measures everything that was asked for.
pub(crate) fn run(options: &Options) -> anyhow::Result<Report> {
    let mut output = Output::new(options.json);
    let mut all = Vec::new();
    let mut open = true;
    for ranks in &options.ranks {
        let mut teams = Teams::start(options, *ranks)?;
        let gap = if all.is_empty() { "" } else { "\n" };
        open = open && output.text(&format!("{gap}{}", heading(options, *ranks)));
        for op in &options.ops {
            for bytes in &options.sizes {
                if !open {
                    // The reader closed the pipe: stop.
                    return Ok(Report::fine(String::new()));
                }
                let samples = teams.sample(*op, *bytes, options)?;
                let found = figures(*op, *ranks, *bytes, options.near, &samples);
                for figure in &found {
                    open = open && output.figure(&row(figure), figure, options.transport);
                }
                all.extend(found);
            }
        }
    }
    Ok(Report::fine(if options.json { String::new() } else { summary(&all) }))
}

/// Our team, and the peer's if there is one.
struct Teams {
    ours: Team,
    peer: Option<Team>,
}

impl Teams {
    fn start(options: &Options, ranks: usize) -> anyhow::Result<Teams> {
        let ours = machine(Team::start("consort", our_command(options, ranks), ranks))?;
        let peer = options.peer.as_ref().map(|peer| Team::start("peer", peer_command(peer, ranks), ranks));
        Ok(Teams { ours, peer: peer.transpose()? })
    }

    fn ask(&mut self, kind: &str, op: Op, bytes: usize, iterations: u64) -> anyhow::Result<Vec<Answer>> {
        machine(self.ours.ask(kind, op.name(), bytes, iterations))
    }

    /// The cost of an operation in some form: a loop with it less one without it.
    fn cost(&mut self, kind: &str, op: Op, bytes: usize, iterations: u64) -> anyhow::Result<Cost> {
        let with = self.ask(kind, op, bytes, iterations)?;
        let without = self.ask("base", op, bytes, iterations)?;
        Ok(Cost::of(op, iterations, &with, &without))
    }

    fn line(&mut self) -> anyhow::Result<f64> {
        let answers = machine(self.ours.ask("line", "-", 0, LINE_ROUNDS))?;
        let slowest = answers.iter().map(|answer| answer.nanos).fold(0.0, f64::max);
        Ok(slowest / 1e3 / (2 * LINE_ROUNDS) as f64)
    }

    /// Samples of one operation and size until the time is up.
    fn sample(&mut self, op: Op, bytes: usize, options: &Options) -> anyhow::Result<Vec<Sample>> {
        self.ask("prepare", op, bytes, 0)?;
        let iterations = calibrate(|iterations| self.ask("op", op, bytes, iterations))?;
        let mut peers = Vec::new();
        if let Some(peer) = &mut self.peer {
            for name in op.peer_names() {
                peer.ask("prepare", name, bytes, 0)?;
                let iterations = calibrate(|iterations| peer.ask("op", name, bytes, iterations))?;
                peers.push((*name, iterations));
            }
        }
        // Touches all memory once, before timing.
        self.cost("bound", op, bytes, iterations)?;
        let (start, mut samples) = (Instant::now(), Vec::new());
        // Large operations, and cores whose distance keeps changing, get more time to collect clear samples.
        let is_over = |samples: &[Sample]| {
            let clear = samples.iter().filter(|sample| sample.mode(options.near) != Mode::Mixed).count();
            let limit = if clear >= MIN_SAMPLES { options.time } else { options.time * PATIENCE };
            samples.len() >= MAX_SAMPLES || !samples.is_empty() && start.elapsed() >= limit
        };
        while !is_over(&samples) {
            let before = self.line()?;
            // The teams alternate in who begins, so that neither always follows the other.
            let first = if samples.len() % 2 == 1 { self.peer_cost(op, bytes, &peers)? } else { None };
            let ours = self.cost("op", op, bytes, iterations)?;
            let bound = self.cost("bound", op, bytes, iterations)?;
            let plain = op.plain().map(|plain| self.cost("op", plain, bytes, iterations)).transpose()?;
            let peer = if samples.len() % 2 == 1 { first } else { self.peer_cost(op, bytes, &peers)? };
            samples.push(Sample { lines: [before, self.line()?], ours, bound, plain, peer });
        }
        Ok(samples)
    }

    /// The best of the peer's variants of an operation.
    fn peer_cost(&mut self, op: Op, bytes: usize, names: &[(&str, u64)]) -> anyhow::Result<Option<Cost>> {
        let Some(peer) = &mut self.peer else { return Ok(None) };
        let mut best: Option<Cost> = None;
        for (name, iterations) in names {
            let with = peer.ask("op", name, bytes, *iterations)?;
            let without = peer.ask("base", name, bytes, *iterations)?;
            let cost = Cost::of(op, *iterations, &with, &without);
            best = Some(best.map_or(cost, |best| best.better(cost)));
        }
        Ok(best)
    }
}

/// The number of iterations that fill a loop. The first loops also warm up.
fn calibrate(mut run: impl FnMut(u64) -> anyhow::Result<Vec<Answer>>) -> anyhow::Result<u64> {
    let mut iterations = 1;
    for _ in 0..3 {
        let slowest = run(iterations)?.iter().map(|answer| answer.nanos).fold(1.0, f64::max);
        let fits = LOOP.as_nanos() as f64 / (slowest / iterations as f64);
        iterations = (fits as u64).clamp(ITERATIONS.0, ITERATIONS.1);
    }
    Ok(iterations)
}

/// An error of our own team is not the user's fault.
fn machine<T>(outcome: anyhow::Result<T>) -> anyhow::Result<T> {
    outcome.map_err(|error| Machine(format!("{error:#}")).into())
}

/// Not the path of this program, which may have been replaced since it started.
const SELF: &str = "/proc/self/exe";

fn our_command(options: &Options, ranks: usize) -> Command {
    let largest = options.sizes.iter().max().copied().unwrap_or(0);
    // Operand, result, and one more of each that peers still read. Pages of the heap are allocated on first use.
    let heap = (largest * ranks * 4 + (64 << 20)).to_string();
    let mut command = Command::new(SELF);
    match options.transport {
        Transport::Shm => {
            command.args(["run", "-n", &ranks.to_string(), "--", SELF, WORKER, "--heap", &heap])
        }
        Transport::Local => command.args([WORKER, "--heap", &heap, "--local", &ranks.to_string()]),
    };
    command
}

fn peer_command(peer: &str, ranks: usize) -> Command {
    let peer = peer.replace(RANKS, &ranks.to_string());
    let mut words = peer.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    command
}
