//! The storage of tensors: a buffer of the rank's heap, shared by all views of it, and the pending operations
//! that will write to it.

use std::cell::RefCell;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;
use std::time::Duration;

use consort_comm::{Buffer, CommError, SmallList, from_now};
use consort_types::layout::numel;
use consort_types::{Dtype, overlaps};

use crate::error::{Error, Result};
use crate::flight::Flight;
use crate::world::World;

/// The storage of a tensor and of its views. Its owners are the references of its `Rc`.
pub(crate) struct Storage {
    pub(crate) buffer: Buffer,
    /// Pending operations that will write to it.
    flights: RefCell<SmallList<Landing>>,
}

/// The bytes that a pending operation will write.
struct Landing {
    start: usize,
    end: usize,
    flight: Rc<Flight>,
}

impl Landing {
    /// Whether it writes to the range. An empty range waits for an empty write.
    fn overlaps(&self, range: &Range<usize>) -> bool {
        let empty = self.start == self.end && range.is_empty();
        overlaps(&(self.start..self.end), range) || empty
    }
}

impl Storage {
    pub(crate) fn new(buffer: Buffer) -> Rc<Storage> {
        Rc::new(Storage { buffer, flights: RefCell::default() })
    }

    /// Some of its bytes, as operations of a group take them.
    pub(crate) fn part(&self, range: &Range<usize>) -> std::result::Result<Buffer, CommError> {
        match *range == (0..self.buffer.len()) {
            true => Ok(self.buffer.clone()),
            false => self.buffer.part(range.clone()),
        }
    }

    /// Whether no peer reads the range any more, or will be done sooner than a copy would take.
    fn is_writable(&self, range: Range<usize>) -> bool {
        let Ok(part) = self.buffer.part(range) else { return false };
        if part.is_released() {
            return true;
        }
        // A copy takes about 1/4 ns per byte, and a peer that reads now is about as fast.
        let patience = Duration::from_micros(50) + Duration::from_nanos(part.len() as u64 / 4);
        part.is_released_by(from_now(patience))
    }

    /// Whether nobody but `owners` owners reads the range. Where the alternative is a copy, peers that still read are
    /// waited for as long as the copy would take.
    #[inline]
    pub(crate) fn is_free(
        self: &Rc<Self>,
        owners: usize,
        or_copy: bool,
        range: impl FnOnce() -> Range<usize>,
    ) -> bool {
        // The range is rarely needed, and takes longer to find out than the rest.
        Rc::strong_count(self) <= owners
            && (self.buffer.is_released() || or_copy && self.is_writable(range()))
    }

    /// Adds a pending operation that will write the range.
    pub(crate) fn add_flight(&self, range: Range<usize>, flight: Rc<Flight>) {
        self.flights.borrow_mut().push(Landing { start: range.start, end: range.end, flight });
    }

    /// Whether pending operations may write it.
    pub(crate) fn has_flights(&self) -> bool {
        !self.flights.borrow().is_empty()
    }

    /// Waits for pending writes to the range.
    #[inline]
    pub(crate) fn wait(&self, range: Range<usize>) -> Result<()> {
        if self.flights.borrow().is_empty() {
            return Ok(());
        }
        self.wait_for_some(range)
    }

    fn wait_for_some(&self, range: Range<usize>) -> Result<()> {
        loop {
            // Not in the loop condition, which would keep the list borrowed.
            let next = self.flights.borrow_mut().take(|landing| landing.overlaps(&range));
            let Some(landing) = next else { return Ok(()) };
            if let Err(error) = landing.flight.wait() {
                // A failed operation stays in the list, so that the next wait fails too.
                self.flights.borrow_mut().push(landing);
                return Err(error);
            }
        }
    }

    /// Whether no write is pending; advances pending operations, and never blocks.
    pub(crate) fn is_ready(&self) -> Result<bool> {
        loop {
            let next = self.flights.borrow().first().map(|landing| Rc::clone(&landing.flight));
            let Some(flight) = next else { return Ok(true) };
            if !flight.test()? {
                return Ok(false);
            }
            self.flights.borrow_mut().take(|landing| Rc::ptr_eq(&landing.flight, &flight));
        }
    }
}

/// The byte count of a tensor. It must not overflow, even if elements share memory.
#[inline]
pub(crate) fn check_size(
    op: &str,
    shape: &[usize],
    dtype: Dtype,
    site: &'static Location<'static>,
) -> Result<usize> {
    let bytes =
        numel(shape).and_then(|n| n.checked_mul(dtype.size())).filter(|n| isize::try_from(*n).is_ok());
    bytes.ok_or_else(|| Error::new(op, format!("a tensor of shape {shape:?} is too large"), site))
}

/// Allocates a tensor in the heap.
pub(crate) fn alloc(
    world: &World,
    op: &str,
    dtype: Dtype,
    shape: &[usize],
    site: &'static Location<'static>,
) -> Result<Buffer> {
    let bytes = check_size(op, shape, dtype, site)?;
    let heap = world
        .heap()
        .ok_or_else(|| Error::new(op, "this mesh has no memory: it computes shapes only", site))?;
    heap.alloc(bytes).map_err(|error| Error::comm(op, error, site))
}

/// Fills a new buffer.
pub(crate) fn fill_new(
    op: &str,
    buffer: &Buffer,
    site: &'static Location<'static>,
    fill: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<()> {
    let mut bytes = buffer.try_bytes_mut().map_err(|error| Error::comm(op, error, site))?;
    fill(&mut bytes)
}
