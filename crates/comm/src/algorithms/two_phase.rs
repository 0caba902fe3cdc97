//! The large all_reduce, in place: each member reduces its own part of all operands, chunk by chunk, and copies the
//! others' parts as they become ready.
//!
//! It needs no wait between the phases: part p of a buffer is overwritten by the result of part p, whose maker has
//! then read it.

use std::ops::Range;

use smallvec::SmallVec;

use super::parts;
use crate::call::Call;
use crate::element::{Element, Reduce};
use crate::kernels::{self, Part};
use crate::members::Members;
use crate::op::Op;

/// Bytes that are reduced before the others are told: they are still in a cache when they are copied.
const CHUNK: usize = 128 << 10;
/// Parts begin on a cache line.
const LINE: usize = 64;

/// How far a member is.
#[derive(Default)]
pub(crate) struct Phases {
    reduced: usize,
    /// How much of each member's part has been copied here.
    copied: SmallVec<[usize; 8]>,
}

impl Phases {
    /// A member whose part is not all copied yet, and how much of it is.
    pub(crate) fn behind(&self, bytes: usize, members: &Members) -> Option<(usize, u64)> {
        let n = members.n();
        let behind = |m: &usize| *m != members.me && self.copied[*m] < part(bytes, n, *m).len();
        (0..self.copied.len()).find(behind).map(|m| (m, self.copied[m] as u64))
    }
}

/// A member's part of so many bytes.
pub(crate) fn part(bytes: usize, n: usize, member: usize) -> Range<usize> {
    let lines = bytes.div_ceil(LINE);
    let start = |member: usize| (lines * member / n * LINE).min(bytes);
    start(member)..start(member + 1)
}

/// Goes as far as it can; true when all parts are here.
pub(crate) fn all_reduce(call: &mut Call, members: &Members) -> bool {
    let (n, me, bytes) = (members.n(), members.me, call.bytes());
    let Op::AllReduce { element, reduce } = call.op else { return true };
    let mut phases = std::mem::take(&mut call.more().phases);
    phases.copied.resize(n, 0);
    let own = part(bytes, n, me);
    loop {
        if phases.reduced < own.len() {
            let start = own.start + phases.reduced;
            let chunk = start..own.end.min(start + CHUNK);
            reduce_range(call, members, (element, reduce), chunk.clone());
            phases.reduced += chunk.len();
            members.set_ready(call.number, phases.reduced);
        }
        let mut finished = phases.reduced == own.len();
        let mut moved = false;
        // Each begins with its right neighbour, so that not all read from one.
        for member in (1..n).map(|step| (me + step) % n) {
            let theirs = part(bytes, n, member);
            let done = phases.copied[member];
            let ready = if done < theirs.len() { members.ready(member, call.number) } else { done };
            if ready > done {
                copy_range(call, members, member, theirs.start + done..theirs.start + ready);
                phases.copied[member] = ready;
                moved = true;
            }
            finished &= ready == theirs.len();
        }
        if finished || !moved && phases.reduced == own.len() {
            call.more().phases = phases;
            return finished;
        }
    }
}

/// Reduces a range of all operands, laid end to end, into this member's own.
fn reduce_range(call: &Call, members: &Members, (element, reduce): (Element, Reduce), range: Range<usize>) {
    for (item, from, len) in spans(call, range) {
        let parts = parts(members.n(), |member| match member == members.me {
            true => Part::Own,
            false => Part::Peer(members.operand(call, member, item).range(from, len)),
        });
        kernels::reduce(members.own(&call.operands[item], from, len), &parts, element, reduce);
    }
}

fn copy_range(call: &Call, members: &Members, member: usize, range: Range<usize>) {
    for (item, from, len) in spans(call, range) {
        let source = members.operand(call, member, item).range(from, len);
        members.own(&call.operands[item], from, len).copy_from_slice(source);
    }
}

/// A range of all operands, laid end to end, as ranges of each: which, from where, how long.
pub(crate) fn spans(call: &Call, range: Range<usize>) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut start = 0;
    call.operands.iter().enumerate().filter_map(move |(item, operand)| {
        let here = start..start + operand.len();
        start = here.end;
        let (from, to) = (range.start.max(here.start), range.end.min(here.end));
        (from < to).then(|| (item, from - here.start, to - from))
    })
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
