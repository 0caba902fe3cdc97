//! The step machine: runs one line at a time, with the blocks that are open on a stack of its own.

use consort_ir::cost::Total;
use consort_ir::ops;

use super::RunCx;
use super::state::State;
use super::step::{BlockId, Blocks, FlightId, Line, Loop, Release, Step, Trips};
use crate::RunError;

/// What a step did.
pub(super) enum Stepped<'a> {
    /// It ran a line, or opened or closed a block.
    Ran,
    /// The line needs something of other ranks. Once it has been waited for, the next step goes on behind the line.
    Blocked(Until<'a>),
    /// The function is over.
    Done,
}

/// What a line needs of other ranks.
pub(super) enum Until<'a> {
    /// The end of this start.
    Arrival(FlightId),
    /// The end of these leases.
    Release(&'a Release),
}

/// A block that is open.
pub(super) struct Frame {
    block: BlockId,
    /// The line that runs next.
    next: usize,
    /// Of a loop's block: how many iterations are over.
    pub(super) iteration: usize,
}

impl State {
    /// Runs a function, whose block is the first, to its end. This rank blocks where the machine does.
    pub(super) fn run(&mut self, blocks: &Blocks, cx: &RunCx<'_>) -> Result<(), RunError> {
        self.frames.clear();
        self.open(0);
        loop {
            let ran = match self.step(blocks, cx) {
                Ok(Stepped::Blocked(Until::Arrival(flight))) => self.wait(flight, cx),
                Ok(Stepped::Blocked(Until::Release(leases))) => self.release(leases, cx),
                Ok(Stepped::Ran) => Ok(()),
                Ok(Stepped::Done) => return Ok(()),
                Err(error) => Err(error),
            };
            ran.map_err(|error| match self.current(blocks) {
                Some(line) => error.at(line.op, line.site),
                None => error,
            })?;
        }
    }

    /// Runs a line, or closes a block behind its last one.
    fn step<'a>(&mut self, blocks: &'a Blocks, cx: &RunCx<'_>) -> Result<Stepped<'a>, RunError> {
        let Some(frame) = self.frames.last_mut() else { return Ok(Stepped::Done) };
        let Some(line) = blocks[frame.block].get(frame.next) else { return self.close(blocks, cx) };
        frame.next += 1;
        for (slot, found) in &line.found {
            self.find(*slot, found, cx)?;
        }
        if self.budget.is_some() {
            self.spend(self.own_work(line))?;
        }
        match &line.step {
            // Whoever drives the machine decides how to wait.
            Step::Wait(flight) => return Ok(Stepped::Blocked(Until::Arrival(*flight))),
            Step::Release(leases) => {
                return Ok(match self.holds(leases, cx)? {
                    true => Stepped::Blocked(Until::Release(leases)),
                    false => Stepped::Ran,
                });
            }
            Step::Cond(cond) => {
                let holds = self.is_true(cond.condition)?;
                self.open(cond.branches[usize::from(!holds)]);
                return Ok(Stepped::Ran);
            }
            Step::Loop(each) => {
                if let Trips::Count(length) = &each.trips {
                    // The whole loop is charged before it begins, so one that exceeds the budget never starts.
                    let length = self.sizes().size(length)?;
                    self.check(each.iteration.times(length as u64))?;
                }
                if self.begins(each, 0)? {
                    self.open(each.body);
                    return Ok(Stepped::Ran);
                }
            }
            _ => self.line(line, cx)?,
        }
        self.poll_after(line, cx)?;
        Ok(Stepped::Ran)
    }

    fn open(&mut self, block: BlockId) {
        self.frames.push(Frame { block, next: 0, iteration: 0 });
    }

    /// Ends the innermost block, or begins its next iteration.
    fn close<'a>(&mut self, blocks: &'a Blocks, cx: &RunCx<'_>) -> Result<Stepped<'a>, RunError> {
        let ended = self.frames.pop();
        let (Some(ended), Some(line)) = (ended, self.current(blocks)) else { return Ok(Stepped::Done) };
        if let Step::Loop(each) = &line.step {
            self.watch.iteration(each.iteration)?;
            let iteration = ended.iteration + 1;
            if self.begins(each, iteration)? {
                self.frames.push(Frame { block: each.body, next: 0, iteration });
                return Ok(Stepped::Ran);
            }
        }
        self.poll_after(line, cx)?;
        Ok(Stepped::Ran)
    }

    /// The line that ran last in the innermost block.
    fn current<'a>(&self, blocks: &'a Blocks) -> Option<&'a Line> {
        let frame = self.frames.last()?;
        blocks[frame.block].get(frame.next.checked_sub(1)?)
    }

    /// Whether a loop goes on after `done` iterations; charges the next one.
    fn begins(&mut self, each: &Loop, done: usize) -> Result<bool, RunError> {
        let begins = match &each.trips {
            Trips::Count(length) => done < self.sizes().size(length)?,
            Trips::While { condition, limit } => match self.is_true(*condition)? {
                true if done == *limit => return Err(RunError::new(ops::Trips::unfinished(*limit))),
                holds => holds,
            },
        };
        if begins {
            self.spend(Total { steps: 1, ..Total::default() })?;
        }
        Ok(begins)
    }
}
