//! Operations, and the words by which members compare their calls.

use consort_types::{Digest, Dtype, Kind, Reduce, Role};

use crate::row::STAGE;

/// An operation. Sizes are in bytes; `outer` is the number of rows of an operand, so that a dimension other than the
/// first is gathered or split without a copy. It is small, since every call moves one; rare fields are in [`Lists`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Op {
    AllReduce {
        dtype: Dtype,
        reduce: Reduce,
    },
    /// A list has rows for each operand.
    AllGather {
        outer: usize,
    },
    /// A list has rows for each operand.
    ReduceScatter {
        dtype: Dtype,
        reduce: Reduce,
        outer: usize,
    },
    /// The bytes from each member to each, if all are equal; splits otherwise.
    AllToAll {
        part: usize,
    },
    Broadcast {
        root: usize,
    },
    Reduce {
        dtype: Dtype,
        reduce: Reduce,
        root: usize,
    },
    Gather {
        outer: usize,
        root: usize,
    },
    Scatter {
        outer: usize,
        root: usize,
    },
    /// With sizes.
    AllGatherV {
        outer: usize,
    },
    /// With sizes.
    ReduceScatterV {
        dtype: Dtype,
        reduce: Reduce,
        outer: usize,
    },
    /// With routes.
    Permute,
    #[default]
    Barrier,
}

/// Lists that some operations have in addition.
pub(crate) enum Lists {
    /// The rows of each operand.
    Outers(Vec<usize>),
    /// The bytes of each member in one row.
    Sizes(Vec<usize>),
    /// The bytes to each member, and from each.
    Splits(Vec<usize>, Vec<usize>),
    /// Where each member sends, if anywhere.
    Routes(Vec<Option<usize>>),
}

/// Members agree on something: to make a group, to compile a function. The caller's text names it, and stands for the
/// whole call in messages.
pub(crate) const AGREEMENT: u64 = 1 << 61;
/// The result is made once, in a common buffer.
const COMMON: u64 = 1 << 62;
/// An all_to_all sends and receives equal parts, so that it needs no table. Members may differ in this bit.
const EVEN: u64 = 1 << 63;

/// What members compare: three words, written into the slot before its stamp.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) what: u64,
    pub(crate) extra: u64,
    pub(crate) bytes: u64,
}

impl Key {
    /// Whether it is an all_to_all without a table.
    pub(crate) fn is_even(self) -> bool {
        self.what & EVEN != 0
    }

    pub(crate) fn is_common(self) -> bool {
        self.what & COMMON != 0
    }

    /// Whether the operands travel in the staging area. That of an all_to_all may hold a table instead.
    pub(crate) fn is_staged(self) -> bool {
        let tabled = self.what & 0xff == ALL_TO_ALL && !self.is_even();
        self.bytes as usize <= STAGE && !tabled
    }

    /// Whether two members made the same call. Operands of some operations may have different sizes.
    pub(crate) fn agrees(self, other: Key) -> bool {
        let code = self.what & 0xff;
        let same = (self.what ^ other.what) & !EVEN == 0 && self.extra == other.extra;
        let given = code == BROADCAST && self.is_common();
        same && (self.bytes == other.bytes || code == ALL_TO_ALL || code == ALL_GATHER_V || given)
    }

    /// As text, for messages.
    pub(crate) fn describe(self) -> String {
        format!("{}, {} bytes", describe(self.what), self.bytes)
    }

    /// The first difference between two calls that do not agree, the coarsest first.
    pub(crate) fn difference(self, other: Key) -> &'static str {
        let differs = |shift: u32, mask: u64| (self.what ^ other.what) >> shift & mask != 0;
        if differs(0, 0xff) || differs(61, 1) {
            "the operation"
        } else if differs(8, 0xff) {
            "the element type"
        } else if differs(16, 0xff) {
            "the reduction"
        } else if differs(24, 0xffff_ffff) {
            "the root"
        } else if differs(62, 1) {
            "the form"
        } else if self.what & AGREEMENT != 0 {
            "the call"
        } else if self.bytes != other.bytes {
            "the size"
        } else {
            "types, shapes, sizes, routes or factors"
        }
    }
}

/// The text of a call's first word.
pub(crate) fn describe(what: u64) -> String {
    let name = Kind::ALL.get((what & 0xff) as usize).map_or("?", |kind| kind.name());
    let field = |shift: u32, mask: u64| (what >> shift & mask).checked_sub(1).map(|i| i as usize);
    let reduction = field(16, 0xff).and_then(|i| Reduce::ALL.get(i)).map_or("", |reduce| reduce.name());
    let dtype = field(8, 0xff).and_then(|i| Dtype::ALL.get(i)).map_or("", |dtype| dtype.name());
    let root = field(24, 0xffff_ffff).map_or(String::new(), |root| format!("root {root}"));
    let common = if what & COMMON == 0 { "" } else { "common" };
    let parts = [name, reduction, dtype, &root, common];
    parts.iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join(" ")
}

const ALL_TO_ALL: u64 = Kind::AllToAll as u64;
const BROADCAST: u64 = Kind::Broadcast as u64;
const ALL_GATHER_V: u64 = Kind::AllGatherV as u64;

impl Op {
    #[inline(always)]
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Op::AllReduce { .. } => Kind::AllReduce,
            Op::AllGather { .. } => Kind::AllGather,
            Op::ReduceScatter { .. } => Kind::ReduceScatter,
            Op::AllToAll { .. } => Kind::AllToAll,
            Op::Broadcast { .. } => Kind::Broadcast,
            Op::Reduce { .. } => Kind::Reduce,
            Op::Gather { .. } => Kind::Gather,
            Op::Scatter { .. } => Kind::Scatter,
            Op::AllGatherV { .. } => Kind::AllGatherV,
            Op::ReduceScatterV { .. } => Kind::ReduceScatterV,
            Op::Permute => Kind::Permute,
            Op::Barrier => Kind::Barrier,
        }
    }

    #[inline(always)]
    pub(crate) fn root(&self) -> Option<usize> {
        match *self {
            Op::Broadcast { root }
            | Op::Reduce { root, .. }
            | Op::Gather { root, .. }
            | Op::Scatter { root, .. } => Some(root),
            _ => None,
        }
    }

    #[inline(always)]
    fn reduction(&self) -> Option<(Dtype, Reduce)> {
        match *self {
            Op::AllReduce { dtype, reduce }
            | Op::ReduceScatter { dtype, reduce, .. }
            | Op::ReduceScatterV { dtype, reduce, .. }
            | Op::Reduce { dtype, reduce, .. } => Some((dtype, reduce)),
            _ => None,
        }
    }

    /// This member's role.
    #[inline(always)]
    pub(crate) fn role(&self, me: usize) -> Role {
        self.kind().role(self.root(), me)
    }

    /// What members compare, for operands of these lengths, in bytes. This and [`Key::agrees`] are the whole check.
    /// Inlined: for a known op, most of it is constant.
    #[inline(always)]
    pub(crate) fn key(&self, lists: Option<&Lists>, lengths: &[usize], common: bool) -> Key {
        let mut digest = Digest::default();
        let bytes = match lengths {
            [bytes] => *bytes,
            _ => {
                lengths.iter().for_each(|len| digest.add(*len as u64));
                lengths.iter().sum()
            }
        };
        match *self {
            Op::AllReduce { reduce, .. } | Op::Reduce { reduce, .. } => add_factor(&mut digest, reduce),
            Op::ReduceScatter { reduce, outer, .. } | Op::ReduceScatterV { reduce, outer, .. } => {
                add_factor(&mut digest, reduce);
                digest.add(outer as u64);
            }
            Op::AllGather { outer }
            | Op::AllGatherV { outer }
            | Op::Gather { outer, .. }
            | Op::Scatter { outer, .. } => digest.add(outer as u64),
            Op::AllToAll { .. } | Op::Broadcast { .. } | Op::Permute | Op::Barrier => {}
        }
        if let Some(lists) = lists {
            add_lists(&mut digest, lists);
        }
        let reduced =
            self.reduction().map_or(0, |(dtype, reduce)| (dtype as u64 + 1) << 8 | (reduce.code() + 1) << 16);
        let rooted = self.root().map_or(0, |root| (root as u64 + 1) << 24);
        let even = if matches!(self, Op::AllToAll { .. }) && lists.is_none() { EVEN } else { 0 };
        let what = self.kind() as u64 | reduced | rooted | even;
        Key { what: what | if common { COMMON } else { 0 }, extra: digest.get(), bytes: bytes as u64 }
    }
}

/// Adds what only some operations have. Splits differ between members, and are compared pair by pair.
fn add_lists(digest: &mut Digest, lists: &Lists) {
    match lists {
        Lists::Outers(list) | Lists::Sizes(list) => list.iter().for_each(|word| digest.add(*word as u64)),
        Lists::Routes(to) => to.iter().for_each(|to| digest.add(to.map_or(0, |to| to as u64 + 1))),
        Lists::Splits(..) => {}
    }
}

fn add_factor(digest: &mut Digest, reduce: Reduce) {
    if let Reduce::PremulSum(factor) = reduce {
        digest.add(factor.to_bits());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_the_key_counts() {
        let sum = Op::AllReduce { dtype: Dtype::F32, reduce: Reduce::Sum };
        let key = sum.key(None, &[64], false);
        assert_eq!(describe(key.what), "all_reduce sum f32");
        let others = [
            Op::AllReduce { dtype: Dtype::F32, reduce: Reduce::Max }.key(None, &[64], false),
            Op::AllReduce { dtype: Dtype::I32, reduce: Reduce::Sum }.key(None, &[64], false),
            Op::Reduce { dtype: Dtype::F32, reduce: Reduce::Sum, root: 0 }.key(None, &[64], false),
            sum.key(None, &[60], false),
            sum.key(None, &[32, 32], false),
            sum.key(None, &[64], true),
        ];
        assert!(key.agrees(key));
        for (i, other) in others.iter().enumerate() {
            assert!(!key.agrees(*other), "{i}");
            assert!(others[..i].iter().all(|before| !before.agrees(*other)), "{i}");
        }
        let splits = Lists::Splits(vec![4, 8], vec![4, 4]);
        let uneven = Op::AllToAll { part: 0 }.key(Some(&splits), &[12], false);
        let even = Op::AllToAll { part: 4 }.key(None, &[8], false);
        assert!(even.is_even() && !uneven.is_even());
        assert!(even.agrees(uneven), "compared pair by pair");
    }
}
