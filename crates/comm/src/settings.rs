//! Settings of all groups of a rank.

use std::cell::Cell;
use std::time::Duration;

/// Settings of all groups of a rank.
pub(crate) struct Settings {
    /// How long a dropped group waits for operations in flight.
    pub(crate) deadline: Cell<Duration>,
    /// Whether waiting for a send needs its receive, even for a small message.
    pub(crate) strict: Cell<bool>,
    /// Whether leases last until their release is asked for: a mode for tests.
    pub(crate) late: Cell<bool>,
    /// Whether progress threads start without cores for them: a mode for tests.
    pub(crate) forced_threads: Cell<bool>,
    /// Whether the program received an error of any of the groups.
    pub(crate) told: Cell<bool>,
    /// Whether this rank is a process, so that an unseen error is an error of the process.
    pub(crate) is_process: bool,
}

impl Settings {
    pub(crate) fn new(deadline: Duration, is_process: bool) -> Settings {
        Settings {
            deadline: Cell::new(deadline),
            strict: Cell::new(is_strict()),
            late: Cell::new(false),
            forced_threads: Cell::new(false),
            told: Cell::new(false),
            is_process,
        }
    }
}

/// Whether groups are strict by default: as `CONSORT_STRICT` says, or else in debug builds.
pub fn is_strict() -> bool {
    match std::env::var("CONSORT_STRICT") {
        Ok(value) => !matches!(value.trim(), "" | "0" | "false" | "off"),
        Err(_) => cfg!(debug_assertions),
    }
}
