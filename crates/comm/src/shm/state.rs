//! The operations in flight on a group, and their progress.

use std::collections::BTreeMap;

use crate::CommError;
use crate::engine::Given;
use crate::shm::call::{Call, Stage};
use crate::shm::mail::Mails;
use crate::shm::members::Members;
use crate::shm::queue::{Queue, Reusable};

/// The operations in flight.
pub(crate) struct State {
    /// Calls that are not finished, or whose outcome nobody took; the first has this number.
    pub(crate) first: u64,
    pub(crate) calls: Queue<Call>,
    /// The outcomes of calls before `first` that nobody took: parked, so that they block no later call.
    parked: BTreeMap<u64, Given>,
    /// The first call that is not finished.
    pub(crate) done: u64,
    /// All members are known to have done the calls below this number.
    pub(crate) released: u64,
    pub(crate) mails: Mails,
    pub(crate) failed: Option<CommError>,
}

impl State {
    pub(crate) fn new(members: &Members) -> State {
        State {
            first: 0,
            calls: Queue::default(),
            parked: BTreeMap::new(),
            done: 0,
            released: 0,
            mails: Mails::new(members),
            failed: None,
        }
    }

    /// The number of the next call.
    pub(crate) fn next(&self) -> u64 {
        self.first + self.calls.all().len() as u64
    }

    pub(crate) fn call(&self, number: u64) -> Option<&Call> {
        self.calls.all().get(number.checked_sub(self.first)? as usize)
    }

    pub(crate) fn call_mut(&mut self, number: u64) -> Option<&mut Call> {
        self.calls.all_mut().get_mut(number.checked_sub(self.first)? as usize)
    }

    /// The calls from the first that is not finished on.
    pub(crate) fn open_calls(&mut self) -> (&mut [Call], &mut u64) {
        (&mut self.calls.all_mut()[(self.done - self.first) as usize..], &mut self.released)
    }

    /// Whether a call is not finished.
    pub(crate) fn has_open_calls(&self) -> bool {
        self.done < self.next()
    }

    /// Whether something is not finished.
    pub(crate) fn is_busy(&self) -> bool {
        self.has_open_calls() || self.mails.is_open()
    }

    /// How many operations were not waited for yet.
    pub(crate) fn in_flight(&self) -> usize {
        let calls = self.calls.all().iter().filter(|call| !call.abandoned).count();
        calls + self.parked.len() + self.mails.in_flight()
    }

    /// Whether a call is finished.
    pub(crate) fn is_finished(&self, number: u64) -> bool {
        number < self.done || self.call(number).is_some_and(|call| call.stage == Stage::Finished)
    }

    /// The outcome of a call that is finished.
    #[inline(always)]
    pub(crate) fn take(&mut self, number: u64) -> Option<Given> {
        match self.call_mut(number) {
            Some(call) if call.stage == Stage::Finished => {
                let outcome = call.take_outcome();
                self.forget();
                Some(outcome)
            }
            Some(_) => None,
            None => self.parked.remove(&number),
        }
    }

    /// Records that a call was not over at the first poll.
    pub(crate) fn slow(&mut self, number: u64) {
        self.call_mut(number).into_iter().for_each(|call| call.is_slow = true);
    }

    /// Nobody waits for a call any more. Its contents are freed when it is finished, whatever precedes it.
    pub(crate) fn abandon(&mut self, number: u64) {
        match self.call_mut(number) {
            Some(call) => {
                call.abandoned = true;
                if call.stage == Stage::Finished {
                    call.empty();
                }
                self.forget();
            }
            None => drop(self.parked.remove(&number)),
        }
    }

    /// Counts newly finished calls as done; true if there are any.
    pub(crate) fn settle(&mut self) -> bool {
        let finished = self.open_calls().0.iter().take_while(|call| call.stage == Stage::Finished).count();
        self.done += finished as u64;
        self.forget();
        finished > 0
    }

    /// Removes calls that are over and that nobody waits for. One whose outcome nobody took and that has many behind it
    /// is parked, so that it does not hold them up.
    #[inline(always)]
    pub(crate) fn forget(&mut self) {
        while let Some(call) = self.calls.first()
            && call.number < self.done
            && (call.abandoned || self.calls.all().len() > BEHIND)
        {
            if call.abandoned {
                self.calls.forget_first();
            } else {
                let outcome = self.calls.take_first().take_outcome();
                self.parked.insert(self.first, outcome);
            }
            self.first += 1;
        }
    }
}

/// A finished call that nobody took is parked when the queue is longer than this.
const BEHIND: usize = 64;
