//! The exit code of a process in which an operation failed and nobody looked.
//!
//! The error may be found when a group is dropped, in the last lines of `main` or behind them, where there is nothing left
//! to return it from. So the process is made to end with code 1 where it would end with 0, by a function that the C library
//! calls at its end. Not every library tells such a function the code; there the code is 1 whatever it was.

use std::sync::Once;

static ONCE: Once = Once::new();

// SAFETY: the signature is that of the manual.
#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// Calls a function with the exit code and an argument when the process ends.
    fn on_exit(f: extern "C" fn(libc::c_int, *mut libc::c_void), argument: *mut libc::c_void) -> libc::c_int;
}

/// From now on the process ends with code 1 and not with 0.
pub(crate) fn fail_process() {
    ONCE.call_once(|| {
        #[cfg(target_env = "gnu")]
        // SAFETY: the function is there as long as the process is, and needs nothing else to be.
        let registered = unsafe { on_exit(end_with, std::ptr::null_mut()) };
        #[cfg(not(target_env = "gnu"))]
        // SAFETY: as above.
        let registered = unsafe { libc::atexit(end) };
        debug_assert_eq!(registered, 0);
    });
}

#[cfg(target_env = "gnu")]
extern "C" fn end_with(code: libc::c_int, _: *mut libc::c_void) {
    if code == 0 {
        end();
    }
}

extern "C" fn end() {
    // SAFETY: what C code has not yet written is written; then the process ends. Rust has flushed its own output before
    // functions of `atexit` run.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        libc::_exit(1)
    }
}
