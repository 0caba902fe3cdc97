//! What keeps memory from being written: peers that may not have read it yet.

use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use smallvec::SmallVec;

use crate::heap::holders;
use crate::row::Row;
use crate::rows::Rows;

/// Who may still read.
#[derive(Clone)]
pub(crate) enum Lease {
    /// The members of a group, until all are done with a call.
    Call(Arc<Rows>, u64),
    /// The receiver of a mail, until it notes that it took it: its place, where it notes it, and the mail's number.
    Mail(Arc<Rows>, usize, usize, u64),
    /// Whoever holds the block as a common result: this member's place, and where the block lies.
    Common(Arc<Rows>, usize, usize),
    /// The members of a group, whose row it is: until so many will not look at it any more.
    Row(Row, u64),
}

pub(crate) type Leases = SmallVec<[Lease; 1]>;

impl Lease {
    /// The row of a member that may still read. Of a common result it is the giver's own, which rings for it.
    pub(crate) fn holder(&self) -> Option<&Row> {
        match self {
            Lease::Call(rows, call) => rows.iter().find(|row| row.done() <= *call),
            Lease::Mail(rows, member, at, number) => {
                let row = &rows[*member];
                (row.segment.word(*at).load(Acquire) <= *number).then_some(row)
            }
            Lease::Common(rows, member, at) => {
                let row = &rows[*member];
                (row.segment.word(holders(*at)).load(Acquire) > 0).then_some(row)
            }
            Lease::Row(row, members) => (row.gone() < *members).then_some(row),
        }
    }

    /// The members among whom it is.
    pub(crate) fn rows(&self) -> &[Row] {
        match self {
            Lease::Call(rows, ..) | Lease::Mail(rows, ..) | Lease::Common(rows, ..) => rows,
            Lease::Row(row, _) => std::slice::from_ref(row),
        }
    }

    /// Whether this is released no later than another: an earlier call of the same group.
    pub(crate) fn is_before(&self, later: &Lease) -> bool {
        match (self, later) {
            (Lease::Call(rows, call), Lease::Call(others, later)) => {
                Arc::ptr_eq(rows, others) && call <= later
            }
            _ => false,
        }
    }
}
