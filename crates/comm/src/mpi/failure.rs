//! What ends a group over MPI, and whom it blames.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use consort_types::Failure;

use crate::cause::{Cause, NOBODY};
use crate::error::{CommError, Operation, Side};
use crate::mpi::engine::MpiGroup;
use crate::mpi::job::Answer;
use crate::mpi::state::State;
use crate::unseen::{UNSEEN_NOTE, report_unseen};

/// How long what is in flight on a leaked group may take.
const MOMENT: Duration = Duration::from_secs(1);

/// The error of a rank that another one has stopped.
pub(super) fn elsewhere(cause: &Cause) -> CommError {
    let (error, Cause { by, culprits, is_deadlock, .. }) = (cause.failure(), cause.clone());
    match by {
        NOBODY => CommError::World { culprits, error },
        rank => CommError::Elsewhere { rank, error, culprits, is_deadlock },
    }
}

/// What a rank tells the others of its error.
pub(super) fn cause(rank: usize, error: &CommError) -> Cause {
    let (by, failure) = match error {
        CommError::Elsewhere { rank, error, .. } => (*rank, error.clone()),
        CommError::World { error, .. } => (NOBODY, error.clone()),
        _ => (rank, error.failure()),
    };
    let culprits = error.culprits();
    Cause::new(by, failure, if culprits.is_empty() { vec![rank] } else { culprits })
}

/// Why a rank of a job that failed ends with code 1 although its program does not.
pub(super) fn reason(me: usize, cause: &Cause) -> Box<Failure> {
    let failure = if cause.by == me { cause.failure() } else { elsewhere(cause).failure() };
    failure.note("the job has failed, so this process ends with code 1")
}

/// What each of these ranks does, by its answer.
fn sides(ranks: &[usize], answers: &BTreeMap<usize, Answer>) -> Vec<Side> {
    let side = |rank: &usize| match answers.get(rank) {
        Some(answer) => Side { rank: *rank, what: answer.doing.clone(), site: answer.site.clone() },
        None => Side { rank: *rank, what: "does not answer".to_string(), site: String::new() },
    };
    ranks.iter().map(side).collect()
}

/// The error of a call of the job itself that is late: it blames those that do not answer.
pub(super) fn silent(during: &str, me: usize, all: &[usize], answers: &BTreeMap<usize, Answer>) -> CommError {
    let others: Vec<usize> = all.iter().copied().filter(|rank| *rank != me).collect();
    let unanswered: Vec<usize> = others.iter().copied().filter(|rank| !answers.contains_key(rank)).collect();
    let missing = if unanswered.is_empty() { others } else { unanswered };
    let what = Operation::Call { what: during.to_string(), number: 0, group: "world".to_string() };
    CommError::Deadline { what: what.into(), doing: sides(&missing, answers), missing }
}

impl MpiGroup {
    /// Keeps the first error, and tells it to the others. What is in flight keeps its buffers: MPI may still write them.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        if let Some(error) = &self.state.borrow().failed {
            return error.clone();
        }
        let error = self.blamed(error);
        let mut state = self.state.borrow_mut();
        self.recorder.error(state.next(), &error.failure(), state.site());
        state.failed = Some(error.clone());
        drop(state);
        if !matches!(error, CommError::OtherGroup { .. }) {
            self.job.stop(&cause(self.rank(), &error), self.tape());
        }
        error
    }

    /// A call of MPI that fails does not say which rank is gone: those are to blame that do not answer.
    fn blamed(&self, error: CommError) -> CommError {
        let CommError::Machine(failure) = &error else { return error };
        let answers = self.job.ask(&self.ranks, self.id);
        let others = self.ranks.iter().copied().filter(|rank| *rank != self.rank());
        let culprits: Vec<usize> = others.filter(|rank| !answers.contains_key(rank)).collect();
        if culprits.is_empty() {
            return error;
        }
        let mut rows = crate::error::rows_of(&sides(&culprits, &answers));
        rows.splice(0..0, failure.rows.iter().cloned());
        let error = Failure { rows, ..(**failure).clone() }.into();
        CommError::World { culprits, error }
    }

    /// The error of a wait that is late: asks the others, and blames those that do not answer or have not started it.
    pub(super) fn late(&self, what: Operation, members: &[usize], call: Option<u64>) -> CommError {
        let ranks: Vec<usize> =
            members.iter().map(|member| self.ranks[*member]).filter(|rank| *rank != self.rank()).collect();
        let answers = self.job.ask(&ranks, self.id);
        let has_started = |rank: &usize| {
            answers.get(rank).is_some_and(|answer| call.is_some_and(|call| answer.calls > call))
        };
        let without = |is: &dyn Fn(&usize) -> bool| -> Vec<usize> {
            ranks.iter().copied().filter(|rank| !is(rank)).collect()
        };
        let mut missing = without(&|rank| answers.contains_key(rank));
        if missing.is_empty() {
            missing = without(&has_started);
        }
        if missing.is_empty() {
            missing = ranks.clone();
        }
        CommError::Deadline { what: what.into(), doing: sides(&missing, &answers), missing }
    }

    /// The error of what is in flight, if it will never be over.
    pub(super) fn failure(&self) -> Option<CommError> {
        let failed = self.state.borrow().failed.clone();
        failed.or_else(|| self.heed().err()).map(|error| self.give(error))
    }

    /// The error of what is in flight, which is late: the group fails with it.
    pub(super) fn late_error(&self) -> CommError {
        let (what, members, call) = self.awaited(None);
        let error = self.late(what, &members, call);
        self.give(self.fail(error))
    }

    /// The error of a member that has left without what is awaited of it.
    pub(super) fn departed(
        &self,
        what: Operation,
        members: &[usize],
        call: Option<u64>,
    ) -> Option<CommError> {
        let has_left = |rank: &usize| {
            self.job.left(self.id, *rank).is_some_and(|calls| call.is_none_or(|call| calls <= call))
        };
        let rank = members.iter().map(|member| self.ranks[*member]).find(has_left)?;
        Some(CommError::Left { rank, what: what.into(), called: self.doing().into_iter().collect() })
    }

    /// Fails if another rank has, and the program does not know of it yet. Advances nothing, and never blocks for long.
    pub(super) fn look(&self) -> Result<(), CommError> {
        let failed = self.state.borrow().failed.is_some();
        let looked = self.job.look(Instant::now()).map_err(CommError::from);
        let found = looked.map_or_else(Some, |()| self.job.cause().map(|cause| elsewhere(&cause)));
        found.filter(|_| !failed).into_iter().for_each(|error| drop(self.fail(error)));
        self.unseen_error().map_or(Ok(()), |error| Err(self.give(error)))
    }

    /// The group's error, unless the program has seen it or the error that it follows from.
    pub(super) fn unseen_error(&self) -> Option<CommError> {
        let told = self.settings.told.get();
        let unseen = |error: &CommError| !(self.is_seen.get() || told && error.follows());
        self.state.borrow().failed.clone().filter(unseen)
    }

    /// Reports the error of a group that nobody drops, also that of what is over in a moment.
    pub(super) fn report_leaked(&self) {
        let until = Instant::now() + MOMENT;
        while self.advance().is_ok() && self.is_busy() && Instant::now() < until {
            thread::yield_now();
        }
        if let Err(error) = self.look() {
            report_unseen(error.failure(), UNSEEN_NOTE, self.settings.is_process);
        }
    }

    /// Marks the group's error as seen, and passes an error on to the program.
    #[cold]
    pub(super) fn give(&self, error: CommError) -> CommError {
        self.is_seen.set(true);
        self.settings.told.set(true);
        error
    }
}

impl State {
    /// The line of the oldest operation in flight.
    fn site(&self) -> crate::recorder::Name {
        self.calls.iter().find(|call| !call.is_finished()).map_or(Default::default(), |call| call.site)
    }
}
