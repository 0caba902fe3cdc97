//! A rank's heap: blocks that peers may read where they lie.
//!
//! A [`Buffer`] owns its block. While peers may still read it, it is *leased*: it can be read here, but it is written
//! or reused only after release. Dropping a leased buffer is allowed; the heap keeps the block until then.
//!
//! A block is a line for its header and then its bytes. The header counts the members that hold the block as a
//! [`crate::Common`] result.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use smallvec::SmallVec;

use crate::CommError;
use crate::alarm::Alarm;
use crate::pending::SPIN;
use crate::progress::BUSY;
use crate::row::Row;
use crate::segment::Segment;
use crate::siblings::advance_all;

/// Blocks begin on a cache line, so that no two share one; their headers take one.
const LINE: usize = 64;

/// The memory of one rank that its peers can reach.
pub struct Heap {
    segment: Arc<Segment>,
    alarm: Arc<Alarm>,
    /// Whether waiting may spin: each rank has a core.
    spins: bool,
    state: Mutex<State>,
}

struct State {
    /// Free ranges by where they begin, and by size.
    free: BTreeMap<usize, usize>,
    by_size: BTreeSet<(usize, usize)>,
    /// Blocks that were dropped while peers could still read them.
    retired: Vec<(usize, usize, Leases)>,
}

/// What keeps a block from being written: peers that may not have read it yet.
#[derive(Clone)]
pub(crate) enum Lease {
    /// The members of a group, until all are done with a call.
    Call(Arc<Vec<Row>>, u64),
    /// The receiver of a mail, until it notes that it took it: its place, where it notes it, and the mail's number.
    Mail(Arc<Vec<Row>>, usize, usize, u64),
    /// Whoever holds the block as a common result: this member's place, and where the block lies.
    Common(Arc<Vec<Row>>, usize, usize),
}

pub(crate) type Leases = SmallVec<[Lease; 1]>;

impl Lease {
    /// The row of a member that may still read. Of a common result it is the giver's own, which rings for it.
    fn holder(&self) -> Option<&Row> {
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
        }
    }

    fn rows(&self) -> &Arc<Vec<Row>> {
        match self {
            Lease::Call(rows, ..) | Lease::Mail(rows, ..) | Lease::Common(rows, ..) => rows,
        }
    }
}

/// Where a block's header counts who holds it.
pub(crate) fn holders(at: usize) -> usize {
    at - LINE
}

impl Heap {
    /// The heap in a segment, from an offset on.
    pub(crate) fn new(segment: Arc<Segment>, alarm: Arc<Alarm>, spins: bool, from: usize) -> Heap {
        let mut state = State { free: BTreeMap::new(), by_size: BTreeSet::new(), retired: Vec::new() };
        state.insert(from, segment.len() - from);
        Heap { segment, alarm, spins, state: Mutex::new(state) }
    }

    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of so many bytes; their contents are whatever was there before.
    pub fn alloc(self: &Arc<Heap>, len: usize) -> Result<Buffer, CommError> {
        let room = len.checked_next_multiple_of(LINE).and_then(|room| room.checked_add(LINE));
        let mut state = self.lock();
        state.reclaim();
        let Some((start, room)) = room.and_then(|room| Some((state.take(room)?, room))) else {
            return Err(self.exhausted(&state, len));
        };
        drop(state);
        let at = start + LINE;
        self.segment.word(holders(at)).store(0, Release);
        Ok(Buffer(Box::new(Block { heap: Arc::clone(self), at, room, len, leases: Leases::new() })))
    }

    /// A block with a copy of some bytes from elsewhere.
    pub fn alloc_from(self: &Arc<Heap>, bytes: &[u8]) -> Result<Buffer, CommError> {
        let mut buffer = self.alloc(bytes.len())?;
        buffer.own_mut().copy_from_slice(bytes);
        Ok(buffer)
    }

    fn exhausted(&self, state: &State, asked: usize) -> CommError {
        let free: usize = state.free.values().sum();
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

    /// A block that is never freed, because peers may look at it as long as the heap exists.
    pub(crate) fn alloc_for_ever(self: &Arc<Heap>, len: usize) -> Result<usize, CommError> {
        let buffer = std::mem::ManuallyDrop::new(self.alloc(len)?);
        Ok(buffer.at())
    }
}

impl State {
    fn insert(&mut self, at: usize, size: usize) {
        self.free.insert(at, size);
        self.by_size.insert((size, at));
    }

    fn remove(&mut self, at: usize, size: usize) {
        self.free.remove(&at);
        self.by_size.remove(&(size, at));
    }

    /// The smallest free range with so much room; what is left of it stays free.
    fn take(&mut self, room: usize) -> Option<usize> {
        let (size, at) = *self.by_size.range((room, 0)..).next()?;
        self.remove(at, size);
        if size > room {
            self.insert(at + room, size - room);
        }
        Some(at)
    }

    /// Frees what has been released since.
    fn reclaim(&mut self) {
        let mut i = 0;
        while i < self.retired.len() {
            if self.retired[i].2.iter().all(|lease| lease.holder().is_none()) {
                let (at, room, _) = self.retired.swap_remove(i);
                self.release(at, room);
            } else {
                i += 1;
            }
        }
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

/// A block of a rank's heap.
pub struct Buffer(Box<Block>);

/// What a buffer is, in one place: buffers move through every call.
struct Block {
    heap: Arc<Heap>,
    at: usize,
    room: usize,
    len: usize,
    leases: Leases,
}

impl Buffer {
    /// How many bytes it holds.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Where it begins in the segment.
    pub(crate) fn at(&self) -> usize {
        self.0.at
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block belongs to this buffer; only its owner writes it, through `&mut self`.
        unsafe { self.0.heap.segment.read(self.0.at, self.0.len) }
    }

    /// Whether no peer can read it any more.
    pub fn is_released(&self) -> bool {
        self.0.leases.iter().all(|lease| lease.holder().is_none())
    }

    /// The bytes to write, as soon as no peer can read them any more.
    pub fn bytes_mut(&mut self, until: Instant) -> Result<&mut [u8], CommError> {
        if !self.0.leases.is_empty() {
            self.wait_for_release(until)?;
        }
        Ok(self.own_mut())
    }

    fn wait_for_release(&mut self, until: Instant) -> Result<(), CommError> {
        let spin_until = self.0.heap.spins.then(|| Instant::now() + SPIN);
        for lease in &self.0.leases {
            while lease.holder().is_some() {
                if spin_until.is_some_and(|spin_until| Instant::now() < spin_until) {
                    std::hint::spin_loop();
                    continue;
                }
                // What releases it may need a part of this member, or be its own call behind others.
                let busy = advance_all();
                let Some(row) = lease.holder() else { break };
                if let Some(error) = self.0.heap.alarm.failure() {
                    return Err(error);
                }
                if let Some(stopped) = lease.rows().iter().find(|row| row.failure().is_some()) {
                    return Err(CommError::Elsewhere { rank: stopped.rank, error: String::new() });
                }
                let now = Instant::now();
                if now >= until {
                    return Err(CommError::Leased { rank: row.rank });
                }
                let turn = if busy { until.min(now + BUSY) } else { until };
                // Once this one is done it rings no more, so another one must not be awaited on its bell.
                row.sleep(turn, || lease.holder().is_none_or(|holder| !std::ptr::eq(holder, row)));
            }
        }
        self.0.leases.clear();
        Ok(())
    }

    /// The bytes to write, where no peer can know of them.
    fn own_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block belongs to this buffer, which is borrowed mutably, and no peer reads it: it is new, or
        // released.
        unsafe { self.0.heap.segment.write(self.0.at, self.0.len) }
    }

    /// Notes that peers may read it. A later call of the same group is released after an earlier one.
    pub(crate) fn lease(&mut self, lease: Lease) {
        let leases = &mut self.0.leases;
        if let Lease::Call(rows, _) = &lease {
            let same = |old: &Lease| matches!(old, Lease::Call(other, _) if Arc::ptr_eq(rows, other));
            if let Some(old) = leases.iter_mut().find(|old| same(old)) {
                *old = lease;
                return;
            }
        }
        if leases.len() >= 4 {
            leases.retain(|lease| lease.holder().is_some());
        }
        leases.push(lease);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let leases = std::mem::take(&mut self.leases);
        let mut state = self.heap.lock();
        let start = self.at - LINE;
        if leases.iter().all(|lease| lease.holder().is_none()) {
            state.release(start, self.room);
        } else {
            state.retired.push((start, self.room, leases));
        }
    }
}
