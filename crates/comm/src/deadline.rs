//! Deadlines: the default deadline of a call, and instants that do not overflow.

use std::time::{Duration, Instant};

/// How long a rank waits for the others when it starts, and in calls that name no deadline, unless
/// `CONSORT_DEADLINE` says otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(5 * 60);

/// The longest wait: as good as unlimited, and without overflow of the clock.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The time: the machine's, or one that a simulation keeps.
pub type Clock<'a> = &'a dyn Fn() -> Instant;

/// The moment at which a deadline that begins now has passed.
pub fn from_now(deadline: Duration) -> Instant {
    after(Instant::now(), deadline)
}

/// The moment at which a deadline that begins then has passed. `Duration::MAX` would overflow the clock.
pub fn after(begin: Instant, deadline: Duration) -> Instant {
    begin + deadline.min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_a_moment() {
        assert!(from_now(Duration::MAX) > from_now(Duration::from_secs(3600)));
        assert!(from_now(Duration::ZERO) <= Instant::now());
    }
}
