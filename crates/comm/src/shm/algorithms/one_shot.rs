//! One step: every member that needs the result reduces all operands by itself.

use consort_types::Reduce;

use crate::kernels::Part;
use crate::shm::call::Call;
use crate::shm::members::Members;

/// The small all_reduce. The operands are staged, so that a member can overwrite its own while others still read.
pub(crate) fn all_reduce(call: &Call, members: &Members, reduce: Reduce) {
    let mut start = 0;
    for (item, buffer) in call.operands().iter().enumerate() {
        let (len, bytes) = (buffer.len(), call.bytes());
        let staged = |member| members.staged(member, call.number, bytes, start).range(0, len);
        // This member's own slot is not read again: its cache line has moved to a peer.
        let part = |member| match member == members.me {
            true => Part::Own,
            false => Part::Peer(staged(member)),
        };
        let own = members.own(buffer.place(), 0, len);
        super::reduce(own, members.n(), part, (call.dtype(item), reduce));
        start += len;
    }
}

/// The root reduces all operands into its own; the others need not wait.
pub(crate) fn reduce(call: &Call, members: &Members, reduce: Reduce) {
    for (item, buffer) in call.operands().iter().enumerate() {
        let len = buffer.len();
        let part = |member| match member == members.me {
            true => Part::Own,
            false => Part::Peer(call.operand(members, member, item).range(0, len)),
        };
        let own = members.own(buffer.place(), 0, len);
        super::reduce(own, members.n(), part, (call.dtype(item), reduce));
    }
}
