//! Where the elements of tensors are: a buffer of the rank's heap, shared by all views of it, and the operations in
//! flight that will write to it.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use consort_comm::Buffer;

use crate::error::Result;
use crate::flight::Flight;

/// The storage of a tensor and of its views. It has one owner where its `Rc` has.
pub(crate) struct Storage {
    pub(crate) buffer: Buffer,
    flights: RefCell<Flights>,
}

/// Operations that will write to a storage: mostly none or one, for which there is a place.
#[derive(Default)]
struct Flights {
    first: Option<Landing>,
    /// Those that found it taken.
    rest: Vec<Landing>,
}

/// Which bytes an operation will write.
struct Landing {
    start: usize,
    end: usize,
    flight: Rc<Flight>,
}

impl Landing {
    fn overlaps(&self, range: &Range<usize>) -> bool {
        self.start < range.end && range.start < self.end
    }
}

impl Flights {
    fn push(&mut self, landing: Landing) {
        match &self.first {
            None => self.first = Some(landing),
            Some(_) => self.rest.push(landing),
        }
    }

    /// Takes one out that will write some of these bytes.
    fn take(&mut self, range: &Range<usize>) -> Option<Landing> {
        if self.first.as_ref()?.overlaps(range) {
            return std::mem::replace(&mut self.first, self.rest.pop());
        }
        let at = self.rest.iter().position(|landing| landing.overlaps(range))?;
        Some(self.rest.swap_remove(at))
    }
}

impl Storage {
    pub(crate) fn new(buffer: Buffer) -> Rc<Storage> {
        Rc::new(Storage { buffer, flights: RefCell::default() })
    }

    /// Notes an operation that will write some of its bytes.
    pub(crate) fn add_flight(&self, range: Range<usize>, flight: Rc<Flight>) {
        self.flights.borrow_mut().push(Landing { start: range.start, end: range.end, flight });
    }

    /// Whether operations in flight may write it.
    pub(crate) fn has_flights(&self) -> bool {
        self.flights.borrow().first.is_some()
    }

    /// Waits for what will write some of its bytes.
    #[inline]
    pub(crate) fn wait(&self, range: Range<usize>) -> Result<()> {
        if self.flights.borrow().first.is_none() {
            return Ok(());
        }
        self.wait_for_some(range)
    }

    fn wait_for_some(&self, range: Range<usize>) -> Result<()> {
        loop {
            // Not a condition of the loop, which would keep the list borrowed.
            let next = self.flights.borrow_mut().take(&range);
            let Some(landing) = next else { return Ok(()) };
            if let Err(error) = landing.flight.wait() {
                // What failed stays, so that whoever asks next learns of it too.
                self.flights.borrow_mut().push(landing);
                return Err(error);
            }
        }
    }

    /// Whether nothing in flight will write it; makes that go on, and never waits.
    pub(crate) fn is_ready(&self) -> Result<bool> {
        loop {
            let next = self.flights.borrow().first.as_ref().map(|landing| Rc::clone(&landing.flight));
            let Some(flight) = next else { return Ok(true) };
            if !flight.test()? {
                return Ok(false);
            }
            let flights = &mut *self.flights.borrow_mut();
            flights.first = flights.rest.pop();
        }
    }
}
