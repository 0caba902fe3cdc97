//! Waiting for operations over MPI, testing them, and finding out that they will never be over.

use std::thread;
use std::time::{Duration, Instant};

use crate::CommError;
use crate::deadline::from_now;
use crate::engine::Ticket;
use crate::error::Operation;
use crate::mpi::call::Call;
use crate::mpi::engine::{LOOKS, MpiGroup};
use crate::mpi::failure::elsewhere;
use crate::mpi::groups;
use crate::op::describe;

/// After this a waiting member sleeps a little between tests.
const BUSY: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(50);
/// How long a message may be on its way after its sender has left.
const ON_ITS_WAY: Duration = Duration::from_millis(100);

/// Lets others run, in a wait that began at `start`.
pub(super) fn pause(start: Instant, now: Instant) {
    if now < start + BUSY { thread::yield_now() } else { thread::sleep(NAP) }
}

impl MpiGroup {
    /// Advances everything in flight; true if an operation is over. Reads no clock and no notice.
    pub(super) fn advance_to(&self, ticket: Ticket) -> Result<bool, CommError> {
        if self.is_over(ticket) {
            return Ok(true);
        }
        self.advance()?;
        Ok(self.is_over(ticket))
    }

    /// Reads notices, answers questions, and fails if another rank has stopped.
    pub(super) fn heed(&self) -> Result<(), CommError> {
        self.job.look(Instant::now()).map_err(|error| self.fail(error.into()))?;
        self.job.cause().map_or(Ok(()), |cause| Err(self.fail(elsewhere(&cause))))
    }

    /// What a test of an operation that is not over does besides: advances the other groups, and fails if it will never be over.
    /// True if it is over after all. Blocks only once a member that it waits for has left, while a message of that member may
    /// be on its way.
    pub(super) fn look_around(&self, ticket: Ticket) -> Result<bool, CommError> {
        groups::advance_others(self).map_err(|error| self.fail(error))?;
        self.heed()?;
        if !self.job.has_left(self.id) {
            return Ok(false);
        }
        let (what, members, call) = self.awaited(Some(ticket));
        match self.departed(what, &members, call) {
            Some(_) => self.wait_for(Some(ticket), from_now(2 * ON_ITS_WAY)).map(|()| true),
            None => Ok(false),
        }
    }

    /// Waits until something is over, at most until a deadline.
    pub(super) fn wait_for(&self, ticket: Option<Ticket>, until: Instant) -> Result<(), CommError> {
        let (start, mut looks, mut left_at) = (Instant::now(), 0, None);
        let is_over = || ticket.map_or(!self.is_busy(), |ticket| self.is_over(ticket));
        loop {
            self.advance()?;
            if is_over() {
                return Ok(());
            }
            looks += 1;
            if looks < LOOKS && self.job.cores().one_each() {
                continue;
            }
            let now = Instant::now();
            groups::advance_others(self).map_err(|error| self.fail(error))?;
            self.heed()?;
            let (what, members, call) = self.awaited(ticket);
            if let Some(error) = self.departed(what.clone(), &members, call)
                && (call.is_some() || now > *left_at.get_or_insert(now) + ON_ITS_WAY)
            {
                return Err(self.fail(error));
            }
            if now >= until {
                let error = self.late(what, &members, call);
                return Err(self.fail(error));
            }
            pause(start, now);
        }
    }

    /// What is awaited, of which members, and its number if it is a call.
    pub(super) fn awaited(&self, ticket: Option<Ticket>) -> (Operation, Vec<usize>, Option<u64>) {
        let state = self.state.borrow();
        let others = || (0..self.ranks.len()).filter(|member| *member != self.data.rank()).collect();
        let call = |call: &Call| {
            let text = call.text.text(self.heap.segment());
            let what = if call.text.name.is_empty() { describe(call.key.what) } else { text };
            let group = self.recorder.group_name().to_string();
            (Operation::Call { what, number: call.number, group }, others(), Some(call.number))
        };
        let found = match ticket {
            Some(Ticket::Call(number)) => state.call(number).map(call),
            Some(Ticket::Batch(number)) => {
                state.batches.get(&number).map(|batch| (Operation::Exchange, batch.open(), None))
            }
            Some(Ticket::Over) => None,
            None => state.calls.iter().find(|call| !call.is_finished()).map(call),
        };
        found.unwrap_or_else(|| {
            let open = state.batches.values().flat_map(|batch| batch.open()).collect();
            (Operation::Exchange, open, None)
        })
    }
}
