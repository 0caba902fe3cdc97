//! Results that are equal on all members, once per host: one block in the heap of one member that all of them read.

use std::sync::atomic::Ordering::AcqRel;

use crate::shm::buffer::Buffer;
use crate::shm::heap::holders;
use crate::shm::members::Members;

/// A result that all members share. Its storage is reused when all have dropped theirs.
pub struct Common {
    members: Members,
    giver: usize,
    at: usize,
    len: usize,
}

impl Common {
    /// Counts all members as holders of a block that is about to be published, in addition to those that hold it as the
    /// result of another call.
    pub(crate) fn open(members: &Members, block: &Buffer) {
        members.mine().segment.word(holders(block.at())).fetch_add(members.n() as u64, AcqRel);
    }

    /// This member's hold on a block whose parts are all written.
    pub(crate) fn new(members: &Members, giver: usize, at: usize, len: usize) -> Common {
        Common { members: members.clone(), giver, at, len }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: every part was made before this was, and nobody writes the block until all holders let go.
        unsafe { self.members.rows[self.giver].segment.read(self.at, self.len) }
    }

    /// How many bytes it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Common {
    fn drop(&mut self) {
        let row = &self.members.rows[self.giver];
        if row.segment.word(holders(self.at)).fetch_sub(1, AcqRel) == 1 {
            row.ring();
        }
    }
}
