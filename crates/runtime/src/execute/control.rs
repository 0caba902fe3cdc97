//! Runs what holds blocks: a choice and a loop.

use consort_ir::cost::Total;

use super::state::State;
use super::step::{Cond, Scan};
use super::{RunCx, RunError};

impl State {
    pub(super) fn cond(&mut self, cond: &Cond, cx: &RunCx<'_>) -> Result<(), RunError> {
        let holds = self.memory.read(&self.slots[cond.condition])?.first() != Some(&0);
        let branch = &cond.branches[usize::from(!holds)];
        self.move_all(&branch.enter, cx)?;
        self.run(&branch.body, cx)?;
        self.move_all(&branch.leave, cx)
    }

    pub(super) fn scan(&mut self, scan: &Scan, cx: &RunCx<'_>) -> Result<(), RunError> {
        let length = self.sizes().size(&scan.length)?;
        // All of it at once: a loop that will not end is not begun.
        self.check(scan.iteration.times(length as u64))?;
        self.move_all(&scan.enter, cx)?;
        for iteration in 0..length {
            self.spend(Total { steps: 1, ..Total::default() })?;
            for (whole, param) in &scan.slices {
                self.copy_entry(*whole, iteration, *param, false, cx)?;
            }
            self.run(&scan.body, cx)?;
            for (result, whole) in &scan.stacks {
                self.copy_entry(*whole, iteration, *result, true, cx)?;
            }
            self.move_all(&scan.carry, cx)?;
        }
        self.move_all(&scan.leave, cx)
    }
}
