//! MPI, opened at run time: no compiler, no header and no feature flag is needed. Everything that knows MPI is here.
//!
//! - `library`: which library the launcher belongs to;
//! - `abi`: the handles, constants and sizes of each binary interface;
//! - `calls`, `comm`, `flight`, `span`, `user_ops`, `watchdog`: the functions, with memory that stays in place while a
//!   call is in flight, and with a limit for those that block;
//! - `job`, `tape`: what the ranks tell one another besides data: settings, errors, who is late, flight recorders;
//! - `options`: what the environment says of this engine;
//! - `engine`, `state`, `call`, `transfers`, `compare`, `mail`, `waiting`: the operations of a group;
//! - `failure`: what ends a group, and whom it blames;
//! - `groups`: the groups of a thread, which advance together;
//! - `world`: how a launcher's process becomes a rank.

pub(crate) mod abi;
mod call;
mod calls;
mod comm;
mod compare;
pub(crate) mod engine;
mod error;
mod failure;
mod flight;
pub(crate) mod groups;
pub(crate) mod job;
pub(crate) mod library;
mod mail;
mod options;
mod span;
mod state;
mod tape;
mod transfers;
mod user_ops;
mod waiting;
mod watchdog;
pub(crate) mod world;

pub use abi::Abi;
pub use error::MpiError;
pub use library::{Identity, Survey, Tried, survey};
