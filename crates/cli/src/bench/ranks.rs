//! Ranks that measure cases and print a line of JSON for each: started, waited for, read.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

use super::options::seconds;
use super::process::Process;
use crate::report::Machine;

/// The figures measured by ranks of a hidden entry of this binary, `sampled` seconds per case; fails if there are none.
pub(super) fn figures_of(
    entry: &str,
    ranks: usize,
    sampled: f64,
    cases: &str,
    more: &[&str],
    limit: Duration,
) -> anyhow::Result<Vec<Value>> {
    seconds(sampled)?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["run", "-n", &ranks.to_string(), "--", "/proc/self/exe", entry]);
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
    match figures.is_empty() {
        true => bail!("bench: --cases: no case for {ranks} ranks begins with `{cases}`"),
        false => Ok(figures),
    }
}
