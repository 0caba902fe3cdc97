//! Results that are equal on all members, once per host: one block in the heap of one member that all of them read.

use std::sync::atomic::Ordering::AcqRel;

use crate::shm::buffer::{Access, Buffer};
use crate::shm::heap::holders;
use crate::shm::members::Members;

/// A result that all members share. Its storage is reused when all have dropped theirs.
pub struct Common(Held);

enum Held {
    /// A block in the heap of one of the members.
    Shared { members: Members, giver: usize, at: usize, len: usize },
    /// A block of this member's own, where no other can be read; and whether a claim on it was recorded.
    Own(Buffer, bool),
}

impl Common {
    /// Counts all members as holders of a block that is about to be published, in addition to those that hold it as the
    /// result of another call.
    pub(crate) fn open(members: &Members, block: &Buffer) {
        members.mine().segment.word(holders(block.at())).fetch_add(members.n() as u64, AcqRel);
    }

    /// This member's hold on a block whose parts are all written.
    pub(crate) fn new(members: &Members, giver: usize, at: usize, len: usize) -> Common {
        Common(Held::Shared { members: members.clone(), giver, at, len })
    }

    /// A copy of this member's own. If other handles of the block are left, it is claimed for reading.
    pub(crate) fn own(block: Buffer, noted: bool) -> Common {
        Common(Held::Own(block, noted))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            // SAFETY: every part was made before this was, and nobody writes the block until all holders let go.
            Held::Shared { members, giver, at, len } => unsafe {
                members.rows[*giver].segment.read(*at, *len)
            },
            // SAFETY: this is the only handle of the block, or it is claimed for reading.
            Held::Own(block, _) => unsafe { std::slice::from_raw_parts(block.address(), block.len()) },
        }
    }

    /// How many bytes it holds.
    pub fn len(&self) -> usize {
        match &self.0 {
            Held::Shared { len, .. } => *len,
            Held::Own(block, _) => block.len(),
        }
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Common {
    fn drop(&mut self) {
        match &self.0 {
            Held::Shared { members, giver, at, .. } => {
                let row = &members.rows[*giver];
                if row.segment.word(holders(*at)).fetch_sub(1, AcqRel) == 1 {
                    row.ring();
                }
            }
            Held::Own(block, true) => block.unclaim(Access::Read),
            Held::Own(..) => {}
        }
    }
}
