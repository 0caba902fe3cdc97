//! What is in flight on a group here: making it go on, waiting for it, and finding out that it cannot.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use crate::CommError;
use crate::call::{Call, Members, Op};
use crate::error::Side;
use crate::event::Kind;
use crate::heap::{Buffer, Heap};
use crate::mail::Mails;
use crate::recorder::{self, Recorder};
use crate::row::{Row, SLOTS, Word};

/// One member's side of a group, and everything in flight on it.
pub(crate) struct Inner {
    pub(crate) members: Members,
    /// The members by their number in the world.
    pub(crate) ranks: Vec<usize>,
    pub(crate) heap: Arc<Heap>,
    pub(crate) alarm: Arc<Alarm>,
    /// Whether waiting may spin: there is a core for each rank.
    pub(crate) spins: bool,
    pub(crate) recorder: Recorder,
    pub(crate) state: RefCell<State>,
}

/// What is in flight.
#[derive(Default)]
pub(crate) struct State {
    /// The number of the next collective.
    pub(crate) next: u64,
    pub(crate) active: VecDeque<Call>,
    pub(crate) finished: BTreeMap<u64, Vec<Buffer>>,
    pub(crate) mails: Mails,
    pub(crate) next_batch: u64,
    pub(crate) failed: Option<CommError>,
}

/// Says that a rank of the world has failed: one that panicked here, or one that somebody who watches reports.
#[derive(Default)]
pub(crate) struct Alarm {
    panicked: AtomicU64,
    watch: Option<Watch>,
}

/// Whoever watches over ranks that are processes: what has happened, if anything. Asked while waiting, so it must be
/// quick where nothing has.
pub(crate) type Watch = Box<dyn Fn() -> Option<String> + Send + Sync>;

impl Alarm {
    pub(crate) fn watched(watch: Watch) -> Alarm {
        Alarm { watch: Some(watch), ..Alarm::default() }
    }

    pub(crate) fn raise(&self, rank: usize) {
        // The first one counts.
        let _ = self.panicked.compare_exchange(0, rank as u64 + 1, Release, Acquire);
    }

    pub(crate) fn panicked(&self) -> Option<usize> {
        self.panicked.load(Acquire).checked_sub(1).map(|rank| rank as usize)
    }

    fn failure(&self) -> Option<CommError> {
        let panicked = self.panicked().map(|rank| CommError::Panicked { rank });
        panicked.or_else(|| self.watch.as_ref().and_then(|watch| watch()).map(CommError::World))
    }
}

/// How long a waiter spins before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

impl Inner {
    /// Makes everything in flight go as far as it can.
    pub(crate) fn advance(&self) -> Result<(), CommError> {
        let outcome = self.try_advance();
        if let Err(error) = &outcome {
            self.fail(error);
            if let CommError::Lengths { from, .. } | CommError::Splits { from, .. } = error {
                // Only this member can see it, so it tells the others that it stopped.
                let row = &self.members.rows[self.members.me];
                row.set_failure(*from, u64::MAX);
                row.ring();
            }
        }
        outcome
    }

    /// Keeps the first error: every later call says it too.
    fn fail(&self, error: &CommError) {
        let mut state = self.state.borrow_mut();
        if state.failed.is_none() {
            let oldest = state.active.front();
            let (number, site) =
                (oldest.map_or(state.next, |call| call.number), oldest.map(|call| call.site));
            self.recorder.error(number, &error.to_string(), site);
            state.failed = Some(error.clone());
        }
    }

    fn try_advance(&self) -> Result<(), CommError> {
        if let Some(error) = &self.state.borrow().failed {
            return Err(error.clone());
        }
        let members = &self.members;
        let mut active = std::mem::take(&mut self.state.borrow_mut().active);
        let mut outcome = Ok(());
        let mut kept = VecDeque::new();
        for mut call in active.drain(..) {
            match outcome.clone().and_then(|()| self.advance_call(&mut call)) {
                Ok(true) => {
                    self.recorder.call(Kind::Finish, call.record(), call.site);
                    let buffers = call.operand.into_iter().chain(call.result).collect();
                    self.state.borrow_mut().finished.insert(call.number, buffers);
                }
                Ok(false) => kept.push_back(call),
                Err(error) => {
                    outcome = Err(error);
                    kept.push_back(call);
                }
            }
        }
        let mut state = self.state.borrow_mut();
        let done = kept.front().map_or(state.next, |call| call.number);
        state.active = kept;
        let row = &members.rows[members.me];
        if row.done() != done {
            row.set_done(done);
            row.ring();
        }
        outcome?;
        state.mails.advance(members)
    }

    /// One call; true when it is finished.
    fn advance_call(&self, call: &mut Call) -> Result<bool, CommError> {
        let members = &self.members;
        if !call.published {
            let free = |row: &Row| call.number < SLOTS || row.done() > call.number - SLOTS;
            if !members.rows.iter().all(free) {
                call.held = true;
                return Ok(false);
            }
            let site = self.heap.site(call.site)?;
            call.publish(members, site);
            if call.held {
                self.recorder.call(Kind::Publish, call.record(), call.site);
            }
        }
        for member in call.needs(members) {
            let row = &members.rows[member];
            if !row.has_published(call.number) {
                return Ok(false);
            }
            if !call.agrees(row) {
                let mine = &members.rows[members.me];
                mine.set_failure(member, call.number);
                mine.ring();
                return Err(self.mismatch(members.me, member, call.number));
            }
        }
        call.step(members)
    }

    /// What two members published for one call.
    fn mismatch(&self, a: usize, b: usize, call: u64) -> CommError {
        let mut sides = [self.side(a.min(b), call), self.side(a.max(b), call)];
        if sides[0].what == sides[1].what {
            sides.iter_mut().for_each(|side| side.what += ", with other sizes, routes or factors");
        }
        CommError::Mismatch { call, sides: Box::new(sides) }
    }

    fn side(&self, member: usize, call: u64) -> Side {
        let row = &self.members.rows[member];
        let (at, len) = (row.get(call, Word::Site) as usize, row.get(call, Word::SiteLength) as usize);
        // SAFETY: the text of a call site is written once, before its place is published, and never freed.
        let text = unsafe { row.segment.read(at, len) };
        Side {
            rank: self.ranks[member],
            what: format!(
                "{}, {} bytes",
                Op::describe(row.get(call, Word::What)),
                row.get(call, Word::Bytes)
            ),
            site: String::from_utf8_lossy(text).into_owned(),
        }
    }

    /// What has gone wrong elsewhere.
    fn elsewhere(&self) -> Option<CommError> {
        if let Some(error) = self.alarm.failure() {
            return Some(error);
        }
        let rows = self.members.rows.iter().enumerate();
        let (member, (other, call)) = rows.filter_map(|(i, row)| Some((i, row.failure()?))).next()?;
        if call == u64::MAX {
            return Some(CommError::Elsewhere { rank: self.ranks[member] });
        }
        Some(self.mismatch(member, other, call))
    }
}

impl Drop for Inner {
    /// What is in flight still completes: peers may need this member's part of it.
    fn drop(&mut self) {
        let until = Instant::now() + DRAIN;
        let busy = || {
            let state = self.state.borrow();
            !state.active.is_empty() || state.mails.has_unposted()
        };
        while busy() && self.advance().is_ok() && self.elsewhere().is_none() && Instant::now() < until {
            std::thread::yield_now();
        }
    }
}

/// How long a dropped group goes on with what is in flight.
const DRAIN: Duration = Duration::from_secs(1);

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
pub struct Pending {
    pub(crate) inner: Rc<Inner>,
    pub(crate) what: What,
}

impl Pending {
    #[track_caller]
    fn take(&self) -> Option<Vec<Buffer>> {
        let mut state = self.inner.state.borrow_mut();
        match self.what {
            What::Call(number) => state.finished.remove(&number),
            What::Batch(batch) => {
                let buffers = state.mails.take_finished(batch)?;
                let bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
                self.inner.recorder.call(
                    Kind::Finish,
                    recorder::Call::batch(batch, bytes),
                    Location::caller(),
                );
                Some(buffers)
            }
        }
    }

    /// What the flight recorder keeps of it while it is in flight.
    fn record(&self) -> recorder::Call {
        match self.what {
            What::Call(number) => {
                let state = self.inner.state.borrow();
                let call = state.active.iter().find(|call| call.number == number);
                call.map_or(recorder::Call { number, ..recorder::Call::default() }, Call::record)
            }
            What::Batch(batch) => recorder::Call::batch(batch, 0),
        }
    }

    /// The buffers, if the operation is finished; never waits.
    #[track_caller]
    pub fn test(&self) -> Result<Option<Vec<Buffer>>, CommError> {
        if let Some(buffers) = self.take() {
            return Ok(Some(buffers));
        }
        self.inner.advance()?;
        Ok(self.take())
    }

    /// The buffers, when the operation is finished: the operand where there is one, then the result where it is
    /// another. Never waits past the time given.
    #[track_caller]
    pub fn wait(self, until: Instant) -> Result<Vec<Buffer>, CommError> {
        let inner = &self.inner;
        let (start, mut recorded, site) = (Instant::now(), false, Location::caller());
        loop {
            if let Some(buffers) = self.test()? {
                return Ok(buffers);
            }
            if let Some(error) = inner.elsewhere() {
                inner.fail(&error);
                return Err(error);
            }
            let now = Instant::now();
            if now >= until {
                let error = self.late();
                inner.fail(&error);
                return Err(error);
            }
            if inner.spins && now - start < SPIN {
                std::hint::spin_loop();
                continue;
            }
            if !std::mem::replace(&mut recorded, true) {
                inner.recorder.call(Kind::Wait, self.record(), site);
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
        let state = inner.state.borrow();
        let number = match self.what {
            What::Call(number) => number,
            What::Batch(batch) => return state.mails.waits_for(batch).into_iter().collect(),
        };
        let Some(call) = state.active.iter().find(|call| call.number == number) else { return Vec::new() };
        let rows = &inner.members.rows;
        if !call.published {
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
        !self.missing().contains(&member) || self.inner.alarm.panicked().is_some()
    }

    fn late(&self) -> CommError {
        let ranks = self.missing().into_iter().map(|member| self.inner.ranks[member]).collect();
        match self.what {
            What::Call(number) => {
                let state = self.inner.state.borrow();
                let call = state.active.iter().find(|call| call.number == number);
                let what = call.map_or(String::new(), |call| Op::describe(call.op.what()));
                CommError::Deadline { what: format!("{what}: call {number}"), missing: ranks }
            }
            What::Batch(_) => CommError::Deadline { what: "exchange".into(), missing: ranks },
        }
    }
}
