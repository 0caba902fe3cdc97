//! Ranks that measure cases and print a line of JSON for each: started, waited for, read.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

use super::options::seconds;
use super::process::Process;
use crate::mpirun::{SELF, over_mpi, wrong_count};
use crate::report::Machine;

/// How many ranks of a hidden entry of this binary are started, and by which mpirun, if they are to use MPI.
pub(super) struct Start<'a> {
    pub(super) entry: &'a str,
    pub(super) ranks: usize,
    pub(super) mpirun: Option<&'a str>,
}

impl Start<'_> {
    fn command(&self) -> anyhow::Result<Command> {
        if let Some(mpirun) = self.mpirun {
            let mut command = over_mpi("bench: --mpirun", mpirun, self.ranks)?;
            command.arg(self.entry);
            return Ok(command);
        }
        let mut command = Command::new(SELF);
        command.args(["run", "-n", &self.ranks.to_string(), "--", SELF, self.entry]);
        Ok(command)
    }
}

/// The figures that ranks measure, `sampled` seconds per case; fails if there are none.
pub(super) fn figures_of(
    start: &Start<'_>,
    sampled: f64,
    cases: &str,
    more: &[&str],
    limit: Duration,
) -> anyhow::Result<Vec<Value>> {
    seconds(sampled)?;
    let mut command = start.command()?;
    command.args(["--seconds", &sampled.to_string(), "--cases", cases]).args(more);
    let mut process = Process::start(command).map_err(|error| Machine(format!("bench: {error:#}")))?;
    process.wait(limit);
    let status = process.end();
    let said = process.output();
    if !status.is_some_and(|status| status.success()) {
        return Err(Machine(format!("bench: the ranks failed{}", process.said())).into());
    }
    let objects = said.lines().filter_map(|line| line.find('{').map(|at| &line[at..]));
    let figures: Vec<Value> = objects
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .context("bench: cannot parse a figure")?;
    let mut ran = figures.iter().filter_map(|figure| figure["ranks"].as_u64());
    if let Some(ran) = ran.find(|ran| start.mpirun.is_some() && *ran != start.ranks as u64) {
        bail!(wrong_count("bench: --mpirun", start.ranks, ran));
    }
    match figures.is_empty() {
        true => bail!("bench: --cases: no case for {} ranks begins with `{cases}`", start.ranks),
        false => Ok(figures),
    }
}
