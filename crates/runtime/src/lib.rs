//! Computes and runs plans on real ranks.
//!
//! [`kernels`] are what computes on a CPU, one for each op, found by its name. [`execute`] lowers a plan and walks its
//! lines; [`start`] begins communication.
#![deny(unsafe_code)]

pub mod execute;
pub mod kernels;
pub mod start;
pub mod threads;

pub use execute::{Exec, RunError};
