//! Runs ops with blocks: conditionals and loops.

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
        // The whole loop is charged before it begins, so one that exceeds the budget never starts.
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
