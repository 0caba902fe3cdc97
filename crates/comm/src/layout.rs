//! What lies at the beginning of every rank's segment: its flight recorder, then its row in the group of all ranks.
//! Peers find both without being told where they are.

use std::sync::Arc;

use crate::CommError;
use crate::heap::Heap;
use crate::recorder::{self, Recorder};
use crate::row::Row;
use crate::segment::Segment;

/// Where the row of the group of all ranks is.
pub(crate) const ROW: usize = recorder::SIZE;

/// Bytes at the beginning of a segment that are not for the heap's users, in a world of `n`.
pub(crate) fn reserved(n: usize) -> usize {
    ROW + Row::size(n)
}

/// The heap in a new segment, and the recorder for the group of all ranks. New memory is zero, which is an empty row,
/// so peers may look at it before its owner has.
pub(crate) fn prepare(
    segment: &Arc<Segment>,
    n: usize,
    group: &str,
) -> Result<(Arc<Heap>, Recorder), CommError> {
    let heap = Arc::new(Heap::new(Arc::clone(segment)));
    let at = heap.alloc_for_ever(reserved(n))?;
    assert_eq!(at, 0, "the first block of a heap is at its beginning");
    Ok((heap, Recorder::new(Arc::clone(segment), group)))
}
