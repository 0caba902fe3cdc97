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
use crate::mpi::engine::MpiGroup;
use crate::op::{Lists, Op};
use crate::recorder::Recorder;
use crate::request::Note;
use crate::settings::Settings;
use crate::shm::buffers::Buffers;
use crate::shm::common_result::Common;
use crate::shm::heap::Heap;
use crate::shm::mail::Parcel;
use crate::shm::progress::Shm;

/// What is waited for.
#[derive(Clone, Copy)]
pub(crate) enum Ticket {
    /// A collective, by its number.
    Call(u64),
    /// A batch of messages, by its number.
    Batch(u64),
    /// Nothing: the outcome was taken.
    Over,
}

/// What an operation gives back: its operands, then its results, and a common one.
pub(crate) type Given = (Buffers, Option<Box<Common>>);

/// A note, and the line of the call if the note has none.
pub(crate) type Said<'a> = (&'a Note, &'static Location<'static>);

/// One member's side of a group, and everything in flight on it.
pub(crate) trait Engine {
    /// The memory that takes part.
    fn heap(&self) -> &Arc<Heap>;
    fn recorder(&self) -> &Recorder;
    fn settings(&self) -> &Rc<Settings>;

    /// Starts a collective: its checked form, and its buffers, of which the first `count` are operands.
    fn start(
        &self,
        form: (Op, Option<Box<Lists>>),
        buffers: (Buffers, usize),
        common: bool,
        said: Said<'_>,
    ) -> Result<Ticket, CommError>;
    /// Starts a batch of messages.
    fn start_batch(&self, parcel: &mut Parcel, said: Said<'_>) -> Result<Ticket, CommError>;
    /// Advances everything in flight; never blocks.
    fn poll(&self) -> Result<(), CommError>;
    /// Advances everything in flight; true if one operation is over. Never blocks.
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
    /// Takes the outcome of an operation that is over, once.
    fn take(&self, ticket: Ticket) -> Option<Given>;
    /// Nobody waits for an operation any more. It completes all the same, and keeps its buffers until it has.
    fn abandon(&self, ticket: Ticket);
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
