//! Computes and runs plans on real ranks.
//!
//! [`kernels`] are what computes on a CPU, one for each op, found by its name. [`execute`] walks a plan's lines over
//! its buffers; today it is the smallest executor that does, with reference evaluations for compute.
#![deny(unsafe_code)]

mod execute;
pub mod kernels;
pub mod start;
pub mod threads;
pub mod tolerance;

pub use consort_ir::{layout, views};
pub use execute::{RunError, execute};
