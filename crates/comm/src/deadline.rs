//! Deadlines: how long a call waits that names none, and moments in the future that do not overflow.

use std::time::{Duration, Instant};

/// How long a rank waits for the others when it starts, and in calls that name no deadline, unless
/// `CONSORT_DEADLINE` says otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(5 * 60);

/// The longest wait. It is as good as none, and the clock has room for it.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// The moment at which a deadline that begins now has passed. `Duration::MAX` would overflow the clock.
pub(crate) fn from_now(deadline: Duration) -> Instant {
    Instant::now() + deadline.min(LONGEST)
}
