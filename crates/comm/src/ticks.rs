//! Two clocks: one that is cheap to read, and one in nanoseconds. Both are the same for all processes of a host.

use rustix::time::{ClockId, clock_gettime};

/// The cheap clock, in units of its own: whoever reads a record converts them (see `recorder.rs`).
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn ticks() -> u64 {
    // SAFETY: the instruction reads a counter that every such processor has, and touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(crate) fn ticks() -> u64 {
    now_ns()
}

/// Nanoseconds on the clock that never goes back.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
