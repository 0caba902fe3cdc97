//! Scatters: each member gets its part of every row, of the reduced operands or of the root's operand.

use consort_types::{Dtype, Reduce};

use super::{reduce, row_of};
use crate::call::Call;
use crate::kernels::Part;
use crate::members::{Members, copy};

/// Equal parts of the reduced operands, one or a list.
pub(crate) fn reduced(call: &Call, members: &Members, kind: (Dtype, Reduce), outer: usize) {
    for (item, result) in call.results().iter().enumerate() {
        let outer = call.outer(item, outer);
        let part = row_of(result.len(), outer);
        let range = (part * members.n(), part * members.me, part);
        cut(call, members, kind, item, outer, range);
    }
}

/// Parts whose size differs between members.
pub(crate) fn reduced_unevenly(call: &Call, members: &Members, kind: (Dtype, Reduce), outer: usize) {
    let sizes = call.sizes();
    let start = sizes[..members.me].iter().sum();
    let range = (sizes.iter().sum(), start, sizes[members.me]);
    cut(call, members, kind, 0, outer, range);
}

/// Reduces this member's part of every row: rows are `whole` bytes, its part begins at `start`.
fn cut(
    call: &Call,
    members: &Members,
    kind: (Dtype, Reduce),
    item: usize,
    outer: usize,
    (whole, start, len): (usize, usize, usize),
) {
    for row in 0..outer {
        let from = row * whole + start;
        let part = |member| match member == members.me {
            true => Part::Peer(members.given(call.operands()[item].place(), from, len)),
            false => Part::Peer(call.operand(members, member, item).range(from, len)),
        };
        let out = members.own(call.results()[item].place(), row * len, len);
        reduce(out, members.n(), part, kind);
    }
}

/// This member's part of every row of the root's operand.
pub(crate) fn of_root(call: &Call, members: &Members, outer: usize, root: usize) {
    let (n, me) = (members.n(), members.me);
    let result = &call.results()[0];
    let part = row_of(result.len(), outer);
    for row in 0..outer {
        let (to, from) = (members.own(result.place(), row * part, part), (row * n + me) * part);
        match root == me {
            true => copy(to, members.given(call.operands()[0].place(), from, part)),
            false => copy(to, call.operand(members, root, 0).range(from, part)),
        }
    }
}
