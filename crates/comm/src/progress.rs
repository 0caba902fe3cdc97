//! Making what is in flight on a group go on, and finding out that it cannot.

use std::cell::{Cell, OnceCell, RefCell, RefMut};
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::CommError;
use crate::alarm::Alarm;
use crate::buffer::{Access, claim_all};
use crate::buffers::{Buffers, bytes};
use crate::call::{Call, Stage, access};
use crate::cores::Cores;
use crate::error::{Side, Stop};
use crate::event::Kind;
use crate::heap::Heap;
use crate::mail::Parcel;
use crate::members::Members;
use crate::op::{Lists, Op};
use crate::progress_thread::ProgressThread;
use crate::recorder::{self, Name, Recorder};
use crate::row::{Row, SLOTS, STAGE, Word};
use crate::siblings;
use crate::state::{Given, State};
use crate::sync::yield_now;

/// One member's side of a group, and everything in flight on it.
pub(crate) struct Inner {
    pub(crate) members: Members,
    pub(crate) heap: Arc<Heap>,
    pub(crate) alarm: Arc<Alarm>,
    pub(crate) cores: Cores,
    /// Another thread that makes large reductions go on, where one was asked for.
    pub(crate) progress_thread: OnceCell<ProgressThread>,
    pub(crate) recorder: Recorder,
    /// What the members must have in common in the next call besides what it says itself.
    pub(crate) note: Cell<u64>,
    /// Where the next call is said to be made, if not where it is.
    pub(crate) site: Cell<Name>,
    state: RefCell<State>,
}

impl Inner {
    pub(crate) fn new(
        members: Members,
        heap: Arc<Heap>,
        alarm: Arc<Alarm>,
        cores: Cores,
        recorder: Recorder,
    ) -> Inner {
        let state = State::new(&members);
        let progress_thread = OnceCell::new();
        let (note, site, state) = (Cell::new(0), Cell::default(), RefCell::new(state));
        Inner { members, heap, alarm, cores, progress_thread, recorder, note, site, state }
    }

    pub(crate) fn state(&self) -> RefMut<'_, State> {
        self.state.borrow_mut()
    }

    /// Where the call at hand is made.
    #[inline]
    fn site_of(&self, site: &'static Location<'static>) -> Name {
        match self.site.take() {
            said if said != Name::default() => said,
            _ => self.recorder.site(site),
        }
    }

    /// Takes a call on and publishes it. Inlined, so that the call is made where it stays.
    #[inline(always)]
    pub(crate) fn start(
        &self,
        (op, lists): (Op, Option<Box<Lists>>),
        (buffers, count): (Buffers, usize),
        common: bool,
        site: &'static Location<'static>,
    ) -> Result<u64, CommError> {
        let mut state = self.state();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let noted = claim_all(&self.heap, &buffers, (count, access(&op, self.members.me, common)))?;
        let state = &mut *state;
        let number = state.next();
        let site = self.site_of(site);
        let is_next = state.done == number && self.has_slot(&mut state.released, number);
        let call = state.calls.take_on();
        call.renew(number, (op, lists), (buffers, count, noted), common, self.members.n(), site);
        call.key.extra ^= self.note.take();
        // Whoever waits for a small one looks at the others then. A large one begins with what they have.
        let is_quick = is_next && call.key.is_staged() && !common;
        if is_quick {
            call.publish_small(&self.members);
        }
        call.event = self.recorder.call(Kind::Start, call.record(), site);
        if !is_quick {
            self.advance(state, false).map_err(|stop| *stop)?;
        }
        Ok(number)
    }

    /// Makes everything in flight go as far as it can. Where there is time to be thorough, it also compares the calls
    /// of members that it needs nothing from.
    pub(crate) fn advance(&self, state: &mut State, thorough: bool) -> Result<(), Stop> {
        if let Some(error) = &state.failed {
            return Err(error.clone().into());
        }
        let calls = if state.compared == state.next() { Ok(()) } else { self.advance_calls(state, thorough) };
        let outcome = calls.and_then(|()| state.mails.advance(&self.members));
        outcome.map_err(|error| self.fail(state, *error).into())
    }

    fn advance_calls(&self, state: &mut State, thorough: bool) -> Result<(), Stop> {
        let is_due = state.uncompared > 0 && (thorough || state.uncompared > UNCOMPARED);
        if state.done + 1 == state.next() && !is_due {
            return self.advance_last(state);
        }
        let mut outcome = if is_due { self.compare_all(state) } else { Ok(()) };
        let (mut uncompared, mut has_seen_all) = (state.uncompared, false);
        for call in &mut state.calls.all_mut()[(state.done - state.first) as usize..] {
            if outcome.is_ok() && call.stage != Stage::Finished {
                outcome = self.advance_call(call, &mut state.released);
                has_seen_all |= call.is_compared;
                uncompared += usize::from(call.stage == Stage::Finished && !call.is_compared);
            }
        }
        siblings::count(&mut state.uncompared, uncompared);
        if has_seen_all {
            outcome = outcome.and_then(|()| self.compare_rest(state));
        }
        self.settle(state);
        outcome
    }

    /// The same where the last call alone is open, as it mostly is.
    fn advance_last(&self, state: &mut State) -> Result<(), Stop> {
        let Some(call) = state.calls.last() else { return Ok(()) };
        self.advance_call(call, &mut state.released)?;
        let is_compared = call.is_compared;
        if call.stage == Stage::Finished { self.count_last(state, is_compared) } else { Ok(()) }
    }

    /// Counts the last call, which alone was open and is finished.
    #[inline(always)]
    fn count_last(&self, state: &mut State, is_compared: bool) -> Result<(), Stop> {
        if is_compared && siblings::uncompared() > 0 {
            let outcome = self.compare_rest(state);
            self.settle(state);
            return outcome;
        }
        if is_compared {
            state.compared += 1;
        } else {
            let uncompared = state.uncompared + 1;
            siblings::count(&mut state.uncompared, uncompared);
        }
        state.done += 1;
        self.members.mine().set_done(state.done, state.compared);
        state.forget();
        Ok(())
    }

    /// The outcome of a call that alone is open, if the members that it needs come while this looks at each of them so
    /// often. This is the way of most small calls.
    #[inline]
    pub(crate) fn finish_last(&self, number: u64, looks: usize) -> Result<Option<Given>, CommError> {
        let state = &mut *self.state();
        let is_last = state.done == number && state.next() == number + 1;
        // Messages in flight must go on, too.
        if !is_last || state.uncompared > UNCOMPARED || state.mails.is_open() || state.failed.is_some() {
            return Ok(None);
        }
        let Some(call) = state.calls.last() else { return Ok(None) };
        if call.stage != Stage::Published || call.job().is_some() {
            return Ok(None);
        }
        if let Err(stop) = self.go_on(call, looks) {
            return Err(self.fail(state, *stop));
        }
        if call.stage != Stage::Finished {
            return Ok(None);
        }
        let (outcome, is_compared) = (call.take_outcome(), call.is_compared);
        match self.count_last(state, is_compared) {
            Ok(()) => Ok(Some(outcome)),
            Err(stop) => Err(self.fail(state, *stop)),
        }
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

    /// Finds out how far all calls are, and tells the others.
    fn settle(&self, state: &mut State) {
        let (done, compared) = (state.done, state.compared);
        let upto = |start: u64, is: fn(&Call) -> bool| {
            let rest = &state.calls.all()[(start - state.first) as usize..];
            start + rest.iter().take_while(|call| is(call)).count() as u64
        };
        let now = upto(done, |call| call.stage == Stage::Finished);
        state.compared = upto(compared, |call| call.stage == Stage::Finished && call.is_compared);
        state.done = now;
        if state.done != done {
            self.members.mine().set_done(state.done, state.compared);
        } else if state.compared != compared {
            self.members.mine().set_compared(state.compared);
        }
        state.forget();
    }

    /// One call, as far as it can.
    #[inline(always)]
    fn advance_call(&self, call: &mut Call, released: &mut u64) -> Result<(), Stop> {
        let (members, number) = (&self.members, call.number);
        if call.stage == Stage::New {
            if !self.has_slot(released, number) {
                call.held = true;
                return Ok(());
            }
            call.publish(members, &self.heap)?;
            if call.held {
                self.recorder.call(Kind::Publish, call.record(), call.site);
            }
            if let (Some(thread), Some(job)) = (self.progress_thread.get(), call.job()) {
                thread.take_on(job);
            }
        }
        if let Some(job) = call.job() {
            // Where the progress thread is at it, it goes on without this thread.
            let outcome = job.try_lock().map_or(Ok(false), |mut job| job.step(members));
            if outcome.map_err(|other| self.mismatch(members.me, other, number))? {
                call.is_compared = true;
                self.finish(call);
            }
            return Ok(());
        }
        self.go_on(call, 0)
    }

    /// One that is published and has no job, with so many looks at each member that it needs.
    #[inline(always)]
    fn go_on(&self, call: &mut Call, looks: usize) -> Result<(), Stop> {
        let members = &self.members;
        let needs = call.needs(members);
        if !self.compare(call, needs.clone(), looks)? {
            return Ok(());
        }
        if call.step(members)? {
            call.is_compared = needs == (0..members.n());
            call.checked = 0;
            self.finish(call);
        }
        Ok(())
    }

    #[inline(always)]
    fn finish(&self, call: &mut Call) {
        call.stage = Stage::Finished;
        call.unclaim(self.members.me);
        self.recorder.finish(call.event, call.is_slow);
    }

    /// Compares a call with those of some members, in order, looking at each so often; true when all of them have
    /// published theirs.
    #[inline(always)]
    fn compare(&self, call: &mut Call, range: Range<usize>, looks: usize) -> Result<bool, Stop> {
        let (members, number) = (&self.members, call.number);
        for member in range.start + call.checked..range.end {
            if member != members.me {
                let Some(key) = members.published(member, number, looks) else { return Ok(false) };
                if !call.key.agrees(key) {
                    return Err(self.mismatch(members.me, member, number).into());
                }
            }
            call.checked += 1;
        }
        Ok(true)
    }

    /// Compares what is finished with what all members called, as far as they have published it. They keep theirs until
    /// all have.
    fn compare_all(&self, state: &mut State) -> Result<(), Stop> {
        let (mut uncompared, mut outcome) = (state.uncompared, Ok(()));
        let calls = state.calls.all_mut().iter_mut();
        for call in calls.filter(|call| call.stage == Stage::Finished && !call.is_compared) {
            match self.compare(call, 0..self.members.n(), 0) {
                Ok(is_compared) => call.is_compared = is_compared,
                Err(stop) => outcome = outcome.and(Err(stop)),
            }
            uncompared -= usize::from(call.is_compared);
        }
        siblings::count(&mut state.uncompared, uncompared);
        outcome
    }

    /// The same once somebody has needed all others, and so has seen all that they called before, here and on groups of
    /// the same ranks.
    fn compare_rest(&self, state: &mut State) -> Result<(), Stop> {
        if siblings::uncompared() == 0 {
            return Ok(());
        }
        self.compare_all(state)?;
        siblings::compare_others(self)
    }

    /// The same where there is nothing else to do.
    pub(crate) fn compare_finished(&self, state: &mut State) -> Result<(), Stop> {
        self.compare_all(state).map_err(|error| self.fail(state, *error).into())
    }

    /// Whether every member has done and compared the call that used this slot before. What is known of it is kept, so that
    /// the others' words are read only once a ring of slots is used up.
    fn has_slot(&self, released: &mut u64, number: u64) -> bool {
        if number >= *released + SLOTS {
            let compared = self.members.rows.iter().map(|row| row.compared()).min();
            *released = compared.unwrap_or(0);
        }
        number < *released + SLOTS
    }

    /// Takes a batch of messages on and posts it; a large one also receives what has come.
    #[inline(always)]
    pub(crate) fn start_batch(
        &self,
        parcel: &mut Parcel,
        site: &'static Location<'static>,
    ) -> Result<u64, CommError> {
        let state = &mut *self.state();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        parcel.noted = claim_all(&self.heap, &parcel.buffers, (parcel.sends, Access::Read))?;
        let bytes = bytes(&parcel.buffers);
        let site = self.site_of(site);
        let is_large = bytes > STAGE;
        let batch = state.mails.start(&self.members, parcel, is_large, site);
        let event = self.recorder.call(Kind::Start, recorder::Call::batch(batch, bytes), site);
        state.mails.set_event(event);
        if is_large {
            self.advance(state, false).map_err(|stop| *stop)?;
        }
        Ok(batch)
    }

    /// Keeps the first error, and tells the others of one that only this member can see.
    pub(crate) fn fail(&self, state: &mut State, error: CommError) -> CommError {
        if state.failed.is_none() {
            let site = state.call(state.done).map_or(Name::default(), |call| call.site);
            self.recorder.error(state.done, &error.to_string(), site);
            let row = self.members.mine();
            match &error {
                CommError::Mismatch { call, members, .. } if members.0 == self.members.me => {
                    row.set_failure(members.1, *call, 0);
                }
                CommError::Lengths { .. }
                | CommError::Splits { .. }
                | CommError::OtherGroup { .. }
                | CommError::Exhausted { .. } => {
                    // Without room for its words the others learn only that it stopped.
                    let text = self.recorder.name(&error.to_string()).word();
                    row.set_failure(self.members.me, u64::MAX, text);
                }
                _ => {}
            }
            if row.failure().is_some() {
                // Whoever waits for anybody looks at once.
                self.members.rows.iter().for_each(|row| row.ring());
            }
        }
        if state.failed.is_none() {
            self.unclaim_all(state);
        }
        state.failed.get_or_insert(error).clone()
    }

    /// Nothing goes on any more, so what is in flight keeps nobody here from its buffers; peers' leases still do.
    fn unclaim_all(&self, state: &State) {
        let open = state.calls.all().iter().filter(|call| call.stage != Stage::Finished);
        open.for_each(|call| call.unclaim(self.members.me));
        state.mails.unclaim();
    }

    /// What two members published for one call.
    fn mismatch(&self, a: usize, b: usize, call: u64) -> CommError {
        let mut sides = [self.side(a.min(b), call), self.side(a.max(b), call)];
        if sides[0].what == sides[1].what {
            sides.iter_mut().for_each(|side| side.what += ", with other types, shapes, routes or factors");
        }
        CommError::Mismatch { call, members: (a, b), sides: Box::new(sides) }
    }

    fn side(&self, member: usize, call: u64) -> Side {
        let row = &self.members.rows[member];
        Side {
            rank: row.rank,
            what: self.members.key(member, call).describe(),
            site: self.members.text(member, row.get(call, Word::Site)),
        }
    }

    /// What has gone wrong elsewhere.
    pub(crate) fn elsewhere(&self) -> Option<CommError> {
        if let Some(error) = self.alarm.failure() {
            return Some(error);
        }
        let rows = self.members.rows.iter().enumerate();
        let (member, (other, call, text)) = rows.filter_map(|(i, row)| Some((i, row.failure()?))).next()?;
        if call == u64::MAX {
            let error = self.members.text(member, text);
            return Some(CommError::Elsewhere { rank: self.members.rows[member].rank, error });
        }
        Some(self.mismatch(member, other, call))
    }
}

impl Drop for Inner {
    /// What is in flight still completes: peers may need this member's part of it.
    fn drop(&mut self) {
        let until = Instant::now() + DRAIN;
        let mut state = self.state();
        let busy = |state: &State| state.has_open_calls() || state.mails.has_unposted();
        // Whoever panics has no time: the others learn of it when this is over.
        while !std::thread::panicking() && busy(&state) && self.advance(&mut state, true).is_ok() {
            if self.elsewhere().is_some() || Instant::now() >= until {
                break;
            }
            yield_now();
        }
        siblings::count(&mut state.uncompared, 0);
        if state.failed.is_none() {
            self.unclaim_all(&state);
        }
        if !std::thread::panicking() {
            self.members.mine().leave();
            self.members.rows.iter().for_each(Row::ring);
        }
    }
}

/// So many calls wait to be compared before somebody has time for it: the slots are read together, which costs less
/// than one by one.
const UNCOMPARED: usize = 8;

/// The longest sleep while something else has to go on than what is waited for.
/// (A model does not wait, but must not depend on how long its steps take.)
pub(crate) const BUSY: Duration =
    if cfg!(any(loom, shuttle)) { Duration::from_secs(3600) } else { Duration::from_micros(200) };

/// How long a dropped group goes on with what is in flight.
const DRAIN: Duration = Duration::from_secs(1);
