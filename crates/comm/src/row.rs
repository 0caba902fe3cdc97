//! What a member of a group shows the others: one row, written by its owner alone.
//!
//! A row lies in its owner's segment:
//!
//! - `done`: all calls below this number are finished here, reads of peers' memory included. Memory that took part
//!   in call k is *released* when every member's `done` is above k;
//! - `bell`, a half word that changes with every publication, and `waiters`, how many sleep on it;
//! - `failure`: which member's call differs from this one's, and in which call;
//! - slots, one for each call in flight: a stamp, stored last (release), over what the call is;
//! - a staging area for each slot, for small data and for tables;
//! - for each destination a ring of mails, and for each source which of its mails were taken.
//!
//! The one ordering rule: whoever loads a stamp, `ready` or `done` (acquire) sees everything its owner wrote before
//! storing it (release).

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::segment::Segment;

/// Calls that may be in flight on a group at once; more wait their turn.
pub(crate) const SLOTS: u64 = 32;
/// Bytes of staging for each slot.
pub(crate) const STAGE: usize = 4096;
/// Mails that may be in flight from one member to another at once.
pub(crate) const MAILS: u64 = 16;

const HEADER: usize = 64;
const SLOT: usize = 128;
const MAIL: usize = 64;

/// One member's row.
#[derive(Clone)]
pub(crate) struct Row {
    pub(crate) segment: Arc<Segment>,
    pub(crate) at: usize,
}

/// The words of a slot.
#[derive(Clone, Copy)]
#[repr(usize)]
pub(crate) enum Word {
    /// The call's number and one, once it is published.
    Stamp,
    /// Op, element type, reduction and root.
    What,
    /// Bytes of the operand.
    Bytes,
    /// A hash of what else must be equal: sizes, routes, factors.
    Extra,
    /// Where the operand lies in the owner's segment.
    Place,
    /// How many bytes of the owner's part are reduced.
    Ready,
    /// Where the text of the call site lies.
    Site,
    /// How long it is.
    SiteLength,
}

/// The words of a mail.
#[derive(Clone, Copy)]
#[repr(usize)]
pub(crate) enum MailWord {
    /// The mail's number and one, once it is published.
    Stamp,
    Tag,
    Bytes,
    Place,
    Site,
    SiteLength,
}

impl Row {
    /// How many bytes a row takes in a group of `n`.
    pub(crate) fn size(n: usize) -> usize {
        Row::mails_at(n) + n * MAILS as usize * 8
    }

    fn mails_at(members: usize) -> usize {
        HEADER + SLOTS as usize * (SLOT + STAGE) + members * MAILS as usize * MAIL
    }

    pub(crate) fn done(&self) -> u64 {
        self.segment.word(self.at).load(Acquire)
    }

    pub(crate) fn set_done(&self, calls: u64) {
        self.segment.word(self.at).store(calls, Release);
    }

    fn bell(&self) -> &AtomicU32 {
        self.segment.half_word(self.at + 8)
    }

    fn waiters(&self) -> &AtomicU32 {
        self.segment.half_word(self.at + 12)
    }

    /// Tells whoever sleeps on this row that something changed.
    pub(crate) fn ring(&self) {
        self.bell().fetch_add(1, SeqCst);
        if self.waiters().load(SeqCst) > 0 {
            // A failed wake-up is a wait that looks again at its next turn.
            let _ = futex::wake(self.bell(), futex::Flags::empty(), u32::MAX);
        }
    }

    /// Sleeps until the row's owner rings, unless `ready` already holds; never past the time given.
    pub(crate) fn sleep(&self, until: Instant, ready: impl Fn() -> bool) {
        self.waiters().fetch_add(1, SeqCst);
        let seen = self.bell().load(SeqCst);
        // After the bell was read: what is published later changes it, and the sleep ends at once.
        let left = until.saturating_duration_since(Instant::now()).min(TURN);
        if !ready() && !left.is_zero() {
            let timeout = futex::Timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) };
            let _ = futex::wait(self.bell(), futex::Flags::empty(), seen, Some(&timeout));
        }
        self.waiters().fetch_sub(1, SeqCst);
    }

    /// The member whose call differs from the owner's, and the call.
    pub(crate) fn failure(&self) -> Option<(usize, u64)> {
        let member = self.segment.word(self.at + 16).load(Acquire).checked_sub(1)?;
        Some((member as usize, self.segment.word(self.at + 24).load(Relaxed)))
    }

    pub(crate) fn set_failure(&self, member: usize, call: u64) {
        self.segment.word(self.at + 24).store(call, Relaxed);
        self.segment.word(self.at + 16).store(member as u64 + 1, Release);
    }

    pub(crate) fn word(&self, call: u64, word: Word) -> &AtomicU64 {
        self.segment.word(self.at + HEADER + (call % SLOTS) as usize * SLOT + word as usize * 8)
    }

    pub(crate) fn get(&self, call: u64, word: Word) -> u64 {
        self.word(call, word).load(Relaxed)
    }

    pub(crate) fn set(&self, call: u64, word: Word, value: u64) {
        self.word(call, word).store(value, Relaxed);
    }

    /// Whether the owner has published a call.
    pub(crate) fn has_published(&self, call: u64) -> bool {
        self.word(call, Word::Stamp).load(Acquire) == call + 1
    }

    pub(crate) fn publish(&self, call: u64) {
        self.word(call, Word::Ready).store(0, Relaxed);
        self.word(call, Word::Stamp).store(call + 1, Release);
        self.ring();
    }

    /// Where the staging area of a call lies in the segment.
    pub(crate) fn stage(&self, call: u64) -> usize {
        self.at + HEADER + SLOTS as usize * SLOT + (call % SLOTS) as usize * STAGE
    }

    /// A word of a mail of the owner to a member.
    pub(crate) fn mail(&self, to: usize, number: u64, word: MailWord) -> &AtomicU64 {
        let ring = self.at + Row::mails_at(to);
        self.segment.word(ring + (number % MAILS) as usize * MAIL + word as usize * 8)
    }

    /// Where the owner, in a group of `n`, notes that it took a mail from a member.
    pub(crate) fn taken_at(&self, n: usize, from: usize, number: u64) -> usize {
        self.at + Row::mails_at(n) + (from * MAILS as usize + (number % MAILS) as usize) * 8
    }

    pub(crate) fn taken(&self, n: usize, from: usize, number: u64) -> &AtomicU64 {
        self.segment.word(self.taken_at(n, from, number))
    }
}

/// The longest sleep before a waiter looks again for failures elsewhere.
const TURN: Duration = Duration::from_millis(20);
