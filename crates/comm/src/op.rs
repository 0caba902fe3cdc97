//! Operations, and the words by which members compare their calls.

use consort_types::{Digest, Dtype, Kind, Reduce, Role};

/// A collective in the form that a call keeps: made of its description by `arguments.rs`. Sizes are in bytes. It is small,
/// since every call moves one; rare fields are in [`Lists`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    /// The reduction, if the kind has one.
    pub(crate) dtype: Dtype,
    pub(crate) reduce: Reduce,
    /// The root, if the kind has one.
    pub(crate) root: usize,
    /// The number of stripes of the operand, so that a dimension other than the first is gathered or split without a copy.
    /// A list has them for each operand instead.
    pub(crate) outer: usize,
    /// The bytes from each member to each in an all_to_all, if all are equal; it has splits otherwise.
    pub(crate) part: usize,
}

impl Default for Op {
    #[inline(always)]
    fn default() -> Op {
        let (kind, dtype, reduce) = (Kind::Barrier, Dtype::F32, Reduce::Sum);
        Op { kind, dtype, reduce, root: 0, outer: 0, part: 0 }
    }
}

/// Lists that some operations have in addition.
pub(crate) enum Lists {
    /// The operands of a list: their element types, and their stripes where they are joined or cut.
    Operands(Vec<(Dtype, usize)>),
    /// The bytes of each member in one stripe.
    Sizes(Vec<usize>),
    /// The bytes to each member, and from each.
    Splits(Vec<usize>, Vec<usize>),
    /// Where each member sends, if anywhere.
    Routes(Vec<Option<usize>>),
}

/// Operands may have a different size on each member.
pub(crate) const UNEVEN: u64 = 1 << 60;
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

    /// Whether operands may have a different size on each member.
    pub(crate) fn is_uneven(self) -> bool {
        self.what & UNEVEN != 0
    }

    /// Whether two members made the same call.
    pub(crate) fn agrees(self, other: Key) -> bool {
        let same = (self.what ^ other.what) & !EVEN == 0 && self.extra == other.extra;
        same && (self.bytes == other.bytes || self.is_uneven())
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

impl Op {
    #[inline(always)]
    pub(crate) fn root(&self) -> Option<usize> {
        if self.kind.has_root() { Some(self.root) } else { None }
    }

    /// This member's role.
    #[inline(always)]
    pub(crate) fn role(&self, me: usize) -> Role {
        self.kind.role(self.root(), me)
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
        if self.kind.reduces() {
            add_factor(&mut digest, self.reduce);
        }
        match self.kind {
            Kind::AllGather
            | Kind::AllGatherV
            | Kind::Gather
            | Kind::Scatter
            | Kind::ReduceScatter
            | Kind::ReduceScatterV => digest.add(self.outer as u64),
            Kind::AllReduce
            | Kind::Reduce
            | Kind::AllToAll
            | Kind::Broadcast
            | Kind::Permute
            | Kind::Barrier
            | Kind::Exchange => {}
        }
        if let Some(lists) = lists {
            add_lists(&mut digest, lists);
        }
        let mut what = self.kind as u64;
        if self.kind.reduces() {
            what |= (self.dtype as u64 + 1) << 8 | (self.reduce.code() + 1) << 16;
        }
        if self.kind.has_root() {
            what |= (self.root as u64 + 1) << 24;
        }
        if self.kind == Kind::AllToAll && lists.is_none() {
            what |= EVEN;
        }
        // Only the root knows the size of a common result that it broadcasts.
        if matches!(self.kind, Kind::AllToAll | Kind::AllGatherV) || self.kind == Kind::Broadcast && common {
            what |= UNEVEN;
        }
        Key { what: what | if common { COMMON } else { 0 }, extra: digest.get(), bytes: bytes as u64 }
    }
}

/// Adds what only some operations have. Splits differ between members, and are compared pair by pair.
fn add_lists(digest: &mut Digest, lists: &Lists) {
    match lists {
        Lists::Operands(list) => list.iter().for_each(|(dtype, outer)| {
            digest.add(*dtype as u64);
            digest.add(*outer as u64);
        }),
        Lists::Sizes(list) => list.iter().for_each(|word| digest.add(*word as u64)),
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
        let sum = Op { kind: Kind::AllReduce, ..Op::default() };
        let key = sum.key(None, &[64], false);
        assert_eq!(describe(key.what), "all_reduce sum f32");
        let others = [
            Op { reduce: Reduce::Max, ..sum }.key(None, &[64], false),
            Op { dtype: Dtype::I32, ..sum }.key(None, &[64], false),
            Op { kind: Kind::Reduce, ..sum }.key(None, &[64], false),
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
        let all_to_all = Op { kind: Kind::AllToAll, ..Op::default() };
        let uneven = all_to_all.key(Some(&splits), &[12], false);
        let even = Op { part: 4, ..all_to_all }.key(None, &[8], false);
        assert!(even.is_even() && !uneven.is_even());
        assert!(even.agrees(uneven), "compared pair by pair");
    }
}
