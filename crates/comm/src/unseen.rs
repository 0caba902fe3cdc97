//! Errors that the program never looked at: printed, kept for `take_unseen`, and a failure of the process if the rank
//! is one. Also the last error that it did look at, of any kind: the cause if the rank then leaves.

use std::cell::{Cell, RefCell};

use consort_types::Failure;

use crate::exit::fail_process;

thread_local! {
    /// Whether the last thing that this thread's rank did was to receive an error, and which.
    static HAS_TROUBLE: Cell<bool> = const { Cell::new(false) };
    static TROUBLE: RefCell<Option<(Box<Failure>, Vec<usize>)>> = const { RefCell::new(None) };
    /// The unseen errors of this thread's rank, oldest first.
    static UNSEEN: RefCell<Vec<Failure>> = const { RefCell::new(Vec::new()) };
}

/// The note for an error that the program never asked for.
pub const UNSEEN_NOTE: &str = "nobody looked at this error: wait for the operation, or read its result";

/// Reports an error that the program has not seen and can no longer see. If the rank is a process, it is printed, and
/// the process will not end with code 0.
pub fn report_unseen(failure: Box<Failure>, note: &str, is_process: bool) {
    if is_process {
        eprintln!("error: {}", failure.clone().note(note));
    }
    // At the end of a thread the list may be destroyed already.
    let _ = UNSEEN.try_with(|unseen| unseen.borrow_mut().push(*failure));
    if is_process {
        fail_process();
    }
}

/// Takes the errors of this thread's rank that the program never looked at, oldest first.
pub fn take_unseen() -> Vec<Failure> {
    UNSEEN.try_with(|unseen| std::mem::take(&mut *unseen.borrow_mut())).unwrap_or_default()
}

/// Records an error that the program receives and that may not involve the other ranks, with the ranks to blame; an
/// empty list stands for this one. If this thread's rank leaves before its next call, this is the cause that the others
/// are told.
pub fn note_trouble(failure: Box<Failure>, culprits: &[usize]) {
    HAS_TROUBLE.set(true);
    // At the end of a thread it may be destroyed already.
    let _ = TROUBLE.try_with(|trouble| {
        let mut trouble = trouble.borrow_mut();
        // The same error may be noted several times on its way up.
        if !culprits.is_empty() || trouble.as_ref().is_none_or(|(noted, _)| *noted != failure) {
            *trouble = Some((failure, culprits.to_vec()));
        }
    });
}

/// The program continued after the error.
#[inline]
pub(crate) fn forget_trouble() {
    HAS_TROUBLE.set(false);
}

/// The error after which this thread's rank, number `rank`, has made no call, and the ranks to blame.
pub(crate) fn trouble(rank: usize) -> Option<(Box<Failure>, Vec<usize>)> {
    if !HAS_TROUBLE.get() {
        return None;
    }
    let (failure, culprits) = TROUBLE.try_with(|trouble| trouble.borrow().clone()).ok()??;
    Some((failure, if culprits.is_empty() { vec![rank] } else { culprits }))
}
