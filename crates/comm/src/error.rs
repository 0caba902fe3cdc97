//! Errors between ranks: their facts, and who is to blame. `consort_types::Failure` puts them into words.

use std::fmt;

use consort_types::{Failure, aligned, ranks_text};

/// One side of a call that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// The rank.
    pub rank: usize,
    /// What it called, or what it waits for.
    pub what: String,
    /// Its source line.
    pub site: String,
}

/// Ranks that made the same call at the same source line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Party {
    /// The ranks.
    pub ranks: Vec<usize>,
    /// What they called: op, reduction, element type, shape, root.
    pub what: String,
    /// Their source line.
    pub site: String,
}

/// An operation of a group, as errors name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A collective.
    Call {
        /// What was called; empty if that is not known any more.
        what: String,
        /// Its number.
        number: u64,
        /// Its group.
        group: String,
    },
    /// A batch of messages.
    Exchange,
    /// A write to memory that others still read.
    Write,
    /// A round of a [`Probe`](crate::Probe).
    Probe,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Call { what, number, group } if what.is_empty() => {
                write!(f, "call {number} on {group}")
            }
            Operation::Call { what, number, group } => write!(f, "{what}: call {number} on {group}"),
            Operation::Exchange => f.write_str("exchange"),
            Operation::Write => f.write_str("a write to memory that others still read"),
            Operation::Probe => f.write_str("probe"),
        }
    }
}

/// Why a call on a group gave no result. Calls are numbered per group, from 0, alike on every member.
#[derive(Clone, PartialEq, Eq)]
pub enum CommError {
    /// An argument is wrong here; nothing was started.
    Argument(Box<Failure>),
    /// The heap has no room.
    Exhausted {
        /// Bytes asked for.
        asked: usize,
        /// Bytes of the whole heap.
        of: usize,
        /// Bytes free in all.
        free: usize,
        /// Bytes free in one piece.
        largest: usize,
        /// Bytes of buffers that are in use here.
        used: usize,
        /// Bytes of dropped buffers that peers may still read.
        leased: usize,
        /// The ranks that may read them.
        readers: Vec<usize>,
    },
    /// The deadline passed before the members had done their part.
    Deadline {
        /// The operation.
        what: Box<Operation>,
        /// The ranks to blame: those that have not done their part and wait for nobody themselves.
        missing: Vec<usize>,
        /// The current or last operation of these ranks, and of those between.
        doing: Vec<Side>,
    },
    /// The deadline passed before peers had finished reading a buffer.
    Leased {
        /// A rank that has not finished.
        rank: usize,
    },
    /// Members made different calls.
    Mismatch {
        /// The number of the call, and its group.
        call: u64,
        /// The group.
        group: String,
        /// What differs.
        difference: &'static str,
        /// Which ranks called what, ordered by first rank.
        parties: Vec<Party>,
    },
    /// A member sends a different number of bytes than the receiver expects.
    Splits {
        /// The call.
        call: u64,
        /// The sender's side, then the receiver's.
        sides: Box<[Side; 2]>,
    },
    /// A message differs from what its receiver expects.
    Message {
        /// The sender's side, then the receiver's.
        sides: Box<[Side; 2]>,
    },
    /// A message was sent that nobody received.
    Unreceived {
        /// Who sent it.
        from: usize,
        /// To whom.
        to: usize,
        /// The tag.
        tag: u64,
        /// What was sent, and where.
        what: String,
        /// The sender's source line.
        site: String,
    },
    /// This rank left a group while others had made a call on it that it has not made.
    Skipped {
        /// This rank.
        rank: usize,
        /// The number of the call.
        call: u64,
        /// The group.
        group: String,
        /// Who made it.
        parties: Vec<Party>,
    },
    /// Ranks wait for one another in a cycle, so that none of them can ever continue.
    Deadlock {
        /// Each waits for the next one, the last for the first.
        cycle: Vec<Side>,
        /// Whether some wait for a send and others for a receive.
        has_messages: bool,
    },
    /// A member left the group without doing its part of an operation.
    Left {
        /// The rank.
        rank: usize,
        /// The operation.
        what: Box<Operation>,
        /// What this rank called, and where.
        called: Vec<Side>,
    },
    /// Another group of this rank failed.
    OtherGroup {
        /// Its error.
        error: Box<CommError>,
    },
    /// Another rank found an error that this one cannot see, and stopped.
    Elsewhere {
        /// The rank.
        rank: usize,
        /// Its error; empty if it did not say why.
        error: Box<Failure>,
        /// The ranks that it blames.
        culprits: Vec<usize>,
        /// Whether its error is a deadlock, which involves several ranks alike.
        is_deadlock: bool,
    },
    /// A rank of the world died, aborted or left, as the control plane reports it.
    World {
        /// The ranks that are to blame, if any is.
        culprits: Vec<usize>,
        /// What happened.
        error: Box<Failure>,
    },
    /// The machine refused a request.
    Machine(Box<Failure>),
    /// A rank panicked.
    Panicked {
        /// The first one.
        rank: usize,
    },
}

impl CommError {
    /// Whether it only follows from another failure: of another rank, or of another group.
    pub fn follows(&self) -> bool {
        matches!(
            self,
            CommError::Left { .. }
                | CommError::Elsewhere { .. }
                | CommError::World { .. }
                | CommError::Panicked { .. }
                | CommError::OtherGroup { .. }
        )
    }

    /// The ranks that are to blame, as far as that can be told.
    pub fn culprits(&self) -> Vec<usize> {
        match self {
            CommError::Argument(_) | CommError::Exhausted { .. } | CommError::Machine(_) => Vec::new(),
            CommError::Deadline { missing, .. } => missing.clone(),
            CommError::Mismatch { parties, .. } => fewest(parties),
            CommError::Splits { sides, .. } | CommError::Message { sides } => ranks_of(&**sides),
            CommError::Unreceived { from, to, .. } => vec![*from, *to],
            CommError::Deadlock { cycle, .. } => ranks_of(cycle),
            CommError::OtherGroup { error } => error.culprits(),
            CommError::Elsewhere { culprits, .. } => culprits.clone(),
            CommError::World { culprits, .. } => culprits.clone(),
            CommError::Leased { rank }
            | CommError::Left { rank, .. }
            | CommError::Skipped { rank, .. }
            | CommError::Panicked { rank } => vec![*rank],
        }
    }
}

/// The ranks of all parties but the largest; of all parties if none is the largest.
fn fewest(parties: &[Party]) -> Vec<usize> {
    let most = parties.iter().map(|party| party.ranks.len()).max().unwrap_or(0);
    let only = parties.iter().filter(|party| party.ranks.len() == most).count() == 1;
    let others = parties.iter().filter(|party| !only || party.ranks.len() < most);
    let mut ranks: Vec<usize> = others.flat_map(|party| party.ranks.iter().copied()).collect();
    ranks.sort_unstable();
    ranks
}

fn ranks_of(sides: &[Side]) -> Vec<usize> {
    let mut ranks: Vec<usize> = sides.iter().map(|side| side.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// The same text as `Display`, because a `main` that returns an error prints this.
impl fmt::Debug for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The note for calls that differ between members.
const ALIKE: &str = "every member must make the same calls in the same order; look for a branch on the rank, or on data that \
                     differ between ranks";

/// The note for messages without a matching end.
const MATCHED: &str = "every send needs a receive with its tag, and every receive a send";

impl CommError {
    /// The error as a [`Failure`], to which a caller adds its op and its source line.
    pub fn failure(&self) -> Box<Failure> {
        match self {
            CommError::Argument(failure) | CommError::Machine(failure) => failure.clone(),
            CommError::World { error, .. } => error.clone(),
            CommError::Exhausted { asked, of, free, largest, used, leased, readers } => {
                let by =
                    if readers.is_empty() { String::new() } else { format!(": {}", ranks_text(readers)) };
                let text = format!(
                    "{asked} bytes do not fit: of {of} bytes {free} are free, {largest} in one piece, {used} are in use \
                     here, and {leased} were dropped but wait for peers to finish reading{by}"
                );
                Failure::new(text).of("heap").note("drop buffers, or ask for a larger heap")
            }
            CommError::Deadline { what, missing, doing } => {
                Failure::new(format!("the deadline passed; missing: {}", ranks_text(missing)))
                    .of(what.to_string())
                    .rows(rows_of(doing))
                    .note(ALIKE)
            }
            CommError::Leased { rank } => {
                Failure::new(format!("the deadline passed while rank {rank} could still read it"))
                    .of("buffer")
                    .note("peers finish reading when they wait for the call")
            }
            CommError::Mismatch { call, group, difference, parties } => {
                Failure::new(format!("{difference} must be the same on all ranks"))
                    .of(format!("call {call} on {group}"))
                    .rows(rows_of_parties(parties))
                    .note(ALIKE)
            }
            CommError::Splits { call, sides } => Failure::new("splits must fit together")
                .of(format!("all_to_all: call {call}"))
                .rows(rows_of(&**sides))
                .note("`in_splits[j]` of rank i must equal `out_splits[i]` of rank j"),
            CommError::Message { sides } => {
                Failure::new("a message must have the type and shape that its receiver expects")
                    .of("exchange")
                    .rows(rows_of(&**sides))
                    .note("messages match by sender, receiver and tag, in order")
            }
            CommError::Unreceived { from, to, tag, what, site } => {
                let side = Side { rank: *from, what: message_text("send", what, *tag), site: site.clone() };
                Failure::new(format!("a message of rank {from} to rank {to} was never received"))
                    .of("exchange")
                    .rows(rows_of(&[side]))
                    .note(MATCHED)
            }
            CommError::Skipped { rank, call, group, parties } => {
                Failure::new(format!("rank {rank} left the group without making this call"))
                    .of(format!("call {call} on {group}"))
                    .rows(rows_of_parties(parties))
                    .note(ALIKE)
            }
            CommError::Deadlock { cycle, has_messages } => deadlock(cycle, *has_messages),
            CommError::OtherGroup { error } => error.failure().of("another group of this rank failed"),
            CommError::Left { rank, what, called } => {
                let note = if **what == Operation::Exchange { MATCHED } else { ALIKE };
                Failure::new(format!("rank {rank} left the group before it had done its part of this call"))
                    .of(what.to_string())
                    .rows(rows_of(called))
                    .note(note)
            }
            // A rank of the cycle did not stop because of another.
            CommError::Elsewhere { error, is_deadlock: true, .. } => error.clone(),
            CommError::Elsewhere { rank, error, .. } => Failure::elsewhere(*rank, error.to_string()),
            CommError::Panicked { rank } => {
                Failure::new(format!("rank {rank} panicked")).note("its own message says why")
            }
        }
    }
}

fn deadlock(cycle: &[Side], has_messages: bool) -> Box<Failure> {
    let failure = Failure::new("no rank can go on: each of these waits for the next")
        .of("deadlock")
        .rows(rows_of(cycle))
        .note("start the operations that others wait for before you wait yourself");
    let failure = match cycle {
        [_] => failure.note("a message to the own rank needs both a send and a receive before the wait"),
        _ => failure,
    };
    if !has_messages {
        return failure;
    }
    failure.note(
        "messages match by tag; and at most 16 messages of one rank to another may wait for receives: start these earlier, \
         or receive in the order of the sends",
    )
}

impl fmt::Display for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl std::error::Error for CommError {}

/// `send f32[4], tag 3`.
pub(crate) fn message_text(verb: &str, what: &str, tag: u64) -> String {
    let space = if what.is_empty() { "" } else { " " };
    format!("{verb}{space}{what}, tag {tag}")
}

/// An error on its way up. Boxed, so that results without an error are cheap to move.
pub(crate) type Stop = Box<CommError>;

pub(crate) fn rows_of(sides: &[Side]) -> Vec<String> {
    let row = |side: &Side| [format!("rank {}", side.rank), side.what.clone(), side.site.clone()];
    aligned(&sides.iter().map(row).collect::<Vec<_>>())
}

fn rows_of_parties(parties: &[Party]) -> Vec<String> {
    let row = |party: &Party| [ranks_text(&party.ranks), party.what.clone(), party.site.clone()];
    aligned(&parties.iter().map(row).collect::<Vec<_>>())
}

/// Calls of ranks, grouped where they are equal.
#[derive(Default)]
pub(crate) struct Parties(Vec<(u64, Party)>);

impl Parties {
    /// Adds the call of a rank, with a hash of what its text may not show.
    pub(crate) fn add(&mut self, rank: usize, what: String, site: String, hash: u64) {
        let same =
            |(other, party): &&mut (u64, Party)| *other == hash && party.what == what && party.site == site;
        match self.0.iter_mut().find(same) {
            Some((_, party)) => party.ranks.push(rank),
            None => self.0.push((hash, Party { ranks: vec![rank], what, site })),
        }
    }

    /// All parties. Those with equal texts are distinguished by their hashes.
    pub(crate) fn list(mut self) -> Vec<Party> {
        let texts: Vec<(u64, String)> =
            self.0.iter().map(|(hash, party)| (*hash, party.what.clone())).collect();
        for (hash, party) in &mut self.0 {
            if texts.iter().any(|(other, what)| *other != *hash && *what == party.what) {
                party.what += &format!(", digest {:04x}", *hash & 0xffff);
            }
        }
        self.0.into_iter().map(|(_, party)| party).collect()
    }
}
