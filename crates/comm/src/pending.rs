//! The handle of an operation in flight: test it, wait for it.

use std::marker::PhantomData;
use std::panic::Location;
use std::time::{Duration, Instant};

use consort_types::Failure;

use crate::CommError;
use crate::deadline::from_now;
use crate::engine::{AnyEngine, Engine, Ticket, with_engine};
use crate::shm::buffers::Buffers;
use crate::shm::common_result::Common;

/// An operation in flight. Dropping it does not stop the operation; its buffers are freed when it has finished.
#[must_use = "the buffers of an operation come back by waiting for it"]
pub struct Pending<T = Buffers> {
    engine: AnyEngine,
    ticket: Ticket,
    gives: PhantomData<T>,
}

/// The outcome of an operation.
pub trait Outcome: Sized {
    /// Whether its result is a common one.
    #[doc(hidden)]
    const IS_COMMON: bool;
    #[doc(hidden)]
    fn of(buffers: Buffers, common: Option<Box<Common>>) -> Option<Self>;
}

impl Outcome for Buffers {
    const IS_COMMON: bool = false;

    fn of(buffers: Buffers, _: Option<Box<Common>>) -> Option<Buffers> {
        Some(buffers)
    }
}

impl Outcome for (Buffers, Common) {
    const IS_COMMON: bool = true;

    fn of(buffers: Buffers, common: Option<Box<Common>>) -> Option<(Buffers, Common)> {
        Some((buffers, *common?))
    }
}

impl<T: Outcome> Pending<T> {
    #[inline(always)]
    pub(crate) fn new(engine: &AnyEngine, ticket: Ticket) -> Pending<T> {
        Pending { engine: engine.clone(), ticket, gives: PhantomData }
    }

    /// The outcome of the operation, once, if it is finished; never blocks. Fails if another member has failed or left, but
    /// has no deadline.
    pub fn test(&mut self) -> Result<Option<T>, CommError> {
        match with_engine!(&self.engine, engine => engine.test(self.ticket))? {
            true => self.take().map(Some),
            false => Ok(None),
        }
    }

    /// Its operation, by which the group can be asked for its release.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The error of its group, if the group has failed and the program has not seen it. Marks it as seen.
    pub fn unseen_error(&self) -> Option<CommError> {
        with_engine!(&self.engine, engine => engine.unseen())
    }

    /// Takes the outcome of a finished operation. Inlined, so that it is moved once.
    #[inline(always)]
    fn take(&mut self) -> Result<T, CommError> {
        let ticket = std::mem::replace(&mut self.ticket, Ticket::Over);
        let taken = with_engine!(&self.engine, engine => engine.take(ticket));
        let outcome = taken.and_then(|(buffers, common)| T::of(buffers, common));
        outcome.ok_or_else(|| CommError::Argument(Failure::new("its outcome was given before").of("wait")))
    }

    /// Blocks until the operation is finished, at most until `until`. Gives the operands, then the results if they are
    /// separate.
    #[track_caller]
    #[inline]
    pub fn wait(mut self, until: Instant) -> Result<T, CommError> {
        match self.finish_soon()? {
            Some(outcome) => Ok(outcome),
            None => self.wait_until(|| until, Location::caller()),
        }
    }

    /// The same with a timeout. The clock is read only if it must block.
    #[track_caller]
    #[inline]
    pub fn wait_within(self, time: Duration) -> Result<T, CommError> {
        self.wait_by(|| from_now(time))
    }

    /// The same until a moment that is only asked for if it must block.
    #[track_caller]
    #[inline]
    pub fn wait_by(mut self, until: impl FnOnce() -> Instant) -> Result<T, CommError> {
        match self.finish_soon()? {
            Some(outcome) => Ok(outcome),
            None => self.wait_until(until, Location::caller()),
        }
    }

    /// The outcome, if this is the only open operation and it finishes soon.
    #[inline(always)]
    fn finish_soon(&mut self) -> Result<Option<T>, CommError> {
        let given = with_engine!(&self.engine, engine => engine.finish_soon(self.ticket))?;
        let Some((buffers, common)) = given else { return Ok(None) };
        self.ticket = Ticket::Over;
        Ok(T::of(buffers, common))
    }

    #[inline(never)]
    fn wait_until(
        &mut self,
        until: impl FnOnce() -> Instant,
        site: &'static Location<'static>,
    ) -> Result<T, CommError> {
        with_engine!(&self.engine, engine => engine.wait(self.ticket, until, site))?;
        self.take()
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        with_engine!(&self.engine, engine => engine.abandon(self.ticket));
    }
}
