//! The storage of tensors: a buffer of the rank's heap, shared by all views of it, and the pending operations
//! that will write to it.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use consort_comm::{Buffer, CommError, SmallList, from_now};
use consort_types::overlaps;

use crate::error::Result;
use crate::flight::Flight;

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
    pub(crate) fn is_writable(&self, range: Range<usize>) -> bool {
        if self.buffer.is_released() {
            return true;
        }
        let Ok(mut part) = self.buffer.part(range) else { return false };
        if part.is_released() {
            return true;
        }
        // A copy takes about 1/4 ns per byte, and a peer that reads now is about as fast.
        let patience = Duration::from_micros(50) + Duration::from_nanos(part.len() as u64 / 4);
        part.bytes_mut(from_now(patience)).is_ok()
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
