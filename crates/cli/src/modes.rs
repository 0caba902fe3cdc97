//! Modes of running one program (compiled, eager, ..), measured in turns on all ranks.

use std::time::Instant;

use consort::{Explanation, Mesh, Reduce, Result, Tensor};

use crate::bench::cpu_time;

/// A mode of running a program.
pub(crate) struct Mode {
    pub(crate) mode: &'static str,
    /// One step.
    pub(crate) step: Box<dyn FnMut() -> Result<()>>,
    /// The explanation, if it is compiled.
    pub(crate) explain: Option<Box<dyn Fn() -> Explanation>>,
}

/// The measurements of a mode.
#[derive(Default)]
pub(crate) struct Measured {
    /// Seconds of a step on the slowest rank, for each sample.
    pub(crate) seconds: Vec<f64>,
    /// CPU seconds of a step, the largest of all ranks, for each sample.
    pub(crate) cpu: Vec<f64>,
    steps: usize,
    copied: u64,
    /// Programs that were compiled during the samples.
    pub(crate) new_graphs: u64,
}

impl Measured {
    /// Bytes that a step copied for communication.
    pub(crate) fn copied(&self) -> u64 {
        self.copied / self.steps.max(1) as u64
    }
}

impl Mode {
    /// Takes a sample of `steps` steps.
    pub(crate) fn sample(&mut self, mesh: &Mesh, steps: usize, measured: &mut Measured) -> Result<()> {
        let before = self.counts(mesh);
        mesh.barrier()?;
        let (start, cpu) = (Instant::now(), cpu_time());
        (0..steps).try_for_each(|_| (self.step)())?;
        let (seconds, cpu) = (start.elapsed(), cpu_time() - cpu);
        measured.seconds.push(largest(mesh, seconds.as_secs_f64())? / steps as f64);
        measured.cpu.push(largest(mesh, cpu.as_secs_f64())? / steps as f64);
        let after = self.counts(mesh);
        measured.steps += steps;
        measured.copied += after.0 - before.0;
        measured.new_graphs += after.1 - before.1;
        Ok(())
    }

    /// How many steps take about `seconds`, the same number on all ranks.
    pub(crate) fn steps_in(&mut self, mesh: &Mesh, seconds: f64) -> Result<usize> {
        let start = Instant::now();
        (self.step)()?;
        let once = largest(mesh, start.elapsed().as_secs_f64())?;
        Ok(((seconds / once) as usize).clamp(1, 5000))
    }

    /// Breaks of one step, if it is compiled: all compilations have the same number.
    pub(crate) fn breaks(&self) -> Option<u64> {
        let stats = self.explain.as_ref()?().stats;
        Some(stats.breaks / (1 + stats.recompiles))
    }

    /// Bytes copied so far, and programs compiled.
    fn counts(&self, mesh: &Mesh) -> (u64, u64) {
        (mesh.copied_bytes(), self.explain.as_ref().map_or(0, |explain| explain().stats.graphs))
    }
}

/// Measures modes in turns, for some seconds; `small` only once.
pub(crate) fn in_turns(mesh: &Mesh, modes: &mut [Mode], seconds: f64, small: bool) -> Result<Vec<Measured>> {
    let mut steps = Vec::new();
    for mode in modes.iter_mut() {
        (0..2).try_for_each(|_| (mode.step)())?;
        steps.push(mode.steps_in(mesh, if small { 0.0 } else { 0.02 })?);
    }
    let mut all: Vec<Measured> = modes.iter().map(|_| Measured::default()).collect();
    let start = Instant::now();
    loop {
        for ((mode, steps), measured) in modes.iter_mut().zip(&steps).zip(&mut all) {
            mode.sample(mesh, *steps, measured)?;
        }
        let spent = largest(mesh, start.elapsed().as_secs_f64())?;
        if spent >= seconds && (small || all[0].seconds.len() >= 5) {
            return Ok(all);
        }
    }
}

/// The largest of the ranks' numbers.
pub(crate) fn largest(mesh: &Mesh, number: f64) -> Result<f64> {
    mesh.all_reduce(Tensor::from_slice(&[number], &[1])?, Reduce::Max)?.item()
}

/// Rounds to four significant digits.
pub(crate) fn round(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}
