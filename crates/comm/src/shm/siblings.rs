//! The groups of a thread. A wait on one of them advances the others too, since a peer may wait for those first, and an
//! error on one of them ends a wait on any. A buffer that waits for its release knows no group, so the list belongs to
//! the thread and not to a handle.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use crate::CommError;
use crate::error::Stop;
use crate::shm::progress::Shm;
use crate::shm::waiter::{Waiter, What};
use crate::sync::thread_local;

thread_local! {
    static GROUPS: Groups = Groups::default();
}

#[derive(Default)]
struct Groups(RefCell<Vec<Weak<Shm>>>);

impl Drop for Groups {
    /// The thread ends, and with it the program of its rank: by the end of `main`, by `exit`, or with leaked handles.
    fn drop(&mut self) {
        if !cfg!(any(loom, shuttle)) {
            let groups: Vec<Rc<Shm>> = self.0.get_mut().iter().filter_map(Weak::upgrade).collect();
            groups.iter().for_each(|group| group.end_with_thread());
        }
    }
}

pub(crate) fn add(inner: &Rc<Shm>) {
    GROUPS.with(|groups| {
        let mut groups = groups.0.borrow_mut();
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Rc::downgrade(inner));
    });
}

/// All groups, or all but one. A group may outlive the list, at the end of its thread.
fn groups(but: Option<&Shm>) -> Vec<Rc<Shm>> {
    let is_but = |group: &Rc<Shm>| but.is_some_and(|but| std::ptr::eq(&**group, but));
    let all = GROUPS.try_with(|groups| {
        groups.0.borrow().iter().filter_map(Weak::upgrade).filter(|group| !is_but(group)).collect()
    });
    all.unwrap_or_default()
}

/// Advances all but one; true if something is still in flight on any of them.
pub(crate) fn advance_others(but: &Shm) -> Result<bool, Stop> {
    let mut busy = false;
    for other in groups(Some(but)) {
        let mut state = other.state();
        if state.is_busy() {
            other.advance(&mut state).map_err(|stop| elsewhere(other.give(*stop)))?;
            busy |= state.is_busy();
        }
    }
    Ok(busy)
}

/// Advances all; true if something is still in flight. A group keeps its error for the next wait on it.
pub(crate) fn advance_all() -> bool {
    groups(None).iter().fold(false, |busy, group| {
        let mut state = group.state();
        let _ = group.advance(&mut state);
        busy | state.is_busy()
    })
}

/// Fails if another rank of one of the groups has failed, and the program does not know of it yet.
pub(crate) fn look() -> Result<(), CommError> {
    groups(None).iter().try_for_each(|group| {
        let failed = group.state().failed.is_some();
        if !failed && let Some(error) = group.elsewhere() {
            group.fail(&mut group.state(), error);
        }
        group.unseen_error().map_or(Ok(()), |error| Err(group.give(error)))
    })
}

/// Those that have something in flight. What was in flight on one that failed is over: its buffers are free.
fn in_flight() -> impl Iterator<Item = Rc<Shm>> {
    let is_busy = |group: &Rc<Shm>| {
        let state = group.state();
        state.failed.is_none() && state.is_busy()
    };
    groups(None).into_iter().filter(is_busy)
}

/// The error of something in flight that will never be over, since a rank has stopped.
pub(crate) fn failure() -> Option<CommError> {
    in_flight().find_map(|group| {
        let error = group.elsewhere()?;
        let error = group.fail(&mut group.state(), error);
        Some(group.give(error))
    })
}

/// The error of something in flight that is late, if anything is.
pub(crate) fn late() -> Option<CommError> {
    let group = in_flight().next()?;
    let error = Waiter { inner: &group, what: What::Leaving }.late();
    let error = group.fail(&mut group.state(), error);
    Some(group.give(error))
}

/// How often messages were posted or completed, on all groups of this thread but one.
pub(crate) fn moved(but: Option<&Shm>) -> u64 {
    groups(but).iter().map(|group| group.state().mails.moved()).sum()
}

/// The error of another group.
fn elsewhere(error: CommError) -> Stop {
    match error {
        CommError::OtherGroup { .. } => error.into(),
        _ => CommError::OtherGroup { error: error.into() }.into(),
    }
}
