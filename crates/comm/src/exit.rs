//! The exit code of a process in which an operation failed and nobody looked.
//!
//! The error may be found when a group is dropped, in the last lines of `main` or behind them, where there is nothing left
//! to return it from. So the process is made to end with code 1, however it ends otherwise, by a function that the C
//! library calls at its end.

use std::sync::Once;

static ONCE: Once = Once::new();

/// From now on the process ends with code 1 and not with 0.
pub(crate) fn fail_process() {
    ONCE.call_once(|| {
        // SAFETY: the function is there as long as the process is, and needs nothing else to be.
        let registered = unsafe { libc::atexit(end) };
        debug_assert_eq!(registered, 0);
    });
}

extern "C" fn end() {
    // SAFETY: what C code has not yet written is written; then the process ends. Rust has flushed its own output before
    // functions of `atexit` run.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        libc::_exit(1)
    }
}
