//! Ranks as processes of one host: each owns a heap that its peers map.
//!
//! A heap is a memfd whose descriptor travels over the control plane, so nothing of it exists in the file system, and
//! the kernel frees it with the last process that has it mapped, however that process ends.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use crate::CommError;
use crate::alarm::Alarm;
use crate::group::Group;
use crate::heap::Heap;
use crate::row::Row;
use crate::segment::Segment;
use crate::world::World;

impl World {
    /// The group of all ranks, each with a heap of so many bytes. All ranks call it, with one size; the heaps cost
    /// memory only as they are used.
    #[track_caller]
    pub fn group(&self, heap: usize, deadline: Duration) -> Result<Group, CommError> {
        let (n, me) = (self.size(), self.rank());
        let room = heap
            .checked_add(Row::size(n))
            .ok_or_else(|| CommError::Argument("group: the heap is too large".into()))?;
        let machine =
            |error: io::Error| CommError::Machine(format!("group: a heap of {heap} bytes: {error}"));
        let (segments, alarm) = match self.control() {
            None => (vec![Arc::new(Segment::private(room).map_err(machine)?)], Alarm::default()),
            Some(control) => {
                let (mine, fd) = Segment::shared(room).map_err(machine)?;
                let size = (room as u64).to_le_bytes();
                let peers = control.rendezvous(&size, Some(fd.as_fd()), deadline);
                let peers = peers.map_err(|error| CommError::World(error.to_string()))?;
                let mut segments = Vec::new();
                let mut mine = Some(mine);
                for (rank, peer) in peers.into_iter().enumerate() {
                    let own = if rank == me { mine.take() } else { None };
                    let segment = match (own, peer.fd) {
                        (Some(own), _) => own,
                        (None, Some(fd)) if peer.blob == size => Segment::map(fd, room).map_err(machine)?,
                        _ => {
                            let message = format!(
                                "group: expected heaps of one size, got another on rank {rank} than on rank {me}"
                            );
                            control.abort(&message);
                            return Err(CommError::Argument(message));
                        }
                    };
                    segments.push(Arc::new(segment));
                }
                (segments, Alarm::watched(control.watch()))
            }
        };
        let alarm = Arc::new(alarm);
        let heap = Arc::new(Heap::new(Arc::clone(&segments[me]), Arc::clone(&alarm)));
        // The first block of every heap, so that the world's rows are where everybody expects them. New memory is
        // zero, which is an empty row, so peers may look at it before its owner has.
        let at = heap.alloc_for_ever(Row::size(n))?;
        let row = |(rank, segment)| Row { segment, at, rank };
        let rows = segments.into_iter().enumerate().map(row).collect();
        Ok(Group::new(rows, me, heap, alarm))
    }
}
