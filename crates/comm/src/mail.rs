//! Sends and receives: numbered from one member to another, matched by tag in that order.
//!
//! A send is published like everything else, in a ring of mails for its destination, and read by the receiver where
//! it lies. The receiver notes that it took it, which completes and releases the send.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::CommError;
use crate::call::Members;
use crate::heap::{Buffer, Lease};
use crate::row::{MAILS, MailWord};

/// One end of a message: the other member, the tag, and what is sent or where it goes.
pub struct Message {
    /// The other end, by its place in the group.
    pub peer: usize,
    /// Messages match by sender, receiver and tag, in order.
    pub tag: u64,
    /// What is sent, or where it goes; both ends have one size.
    pub buffer: Buffer,
}

/// A batch in flight: for each message its buffer, here or on its way.
struct Batch {
    buffers: Vec<Option<Buffer>>,
    open: usize,
}

struct Send {
    batch: u64,
    index: usize,
    tag: u64,
    buffer: Buffer,
    site: (usize, usize),
}

struct Receive {
    batch: u64,
    index: usize,
    from: usize,
    tag: u64,
    buffer: Buffer,
}

/// What this member has to do with mails.
#[derive(Default)]
pub(crate) struct Mails {
    batches: BTreeMap<u64, Batch>,
    /// For each destination: how many were posted, those not yet taken, and those not yet posted.
    posted: BTreeMap<usize, u64>,
    sent: BTreeMap<usize, VecDeque<(u64, Send)>>,
    waiting: BTreeMap<usize, VecDeque<Send>>,
    /// For each source: the first mail not taken, and those after it that were.
    next: BTreeMap<usize, u64>,
    taken: BTreeMap<usize, BTreeSet<u64>>,
    receives: Vec<Receive>,
}

impl Mails {
    pub(crate) fn start(
        &mut self,
        batch: u64,
        sends: Vec<Message>,
        recvs: Vec<Message>,
        site: (usize, usize),
    ) {
        let total = sends.len() + recvs.len();
        self.batches.insert(batch, Batch { buffers: (0..total).map(|_| None).collect(), open: total });
        let first_receive = sends.len();
        for (index, Message { peer, tag, buffer }) in sends.into_iter().enumerate() {
            self.waiting.entry(peer).or_default().push_back(Send { batch, index, tag, buffer, site });
        }
        for (index, Message { peer, tag, buffer }) in recvs.into_iter().enumerate() {
            self.receives.push(Receive { batch, index: first_receive + index, from: peer, tag, buffer });
        }
    }

    /// The buffers of a batch whose messages have all met their other end.
    pub(crate) fn take_finished(&mut self, batch: u64) -> Option<Vec<Buffer>> {
        if self.batches.get(&batch).is_none_or(|batch| batch.open > 0) {
            return None;
        }
        Some(self.batches.remove(&batch)?.buffers.into_iter().flatten().collect())
    }

    /// A member that an unfinished batch waits for.
    pub(crate) fn waits_for(&self, batch: u64) -> Option<usize> {
        let received =
            self.receives.iter().filter(|receive| receive.batch == batch).map(|receive| receive.from);
        let sent = self.sent.iter().filter(|(_, sent)| sent.iter().any(|(_, send)| send.batch == batch));
        let waiting = self.waiting.iter().filter(|(_, sends)| sends.iter().any(|send| send.batch == batch));
        received.chain(sent.map(|(to, _)| *to)).chain(waiting.map(|(to, _)| *to)).next()
    }

    /// Whether sends wait for room in the ring of their destination.
    pub(crate) fn has_unposted(&self) -> bool {
        self.waiting.values().any(|sends| !sends.is_empty())
    }

    fn close(&mut self, batch: u64, index: usize, buffer: Buffer) {
        if let Some(batch) = self.batches.get_mut(&batch) {
            batch.buffers[index] = Some(buffer);
            batch.open -= 1;
        }
    }

    /// Posts what has room, takes what has come, and notes what was taken from here.
    pub(crate) fn advance(&mut self, members: &Members) -> Result<(), CommError> {
        self.post(members);
        self.receive(members)?;
        self.confirm(members);
        Ok(())
    }

    fn post(&mut self, members: &Members) {
        let (row, n) = (&members.rows[members.me], members.n());
        for (to, waiting) in &mut self.waiting {
            let mut any = false;
            let posted = self.posted.entry(*to).or_default();
            while !waiting.is_empty() {
                let number = *posted;
                // The ring's entry is free when the mail before in it was taken.
                let free = number < MAILS
                    || members.rows[*to].taken(n, members.me, number).load(Acquire) == number - MAILS + 1;
                let Some(mut send) = (if free { waiting.pop_front() } else { None }) else { break };
                let set = |word, value: usize| row.mail(*to, number, word).store(value as u64, Relaxed);
                set(MailWord::Bytes, send.buffer.len());
                set(MailWord::Place, send.buffer.at);
                set(MailWord::Site, send.site.0);
                set(MailWord::SiteLength, send.site.1);
                let (at, receiver) =
                    (members.rows[*to].taken_at(n, members.me, number), members.rows[*to].clone());
                send.buffer.leases.push(Lease::Mail(receiver, at, number));
                row.mail(*to, number, MailWord::Tag).store(send.tag, Relaxed);
                row.mail(*to, number, MailWord::Stamp).store(number + 1, Release);
                self.sent.entry(*to).or_default().push_back((number, send));
                *posted += 1;
                any = true;
            }
            if any {
                row.ring();
            }
        }
    }

    fn receive(&mut self, members: &Members) -> Result<(), CommError> {
        let mut i = 0;
        let mut seen: BTreeMap<usize, BTreeSet<u64>> = BTreeMap::new();
        while i < self.receives.len() {
            let Receive { from, tag, .. } = self.receives[i];
            // An earlier receive from the same member with the same tag goes first.
            let blocked = seen.get(&from).is_some_and(|tags| tags.contains(&tag));
            let found = if blocked { None } else { self.find(members, from, tag) };
            let Some(number) = found else {
                seen.entry(from).or_default().insert(tag);
                i += 1;
                continue;
            };
            let receive = self.receives.remove(i);
            let row = &members.rows[from];
            let get = |word| row.mail(members.me, number, word).load(Relaxed) as usize;
            let (sent, expected) = (get(MailWord::Bytes), receive.buffer.len());
            if sent != expected {
                return Err(CommError::Lengths { from, to: members.me, tag, sent, expected });
            }
            members.copy_mail(&receive.buffer, from, get(MailWord::Place), sent);
            members.rows[members.me].taken(members.n(), from, number).store(number + 1, Release);
            members.rows[members.me].ring();
            let taken = self.taken.entry(from).or_default();
            taken.insert(number);
            let next = self.next.entry(from).or_default();
            while taken.remove(next) {
                *next += 1;
            }
            self.close(receive.batch, receive.index, receive.buffer);
        }
        Ok(())
    }

    /// The first mail of a member with a tag that was not taken yet.
    fn find(&self, members: &Members, from: usize, tag: u64) -> Option<u64> {
        let first = self.next.get(&from).copied().unwrap_or(0);
        let row = &members.rows[from];
        let published =
            |number: &u64| row.mail(members.me, *number, MailWord::Stamp).load(Acquire) == number + 1;
        let is_taken = |number: &u64| self.taken.get(&from).is_some_and(|taken| taken.contains(number));
        (first..first + MAILS).take_while(|number| is_taken(number) || published(number)).find(|number| {
            !is_taken(number) && row.mail(members.me, *number, MailWord::Tag).load(Relaxed) == tag
        })
    }

    fn confirm(&mut self, members: &Members) {
        let mut closed = Vec::new();
        for (to, sent) in &mut self.sent {
            // The entry may hold the number of a later mail already, which was posted when this one was taken.
            let taken =
                |number: u64| members.rows[*to].taken(members.n(), members.me, number).load(Acquire) > number;
            let mut kept = VecDeque::new();
            for (number, send) in sent.drain(..) {
                if taken(number) { closed.push(send) } else { kept.push_back((number, send)) }
            }
            *sent = kept;
        }
        closed.into_iter().for_each(|send| self.close(send.batch, send.index, send.buffer));
    }
}
