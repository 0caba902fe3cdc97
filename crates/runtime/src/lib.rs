//! Computes and runs plans on real ranks.
//!
//! [`kernels`] are what computes on a CPU, one for each op, found by its name, and [`call`] calls them; [`device`] is the seam
//! behind which they stand. [`execute`] lowers
//! a plan and walks its lines; [`start`] begins communication.
#![deny(unsafe_code)]

pub mod call;
pub mod device;
mod error;
pub mod execute;
pub mod kernels;
pub mod start;
pub mod threads;

pub use error::RunError;
pub use execute::Exec;
