//! How results are made from what members have published: one file for each way.

pub(crate) mod gather;
pub(crate) mod made_once;
pub(crate) mod moves;
pub(crate) mod one_shot;
pub(crate) mod scatter;
pub(crate) mod two_phase;

use smallvec::SmallVec;

use crate::kernels::Part;

/// Bytes of each of so many rows. There is mostly one, and a division takes as long as ten other instructions.
pub(crate) fn row_of(bytes: usize, outer: usize) -> usize {
    if outer == 1 { bytes } else { bytes / outer }
}

/// What of each of `n` members goes into a reduction.
pub(crate) fn parts<'a>(n: usize, part: impl Fn(usize) -> Part<'a>) -> SmallVec<[Part<'a>; 8]> {
    let mut parts = SmallVec::new();
    for member in 0..n {
        parts.push(part(member));
    }
    parts
}
