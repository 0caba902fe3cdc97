//! All groups of a thread, over either engine. What waits for memory or computes for long waits for no group in particular: it
//! advances all of them, and ends if one of them fails.

use crate::CommError;
use crate::mpi::groups;
use crate::shm::siblings;

/// Advances all; true if something is still in flight. A group keeps its error for the next wait on it.
pub(crate) fn advance_all() -> bool {
    groups::advance_all() | siblings::advance_all()
}

/// Fails if another rank of one of the groups has failed, and the program does not know of it yet: for a program that
/// computes for long and waits for nobody. Advances nothing, and never blocks for long.
pub fn look() -> Result<(), CommError> {
    groups::look().and_then(|()| siblings::look())
}

/// The error of something in flight that will never be over, since a rank has stopped.
pub(crate) fn failure() -> Option<CommError> {
    groups::failure().or_else(siblings::failure)
}

/// The error of something in flight that is late, if anything is. Its group fails with it.
pub(crate) fn late() -> Option<CommError> {
    groups::late().or_else(siblings::late)
}
