//! Errors that nobody looked at: printed, kept for whoever asks, and an error of the process where the rank is one.

use std::cell::RefCell;
use std::fmt::Display;

use crate::exit::fail_process;

thread_local! {
    /// Those of this thread's rank, oldest first.
    static UNSEEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Reports an error that the program has not seen and cannot see any more. Where the rank is a process, it will not end
/// with code 0.
pub fn report_unseen(error: &dyn Display, is_process: bool) {
    eprintln!(
        "error: {error}\n  note: nobody looked at this error: wait for the operation, or read its result"
    );
    // At the end of a thread the list may be gone.
    let _ = UNSEEN.try_with(|unseen| unseen.borrow_mut().push(error.to_string()));
    if is_process {
        fail_process();
    }
}

/// The errors of this thread's rank that nobody looked at, oldest first. They are forgotten.
pub fn take_unseen() -> Vec<String> {
    UNSEEN.try_with(|unseen| std::mem::take(&mut *unseen.borrow_mut())).unwrap_or_default()
}
