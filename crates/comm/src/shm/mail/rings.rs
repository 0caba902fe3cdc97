//! The mails between this member and another: those to it, and those from it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use super::Letter;
use crate::shm::fixed::Fixed;
use crate::shm::members::{Members, comes};
use crate::shm::row::{MAILS, Mail, MailWord};
use crate::sync::AtomicU64;

/// Messages to one member.
pub(super) struct Outbox {
    /// Its mails, in this member's row, and the receiver's notes on them, in the receiver's row.
    pub(super) ring: Fixed<[Mail; MAILS as usize]>,
    pub(super) notes: Fixed<[AtomicU64; MAILS as usize]>,
    pub(super) posted: u64,
    /// Mails below this number are known to be taken.
    pub(super) taken: u64,
    /// Posted messages that are not known to be taken.
    pub(super) sent: VecDeque<(u64, Letter)>,
    /// Messages that wait for room in the ring.
    pub(super) waiting: VecDeque<Letter>,
}

impl Outbox {
    /// The mails to member `to`.
    pub(super) fn new(members: &Members, to: usize) -> Outbox {
        Outbox {
            ring: members.mine().mails(to),
            notes: members.rows[to].taken(members.n(), members.me),
            posted: 0,
            taken: 0,
            sent: VecDeque::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Whether the next mail's entry is free: its previous mail was taken. `taken` is cached, so that the receiver's
    /// notes, which change with every mail, are read only once the ring is full.
    pub(super) fn has_room(&mut self) -> bool {
        if self.posted < self.taken + MAILS {
            return true;
        }
        self.taken = self.taken_below();
        self.posted < self.taken + MAILS
    }

    pub(super) fn mail(&self, number: u64) -> &Mail {
        &self.ring[(number % MAILS) as usize]
    }

    pub(super) fn has_untaken(&self) -> bool {
        self.taken_below() < self.posted
    }

    pub(super) fn is_taken(&self, number: u64) -> bool {
        self.notes[(number % MAILS) as usize].load(Acquire) > number
    }

    /// The first mail that was not taken.
    pub(super) fn taken_below(&self) -> u64 {
        let open = |number: &u64| !self.is_taken(*number);
        (self.taken..self.posted).find(open).unwrap_or(self.posted)
    }
}

/// Messages from one member.
pub(super) struct Inbox {
    /// Its mails, in the sender's row, and the notes on them, in this member's row.
    pub(super) ring: Fixed<[Mail; MAILS as usize]>,
    pub(super) notes: Fixed<[AtomicU64; MAILS as usize]>,
    /// The first mail not taken, and a bitmap of taken mails from there on.
    pub(super) next: u64,
    pub(super) taken: u64,
    pub(super) receives: VecDeque<Letter>,
}

impl Inbox {
    /// The mails from member `from`.
    pub(super) fn new(members: &Members, from: usize) -> Inbox {
        Inbox {
            ring: members.rows[from].mails(members.me),
            notes: members.mine().taken(members.n(), from),
            next: 0,
            taken: 0,
            receives: VecDeque::new(),
        }
    }

    pub(super) fn mail(&self, number: u64) -> &Mail {
        &self.ring[(number % MAILS) as usize]
    }

    /// Whether the next mail arrives within `looks` retries and `batch` has the first receive, whatever the tags are.
    #[inline(always)]
    pub(super) fn comes(&self, batch: u64, looks: usize) -> bool {
        let is_awaited = self.receives.front().is_some_and(|letter| letter.batch == batch);
        is_awaited
            && self.taken == 0
            && comes(&self.mail(self.next)[MailWord::Stamp as usize], self.next + 1, looks)
    }

    /// Whether a mail has arrived and was not taken.
    pub(super) fn has(&self, number: u64) -> bool {
        let is_taken = self.taken >> (number - self.next) & 1 == 1;
        !is_taken && self.mail(number)[MailWord::Stamp as usize].load(SeqCst) == number + 1
    }

    /// The first mail at or after `from` that has arrived, is not taken and has a receive, with that receive's index.
    #[inline(always)]
    pub(super) fn receivable(&self, from: u64) -> Option<(u64, usize)> {
        if self.receives.is_empty() {
            return None;
        }
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

    pub(super) fn take(&mut self, number: u64) {
        self.taken |= 1 << (number - self.next);
        let ones = self.taken.trailing_ones();
        self.taken >>= ones;
        self.next += u64::from(ones);
    }
}
