//! MPI, opened at run time: no compiler, no header and no feature flag is needed.
//!
//! - `library`: which library the launcher belongs to;
//! - `abi`: the handles, constants and sizes of each binary interface;
//! - `error`: why it cannot be used.

pub(crate) mod abi;
mod error;
pub(crate) mod library;

pub use abi::Abi;
pub use error::MpiError;
pub use library::{Identity, Survey, Tried, survey};
