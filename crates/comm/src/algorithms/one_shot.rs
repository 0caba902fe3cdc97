//! One step: every member that needs the result reduces all operands by itself.

use consort_types::{Dtype, Reduce};

use crate::call::Call;
use crate::kernels::Part;
use crate::members::Members;

/// The small all_reduce. The operands are staged, so that a member can overwrite its own while others still read.
pub(crate) fn all_reduce(call: &Call, members: &Members, dtype: Dtype, reduce: Reduce) {
    let mut start = 0;
    for buffer in call.operands().iter() {
        let (len, bytes) = (buffer.len(), call.bytes());
        let staged = |member| members.staged(member, call.number, bytes, start).range(0, len);
        // This member's own slot is not read again: its cache line has moved to a peer.
        let part = |member| match member == members.me {
            true => Part::Own,
            false => Part::Peer(staged(member)),
        };
        super::reduce(members.own(buffer.place(), 0, len), members.n(), part, (dtype, reduce));
        start += len;
    }
}

/// The root reduces all operands into its own; the others need not wait.
pub(crate) fn reduce(call: &Call, members: &Members, dtype: Dtype, reduce: Reduce) {
    for (item, buffer) in call.operands().iter().enumerate() {
        let len = buffer.len();
        let part = |member| match member == members.me {
            true => Part::Own,
            false => Part::Peer(call.operand(members, member, item).range(0, len)),
        };
        super::reduce(members.own(buffer.place(), 0, len), members.n(), part, (dtype, reduce));
    }
}
