//! The progress engine of a group: advances operations in flight, and detects that they cannot advance.

use std::cell::{Cell, OnceCell, RefCell, RefMut};
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::CommError;
use crate::cause::{Cause, NOBODY};
use crate::cores::Cores;
use crate::engine::{Checked, Given};
use crate::error::{Parties, Party, Stop};
use crate::event::EventKind;
use crate::message::Parcel;
use crate::recorder::{self, Name, Recorder};
use crate::request::Note;
use crate::settings::Settings;
use crate::shm::alarm::Alarm;
use crate::shm::buffer::{Access, claim_all};
use crate::shm::buffers::bytes;
use crate::shm::call::{Call, Stage, access};
use crate::shm::heap::Heap;
use crate::shm::late::Late;
use crate::shm::members::Members;
use crate::shm::progress_thread::ProgressThread;
use crate::shm::queue::Reusable;
use crate::shm::row::{SLOTS, STAGE, Stopped};
use crate::shm::state::State;
use crate::shm::status;
use crate::sync::yield_now;
use crate::unseen::forget_trouble;

/// One member's side of a group, and everything in flight on it.
pub(crate) struct Shm {
    pub(crate) members: Members,
    pub(crate) heap: Arc<Heap>,
    pub(crate) alarm: Arc<Alarm>,
    pub(crate) cores: Cores,
    /// A thread that advances large reductions, if requested.
    pub(crate) progress_thread: OnceCell<ProgressThread>,
    pub(crate) recorder: Recorder,
    pub(crate) settings: Rc<Settings>,
    state: RefCell<State>,
    pub(crate) late: Late,
    /// Whether the program has seen this group's error.
    pub(crate) is_seen: Cell<bool>,
}

impl Shm {
    pub(crate) fn new(
        members: Members,
        heap: Arc<Heap>,
        alarm: Arc<Alarm>,
        cores: Cores,
        recorder: Recorder,
        settings: Rc<Settings>,
    ) -> Shm {
        let state = RefCell::new(State::new(&members));
        let (progress_thread, is_seen) = (OnceCell::new(), Cell::new(false));
        let late = Late::default();
        Shm { members, heap, alarm, cores, progress_thread, recorder, settings, state, late, is_seen }
    }

    pub(crate) fn state(&self) -> RefMut<'_, State> {
        self.state.borrow_mut()
    }

    /// Marks the group's error as seen, and passes an error on to the program.
    #[cold]
    pub(crate) fn give(&self, error: CommError) -> CommError {
        self.is_seen.set(true);
        self.settings.told.set(true);
        error
    }

    /// The group's error, unless the program has seen it or the error that it follows from.
    pub(crate) fn unseen_error(&self) -> Option<CommError> {
        let told = self.settings.told.get();
        let unseen = |error: &CommError| !(self.is_seen.get() || told && error.follows());
        self.state().failed.clone().filter(unseen)
    }

    /// Starts a call and publishes it. Inlined, so that the call is constructed in place.
    #[inline(always)]
    pub(crate) fn start_call(&self, request: Checked<'_>) -> Result<u64, CommError> {
        let Checked { op, lists, buffers, count, common, note, site } = request;
        let mut state = self.state();
        if let Some(error) = &state.failed {
            return Err(self.give(error.clone()));
        }
        let noted = claim_all(&self.heap, &buffers, (count, access(&op, self.members.me, common)))?;
        let state = &mut *state;
        let number = state.next();
        forget_trouble();
        let site = if note.site.is_empty() { self.recorder.site(site) } else { note.site };
        let is_next = state.done == number && self.has_slot(&mut state.released, number);
        let call = state.calls.take_on();
        call.renew(number, (op, lists), (buffers, count, noted), common, self.members.n(), (site, note));
        // A small call is compared with the others in its wait. A large one starts with what they have published.
        let is_quick = is_next && call.key.is_small();
        if is_quick {
            call.publish_small(&self.members);
        }
        call.event = self.recorder.call(EventKind::Start, call.record(), site);
        if !is_quick {
            self.advance(state).map_err(|stop| self.give(*stop))?;
        }
        Ok(number)
    }

    /// Advances all operations in flight as far as possible.
    pub(crate) fn advance(&self, state: &mut State) -> Result<(), Stop> {
        if let Some(error) = &state.failed {
            return Err(error.clone().into());
        }
        let calls = if state.has_open_calls() { self.advance_calls(state) } else { Ok(()) };
        let strict = self.settings.strict.get();
        let outcome = calls.and_then(|()| state.mails.advance(&self.members, strict));
        outcome.map_err(|error| self.fail(state, *error).into())
    }

    #[inline]
    fn advance_calls(&self, state: &mut State) -> Result<(), Stop> {
        let mut outcome = Ok(());
        let (calls, released) = state.open_calls();
        for call in calls {
            if outcome.is_ok() && call.stage != Stage::Finished {
                outcome = self.advance_call(call, released);
            }
        }
        if state.settle() {
            self.members.mine().set_done(state.done);
        }
        outcome
    }

    /// The outcome of a call that is the only one open, if all members publish within `looks` retries each. Most small
    /// calls take this path.
    #[inline]
    pub(crate) fn finish_last(&self, number: u64, looks: usize) -> Result<Option<Given>, CommError> {
        let state = &mut *self.state();
        let is_last = state.done == number && state.next() == number + 1;
        // Messages in flight must advance, too.
        if !is_last || state.mails.is_open() || state.failed.is_some() {
            return Ok(None);
        }
        let Some(call) = state.calls.last() else { return Ok(None) };
        if call.stage != Stage::Published || call.large_reduction().is_some() {
            return Ok(None);
        }
        if let Err(stop) = self.go_on(call, looks) {
            return Err(self.fail(state, *stop));
        }
        if call.stage != Stage::Finished {
            return Ok(None);
        }
        let outcome = call.take_outcome();
        state.done += 1;
        self.members.mine().set_done(state.done);
        state.forget();
        Ok(Some(outcome))
    }

    /// The same for a batch of messages.
    #[inline]
    pub(crate) fn finish_last_batch(&self, batch: u64, looks: usize) -> Result<Option<Given>, CommError> {
        let state = &mut *self.state();
        if state.has_open_calls() || state.failed.is_some() {
            return Ok(None);
        }
        match state.mails.finish_last(&self.members, batch, looks, &self.recorder) {
            Ok(buffers) => Ok(buffers.map(|buffers| (buffers, None))),
            Err(stop) => Err(self.fail(state, *stop)),
        }
    }

    /// Advances one call as far as possible.
    #[inline(always)]
    fn advance_call(&self, call: &mut Call, released: &mut u64) -> Result<(), Stop> {
        let (members, number) = (&self.members, call.number);
        if call.stage == Stage::New {
            if !self.has_slot(released, number) {
                if !std::mem::replace(&mut call.held, true) {
                    members.mine().set_started(number + 1);
                }
                return Ok(());
            }
            call.publish(members, &self.heap)?;
            if call.held {
                self.recorder.call(EventKind::Publish, call.record(), call.site);
            }
            if let (Some(thread), Some(reduction)) = (self.progress_thread.get(), call.large_reduction()) {
                thread.take_on(reduction);
            }
        }
        if let Some(reduction) = call.large_reduction() {
            // If the progress thread holds the reduction, it advances without this thread.
            let outcome = reduction.try_lock().map_or(Ok(false), |mut reduction| reduction.step(members));
            if outcome.map_err(|_| self.mismatch(number))? {
                self.finish(call);
            }
            return Ok(());
        }
        self.go_on(call, 0)
    }

    /// Advances a published call that is not a large reduction, with `looks` retries per member.
    #[inline(always)]
    fn go_on(&self, call: &mut Call, looks: usize) -> Result<(), Stop> {
        if self.compare(call, looks)? && call.step(&self.members)? {
            self.finish(call);
        }
        Ok(())
    }

    #[inline(always)]
    fn finish(&self, call: &mut Call) {
        call.stage = Stage::Finished;
        call.unclaim(self.members.me);
        self.recorder.finish(call.event, call.is_slow);
        if call.abandoned {
            call.empty();
        }
    }

    /// Compares a call with those of all members, in order, with `looks` retries per member; true when all of them have
    /// published theirs.
    #[inline(always)]
    fn compare(&self, call: &mut Call, looks: usize) -> Result<bool, Stop> {
        let (members, number) = (&self.members, call.number);
        for member in call.checked..members.n() {
            if member != members.me {
                let Some(key) = members.published(member, number, looks) else { return Ok(false) };
                if !call.key.agrees(key) {
                    return Err(self.mismatch(number).into());
                }
            }
            call.checked += 1;
        }
        Ok(true)
    }

    /// Whether every member has done the previous call in this slot. `released` is cached, so that the others' words
    /// are read only once the ring of slots is used up.
    fn has_slot(&self, released: &mut u64, number: u64) -> bool {
        if number >= *released + SLOTS {
            let done = self.members.rows.iter().map(|row| row.done()).min();
            *released = done.unwrap_or(0);
        }
        number < *released + SLOTS
    }

    /// Starts a batch of messages and posts it; a large one also receives what has arrived.
    #[inline(always)]
    pub(crate) fn start_messages(
        &self,
        parcel: &mut Parcel,
        (note, site): (&Note, &'static Location<'static>),
    ) -> Result<u64, CommError> {
        let state = &mut *self.state();
        if let Some(error) = &state.failed {
            return Err(self.give(error.clone()));
        }
        parcel.noted = claim_all(&self.heap, &parcel.buffers, (parcel.sends, Access::Read))?;
        let bytes = bytes(&parcel.buffers);
        forget_trouble();
        let site = if note.site.is_empty() { self.recorder.site(site) } else { note.site };
        let is_large = bytes > STAGE;
        let is_crowded = state.mails.is_crowded();
        let strict = self.settings.strict.get();
        let batch = state.mails.start(&self.members, parcel, (is_large, strict), site);
        let event = self.recorder.call(EventKind::Start, recorder::CallRecord::batch(batch, bytes), site);
        state.mails.set_event(event);
        if is_large || is_crowded {
            self.advance(state).map_err(|stop| self.give(*stop))?;
        }
        Ok(batch)
    }

    /// Keeps the first error, publishes it to the others, and wakes them.
    pub(crate) fn fail(&self, state: &mut State, error: CommError) -> CommError {
        if let Some(error) = &state.failed {
            return error.clone();
        }
        let row = self.members.mine();
        let site = state.call(state.done).map_or(Name::default(), |call| call.site);
        self.recorder.error(state.done, &error.failure(), site);
        self.say_cause(&error);
        row.stop(match error {
            CommError::Mismatch { call, .. } => Stopped::Differs(call),
            _ => Stopped::Caused,
        });
        // Every waiting member must check at once.
        self.members.rows.iter().for_each(|row| row.ring());
        self.unclaim_all(state);
        state.failed.insert(error).clone()
    }

    /// Publishes why this rank stops, for ranks that find it gone.
    pub(crate) fn say_cause(&self, error: &CommError) {
        let row = self.members.mine();
        let (by, failure) = match error {
            CommError::Elsewhere { rank, error, .. } => (*rank, error.clone()),
            CommError::World { error, .. } => (NOBODY, error.clone()),
            _ => (row.rank, error.failure()),
        };
        let is_deadlock = match error {
            CommError::Elsewhere { is_deadlock, .. } => *is_deadlock,
            _ => matches!(error, CommError::Deadlock { .. }),
        };
        let mut culprits = error.culprits();
        if culprits.is_empty() {
            culprits.push(row.rank);
        }
        let cause = Cause { is_deadlock, ..Cause::new(by, failure, culprits) };
        status::set_cause(&row.segment, &self.recorder, &cause);
    }

    /// Nothing advances any more, so operations in flight give up their claims; peers' leases remain.
    pub(crate) fn unclaim_all(&self, state: &State) {
        for call in state.calls.all().iter().filter(|call| call.stage != Stage::Finished) {
            // The progress thread may be advancing it: after this it writes nothing.
            call.cancel();
            call.unclaim(self.members.me);
        }
        state.mails.unclaim();
    }

    /// What the members called under one number, as far as published.
    pub(crate) fn parties(&self, call: u64) -> Vec<Party> {
        let mut parties = Parties::default();
        for (member, row) in self.members.rows.iter().enumerate().filter(|(_, row)| row.has_published(call)) {
            let (site, text) = self.members.names(member, call);
            let key = self.members.key(member, call);
            let what = if text.is_empty() { key.describe() } else { text };
            parties.add(row.rank, what, site, key.extra);
        }
        parties.list()
    }

    /// The error of a call that members made differently. Waits a moment for those that have not made it: only when
    /// most have made it can it tell which members differ.
    #[cold]
    fn mismatch(&self, call: u64) -> CommError {
        let until = Instant::now() + if cfg!(any(loom, shuttle)) { Duration::ZERO } else { MOMENT };
        while Instant::now() < until && !self.members.rows.iter().all(|row| row.has_published(call)) {
            yield_now();
        }
        let published =
            || (0..self.members.n()).filter(|member| self.members.rows[*member].has_published(call));
        let keys = || published().map(|member| self.members.key(member, call));
        let first = keys().next().unwrap_or_default();
        let other = keys().find(|key| !first.agrees(*key)).unwrap_or_default();
        let difference = first.difference(other);
        let group = self.recorder.group_name().to_string();
        CommError::Mismatch { call, group, difference, parties: self.parties(call) }
    }

    /// The failure of another member or rank, if any.
    pub(crate) fn elsewhere(&self) -> Option<CommError> {
        let others = self.members.rows.iter().enumerate().filter(|(member, _)| *member != self.members.me);
        for (_, row) in others {
            match row.stopped() {
                None => {}
                Some(Stopped::Differs(call)) => return Some(self.mismatch(call)),
                Some(Stopped::Caused) => return Some(cause_of(row)),
            }
        }
        self.alarm.failure()
    }
}

/// Why another rank stopped.
pub(crate) fn cause_of(row: &crate::shm::row::Row) -> CommError {
    let Some(cause) = status::cause(&row.segment) else {
        let (rank, error) = (row.rank, Box::default());
        return CommError::Elsewhere { rank, error, culprits: vec![rank], is_deadlock: false };
    };
    let (error, Cause { by, culprits, is_deadlock, .. }) = (cause.failure(), cause);
    match by {
        NOBODY => CommError::World { culprits, error },
        rank => CommError::Elsewhere { rank, error, culprits, is_deadlock },
    }
}

/// How long a member that finds a mismatch waits for the calls of the others.
const MOMENT: Duration = Duration::from_millis(50);

/// The longest sleep while other operations than the awaited one must advance. (A model does not wait, but must not
/// depend on how long its steps take.)
pub(crate) const BUSY: Duration =
    if cfg!(any(loom, shuttle)) { Duration::from_secs(3600) } else { Duration::from_micros(200) };
