//! The atomics that ranks share. Under `cfg(loom)` and `cfg(shuttle)` they are those of the model checkers, so that
//! the protocol itself runs in the models, not a copy of it.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, fence};
