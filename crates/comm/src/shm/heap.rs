//! A rank's heap: blocks that peers may read in place.
//!
//! A [`Buffer`] is a handle of a block or of a part of one. A block that is dropped while peers may still read it is
//! kept until they are done.
//!
//! A block is one cache line for its header, then its bytes. The header counts the members that hold the block as a
//! [`crate::Common`] result.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use consort_types::Space;

use crate::CommError;
use crate::shm::alarm::Alarm;
use crate::shm::buffer::Buffer;
use crate::shm::lease::{Lease, Leases};
use crate::shm::segment::Segment;
use crate::shm::waiting::Ranks;

/// Blocks begin on a cache line, so that no two share one; their headers take one.
pub(crate) const LINE: usize = 64;

/// How many size classes of small blocks there are, one cache line apart, and how many blocks each keeps.
const BINS: usize = 64;
const BIN: usize = 64;

/// The memory of one rank that its peers can reach.
pub struct Heap {
    segment: Arc<Segment>,
    alarm: Arc<Alarm>,
    /// All ranks of the world, for long waits.
    ranks: Ranks,
    /// Whether waiting may spin: each rank has a core.
    spins: bool,
    state: Mutex<State>,
}

struct State {
    /// Free ranges by where they begin, and by size.
    free: BTreeMap<usize, usize>,
    by_size: BTreeSet<(usize, usize)>,
    /// Freed small blocks, by size: most requests are for a size that was just freed.
    bins: Vec<Vec<usize>>,
    /// Blocks that were dropped while peers could still read them.
    retired: Vec<(usize, usize, Leases)>,
}

/// Where a block's header counts its holders.
pub(crate) fn holders(at: usize) -> usize {
    at - LINE
}

impl Heap {
    /// The heap in a segment, from an offset on.
    pub(crate) fn new(
        segment: Arc<Segment>,
        alarm: Arc<Alarm>,
        ranks: Ranks,
        spins: bool,
        from: usize,
    ) -> Heap {
        let mut state = State {
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            bins: vec![Vec::new(); BINS],
            retired: Vec::new(),
        };
        state.insert(from, segment.len() - from);
        Heap { segment, alarm, ranks, spins, state: Mutex::new(state) }
    }

    pub(crate) fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// All ranks of the world.
    pub(crate) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Whether waiting may spin.
    pub(crate) fn spins(&self) -> bool {
        self.spins
    }

    /// Frees a block as soon as nobody holds a lease on it.
    pub(crate) fn give_back(&self, start: usize, room: usize, leases: Leases) {
        let mut state = self.lock();
        if leases.is_empty() {
            state.put(start, room);
        } else {
            state.retired.push((start, room, leases));
        }
    }

    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it is: ranks share memory of the host, and MPI is given such too.
    pub fn space(&self) -> Space {
        Space::Host
    }

    /// A block of `len` bytes with unspecified contents.
    pub fn alloc(self: &Arc<Heap>, len: usize) -> Result<Buffer, CommError> {
        let (start, room) = self.take(len)?;
        Ok(Buffer::new(Arc::clone(self), start, room, len))
    }

    /// Room for `len` bytes: where its header begins, and its length with the header.
    #[inline(always)]
    fn take(&self, len: usize) -> Result<(usize, usize), CommError> {
        let room = len.checked_next_multiple_of(LINE).and_then(|room| room.checked_add(LINE));
        let mut state = self.lock();
        if !state.retired.is_empty() {
            state = self.reclaim(state);
        }
        let Some((start, room)) = room.and_then(|room| Some((state.take(room)?, room))) else {
            return Err(self.exhausted(&state, len));
        };
        drop(state);
        self.segment.word(holders(start + LINE)).store(0, Release);
        Ok((start, room))
    }

    /// Frees blocks that were released since the last time.
    fn reclaim<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let ended = state.reclaim();
        // Leases are dropped without the lock: the last one of a group frees the group's row, which takes it.
        drop(state);
        drop(ended);
        self.lock()
    }

    /// A block with a copy of `bytes`.
    pub fn alloc_from(self: &Arc<Heap>, bytes: &[u8]) -> Result<Buffer, CommError> {
        let mut buffer = self.alloc(bytes.len())?;
        buffer.fill(bytes);
        Ok(buffer)
    }

    /// Bytes in blocks that are in use here, or that peers still read.
    pub fn in_use(&self) -> usize {
        self.segment.len() - self.lock().free_bytes()
    }

    fn exhausted(&self, state: &State, asked: usize) -> CommError {
        let free = state.free_bytes();
        let retired: usize = state.retired.iter().map(|(_, room, _)| room).sum();
        let holders = state.retired.iter().flat_map(|(_, _, leases)| leases.iter().filter_map(Lease::holder));
        let readers: BTreeSet<usize> = holders.map(|row| row.rank).collect();
        CommError::Exhausted {
            asked,
            of: self.segment.len(),
            free,
            largest: state.by_size.last().map_or(0, |(size, _)| *size),
            used: self.segment.len() - free - retired,
            leased: retired,
            readers: readers.into_iter().collect(),
        }
    }

    /// Room for a row, which its group gives back: where its header begins, and its length with the header.
    pub(crate) fn take_row(&self, len: usize) -> Result<(usize, usize), CommError> {
        self.take(len)
    }
}

impl State {
    fn free_bytes(&self) -> usize {
        let binned: usize = self.bins.iter().enumerate().map(|(bin, list)| bin * LINE * list.len()).sum();
        self.free.values().sum::<usize>() + binned
    }

    fn insert(&mut self, at: usize, size: usize) {
        self.free.insert(at, size);
        self.by_size.insert((size, at));
    }

    fn remove(&mut self, at: usize, size: usize) {
        self.free.remove(&at);
        self.by_size.remove(&(size, at));
    }

    /// A block of `room` bytes.
    #[inline]
    fn take(&mut self, room: usize) -> Option<usize> {
        if let Some(at) = self.bins.get_mut(room / LINE).and_then(Vec::pop) {
            return Some(at);
        }
        self.cut(room).or_else(|| {
            self.empty_bins();
            self.cut(room)
        })
    }

    /// Frees a block into its bin, or else into the free ranges.
    #[inline]
    fn put(&mut self, at: usize, room: usize) {
        match self.bins.get_mut(room / LINE) {
            Some(bin) if bin.len() < BIN => bin.push(at),
            _ => self.release(at, room),
        }
    }

    fn empty_bins(&mut self) {
        for bin in 0..self.bins.len() {
            for at in std::mem::take(&mut self.bins[bin]) {
                self.release(at, bin * LINE);
            }
        }
    }

    /// The smallest free range of at least `room` bytes; the rest of it stays free.
    fn cut(&mut self, room: usize) -> Option<usize> {
        let (size, at) = *self.by_size.range((room, 0)..).next()?;
        self.remove(at, size);
        if size > room {
            self.insert(at + room, size - room);
        }
        Some(at)
    }

    /// Frees blocks that were released since the last time, and gives the leases that ended.
    fn reclaim(&mut self) -> Vec<Leases> {
        let (mut i, mut ended) = (0, Vec::new());
        while i < self.retired.len() {
            if self.retired[i].2.iter().all(|lease| lease.holder().is_none()) {
                let (at, room, leases) = self.retired.swap_remove(i);
                self.release(at, room);
                ended.push(leases);
            } else {
                i += 1;
            }
        }
        ended
    }

    /// Joins a range with its free neighbours.
    fn release(&mut self, at: usize, room: usize) {
        let (mut at, mut room) = (at, room);
        if let Some((before, size)) = self.free.range(..at).next_back().map(|(before, size)| (*before, *size))
            && before + size == at
        {
            self.remove(before, size);
            (at, room) = (before, room + size);
        }
        if let Some(size) = self.free.get(&(at + room)).copied() {
            self.remove(at + room, size);
            room += size;
        }
        self.insert(at, room);
    }
}
