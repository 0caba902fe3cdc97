//! Errors that nobody looked at: printed, kept for whoever asks, and an error of the process where the rank is one. And
//! the last error that the program did look at, of whatever kind: a rank that leaves after it leaves because of it.

use std::cell::{Cell, RefCell};
use std::fmt::Display;

use crate::exit::fail_process;

thread_local! {
    /// Whether the last thing that this thread's rank did was to get an error, and which.
    static HAS_TROUBLE: Cell<bool> = const { Cell::new(false) };
    static TROUBLE: RefCell<String> = const { RefCell::new(String::new()) };
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

/// Notes an error that the program is given and that the other ranks have no part in. Should this thread's rank leave
/// before it makes another call, then that is why, and the others are told.
pub fn note_trouble(error: &dyn Display) {
    HAS_TROUBLE.set(true);
    // At the end of a thread it may be gone.
    let _ = TROUBLE.try_with(|trouble| *trouble.borrow_mut() = error.to_string());
}

/// The program goes on.
#[inline]
pub(crate) fn forget_trouble() {
    HAS_TROUBLE.set(false);
}

/// The error after which this thread's rank has made no call.
pub(crate) fn trouble() -> Option<String> {
    if !HAS_TROUBLE.get() {
        return None;
    }
    TROUBLE.try_with(|trouble| trouble.borrow().clone()).ok()
}
