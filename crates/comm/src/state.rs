//! What is in flight on a group here, and how far it is.

use crate::CommError;
use crate::buffers::Buffers;
use crate::call::{Call, Stage};
use crate::common_result::Common;
use crate::mail::Mails;
use crate::members::Members;
use crate::queue::Queue;

/// What is in flight.
pub(crate) struct State {
    /// Calls that are not finished, or whose outcome nobody took yet; the first has this number.
    pub(crate) first: u64,
    pub(crate) calls: Queue<Call>,
    /// The first call that is not finished.
    pub(crate) done: u64,
    /// The first call that is not finished, or not compared with what all others called.
    pub(crate) compared: u64,
    /// How many calls were not compared when this was last looked at.
    pub(crate) uncompared: usize,
    /// Every member is known to have done and compared the calls below.
    pub(crate) released: u64,
    pub(crate) mails: Mails,
    pub(crate) failed: Option<CommError>,
}

/// The buffers of an operation, and its common result.
pub(crate) type Given = (Buffers, Option<Box<Common>>);

impl State {
    pub(crate) fn new(members: &Members) -> State {
        State {
            first: 0,
            calls: Queue::default(),
            done: 0,
            compared: 0,
            uncompared: 0,
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

    /// Whether a call is not finished.
    pub(crate) fn has_open_calls(&self) -> bool {
        self.done < self.next()
    }

    /// Whether something is not finished.
    pub(crate) fn is_busy(&self) -> bool {
        self.has_open_calls() || self.mails.is_open()
    }

    /// Whether something is finished and not compared yet, so that others cannot use its slot again.
    pub(crate) fn has_uncompared(&self) -> bool {
        self.uncompared > 0
    }

    /// How many operations nobody has waited for yet.
    pub(crate) fn in_flight(&self) -> usize {
        self.calls.all().iter().filter(|call| !call.abandoned).count() + self.mails.in_flight()
    }

    /// Whether a call is finished.
    pub(crate) fn is_finished(&self, number: u64) -> bool {
        self.call(number).is_some_and(|call| call.stage == Stage::Finished)
    }

    /// The outcome of a call that is finished.
    #[inline(always)]
    pub(crate) fn take(&mut self, number: u64) -> Option<Given> {
        let call = self.call_mut(number).filter(|call| call.stage == Stage::Finished)?;
        let outcome = call.take_outcome();
        self.forget();
        Some(outcome)
    }

    /// Notes that a call was not over at the first look.
    pub(crate) fn slow(&mut self, number: u64) {
        self.call_mut(number).into_iter().for_each(|call| call.is_slow = true);
    }

    /// Nobody waits for a call any more.
    pub(crate) fn abandon(&mut self, number: u64) {
        self.call_mut(number).into_iter().for_each(|call| call.abandoned = true);
        self.forget();
    }

    /// Forgets calls that are over and compared and that nobody waits for.
    #[inline(always)]
    pub(crate) fn forget(&mut self) {
        while self.calls.first().is_some_and(|call| call.abandoned && call.number < self.compared) {
            self.calls.forget_first();
            self.first += 1;
        }
    }
}
