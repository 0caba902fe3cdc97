//! Waiting for an operation: polling, spinning, sleeping, and detecting that it will never finish.

use std::panic::Location;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::CommError;
use crate::engine::Ticket;
use crate::error::{Operation, Side, Stop, message_text};
use crate::event::EventKind;
use crate::op::describe;
use crate::recorder::{self, CallText, Name};
use crate::shm::call::{Call, Stage};
use crate::shm::mail::Open;
use crate::shm::progress::{BUSY, Shm, cause_of};
use crate::shm::row::{Row, SLOTS};
use crate::shm::siblings;
use crate::shm::state::State;
use crate::shm::status::{self, WaitKind, Waits};
use crate::shm::waiting::{Watch, culprits, doing};
use crate::sync::yield_now;

/// How long a waiter spins before it sleeps: a little, plus the time that `bytes` bytes take to move. A large operation
/// is usually already in progress on the member it waits for.
pub(crate) fn spin(bytes: usize) -> Duration {
    Duration::from_micros(50) + Duration::from_nanos(bytes as u64 / 4).min(MOST)
}

/// Upper bound of the time for the bytes.
const MOST: Duration = Duration::from_millis(20);
/// How often a waiter that may not spin yields before it sleeps.
const YIELDS: usize = if cfg!(any(loom, shuttle)) { 0 } else { 16 };
/// How often it polls the awaited word before it checks the clock and failures.
pub(crate) const LOOKS: usize = 128;

/// What is waited for.
#[derive(Clone, Copy)]
pub(crate) enum What {
    /// A collective, by its number.
    Call(u64),
    /// A batch of messages, by its number.
    Batch(u64),
    /// Everything in flight, before the group is dropped: all calls are finished, and all messages taken.
    Leaving,
    /// Nothing: the outcome was taken.
    Over,
}

impl From<Ticket> for What {
    #[inline(always)]
    fn from(ticket: Ticket) -> What {
        match ticket {
            Ticket::Call(number) => What::Call(number),
            Ticket::Batch(batch) => What::Batch(batch),
            Ticket::Over => What::Over,
        }
    }
}

/// A wait for something on a group.
pub(crate) struct Waiter<'a> {
    pub(crate) inner: &'a Shm,
    pub(crate) what: What,
}

/// What it waits for, with members by their place in the group.
struct Missing {
    kind: WaitKind,
    number: u64,
    site: Name,
    text: CallText,
    members: Vec<usize>,
}

impl Waiter<'_> {
    /// Advances operations in flight; true if the awaited one is over.
    pub(crate) fn poll(&self) -> Result<bool, Stop> {
        let state = &mut *self.inner.state();
        if self.is_finished(state) {
            return Ok(true);
        }
        self.inner.advance(state)?;
        Ok(self.is_finished(state))
    }

    fn is_finished(&self, state: &State) -> bool {
        match self.what {
            What::Call(number) => state.is_finished(number),
            What::Batch(batch) => state.mails.is_finished(batch),
            What::Leaving => !state.is_busy() && state.mails.are_taken(),
            What::Over => false,
        }
    }

    /// Waits until it is over.
    pub(crate) fn wait(
        &self,
        until: impl FnOnce() -> Instant,
        site: &'static Location<'static>,
    ) -> Result<(), Stop> {
        if self.look_and_poll()? { Ok(()) } else { self.sleep(until(), site) }
    }

    /// Polls for a while the word that must change first, which is cheaper than advancing everything in flight; then
    /// advances. True if it is over.
    fn look_and_poll(&self) -> Result<bool, Stop> {
        if self.inner.cores.one_each() {
            self.look(&self.inner.state());
        }
        self.poll()
    }

    /// Waits for what was not over at a poll just before.
    fn sleep(&self, until: Instant, site: &'static Location<'static>) -> Result<(), Stop> {
        let (inner, start) = (self.inner, Instant::now());
        let mut watch = Watch::new(inner.heap.ranks(), start);
        let (mut yields, mut recorded, mut polled) = (0, false, true);
        let spin = spin(self.bytes());
        self.slow();
        loop {
            if !std::mem::take(&mut polled) && self.poll()? {
                return Ok(());
            }
            if inner.cores.one_each() && self.look(&inner.state()) {
                continue;
            }
            let busy = siblings::advance_others(inner).map_err(|stop| self.fail(*stop))?;
            if self.check_members()? {
                return Ok(());
            }
            if matches!(self.what, What::Leaving)
                && let Some(error) = inner.forgotten()
            {
                return Err(self.fail(error));
            }
            let now = Instant::now();
            if now >= until {
                return Err(self.fail(self.late()));
            }
            if inner.cores.one_each() && now - start < spin {
                continue;
            }
            // Ranks that share cores yield for a while, which costs less than sleeping and being woken.
            if !inner.cores.one_each() && yields < YIELDS {
                yields += 1;
                yield_now();
                continue;
            }
            if !std::mem::replace(&mut recorded, true) {
                self.record_wait(site);
            }
            let waits = |say: &mut dyn FnMut(Waits<'_>)| self.say_waits(say);
            watch.look(now, waits, || self.what()).map_err(|error| self.fail(error))?;
            // Operations in flight on another group ring other bells.
            let turn = if busy { until.min(now + BUSY) } else { until };
            match self.waits_for() {
                Some(member) => inner.members.rows[member].sleep(turn, || self.could_go_on(member)),
                None => yield_now(),
            }
        }
    }

    /// Advances what is in flight on all groups; true if it is over. Fails if it never will be.
    pub(crate) fn test(&self) -> Result<bool, Stop> {
        if self.poll()? {
            return Ok(true);
        }
        siblings::advance_others(self.inner).map_err(|stop| self.fail(*stop))?;
        self.check_members()
    }

    /// Fails if another member has failed, or has left without what is awaited of it. True if it is over after all.
    fn check_members(&self) -> Result<bool, Stop> {
        if let Some(error) = self.inner.elsewhere() {
            return Err(self.fail(error));
        }
        let Some(row) = self.left() else { return Ok(false) };
        if self.poll()? { Ok(true) } else { Err(self.fail(self.departed(row))) }
    }

    /// Fails the group with this error.
    fn fail(&self, error: CommError) -> Stop {
        self.inner.fail(&mut self.inner.state(), error).into()
    }

    /// Records that it was not over at the first poll.
    fn slow(&self) {
        let mut state = self.inner.state();
        match self.what {
            What::Call(number) => state.slow(number),
            What::Batch(batch) => state.mails.slow(batch),
            What::Leaving | What::Over => {}
        }
    }

    /// Records that the waiter goes to sleep.
    fn record_wait(&self, site: &'static Location<'static>) {
        let record = match self.what {
            What::Call(number) => self.inner.state().call(number).map(Call::record),
            What::Batch(batch) => Some(recorder::CallRecord::batch(batch, 0)),
            What::Leaving | What::Over => None,
        };
        if let Some(record) = record {
            let recorder = &self.inner.recorder;
            recorder.call(EventKind::Wait, record, recorder.site(site));
        }
    }

    /// Its size in bytes.
    fn bytes(&self) -> usize {
        let state = self.inner.state();
        match self.what {
            What::Call(number) => state.call(number).map_or(0, Call::bytes),
            What::Batch(batch) => state.mails.bytes(batch),
            What::Leaving | What::Over => 0,
        }
    }

    /// Polls for a while the one word that must change first; true if it did.
    fn look(&self, state: &State) -> bool {
        let members = &self.inner.members;
        let awaits = match self.what {
            What::Call(number) => state.call(number).and_then(|call| call.awaits(members)),
            What::Batch(batch) => state.mails.awaits(batch),
            What::Leaving | What::Over => None,
        };
        let Some((word, seen)) = awaits else { return false };
        (0..LOOKS).any(|_| {
            std::hint::spin_loop();
            word.load(Relaxed) != seen
        })
    }

    /// What it waits for; `None` if it can advance.
    fn missing(&self) -> Option<Missing> {
        let state = self.inner.state();
        match self.what {
            What::Call(number) => self.missing_call(state.call(number)?),
            What::Batch(batch) => state.mails.open(Some(batch)).map(missing_message),
            What::Leaving => {
                let call = state.call(state.done).and_then(|call| self.missing_call(call));
                let message =
                    || state.mails.open(None).or_else(|| state.mails.untaken()).map(missing_message);
                call.or_else(message)
            }
            What::Over => None,
        }
    }

    fn missing_call(&self, call: &Call) -> Option<Missing> {
        let (rows, number) = (&self.inner.members.rows, call.number);
        let all =
            |is: &dyn Fn(&Row) -> bool| (0..rows.len()).filter(|m| is(&rows[*m])).collect::<Vec<usize>>();
        let missing = |kind: WaitKind, members: Vec<usize>| {
            let described = || self.inner.recorder.name(&describe(call.key.what));
            let text = match call.text.name.is_empty() {
                true => CallText { name: described(), number: 0 },
                false => call.text,
            };
            Some(Missing { kind, number, site: call.site, text, members })
        };
        match call.stage {
            // The others may have reused the slots of a finished call, which then look unpublished.
            Stage::Finished => None,
            // It waits for a slot, until all have done the previous call in that slot.
            Stage::New => {
                let before = number.saturating_sub(SLOTS);
                let absent = all(&|row| row.done() <= before && !row.has_started(before));
                match absent.is_empty() {
                    false => missing(WaitKind::Start, absent),
                    true => missing(WaitKind::Progress, all(&|row| row.done() <= before)),
                }
            }
            Stage::Published => {
                let unpublished = all(&|row| !row.has_published(number));
                if !unpublished.is_empty() {
                    let absent = all(&|row| !row.has_started(number));
                    return match absent.is_empty() {
                        false => missing(WaitKind::Start, absent),
                        true => missing(WaitKind::Progress, unpublished),
                    };
                }
                let unready = call.unready(&self.inner.members);
                // All have published, so this member can make its part at once: two members that slept on one another's
                // bells instead would both wait in vain.
                let helped = || call.large_reduction().is_some_and(|reduction| reduction.try_lock().is_err());
                if unready.is_empty() || unready.contains(&self.inner.members.me) && !helped() {
                    return None;
                }
                missing(WaitKind::Progress, unready)
            }
        }
    }

    /// The members that have not done their part.
    fn missing_members(&self) -> Vec<usize> {
        self.missing().map_or_else(Vec::new, |missing| missing.members)
    }

    /// The ranks of these members, sorted.
    fn missing_ranks(&self, members: &[usize]) -> Vec<usize> {
        let mut ranks: Vec<usize> =
            members.iter().map(|member| self.inner.members.rows[*member].rank).collect();
        ranks.sort_unstable();
        ranks
    }

    /// Passes what it waits for to `say`, if it is known.
    fn say_waits(&self, say: &mut dyn FnMut(Waits<'_>)) {
        let Some(Missing { kind, number, site, text, members }) = self.missing() else { return };
        let ranks = self.missing_ranks(&members);
        let moved = self.inner.state().mails.moved() + siblings::moved(Some(self.inner));
        say(Waits { kind, number, site, text, group: self.inner.recorder.group(), moved, missing: &ranks });
    }

    fn waits_for(&self) -> Option<usize> {
        self.missing_members().into_iter().find(|member| *member != self.inner.members.me)
    }

    /// Whether something changed since the last poll, so that sleeping would miss it.
    fn could_go_on(&self, member: usize) -> bool {
        let inner = &self.inner;
        let news = match self.what {
            // What a batch lacks is updated only by an advance.
            What::Batch(_) => inner.state().mails.has_news(member),
            _ => !self.missing_members().contains(&member),
        };
        news || inner.elsewhere().is_some() || self.left().is_some()
    }

    /// The row of a member that this waits for and that has left the group.
    fn left(&self) -> Option<&Row> {
        let rows = &self.inner.members.rows;
        if !rows.iter().any(|row| row.has_left()) {
            return None;
        }
        self.missing_members().into_iter().map(|member| &rows[member]).find(|row| row.has_left())
    }

    /// The error of a member that has left: the cause that it published, or else that it left.
    fn departed(&self, row: &Row) -> CommError {
        if let Some(error) = self.inner.elsewhere() {
            return error;
        }
        if status::cause(&row.segment).is_some() {
            return cause_of(row);
        }
        if let (What::Leaving, Some(error)) =
            (self.what, self.inner.state().mails.refused(&self.inner.members))
        {
            return error;
        }
        let (what, called) = (Box::new(self.what()), self.called().into_iter().collect());
        CommError::Left { rank: row.rank, what, called }
    }

    /// The awaited operation, as this rank called it.
    fn called(&self) -> Option<Side> {
        let Missing { kind, number, site, text, .. } = self.missing()?;
        let mine = self.inner.members.mine();
        let (text, site) = (text.text(&mine.segment), site.text(&mine.segment));
        let what = match kind {
            WaitKind::Receive => message_text("receive", &text, number),
            WaitKind::Send => message_text("send", &text, number),
            WaitKind::Start | WaitKind::Progress | WaitKind::Release => text,
        };
        Some(Side { rank: mine.rank, what, site })
    }

    /// The error of members that have not done their part in time.
    pub(crate) fn late(&self) -> CommError {
        let missing = self.missing_ranks(&self.missing_members());
        let ranks = self.inner.heap.ranks();
        let culprits = culprits(ranks, &missing);
        let mut all = missing;
        all.extend(culprits.iter().copied());
        all.sort_unstable();
        all.dedup();
        CommError::Deadline { what: Box::new(self.what()), missing: culprits, doing: doing(ranks, &all) }
    }

    /// The awaited operation, as errors name it.
    fn what(&self) -> Operation {
        let state = self.inner.state();
        let call = |number: u64| {
            let what = state.call(number).map(|call| call.describe(&self.inner.members.mine().segment));
            let group = self.inner.recorder.group_name().to_string();
            Operation::Call { what: what.unwrap_or_default(), number, group }
        };
        match self.what {
            What::Call(number) => call(number),
            What::Leaving if state.has_open_calls() => call(state.done),
            What::Batch(_) | What::Leaving | What::Over => Operation::Exchange,
        }
    }
}

fn missing_message(open: Open) -> Missing {
    let Open { receives, tag, site, text, members } = open;
    let kind = if receives { WaitKind::Receive } else { WaitKind::Send };
    Missing { kind, number: tag, site, text: CallText { name: text, number: 0 }, members }
}
