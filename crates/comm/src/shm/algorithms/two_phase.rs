//! The large all_reduce, in place: each member reduces its own part of all operands, chunk by chunk, and copies the
//! others' parts as they become ready.
//!
//! No wait is needed between the phases: part p of a buffer is overwritten by the result of part p, and the member that
//! made that result has then read part p.

use std::ops::Range;

use consort_types::{Dtype, Reduce};
use smallvec::SmallVec;

use crate::kernels::Part;
use crate::op::Key;
use crate::shm::buffers::{Places, spans, start_of};
use crate::shm::members::{Item, Members};
use crate::shm::row::Word;
use crate::sync::AtomicU64;

/// Bytes that are reduced before `ready` is updated: few enough that they are still in the reducer's L2 cache when they
/// are copied, and enough that memory is read in long sequential runs.
const CHUNK: usize = if cfg!(any(loom, shuttle)) { LINE } else { 512 << 10 };
/// Parts begin on a cache line.
const LINE: usize = 64;

/// A published large all_reduce. Either this member's thread or its progress thread can advance it.
pub(crate) struct LargeReduction {
    number: u64,
    key: Key,
    reduce: Reduce,
    operands: Places,
    /// The element type of each.
    dtypes: SmallVec<[Dtype; 8]>,
    /// The next member whose publication is not checked yet.
    checked: usize,
    /// How much of this member's part is reduced.
    reduced: usize,
    /// How much of each member's part has been copied here.
    copied: SmallVec<[usize; 8]>,
    finished: bool,
    /// The operation failed, and no longer owns its buffers.
    cancelled: bool,
}

/// A member's part of `bytes` bytes.
pub(crate) fn part(bytes: usize, n: usize, member: usize) -> Range<usize> {
    let lines = bytes.div_ceil(LINE);
    let start = |member: usize| (lines * member / n * LINE).min(bytes);
    start(member)..start(member + 1)
}

impl LargeReduction {
    pub(crate) fn new(
        members: &Members,
        number: u64,
        key: Key,
        (operands, dtypes): (Places, SmallVec<[Dtype; 8]>),
        reduce: Reduce,
    ) -> LargeReduction {
        let copied = SmallVec::from_elem(0, members.n());
        LargeReduction {
            number,
            key,
            reduce,
            operands,
            dtypes,
            checked: 0,
            reduced: 0,
            copied,
            finished: false,
            cancelled: false,
        }
    }

    /// Cancels it: from now on no step touches a buffer.
    pub(crate) fn cancel(&mut self) {
        self.cancelled = true;
    }

    /// Advances as far as possible; true when all parts are here. The error is a member whose call differs.
    pub(crate) fn step(&mut self, members: &Members) -> Result<bool, usize> {
        if self.cancelled {
            return Ok(true);
        }
        let (n, me, bytes) = (members.n(), members.me, self.key.bytes as usize);
        while !self.finished && self.checked < n {
            if !members.rows[self.checked].has_published(self.number) {
                return Ok(false);
            }
            if !self.key.agrees(members.key(self.checked, self.number)) {
                return Err(self.checked);
            }
            self.checked += 1;
        }
        let own = part(bytes, n, me);
        while !self.finished {
            if self.reduced < own.len() {
                let start = own.start + self.reduced;
                let chunk = start..own.end.min(start + CHUNK);
                self.reduce_range(members, chunk.clone());
                self.reduced += chunk.len();
                members.set_ready(self.number, self.reduced);
            }
            let mut all = self.reduced == own.len();
            let mut moved = false;
            // Each member begins with its right neighbour, so that not all read from one at once.
            for member in members.rotated().skip(1) {
                let theirs = part(bytes, n, member);
                let done = self.copied[member];
                let ready = if done < theirs.len() { members.ready(member, self.number) } else { done };
                if ready > done {
                    self.copy_range(members, member, theirs.start + done..theirs.start + ready);
                    self.copied[member] = ready;
                    moved = true;
                }
                all &= ready == theirs.len();
            }
            self.finished = all;
            if !moved && self.reduced == own.len() {
                break;
            }
        }
        Ok(self.finished)
    }

    /// A member, its word that must change before this can advance, and the value seen.
    pub(crate) fn awaits<'a>(&self, members: &'a Members) -> Option<(usize, &'a AtomicU64, u64)> {
        let (n, bytes, member) = (members.n(), self.key.bytes as usize, self.checked);
        if member < n {
            return members.unpublished(member, self.number).map(|(stamp, seen)| (member, stamp, seen));
        }
        let behind = (0..n).find(|m| *m != members.me && self.copied[*m] < part(bytes, n, *m).len())?;
        let ready = &members.rows[behind].words(self.number)[Word::Ready as usize];
        Some((behind, ready, self.copied[behind] as u64))
    }

    /// Reduces a range of all operands, laid end to end, into this member's own.
    fn reduce_range(&self, members: &Members, range: Range<usize>) {
        for (item, from, len) in spans(&self.operands, range) {
            let part = |member| match member == members.me {
                true => Part::Own,
                false => Part::Peer(members.operand(self.number, member, self.item(item)).range(from, len)),
            };
            let own = members.own(self.operands[item], from, len);
            super::reduce(own, members.n(), part, (self.dtypes[item], self.reduce));
        }
    }

    fn copy_range(&self, members: &Members, member: usize, range: Range<usize>) {
        for (item, from, len) in spans(&self.operands, range) {
            let source = members.operand(self.number, member, self.item(item)).range(from, len);
            members.own(self.operands[item], from, len).copy_from_slice(source);
        }
    }

    fn item(&self, index: usize) -> Item {
        Item { index, of: self.operands.len(), start: start_of(&self.operands, index) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once_and_begin_on_lines() {
        for bytes in [0, 1, 63, 64, 65, 4097, 1 << 20, (1 << 20) + 4] {
            for n in 1..9 {
                let parts: Vec<_> = (0..n).map(|m| part(bytes, n, m)).collect();
                assert_eq!(parts[0].start, 0);
                assert_eq!(parts[n - 1].end, bytes);
                assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
                assert!(parts.iter().all(|part| part.start.is_multiple_of(LINE) || part.start == bytes));
            }
        }
    }
}
