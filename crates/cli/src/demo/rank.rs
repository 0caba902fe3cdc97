//! A rank of `consort demo`: runs the ways of a program in turns, and says what it found.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use consort::{Explanation, Init, Mesh, Reduce, Result, Tensor};
use serde_json::json;

use super::Which;
use super::cases;
use crate::bench::{median, write_out};
use crate::programs::source;
use crate::report::{Machine, Report};

/// The name of the entry that becomes a rank. It is not for users.
pub(crate) const DEMO: &str = "__demo";

#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    #[arg(value_enum)]
    which: Which,
    #[arg(long)]
    small: bool,
}

/// A way to run a program.
pub(crate) struct Way {
    pub(crate) mode: &'static str,
    /// One step.
    pub(crate) step: Box<dyn FnMut() -> Result<()>>,
    /// Where it is compiled, what of it was.
    pub(crate) explain: Option<Box<dyn Fn() -> Explanation>>,
}

/// A program and its ways.
pub(crate) struct Case {
    pub(crate) ways: Vec<Way>,
    /// What a step makes so many of.
    pub(crate) unit: &'static str,
    pub(crate) per_step: f64,
    /// How many steps there are until a way does nothing new.
    pub(crate) warm: usize,
    /// The most by which a way differs from one rank, and by which it may.
    pub(crate) difference: f64,
    pub(crate) allowed: f64,
}

/// How long ranks wait for one another.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How often each way is measured, in turns, and for how long.
const ROUNDS: usize = 5;
const ROUND_SECONDS: f64 = 0.4;

/// Runs the program; rank 0 says what came of it.
pub(crate) fn run_rank(args: &DemoArgs) -> anyhow::Result<Report> {
    let run = || -> Result<bool> {
        let mesh = Init::new().timeout(TIMEOUT).start()?;
        let rank = Rank { first: mesh.number(&mesh.rank())? == 0, mesh, small: args.small };
        rank.say(&json!({ "done": 0.05, "doing": "comparing with one rank" }));
        let case = match args.which {
            Which::Tp => cases::tp(&rank.mesh, args.small)?,
            Which::Ring => cases::ring(&rank.mesh, args.small)?,
            Which::Halo => cases::halo(&rank.mesh, args.small)?,
            Which::Conv => cases::conv(&rank.mesh, args.small)?,
            Which::Moe => cases::moe(&rank.mesh, args.small)?,
        };
        rank.measure(args.which, case)
    };
    let good = run().map_err(|error| Machine(format!("{error}")))?;
    Ok(Report::checked(String::new(), good))
}

struct Rank {
    mesh: Mesh,
    first: bool,
    small: bool,
}

/// What a way did in all rounds.
#[derive(Default)]
struct Measured {
    seconds: Vec<f64>,
    steps: usize,
    copied: u64,
    /// Programs that were compiled after it was warm.
    new_graphs: u64,
}

impl Rank {
    fn say(&self, value: &serde_json::Value) {
        if self.first {
            write_out(&format!("{value}\n"));
        }
    }

    /// The largest of the ranks' numbers.
    fn largest(&self, number: f64) -> Result<f64> {
        self.mesh.all_reduce(Tensor::from_slice(&[number], &[1])?, Reduce::Max)?.item()
    }

    fn measure(&self, which: Which, mut case: Case) -> Result<bool> {
        let difference = self.largest(case.difference)?;
        let mut steps = Vec::new();
        for way in &mut case.ways {
            self.say(&json!({ "done": 0.2, "doing": format!("warming up {}", way.mode) }));
            (0..case.warm).try_for_each(|_| (way.step)())?;
            let start = Instant::now();
            (way.step)()?;
            let once = self.largest(start.elapsed().as_secs_f64())?;
            let seconds = if self.small { 0.0 } else { ROUND_SECONDS };
            steps.push(((seconds / once) as usize).clamp(2, 5000));
        }
        let mut all: Vec<Measured> = case.ways.iter().map(|_| Measured::default()).collect();
        for round in 0..ROUNDS {
            for ((way, steps), measured) in case.ways.iter_mut().zip(&steps).zip(&mut all) {
                let done = 0.3 + 0.7 * (round as f64) / ROUNDS as f64;
                self.say(&json!({ "done": done, "doing": format!("measuring {}", way.mode) }));
                let before = self.counts(way);
                self.mesh.barrier()?;
                let start = Instant::now();
                (0..*steps).try_for_each(|_| (way.step)())?;
                measured.seconds.push(self.largest(start.elapsed().as_secs_f64())? / *steps as f64);
                let after = self.counts(way);
                measured.steps += steps;
                measured.copied += after.0 - before.0;
                measured.new_graphs += after.1 - before.1;
            }
        }
        let mut good = difference <= case.allowed;
        for (way, measured) in case.ways.iter().zip(&all) {
            let seconds = median(measured.seconds.iter().copied()).unwrap_or(f64::NAN);
            let explained = way.explain.as_ref().map(|explain| explain());
            let breaks = explained.as_ref().map(breaks);
            let sites: Vec<String> = explained.as_ref().map(sites).unwrap_or_default();
            // Every step of a compiled program enters one graph, and one more after each break.
            let graphs = breaks.map(|breaks| breaks + 1);
            if way.mode == "traced" {
                good &= breaks == Some(0) && measured.new_graphs == 0;
            }
            let memory =
                explained.as_ref().and_then(|all| all.graphs.iter().map(|graph| graph.peak_bytes).max());
            self.say(&json!({
                "demo": which.name(), "mode": way.mode, "ranks": self.mesh.size(), "unit": case.unit,
                "per_second": round(case.per_step / seconds), "ms": round(seconds * 1e3),
                "graphs": graphs, "breaks": breaks, "break_lines": sites, "new_graphs": measured.new_graphs,
                "copied_bytes": measured.copied / measured.steps.max(1) as u64, "memory_bytes": memory,
                "difference": difference, "allowed": case.allowed,
            }));
        }
        self.mesh.barrier()?;
        Ok(good)
    }

    /// Bytes copied so far, and programs compiled.
    fn counts(&self, way: &Way) -> (u64, u64) {
        let stats = way.explain.as_ref().map(|explain| explain().stats).unwrap_or_default();
        (self.mesh.copied_bytes() + stats.copied_bytes, stats.graphs)
    }
}

/// Breaks of one call: all compilations have as many.
fn breaks(explained: &Explanation) -> u64 {
    explained.stats.breaks / (1 + explained.stats.recompiles)
}

/// Where the breaks are, and how many at each place.
fn sites(explained: &Explanation) -> Vec<String> {
    let mut sites: BTreeMap<String, u64> = BTreeMap::new();
    for one in &explained.breaks {
        *sites
            .entry(format!("{} at {}:{}", one.op, source(one.site.file()), one.site.line()))
            .or_default() += 1;
    }
    let text =
        |(site, times): (String, u64)| format!("{site}, {}x", times / (1 + explained.stats.recompiles));
    sites.into_iter().map(text).collect()
}

/// Four digits that count.
fn round(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}
