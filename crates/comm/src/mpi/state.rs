//! The operations in flight on a group over MPI.

use std::collections::{BTreeMap, VecDeque};

use crate::CommError;
use crate::engine::Given;
use crate::mpi::call::Call;
use crate::mpi::mail::Batch;

#[derive(Default)]
pub(super) struct State {
    /// Calls that are not finished, or whose outcome nobody took; the first has this number.
    first: u64,
    pub(super) calls: VecDeque<Call>,
    /// How many calls from the first one on have begun to move data: all members begin them in order.
    pub(super) begun: usize,
    pub(super) batches: BTreeMap<u64, Batch>,
    pub(super) next_batch: u64,
    pub(super) failed: Option<CommError>,
}

impl State {
    /// The number of the next call.
    pub(super) fn next(&self) -> u64 {
        self.first + self.calls.len() as u64
    }

    fn index(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.first)?).ok().filter(|index| *index < self.calls.len())
    }

    pub(super) fn call(&self, number: u64) -> Option<&Call> {
        self.calls.get(self.index(number)?)
    }

    /// Whether something is not finished.
    pub(super) fn is_busy(&self) -> bool {
        self.calls.iter().any(|call| !call.is_finished())
            || self.batches.values().any(|batch| !batch.is_finished())
    }

    /// How many operations were not waited for yet.
    pub(super) fn in_flight(&self) -> usize {
        let calls = self.calls.iter().filter(|call| !call.is_abandoned).count();
        calls + self.batches.values().filter(|batch| !batch.is_abandoned).count()
    }

    /// The outcome of a call that is finished.
    pub(super) fn take(&mut self, number: u64) -> Option<Given> {
        let index = self.index(number)?;
        let call = self.calls.get_mut(index).filter(|call| call.is_finished() && !call.is_abandoned)?;
        let given = call.take_outcome();
        self.forget();
        Some(given)
    }

    pub(super) fn abandon(&mut self, number: u64) {
        if let Some(index) = self.index(number) {
            self.calls[index].abandon();
            self.forget();
        }
    }

    /// Removes calls that are over and that nobody waits for.
    pub(super) fn forget(&mut self) {
        while self.calls.front().is_some_and(|call| call.is_finished() && call.is_abandoned) {
            self.calls.pop_front();
            self.first += 1;
            self.begun -= 1;
        }
    }
}
