//! The atomics that ranks share. Under `cfg(loom)` and `cfg(shuttle)` they are those of the model checkers, so that
//! the protocol itself runs in the models, not a copy of it.

#[cfg(loom)]
pub(crate) use loom::{
    sync::atomic::{AtomicU32, AtomicU64, fence},
    thread::yield_now,
    thread_local,
};
#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::atomic::{AtomicU32, AtomicU64, fence},
    thread::yield_now,
    thread_local,
};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::{
    sync::atomic::{AtomicU32, AtomicU64, fence},
    thread::yield_now,
    thread_local,
};

/// Goes between a `SeqCst` write and a `SeqCst` load of another word. A no-op except in the models of the bell: loom
/// treats `SeqCst` as acquire and release, and only fences as stronger.
#[inline(always)]
pub(crate) fn in_one_order() {
    #[cfg(loom)]
    if crate::shm::models::futex::is_rung() {
        fence(std::sync::atomic::Ordering::SeqCst);
    }
}
