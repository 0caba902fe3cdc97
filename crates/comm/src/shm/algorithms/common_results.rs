//! Results in a common buffer: each member writes its part there, and nobody copies.

use consort_types::Kind;

use super::two_phase;
use crate::kernels::Part;
use crate::op::Op;
use crate::shm::buffers::{places, spans, start_of};
use crate::shm::call::Call;
use crate::shm::common_result::Common;
use crate::shm::members::Members;
use crate::shm::row::Word;

/// Writes this member's part once; true when all members have written theirs.
pub(crate) fn step(call: &mut Call, members: &Members) -> bool {
    let (n, me, number) = (members.n(), members.me, call.number);
    let giver = call.giver(n);
    let at = members.rows[giver].get(number, Word::Common) as usize;
    let Op { kind, dtype, reduce, root, outer, .. } = call.op;
    let len = match kind {
        Kind::AllGather => call.bytes() * n,
        // Only the root knows the size.
        Kind::Broadcast => members.key(root, number).bytes as usize,
        _ => call.bytes(),
    };
    if members.ready(me, number) == 0 {
        match kind {
            Kind::AllReduce => {
                let own = two_phase::part(len, n, me);
                let made = own.len();
                let places = places(call.operands());
                for (item, from, span) in spans(&places, own.clone()) {
                    let part = |member| Part::Peer(call.operand(members, member, item).range(from, span));
                    let start = start_of(&places, item) + from;
                    super::reduce(members.common(giver, at, start, span), n, part, (dtype, reduce));
                }
                members.set_ready(number, made);
            }
            Kind::AllGather => {
                let inner = call.bytes() / outer;
                for stripe in 0..outer {
                    let place = members.common(giver, at, (stripe * n + me) * inner, inner);
                    place.copy_from_slice(members.given(call.operands()[0].place(), stripe * inner, inner));
                }
                members.set_ready(number, 1);
            }
            _ => {}
        }
    }
    if !call.unready(members).is_empty() {
        return false;
    }
    call.more().common = Some(Box::new(Common::new(members, giver, at, len)));
    true
}
