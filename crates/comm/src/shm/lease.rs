//! Leases: memory must not be written while peers may still read it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use smallvec::SmallVec;

use crate::shm::heap::holders;
use crate::shm::row::Row;
use crate::shm::rows::Rows;

/// A lease, by the readers that hold it.
#[derive(Clone)]
pub(crate) enum Lease {
    /// The members of a group, until all are done with a call.
    Call(Arc<Rows>, u64),
    /// The receiver of a mail, until it notes that it took it: its place, the note's offset, and the mail's number.
    Mail(Arc<Rows>, usize, usize, u64),
    /// The holders of the block as a common result: this member's place, and where the block lies.
    Common(Arc<Rows>, usize, usize),
    /// The members of the group whose row this is, until this many will not read it any more.
    Row(Row, u64),
    /// This member, until somebody asks for the release: what tests hold in addition (`late.rs`).
    Late(Arc<Rows>, usize, Arc<AtomicBool>),
}

pub(crate) type Leases = SmallVec<[Lease; 1]>;

impl Lease {
    /// The row of a member that may still read. For a common result it is the giver's own row, whose bell is rung.
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
            Lease::Late(rows, me, asked) => (!asked.load(Relaxed)).then_some(&rows[*me]),
        }
    }

    /// Whether it is of a call in which the part of this rank is not done.
    pub(crate) fn is_in_flight(&self, rank: usize) -> bool {
        match self {
            Lease::Call(rows, call) => rows.iter().any(|row| row.rank == rank && row.done() <= *call),
            Lease::Mail(..) | Lease::Common(..) | Lease::Row(..) | Lease::Late(..) => false,
        }
    }

    /// Somebody asks for the release.
    pub(crate) fn ask(&self) {
        if let Lease::Late(_, _, asked) = self {
            asked.store(true, Relaxed);
        }
    }

    /// The rows of the members that share it.
    pub(crate) fn rows(&self) -> &[Row] {
        match self {
            Lease::Call(rows, ..)
            | Lease::Mail(rows, ..)
            | Lease::Common(rows, ..)
            | Lease::Late(rows, ..) => rows,
            Lease::Row(row, _) => std::slice::from_ref(row),
        }
    }

    /// Whether this is released no later than `later`: an earlier call of the same group.
    pub(crate) fn is_before(&self, later: &Lease) -> bool {
        match (self, later) {
            (Lease::Call(rows, call), Lease::Call(others, later)) => {
                Arc::ptr_eq(rows, others) && call <= later
            }
            _ => false,
        }
    }
}
