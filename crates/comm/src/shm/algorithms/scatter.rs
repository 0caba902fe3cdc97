//! Scatters: each member gets its part of every stripe, of the reduced operands or of the root's operand.

use consort_types::Reduce;

use super::{reduce, stripe_of};
use crate::kernels::Part;
use crate::shm::call::Call;
use crate::shm::members::{Item, Members, copy};

/// Equal parts of the reduced operands, one or a list.
pub(crate) fn reduced(call: &Call, members: &Members, reduction: Reduce, outer: usize) {
    for (item, result) in call.results().iter().enumerate() {
        let outer = call.outer(item, outer);
        let part = stripe_of(result.len(), outer);
        let range = (part * members.n(), part * members.me, part);
        cut(call, members, reduction, item, outer, range);
    }
}

/// Parts whose size differs between members.
pub(crate) fn reduced_unevenly(call: &Call, members: &Members, reduction: Reduce, outer: usize) {
    let sizes = call.sizes();
    let start = sizes[..members.me].iter().sum();
    let range = (sizes.iter().sum(), start, sizes[members.me]);
    cut(call, members, reduction, 0, outer, range);
}

/// Reduces this member's part of every stripe: stripes are `whole` bytes, its part begins at `start`.
fn cut(
    call: &Call,
    members: &Members,
    reduction: Reduce,
    item: usize,
    outer: usize,
    (whole, start, len): (usize, usize, usize),
) {
    for stripe in 0..outer {
        let from = stripe * whole + start;
        let part = |member| match member == members.me {
            true => Part::Peer(members.given(call.operands()[item].place(), from, len)),
            false => Part::Peer(call.operand(members, member, item).range(from, len)),
        };
        let out = members.own(call.results()[item].place(), stripe * len, len);
        reduce(out, members.n(), part, (call.dtype(item), reduction));
    }
}

/// This member's part of every stripe of the root's operands, one or a list.
pub(crate) fn of_root(call: &Call, members: &Members, outer: usize, root: usize) {
    let (n, me, results) = (members.n(), members.me, call.results());
    let mut start = 0;
    for (index, result) in results.iter().enumerate() {
        let outer = call.outer(index, outer);
        let part = stripe_of(result.len(), outer);
        // Only the root has operands, each as large as the parts of all members.
        let item = Item { index, of: results.len(), start };
        for stripe in 0..outer {
            let (to, from) = (members.own(result.place(), stripe * part, part), (stripe * n + me) * part);
            match root == me {
                true => copy(to, members.given(call.operands()[index].place(), from, part)),
                false => copy(to, members.operand(call.number, root, item).range(from, part)),
            }
        }
        start += result.len() * n;
    }
}
