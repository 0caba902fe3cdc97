//! Gathers: each result has as many stripes as its operands, and each stripe concatenates the members' stripes.

use super::stripe_of;
use crate::shm::call::Call;
use crate::shm::members::{Members, copy};

/// Gathers operands of equal size, one or a list.
pub(crate) fn all(call: &Call, members: &Members, outer: usize) {
    for (item, operand) in call.operands().iter().enumerate() {
        let outer = call.outer(item, outer);
        let inner = stripe_of(operand.len(), outer);
        join(call, members, item, outer, |member| member * inner..(member + 1) * inner);
    }
}

/// Gathers operands whose size differs between members.
pub(crate) fn uneven(call: &Call, members: &Members, outer: usize) {
    let sizes = call.sizes();
    join(call, members, 0, outer, |member| {
        let start: usize = sizes[..member].iter().sum();
        start..start + sizes[member]
    });
}

/// Copies each member's stripes to their place in the stripes of the result.
fn join(
    call: &Call,
    members: &Members,
    item: usize,
    outer: usize,
    place: impl Fn(usize) -> std::ops::Range<usize>,
) {
    let me = members.me;
    let result = &call.results()[item];
    let whole = stripe_of(result.len(), outer);
    // Each member begins with itself, so that not all read from one at once.
    for member in members.rotated() {
        let place = place(member);
        for stripe in 0..outer {
            let to = members.own(result.place(), stripe * whole + place.start, place.len());
            let from = stripe * place.len();
            match member == me {
                true => copy(to, members.given(call.operands()[item].place(), from, place.len())),
                false => copy(to, call.operand(members, member, item).range(from, place.len())),
            }
        }
    }
}
