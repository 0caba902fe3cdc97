//! The beginning of every rank's segment: its flight recorder, its status, then its row in the group of all ranks.
//! Peers know these offsets.

use std::sync::Arc;

use crate::cores::Cores;
use crate::recorder::{self, Recorder};
use crate::shm::alarm::Alarm;
use crate::shm::heap::Heap;
use crate::shm::row::Row;
use crate::shm::rows::Rows;
use crate::shm::segment::Segment;
use crate::shm::status;
use crate::shm::waiting::Ranks;

/// Where the row of the group of all ranks is.
pub(crate) const ROW: usize = recorder::SIZE + status::SIZE;

/// Bytes of a segment that the heap's users cannot use, in a world of `n`: the areas at its beginning, and a line for
/// the header of a block.
pub(crate) fn reserved(n: usize) -> usize {
    heap_at(n) + 64
}

fn heap_at(n: usize) -> usize {
    (ROW + Row::size(n)).next_multiple_of(64)
}

/// The heap in a rank's own new segment, and the recorder for the group of all ranks. New memory is zero, which is an
/// empty row, so peers may read it before its owner does.
pub(crate) fn prepare(
    segments: &[Arc<Segment>],
    me: usize,
    alarm: &Arc<Alarm>,
    cores: Cores,
    group: &str,
) -> (Arc<Heap>, Recorder) {
    let (segment, n) = (&segments[me], segments.len());
    let ranks = Ranks { segments: segments.to_vec(), me };
    let heap = Heap::new(Arc::clone(segment), Arc::clone(alarm), ranks, cores.one_each(), heap_at(n));
    (Arc::new(heap), Recorder::new(Arc::clone(segment), group))
}

/// The rows of the group of all ranks.
pub(crate) fn rows(segments: &[Arc<Segment>]) -> Rows {
    let row = |(rank, segment)| Row::new(segment, ROW, rank);
    Rows::new(segments.iter().enumerate().map(row).collect(), None)
}
