//! The engine of shared memory: ranks that map one another's heaps, as threads or as processes of one host.
//!
//! Everything that knows rows, segments and leases is here. In the order in which a call passes through them:
//!
//! - `segment`, `fixed`, `heap`, `buffer`, `lease`, `late`, `releasing`: memory that peers map, its allocator, its handles,
//!   who may still read it (longest, in tests), and waiting for the end of that;
//! - `row`, `rows`, `members`: what a member publishes, and the only access to peers' data;
//! - `call`, `algorithms`, `mail`: the collectives and the messages;
//! - `engine`: what a group asks of it, and groups made of a group;
//! - `progress`, `queue`, `state`, `waiter`, `waiting`, `siblings`, `leaving`: progress, and waiting with a deadline;
//! - `status`, `alarm`: why a rank stopped or what it waits for, readable after its death; news of failures;
//! - `progress_thread`: large reductions on a spare core;
//! - `local`, `world`, `layout`: groups of threads, groups of processes, what lies where in a segment.

pub(crate) mod alarm;
pub(crate) mod algorithms;
pub(crate) mod buffer;
pub(crate) mod buffers;
pub(crate) mod call;
pub(crate) mod common_result;
mod engine;
pub(crate) mod fixed;
pub(crate) mod heap;
pub(crate) mod late;
pub(crate) mod layout;
pub(crate) mod lease;
pub(crate) mod leaving;
pub(crate) mod local;
pub(crate) mod mail;
pub(crate) mod members;
#[cfg(any(loom, shuttle))]
pub(crate) mod models;
pub(crate) mod probe;
pub(crate) mod progress;
pub(crate) mod progress_thread;
pub(crate) mod queue;
pub(crate) mod releasing;
pub(crate) mod row;
pub(crate) mod rows;
#[cfg_attr(any(loom, shuttle), path = "segment/model.rs")]
pub(crate) mod segment;
pub(crate) mod siblings;
pub(crate) mod state;
pub(crate) mod status;
pub(crate) mod waiter;
pub(crate) mod waiting;
mod world;
