//! The exit code of a process in which an operation failed and the program never looked at the error.
//!
//! The error may be found when a group is dropped, at the end of `main` or after it, where it cannot be returned. So a
//! function that the C library calls at exit makes the process end with code 1 instead of 0. Not every C library passes
//! the code to such a function; there the code is 1 whatever it was.

use std::sync::Once;

static ONCE: Once = Once::new();

// SAFETY: the signature is that of the manual.
#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// Calls a function with the exit code and an argument when the process ends.
    fn on_exit(f: extern "C" fn(libc::c_int, *mut libc::c_void), argument: *mut libc::c_void) -> libc::c_int;
}

/// From now on the process ends with code 1 instead of 0.
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

/// Ends the process at once, with code 1.
pub(crate) fn end_process() -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(1) }
}

extern "C" fn end() {
    // SAFETY: what C code has not yet written is written; then the process ends. Rust has flushed its own output before
    // functions of `atexit` run.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        libc::_exit(1)
    }
}
