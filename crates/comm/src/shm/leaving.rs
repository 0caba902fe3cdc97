//! The end of a rank's side of a group: finishes operations in flight, finds calls and messages that this rank missed,
//! and reports errors that the program has not seen.

use std::panic::Location;
use std::time::{Duration, Instant};

use crate::CommError;
use crate::cause::Cause;
use crate::deadline::from_now;
use crate::engine::Engine;
use crate::error::Stop;
use crate::shm::progress::Shm;
use crate::shm::row::Row;
use crate::shm::status;
use crate::shm::waiter::{Waiter, What};
use crate::unseen::{UNSEEN_NOTE, report_unseen, trouble};

impl Shm {
    /// Finishes operations in flight, as peers may need this member's part, and waits until its messages are taken.
    fn finish_all(&self) -> Result<(), Stop> {
        if let Some(error) = self.state().failed.clone() {
            return Err(error.into());
        }
        let waiter = Waiter { inner: self, what: What::Leaving };
        waiter.wait(|| from_now(self.settings.deadline.get()), Location::caller())?;
        match self.forgotten() {
            Some(error) => Err(self.fail(&mut self.state(), error).into()),
            None => Ok(()),
        }
    }

    /// The error of what others have started and this member never will: a call not made, or a message not received.
    pub(crate) fn forgotten(&self) -> Option<CommError> {
        let (members, state) = (&self.members, self.state());
        let next = state.next();
        let others = members.rows.iter().enumerate().filter(|(member, _)| *member != members.me);
        let skipped = others.into_iter().any(|(_, row)| row.has_published(next));
        let unreceived = if skipped { None } else { state.mails.unreceived(members) };
        if !skipped && unreceived.is_none() {
            return None;
        }
        // The cause, if it is known: another rank has failed, or the program leaves because of an error.
        if let Some(error) = self.elsewhere() {
            return Some(error);
        }
        let rank = members.mine().rank;
        if let Some((error, culprits)) = trouble(rank) {
            self.is_seen.set(true);
            return Some(CommError::Elsewhere { rank, error, culprits, is_deadlock: false });
        }
        if skipped {
            let group = self.recorder.group_name().to_string();
            return Some(CommError::Skipped { rank, call: next, group, parties: self.parties(next) });
        }
        unreceived
    }
}

/// Limit for operations in flight when a thread ends without having dropped its groups.
const LAST: Duration = Duration::from_millis(200);

impl Shm {
    /// Finishes operations in flight, leaves, and reports errors that the program has not seen.
    pub(crate) fn leave(&self) {
        let before = self.unseen_error();
        let outcome = self.finish_all();
        let row = self.members.mine();
        if let Some((error, culprits)) = trouble(row.rank) {
            let cause = Cause::new(row.rank, error, culprits);
            status::set_trouble(&row.segment, &self.recorder, &cause);
        }
        self.members.mine().leave();
        self.members.rows.iter().for_each(Row::ring);
        // Check again: a message may have been posted just before its sender could see that this member leaves.
        let late = if outcome.is_ok() { self.forgotten() } else { None };
        if let Some(error) = late {
            self.fail(&mut self.state(), error);
        }
        // A rank that leaves because of an error leaves calls and messages behind.
        let told = self.settings.told.get();
        if let Some(error) = before.or_else(|| self.unseen_error().filter(|_| !told)) {
            self.report(&error);
        }
    }

    fn report(&self, error: &CommError) {
        let note = match error {
            CommError::Skipped { .. } => {
                "this rank has ended, or dropped its mesh, before it made that call; if an error of its own ended it, that \
                 comes next"
            }
            _ => UNSEEN_NOTE,
        };
        report_unseen(error.failure(), note, self.settings.is_process);
        self.is_seen.set(true);
    }

    /// The thread ends while handles of the group are left: the program called `exit`, or they leaked. The others learn
    /// of the end in other ways; operations in flight may still turn out to differ.
    pub(crate) fn end_with_thread(&self) {
        if std::thread::panicking() {
            return;
        }
        let until = Instant::now() + LAST;
        while self.state().failed.is_none() && self.forgotten().is_none() && Instant::now() < until {
            let state = &mut *self.state();
            if !state.is_busy() || self.advance(state).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(error) = self.unseen_error().filter(|_| !self.settings.told.get()) {
            self.report(&error);
        }
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        // A panicking rank does not wait: the others learn of the panic afterwards.
        self.close(std::thread::panicking());
    }
}
