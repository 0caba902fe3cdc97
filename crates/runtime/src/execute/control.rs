//! Runs ops with blocks: conditionals and loops.

use consort_ir::cost::Total;
use consort_ir::ops;

use super::state::State;
use super::step::{Cond, Loop, Trips};
use super::{RunCx, RunError};

impl State {
    pub(super) fn cond(&mut self, cond: &Cond, cx: &RunCx<'_>) -> Result<(), RunError> {
        let holds = self.memory.read(&self.slots[cond.condition])?.first() != Some(&0);
        let branch = &cond.branches[usize::from(!holds)];
        self.move_all(&branch.enter, cx)?;
        self.run(&branch.body, cx)?;
        self.move_all(&branch.leave, cx)
    }

    pub(super) fn repeat(&mut self, each: &Loop, cx: &RunCx<'_>) -> Result<(), RunError> {
        if let Trips::Count(length) = &each.trips {
            // The whole loop is charged before it begins, so one that exceeds the budget never starts.
            let length = self.sizes().size(length)?;
            self.check(each.iteration.times(length as u64))?;
        }
        self.move_all(&each.enter, cx)?;
        let mut done = 0;
        while self.goes_on(&each.trips, done)? {
            self.spend(Total { steps: 1, ..Total::default() })?;
            for (whole, param) in &each.slices {
                self.copy_entry(*whole, done, *param, false, cx)?;
            }
            self.run(&each.body, cx)?;
            for (result, whole) in &each.stacks {
                self.copy_entry(*whole, done, *result, true, cx)?;
            }
            self.move_all(&each.carry, cx)?;
            done += 1;
        }
        self.move_all(&each.leave, cx)
    }

    /// Whether a loop continues after `done` iterations.
    fn goes_on(&self, trips: &Trips, done: usize) -> Result<bool, RunError> {
        match trips {
            Trips::Count(length) => Ok(done < self.sizes().size(length)?),
            Trips::While { condition, limit } => {
                let holds = self.memory.read(&self.slots[*condition])?.first() != Some(&0);
                match holds && done == *limit {
                    true => Err(RunError::new(ops::Trips::unfinished(*limit))),
                    false => Ok(holds),
                }
            }
        }
    }
}
