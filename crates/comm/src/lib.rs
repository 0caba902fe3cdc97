//! Groups of ranks, and the data they exchange.
//!
//! This crate knows nothing of programs: it moves and reduces bytes, and does not depend on the crate that defines ops.
//!
//! - `launch` starts processes as ranks; `env` tells a process which rank it is.
//! - `control` is how ranks find one another, agree on settings and learn of a death, apart from any data.
//! - [`init`] does all of it for a program, and gives it a [`World`]; [`World::group`] gives it the group of all ranks.
//! - A [`Group`] starts operations on [`Buffer`]s of a rank's [`Heap`], which peers read in place: over memory that
//!   processes map, or between threads ([`spawn`]), with one set of algorithms (`shm/call.rs`, `shm/algorithms/`,
//!   `shm/mail.rs`).
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

mod all_groups;
mod arguments;
mod cause;
mod collectives;
pub mod control;
mod cores;
mod deadline;
mod engine;
pub mod env;
mod error;
mod event;
mod exit;
mod flight_record;
mod group;
mod job;
mod kernels;
pub mod launch;
mod limits;
mod message;
pub mod mpi;
mod op;
mod pending;
mod recorder;
mod request;
mod settings;
mod shm;
mod small_list;
mod subgroup;
mod sync;
mod ticks;
mod unseen;
mod world;

pub use all_groups::look;
pub use arguments::OperandType;
pub use cause::Cause;
pub use deadline::{Clock, DEFAULT_DEADLINE, after, from_now};
pub use engine::Ticket;
pub use error::{CommError, Operation, Party, Side};
pub use event::{Event, EventKind};
pub use flight_record::{Divergence, FlightRecord};
pub use group::Group;
pub use job::{Job, Secret};
pub use message::{About, Message};
pub use pending::{Outcome, Pending};
pub use recorder::{Name, Recorder};
pub use request::{Note, Request};
pub use settings::is_strict;
pub use shm::buffer::{Buffer, Bytes, BytesMut};
pub use shm::buffers::Buffers;
pub use shm::common_result::Common;
pub use shm::heap::Heap;
pub use shm::local::{spawn, spawn_with_heap, try_spawn};
pub use shm::probe::{Movement, Probe};
#[doc(hidden)]
pub use small_list::SmallList;
pub use unseen::{UNSEEN_NOTE, note_trouble, report_unseen, take_unseen};
pub use world::{InitError, World, init};
