//! Moves data without reducing it: from the root, along a table of routes, or from each member to each.

use std::sync::atomic::Ordering::Relaxed;

use smallvec::SmallVec;

use crate::CommError;
use crate::error::{Side, Stop};
use crate::shm::call::Call;
use crate::shm::members::{Members, copy};
use crate::shm::row::Row;

/// Copies the root's operands into this member's.
pub(crate) fn broadcast(call: &Call, members: &Members, root: usize) {
    for (item, buffer) in call.operands().iter().enumerate() {
        let len = buffer.len();
        copy(members.own(buffer.place(), 0, len), call.operand(members, root, item).range(0, len));
    }
}

/// Copies the operands of the member that sends to this one; zeros if none does.
pub(crate) fn permute(call: &Call, members: &Members) {
    let sender = call.routes().iter().position(|to| *to == Some(members.me));
    for (item, (operand, result)) in call.operands().iter().zip(call.results()).enumerate() {
        let out = members.own(result.place(), 0, result.len());
        match sender {
            Some(from) if from == members.me => copy(out, members.given(operand.place(), 0, operand.len())),
            Some(from) => copy(out, call.operand(members, from, item).range(0, operand.len())),
            None => out.fill(0),
        }
    }
}

/// How many bytes a member sends to each member and expects from each.
enum Splits<'a> {
    Even(usize),
    /// The row and the offset of its table.
    Table(&'a Row, usize),
}

impl Splits<'_> {
    fn of<'a>(call: &Call, members: &'a Members, member: usize) -> Splits<'a> {
        // This member's own slot is not read again: its cache line has moved to a peer.
        let key = if member == members.me { call.key } else { members.key(member, call.number) };
        let row = &members.rows[member];
        if !key.is_even() {
            Splits::Table(row, row.table(call.number))
        } else if key == call.key {
            // The common case: its parts are as large as this member's.
            Splits::Even(call.op.part)
        } else {
            Splits::Even(key.bytes as usize / members.n())
        }
    }

    fn word(&self, index: usize) -> usize {
        match self {
            Splits::Even(size) => *size,
            Splits::Table(row, table) => row.segment.word(table + index * 8).load(Relaxed) as usize,
        }
    }

    fn to(&self, member: usize) -> usize {
        self.word(member)
    }

    /// The bytes that it expects from one of `n` members.
    fn from(&self, member: usize, n: usize) -> usize {
        self.word(n + member)
    }

    /// The bytes that it sends to all members before this one.
    fn before(&self, member: usize) -> usize {
        match self {
            Splits::Even(size) => size * member,
            Splits::Table(..) => (0..member).map(|to| self.to(to)).sum(),
        }
    }
}

/// Checks that every pair of members agrees on the bytes between them. All members check all pairs, so that all of them
/// reject the same call.
fn check_splits(call: &Call, members: &Members) -> Result<(), Stop> {
    let (n, number) = (members.n(), call.number);
    let is_even = |member: usize| members.key(member, number) == call.key;
    if call.key.is_even() && (0..n).all(|member| member == members.me || is_even(member)) {
        return Ok(());
    }
    let all: SmallVec<[Splits<'_>; 8]> = (0..n).map(|member| Splits::of(call, members, member)).collect();
    for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
        let (sent, expected) = (all[from].to(to), all[to].from(from, n));
        if sent != expected {
            let side = |member: usize, what: String| {
                let (site, text) = members.names(member, number);
                let called = if text.is_empty() { String::new() } else { format!("{text}: ") };
                Side { rank: members.rows[member].rank, what: format!("{called}{what}"), site }
            };
            let [sender, receiver] = [from, to].map(|member| members.rows[member].rank);
            let sides = [
                side(from, format!("sends {sent} bytes to rank {receiver}")),
                side(to, format!("expects {expected} bytes of rank {sender}")),
            ];
            return Err(CommError::Splits { call: number, sides: Box::new(sides) }.into());
        }
    }
    Ok(())
}

/// Copies what each member sends to this one, side by side.
pub(crate) fn all_to_all(call: &Call, members: &Members, part: usize) -> Result<(), Stop> {
    check_splits(call, members)?;
    let me = members.me;
    let result = &call.results()[0];
    // Each member begins with itself, so that not all read from one at once.
    for from in members.rotated() {
        let splits = Splits::of(call, members, from);
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
