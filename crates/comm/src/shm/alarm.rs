//! How a rank learns that another one has failed: a rank of this process panicked, or the control plane reports a
//! failure.

use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use consort_types::Failure;

use crate::CommError;
use crate::shm::row::Row;
use crate::shm::rows::Rows;
use crate::sync::{AtomicU64, in_one_order};

/// Reports that a rank of the world has failed.
#[derive(Default)]
pub(crate) struct Alarm {
    panicked: AtomicU64,
    watch: Option<Watch>,
    /// The rows of all groups here: every waiter sleeps on one of them.
    bells: Mutex<Vec<Weak<Rows>>>,
}

/// Asks the control plane, while a call waits, whether a process has failed: the ranks to blame and the error. Must be
/// cheap if none has.
pub(crate) type Watch = Box<dyn Fn() -> Option<(Vec<usize>, Box<Failure>)> + Send + Sync>;

impl Alarm {
    pub(crate) fn watched(watch: Watch) -> Alarm {
        Alarm { watch: Some(watch), ..Alarm::default() }
    }

    pub(crate) fn raise(&self, rank: usize) {
        // Only the first one counts.
        let _ = self.panicked.compare_exchange(0, rank as u64 + 1, SeqCst, Acquire);
        in_one_order();
        self.ring();
    }

    /// From now on a failure wakes all waiters that sleep on these rows.
    pub(crate) fn add(&self, rows: &Arc<Rows>) {
        let mut bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        bells.retain(|rows| rows.strong_count() > 0);
        bells.push(Arc::downgrade(rows));
    }

    /// Wakes all sleeping waiters, so that they check for failures.
    pub(crate) fn ring(&self) {
        let bells = || self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        // Not under the lock, which a woken waiter may need.
        let rows: Vec<Arc<Rows>> = bells().iter().filter_map(Weak::upgrade).collect();
        rows.iter().for_each(|rows| rows.iter().for_each(Row::ring));
    }

    pub(crate) fn panicked(&self) -> Option<usize> {
        self.panicked.load(Acquire).checked_sub(1).map(|rank| rank as usize)
    }

    pub(crate) fn failure(&self) -> Option<CommError> {
        let panicked = self.panicked().map(|rank| CommError::Panicked { rank });
        let watched = || self.watch.as_ref().and_then(|watch| watch());
        panicked.or_else(|| watched().map(|(culprits, error)| CommError::World { culprits, error }))
    }
}
