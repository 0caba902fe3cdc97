//! Sends and receives: numbered from one member to another, matched by tag in that order.
//!
//! A send is published like everything else, in a ring of mails for its destination, and read by the receiver where
//! it lies. The receiver notes that it took it, which completes and releases the send. What is small travels in the
//! mail itself, and its send is complete at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use smallvec::SmallVec;

use crate::CommError;
use crate::buffer::{Access, Buffer};
use crate::buffers::Buffers;
use crate::error::{Side, Stop};
use crate::lease::Lease;
use crate::members::Members;
use crate::queue::{Place, Queue};
use crate::recorder::{Name, Recorder};
use crate::row::{MAILS, MailWord, STAGE};
use crate::sync::AtomicU64;

/// One end of a message: the other member, the tag, and what is sent or where it goes.
pub struct Message {
    /// The other end, by its place in the group.
    pub peer: usize,
    /// Messages match by sender, receiver and tag, in order.
    pub tag: u64,
    /// What is sent, or where it goes; both ends have one size.
    pub buffer: Buffer,
}

/// The other ends of a batch, sends first: member and tag.
pub(crate) type Ends = SmallVec<[(usize, u64); 2]>;

/// A batch of messages that is to be started.
pub(crate) struct Parcel {
    pub(crate) ends: Ends,
    /// In the same order.
    pub(crate) buffers: Buffers,
    /// How many are sent.
    pub(crate) sends: usize,
    /// Whether a block noted that it is in use.
    pub(crate) noted: bool,
}

/// A batch in flight.
#[derive(Default)]
struct Batch {
    buffers: Buffers,
    /// How many of them are sent; they come first.
    sends: usize,
    /// Whether a block noted that it is in use.
    noted: bool,
    open: usize,
    /// Its event in the flight recorder.
    event: u64,
    /// Whether it is timed when it is over: it is large, or was not over at the first look.
    is_slow: bool,
    /// Taken by whoever waited for it, or nobody waits.
    over: bool,
}

impl Batch {
    /// Gives one of its buffers back to whoever else has handles of it.
    fn unclaim(&self, index: usize) {
        if self.noted {
            let access = if index < self.sends { Access::Read } else { Access::Write };
            self.buffers[index].unclaim(access);
        }
    }
}

impl Place for Batch {
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
    site: Name,
}

/// What goes to one member.
#[derive(Default)]
struct Outbox {
    posted: u64,
    /// Mails below this number are known to be taken.
    taken: u64,
    /// Those that lie here until they are taken.
    sent: VecDeque<(u64, Letter)>,
    /// Those that wait for room in the ring.
    waiting: VecDeque<Letter>,
}

/// What comes from one member.
#[derive(Default)]
struct Inbox {
    /// The first mail that was not taken, and a bit for each from it on that was.
    next: u64,
    taken: u64,
    receives: VecDeque<Letter>,
}

/// What this member has to do with mails.
pub(crate) struct Mails {
    first: u64,
    batches: Queue<Batch>,
    outboxes: Vec<Outbox>,
    inboxes: Vec<Inbox>,
    /// Messages that have not met their other end.
    open: usize,
}

impl Mails {
    pub(crate) fn new(n: usize) -> Mails {
        Mails {
            first: 0,
            batches: Queue::default(),
            outboxes: (0..n).map(|_| Outbox::default()).collect(),
            inboxes: (0..n).map(|_| Inbox::default()).collect(),
            open: 0,
        }
    }

    /// The number of the next batch.
    pub(crate) fn next_batch(&self) -> u64 {
        self.first + self.batches.all().len() as u64
    }

    /// Takes a batch on, posts what has room, and gives its number.
    #[inline(always)]
    pub(crate) fn start(&mut self, members: &Members, parcel: Parcel, is_slow: bool, site: Name) -> u64 {
        let Parcel { ends, buffers, sends, noted } = parcel;
        let batch = self.next_batch();
        self.open += ends.len();
        let place = self.batches.take_on();
        place.buffers = buffers;
        place.sends = sends;
        place.noted = noted;
        place.open = ends.len();
        place.is_slow = is_slow;
        place.over = false;
        for (index, (peer, tag)) in ends.into_iter().enumerate() {
            let letter = Letter { batch, index, tag, site };
            if index >= sends {
                self.inboxes[peer].receives.push_back(letter);
            } else if self.outboxes[peer].waiting.is_empty() && self.outboxes[peer].has_room(members, peer) {
                self.post(members, peer, letter);
            } else {
                self.outboxes[peer].waiting.push_back(letter);
            }
        }
        batch
    }

    /// Notes the event of the last batch.
    pub(crate) fn set_event(&mut self, event: u64) {
        self.batches.all_mut().last_mut().into_iter().for_each(|batch| batch.event = event);
    }

    /// The buffers of a batch whose messages have all met their other end.
    #[inline(always)]
    pub(crate) fn take_finished(&mut self, number: u64, recorder: &Recorder) -> Option<Buffers> {
        let batch = self.batch(number).filter(|batch| batch.open == 0)?;
        batch.over = true;
        recorder.finish(batch.event, batch.is_slow);
        let buffers = std::mem::take(&mut batch.buffers);
        self.forget();
        Some(buffers)
    }

    /// Whether all messages of a batch have met their other end.
    pub(crate) fn is_finished(&self, number: u64) -> bool {
        let index = number.checked_sub(self.first).map(|index| index as usize);
        index.and_then(|index| self.batches.all().get(index)).is_some_and(|batch| batch.open == 0)
    }

    /// Notes that a batch was not over at the first look.
    pub(crate) fn slow(&mut self, number: u64) {
        self.batch(number).into_iter().for_each(|batch| batch.is_slow = true);
    }

    /// Nobody waits for a batch any more.
    pub(crate) fn abandon(&mut self, number: u64) {
        if let Some(batch) = self.batch(number) {
            batch.over = true;
        }
        self.forget();
    }

    fn batch(&mut self, number: u64) -> Option<&mut Batch> {
        self.batches.all_mut().get_mut(number.checked_sub(self.first)? as usize)
    }

    fn forget(&mut self) {
        let is_over = |batch: &&Batch| batch.over && batch.open == 0;
        let count = self.batches.all().iter().take_while(is_over).count();
        if count > 0 {
            self.batches.forget(count);
            self.first += count as u64;
        }
    }

    /// How many batches are not over.
    pub(crate) fn in_flight(&self) -> usize {
        self.batches.all().iter().filter(|batch| !batch.over).count()
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

    /// Whether something of a member came, or was taken by it, since the last advance.
    pub(crate) fn has_news(&self, members: &Members, member: usize) -> bool {
        let (inbox, outbox) = (&self.inboxes[member], &self.outboxes[member]);
        let taken = |(number, _): &(u64, Letter)| outbox.is_taken(members, member, *number);
        inbox.receives.iter().any(|letter| inbox.find(members, member, letter.tag).is_some())
            || outbox.sent.iter().any(taken)
            || !outbox.waiting.is_empty() && outbox.posted < outbox.taken_below(members, member) + MAILS
    }

    /// A word that changes before a receive of an unfinished batch can go on, and what it is now.
    pub(crate) fn awaits<'a>(&self, members: &'a Members, batch: u64) -> Option<(&'a AtomicU64, u64)> {
        let inboxes = self.inboxes.iter().enumerate();
        let (from, inbox) = inboxes
            .filter(|(_, inbox)| inbox.receives.front().is_some_and(|letter| letter.batch == batch))
            .find(|(_, inbox)| inbox.taken == 0)?;
        let stamp = &members.rows[from].mail(members.me, inbox.next)[MailWord::Stamp as usize];
        let seen = stamp.load(Relaxed);
        (seen != inbox.next + 1).then_some((stamp, seen))
    }

    /// Whether messages have not met their other end.
    pub(crate) fn is_open(&self) -> bool {
        self.open > 0
    }

    /// Whether sends wait for room in the ring of their destination.
    pub(crate) fn has_unposted(&self) -> bool {
        self.outboxes.iter().any(|outbox| !outbox.waiting.is_empty())
    }

    /// Gives the buffers of what has not met its other end, and never will, back to whoever has handles of them.
    pub(crate) fn unclaim(&self) {
        let out = self.outboxes.iter();
        let out = out.flat_map(|outbox| outbox.sent.iter().map(|(_, letter)| letter).chain(&outbox.waiting));
        for letter in out.chain(self.inboxes.iter().flat_map(|inbox| &inbox.receives)) {
            let batch = &self.batches.all()[(letter.batch - self.first) as usize];
            batch.unclaim(letter.index);
        }
    }

    /// The buffer of a message that has not met its other end.
    fn buffer(&self, letter: Letter) -> &Buffer {
        &self.batches.all()[(letter.batch - self.first) as usize].buffers[letter.index]
    }

    fn close(&mut self, letter: Letter) {
        self.open -= 1;
        let batch = &mut self.batches.all_mut()[(letter.batch - self.first) as usize];
        batch.open -= 1;
        batch.unclaim(letter.index);
    }

    /// Posts what has room, takes what has come, and notes what was taken from here.
    pub(crate) fn advance(&mut self, members: &Members) -> Result<(), Stop> {
        if self.open == 0 {
            return Ok(());
        }
        for member in 0..members.n() {
            while !self.outboxes[member].waiting.is_empty() && self.outboxes[member].has_room(members, member)
            {
                let Some(letter) = self.outboxes[member].waiting.pop_front() else { break };
                self.post(members, member, letter);
            }
            if !self.inboxes[member].receives.is_empty() {
                self.receive(members, member)?;
            }
            if !self.outboxes[member].sent.is_empty() {
                self.confirm(members, member);
            }
        }
        self.forget();
        Ok(())
    }

    /// Posts a message for which there is room.
    fn post(&mut self, members: &Members, to: usize, letter: Letter) {
        let (row, number, buffer) = (members.mine(), self.outboxes[to].posted, self.buffer(letter));
        let words = row.mail(to, number);
        let set = |word: MailWord, value: u64| words[word as usize].store(value, Relaxed);
        let len = buffer.len();
        set(MailWord::Tag, letter.tag);
        set(MailWord::Bytes, len as u64);
        set(MailWord::Site, letter.site.word());
        if len <= STAGE {
            members.mail_stage(to, number, len).copy_from_slice(members.given(buffer.place(), 0, len));
        } else {
            set(MailWord::Place, buffer.at() as u64);
            let at = members.rows[to].taken_at(members.n(), members.me, number);
            buffer.lease(Lease::Mail(Arc::clone(&members.rows), to, at, number));
        }
        row.tell(&words[MailWord::Stamp as usize], number + 1);
        self.outboxes[to].posted += 1;
        if len <= STAGE {
            self.close(letter);
        } else {
            self.outboxes[to].sent.push_back((number, letter));
        }
    }

    fn receive(&mut self, members: &Members, from: usize) -> Result<(), Stop> {
        let mut i = 0;
        while let Some(letter) = self.inboxes[from].receives.get(i).copied() {
            // An earlier receive with the same tag goes first.
            let inbox = &self.inboxes[from];
            let blocked = i > 0 && inbox.receives.iter().take(i).any(|earlier| earlier.tag == letter.tag);
            let found = if blocked { None } else { inbox.find(members, from, letter.tag) };
            let Some(number) = found else {
                i += 1;
                continue;
            };
            let words = members.rows[from].mail(members.me, number);
            let sent = words[MailWord::Bytes as usize].load(Relaxed) as usize;
            let place = self.buffer(letter).place();
            if sent != place.len {
                return Err(lengths(members, from, number, letter, place.len).into());
            }
            members.copy_mail(from, number, place);
            let row = members.mine();
            row.tell(row.taken(members.n(), from, number), number + 1);
            let inbox = &mut self.inboxes[from];
            inbox.take(number);
            let _ = if i == 0 { inbox.receives.pop_front() } else { inbox.receives.remove(i) };
            self.close(letter);
        }
        Ok(())
    }

    fn confirm(&mut self, members: &Members, to: usize) {
        let mut i = 0;
        while let Some((number, _)) = self.outboxes[to].sent.get(i) {
            if !self.outboxes[to].is_taken(members, to, *number) {
                i += 1;
            } else if let Some((_, letter)) = self.outboxes[to].sent.remove(i) {
                self.close(letter);
            }
        }
    }
}

impl Outbox {
    /// Whether the next mail's entry is free: the mail before in it was taken. What is known of it is kept, so that
    /// the receiver's notes, which change with every mail, are read only once a ring is full.
    fn has_room(&mut self, members: &Members, to: usize) -> bool {
        if self.posted < self.taken + MAILS {
            return true;
        }
        self.taken = self.taken_below(members, to);
        self.posted < self.taken + MAILS
    }

    fn is_taken(&self, members: &Members, to: usize, number: u64) -> bool {
        members.rows[to].taken(members.n(), members.me, number).load(Acquire) > number
    }

    /// The first mail that was not taken.
    fn taken_below(&self, members: &Members, to: usize) -> u64 {
        let open = |number: &u64| !self.is_taken(members, to, *number);
        (self.taken..self.posted).find(open).unwrap_or(self.posted)
    }
}

impl Inbox {
    /// The first mail with a tag that was not taken yet.
    fn find(&self, members: &Members, from: usize, tag: u64) -> Option<u64> {
        let row = &members.rows[from];
        let is_taken = |number: &u64| self.taken >> (number - self.next) & 1 == 1;
        let word = |number: &u64, word: MailWord| &row.mail(members.me, *number)[word as usize];
        let published = |number: &u64| word(number, MailWord::Stamp).load(Acquire) == number + 1;
        let tagged = |number: &u64| word(number, MailWord::Tag).load(Relaxed) == tag;
        // It is mostly the next one.
        if self.taken == 0 && !published(&self.next) {
            return None;
        } else if self.taken == 0 && tagged(&self.next) {
            return Some(self.next);
        }
        (self.next..self.next + MAILS)
            .take_while(|number| is_taken(number) || published(number))
            .find(|number| !is_taken(number) && tagged(number))
    }

    fn take(&mut self, number: u64) {
        self.taken |= 1 << (number - self.next);
        let ones = self.taken.trailing_ones();
        self.taken >>= ones;
        self.next += u64::from(ones);
    }
}

/// The error of a receive whose message has another length, with both source lines.
fn lengths(members: &Members, from: usize, number: u64, letter: Letter, expected: usize) -> CommError {
    let get = |word: MailWord| members.rows[from].mail(members.me, number)[word as usize].load(Relaxed);
    let side = |member: usize, what: &str, bytes: usize, site: u64| Side {
        rank: members.rows[member].rank,
        what: format!("{what}, {bytes} bytes, tag {}", letter.tag),
        site: members.text(member, site),
    };
    CommError::Lengths {
        sides: Box::new([
            side(from, "send", get(MailWord::Bytes) as usize, get(MailWord::Site)),
            side(members.me, "receive", expected, letter.site.word()),
        ]),
    }
}
