//! Two clocks: one that is cheap to read, and one in nanoseconds. Both are the same for all processes of a host.

use std::time::{SystemTime, UNIX_EPOCH};

/// The cheap clock, in units of its own: the reader of a record converts them (see `recorder.rs`).
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(crate) fn ticks() -> u64 {
    // SAFETY: the instruction reads a counter that every such processor has, and touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline]
pub(crate) fn ticks() -> u64 {
    now_ns()
}

/// Nanoseconds since the beginning of 1970.
pub(crate) fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
