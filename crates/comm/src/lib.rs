//! Groups of ranks, and the data they exchange.
//!
//! This crate knows nothing of programs: it moves and reduces bytes, and does not depend on the crate that defines ops.
//!
//! - `launch` starts processes as ranks; `env` tells a process which rank it is.
//! - `control` is how ranks find one another, agree on settings and learn of a death, apart from any data.
//! - [`init`] does all of it for a program, and gives it a [`World`]; [`World::group`] gives it the group of all ranks.
//! - A [`Group`] starts operations on [`Buffer`]s of a rank's [`Heap`], which peers read in place: over memory that
//!   processes map (`shm.rs`), or between threads ([`spawn`]), with one set of algorithms (`call.rs`, `algorithms/`,
//!   `mail.rs`).
//! - Ranks record what they do as [`Event`]s, the last ones of each rank in its segment; a [`FlightRecord`] merges those of
//!   all ranks and names the first divergence.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use consort_comm::spawn;
//! use consort_types::{Dtype, Reduce};
//!
//! let sums = spawn(3, |group| {
//!     let until = Instant::now() + Duration::from_secs(5);
//!     let buffer = group.heap().alloc_from(&(group.rank() as f32 + 1.0).to_le_bytes())?;
//!     let buffers = group.all_reduce(buffer, Dtype::F32, Reduce::Sum)?.wait(until)?;
//!     Ok::<_, consort_comm::CommError>(buffers[0].bytes()?.to_vec())
//! });
//! assert!(sums.into_iter().all(|sum| sum == Ok(6f32.to_le_bytes().to_vec())));
//! ```

mod alarm;
mod algorithms;
mod arguments;
mod buffer;
mod buffers;
mod call;
mod collectives;
mod common_result;
pub mod control;
mod cores;
mod deadline;
pub mod env;
mod error;
mod event;
mod exit;
mod fixed;
mod flight_record;
mod group;
mod heap;
mod job;
mod kernels;
pub mod launch;
mod layout;
mod lease;
mod leaving;
mod limits;
mod local;
mod mail;
mod members;
#[cfg(any(loom, shuttle))]
mod models;
mod op;
mod pending;
mod probe;
mod progress;
mod progress_thread;
mod queue;
mod recorder;
mod row;
mod rows;
#[cfg_attr(any(loom, shuttle), path = "segment/model.rs")]
mod segment;
mod settings;
mod shm;
mod siblings;
mod small_list;
mod state;
mod status;
mod subgroup;
mod sync;
mod ticks;
mod unseen;
mod waiter;
mod waiting;
mod world;

pub use arguments::OperandType;
pub use buffer::{Buffer, Bytes, BytesMut};
pub use buffers::Buffers;
pub use common_result::Common;
pub use deadline::{DEFAULT_DEADLINE, from_now};
pub use error::{CommError, Operation, Party, Side};
pub use event::{Event, EventKind};
pub use flight_record::{Divergence, FlightRecord};
pub use group::Group;
pub use heap::Heap;
pub use job::{Job, Secret};
pub use local::{spawn, spawn_with_heap};
pub use mail::{About, Message};
pub use pending::{Outcome, Pending};
pub use probe::{Movement, Probe};
pub use progress::Note;
pub use recorder::{Name, Recorder};
pub use settings::is_strict;
#[doc(hidden)]
pub use small_list::SmallList;
pub use status::Cause;
pub use unseen::{UNSEEN_NOTE, note_trouble, report_unseen, take_unseen};
pub use world::{InitError, World, init};
