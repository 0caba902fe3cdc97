//! A rank of our team: follows the protocol of `team.rs`.

use std::io::{BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use consort_comm::{Group, init, spawn_with_heap};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use super::live::{LIMIT, Live};
use super::ops::Op;
use crate::report::{Machine, Report, wrong};

/// The name of the entry that becomes a rank under test. It is not for users.
pub(crate) const WORKER: &str = "__bench";

#[derive(Debug, clap::Args)]
pub(crate) struct WorkerArgs {
    /// Bytes of each heap.
    #[arg(long)]
    heap: usize,
    /// So many ranks as threads of this process.
    #[arg(long)]
    local: Option<usize>,
    socket: String,
}

/// Serves until the connection ends.
pub(crate) fn run_worker(args: &WorkerArgs) -> anyhow::Result<Report> {
    let served = match args.local {
        Some(n) => {
            let all = spawn_with_heap(n, args.heap, |group| serve(group, false, &args.socket));
            all.into_iter().collect::<anyhow::Result<()>>()
        }
        None => {
            let world = init()?;
            let group = world.group(args.heap, Duration::from_secs(30))?;
            serve(group, world.mpi().is_some(), &args.socket)
        }
    };
    served.map_err(|error| Machine(format!("{error:#}")))?;
    Ok(Report::fine(String::new()))
}

fn serve(group: Group, is_mpi: bool, socket: &str) -> anyhow::Result<()> {
    let (rank, n) = (group.rank(), group.size());
    let stream =
        SocketAddr::from_abstract_name(socket).and_then(|address| UnixStream::connect_addr(&address));
    let stream = stream.context("bench: cannot connect")?;
    let mut lines = BufReader::new(stream.try_clone().context("bench: cannot connect")?);
    let mut answers = stream;
    // After the group is created, which counts the cores.
    let cores = Cores::of_this_process()?;
    cores.pin(rank, n)?;
    let mut live = Live::new(group, is_mpi)?;
    let mut answer = format!("{rank} {n}\n");
    loop {
        // The process that asked may have gone.
        if answers.write_all(answer.as_bytes()).is_err() {
            return Ok(());
        }
        let mut line = String::new();
        if !lines.read_line(&mut line).is_ok_and(|len| len > 0) {
            return Ok(());
        }
        match obey(&mut live, &cores, (rank, n), &line) {
            Ok((spent, cpu)) => answer = format!("{} {}\n", spent.as_nanos(), cpu.as_nanos()),
            Err(error) => {
                let text = format!("{error:#}").replace('\n', ";");
                let _ = answers.write_all(format!("error {text}\n").as_bytes());
                return Err(error);
            }
        }
    }
}

/// Executes a command; returns the elapsed time and the CPU time of this thread.
fn obey(
    live: &mut Live,
    cores: &Cores,
    (rank, n): (usize, usize),
    line: &str,
) -> anyhow::Result<(Duration, Duration)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [kind, op, bytes, iterations] = words[..] else {
        bail!(wrong("", "four words", format!("`{}`", line.trim())))
    };
    let bytes: usize = bytes.parse().context("bytes")?;
    let iterations: u64 = iterations.parse().context("iterations")?;
    if kind == "line" {
        // Two ranks on one core would measure the scheduler.
        cores.pin(rank, cores.0.len())?;
        live.meet()?;
        let spent = live.probe()?.line(iterations, Instant::now() + LIMIT);
        cores.pin(rank, n)?;
        return Ok((spent?, Duration::ZERO));
    }
    let op = Op::named(op).with_context(|| format!("no operation `{op}`"))?;
    if kind == "prepare" {
        live.prepare(op, bytes)?;
        return Ok(Default::default());
    }
    let mut cpu = Duration::ZERO;
    let mut measured = Duration::ZERO;
    // The first run finds cache lines where other work has left them, so it does not count.
    for (counts, iterations) in [(false, 1), (true, iterations)] {
        live.meet()?;
        let (start, cpu_start) = (Instant::now(), cpu_time());
        let bound = match kind {
            "op" => live.run(op, iterations).map(|()| None)?,
            "base" => live.run_base(op, iterations).map(|()| None)?,
            "bound" if counts => Some(live.run_bound(op, iterations)?),
            "bound" => None,
            _ => bail!(wrong("", "op, base, bound, line or prepare", format!("`{kind}`"))),
        };
        (measured, cpu) = (bound.unwrap_or_else(|| start.elapsed()), cpu_time() - cpu_start);
    }
    Ok((measured, cpu))
}

/// The CPU time of this thread.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The cores that this process may use.
pub(super) struct Cores(Vec<usize>);

impl Cores {
    pub(super) fn of_this_process() -> anyhow::Result<Cores> {
        let set = sched_getaffinity(None).context("bench: cannot read the CPU affinity")?;
        Ok(Cores((0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()))
    }

    /// Pins each of `ranks` ranks to a core of its own if there are enough, and leaves it to the system otherwise.
    pub(super) fn pin(&self, rank: usize, ranks: usize) -> anyhow::Result<()> {
        let mut set = CpuSet::new();
        match self.0.get(rank) {
            Some(core) if ranks <= self.0.len() => set.set(*core),
            _ => self.0.iter().for_each(|core| set.set(*core)),
        }
        sched_setaffinity(None, &set).context("bench: cannot set the CPU affinity")
    }
}
