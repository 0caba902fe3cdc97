//! Ranks as processes of one host: each owns a heap that its peers map.
//!
//! A heap is a memfd whose descriptor travels over the control plane, so nothing of it exists in the file system, and
//! the kernel frees it with the last process that has it mapped, however that process ends.

use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use consort_types::Failure;

use crate::CommError;
use crate::cores::{self, Cores};
use crate::group::Group;
use crate::limits::way_out;
use crate::settings::Settings;
use crate::shm::alarm::Alarm;
use crate::shm::layout::{prepare, reserved, rows};
use crate::shm::progress::Shm;
use crate::shm::segment::Segment;
use crate::world::World;

impl World {
    /// The group of all ranks, each with a heap of `heap` bytes. All ranks must call it with the same size; the pages
    /// of the heaps are allocated on first use.
    #[track_caller]
    pub fn group(&self, heap: usize, deadline: Duration) -> Result<Group, CommError> {
        if let Some(job) = self.mpi_job() {
            return crate::mpi::world::group(job, heap, &self.name_group(), deadline);
        }
        let (n, me) = (self.size(), self.rank());
        let room = heap
            .checked_add(reserved(n))
            .ok_or_else(|| CommError::Argument(Failure::new("the heap is too large").of("group")))?;
        let machine = |what: &str| {
            let what = format!("{what} of {heap} bytes");
            move |error: io::Error| {
                let failure = Failure::new(format!("{what}: {error}")).of("group");
                if let Some(control) = self.control() {
                    // The others wait for this rank's heap.
                    control.abort_at(&failure.to_string(), String::new());
                }
                CommError::Machine(failure.note(way_out(&error)))
            }
        };
        let mask = cores::mine();
        let (segments, alarm, cores) = match self.control() {
            None => {
                let segment = Segment::private(room).map_err(machine("a heap"))?;
                (vec![Arc::new(segment)], Alarm::default(), Cores::of(n, [&mask[..]]))
            }
            Some(control) => {
                let (mine, fd) = Segment::shared(room).map_err(machine("a heap"))?;
                let size = (room as u64).to_le_bytes();
                let peers = control.share_heap(&[&size[..], &mask].concat(), fd.as_fd(), deadline);
                let peers = peers
                    .map_err(|error| CommError::World { culprits: Vec::new(), error: error.failure() })?;
                let cores = Cores::of(n, peers.iter().filter_map(|peer| peer.blob.get(size.len()..)));
                let mut segments = Vec::new();
                let mut mine = Some(mine);
                for (rank, peer) in peers.into_iter().enumerate() {
                    let own = if rank == me { mine.take() } else { None };
                    let segment = match (own, peer.fd) {
                        (Some(own), _) => own,
                        (None, Some(fd)) if peer.blob.starts_with(&size) => Segment::map(fd, room)
                            .map_err(machine(&format!("the heaps of {n} ranks, each")))?,
                        _ => {
                            let got = format!("another on rank {rank} than on rank {me}");
                            let failure = Failure::new(("heaps of one size", got)).of("group");
                            control.abort(&failure.to_string());
                            return Err(CommError::Argument(failure));
                        }
                    };
                    segments.push(Arc::new(segment));
                }
                (segments, Alarm::watched(control.watch()), cores)
            }
        };
        let alarm = Arc::new(alarm);
        if let Some(control) = self.control() {
            let alarm = Arc::downgrade(&alarm);
            control.on_failure(move || alarm.upgrade().iter().for_each(|alarm| alarm.ring()));
        }
        let (heap, recorder) = prepare(&segments, me, &alarm, cores, &self.name_group());
        let settings = Rc::new(Settings::new(deadline, true));
        Ok(Group::new(Shm::of_rows(rows(&segments), me, heap, alarm, recorder, cores, settings)))
    }
}
