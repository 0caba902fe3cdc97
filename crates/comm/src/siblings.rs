//! All groups of a rank. A wait on one of them makes the others go on too, since somebody may wait for those first, and
//! what goes wrong on one of them ends a wait on any.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};

use crate::CommError;
use crate::error::Stop;
use crate::progress::Inner;

/// The groups of a rank.
#[derive(Clone, Default)]
pub(crate) struct Siblings {
    all: Rc<RefCell<Vec<Weak<Inner>>>>,
    /// Calls on any of them that are finished here and not compared with what all members called.
    uncompared: Rc<Cell<usize>>,
}

impl fmt::Debug for Siblings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Siblings({})", self.all.borrow().len())
    }
}

impl Siblings {
    pub(crate) fn add(&self, inner: &Rc<Inner>) {
        let mut all = self.all.borrow_mut();
        all.retain(|sibling| sibling.strong_count() > 0);
        all.push(Rc::downgrade(inner));
    }

    /// All but one.
    fn others(&self, but: &Inner) -> Vec<Rc<Inner>> {
        let all = self.all.borrow();
        all.iter().filter_map(Weak::upgrade).filter(|other| !std::ptr::eq(&**other, but)).collect()
    }

    /// Makes all but one go on as far as they can; true if something is still in flight on one of them.
    pub(crate) fn advance(&self, but: &Inner) -> Result<bool, Stop> {
        if self.all.borrow().len() < 2 {
            return Ok(false);
        }
        let mut busy = false;
        for other in self.others(but) {
            let mut state = other.state();
            if state.is_busy() {
                other.advance(&mut state, true).map_err(elsewhere)?;
                busy |= state.is_busy();
            }
        }
        Ok(busy)
    }

    /// Notes how many calls of one of them are not compared.
    pub(crate) fn count(&self, before: &mut usize, now: usize) {
        if *before != now {
            self.uncompared.set(self.uncompared.get() - *before + now);
            *before = now;
        }
    }

    pub(crate) fn uncompared(&self) -> usize {
        self.uncompared.get()
    }

    /// Compares what is finished on all but one.
    pub(crate) fn compare(&self, but: &Inner) -> Result<(), Stop> {
        let others = self.others(but);
        others.iter().try_for_each(|other| other.compare_finished(&mut other.state())).map_err(elsewhere)
    }
}

/// The error of another group.
fn elsewhere(error: Stop) -> Stop {
    match *error {
        CommError::OtherGroup { .. } => error,
        _ => CommError::OtherGroup { error }.into(),
    }
}
