//! The handle of an operation in flight: test it, wait for it.

use std::marker::PhantomData;
use std::panic::Location;
use std::rc::Rc;
use std::time::{Duration, Instant};

use consort_types::Failure;

use crate::CommError;
use crate::deadline::from_now;
use crate::shm::buffers::Buffers;
use crate::shm::common_result::Common;
use crate::shm::progress::Inner;
use crate::shm::waiter::{LOOKS, Waiter, What};

/// An operation in flight. Dropping it does not stop the operation; its buffers are freed when it has finished.
#[must_use = "the buffers of an operation come back by waiting for it"]
pub struct Pending<T = Buffers> {
    inner: Rc<Inner>,
    what: What,
    gives: PhantomData<T>,
}

/// The outcome of an operation.
pub trait Outcome: Sized {
    #[doc(hidden)]
    fn of(buffers: Buffers, common: Option<Box<Common>>) -> Option<Self>;
}

impl Outcome for Buffers {
    fn of(buffers: Buffers, _: Option<Box<Common>>) -> Option<Buffers> {
        Some(buffers)
    }
}

impl Outcome for (Buffers, Common) {
    fn of(buffers: Buffers, common: Option<Box<Common>>) -> Option<(Buffers, Common)> {
        Some((buffers, *common?))
    }
}

impl<T: Outcome> Pending<T> {
    pub(crate) fn new(inner: &Rc<Inner>, what: What) -> Pending<T> {
        Pending { inner: Rc::clone(inner), what, gives: PhantomData }
    }

    fn waiter(&self) -> Waiter<'_> {
        Waiter { inner: &self.inner, what: self.what }
    }

    /// The outcome of the operation, once, if it is finished; never blocks.
    pub fn test(&mut self) -> Result<Option<T>, CommError> {
        match self.waiter().poll() {
            Ok(true) => self.take().map(Some),
            Ok(false) => Ok(None),
            Err(stop) => Err(self.inner.give(*stop)),
        }
    }

    /// The error of its group, if the group has failed and the program has not seen it. Marks it as seen.
    pub fn unseen_error(&self) -> Option<CommError> {
        self.inner.unseen().map(|error| self.inner.give(error))
    }

    /// Takes the outcome of a finished operation. Inlined, so that it is moved once.
    #[inline(always)]
    fn take(&mut self) -> Result<T, CommError> {
        let inner = &*self.inner;
        let state = &mut *inner.state();
        let taken = match std::mem::replace(&mut self.what, What::Over) {
            What::Call(number) => state.take(number),
            What::Batch(batch) => {
                state.mails.take_finished(batch, &inner.recorder).map(|buffers| (buffers, None))
            }
            What::Leaving | What::Over => None,
        };
        let outcome = taken.and_then(|(buffers, common)| T::of(buffers, common));
        outcome.ok_or_else(|| CommError::Argument(Failure::new("its outcome was given before").of("wait")))
    }

    /// Blocks until the operation is finished, at most until `until`. Gives the operands, then the results if they are
    /// separate.
    #[track_caller]
    #[inline]
    pub fn wait(mut self, until: Instant) -> Result<T, CommError> {
        match self.finish_last() {
            Ok(Some(outcome)) => Ok(outcome),
            Ok(None) => self.wait_until(|| until, Location::caller()),
            Err(error) => Err(self.inner.give(error)),
        }
    }

    /// The same with a timeout. The clock is read only if it must block.
    #[track_caller]
    #[inline]
    pub fn wait_within(mut self, time: Duration) -> Result<T, CommError> {
        match self.finish_last() {
            Ok(Some(outcome)) => Ok(outcome),
            Ok(None) => self.wait_until(|| from_now(time), Location::caller()),
            Err(error) => Err(self.inner.give(error)),
        }
    }

    /// The outcome, if this is the only open operation and it finishes soon.
    #[inline(always)]
    fn finish_last(&mut self) -> Result<Option<T>, CommError> {
        let looks = if self.inner.cores.one_each() { LOOKS } else { 0 };
        let given = match self.what {
            What::Call(number) => self.inner.finish_last(number, looks)?,
            What::Batch(batch) => self.inner.finish_last_batch(batch, looks)?,
            What::Leaving | What::Over => None,
        };
        let Some((buffers, common)) = given else { return Ok(None) };
        self.what = What::Over;
        Ok(T::of(buffers, common))
    }

    #[inline(never)]
    fn wait_until(
        &mut self,
        until: impl FnOnce() -> Instant,
        site: &'static Location<'static>,
    ) -> Result<T, CommError> {
        match self.waiter().wait(until, site) {
            Ok(()) => self.take(),
            Err(stop) => Err(self.inner.give(*stop)),
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        match self.what {
            What::Call(number) => self.inner.state().abandon(number),
            What::Batch(batch) => self.inner.state().mails.abandon(batch),
            What::Leaving | What::Over => {}
        }
    }
}
