//! The groups of a thread. A wait on one of them makes the others go on too, since somebody may wait for those first, and
//! what goes wrong on one of them ends a wait on any. A buffer that waits for its release knows no group at all, so this
//! is a list of the thread and not of a handle.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use crate::CommError;
use crate::error::Stop;
use crate::progress::Inner;
use crate::sync::thread_local;

thread_local! {
    static GROUPS: RefCell<Vec<Weak<Inner>>> = RefCell::default();
    /// Calls on any of them that are finished here and not compared with what all members called.
    static UNCOMPARED: Cell<usize> = Cell::default();
}

pub(crate) fn add(inner: &Rc<Inner>) {
    GROUPS.with(|groups| {
        let mut groups = groups.borrow_mut();
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Rc::downgrade(inner));
    });
}

/// All, or all but one.
fn groups(but: Option<&Inner>) -> Vec<Rc<Inner>> {
    let is_but = |group: &Rc<Inner>| but.is_some_and(|but| std::ptr::eq(&**group, but));
    GROUPS.with(|groups| {
        groups.borrow().iter().filter_map(Weak::upgrade).filter(|group| !is_but(group)).collect()
    })
}

/// Makes all but one go on as far as they can; true if something is still in flight on one of them.
pub(crate) fn advance_others(but: &Inner) -> Result<bool, Stop> {
    let mut busy = false;
    for other in groups(Some(but)) {
        let mut state = other.state();
        if state.is_busy() {
            other.advance(&mut state, true).map_err(elsewhere)?;
            busy |= state.is_busy();
        }
    }
    Ok(busy)
}

/// Makes all go on as far as they can; true if something is left. A group keeps its error for whoever waits on it.
pub(crate) fn advance_all() -> bool {
    groups(None).iter().fold(false, |busy, group| {
        let mut state = group.state();
        let _ = group.advance(&mut state, true);
        busy | state.is_busy() | state.has_uncompared()
    })
}

/// Notes how many calls of one of them are not compared.
pub(crate) fn count(before: &mut usize, now: usize) {
    if *before != now {
        // A group may outlive the list, at the end of its thread.
        let _ = UNCOMPARED.try_with(|all| all.set(all.get() - *before + now));
        *before = now;
    }
}

pub(crate) fn uncompared() -> usize {
    UNCOMPARED.with(Cell::get)
}

/// Compares what is finished on all but one.
pub(crate) fn compare_others(but: &Inner) -> Result<(), Stop> {
    let others = groups(Some(but));
    others.iter().try_for_each(|other| other.compare_finished(&mut other.state())).map_err(elsewhere)
}

/// The error of another group.
fn elsewhere(error: Stop) -> Stop {
    match *error {
        CommError::OtherGroup { .. } => error,
        _ => CommError::OtherGroup { error }.into(),
    }
}
