//! One operation on a group: what it is, what it needs from the others, and what it does with it.
//!
//! All operations pull: a member publishes where its operand lies, and whoever needs it reads it there. Only the
//! large all_reduce has two steps, because its result is made in parts: each member reduces its own part of all
//! operands and then copies the others' parts as they become ready.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::CommError;
use crate::element::{Element, Reduce};
use crate::heap::{Buffer, Lease};
use crate::kernels::{Part, reduce};
use crate::row::{Row, STAGE, Word};

/// What an operation is. Sizes are in bytes; `outer` is how many times a layout repeats, so that a dimension other
/// than the first is gathered or cut without a copy: an operand is `outer` rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Op {
    AllReduce { element: Element, reduce: Reduce },
    AllGather { outer: usize },
    ReduceScatter { element: Element, reduce: Reduce, outer: usize },
    AllToAll { ins: Vec<usize>, outs: Vec<usize> },
    Broadcast { root: usize },
    Reduce { element: Element, reduce: Reduce, root: usize },
    Gather { outer: usize, root: usize },
    Scatter { outer: usize, root: usize },
    AllGatherV { sizes: Vec<usize>, outer: usize },
    ReduceScatterV { element: Element, reduce: Reduce, sizes: Vec<usize>, outer: usize },
    Permute { to: Vec<Option<usize>> },
    Barrier,
}

const NAMES: [&str; 12] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_gather_v",
    "reduce_scatter_v",
    "permute",
    "barrier",
];

impl Op {
    fn code(&self) -> usize {
        match self {
            Op::AllReduce { .. } => 0,
            Op::AllGather { .. } => 1,
            Op::ReduceScatter { .. } => 2,
            Op::AllToAll { .. } => 3,
            Op::Broadcast { .. } => 4,
            Op::Reduce { .. } => 5,
            Op::Gather { .. } => 6,
            Op::Scatter { .. } => 7,
            Op::AllGatherV { .. } => 8,
            Op::ReduceScatterV { .. } => 9,
            Op::Permute { .. } => 10,
            Op::Barrier => 11,
        }
    }

    fn reduction(&self) -> Option<(Element, Reduce)> {
        match self {
            Op::AllReduce { element, reduce }
            | Op::ReduceScatter { element, reduce, .. }
            | Op::Reduce { element, reduce, .. }
            | Op::ReduceScatterV { element, reduce, .. } => Some((*element, *reduce)),
            _ => None,
        }
    }

    fn root(&self) -> Option<usize> {
        match self {
            Op::Broadcast { root }
            | Op::Reduce { root, .. }
            | Op::Gather { root, .. }
            | Op::Scatter { root, .. } => Some(*root),
            _ => None,
        }
    }

    /// Op, element type, reduction and root in one word, so that the check is one comparison.
    pub(crate) fn what(&self) -> u64 {
        let (element, reduction) = self.reduction().map_or((0, 0), |(element, reduce)| {
            let kinds = Reduce::ALL.iter().position(|kind| kind.name() == reduce.name()).unwrap_or(0);
            (Element::ALL.iter().position(|e| *e == element).unwrap_or(0) + 1, kinds + 1)
        });
        let root = self.root().map_or(0, |root| root + 1);
        self.code() as u64 | (element as u64) << 8 | (reduction as u64) << 16 | (root as u64) << 24
    }

    /// The word in words, for messages.
    pub(crate) fn describe(what: u64) -> String {
        let name = NAMES.get((what & 0xff) as usize).unwrap_or(&"?");
        let field = |shift: u32, mask: u64| (what >> shift & mask).checked_sub(1).map(|i| i as usize);
        let reduction = field(16, 0xff).and_then(|i| Reduce::ALL.get(i)).map_or("", |reduce| reduce.name());
        let element = field(8, 0xff).and_then(|i| Element::ALL.get(i)).map_or("", |element| element.name());
        let root = field(24, u64::MAX).map_or(String::new(), |root| format!("root {root}"));
        [name, reduction, element, &root]
            .iter()
            .filter(|part| !part.is_empty())
            .copied()
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// A hash (FNV-1a) of what else must be equal on all members.
    pub(crate) fn extra(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let mut add = |word: u64| hash = (hash ^ word).wrapping_mul(0x100_0000_01b3);
        if let Some((_, Reduce::PremulSum(factor))) = self.reduction() {
            add(factor.to_bits());
        }
        match self {
            Op::AllGather { outer }
            | Op::ReduceScatter { outer, .. }
            | Op::Gather { outer, .. }
            | Op::Scatter { outer, .. } => {
                add(*outer as u64);
            }
            Op::AllGatherV { sizes, outer } | Op::ReduceScatterV { sizes, outer, .. } => {
                add(*outer as u64);
                sizes.iter().for_each(|size| add(*size as u64));
            }
            Op::Permute { to } => to.iter().for_each(|to| add(to.map_or(0, |to| to as u64 + 1))),
            _ => {}
        }
        hash
    }

    /// Whether all members have operands of one size.
    fn is_even(&self) -> bool {
        !matches!(self, Op::AllToAll { .. } | Op::AllGatherV { .. })
    }
}

/// The members of a group as one of them sees it.
#[derive(Clone)]
pub(crate) struct Members {
    pub(crate) rows: Arc<Vec<Row>>,
    pub(crate) me: usize,
}

impl Members {
    pub(crate) fn n(&self) -> usize {
        self.rows.len()
    }

    fn mine(&self) -> &Row {
        &self.rows[self.me]
    }

    /// A range of a member's operand in a call that it has published. In a large all_reduce the owner writes to its
    /// operand while others read: its own part before `ready` covers it, the other parts after their readers are
    /// done with them, so never where this reads.
    fn operand(&self, member: usize, call: u64, from: usize, len: usize) -> &[u8] {
        let row = &self.rows[member];
        // SAFETY: the owner neither writes this range nor reuses its operand before this member's `done` is above
        // the call, which is stored after the last read here.
        unsafe { row.segment.read(row.get(call, Word::Place) as usize + from, len) }
    }

    /// A range of a member's staging area in a call.
    fn staged(&self, member: usize, call: u64, len: usize) -> &[u8] {
        let row = &self.rows[member];
        // SAFETY: written before the stamp, and not again before every member's `done` is above the call.
        unsafe { row.segment.read(row.stage(call), len) }
    }

    /// A range of one of this member's own buffers, which a call in flight holds.
    #[allow(clippy::mut_from_ref, reason = "the buffer is owned by the call that asks")]
    fn own(&self, buffer: &Buffer, from: usize, len: usize) -> &mut [u8] {
        assert!(from + len <= buffer.len(), "range {from}+{len} of {}", buffer.len());
        // SAFETY: the buffer belongs to a call in flight, so nobody else here reaches it, and peers read only what
        // the protocol leaves alone: see `operand`.
        unsafe { self.mine().segment.write(buffer.at + from, len) }
    }

    /// Copies a mail of a member into one of this member's own buffers.
    pub(crate) fn copy_mail(&self, buffer: &Buffer, from: usize, at: usize, len: usize) {
        // SAFETY: the mail is published, and its sender leaves the buffer alone until it is noted as taken.
        let mail = unsafe { self.rows[from].segment.read(at, len) };
        self.own(buffer, 0, len).copy_from_slice(mail);
    }

    fn lease(&self, call: u64) -> Lease {
        Lease::Call(Arc::clone(&self.rows), call)
    }

    /// Tells the others that so many bytes of this member's part are reduced.
    fn set_ready(&self, call: u64, bytes: usize) {
        self.mine().word(call, Word::Ready).store(bytes as u64, Release);
        self.mine().ring();
    }

    fn ready(&self, member: usize, call: u64) -> usize {
        self.rows[member].word(call, Word::Ready).load(Acquire) as usize
    }
}

/// An operation in flight.
pub(crate) struct Call {
    pub(crate) number: u64,
    pub(crate) op: Op,
    /// What is published; in place it also takes the result.
    pub(crate) operand: Option<Buffer>,
    /// Where the result goes, if not in place.
    pub(crate) result: Option<Buffer>,
    pub(crate) site: &'static std::panic::Location<'static>,
    pub(crate) published: bool,
    /// Whether it had to wait for a free slot.
    pub(crate) held: bool,
    /// How much of each member's part has been copied here, in a large all_reduce.
    copied: Vec<usize>,
}

/// Bytes that are reduced before the others are told.
const CHUNK: usize = 256 << 10;

impl Call {
    pub(crate) fn new(
        number: u64,
        op: Op,
        operand: Option<Buffer>,
        result: Option<Buffer>,
        site: &'static std::panic::Location<'static>,
    ) -> Call {
        Call { number, op, operand, result, site, published: false, held: false, copied: Vec::new() }
    }

    /// What the flight recorder keeps of it.
    pub(crate) fn record(&self) -> crate::recorder::Call {
        let bytes = self.bytes() as u64;
        crate::recorder::Call { number: self.number, what: self.op.what(), bytes, extra: self.op.extra() }
    }

    fn bytes(&self) -> usize {
        self.operand.as_ref().map_or(0, Buffer::len)
    }

    /// Whether the operand travels through the staging area, so that it is free at once.
    fn is_staged(&self) -> bool {
        matches!(self.op, Op::AllReduce { .. }) && self.bytes() <= STAGE
    }

    /// Fills the slot and stores the stamp.
    pub(crate) fn publish(&mut self, members: &Members, site: (usize, usize)) {
        let (row, number) = (members.mine(), self.number);
        // SAFETY: every member's `done` is above the call that used this slot before, so nobody reads its stage.
        let stage = unsafe { row.segment.write(row.stage(number), STAGE) };
        if let (true, Some(operand)) = (self.is_staged(), &self.operand) {
            stage[..operand.len()].copy_from_slice(operand.bytes());
        }
        if let Op::AllToAll { ins, .. } = &self.op {
            for (word, size) in stage.chunks_exact_mut(8).zip(ins) {
                word.copy_from_slice(&(*size as u64).to_le_bytes());
            }
        }
        row.set(number, Word::What, self.op.what());
        row.set(number, Word::Bytes, self.bytes() as u64);
        row.set(number, Word::Extra, self.op.extra());
        row.set(number, Word::Place, self.operand.as_ref().map_or(0, |operand| operand.at as u64));
        row.set(number, Word::Site, site.0 as u64);
        row.set(number, Word::SiteLength, site.1 as u64);
        if let (false, Some(operand)) = (self.is_staged() || members.n() == 1, &mut self.operand) {
            operand.leases.push(members.lease(number));
        }
        row.publish(number);
        self.published = true;
    }

    /// Whether a member's published call is the same as this one.
    pub(crate) fn agrees(&self, row: &Row) -> bool {
        row.get(self.number, Word::What) == self.op.what()
            && row.get(self.number, Word::Extra) == self.op.extra()
            && (!self.op.is_even() || row.get(self.number, Word::Bytes) == self.bytes() as u64)
    }

    /// The members whose operands this one needs before it can do anything.
    pub(crate) fn needs(&self, members: &Members) -> std::ops::Range<usize> {
        let one = |member: usize| member..member + 1;
        match &self.op {
            Op::Broadcast { root } | Op::Scatter { root, .. } => one(*root),
            Op::Reduce { root, .. } | Op::Gather { root, .. } if *root != members.me => one(members.me),
            Op::Permute { to } => one(to.iter().position(|to| *to == Some(members.me)).unwrap_or(members.me)),
            _ => 0..members.n(),
        }
    }

    /// The members whose parts are not all copied here yet, in a large all_reduce.
    pub(crate) fn unready(&self, members: &Members) -> Vec<usize> {
        let (Op::AllReduce { element, .. }, Some(buffer)) = (&self.op, &self.operand) else {
            return Vec::new();
        };
        let count = buffer.len() / element.size();
        let len = |m: usize| (count * (m + 1) / members.n() - count * m / members.n()) * element.size();
        (0..members.n()).filter(|m| members.ready(*m, self.number) < len(*m)).collect()
    }

    /// Goes on; true when the operation is finished here. All needed members have published, and agree.
    pub(crate) fn step(&mut self, members: &Members) -> Result<bool, CommError> {
        let (n, me, number, bytes) = (members.n(), members.me, self.number, self.bytes());
        if matches!(self.op, Op::AllReduce { .. }) && !self.is_staged() {
            return Ok(self.step_parts(members));
        }
        match (&self.op, &self.operand, &self.result) {
            (Op::AllReduce { element, reduce: kind }, Some(buffer), _) => {
                let parts: Vec<Part<'_>> =
                    (0..n).map(|m| Part::Peer(members.staged(m, number, bytes))).collect();
                reduce(members.own(buffer, 0, bytes), &parts, *element, *kind);
            }
            (Op::AllGather { outer }, _, Some(result)) => {
                let inner = bytes / outer;
                gather(members, number, result, *outer, &vec![inner; n]);
            }
            (Op::Gather { outer, root }, _, Some(result)) if *root == me => {
                let inner = bytes / outer;
                gather(members, number, result, *outer, &vec![inner; n]);
            }
            (Op::AllGatherV { sizes, outer }, _, Some(result)) => {
                gather(members, number, result, *outer, sizes)
            }
            (Op::ReduceScatter { element, reduce: kind, outer }, _, Some(result)) => {
                let part = result.len() / outer;
                scatter_reduced(members, number, result, (*element, *kind), *outer, &vec![part; n]);
            }
            (Op::ReduceScatterV { element, reduce: kind, sizes, outer }, _, Some(result)) => {
                scatter_reduced(members, number, result, (*element, *kind), *outer, sizes);
            }
            (Op::AllToAll { outs, .. }, _, Some(result)) => {
                let mut to = 0;
                for (from, expected) in outs.iter().enumerate() {
                    let table = members.staged(from, number, n * 8);
                    let size = |i: usize| {
                        table[i * 8..i * 8 + 8].iter().rev().fold(0usize, |a, b| a << 8 | usize::from(*b))
                    };
                    let (sent, start) = (size(me), (0..me).map(size).sum());
                    if sent != *expected {
                        return Err(CommError::Splits {
                            call: number,
                            from,
                            to: me,
                            sent,
                            expected: *expected,
                        });
                    }
                    members.own(result, to, sent).copy_from_slice(members.operand(from, number, start, sent));
                    to += sent;
                }
            }
            (Op::Broadcast { root }, Some(buffer), _) if *root != me => {
                members.own(buffer, 0, bytes).copy_from_slice(members.operand(*root, number, 0, bytes));
            }
            (Op::Reduce { element, reduce: kind, root }, Some(buffer), _) if *root == me => {
                let part =
                    |m| if m == me { Part::Own } else { Part::Peer(members.operand(m, number, 0, bytes)) };
                let parts: Vec<Part<'_>> = (0..n).map(part).collect();
                reduce(members.own(buffer, 0, bytes), &parts, *element, *kind);
            }
            (Op::Scatter { outer, root }, _, Some(result)) => {
                let part = result.len() / outer;
                for row in 0..*outer {
                    let from = members.operand(*root, number, (row * n + me) * part, part);
                    members.own(result, row * part, part).copy_from_slice(from);
                }
            }
            (Op::Permute { to }, _, Some(result)) => match to.iter().position(|to| *to == Some(me)) {
                Some(from) => {
                    members.own(result, 0, bytes).copy_from_slice(members.operand(from, number, 0, bytes))
                }
                None => members.own(result, 0, bytes).fill(0),
            },
            _ => {}
        }
        Ok(true)
    }

    /// The large all_reduce: reduce this member's part, then copy the others' as they become ready.
    fn step_parts(&mut self, members: &Members) -> bool {
        let (n, me, number) = (members.n(), members.me, self.number);
        let (Op::AllReduce { element, reduce: kind }, Some(buffer)) = (&self.op, &self.operand) else {
            return true;
        };
        let count = buffer.len() / element.size();
        let part = |member: usize| {
            let start = count * member / n * element.size();
            (start, count * (member + 1) / n * element.size() - start)
        };
        if self.copied.is_empty() {
            let (start, len) = part(me);
            for from in (0..len).step_by(CHUNK) {
                let chunk = CHUNK.min(len - from);
                let part = |m| {
                    if m == me {
                        Part::Own
                    } else {
                        Part::Peer(members.operand(m, number, start + from, chunk))
                    }
                };
                let parts: Vec<Part<'_>> = (0..n).map(part).collect();
                reduce(members.own(buffer, start + from, chunk), &parts, *element, *kind);
                members.set_ready(number, from + chunk);
            }
            self.copied = vec![0; n];
            self.copied[me] = len;
        }
        let mut finished = true;
        for member in 0..n {
            let (start, len) = part(member);
            let ready = if member == me { len } else { members.ready(member, number).min(len) };
            let done = self.copied[member];
            if ready > done {
                let from = members.operand(member, number, start + done, ready - done);
                members.own(buffer, start + done, ready - done).copy_from_slice(from);
                self.copied[member] = ready;
            }
            finished &= self.copied[member] == len;
        }
        finished
    }
}

/// Copies the members' operands, each `outer` rows of its size, side by side into `outer` rows.
fn gather(members: &Members, call: u64, result: &Buffer, outer: usize, sizes: &[usize]) {
    let whole: usize = sizes.iter().sum();
    let mut start = 0;
    for (member, size) in sizes.iter().enumerate() {
        for row in 0..outer {
            let from = members.operand(member, call, row * size, *size);
            members.own(result, row * whole + start, *size).copy_from_slice(from);
        }
        start += size;
    }
}

/// Reduces this member's part of every row of all operands.
fn scatter_reduced(
    members: &Members,
    call: u64,
    result: &Buffer,
    (element, kind): (Element, Reduce),
    outer: usize,
    sizes: &[usize],
) {
    let (whole, start): (usize, usize) = (sizes.iter().sum(), sizes[..members.me].iter().sum());
    let size = sizes[members.me];
    for row in 0..outer {
        let part = |m| Part::Peer(members.operand(m, call, row * whole + start, size));
        let parts: Vec<Part<'_>> = (0..members.n()).map(part).collect();
        reduce(members.own(result, row * size, size), &parts, element, kind);
    }
}
