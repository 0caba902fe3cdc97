//! The control plane of a job on one host, apart from any data path.
//!
//! Every rank has one connection, to the coordinator, over a Unix socket in the abstract namespace: nothing
//! of it is in the file system, and nothing is left when its processes die. Ranks meet over it (rendezvous,
//! parity, barrier), give up over it (abort), and part over it (goodbye). A connection that closes without a
//! goodbye is a death, which the others are told at once.
//!
//! - `frame.rs`: messages as bytes, with limits. `socket.rs`: bytes and descriptors on a socket.
//! - `roster.rs`: which ranks are connected, which wait, the first failure; without sockets or clock.
//! - `server.rs`: the coordinator's thread. `coordinator.rs`: its handle.
//! - `client.rs`, `join.rs`: a rank's side. `error.rs`, `failure.rs`: errors and their texts. `parity.rs`: compare.

mod client;
mod coordinator;
mod error;
mod failure;
mod frame;
mod join;
mod parity;
mod roster;
mod server;
pub(crate) mod socket;

pub use client::{Control, Peer};
pub use coordinator::Coordinator;
pub use error::ControlError;
pub(crate) use failure::signal_name;
pub use failure::{Exit, JobFailure, What};
pub use frame::MAX_BLOB;
pub use parity::Differing;
pub(crate) use parity::differing;

#[cfg(test)]
mod tests;
