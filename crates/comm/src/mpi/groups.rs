//! The groups of a thread over MPI: they advance together, and any of them answers for this rank.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use crate::CommError;
use crate::error::Side;
use crate::mpi::engine::MpiGroup;
use crate::mpi::job::Answer;
use crate::recorder::Tape;

thread_local! {
    static GROUPS: Groups = const { Groups(RefCell::new(Vec::new())) };
}

/// The groups of a thread. Those that are there when it ends were leaked, or the process ends by `exit`.
struct Groups(RefCell<Vec<Weak<MpiGroup>>>);

impl Drop for Groups {
    fn drop(&mut self) {
        self.0.get_mut().iter().filter_map(Weak::upgrade).for_each(|group| group.report_leaked());
    }
}

pub(super) fn add(group: &Rc<MpiGroup>) {
    GROUPS.with(|groups| {
        let groups = &mut *groups.0.borrow_mut();
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Rc::downgrade(group));
    });
}

/// All groups. A group may outlive the list, at the end of its thread.
fn groups() -> Vec<Rc<MpiGroup>> {
    let all = GROUPS.try_with(|groups| groups.0.borrow().iter().filter_map(Weak::upgrade).collect());
    all.unwrap_or_default()
}

/// Advances all groups but one; the error of one of them is an error of its rank.
pub(super) fn advance_others(but: &MpiGroup) -> Result<(), CommError> {
    for group in groups().iter().filter(|group| !std::ptr::eq(&***group, but)) {
        if group.is_busy() {
            group.advance().map_err(|error| match error {
                CommError::OtherGroup { .. } => error,
                _ => CommError::OtherGroup { error: error.into() },
            })?;
        }
    }
    Ok(())
}

/// Advances all groups; true if something is still in flight. A group keeps its error for the next wait on it.
pub(crate) fn advance_all() -> bool {
    groups().iter().fold(false, |busy, group| {
        let _ = group.advance();
        busy | group.is_busy()
    })
}

/// Fails if another rank of one of the groups has failed, and the program does not know of it yet.
pub(crate) fn look() -> Result<(), CommError> {
    groups().iter().try_for_each(|group| group.look())
}

/// The error of something in flight that will never be over, since a rank has stopped.
pub(crate) fn failure() -> Option<CommError> {
    groups().iter().filter(|group| group.is_busy()).find_map(|group| group.failure())
}

/// The error of something in flight that is late, if anything is.
pub(crate) fn late() -> Option<CommError> {
    groups().iter().find(|group| group.is_busy()).map(|group| group.late_error())
}

/// What this rank's flight recorder holds, if it has a group.
pub(crate) fn tape() -> Option<Tape> {
    groups().first().and_then(|group| group.tape())
}

/// What this rank answers to a question about a group.
pub(super) fn answer(id: u64) -> Answer {
    let groups = groups();
    let calls = groups.iter().find(|group| group.id == id).map_or(0, |group| group.calls());
    let Side { what, site, .. } = groups.first().and_then(|group| group.doing()).unwrap_or(Side {
        rank: 0,
        what: "no operation".to_string(),
        site: String::new(),
    });
    Answer { calls, doing: what, site }
}
