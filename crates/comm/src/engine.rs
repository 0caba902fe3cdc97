//! The seam between a group and what moves its bytes. A [`Group`](crate::Group) numbers its members, checks arguments and
//! hands on; an engine starts, advances, compares and fails.
//!
//! Shared memory is one of the engines. It is called through a match and not through a table, so that a small call is
//! inlined as if it were the only one.

use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::CommError;
use crate::flight_record::FlightRecord;
use crate::message::Parcel;
use crate::mpi::engine::MpiGroup;
use crate::op::{Lists, Op};
use crate::recorder::Recorder;
use crate::request::Note;
use crate::settings::Settings;
use crate::shm::buffers::Buffers;
use crate::shm::common_result::Common;
use crate::shm::heap::Heap;
use crate::shm::progress::Shm;

/// An operation of a group, by its kind and number. It outlives the operation, so that its release can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ticket {
    /// A collective.
    Call(u64),
    /// A batch of messages.
    Batch(u64),
    /// None: the outcome was taken.
    Over,
}

/// What an operation gives back: its operands, then its results, and a common one.
pub(crate) type Given = (Buffers, Option<Box<Common>>);

/// A request that a group has checked: everything that an engine is told of a collective.
pub(crate) struct Checked<'a> {
    /// The compact form that a call keeps.
    pub(crate) op: Op,
    pub(crate) lists: Option<Box<Lists>>,
    /// The operands, and then the results.
    pub(crate) buffers: Buffers,
    /// How many of them are operands.
    pub(crate) count: usize,
    /// Whether the result is a common one.
    pub(crate) common: bool,
    pub(crate) note: &'a Note,
    /// The line of the call, if the note has none.
    pub(crate) site: &'static Location<'static>,
}

/// A note, and the line of the call if the note has none.
pub(crate) type Said<'a> = (&'a Note, &'static Location<'static>);

/// One member's side of a group, and everything in flight on it.
pub(crate) trait Engine {
    /// The memory that takes part.
    fn heap(&self) -> &Arc<Heap>;
    fn recorder(&self) -> &Recorder;
    fn settings(&self) -> &Rc<Settings>;

    /// Starts a collective.
    fn start(&self, request: Checked<'_>) -> Result<Ticket, CommError>;
    /// Starts a batch of messages.
    fn start_batch(&self, parcel: &mut Parcel, said: Said<'_>) -> Result<Ticket, CommError>;
    /// Advances everything in flight; never blocks.
    fn poll(&self) -> Result<(), CommError>;
    /// Advances everything in flight; true if one operation is over. Fails if it will never be, as a wait does, but has no
    /// deadline. Never blocks for long.
    fn test(&self, ticket: Ticket) -> Result<bool, CommError>;
    /// The outcome of an operation, if it is the only one open and finishes at once.
    fn finish_soon(&self, ticket: Ticket) -> Result<Option<Given>, CommError>;
    /// Blocks until an operation is over, at most until a deadline, after which the group is dead.
    fn wait(
        &self,
        ticket: Ticket,
        until: impl FnOnce() -> Instant,
        site: &'static Location<'static>,
    ) -> Result<(), CommError>;
    /// Whether an operation is over and no member will read its buffers any more. Never after an error before that.
    fn released(&self, ticket: Ticket) -> bool;
    /// Blocks until then, at most until a deadline.
    fn release(&self, ticket: Ticket, until: impl FnOnce() -> Instant) -> Result<(), CommError>;
    /// Takes the outcome of an operation that is over, once.
    fn take(&self, ticket: Ticket) -> Option<Given>;
    /// Nobody waits for an operation any more. It completes all the same, and keeps its buffers until it has.
    fn abandon(&self, ticket: Ticket);
    /// Ends this member's side, once: finishes what is in flight and tells the members that it leaves; or, with `abort`, stops
    /// at once. After that, as after an error, the group is dead, and what peers may still read stays lent.
    fn close(&self, abort: bool);
    /// Starts a thread that advances operations while this one computes; false if this engine has none, or no core for it.
    fn start_progress_thread(&self) -> bool {
        false
    }
    /// How many operations nobody waited for yet.
    fn in_flight(&self) -> usize;

    /// The number of the next collective.
    fn next(&self) -> u64;
    /// What this member brings to a new group of these members, if it is in one.
    fn offer(&self, list: Option<&[usize]>) -> Result<Offer, CommError>;
    /// The engine of a new group, made by call `made.0`: its members by their place in this one, and this member's number
    /// among them, if it is one. All members of this group have agreed on the lists, and `words` are what each offered.
    fn subgroup(
        &self,
        made: (u64, Instant),
        list: Option<(usize, &[usize])>,
        offer: Offer,
        words: &[u64],
    ) -> Result<Option<Made>, CommError>;
    /// The group's error, if it has failed and the program has not seen it. Marks it as seen.
    fn unseen(&self) -> Option<CommError>;
    /// What the flight recorders of these ranks hold, as far as they can be read.
    fn flight_record(&self, ranks: &[usize]) -> FlightRecord;
}

/// What a member brings to a new group: a word that the others learn, and the block of memory that it stands for.
pub(crate) struct Offer {
    pub(crate) word: u64,
    pub(crate) block: Option<(usize, usize)>,
}

/// A new group: its engine, this member's place, and the ranks of its members.
pub(crate) struct Made {
    pub(crate) engine: AnyEngine,
    pub(crate) me: usize,
    pub(crate) ranks: Vec<usize>,
}

/// The engine of a group.
#[derive(Clone)]
pub(crate) enum AnyEngine {
    /// Memory that the ranks of a host share.
    Shm(Rc<Shm>),
    /// The launcher's MPI.
    Mpi(Rc<MpiGroup>),
}

/// Calls a method of the engine that a group has.
macro_rules! with_engine {
    ($engine:expr, $name:ident => $call:expr) => {
        match $engine {
            crate::engine::AnyEngine::Shm($name) => $call,
            crate::engine::AnyEngine::Mpi($name) => $call,
        }
    };
}
pub(crate) use with_engine;
