//! The rows of a group's members, as one member holds them: in its side of the group, in leases, in common results.
//!
//! The row of a subgroup is a block of its owner's heap. Peers may read it long after its owner has dropped the group,
//! so it is freed only when every member has dropped all rows.

use std::ops::Deref;
use std::sync::Weak;

use crate::shm::heap::Heap;
use crate::shm::lease::{Lease, Leases};
use crate::shm::row::Row;

/// The rows of all members, in group order.
pub(crate) struct Rows {
    rows: Vec<Row>,
    /// The block of this member's own row, if it lies in one.
    block: Option<Block>,
}

/// A block of a heap: the member's place, where it begins, its length.
pub(crate) struct Block {
    pub(crate) heap: Weak<Heap>,
    pub(crate) member: usize,
    pub(crate) start: usize,
    pub(crate) room: usize,
}

impl Rows {
    pub(crate) fn new(rows: Vec<Row>, block: Option<Block>) -> Rows {
        Rows { rows, block }
    }
}

impl Deref for Rows {
    type Target = [Row];

    fn deref(&self) -> &[Row] {
        &self.rows
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        let Some(Block { heap, member, start, room }) = self.block.take() else { return };
        self.rows.iter().for_each(Row::let_go);
        if let Some(heap) = heap.upgrade() {
            let lease = Lease::Row(self.rows[member].clone(), self.rows.len() as u64);
            heap.give_back(start, room, Leases::from_iter([lease]));
        }
    }
}
