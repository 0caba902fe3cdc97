//! Data that moves as it is: from the root, along a table, or from each to each.

use std::sync::atomic::Ordering::Relaxed;

use crate::CommError;
use crate::call::Call;
use crate::error::{Side, Stop};
use crate::members::{Members, copy};
use crate::op::Op;
use crate::row::{Row, Word};

/// The root's operands, into this member's.
pub(crate) fn broadcast(call: &Call, members: &Members, root: usize) {
    for (item, buffer) in call.operands().iter().enumerate() {
        let len = buffer.len();
        copy(members.own(buffer.place(), 0, len), call.operand(members, root, item).range(0, len));
    }
}

/// What the member that sends here sends; zeros where none does.
pub(crate) fn permute(call: &Call, members: &Members) {
    let (operand, result) = (&call.operands()[0], &call.results()[0]);
    let out = members.own(result.place(), 0, result.len());
    match call.routes().iter().position(|to| *to == Some(members.me)) {
        Some(from) if from == members.me => copy(out, members.given(operand.place(), 0, operand.len())),
        Some(from) => copy(out, call.operand(members, from, 0).range(0, operand.len())),
        None => out.fill(0),
    }
}

/// How many bytes a member sends to each.
enum Splits<'a> {
    Even(usize),
    /// Where its table lies.
    Table(&'a Row, usize),
}

impl Splits<'_> {
    fn of<'a>(call: &Call, members: &'a Members, from: usize) -> Splits<'a> {
        // The own slot is not read again: its line has gone to a peer.
        let key = if from == members.me { call.key } else { members.key(from, call.number) };
        let row = &members.rows[from];
        match (&call.op, call.splits()) {
            _ if !key.is_even() => Splits::Table(row, row.table(call.number)),
            // Its parts are as large as the own ones, mostly.
            (Op::AllToAll { part }, None) if key == call.key => Splits::Even(*part),
            _ => Splits::Even(key.bytes as usize / members.n()),
        }
    }

    fn to(&self, member: usize) -> usize {
        match self {
            Splits::Even(size) => *size,
            Splits::Table(row, table) => row.segment.word(table + member * 8).load(Relaxed) as usize,
        }
    }

    /// To all before a member.
    fn before(&self, member: usize) -> usize {
        match self {
            Splits::Even(size) => size * member,
            Splits::Table(..) => (0..member).map(|to| self.to(to)).sum(),
        }
    }
}

/// What each member sends here, side by side.
pub(crate) fn all_to_all(call: &Call, members: &Members, part: usize) -> Result<(), Stop> {
    let (me, number) = (members.me, call.number);
    let result = &call.results()[0];
    let splits = |from: usize| Splits::of(call, members, from);
    let expected = |from: usize| call.splits().map_or(part, |(_, outs)| outs[from]);
    for from in 0..members.n() {
        let (sent, expected) = (splits(from).to(me), expected(from));
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
    for from in members.rotated() {
        let splits = splits(from);
        let (sent, start) = (splits.to(me), splits.before(me));
        let to = call.splits().map_or(part * from, |(_, outs)| outs[..from].iter().sum());
        let out = members.own(result.place(), to, sent);
        match from == me {
            true => copy(out, members.given(call.operands()[0].place(), start, sent)),
            false => copy(out, call.operand(members, from, 0).range(start, sent)),
        }
    }
    Ok(())
}
