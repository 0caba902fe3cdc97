//! What is set for all groups of a rank.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long a rank waits for the others where nothing else is said.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// As good as no deadline, and far enough from overflow.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// What is set for all groups of a rank.
pub(crate) struct Settings {
    /// How long a group that is dropped waits for what is in flight.
    pub(crate) deadline: Cell<Duration>,
    /// Whether the wait of a send needs its receive, however small it is.
    pub(crate) strict: Cell<bool>,
    /// Whether this rank is a process, so that an error that nobody looks at is an error of the process.
    pub(crate) is_process: bool,
}

impl Settings {
    pub(crate) fn new(deadline: Duration, is_process: bool) -> Settings {
        Settings { deadline: Cell::new(deadline), strict: Cell::new(is_strict()), is_process }
    }
}

/// Whether groups are strict where the program does not say: as `CONSORT_STRICT` says, or else in debug builds.
fn is_strict() -> bool {
    match std::env::var("CONSORT_STRICT") {
        Ok(value) => !matches!(value.trim(), "" | "0" | "false" | "off"),
        Err(_) => cfg!(debug_assertions),
    }
}

/// The moment after so much time; one that is too far away is a hundred years from now.
pub fn after(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(time).unwrap_or_else(|| now + LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_a_moment() {
        assert!(after(Duration::MAX) > after(Duration::from_secs(3600)));
        assert!(after(Duration::ZERO) <= Instant::now());
    }
}
