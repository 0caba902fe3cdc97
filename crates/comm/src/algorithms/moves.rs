//! Data that moves as it is: from the root, along a table, or from each to each.

use crate::CommError;
use crate::call::Call;
use crate::error::{Side, Stop};
use crate::members::Members;
use crate::row::Word;

/// The root's operands, into this member's.
pub(crate) fn broadcast(call: &Call, members: &Members, root: usize) {
    for (item, buffer) in call.operands.iter().enumerate() {
        let len = buffer.len();
        members.own(buffer.place(), 0, len).copy_from_slice(call.operand(members, root, item).range(0, len));
    }
}

/// What the member that sends here sends; zeros where none does.
pub(crate) fn permute(call: &Call, members: &Members, to: &[Option<usize>]) {
    let (operand, result) = (&call.operands[0], &call.results[0]);
    let out = members.own(result.place(), 0, result.len());
    match to.iter().position(|to| *to == Some(members.me)) {
        Some(from) if from == members.me => {
            out.copy_from_slice(members.given(operand.place(), 0, operand.len()))
        }
        Some(from) => out.copy_from_slice(call.operand(members, from, 0).range(0, operand.len())),
        None => out.fill(0),
    }
}

/// What each member sends here, side by side.
pub(crate) fn all_to_all(call: &Call, members: &Members, outs: &[usize]) -> Result<(), Stop> {
    let (n, me, number) = (members.n(), members.me, call.number);
    let result = &call.results[0];
    for (from, expected) in outs.iter().copied().enumerate() {
        let sent = members.splits(from, number)(me);
        if sent != expected {
            let side = |member: usize, what: String| Side {
                rank: members.rows[member].rank,
                what,
                site: members.text(member, members.rows[member].get(number, Word::Site)),
            };
            let sides = [side(from, format!("sends {sent} bytes")), side(me, format!("expects {expected}"))];
            return Err(CommError::Splits { call: number, sides: Box::new(sides) }.into());
        }
    }
    // Each begins with itself, so that not all read from one.
    for from in (0..n).map(|step| (me + step) % n) {
        let splits = members.splits(from, number);
        let (sent, start) = (splits(me), (0..me).map(splits).sum::<usize>());
        let to: usize = outs[..from].iter().sum();
        let out = members.own(result.place(), to, sent);
        match from == me {
            true => out.copy_from_slice(members.given(call.operands[0].place(), start, sent)),
            false => out.copy_from_slice(call.operand(members, from, 0).range(start, sent)),
        }
    }
    Ok(())
}
