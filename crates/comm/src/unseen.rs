//! Errors that nobody looked at: printed, kept for whoever asks, and an error of the process where the rank is one. And
//! the last error that the program did look at, of whatever kind: a rank that leaves after it leaves because of it.

use std::cell::{Cell, RefCell};
use std::fmt::Display;

use crate::exit::fail_process;

thread_local! {
    /// Whether the last thing that this thread's rank did was to get an error, and which.
    static HAS_TROUBLE: Cell<bool> = const { Cell::new(false) };
    static TROUBLE: RefCell<(String, Vec<usize>)> = const { RefCell::new((String::new(), Vec::new())) };
    /// Those of this thread's rank, oldest first.
    static UNSEEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// What there is to say of an error that the program never asked for.
pub const UNSEEN_NOTE: &str = "nobody looked at this error: wait for the operation, or read its result";

/// Reports an error that the program has not seen and cannot see any more. Where the rank is a process, it is printed, and
/// the process will not end with code 0.
pub fn report_unseen(error: &dyn Display, note: &str, is_process: bool) {
    if is_process {
        eprintln!("error: {error}\n  note: {note}");
    }
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

/// Notes an error that the program is given and that the other ranks may have no part in, and the ranks that are to blame;
/// none is this one. Should this thread's rank leave before it makes another call, then that is why, and the others are
/// told.
pub fn note_trouble(error: &dyn Display, culprits: &[usize]) {
    HAS_TROUBLE.set(true);
    let text = error.to_string();
    // At the end of a thread it may be gone.
    let _ = TROUBLE.try_with(|trouble| {
        let mut trouble = trouble.borrow_mut();
        // The same error may come by several times on its way up.
        if trouble.0 != text || !culprits.is_empty() {
            *trouble = (text, culprits.to_vec());
        }
    });
}

/// The program goes on.
#[inline]
pub(crate) fn forget_trouble() {
    HAS_TROUBLE.set(false);
}

/// The error after which this thread's rank, which has this number, has made no call, and the ranks that are to blame.
pub(crate) fn trouble(rank: usize) -> Option<(String, Vec<usize>)> {
    if !HAS_TROUBLE.get() {
        return None;
    }
    let (error, culprits) = TROUBLE.try_with(|trouble| trouble.borrow().clone()).ok()?;
    Some((error, if culprits.is_empty() { vec![rank] } else { culprits }))
}
