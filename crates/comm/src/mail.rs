//! Sends and receives: numbered per pair of members, matched by tag in that order.
//!
//! A send is published in a ring of mails for its destination, and the receiver reads it in place. The receiver notes
//! that it took it, which completes and releases the send. Small messages travel in the mail itself, and their sends
//! complete at once, unless the group is strict.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use smallvec::SmallVec;

use crate::CommError;
use crate::buffer::{Access, Buffer};
use crate::buffers::{Buffers, bytes};
use crate::error::{Side, Stop};
use crate::fixed::Fixed;
use crate::lease::Lease;
use crate::members::{Members, comes, copy};
use crate::queue::{Queue, Reusable};
use crate::recorder::{Name, Recorder};
use crate::row::{MAILS, Mail, MailWord, Row, STAGE};
use crate::sync::AtomicU64;

/// One end of a message: the other member, the tag, and the buffer.
pub struct Message {
    /// The other end, by its place in the group.
    pub peer: usize,
    /// Messages match by sender, receiver and tag, in order.
    pub tag: u64,
    /// The bytes to send, or their destination; both ends must have the same size.
    pub buffer: Buffer,
    /// A description of the bytes, which must be equal at both ends.
    pub about: About,
}

/// What the bytes do not say themselves: types and shapes.
#[derive(Clone, Copy, Debug, Default)]
pub struct About {
    /// A digest, which both ends compare.
    pub digest: u64,
    /// A text for error messages, by a name of the group's recorder.
    pub text: Name,
}

impl Message {
    /// A message without a description of its bytes.
    pub fn new(peer: usize, tag: u64, buffer: Buffer) -> Message {
        Message { peer, tag, buffer, about: About::default() }
    }
}

/// The other end of a message.
#[derive(Clone, Copy)]
pub(crate) struct End {
    pub(crate) peer: usize,
    pub(crate) tag: u64,
    pub(crate) about: About,
}

/// The other ends of a batch, sends first.
pub(crate) type Ends = SmallVec<[End; 2]>;

/// A batch of messages that is to be started.
pub(crate) struct Parcel {
    pub(crate) ends: Ends,
    /// In the same order.
    pub(crate) buffers: Buffers,
    /// How many are sends.
    pub(crate) sends: usize,
    /// Whether a claim was recorded.
    pub(crate) noted: bool,
}

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

/// What an unfinished batch waits for.
pub(crate) struct Open {
    /// Whether receives are among it; else it has only sends.
    pub(crate) receives: bool,
    /// Tag, source line and text of the first.
    pub(crate) tag: u64,
    pub(crate) site: Name,
    pub(crate) text: Name,
    /// The members that it waits for.
    pub(crate) members: Vec<usize>,
}

/// An unfinished batch is parked when the queue is longer than this.
const BEHIND: usize = 64;

/// Messages to one member.
struct Outbox {
    /// Its mails, in this member's row, and the receiver's notes on them, in the receiver's row.
    ring: Fixed<[Mail; MAILS as usize]>,
    notes: Fixed<[AtomicU64; MAILS as usize]>,
    posted: u64,
    /// Mails below this number are known to be taken.
    taken: u64,
    /// Posted messages that are not known to be taken.
    sent: VecDeque<(u64, Letter)>,
    /// Messages that wait for room in the ring.
    waiting: VecDeque<Letter>,
}

/// Messages from one member.
struct Inbox {
    /// Its mails, in the sender's row, and the notes on them, in this member's row.
    ring: Fixed<[Mail; MAILS as usize]>,
    notes: Fixed<[AtomicU64; MAILS as usize]>,
    /// The first mail not taken, and a bitmap of taken mails from there on.
    next: u64,
    taken: u64,
    receives: VecDeque<Letter>,
}

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
        let (n, me, mine) = (members.n(), members.me, members.mine());
        let outbox = |(to, row): (usize, &Row)| Outbox {
            ring: mine.mails(to),
            notes: row.taken(n, me),
            posted: 0,
            taken: 0,
            sent: VecDeque::new(),
            waiting: VecDeque::new(),
        };
        let inbox = |(from, row): (usize, &Row)| Inbox {
            ring: row.mails(me),
            notes: mine.taken(n, from),
            next: 0,
            taken: 0,
            receives: VecDeque::new(),
        };
        Mails {
            first: 0,
            batches: Queue::default(),
            parked: BTreeMap::new(),
            outboxes: members.rows.iter().enumerate().map(outbox).collect(),
            inboxes: members.rows.iter().enumerate().map(inbox).collect(),
            open: 0,
            moved: 0,
        }
    }

    /// How often a message was posted or completed: at most twice per message.
    pub(crate) fn moved(&self) -> u64 {
        self.moved
    }

    /// Whether so many messages are open that starting a batch should also advance them.
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

    fn batch(&self, number: u64) -> Option<&Batch> {
        match number.checked_sub(self.first) {
            Some(at) => self.batches.all().get(at as usize),
            None => self.parked.get(&number),
        }
    }

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

    /// The members that an unfinished batch waits for.
    pub(crate) fn waits_for(&self, batch: u64) -> Vec<usize> {
        let of = |letter: &Letter| letter.batch == batch;
        let receives = |m: &usize| self.inboxes[*m].receives.iter().any(of);
        let sends = |m: &usize| {
            let outbox = &self.outboxes[*m];
            outbox.sent.iter().any(|(_, letter)| of(letter)) || outbox.waiting.iter().any(of)
        };
        (0..self.inboxes.len()).filter(|m| receives(m) || sends(m)).collect()
    }

    /// What an unfinished batch waits for; the first such batch if `batch` is `None`.
    pub(crate) fn open(&self, batch: Option<u64>) -> Option<Open> {
        let of = |letter: &Letter| batch.is_none_or(|batch| letter.batch == batch);
        let receives = self.inboxes.iter().flat_map(|inbox| &inbox.receives).copied();
        let sends = self.outboxes.iter().flat_map(|outbox| {
            outbox.sent.iter().map(|(_, letter)| *letter).chain(outbox.waiting.iter().copied())
        });
        let receive = receives.filter(of).min_by_key(|letter| letter.batch);
        let letter = receive.or_else(|| sends.filter(of).min_by_key(|letter| letter.batch))?;
        let (tag, site, text) = (letter.tag, letter.site, letter.about.text);
        Some(Open { receives: receive.is_some(), tag, site, text, members: self.waits_for(letter.batch) })
    }

    /// The first message that was posted and that its receiver has not taken.
    pub(crate) fn untaken(&self) -> Option<Open> {
        let members: Vec<usize> =
            (0..self.outboxes.len()).filter(|to| self.outboxes[*to].has_untaken()).collect();
        let outbox = &self.outboxes[*members.first()?];
        let words = outbox.mail(outbox.taken_below());
        let (site, text) = Name::of_pair(words[MailWord::Site as usize].load(Relaxed));
        let tag = words[MailWord::Tag as usize].load(Relaxed);
        Some(Open { receives: false, tag, site, text, members })
    }

    /// Whether every message that was posted was taken.
    pub(crate) fn are_taken(&self) -> bool {
        !self.outboxes.iter().any(Outbox::has_untaken)
    }

    /// The error of an arrived message without a matching receive.
    pub(crate) fn unreceived(&self, members: &Members) -> Option<CommError> {
        let (from, number) = self.inboxes.iter().enumerate().find_map(|(from, inbox)| {
            let is_awaited = |number: u64| {
                let tag = inbox.mail(number)[MailWord::Tag as usize].load(Relaxed);
                inbox.receives.iter().any(|letter| letter.tag == tag)
            };
            let mut mails = inbox.next..inbox.next + MAILS;
            Some((from, mails.find(|number| inbox.has(*number) && !is_awaited(*number))?))
        })?;
        let [sender, receiver] = [from, members.me].map(|member| &members.rows[member]);
        Some(unreceived(self.inboxes[from].mail(number), sender, receiver))
    }

    /// The error of a message to a member that has left without taking it.
    pub(crate) fn refused(&self, members: &Members) -> Option<CommError> {
        let outboxes = self.outboxes.iter().enumerate();
        let mut left = outboxes.filter(|(to, outbox)| outbox.has_untaken() && members.rows[*to].has_left());
        let (to, outbox) = left.next()?;
        Some(unreceived(outbox.mail(outbox.taken_below()), members.mine(), &members.rows[to]))
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
    fn place(&self, letter: Letter) -> crate::buffer::Address {
        let place = self.batch(letter.batch).map(|batch| batch.buffers[letter.index].place());
        place.unwrap_or(crate::buffer::Address { at: 0, len: 0 })
    }

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

impl Outbox {
    /// Whether the next mail's entry is free: its previous mail was taken. `taken` is cached, so that the receiver's
    /// notes, which change with every mail, are read only once the ring is full.
    fn has_room(&mut self) -> bool {
        if self.posted < self.taken + MAILS {
            return true;
        }
        self.taken = self.taken_below();
        self.posted < self.taken + MAILS
    }

    fn mail(&self, number: u64) -> &Mail {
        &self.ring[(number % MAILS) as usize]
    }

    fn has_untaken(&self) -> bool {
        self.taken_below() < self.posted
    }

    fn is_taken(&self, number: u64) -> bool {
        self.notes[(number % MAILS) as usize].load(Acquire) > number
    }

    /// The first mail that was not taken.
    fn taken_below(&self) -> u64 {
        let open = |number: &u64| !self.is_taken(*number);
        (self.taken..self.posted).find(open).unwrap_or(self.posted)
    }
}

impl Inbox {
    fn mail(&self, number: u64) -> &Mail {
        &self.ring[(number % MAILS) as usize]
    }

    /// Whether the next mail arrives within `looks` retries and `batch` has the first receive, whatever the tags are.
    #[inline(always)]
    fn comes(&self, batch: u64, looks: usize) -> bool {
        let is_awaited = self.receives.front().is_some_and(|letter| letter.batch == batch);
        is_awaited
            && self.taken == 0
            && comes(&self.mail(self.next)[MailWord::Stamp as usize], self.next + 1, looks)
    }

    /// Whether a mail has arrived and was not taken.
    fn has(&self, number: u64) -> bool {
        let is_taken = self.taken >> (number - self.next) & 1 == 1;
        !is_taken && self.mail(number)[MailWord::Stamp as usize].load(SeqCst) == number + 1
    }

    /// The first mail at or after `from` that has arrived, is not taken and has a receive, with that receive's index.
    fn receivable(&self, from: u64) -> Option<(u64, usize)> {
        let is_taken = |number: u64| self.taken >> (number - self.next) & 1 == 1;
        let word = |number: u64, word: MailWord| &self.mail(number)[word as usize];
        for number in from.max(self.next)..self.next + MAILS {
            if is_taken(number) {
                continue;
            }
            if word(number, MailWord::Stamp).load(Acquire) != number + 1 {
                break;
            }
            let tag = word(number, MailWord::Tag).load(Relaxed);
            if let Some(i) = self.receives.iter().position(|letter| letter.tag == tag) {
                return Some((number, i));
            }
        }
        None
    }

    fn take(&mut self, number: u64) {
        self.taken |= 1 << (number - self.next);
        let ones = self.taken.trailing_ones();
        self.taken >>= ones;
        self.next += u64::from(ones);
    }
}

/// The error of a receive whose message differs, with both source lines.
#[cold]
fn mismatch(members: &Members, from: usize, words: &Mail, letter: Letter, expected: usize) -> CommError {
    let get = |word: MailWord| words[word as usize].load(Relaxed);
    let side = |member: usize, what: &str, text: Name, bytes: usize, site: Name| {
        let segment = &members.rows[member].segment;
        let about = if text.is_empty() { format!("{bytes} bytes") } else { text.text(segment) };
        Side {
            rank: members.rows[member].rank,
            what: format!("{what} {about}, tag {}", letter.tag),
            site: site.text(segment),
        }
    };
    let (site, text) = Name::of_pair(get(MailWord::Site));
    CommError::Message {
        sides: Box::new([
            side(from, "send", text, get(MailWord::Bytes) as usize, site),
            side(members.me, "receive", letter.about.text, expected, letter.site),
        ]),
    }
}

/// The error of an unreceived mail, from its words in the sender's segment.
fn unreceived(words: &Mail, sender: &Row, receiver: &Row) -> CommError {
    let get = |word: MailWord| words[word as usize].load(Relaxed);
    let (site, text) = Name::of_pair(get(MailWord::Site));
    let what =
        if text.is_empty() { format!("{} bytes", get(MailWord::Bytes)) } else { text.text(&sender.segment) };
    let (from, to, tag, site) = (sender.rank, receiver.rank, get(MailWord::Tag), site.text(&sender.segment));
    CommError::Unreceived { from, to, tag, what, site }
}
