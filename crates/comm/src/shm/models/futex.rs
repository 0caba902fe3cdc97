//! The futex of the models. It has two ways to sleep: a sleep that may end at any time, as with a timeout, and one that
//! only a wake-up ends, so that a wake-up that is lost is a deadlock, which the checkers report.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

#[cfg(loom)]
use loom::{
    lazy_static,
    sync::{Condvar, Mutex},
};
#[cfg(shuttle)]
use shuttle::{
    lazy_static,
    sync::{Condvar, Mutex},
};

use crate::shm::progress::BUSY;
use crate::sync::{AtomicU32, yield_now};

thread_local! {
    /// All threads of a model run on one system thread.
    static RUNG: Cell<bool> = const { Cell::new(false) };
}

lazy_static! {
    /// How often each bell woke its sleepers, by its address.
    static ref WAKES: (Mutex<BTreeMap<usize, u64>>, Condvar) = (Mutex::new(BTreeMap::new()), Condvar::new());
}

/// Whether only wake-ups end a sleep.
pub(crate) fn is_rung() -> bool {
    RUNG.get()
}

/// Runs a model in which only wake-ups end a sleep.
#[cfg(test)]
pub(crate) fn rung(model: impl FnOnce()) {
    RUNG.set(true);
    model();
    RUNG.set(false);
}

pub(crate) fn sleep_on(bell: &AtomicU32, seen: u32, left: Duration) {
    // A sleep this short is meant to end without a wake-up.
    if !is_rung() || left <= BUSY {
        return yield_now();
    }
    let (wakes, woken) = &*WAKES;
    let mut wakes = wakes.lock().expect("no thread of a model panics and goes on");
    let count = |wakes: &BTreeMap<usize, u64>| wakes.get(&address(bell)).copied();
    let before = count(&wakes);
    // The kernel reads the latest value, which in a model only a read-modify-write does.
    if bell.fetch_add(0, SeqCst) == seen {
        while count(&wakes) == before {
            wakes = woken.wait(wakes).expect("no thread of a model panics and goes on");
        }
    }
}

pub(crate) fn wake(bell: &AtomicU32) -> usize {
    if is_rung() {
        let (wakes, woken) = &*WAKES;
        *wakes.lock().expect("no thread of a model panics and goes on").entry(address(bell)).or_default() +=
            1;
        woken.notify_all();
    }
    0
}

fn address(bell: &AtomicU32) -> usize {
    std::ptr::from_ref(bell).addr()
}
