//! The handle of an operation in flight: test it, wait for it.

use std::marker::PhantomData;
use std::panic::Location;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::CommError;
use crate::buffers::Buffers;
use crate::call::{Call, Stage};
use crate::common_result::Common;
use crate::error::Stop;
use crate::event::Kind;
use crate::flight::Flight;
use crate::op::describe;
use crate::progress::{BUSY, Inner};
use crate::recorder::{self, read_segment};
use crate::row::{Row, SLOTS};
use crate::siblings;
use crate::state::State;
use crate::sync::yield_now;

/// How long a waiter spins before it sleeps: a little, and as long as so many bytes take to move. Who waits for a large
/// operation mostly waits for somebody who is at it.
pub(crate) fn spin(bytes: usize) -> Duration {
    Duration::from_micros(50) + Duration::from_nanos(bytes as u64 / 4).min(MOST)
}

/// However large an operation is, not longer.
const MOST: Duration = Duration::from_millis(20);
/// How often a waiter that may not spin lets others go first before it sleeps.
const YIELDS: usize = if cfg!(any(loom, shuttle)) { 0 } else { 16 };
/// How often it looks at what it waits for before it looks at the clock and at failures.
const LOOKS: usize = 128;

/// Which operation.
#[derive(Clone, Copy)]
pub(crate) enum What {
    /// A collective, by its number.
    Call(u64),
    /// A batch of messages, by its number.
    Batch(u64),
    /// One whose outcome was given.
    Over,
}

/// An operation in flight. Dropping it lets the operation run on; its buffers are freed when it has finished.
#[must_use = "the buffers of an operation come back by waiting for it"]
pub struct Pending<T = Buffers> {
    inner: Rc<Inner>,
    what: What,
    gives: PhantomData<T>,
}

/// What an operation gives.
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

    /// Notes that it was not over at the first look.
    fn slow(&self) {
        let mut state = self.inner.state();
        match self.what {
            What::Call(number) => state.slow(number),
            What::Batch(batch) => state.mails.slow(batch),
            What::Over => {}
        }
    }

    /// Records that it is waited for in sleep.
    fn record_wait(&self, site: &'static Location<'static>) {
        let record = match self.what {
            What::Call(number) => self.inner.state().call(number).map(Call::record),
            What::Batch(batch) => Some(recorder::Call::batch(batch, 0)),
            What::Over => None,
        };
        if let Some(record) = record {
            let recorder = &self.inner.recorder;
            recorder.call(Kind::Wait, record, recorder.site(site));
        }
    }

    /// What the operation gives, once, if it is finished; never waits.
    pub fn test(&mut self) -> Result<Option<T>, CommError> {
        if self.poll().map_err(|stop| *stop)? { self.take().map(Some) } else { Ok(None) }
    }

    /// Goes on as far as it can; true if the operation is finished.
    fn poll(&self) -> Result<bool, Stop> {
        let state = &mut *self.inner.state();
        if self.is_finished(state) {
            return Ok(true);
        }
        self.inner.advance(state, false)?;
        Ok(self.is_finished(state))
    }

    fn is_finished(&self, state: &State) -> bool {
        match self.what {
            What::Call(number) => state.is_finished(number),
            What::Batch(batch) => state.mails.is_finished(batch),
            What::Over => false,
        }
    }

    /// The outcome of an operation that is finished, which is over then. Inlined, so that it is moved once.
    #[inline(always)]
    fn take(&mut self) -> Result<T, CommError> {
        let inner = &*self.inner;
        let state = &mut *inner.state();
        let taken = match std::mem::replace(&mut self.what, What::Over) {
            What::Call(number) => state.take(number),
            What::Batch(batch) => {
                state.mails.take_finished(batch, &inner.recorder).map(|buffers| (buffers, None))
            }
            What::Over => None,
        };
        let outcome = taken.and_then(|(buffers, common)| T::of(buffers, common));
        outcome.ok_or_else(|| CommError::Argument("wait: its outcome was given before".into()))
    }

    /// What the operation gives, when it is finished: the operands, then the results where they are others. Never
    /// waits past the time given.
    #[track_caller]
    pub fn wait(mut self, until: Instant) -> Result<T, CommError> {
        match self.finish_last()? {
            Some(outcome) => Ok(outcome),
            None => self.wait_until(|| until, Location::caller()),
        }
    }

    /// The same within some time from now. The clock is read only where it must wait.
    #[track_caller]
    pub fn wait_within(mut self, time: Duration) -> Result<T, CommError> {
        match self.finish_last()? {
            Some(outcome) => Ok(outcome),
            None => self.wait_until(|| Instant::now() + time, Location::caller()),
        }
    }

    /// What it gives, where it alone is open and ends soon.
    #[inline(always)]
    fn finish_last(&mut self) -> Result<Option<T>, CommError> {
        let looks = if self.inner.cores.one_each() { LOOKS } else { 0 };
        let given = match self.what {
            What::Call(number) => self.inner.finish_last(number, looks)?,
            What::Batch(batch) => self.inner.finish_last_batch(batch, looks)?,
            What::Over => None,
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
        if !self.look_and_poll().map_err(|stop| *stop)? {
            self.sleep(until(), site)?;
        }
        self.take()
    }

    /// Looks for a while at what must change first, since a look is over sooner than a turn of everything in flight;
    /// then goes on. True if the operation is finished.
    fn look_and_poll(&self) -> Result<bool, Stop> {
        if self.inner.cores.one_each() {
            self.look(&self.inner.state());
        }
        self.poll()
    }

    fn sleep(&self, until: Instant, site: &'static Location<'static>) -> Result<(), CommError> {
        let (mut since, mut yields, mut recorded) = (None, 0, false);
        let spin = spin(self.bytes());
        self.slow();
        loop {
            if self.poll().map_err(|stop| *stop)? {
                return Ok(());
            }
            let inner = &*self.inner;
            if inner.cores.one_each() && self.look(&inner.state()) {
                continue;
            }
            let busy = siblings::advance_others(inner);
            let busy = busy.and_then(|busy| inner.advance(&mut inner.state(), true).map(|()| busy));
            let busy = busy.map_err(|stop| inner.fail(&mut inner.state(), *stop))?;
            if let Some(error) = inner.elsewhere() {
                return Err(inner.fail(&mut inner.state(), error));
            }
            if let Some(rank) = self.left() {
                if self.poll().map_err(|stop| *stop)? {
                    return Ok(());
                }
                // What made it leave was said before it left.
                let left = || CommError::Left { rank, what: self.what() };
                let error = inner.elsewhere().unwrap_or_else(left);
                return Err(self.inner.fail(&mut self.inner.state(), error));
            }
            let now = Instant::now();
            if now >= until {
                let error = self.late();
                return Err(inner.fail(&mut inner.state(), error));
            }
            if inner.cores.one_each() && now - *since.get_or_insert(now) < spin {
                continue;
            }
            // Ranks that share cores let one another go first for a while, which costs less than to sleep and be woken.
            if !inner.cores.one_each() && yields < YIELDS {
                yields += 1;
                yield_now();
                continue;
            }
            if !std::mem::replace(&mut recorded, true) {
                self.record_wait(site);
            }
            // What is in flight on another group rings elsewhere, and so does what is still to be compared, for which
            // others may wait.
            let turn = if busy || inner.state().has_uncompared() { until.min(now + BUSY) } else { until };
            match self.waits_for() {
                Some(member) => inner.members.rows[member].sleep(turn, || self.could_go_on(member)),
                None => yield_now(),
            }
        }
    }

    /// How large it is.
    fn bytes(&self) -> usize {
        let state = self.inner.state();
        match self.what {
            What::Call(number) => state.call(number).map_or(0, Call::bytes),
            What::Batch(batch) => state.mails.bytes(batch),
            What::Over => 0,
        }
    }

    /// Looks for a while at the one word that must change first; true if it did.
    fn look(&self, state: &State) -> bool {
        let members = &self.inner.members;
        let awaits = match self.what {
            What::Call(number) => state.call(number).and_then(|call| call.awaits(members)),
            What::Batch(batch) => state.mails.awaits(batch),
            What::Over => None,
        };
        let Some((word, seen)) = awaits else { return false };
        (0..LOOKS).any(|_| {
            std::hint::spin_loop();
            word.load(Relaxed) != seen
        })
    }

    /// The members that have not done their part, for messages and for sleeping.
    fn missing(&self) -> Vec<usize> {
        let inner = &self.inner;
        let state = inner.state();
        let number = match self.what {
            What::Call(number) => number,
            What::Batch(batch) => return state.mails.waits_for(batch),
            What::Over => return Vec::new(),
        };
        let Some(call) = state.call(number) else { return Vec::new() };
        let rows = &inner.members.rows;
        // The others may have used the slots of a finished call again, which look unpublished then.
        if call.stage == Stage::Finished {
            return Vec::new();
        }
        if call.stage == Stage::New {
            return (0..rows.len()).filter(|m| rows[*m].compared() + SLOTS <= number).collect();
        }
        let unpublished: Vec<usize> =
            call.needs(&inner.members).filter(|m| !rows[*m].has_published(number)).collect();
        if !unpublished.is_empty() {
            return unpublished;
        }
        let unready = call.unready(&inner.members);
        // All have published, so the own part can be made at once: two members that slept on one another's bells
        // instead would both wait in vain.
        let helped = || call.job().is_some_and(|job| job.try_lock().is_err());
        if unready.contains(&inner.members.me) && !helped() { Vec::new() } else { unready }
    }

    fn waits_for(&self) -> Option<usize> {
        self.missing().into_iter().find(|member| *member != self.inner.members.me)
    }

    /// Whether something changed since the last look, so that sleeping would miss it.
    fn could_go_on(&self, member: usize) -> bool {
        let inner = &self.inner;
        let news = match self.what {
            // What is missing of a batch is known only by an advance.
            What::Batch(_) => inner.state().mails.has_news(member),
            _ => !self.missing().contains(&member),
        };
        news || inner.elsewhere().is_some() || self.left().is_some()
    }

    /// The rank of a member that this waits for and that has left the group.
    fn left(&self) -> Option<usize> {
        let rows = &self.inner.members.rows;
        if !rows.iter().any(|row| row.has_left()) {
            return None;
        }
        self.missing().into_iter().map(|member| &rows[member]).find(|row| row.has_left()).map(|row| row.rank)
    }

    fn late(&self) -> CommError {
        let rows: Vec<&Row> = self.missing().into_iter().map(|m| &self.inner.members.rows[m]).collect();
        let missing: Vec<usize> = rows.iter().map(|row| row.rank).collect();
        let mut flight = Flight::new(missing.iter().copied());
        rows.iter().for_each(|row| flight.add(row.rank, read_segment(&row.segment, row.rank)));
        CommError::Deadline { what: self.what(), missing, doing: flight.sorted().sides() }
    }

    /// The operation in words.
    fn what(&self) -> String {
        match self.what {
            What::Call(number) => {
                let state = self.inner.state();
                let what = state.call(number).map_or(String::new(), |call| describe(call.key.what));
                format!("{what}: call {number}")
            }
            What::Batch(_) | What::Over => "exchange".into(),
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        match self.what {
            What::Call(number) => self.inner.state().abandon(number),
            What::Batch(batch) => self.inner.state().mails.abandon(batch),
            What::Over => {}
        }
    }
}
