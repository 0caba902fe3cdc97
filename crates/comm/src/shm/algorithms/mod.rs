//! How results are computed from what members have published: one file per algorithm.

pub(crate) mod common_results;
pub(crate) mod gather;
pub(crate) mod one_shot;
pub(crate) mod scatter;
pub(crate) mod transfers;
pub(crate) mod two_phase;

use consort_types::{Dtype, Reduce};
use smallvec::SmallVec;

use crate::kernels::{self, Part};

/// Bytes of one of `outer` stripes. Mostly `outer` is 1, and a division takes as long as ten other instructions.
pub(crate) fn stripe_of(bytes: usize, outer: usize) -> usize {
    if outer == 1 { bytes } else { bytes / outer }
}

/// Reduces the operands of `n` members.
pub(crate) fn reduce<'a>(
    out: &mut [u8],
    n: usize,
    part: impl Fn(usize) -> Part<'a>,
    (dtype, reduce): (Dtype, Reduce),
) {
    // Two operands need no list, and more are pushed one by one: a collected list would also be moved.
    if n == 2 {
        return kernels::reduce(out, &[part(0), part(1)], dtype, reduce);
    }
    let mut parts = SmallVec::<[_; 8]>::new();
    for member in 0..n {
        parts.push(part(member));
    }
    kernels::reduce(out, &parts, dtype, reduce);
}
