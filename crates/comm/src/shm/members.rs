//! The members of a group as one of them sees it, and the only access to their data: each function with the rule of the
//! protocol that keeps writers and readers apart.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use crate::op::Key;
use crate::recorder::{CallText, Name};
use crate::shm::buffer::Address;
use crate::shm::row::{Mail, MailWord, Row, STAGE, Slot, Word};
use crate::shm::rows::Rows;
use crate::sync::AtomicU64;

/// The rows of a group, and which is this member's.
#[derive(Clone)]
pub(crate) struct Members {
    pub(crate) rows: Arc<Rows>,
    pub(crate) me: usize,
    /// This member's own row, cached because every call uses it.
    mine: Row,
}

/// One of the operands of a call.
#[derive(Clone, Copy)]
pub(crate) struct Item {
    /// Its index.
    pub(crate) index: usize,
    /// The number of operands.
    pub(crate) of: usize,
    /// Where it begins when all are laid end to end.
    pub(crate) start: usize,
}

/// An operand that a member has published for a call.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    row: &'a Row,
    at: usize,
}

impl<'a> Source<'a> {
    /// A range of it. In a large all_reduce its owner writes to it while others read: its own part before `ready`
    /// covers it, the other parts after their readers are done with them, so never where this reads.
    pub(crate) fn range(self, from: usize, len: usize) -> &'a [u8] {
        // SAFETY: the owner neither writes this range nor reuses its operand or its stage before this member's `done`
        // is above the call, which is stored after the last read here.
        unsafe { self.row.segment.read(self.at + from, len) }
    }
}

/// Whether the stamp appears within `looks` retries.
#[inline(always)]
pub(crate) fn comes(word: &AtomicU64, stamp: u64, looks: usize) -> bool {
    let is_there = || word.load(Acquire) == stamp;
    let look = |_| {
        std::hint::spin_loop();
        is_there()
    };
    is_there() || (0..looks).any(look)
}

/// Copies bytes, with fast paths for 4 and 8 of them.
#[inline(always)]
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    if let (Some(to), Some(from)) = (to.as_mut_array::<4>(), from.as_array::<4>()) {
        *to = *from;
    } else if let (Some(to), Some(from)) = (to.as_mut_array::<8>(), from.as_array::<8>()) {
        *to = *from;
    } else {
        to.copy_from_slice(from);
    }
}

/// The key in the words of a call.
fn key(words: &Slot) -> Key {
    let get = |word: Word| words[word as usize].load(Relaxed);
    Key { what: get(Word::What), extra: get(Word::Extra), bytes: get(Word::Bytes) }
}

impl Members {
    pub(crate) fn new(rows: Rows, me: usize) -> Members {
        Members { mine: rows[me].clone(), rows: Arc::new(rows), me }
    }

    pub(crate) fn n(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn mine(&self) -> &Row {
        &self.mine
    }

    /// The stamp of a call that a member has not published yet, with the value seen.
    pub(crate) fn unpublished(&self, member: usize, call: u64) -> Option<(&AtomicU64, u64)> {
        let stamp = &self.rows[member].words(call)[Word::Stamp as usize];
        let seen = stamp.load(Relaxed);
        (seen != call + 1).then_some((stamp, seen))
    }

    /// What a member has published for a call, if it has within `looks` retries.
    #[inline(always)]
    pub(crate) fn published(&self, member: usize, call: u64, looks: usize) -> Option<Key> {
        let words = self.rows[member].words(call);
        comes(&words[Word::Stamp as usize], call + 1, looks).then(|| key(words))
    }

    /// What a member has published for a call.
    pub(crate) fn key(&self, member: usize, call: u64) -> Key {
        key(self.rows[member].words(call))
    }

    /// An operand of a member that has published the call and agrees with it.
    pub(crate) fn operand(&self, number: u64, member: usize, item: Item) -> Source<'_> {
        let row = &self.rows[member];
        let key = self.key(member, number);
        let place = || row.get(number, Word::Address) as usize;
        let at = if key.is_staged() {
            row.stage(number, key.bytes as usize) + item.start
        } else if item.of > 1 {
            row.segment.word(place() + item.index * 8).load(Relaxed) as usize
        } else {
            place()
        };
        Source { row, at }
    }

    /// The staged operand of a member at offset `from`, in a call of `bytes` bytes.
    pub(crate) fn staged(&self, member: usize, number: u64, bytes: usize, from: usize) -> Source<'_> {
        let row = &self.rows[member];
        Source { row, at: row.stage(number, bytes) + from }
    }

    /// All members, this one first, so that not all read from one at once.
    pub(crate) fn rotated(&self) -> impl Iterator<Item = usize> + use<> {
        (self.me..self.n()).chain(0..self.me)
    }

    /// A range of one of this member's own buffers, which a call in flight holds.
    #[allow(clippy::mut_from_ref, reason = "the buffer is claimed by the call that asks")]
    #[inline(always)]
    pub(crate) fn own(&self, place: Address, from: usize, len: usize) -> &mut [u8] {
        place.check(from, len);
        // SAFETY: the call in flight has claimed it for writing, so nobody else here reaches it, and peers read only
        // what the protocol leaves alone: see `Source::range`.
        unsafe { self.mine().segment.write(place.at + from, len) }
    }

    /// The same to read.
    #[inline(always)]
    pub(crate) fn given(&self, place: Address, from: usize, len: usize) -> &[u8] {
        place.check(from, len);
        // SAFETY: the call in flight has claimed it, so nobody else here writes it.
        unsafe { self.mine().segment.read(place.at + from, len) }
    }

    /// A range of a common result that only this member writes.
    #[allow(clippy::mut_from_ref, reason = "the range is this member's part of the result")]
    pub(crate) fn common(&self, giver: usize, at: usize, from: usize, len: usize) -> &mut [u8] {
        // SAFETY: members make parts that do not overlap, and read them only after `ready` of their makers; the block
        // is not reused before every member has let go of it.
        unsafe { self.rows[giver].segment.write(at + from, len) }
    }

    /// This member's staging area for a call that is not yet published.
    #[allow(clippy::mut_from_ref, reason = "one call at a time is published on a group")]
    pub(crate) fn stage(&self, call: u64, bytes: usize) -> &mut [u8] {
        let row = self.mine();
        // SAFETY: every member's `done` is above the call that used this slot before, so nobody reads its stage.
        unsafe { row.segment.write(row.stage(call, bytes), bytes.min(STAGE)) }
    }

    /// This member's staging area for a mail that is not yet published.
    #[allow(clippy::mut_from_ref, reason = "one mail at a time is published")]
    pub(crate) fn mail_stage(&self, to: usize, number: u64, bytes: usize) -> &mut [u8] {
        let row = self.mine();
        // SAFETY: the receiver has taken the mail that used this entry before.
        unsafe { row.segment.write(row.mail_stage(to, number, bytes), bytes.min(STAGE)) }
    }

    /// Copies a mail of a member, which is published and has the buffer's length, into one of this member's buffers.
    pub(crate) fn copy_mail(&self, from: usize, number: u64, words: &Mail, place: Address) {
        let row = &self.rows[from];
        let len = place.len;
        let at = if len <= STAGE {
            row.mail_stage(self.me, number, len)
        } else {
            words[MailWord::Address as usize].load(Relaxed) as usize
        };
        // SAFETY: its sender leaves the mail and its stage alone until it is noted as taken.
        let mail = unsafe { row.segment.read(at, len) };
        copy(self.own(place, 0, len), mail);
    }

    /// The source line of a member's call, and the caller's text for it, if any.
    pub(crate) fn names(&self, member: usize, call: u64) -> (String, String) {
        let row = &self.rows[member];
        let (site, name) = Name::of_pair(row.get(call, Word::Site));
        let at = if self.key(member, call).is_small() { Word::Address } else { Word::TextNumber };
        let text = CallText { name, number: row.get(call, at) as u32 };
        (site.text(&row.segment), text.text(&row.segment))
    }

    /// Publishes that `bytes` bytes of this member's part are ready.
    pub(crate) fn set_ready(&self, call: u64, bytes: usize) {
        let row = self.mine();
        row.tell(&row.words(call)[Word::Ready as usize], bytes as u64);
    }

    pub(crate) fn ready(&self, member: usize, call: u64) -> usize {
        self.rows[member].words(call)[Word::Ready as usize].load(Acquire) as usize
    }
}
