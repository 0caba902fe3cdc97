//! How a rank learns that another one has failed: a rank that panicked in this process, or whatever somebody who
//! watches over processes reports.

use std::sync::atomic::Ordering::{Acquire, Release};

use crate::CommError;
use crate::sync::AtomicU64;

/// Says that a rank of the world has failed.
#[derive(Default)]
pub(crate) struct Alarm {
    panicked: AtomicU64,
    watch: Option<Watch>,
}

/// Whoever watches over ranks that are processes: what has happened, if anything. Asked while waiting, so it must be
/// quick where nothing has.
pub(crate) type Watch = Box<dyn Fn() -> Option<String> + Send + Sync>;

impl Alarm {
    pub(crate) fn watched(watch: Watch) -> Alarm {
        Alarm { watch: Some(watch), ..Alarm::default() }
    }

    pub(crate) fn raise(&self, rank: usize) {
        // The first one counts.
        let _ = self.panicked.compare_exchange(0, rank as u64 + 1, Release, Acquire);
    }

    pub(crate) fn panicked(&self) -> Option<usize> {
        self.panicked.load(Acquire).checked_sub(1).map(|rank| rank as usize)
    }

    pub(crate) fn failure(&self) -> Option<CommError> {
        let panicked = self.panicked().map(|rank| CommError::Panicked { rank });
        panicked.or_else(|| self.watch.as_ref().and_then(|watch| watch()).map(CommError::World))
    }
}
