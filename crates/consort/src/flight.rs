//! Pending operations, as tensors hold them: the first access to a result waits for its operation, once.

use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

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
    Flying(Pending, Rc<World>),
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
        let flight = Flight { state: RefCell::new(State::Flying(pending, Rc::clone(world))), op, site };
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
            State::Flying(pending, world) => match pending.wait_within(world.timeout()) {
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

    /// Whether it has completed; advances it, and never blocks.
    pub(crate) fn test(&self) -> Result<bool> {
        let mut state = self.state.borrow_mut();
        let outcome = match &mut *state {
            State::Flying(pending, _) => pending.test(),
            State::Landed => return Ok(true),
            State::Failed(error) => return Err(error.clone()),
        };
        match outcome {
            Ok(None) => Ok(false),
            Ok(Some(_)) => {
                *state = State::Landed;
                Ok(true)
            }
            Err(error) => {
                let error = Error::comm(self.op, error, self.site);
                *state = State::Failed(error.clone());
                Err(error)
            }
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let State::Flying(pending, world) = self.state.get_mut() {
            world.note_unwaited(self.op, self.site);
            if let Some(error) = pending.unseen_error() {
                world.report(&Error::comm(self.op, error, self.site), consort_comm::UNSEEN_NOTE);
            }
        }
    }
}
