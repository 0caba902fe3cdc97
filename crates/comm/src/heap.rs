//! A rank's heap: blocks that peers may read where they lie.
//!
//! A [`Buffer`] owns its block. While peers may still read it, it is *leased*: it can be read here, but it is written
//! or reused only after release. Dropping a leased buffer is allowed; the heap keeps the block until then.

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::atomic::Ordering::Acquire;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::CommError;
use crate::row::Row;
use crate::segment::Segment;

/// Blocks begin on a cache line, so that no two share one.
const ALIGN: usize = 64;

/// The memory of one rank that its peers can reach.
pub struct Heap {
    segment: Arc<Segment>,
    state: Mutex<State>,
    /// Where the texts of call sites lie, by the address of the site. They are never freed: a peer may read one
    /// whenever it finds a difference.
    sites: Mutex<BTreeMap<usize, (usize, usize)>>,
}

struct State {
    /// Free ranges by where they begin.
    free: BTreeMap<usize, usize>,
    /// Blocks that were dropped while peers could still read them.
    retired: Vec<(usize, usize, Vec<Lease>)>,
}

/// What keeps a block from being written: peers that may not have read it yet.
#[derive(Clone)]
pub(crate) enum Lease {
    /// The members of a group, until all are done with a call.
    Call(Arc<Vec<Row>>, u64),
    /// The receiver of a mail, until it notes that it took it: its row, where it notes it, and the mail's number.
    Mail(Row, usize, u64),
}

impl Lease {
    /// The row of a member that may still read.
    fn holder(&self) -> Option<&Row> {
        match self {
            Lease::Call(rows, call) => rows.iter().find(|row| row.done() <= *call),
            Lease::Mail(row, at, number) => (row.segment.word(*at).load(Acquire) <= *number).then_some(row),
        }
    }
}

impl Heap {
    pub(crate) fn new(segment: Arc<Segment>) -> Heap {
        let free = BTreeMap::from([(0, segment.len())]);
        Heap { segment, state: Mutex::new(State { free, retired: Vec::new() }), sites: Mutex::default() }
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
        let room = len.max(1).checked_next_multiple_of(ALIGN);
        let mut state = self.lock();
        state.reclaim();
        let found = room.and_then(|room| {
            state.free.iter().find(|(_, size)| **size >= room).map(|(at, size)| (*at, *size, room))
        });
        let Some((at, size, room)) = found else {
            let free = state.free.values().sum();
            let largest = state.free.values().max().copied().unwrap_or(0);
            let leased = state.retired.iter().map(|(_, room, _)| room).sum();
            return Err(CommError::Exhausted { asked: len, of: self.segment.len(), free, largest, leased });
        };
        state.free.remove(&at);
        if size > room {
            state.free.insert(at + room, size - room);
        }
        Ok(Buffer { heap: Arc::clone(self), at, room, len, leases: Vec::new() })
    }
}

impl Heap {
    /// A block that is never freed, because peers may look at it as long as the heap exists.
    pub(crate) fn alloc_for_ever(self: &Arc<Heap>, len: usize) -> Result<usize, CommError> {
        let buffer = std::mem::ManuallyDrop::new(self.alloc(len)?);
        Ok(buffer.at)
    }

    /// Where the text of a call site lies, and how long it is.
    pub(crate) fn site(
        self: &Arc<Heap>,
        site: &'static Location<'static>,
    ) -> Result<(usize, usize), CommError> {
        let key = std::ptr::from_ref(site).addr();
        let mut sites = self.sites.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = sites.get(&key) {
            return Ok(*place);
        }
        let text = format!("{}:{}", site.file(), site.line());
        let at = self.alloc_for_ever(text.len())?;
        // SAFETY: the block is new and its place is known to nobody yet.
        unsafe { self.segment.write(at, text.len()) }.copy_from_slice(text.as_bytes());
        sites.insert(key, (at, text.len()));
        Ok((at, text.len()))
    }
}

impl State {
    /// Frees what has been released since.
    fn reclaim(&mut self) {
        let retired = std::mem::take(&mut self.retired);
        for (at, room, leases) in retired {
            if leases.iter().all(|lease| lease.holder().is_none()) {
                self.release(at, room);
            } else {
                self.retired.push((at, room, leases));
            }
        }
    }

    /// Joins a range with its free neighbours.
    fn release(&mut self, at: usize, room: usize) {
        let (mut at, mut room) = (at, room);
        if let Some((before, size)) = self.free.range(..at).next_back().map(|(before, size)| (*before, *size))
            && before + size == at
        {
            self.free.remove(&before);
            (at, room) = (before, room + size);
        }
        if let Some(size) = self.free.remove(&(at + room)) {
            room += size;
        }
        self.free.insert(at, room);
    }
}

/// A block of a rank's heap.
pub struct Buffer {
    heap: Arc<Heap>,
    pub(crate) at: usize,
    room: usize,
    len: usize,
    pub(crate) leases: Vec<Lease>,
}

impl Buffer {
    /// How many bytes it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block belongs to this buffer; only its owner writes it, through `&mut self`.
        unsafe { self.heap.segment.read(self.at, self.len) }
    }

    /// Whether no peer can read it any more.
    pub fn is_released(&self) -> bool {
        self.leases.iter().all(|lease| lease.holder().is_none())
    }

    /// The bytes to write, as soon as no peer can read them any more.
    pub fn bytes_mut(&mut self, until: Instant) -> Result<&mut [u8], CommError> {
        for lease in &self.leases {
            while let Some(row) = lease.holder() {
                if Instant::now() >= until {
                    return Err(CommError::Leased);
                }
                row.sleep(until, || lease.holder().is_none());
            }
        }
        self.leases.clear();
        // SAFETY: the block belongs to this buffer, which is borrowed mutably, and no peer reads it: it is released.
        Ok(unsafe { self.heap.segment.write(self.at, self.len) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let leases = std::mem::take(&mut self.leases);
        let mut state = self.heap.lock();
        if leases.iter().all(|lease| lease.holder().is_none()) {
            state.release(self.at, self.room);
        } else {
            state.retired.push((self.at, self.room, leases));
        }
    }
}
