//! A rank of `consort demo`: runs the modes of a program in turns, and reports.

use std::collections::BTreeMap;
use std::time::Duration;

use consort::{Explanation, Init, Mesh, Result};
use serde_json::json;

use super::Which;
use super::cases;
use crate::bench::{median, write_out};
use crate::modes::{Measured, Mode, largest, round};
use crate::report::{Machine, Report};

/// The name of the entry that becomes a rank. It is not for users.
pub(crate) const DEMO: &str = "__demo";

#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    #[arg(value_enum)]
    which: Which,
    #[arg(long)]
    small: bool,
    #[arg(long)]
    wrong: bool,
}

/// A program and its modes.
pub(crate) struct Case {
    pub(crate) ways: Vec<Mode>,
    /// The unit of `per_step`: what a step produces.
    pub(crate) unit: &'static str,
    pub(crate) per_step: f64,
    /// The number of steps until a mode is warm.
    pub(crate) warm: usize,
    /// The largest difference of a mode from one rank, and the tolerance.
    pub(crate) difference: f64,
    pub(crate) allowed: f64,
}

/// How long ranks wait for one another.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How often each mode is measured, in turns, and for how long.
const ROUNDS: usize = 5;
const ROUND_SECONDS: f64 = 0.4;

/// Runs the program; rank 0 reports the outcome.
pub(crate) fn run_rank(args: &DemoArgs) -> anyhow::Result<Report> {
    let run = || -> Result<bool> {
        let mesh = Init::new().timeout(TIMEOUT).start()?;
        let rank = Rank { first: mesh.my_rank()? == 0, mesh, small: args.small };
        rank.say(&json!({ "done": 0.05, "doing": "comparing with one rank" }));
        let case = match args.which {
            Which::Tp => cases::tp(&rank.mesh, args.small)?,
            Which::Ring => cases::ring(&rank.mesh, args.small)?,
            Which::Halo => cases::halo(&rank.mesh, args.small)?,
            Which::Conv => cases::conv(&rank.mesh, args.small)?,
            Which::Moe => cases::moe(&rank.mesh, args.small)?,
            Which::Train => return Ok(true), // Its ranks are `train_rank`.
        };
        let case = Case { difference: case.difference + f64::from(u8::from(args.wrong)), ..case };
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

impl Rank {
    fn say(&self, value: &serde_json::Value) {
        if self.first {
            write_out(&format!("{value}\n"));
        }
    }

    fn measure(&self, which: Which, mut case: Case) -> Result<bool> {
        let difference = largest(&self.mesh, case.difference)?;
        let mut steps = Vec::new();
        for way in &mut case.ways {
            self.say(&json!({ "done": 0.2, "doing": format!("warming up {}", way.mode) }));
            self.mesh.warm_up(|| (0..case.warm).try_for_each(|_| (way.step)()))?;
            steps.push(way.steps_in(&self.mesh, if self.small { 0.0 } else { ROUND_SECONDS })?);
        }
        let mut all: Vec<Measured> = case.ways.iter().map(|_| Measured::default()).collect();
        for round in 0..ROUNDS {
            for ((way, steps), measured) in case.ways.iter_mut().zip(&steps).zip(&mut all) {
                let done = 0.3 + 0.7 * (round as f64) / ROUNDS as f64;
                self.say(&json!({ "done": done, "doing": format!("measuring {}", way.mode) }));
                way.sample(&self.mesh, *steps, measured)?;
            }
        }
        let mut good = difference <= case.allowed;
        for (way, measured) in case.ways.iter().zip(&all) {
            let seconds = median(measured.seconds.iter().copied()).unwrap_or(f64::NAN);
            let explained = way.explain.as_ref().map(|explain| explain());
            let breaks = way.breaks();
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
                "copied_bytes": measured.copied(), "memory_bytes": memory,
                "difference": difference, "allowed": case.allowed,
            }));
        }
        self.mesh.barrier()?;
        Ok(good)
    }
}

/// The lines with breaks, and how many breaks each has.
fn sites(explained: &Explanation) -> Vec<String> {
    let mut sites: BTreeMap<String, u64> = BTreeMap::new();
    for one in &explained.breaks {
        *sites.entry(format!("{} at {}:{}", one.op, one.site.file(), one.site.line())).or_default() += 1;
    }
    let text =
        |(site, times): (String, u64)| format!("{site}, {}x", times / (1 + explained.stats.recompiles));
    sites.into_iter().map(text).collect()
}
