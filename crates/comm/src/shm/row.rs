//! What a member of a group shows the others: one row, written by its owner alone.
//!
//! A row lies in its owner's segment:
//!
//! - `done`: all calls below this number are finished here: compared with every member's call, and with all reads of
//!   peers' memory completed. Memory of call k is *released*, and the slot of call k is reused, when every member's
//!   `done` is above k;
//! - `started`: all calls below this number were started here. It is written only when a call has to wait for a slot;
//!   otherwise the stamps say the same;
//! - `bell`, which changes when something is published while a member sleeps on it, and `waiters`, how many do. These
//!   two and `gone` are the only words that others write;
//! - `stopped`: the owner's side of the group failed, and how others find the cause; `left`: the owner dropped its
//!   side; `gone`: how many members will never read this row again, so that its memory can be freed;
//! - slots, one for each call in flight: a stamp, stored last (release), and the words of the call. Operands of a few
//!   bytes lie in the line of the stamp itself, so that a peer gets them in one transfer of a cache line;
//! - a staging area for each slot, for small operands and for tables;
//! - for each destination a ring of mails, each with a staging area of its own, and for each source which of its mails
//!   were taken.
//!
//! The one ordering rule: a member that loads a stamp, `ready` or `done` (acquire) sees everything that its owner wrote
//! before storing it (release).

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::time::{Duration, Instant};

use crate::shm::fixed::Fixed;
#[cfg(any(loom, shuttle))]
use crate::shm::models::futex::{sleep_on, wake};
use crate::shm::segment::Segment;
use crate::sync::{AtomicU32, AtomicU64, fence, in_one_order};

/// Maximum number of calls in flight on a group; more wait for a slot.
pub(crate) const SLOTS: u64 = if cfg!(any(loom, shuttle)) { 2 } else { 32 };
/// Bytes of staging for each slot, and for each mail.
pub(crate) const STAGE: usize = if cfg!(any(loom, shuttle)) { 64 } else { 4096 };
/// Maximum number of mails in flight from one member to another.
pub(crate) const MAILS: u64 = if cfg!(any(loom, shuttle)) { 2 } else { 16 };
/// Bytes that fit into the line of a stamp.
pub(crate) const INLINE: usize = 16;

const LINE: usize = 64;
/// How many calls ahead the line of a slot is prefetched.
const AHEAD: u64 = 4;
/// A line each for `done` and `started`, for the bell and its waiters, and for the end of the owner.
const HEADER: usize = 3 * LINE;
const SLOT: usize = 2 * LINE;
/// The mails to one destination: their lines, then their staging areas.
const RING: usize = MAILS as usize * (LINE + STAGE);

/// One member's row.
#[derive(Clone)]
pub(crate) struct Row {
    pub(crate) segment: Arc<Segment>,
    pub(crate) at: usize,
    /// The owner's number in the world.
    pub(crate) rank: usize,
    /// `done` and `started`.
    progress: Fixed<[AtomicU64; 2]>,
    /// The bell and its waiters.
    bell: Fixed<[AtomicU32; 2]>,
    slots: Fixed<[Slot; SLOTS as usize]>,
}

/// The words of a call, by [`Word`].
pub(crate) type Slot = [AtomicU64; SLOT / 8];
/// The words of a mail, by [`MailWord`].
pub(crate) type Mail = [AtomicU64; LINE / 8];

/// The words of a slot. The first line ends with two words of operand.
#[derive(Clone, Copy)]
#[repr(usize)]
pub(crate) enum Word {
    /// The call's number plus one, once it is published.
    Stamp = 0,
    /// Op, element type, reduction, root and flags.
    What = 1,
    /// Bytes of all operands.
    Bytes = 2,
    /// A hash of what else must be equal: sizes, routes, factors.
    Extra = 3,
    /// Where the operand lies in the owner's segment; for a list, where its table lies. Of a small call, the number that
    /// goes with the caller's text.
    Address = 4,
    /// The names of the call site and, in the upper half, of what was called.
    Site = 5,
    /// How many bytes of the owner's part are ready.
    Ready = 8,
    /// Where the common result lies, in the segment of the member that gives it.
    Common = 9,
    /// The number that goes with the caller's text, of a call that is not small.
    TextNumber = 10,
}

/// The words of a mail. The line ends with two words of what is sent.
#[derive(Clone, Copy)]
#[repr(usize)]
pub(crate) enum MailWord {
    /// The mail's number plus one, once it is published.
    Stamp = 0,
    Tag = 1,
    Bytes = 2,
    Address = 3,
    /// The names of the call site and, in the upper half, of what is sent.
    Site = 4,
    /// A hash of its type and shape.
    Extra = 5,
}

/// How a member's side of a group failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The members' slots of this call differ, which every member can see.
    Differs(u64),
    /// The owner has published the cause: see `status.rs`.
    Caused,
}

impl Row {
    /// The row at an offset of a segment, of the rank with that number.
    pub(crate) fn new(segment: &Arc<Segment>, at: usize, rank: usize) -> Row {
        Row {
            segment: Arc::clone(segment),
            at,
            rank,
            progress: Fixed::new(segment, |segment| segment.words(at)),
            bell: Fixed::new(segment, |segment| segment.halves(at + LINE)),
            slots: Fixed::new(segment, |segment| segment.words(at + HEADER)),
        }
    }

    /// How many bytes a row takes in a group of `n`.
    pub(crate) fn size(n: usize) -> usize {
        Row::mails_at(n) + n * MAILS as usize * 8
    }

    fn mails_at(members: usize) -> usize {
        HEADER + SLOTS as usize * (SLOT + STAGE) + members * RING
    }

    pub(crate) fn done(&self) -> u64 {
        self.progress[0].load(Acquire)
    }

    /// Sets it, and wakes the waiters on this row.
    pub(crate) fn set_done(&self, done: u64) {
        self.tell(&self.progress[0], done);
    }

    /// Whether the owner has started a call, even if it waits for a slot.
    pub(crate) fn has_started(&self, call: u64) -> bool {
        self.has_published(call) || self.progress[1].load(Acquire) > call
    }

    /// Notes that calls below this number were started, some of which wait for a slot.
    pub(crate) fn set_started(&self, calls: u64) {
        self.progress[1].store(calls, Release);
    }

    fn bell(&self) -> &AtomicU32 {
        &self.bell[0]
    }

    fn waiters(&self) -> &AtomicU32 {
        &self.bell[1]
    }

    /// Stores one of the owner's words and wakes all that sleep on the row.
    pub(crate) fn tell(&self, word: &AtomicU64, value: u64) {
        // A swap, because the store must not be reordered with the load in `ring`: either this sees the waiter, or the
        // waiter, which counts itself first, sees the word. A fence would do too, and costs several times as much.
        word.swap(value, SeqCst);
        in_one_order();
        self.ring();
    }

    /// Wakes all that sleep on this row.
    pub(crate) fn ring(&self) {
        if self.waiters().load(SeqCst) > 0 {
            self.bell().fetch_add(1, SeqCst);
            wake(self.bell());
        }
    }

    /// Sleeps until the bell rings, unless `ready` already holds; never past `until`.
    pub(crate) fn sleep(&self, until: Instant, ready: impl Fn() -> bool) {
        self.waiters().fetch_add(1, SeqCst);
        let seen = self.bell().load(SeqCst);
        fence(SeqCst);
        // After the bell was read: a later publication changes it, and the sleep ends at once.
        let left = until.saturating_duration_since(Instant::now()).min(TURN);
        if !ready() && !left.is_zero() {
            sleep_on(self.bell(), seen, left);
        }
        self.waiters().fetch_sub(1, SeqCst);
    }

    fn end(&self, word: usize) -> &AtomicU64 {
        self.segment.word(self.at + 2 * LINE + word * 8)
    }

    /// How the owner's side of the group failed, if it did.
    pub(crate) fn stopped(&self) -> Option<Stopped> {
        match self.end(0).load(Acquire) {
            0 => None,
            1 => Some(Stopped::Differs(self.end(1).load(Relaxed))),
            _ => Some(Stopped::Caused),
        }
    }

    pub(crate) fn stop(&self, stopped: Stopped) {
        let word = match stopped {
            Stopped::Differs(call) => {
                self.end(1).store(call, Relaxed);
                1
            }
            Stopped::Caused => 2,
        };
        // As in `tell`; the caller rings the bells of all rows.
        self.end(0).swap(word, SeqCst);
        in_one_order();
    }

    /// Whether the owner has dropped its side of the group. What it has published stays.
    pub(crate) fn has_left(&self) -> bool {
        self.end(2).load(SeqCst) != 0
    }

    pub(crate) fn leave(&self) {
        self.end(2).swap(1, SeqCst);
        in_one_order();
    }

    /// One member fewer will read this row.
    pub(crate) fn let_go(&self) {
        self.end(3).fetch_add(1, AcqRel);
    }

    /// How many members will never read it again.
    pub(crate) fn gone(&self) -> u64 {
        self.end(3).load(Acquire)
    }

    fn slot(&self, call: u64) -> usize {
        self.at + HEADER + (call % SLOTS) as usize * SLOT
    }

    /// The words of a call, by [`Word`].
    pub(crate) fn words(&self, call: u64) -> &Slot {
        &self.slots[(call % SLOTS) as usize]
    }

    pub(crate) fn get(&self, call: u64, word: Word) -> u64 {
        self.words(call)[word as usize].load(Relaxed)
    }

    /// Whether the owner has published a call.
    pub(crate) fn has_published(&self, call: u64) -> bool {
        self.words(call)[Word::Stamp as usize].load(Acquire) == call + 1
    }

    pub(crate) fn publish(&self, call: u64) {
        self.tell(&self.words(call)[Word::Stamp as usize], call + 1);
        // A slot that others have read is also in their caches, and a write to it needs a transfer. Nobody reads this
        // one yet.
        Segment::fetch_to_write(&self.words(call + AHEAD)[0]);
    }

    /// Where `bytes` staged bytes of a call lie in the segment.
    pub(crate) fn stage(&self, call: u64, bytes: usize) -> usize {
        if bytes <= INLINE { self.slot(call) + LINE - INLINE } else { self.table(call) }
    }

    /// Where the staging area of a call lies.
    pub(crate) fn table(&self, call: u64) -> usize {
        self.at + HEADER + SLOTS as usize * SLOT + (call % SLOTS) as usize * STAGE
    }

    /// The ring of mails of the owner to a member.
    pub(crate) fn mails(&self, to: usize) -> Fixed<[Mail; MAILS as usize]> {
        Fixed::new(&self.segment, |segment| segment.words(self.at + Row::mails_at(to)))
    }

    /// Where `bytes` staged bytes of a mail lie.
    pub(crate) fn mail_stage(&self, to: usize, number: u64, bytes: usize) -> usize {
        let (ring, index) = (self.at + Row::mails_at(to), (number % MAILS) as usize);
        if bytes <= INLINE {
            ring + index * LINE + LINE - INLINE
        } else {
            ring + MAILS as usize * LINE + index * STAGE
        }
    }

    /// Where the owner, in a group of `n`, notes that it took a mail from a member: the mail's number plus one.
    pub(crate) fn taken_at(&self, n: usize, from: usize, number: u64) -> usize {
        self.at + Row::mails_at(n) + (from * MAILS as usize + (number % MAILS) as usize) * 8
    }

    /// All of its notes on mails from a member.
    pub(crate) fn taken(&self, n: usize, from: usize) -> Fixed<[AtomicU64; MAILS as usize]> {
        Fixed::new(&self.segment, |segment| segment.words(self.taken_at(n, from, 0)))
    }
}

/// The longest sleep before a waiter checks again for failures elsewhere.
const TURN: Duration =
    if cfg!(any(loom, shuttle)) { Duration::from_secs(7200) } else { Duration::from_millis(20) };

/// Wakes all that sleep on a bell; returns how many.
#[cfg(not(any(loom, shuttle)))]
fn wake(bell: &AtomicU32) -> usize {
    // The kernel reads the count as signed, and wakes one if it is negative. After a failed wake-up a waiter checks
    // again at its next turn.
    rustix::thread::futex::wake(bell, rustix::thread::futex::Flags::empty(), i32::MAX as u32).unwrap_or(0)
}

#[cfg(not(any(loom, shuttle)))]
fn sleep_on(bell: &AtomicU32, seen: u32, left: Duration) {
    use rustix::thread::futex;
    let timeout = futex::Timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) };
    let _ = futex::wait(bell, futex::Flags::empty(), seen, Some(&timeout));
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_bell_wakes_all_who_sleep_on_it() {
        let (bell, over) = (AtomicU32::new(0), AtomicU32::new(0));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while over.load(SeqCst) == 0 {
                        sleep_on(&bell, 0, Duration::from_millis(500));
                    }
                });
            }
            // They may not all be asleep yet, or not again.
            let until = Instant::now() + Duration::from_secs(20);
            let mut most = 0;
            while most < 3 && Instant::now() < until {
                most = most.max(wake(&bell));
                thread::yield_now();
            }
            over.store(1, SeqCst);
            wake(&bell);
            assert_eq!(most, 3);
        });
    }
}
