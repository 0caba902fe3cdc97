//! Where the elements of tensors are: a buffer of the rank's heap, shared by all views of it, and the operations in
//! flight that will write to it.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use consort_comm::Buffer;
use smallvec::SmallVec;

use crate::error::Result;
use crate::flight::Flight;

/// The storage of a tensor and of its views. It has one owner where its `Rc` has.
pub(crate) struct Storage {
    pub(crate) buffer: Buffer,
    flights: RefCell<Flights>,
}

/// Which bytes an operation will write.
type Flights = SmallVec<[(Range<usize>, Rc<Flight>); 1]>;

impl Storage {
    pub(crate) fn new(buffer: Buffer) -> Rc<Storage> {
        Rc::new(Storage { buffer, flights: RefCell::new(Flights::new()) })
    }

    /// Notes an operation that will write some of its bytes.
    pub(crate) fn add_flight(&self, range: Range<usize>, flight: Rc<Flight>) {
        self.flights.borrow_mut().push((range, flight));
    }

    /// Whether operations in flight may write it.
    pub(crate) fn has_flights(&self) -> bool {
        !self.flights.borrow().is_empty()
    }

    /// Waits for what will write some of its bytes.
    #[inline]
    pub(crate) fn wait(&self, range: Range<usize>) -> Result<()> {
        if self.flights.borrow().is_empty() {
            return Ok(());
        }
        self.wait_for_some(range)
    }

    fn wait_for_some(&self, range: Range<usize>) -> Result<()> {
        loop {
            let overlaps =
                |(other, _): &(Range<usize>, _)| other.start < range.end && range.start < other.end;
            let mut flights = self.flights.borrow_mut();
            let Some(at) = flights.iter().position(overlaps) else { return Ok(()) };
            let (bytes, flight) = flights.swap_remove(at);
            drop(flights);
            if let Err(error) = flight.wait() {
                // What failed stays, so that whoever asks next learns of it too.
                self.add_flight(bytes, flight);
                return Err(error);
            }
        }
    }

    /// Whether nothing in flight will write it; makes that go on, and never waits.
    pub(crate) fn is_ready(&self) -> Result<bool> {
        let flights: Vec<Rc<Flight>> =
            self.flights.borrow().iter().map(|(_, flight)| Rc::clone(flight)).collect();
        for flight in flights {
            if !flight.test()? {
                return Ok(false);
            }
        }
        self.flights.borrow_mut().clear();
        Ok(true)
    }
}
