//! What an operation is, and the words by which members compare theirs.

use crate::element::{Element, Reduce};
use crate::row::STAGE;

/// An operation. Sizes are in bytes; `outer` is how many times a layout repeats, so that a dimension other than the
/// first is gathered or cut without a copy: an operand is `outer` rows. It is small, since every call moves one; what
/// few of them have is in [`Lists`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Op {
    AllReduce {
        element: Element,
        reduce: Reduce,
    },
    /// A list has rows for each operand.
    AllGather {
        outer: usize,
    },
    /// A list has rows for each operand.
    ReduceScatter {
        element: Element,
        reduce: Reduce,
        outer: usize,
    },
    /// The bytes from each to each, where they are alike; splits otherwise.
    AllToAll {
        part: usize,
    },
    Broadcast {
        root: usize,
    },
    Reduce {
        element: Element,
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
        element: Element,
        reduce: Reduce,
        outer: usize,
    },
    /// With routes.
    Permute,
    #[default]
    Barrier,
}

/// Numbers that an operation may have besides.
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

/// Members agree on something: to make a group, to compile a function. The caller's text says on what, and stands for the
/// whole of the call in messages.
pub(crate) const AGREEMENT: u64 = 1 << 61;
/// The result is made once, in a common buffer.
const COMMON: u64 = 1 << 62;
/// What an all_to_all sends and receives is cut into equal parts, so that no table comes with it. Members may differ in
/// it.
const EVEN: u64 = 1 << 63;

/// What members compare: three words, written into the slot before its stamp.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) what: u64,
    pub(crate) extra: u64,
    pub(crate) bytes: u64,
}

impl Key {
    /// Whether an all_to_all comes without a table.
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

    /// Whether two members called the same. Operands of some operations may have different sizes.
    pub(crate) fn agrees(self, other: Key) -> bool {
        let code = self.what & 0xff;
        let same = (self.what ^ other.what) & !EVEN == 0 && self.extra == other.extra;
        let given = code == BROADCAST && self.is_common();
        same && (self.bytes == other.bytes || code == ALL_TO_ALL || code == ALL_GATHER_V || given)
    }

    /// In words, for messages.
    pub(crate) fn describe(self) -> String {
        format!("{}, {} bytes", describe(self.what), self.bytes)
    }

    /// What two calls that do not agree differ in, the coarsest first.
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

/// A call's first word in words.
pub(crate) fn describe(what: u64) -> String {
    let name = NAMES.get((what & 0xff) as usize).unwrap_or(&"?");
    let field = |shift: u32, mask: u64| (what >> shift & mask).checked_sub(1).map(|i| i as usize);
    let reduction = field(16, 0xff).and_then(|i| Reduce::ALL.get(i)).map_or("", |reduce| reduce.name());
    let element = field(8, 0xff).and_then(|i| Element::ALL.get(i)).map_or("", |element| element.name());
    let root = field(24, 0xffff_ffff).map_or(String::new(), |root| format!("root {root}"));
    let common = if what & COMMON == 0 { "" } else { "common" };
    let parts = [name, reduction, element, &root, common];
    parts.iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join(" ")
}

/// Places in `NAMES`.
const ALL_TO_ALL: u64 = 3;
const BROADCAST: u64 = 4;
const ALL_GATHER_V: u64 = 8;

impl Op {
    /// What members compare, for operands of these lengths, in bytes. This and [`Key::agrees`] are the whole check.
    /// Inlined: where the op is known, little of it is left.
    #[inline(always)]
    pub(crate) fn key(&self, lists: Option<&Lists>, lengths: &[usize], common: bool) -> Key {
        let mut hash = Hash(0xcbf2_9ce4_8422_2325);
        let bytes = match lengths {
            [bytes] => *bytes,
            _ => {
                lengths.iter().for_each(|len| hash.add(*len));
                lengths.iter().sum()
            }
        };
        match *self {
            Op::AllReduce { reduce, .. } | Op::Reduce { reduce, .. } => hash.add_factor(reduce),
            Op::ReduceScatter { reduce, outer, .. } | Op::ReduceScatterV { reduce, outer, .. } => {
                hash.add_factor(reduce);
                hash.add(outer);
            }
            Op::AllGather { outer }
            | Op::AllGatherV { outer }
            | Op::Gather { outer, .. }
            | Op::Scatter { outer, .. } => hash.add(outer),
            Op::AllToAll { .. } | Op::Broadcast { .. } | Op::Permute | Op::Barrier => {}
        }
        if let Some(lists) = lists {
            hash.add_lists(lists);
        }
        let reduced =
            |element: Element, reduce: Reduce| (element as u64 + 1) << 8 | (reduce.code() + 1) << 16;
        let rooted = |root: usize| (root as u64 + 1) << 24;
        let what = match *self {
            Op::AllReduce { element, reduce } => reduced(element, reduce),
            Op::AllGather { .. } => 1,
            Op::ReduceScatter { element, reduce, .. } => 2 | reduced(element, reduce),
            Op::AllToAll { .. } => {
                if lists.is_some() {
                    ALL_TO_ALL
                } else {
                    ALL_TO_ALL | EVEN
                }
            }
            Op::Broadcast { root } => BROADCAST | rooted(root),
            Op::Reduce { element, reduce, root } => 5 | reduced(element, reduce) | rooted(root),
            Op::Gather { root, .. } => 6 | rooted(root),
            Op::Scatter { root, .. } => 7 | rooted(root),
            Op::AllGatherV { .. } => ALL_GATHER_V,
            Op::ReduceScatterV { element, reduce, .. } => 9 | reduced(element, reduce),
            Op::Permute => 10,
            Op::Barrier => 11,
        };
        Key { what: what | if common { COMMON } else { 0 }, extra: hash.0, bytes: bytes as u64 }
    }
}

/// FNV-1a over words.
struct Hash(u64);

impl Hash {
    fn add(&mut self, word: usize) {
        self.0 = (self.0 ^ word as u64).wrapping_mul(0x100_0000_01b3);
    }

    fn add_factor(&mut self, reduce: Reduce) {
        if let Reduce::PremulSum(factor) = reduce {
            self.add(factor.to_bits() as usize);
        }
    }

    /// Splits differ between members, and are compared pair by pair.
    fn add_lists(&mut self, lists: &Lists) {
        match lists {
            Lists::Outers(list) | Lists::Sizes(list) => list.iter().for_each(|word| self.add(*word)),
            Lists::Routes(to) => to.iter().for_each(|to| self.add(to.map_or(0, |to| to + 1))),
            Lists::Splits(..) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_the_key_counts() {
        let sum = Op::AllReduce { element: Element::F32, reduce: Reduce::Sum };
        let key = sum.key(None, &[64], false);
        assert_eq!(describe(key.what), "all_reduce sum f32");
        let others = [
            Op::AllReduce { element: Element::F32, reduce: Reduce::Max }.key(None, &[64], false),
            Op::AllReduce { element: Element::I32, reduce: Reduce::Sum }.key(None, &[64], false),
            Op::Reduce { element: Element::F32, reduce: Reduce::Sum, root: 0 }.key(None, &[64], false),
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
