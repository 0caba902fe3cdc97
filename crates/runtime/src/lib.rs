//! Runs plans on real ranks.
//!
//! Today: the smallest executor that walks a plan's lines over its buffers ([`execute`]), with reference
//! evaluations for compute and `all_reduce` for communication. Kernels and the real executor are not built
//! yet.
#![forbid(unsafe_code)]

mod execute;

pub use execute::{RunError, element, execute, reduction};
