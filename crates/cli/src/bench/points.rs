//! `consort bench comm`: the teams take turns on every operation and size.

use std::process::Command;
use std::time::{Duration, Instant};

use super::figures::{Cost, Mode, Sample, figures};
use super::ops::Op;
use super::options::{Options, Transport};
use super::table::{Output, heading, row, summary};
use super::team::Team;
use super::worker::WORKER;
use crate::mpirun::{SELF, over_mpi, words};
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
                    open = open && output.figure(&row(figure, options.transport), figure, options.transport);
                }
                all.extend(found);
            }
        }
    }
    Ok(Report::fine(if options.json { String::new() } else { summary(&all, options.transport) }))
}

/// Our team, and those beside it.
struct Teams {
    ours: Team,
    /// Over MPI: ours, but members compare every call.
    checked: Option<Team>,
    /// Over MPI: ranks that share memory, for what is measured by plain loops.
    shared: Option<Team>,
    peer: Option<Team>,
}

/// The peer's forms of an operation, with the iterations of a loop.
#[derive(Default)]
struct Peers {
    blocking: Vec<(&'static str, u64)>,
    nonblocking: Option<u64>,
}

impl Teams {
    fn start(options: &Options, ranks: usize) -> anyhow::Result<Teams> {
        let is_mpi = options.transport == Transport::Mpi;
        let ours = |transport, check| {
            let command = our_command(options, transport, ranks, check)?;
            machine(Team::start("consort", command, ranks))
        };
        let peer = options.peer.as_ref().map(|peer| {
            let words = words("bench: --peer", peer, ranks)?;
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]);
            Team::start("peer", command, ranks)
        });
        Ok(Teams {
            ours: ours(options.transport, "0")?,
            checked: is_mpi.then(|| ours(Transport::Mpi, "1")).transpose()?,
            shared: is_mpi.then(|| ours(Transport::Shm, "0")).transpose()?,
            peer: peer.transpose()?,
        })
    }

    /// The team that can measure by plain loops.
    fn shared(&mut self) -> &mut Team {
        self.shared.as_mut().unwrap_or(&mut self.ours)
    }

    fn line(&mut self) -> anyhow::Result<f64> {
        let answers = machine(self.shared().ask("line", "-", 0, LINE_ROUNDS))?;
        let slowest = answers.iter().map(|answer| answer.nanos).fold(0.0, f64::max);
        Ok(slowest / 1e3 / (2 * LINE_ROUNDS) as f64)
    }

    /// Prepares all teams for an operation; the iterations of our loops, and those of the peer's.
    fn prepare(&mut self, op: Op, bytes: usize) -> anyhow::Result<(u64, Peers)> {
        for team in [Some(&mut self.ours), self.checked.as_mut(), self.shared.as_mut()].into_iter().flatten()
        {
            machine(team.ask("prepare", op.name(), bytes, 0))?;
        }
        let iterations = machine(calibrate(&mut self.ours, "op", op.name(), bytes))?;
        let mut peers = Peers::default();
        if let Some(peer) = &mut self.peer {
            for name in op.peer_names() {
                peer.ask("prepare", name, bytes, 0)?;
                peers.blocking.push((name, calibrate(peer, "op", name, bytes)?));
            }
            if self.checked.is_some() {
                peers.nonblocking = Some(calibrate(peer, "nonblocking", op.same_call(), bytes)?);
            }
        }
        // Touches all memory once, before timing.
        machine(cost(self.shared(), "bound", (op, op.name()), bytes, iterations))?;
        Ok((iterations, peers))
    }

    /// Samples of one operation and size until the time is up.
    fn sample(&mut self, op: Op, bytes: usize, options: &Options) -> anyhow::Result<Vec<Sample>> {
        let (iterations, peers) = self.prepare(op, bytes)?;
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
            let is_second = samples.len() % 2 == 1;
            let first = if is_second { self.peer_costs(op, bytes, &peers)? } else { Default::default() };
            let of =
                |team: &mut Team, kind, op: Op| machine(cost(team, kind, (op, op.name()), bytes, iterations));
            let ours = of(&mut self.ours, "op", op)?;
            let checked = self.checked.as_mut().map(|team| of(team, "op", op)).transpose()?;
            let plain = op.plain().map(|plain| of(&mut self.ours, "op", plain)).transpose()?;
            let bound = of(self.shared(), "bound", op)?;
            let (peer, nonblocking) = if is_second { first } else { self.peer_costs(op, bytes, &peers)? };
            let lines = [before, self.line()?];
            samples.push(Sample { lines, ours, bound, plain, peer, nonblocking, checked });
        }
        Ok(samples)
    }

    /// The best of the peer's blocking calls for an operation, and its nonblocking one.
    fn peer_costs(
        &mut self,
        op: Op,
        bytes: usize,
        peers: &Peers,
    ) -> anyhow::Result<(Option<Cost>, Option<Cost>)> {
        let Some(peer) = &mut self.peer else { return Ok((None, None)) };
        let mut best: Option<Cost> = None;
        for (name, iterations) in &peers.blocking {
            let cost = cost(peer, "op", (op, name), bytes, *iterations)?;
            best = Some(best.map_or(cost, |best| best.better(cost)));
        }
        let same = (op, op.same_call());
        let nonblocking =
            peers.nonblocking.map(|iterations| cost(peer, "nonblocking", same, bytes, iterations));
        Ok((best, nonblocking.transpose()?))
    }
}

/// The cost of an operation in some form, by the team's name for it: a loop with it less one without it.
fn cost(
    team: &mut Team,
    kind: &str,
    (op, name): (Op, &str),
    bytes: usize,
    iterations: u64,
) -> anyhow::Result<Cost> {
    let with = team.ask(kind, name, bytes, iterations)?;
    let without = team.ask("base", name, bytes, iterations)?;
    Ok(Cost::of(op, iterations, &with, &without))
}

/// The number of iterations that fill a loop. The first loops also warm up.
fn calibrate(team: &mut Team, kind: &str, name: &str, bytes: usize) -> anyhow::Result<u64> {
    let mut iterations = 1;
    for _ in 0..3 {
        let answers = team.ask(kind, name, bytes, iterations)?;
        let slowest = answers.iter().map(|answer| answer.nanos).fold(1.0, f64::max);
        let fits = LOOP.as_nanos() as f64 / (slowest / iterations as f64);
        iterations = (fits as u64).clamp(ITERATIONS.0, ITERATIONS.1);
    }
    Ok(iterations)
}

/// An error of our own team is not the user's fault.
fn machine<T>(outcome: anyhow::Result<T>) -> anyhow::Result<T> {
    outcome.map_err(|error| Machine(format!("{error:#}")).into())
}

/// The command of our ranks; over MPI members compare their calls if `check` is 1.
fn our_command(
    options: &Options,
    transport: Transport,
    ranks: usize,
    check: &str,
) -> anyhow::Result<Command> {
    let largest = options.sizes.iter().max().copied().unwrap_or(0);
    // Operand, result, and one more of each that peers still read. Pages of the heap are allocated on first use.
    let heap = (largest * ranks * 4 + (64 << 20)).to_string();
    if transport == Transport::Mpi {
        let mut command = over_mpi("bench: --mpirun", &options.mpirun, ranks)?;
        command.args([WORKER, "--heap", &heap]).env("CONSORT_CHECK", check);
        return Ok(command);
    }
    let mut command = Command::new(SELF);
    match transport {
        Transport::Local => command.args([WORKER, "--heap", &heap, "--local", &ranks.to_string()]),
        _ => command.args(["run", "-n", &ranks.to_string(), "--", SELF, WORKER, "--heap", &heap]),
    };
    Ok(command)
}
