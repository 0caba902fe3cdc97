//! How results are made from what members have published: one file for each way.

pub(crate) mod gather;
pub(crate) mod made_once;
pub(crate) mod moves;
pub(crate) mod one_shot;
pub(crate) mod scatter;
pub(crate) mod two_phase;

/// What of each member goes into a reduction.
pub(crate) type Parts<'a> = smallvec::SmallVec<[crate::kernels::Part<'a>; 8]>;
