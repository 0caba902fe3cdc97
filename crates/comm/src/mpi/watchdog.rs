//! A limit for calls that block and cannot be interrupted: to initialise and to finalise, to make a communicator.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use consort_types::Failure;

use crate::exit::end_process;

/// Calls `call`; if it has not returned by the deadline, prints that and ends the process.
pub(super) fn watched<T>(what: &'static str, deadline: Duration, call: impl FnOnce() -> T) -> T {
    let (over, is_over) = channel::<()>();
    let watch = move || {
        if is_over.recv_timeout(deadline) == Err(RecvTimeoutError::Timeout) {
            let failure = Failure::new(format!("{what} did not return within {deadline:.1?}")).of("mpi").note(
                "every rank must call it, so one of them has not started, is stopped, or cannot be reached",
            );
            eprintln!("error: {failure}");
            end_process();
        }
    };
    // Without a thread the call is made all the same.
    let watcher = thread::Builder::new().name("consort mpi watchdog".to_string()).spawn(watch);
    let outcome = call();
    drop(over);
    if let Ok(watcher) = watcher {
        let _ = watcher.join();
    }
    outcome
}
