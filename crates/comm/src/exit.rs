//! The exit code of a process in which an operation failed and the program never looked at the error, or which ends without
//! having left its job over MPI.
//!
//! The error may be found when a group is dropped, at the end of `main` or after it, where it cannot be returned. So a
//! function that the C library calls at exit makes the process end with code 1 instead of 0. Not every C library passes
//! the code to such a function; there the code is 1 whatever it was.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use consort_types::Failure;

static ONCE: Once = Once::new();
static ENDING: Mutex<Ending> = Mutex::new(Ending { has_failed: false, unclosed: None });

/// What makes the code 1 instead of 0.
struct Ending {
    /// An error, which was printed.
    has_failed: bool,
    /// MPI was not ended in an orderly way, for this reason. It is printed if nothing else says why the code is 1.
    unclosed: Option<Box<Failure>>,
}

// SAFETY: the signature is that of the manual.
#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// Calls a function with the exit code and an argument when the process ends.
    fn on_exit(f: extern "C" fn(libc::c_int, *mut libc::c_void), argument: *mut libc::c_void) -> libc::c_int;
}

fn ending() -> MutexGuard<'static, Ending> {
    ENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on the process ends with code 1 instead of 0. The caller has printed why.
pub(crate) fn fail_process() {
    ending().has_failed = true;
    watch_exit();
}

/// Until `close_process` the process ends with code 1 instead of 0, and says why.
pub(crate) fn open_process(why: Box<Failure>) {
    ending().unclosed = Some(why);
    watch_exit();
}

/// MPI has ended in an orderly way.
pub(crate) fn close_process() {
    ending().unclosed = None;
}

fn watch_exit() {
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
    match &*ending() {
        Ending { has_failed: false, unclosed: None } => return,
        Ending { has_failed: false, unclosed: Some(why) } => eprintln!("error: {why}"),
        Ending { has_failed: true, .. } => {}
    }
    // SAFETY: what C code has not yet written is written; then the process ends. Rust has flushed its own output before
    // functions of `atexit` run.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        libc::_exit(1)
    }
}
