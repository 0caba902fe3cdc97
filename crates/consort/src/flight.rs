//! Pending operations, as tensors hold them: the first access to a result waits for its operation, once.

use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;
use std::time::{Duration, Instant};

use consort_comm::Pending;

use crate::error::{Error, Result};
use crate::trace::Start;
use crate::world::World;

/// A pending operation, shared by its result tensors.
pub(crate) struct Flight {
    state: RefCell<State>,
    op: &'static str,
    site: &'static Location<'static>,
}

/// What a handle waits for: a pending operation, or a start in a trace.
#[derive(Clone)]
pub(crate) enum Way {
    Flying(Rc<Flight>),
    Traced(Rc<Start>),
}

impl Way {
    /// The start, if it was made in a trace.
    pub(crate) fn traced(&self) -> Option<&Rc<Start>> {
        if let Way::Traced(start) = self { Some(start) } else { None }
    }

    pub(crate) fn wait(&self, site: &'static Location<'static>) -> Result<()> {
        match self {
            Way::Flying(flight) => flight.wait(),
            Way::Traced(start) => start.wait(site),
        }
    }

    pub(crate) fn test(&self, site: &'static Location<'static>) -> Result<bool> {
        match self {
            Way::Flying(flight) => flight.test(),
            Way::Traced(start) => start.test(site),
        }
    }
}

enum State {
    /// The operation, and the time that its tests took.
    Flying(Pending, Rc<World>, Duration),
    Landed,
    Failed(Error),
}

impl Flight {
    pub(crate) fn new(
        pending: Pending,
        world: &Rc<World>,
        op: &'static str,
        site: &'static Location<'static>,
    ) -> Rc<Flight> {
        let flight = Flight {
            state: RefCell::new(State::Flying(pending, Rc::clone(world), Duration::ZERO)),
            op,
            site,
        };
        // Reuses the allocation of a completed operation: allocating costs more than the rest of this.
        let flight = match world.landed.take() {
            Some(mut landed) => match Rc::get_mut(&mut landed) {
                Some(place) => {
                    *place = flight;
                    landed
                }
                None => Rc::new(flight),
            },
            None => Rc::new(flight),
        };
        world.add_start(|| Way::Flying(Rc::clone(&flight)));
        flight
    }

    /// Waits for completion. A failure is returned at every call.
    pub(crate) fn wait(self: &Rc<Flight>) -> Result<()> {
        let error = match self.state.replace(State::Landed) {
            State::Landed => return Ok(()),
            State::Failed(error) => error,
            State::Flying(pending, world, _) => match pending.wait_within(world.timeout()) {
                Ok(_) => {
                    world.landed.set(Some(Rc::clone(self)));
                    return Ok(());
                }
                Err(error) => Error::comm(self.op, error, self.site),
            },
        };
        self.state.replace(State::Failed(error.clone()));
        Err(error)
    }

    /// Whether it has completed; advances it, and never blocks. Its tests may take as long together as a wait.
    pub(crate) fn test(&self) -> Result<bool> {
        let (mut pending, world, tested) = match self.state.replace(State::Landed) {
            State::Landed => return Ok(true),
            State::Failed(error) => {
                self.state.replace(State::Failed(error.clone()));
                return Err(error);
            }
            State::Flying(pending, world, tested) => (pending, world, tested),
        };
        let start = Instant::now();
        let outcome = match pending.test() {
            Ok(None) => {
                let tested = tested + start.elapsed();
                if tested < world.timeout() {
                    self.state.replace(State::Flying(pending, world, tested));
                    return Ok(false);
                }
                pending.wait_by(Instant::now).map(drop)
            }
            outcome => outcome.map(drop),
        };
        outcome.map(|()| true).map_err(|error| {
            let error = Error::comm(self.op, error, self.site);
            self.state.replace(State::Failed(error.clone()));
            error
        })
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let State::Flying(pending, world, _) = self.state.get_mut() {
            world.note_unwaited(self.op, self.site);
            if let Some(error) = pending.unseen_error() {
                world.report(&Error::comm(self.op, error, self.site), consort_comm::UNSEEN_NOTE);
            }
        }
    }
}
