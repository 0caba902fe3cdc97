//! The handle of an operation in flight: test it, wait for it.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::CommError;
use crate::buffers::Buffers;
use crate::common_result::Common;
use crate::op::describe;
use crate::progress::{Inner, State};
use crate::row::SLOTS;

/// How long a waiter spins before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// How often it looks at what it waits for before it looks at the clock and at failures.
const LOOKS: usize = 128;

/// Which operation.
#[derive(Clone, Copy)]
pub(crate) enum What {
    /// A collective, by its number.
    Call(u64),
    /// A batch of messages, by its number.
    Batch(u64),
}

/// An operation in flight. Dropping it lets the operation run on; its buffers are freed when it has finished.
#[must_use = "the buffers of an operation come back by waiting for it"]
pub struct Pending<T = Buffers> {
    inner: Arc<Inner>,
    what: What,
    gives: PhantomData<T>,
    /// A group belongs to one thread at a time.
    one_thread: PhantomData<Cell<()>>,
}

/// What an operation gives.
pub trait Outcome: Sized {
    #[doc(hidden)]
    fn of(buffers: Buffers, common: Option<Common>) -> Option<Self>;
}

impl Outcome for Buffers {
    fn of(buffers: Buffers, _: Option<Common>) -> Option<Buffers> {
        Some(buffers)
    }
}

impl Outcome for (Buffers, Common) {
    fn of(buffers: Buffers, common: Option<Common>) -> Option<(Buffers, Common)> {
        Some((buffers, common?))
    }
}

impl<T: Outcome> Pending<T> {
    pub(crate) fn new(inner: &Arc<Inner>, what: What) -> Pending<T> {
        Pending { inner: Arc::clone(inner), what, gives: PhantomData, one_thread: PhantomData }
    }

    fn take(&self, state: &mut State) -> Option<T> {
        let (buffers, common) = match self.what {
            What::Call(number) => state.take(number)?,
            What::Batch(batch) => (state.mails.take_finished(batch)?, None),
        };
        T::of(buffers, common)
    }

    /// What the operation gives, if it is finished; never waits.
    pub fn test(&self) -> Result<Option<T>, CommError> {
        let mut state = self.inner.lock();
        if let Some(outcome) = self.take(&mut state) {
            return Ok(Some(outcome));
        }
        self.inner.advance(&mut state)?;
        Ok(self.take(&mut state))
    }

    /// What the operation gives, when it is finished: the operands, then the results where they are others. Never
    /// waits past the time given.
    pub fn wait(self, until: Instant) -> Result<T, CommError> {
        let inner = &*self.inner;
        let mut since = None;
        loop {
            for _ in 0..if inner.spins { LOOKS } else { 1 } {
                if let Some(outcome) = self.test()? {
                    return Ok(outcome);
                }
                std::hint::spin_loop();
            }
            if let Some(error) = inner.elsewhere() {
                return Err(inner.fail(&mut inner.lock(), error));
            }
            let now = Instant::now();
            if now >= until {
                let error = self.late();
                return Err(inner.fail(&mut inner.lock(), error));
            }
            if inner.spins && now - *since.get_or_insert(now) < SPIN {
                continue;
            }
            match self.waits_for() {
                Some(member) => inner.members.rows[member].sleep(until, || self.could_go_on(member)),
                None => std::thread::yield_now(),
            }
        }
    }

    /// The members that have not done their part, for messages and for sleeping.
    fn missing(&self) -> Vec<usize> {
        let inner = &self.inner;
        let state = inner.lock();
        let number = match self.what {
            What::Call(number) => number,
            What::Batch(batch) => return state.mails.waits_for(batch),
        };
        let Some(call) = state.call(number) else { return Vec::new() };
        let rows = &inner.members.rows;
        if call.stage == crate::call::Stage::New {
            return (0..rows.len()).filter(|m| rows[*m].done() + SLOTS <= number).collect();
        }
        let unpublished: Vec<usize> =
            call.needs(&inner.members).filter(|m| !rows[*m].has_published(number)).collect();
        if unpublished.is_empty() { call.unready(&inner.members) } else { unpublished }
    }

    fn waits_for(&self) -> Option<usize> {
        self.missing().into_iter().find(|member| *member != self.inner.members.me)
    }

    /// Whether something changed since the last look, so that sleeping would miss it.
    fn could_go_on(&self, member: usize) -> bool {
        !self.missing().contains(&member) || self.inner.elsewhere().is_some()
    }

    fn late(&self) -> CommError {
        let ranks = self.missing().into_iter().map(|member| self.inner.members.rows[member].rank).collect();
        let what = match self.what {
            What::Call(number) => {
                let state = self.inner.lock();
                let what = state.call(number).map_or(String::new(), |call| describe(call.key.what));
                format!("{what}: call {number}")
            }
            What::Batch(_) => "exchange".into(),
        };
        CommError::Deadline { what, missing: ranks }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        match self.what {
            What::Call(number) => state.abandon(number),
            What::Batch(batch) => state.mails.abandon(batch),
        }
    }
}
