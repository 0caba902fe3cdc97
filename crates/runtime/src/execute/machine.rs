//! The step machine: runs one line at a time, with the blocks that are open on a stack of its own.

use consort_comm::{Ticket, look};
use consort_ir::cost::Total;
use consort_ir::ops;

use super::RunCx;
use super::state::State;
use super::step::{BlockId, Blocks, Line, Loop, Needs, Step, Trips};
use crate::RunError;
use crate::device::Mark;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stepped {
    /// It ran a line, or opened or closed a block.
    Ran,
    /// It ran nothing: something must be over before the next step.
    Blocked(Until),
    /// The function is over.
    Done,
}

/// What a line waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The end of the start that it names, and the group of [`Exec::groups`](super::Exec::groups) and the operation there;
    /// none if there is nothing to wait for.
    Arrival(Option<(usize, Ticket)>),
    /// The end of leases that it names.
    Release,
    /// The end of an operation that was in flight before the call and writes an argument, by its region's number.
    Argument(usize),
    /// What was launched on the device.
    Launched(Mark),
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
    /// Enters a function, whose block is the first.
    pub(super) fn begin(&mut self) {
        self.frames.clear();
        self.open(0);
    }

    /// Runs a function that was entered to its end. This rank blocks where the machine does.
    pub(super) fn run(&mut self, blocks: &Blocks, cx: &RunCx<'_>) -> Result<(), RunError> {
        loop {
            match self.step(blocks, cx)? {
                Stepped::Blocked(until) => self.block(until, blocks, cx)?,
                Stepped::Ran => {}
                Stepped::Done => return Ok(()),
            }
        }
    }

    /// Runs a line, or closes a block behind its last one. An error names the line.
    #[inline]
    pub(super) fn step(&mut self, blocks: &Blocks, cx: &RunCx<'_>) -> Result<Stepped, RunError> {
        let stepped = self.step_inside(blocks, cx);
        stepped.map_err(|error| self.named(error, blocks))
    }

    /// Blocks until what a step waits for is over, at most until its deadline.
    pub(super) fn block(&mut self, until: Until, blocks: &Blocks, cx: &RunCx<'_>) -> Result<(), RunError> {
        let next = || {
            let frame = self.frames.last()?;
            blocks[frame.block].get(frame.next).map(|line| (line.op, line.site))
        };
        let named = |error: RunError, line: Option<(&'static str, _)>| match line {
            Some((op, site)) => error.at(op, site),
            None => error,
        };
        match until {
            Until::Argument(region) => {
                let line = next();
                self.memory.arrive(region).map_err(|error| named(error, line))
            }
            Until::Launched(mark) => reach(mark, cx).map_err(|error| named(error, next())),
            Until::Arrival(_) | Until::Release => {
                let waited = match self.current(blocks).map(|line| &line.step) {
                    Some(Step::Wait(flight)) => self.wait(*flight, cx),
                    Some(Step::Release(leases)) => self.release(leases, cx),
                    _ => Ok(()),
                };
                waited.map_err(|error| self.named(error, blocks))
            }
        }
    }

    /// An error with the line that runs, or ran last.
    #[cold]
    fn named(&self, error: RunError, blocks: &Blocks) -> RunError {
        match self.current(blocks) {
            Some(line) => error.at(line.op, line.site),
            None => error,
        }
    }

    /// What must be over before a line runs.
    #[inline]
    fn awaits(&self, needs: &Needs, cx: &RunCx<'_>) -> Result<Option<Until>, RunError> {
        if let Some(region) = needs.arguments.iter().find(|region| self.memory.arrives(**region)) {
            return Ok(Some(Until::Argument(*region)));
        }
        let mark = if needs.device { Some(cx.device.mark()) } else { cx.device.full() };
        match mark {
            Some(mark) if !cx.device.is_reached(mark)? => Ok(Some(Until::Launched(mark))),
            _ => Ok(None),
        }
    }

    fn step_inside(&mut self, blocks: &Blocks, cx: &RunCx<'_>) -> Result<Stepped, RunError> {
        let Some(frame) = self.frames.last() else { return Ok(Stepped::Done) };
        let (block, next) = (frame.block, frame.next);
        let Some(line) = blocks[block].get(next) else { return self.close(blocks, cx) };
        if let Some(until) = self.awaits(&line.needs, cx)? {
            return Ok(Stepped::Blocked(until));
        }
        if let Some(frame) = self.frames.last_mut() {
            frame.next += 1;
        }
        for (slot, found) in &line.found {
            self.find(*slot, found, cx)?;
        }
        if self.budget.is_some() {
            self.spend(self.own_work(line))?;
        }
        match &line.step {
            // The caller decides how to wait.
            Step::Wait(flight) => return Ok(Stepped::Blocked(Until::Arrival(self.ticket(*flight)))),
            Step::Release(leases) => {
                return Ok(match self.holds(leases, cx)? {
                    true => Stepped::Blocked(Until::Release),
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
    fn close(&mut self, blocks: &Blocks, cx: &RunCx<'_>) -> Result<Stepped, RunError> {
        let outer = self.frames.len().checked_sub(2).and_then(|at| self.frames.get(at));
        let around = outer.and_then(|frame| blocks[frame.block].get(frame.next.checked_sub(1)?));
        // The condition of the next iteration is read, or results are given out.
        if around.is_none_or(|line| line.needs.device) {
            let mark = cx.device.mark();
            if !cx.device.is_reached(mark)? {
                return Ok(Stepped::Blocked(Until::Launched(mark)));
            }
        }
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

    /// Whether a loop has another iteration after `done` of them, which is then charged.
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

/// Polls until a device has reached a mark, at most until the deadline of a wait that begins now.
pub(super) fn reach(mark: Mark, cx: &RunCx<'_>) -> Result<(), RunError> {
    let until = cx.deadline();
    while !cx.device.is_reached(mark)? {
        look()?;
        if (cx.clock)() >= until {
            let late = format!("what was launched is not over after {:?}", cx.timeout);
            return Err(RunError::new(("a device that answers", late)));
        }
        std::thread::yield_now();
    }
    Ok(())
}
