//! Sends and receives: numbered per pair of members, matched by tag in that order.
//!
//! A send is published in a ring of mails for its destination, and the receiver reads it in place. The receiver notes
//! that it took it, which completes and releases the send. Small messages travel in the mail itself, and their sends
//! complete at once, unless the group is strict.

mod missing;
mod rings;

pub(crate) use missing::Open;
use missing::mismatch;
use rings::{Inbox, Outbox};

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::Stop;
use crate::message::{About, End, Parcel};
use crate::recorder::{Name, Recorder};
use crate::shm::buffer::Access;
use crate::shm::buffers::{Buffers, bytes};
use crate::shm::lease::Lease;
use crate::shm::members::{Members, copy};
use crate::shm::queue::{Queue, Reusable};
use crate::shm::row::{MAILS, MailWord, STAGE};
use crate::sync::AtomicU64;

/// A batch in flight.
#[derive(Default)]
struct Batch {
    buffers: Buffers,
    /// How many of them are sends; they come first.
    sends: usize,
    /// Whether a claim was recorded.
    noted: bool,
    open: usize,
    /// The peer of its last message.
    last: usize,
    /// Its event in the flight recorder.
    event: u64,
    /// Whether its end is timed: it is large, or was not over at the first poll.
    is_slow: bool,
    /// Its outcome was taken, or nobody waits for it.
    over: bool,
}

impl Batch {
    /// Ends the claim on one of its buffers.
    fn unclaim(&self, index: usize) {
        if self.noted {
            let access = if index < self.sends { Access::Read } else { Access::Write };
            self.buffers[index].unclaim(access);
        }
    }
}

impl Reusable for Batch {
    fn empty(&mut self) {
        if !self.buffers.is_empty() {
            self.buffers = Buffers::default();
        }
    }
}

/// One message of a batch.
#[derive(Clone, Copy)]
struct Letter {
    batch: u64,
    index: usize,
    tag: u64,
    about: About,
    site: Name,
}

/// An unfinished batch is parked when the queue is longer than this.
const BEHIND: usize = 64;

/// This member's sends and receives.
pub(crate) struct Mails {
    first: u64,
    batches: Queue<Batch>,
    /// Batches before `first` that are unfinished or that nobody took: parked, so that they block no later batch.
    parked: BTreeMap<u64, Batch>,
    outboxes: Vec<Outbox>,
    inboxes: Vec<Inbox>,
    /// Messages that are not complete.
    open: usize,
    /// How often a message was posted or completed.
    moved: u64,
}

impl Mails {
    pub(crate) fn new(members: &Members) -> Mails {
        Mails {
            first: 0,
            batches: Queue::default(),
            parked: BTreeMap::new(),
            outboxes: (0..members.n()).map(|to| Outbox::new(members, to)).collect(),
            inboxes: (0..members.n()).map(|from| Inbox::new(members, from)).collect(),
            open: 0,
            moved: 0,
        }
    }

    /// How often a message was posted or completed: at most twice per message.
    pub(crate) fn moved(&self) -> u64 {
        self.moved
    }

    /// Whether the open messages have reached the limit at which starting a batch also advances them.
    pub(crate) fn is_crowded(&self) -> bool {
        self.open > BEHIND
    }

    /// The number of the next batch.
    pub(crate) fn next_batch(&self) -> u64 {
        self.first + self.batches.all().len() as u64
    }

    /// Adds a batch, posts what has room, and returns its number.
    #[inline(always)]
    pub(crate) fn start(
        &mut self,
        members: &Members,
        parcel: &mut Parcel,
        (is_slow, strict): (bool, bool),
        site: Name,
    ) -> u64 {
        let Parcel { ends, buffers, sends, noted } = parcel;
        let batch = self.next_batch();
        self.open += ends.len();
        let place = self.batches.take_on();
        place.buffers = std::mem::take(buffers);
        place.sends = *sends;
        place.noted = *noted;
        place.open = ends.len();
        place.last = ends.last().map_or(0, |end| end.peer);
        place.is_slow = is_slow;
        place.over = false;
        for (index, &End { peer, tag, about }) in ends.iter().enumerate() {
            let letter = Letter { batch, index, tag, about, site };
            if index >= *sends {
                self.inboxes[peer].receives.push_back(letter);
            } else if self.outboxes[peer].waiting.is_empty() && self.outboxes[peer].has_room() {
                self.post(members, peer, letter, strict);
            } else {
                self.outboxes[peer].waiting.push_back(letter);
            }
        }
        batch
    }

    /// Sets the event of the last batch.
    pub(crate) fn set_event(&mut self, event: u64) {
        self.batches.all_mut().last_mut().into_iter().for_each(|batch| batch.event = event);
    }

    /// The buffers of a batch whose messages are all complete.
    #[inline(always)]
    pub(crate) fn take_finished(&mut self, number: u64, recorder: &Recorder) -> Option<Buffers> {
        let batch = self.batch_mut(number).filter(|batch| batch.open == 0)?;
        batch.over = true;
        recorder.finish(batch.event, batch.is_slow);
        let buffers = std::mem::take(&mut batch.buffers);
        self.forget(number);
        Some(buffers)
    }

    /// The buffers of the last batch, if nothing else is open and its one incomplete message, if any, arrives within
    /// `looks` retries.
    #[inline]
    pub(crate) fn finish_last(
        &mut self,
        members: &Members,
        number: u64,
        looks: usize,
        recorder: &Recorder,
    ) -> Result<Option<Buffers>, Stop> {
        let is_last = self.next_batch() == number + 1;
        let Some(batch) = self.batches.last() else { return Ok(None) };
        if !is_last || self.open != batch.open || batch.open > 1 {
            return Ok(None);
        }
        if batch.open == 1 {
            let from = batch.last;
            if !self.inboxes[from].comes(number, looks) {
                return Ok(None);
            }
            self.receive(members, from)?;
        }
        Ok(self.take_finished(number, recorder))
    }

    /// Whether all messages of a batch are complete.
    pub(crate) fn is_finished(&self, number: u64) -> bool {
        self.batch(number).is_some_and(|batch| batch.open == 0)
    }

    /// The same, or they were, and the batch is forgotten.
    pub(crate) fn is_complete(&self, number: u64) -> bool {
        self.batch(number).is_none_or(|batch| batch.open == 0)
    }

    /// The bytes of a batch.
    pub(crate) fn bytes(&self, number: u64) -> usize {
        self.batch(number).map_or(0, |batch| bytes(&batch.buffers))
    }

    /// Records that a batch was not over at the first poll.
    pub(crate) fn slow(&mut self, number: u64) {
        self.batch_mut(number).into_iter().for_each(|batch| batch.is_slow = true);
    }

    /// Nobody waits for a batch any more.
    pub(crate) fn abandon(&mut self, number: u64) {
        if let Some(batch) = self.batch_mut(number) {
            batch.over = true;
        }
        self.forget(number);
    }

    #[inline]
    fn batch(&self, number: u64) -> Option<&Batch> {
        match number.checked_sub(self.first) {
            Some(at) => self.batches.all().get(at as usize),
            None => self.parked.get(&number),
        }
    }

    #[inline]
    fn batch_mut(&mut self, number: u64) -> Option<&mut Batch> {
        match number.checked_sub(self.first) {
            Some(at) => self.batches.all_mut().get_mut(at as usize),
            None => self.parked.get_mut(&number),
        }
    }

    /// Removes batches that are over, perhaps batch `number`. An unfinished one with many behind it is parked, so that
    /// it does not hold them up.
    #[inline(always)]
    fn forget(&mut self, number: u64) {
        if number < self.first && self.parked.get(&number).is_some_and(|batch| batch.over && batch.open == 0)
        {
            self.parked.remove(&number);
        }
        while let Some(batch) = self.batches.first() {
            if !(batch.over && batch.open == 0) && self.batches.all().len() <= BEHIND {
                break;
            }
            if !(batch.over && batch.open == 0) {
                self.parked.insert(self.first, self.batches.take_first());
            } else {
                self.batches.forget_first();
            }
            self.first += 1;
        }
    }

    /// How many batches are not over.
    pub(crate) fn in_flight(&self) -> usize {
        let all = self.batches.all().iter().chain(self.parked.values());
        all.filter(|batch| !batch.over).count()
    }

    /// Whether a message from `member` arrived, or `member` took one, since the last advance.
    pub(crate) fn has_news(&self, member: usize) -> bool {
        let (inbox, outbox) = (&self.inboxes[member], &self.outboxes[member]);
        let taken = |(number, _): &(u64, Letter)| outbox.is_taken(*number);
        inbox.receivable(inbox.next).is_some()
            || outbox.sent.iter().any(taken)
            || !outbox.waiting.is_empty() && outbox.posted < outbox.taken_below() + MAILS
    }

    /// The word that must change before a receive of an unfinished batch can complete, with the value seen.
    pub(crate) fn awaits(&self, batch: u64) -> Option<(&AtomicU64, u64)> {
        let is_first = |inbox: &&Inbox| inbox.receives.front().is_some_and(|letter| letter.batch == batch);
        let inbox = self.inboxes.iter().filter(is_first).find(|inbox| inbox.taken == 0)?;
        let stamp = &inbox.mail(inbox.next)[MailWord::Stamp as usize];
        let seen = stamp.load(Relaxed);
        (seen != inbox.next + 1).then_some((stamp, seen))
    }

    /// Whether any message is incomplete.
    pub(crate) fn is_open(&self) -> bool {
        self.open > 0
    }

    /// Ends the claims on the buffers of incomplete messages, which will never complete.
    pub(crate) fn unclaim(&self) {
        let out = self.outboxes.iter();
        let out = out.flat_map(|outbox| outbox.sent.iter().map(|(_, letter)| letter).chain(&outbox.waiting));
        for letter in out.chain(self.inboxes.iter().flat_map(|inbox| &inbox.receives)) {
            self.batch(letter.batch).into_iter().for_each(|batch| batch.unclaim(letter.index));
        }
    }

    /// Where the bytes of an incomplete message lie. Its batch is kept until all of its messages are complete.
    #[inline(always)]
    fn place(&self, letter: Letter) -> crate::shm::buffer::Address {
        let place = self.batch(letter.batch).map(|batch| batch.buffers[letter.index].place());
        place.unwrap_or(crate::shm::buffer::Address { at: 0, len: 0 })
    }

    #[inline(always)]
    fn close(&mut self, letter: Letter) {
        self.open -= 1;
        self.moved += 1;
        let number = letter.batch;
        if let Some(batch) = self.batch_mut(number) {
            batch.open -= 1;
            batch.unclaim(letter.index);
            // A batch that nobody waits for is freed now, whatever precedes it.
            if batch.over && batch.open == 0 {
                batch.empty();
                if number < self.first {
                    self.parked.remove(&number);
                }
            }
        }
    }

    /// Posts what has room, receives what has arrived, and completes sends that were taken.
    pub(crate) fn advance(&mut self, members: &Members, strict: bool) -> Result<(), Stop> {
        if self.open == 0 {
            return Ok(());
        }
        for member in 0..members.n() {
            while !self.outboxes[member].waiting.is_empty() && self.outboxes[member].has_room() {
                let Some(letter) = self.outboxes[member].waiting.pop_front() else { break };
                self.post(members, member, letter, strict);
            }
            if !self.inboxes[member].receives.is_empty() {
                self.receive(members, member)?;
            }
            if !self.outboxes[member].sent.is_empty() {
                self.confirm(member);
            }
        }
        self.forget(self.first);
        Ok(())
    }

    /// Posts a message for which there is room.
    fn post(&mut self, members: &Members, to: usize, letter: Letter, strict: bool) {
        let (row, number, place) = (members.mine(), self.outboxes[to].posted, self.place(letter));
        let words = self.outboxes[to].mail(number);
        let set = |word: MailWord, value: u64| words[word as usize].store(value, Relaxed);
        let len = place.len;
        set(MailWord::Tag, letter.tag);
        set(MailWord::Bytes, len as u64);
        set(MailWord::Site, Name::pair(letter.site, letter.about.text));
        set(MailWord::Extra, letter.about.digest);
        if len <= STAGE {
            copy(members.mail_stage(to, number, len), members.given(place, 0, len));
        } else {
            set(MailWord::Address, place.at as u64);
            let at = members.rows[to].taken_at(members.n(), members.me, number);
            let lease = Lease::Mail(Arc::clone(&members.rows), to, at, number);
            self.batch(letter.batch)
                .into_iter()
                .for_each(|batch| batch.buffers[letter.index].lease(lease.clone()));
        }
        row.tell(&words[MailWord::Stamp as usize], number + 1);
        self.outboxes[to].posted += 1;
        self.moved += 1;
        if len <= STAGE && !strict {
            self.close(letter);
        } else {
            self.outboxes[to].sent.push_back((number, letter));
        }
    }

    /// Receives arrived mails from a member in order, each by the first receive with its tag.
    fn receive(&mut self, members: &Members, from: usize) -> Result<(), Stop> {
        let mut at = self.inboxes[from].next;
        while let Some((number, i)) = self.inboxes[from].receivable(at) {
            let inbox = &self.inboxes[from];
            let Some(letter) = inbox.receives.get(i).copied() else { break };
            let words = inbox.mail(number);
            let sent = |word: MailWord| words[word as usize].load(Relaxed);
            let place = self.place(letter);
            if sent(MailWord::Bytes) != place.len as u64 || sent(MailWord::Extra) != letter.about.digest {
                return Err(mismatch(members, from, words, letter, place.len).into());
            }
            members.copy_mail(from, number, words, place);
            members.mine().tell(&inbox.notes[(number % MAILS) as usize], number + 1);
            let inbox = &mut self.inboxes[from];
            inbox.take(number);
            let _ = if i == 0 { inbox.receives.pop_front() } else { inbox.receives.remove(i) };
            self.close(letter);
            at = number + 1;
        }
        Ok(())
    }

    fn confirm(&mut self, to: usize) {
        let mut i = 0;
        while let Some((number, _)) = self.outboxes[to].sent.get(i) {
            if !self.outboxes[to].is_taken(*number) {
                i += 1;
            } else if let Some((_, letter)) = self.outboxes[to].sent.remove(i) {
                self.close(letter);
            }
        }
    }
}
