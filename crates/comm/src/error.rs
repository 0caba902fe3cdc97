//! What can go wrong between ranks, in words.

use std::fmt;

/// One side of a call that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// The rank.
    pub rank: usize,
    /// What it called: op, reduction, element type, root, bytes.
    pub what: String,
    /// Its source line.
    pub site: String,
}

/// Why a call on a group gave no result. Calls are numbered per group, from 0, alike on every member.
#[derive(Clone, PartialEq, Eq)]
pub enum CommError {
    /// An argument is wrong here; nothing was started.
    Argument(String),
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
        /// The ranks that may.
        readers: Vec<usize>,
    },
    /// The time was over before the members had done their part.
    Deadline {
        /// The operation.
        what: String,
        /// The ranks that have not.
        missing: Vec<usize>,
        /// What these are in, or did last.
        doing: Vec<Side>,
    },
    /// The time was over before peers had finished reading a buffer.
    Leased {
        /// One that has not.
        rank: usize,
    },
    /// Two members called different things.
    Mismatch {
        /// The call.
        call: u64,
        /// Who found it, and whose call is another, by their places in the group.
        members: (usize, usize),
        /// Both sides, by rank.
        sides: Box<[Side; 2]>,
    },
    /// A member sends another number of bytes than the other expects.
    Splits {
        /// The call.
        call: u64,
        /// The sender's side, then the receiver's.
        sides: Box<[Side; 2]>,
    },
    /// A message has another length than its receiver expects.
    Lengths {
        /// The sender's side, then the receiver's.
        sides: Box<[Side; 2]>,
    },
    /// A member has left the group without its part of an operation.
    Left {
        /// The rank.
        rank: usize,
        /// The operation.
        what: String,
    },
    /// Another group of this rank failed.
    OtherGroup {
        /// Its error.
        error: Box<CommError>,
    },
    /// Another rank found an error that only it can see, and stopped.
    Elsewhere {
        /// The rank.
        rank: usize,
        /// Its error.
        error: String,
    },
    /// A rank of the world died, aborted or left, in the words of whoever watches over them.
    World(String),
    /// The machine did not give what was asked of it.
    Machine(String),
    /// A rank panicked.
    Panicked {
        /// The first one.
        rank: usize,
    },
}

/// The same text: it is what a program prints whose `main` gives an error.
impl fmt::Debug for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommError::Argument(message) | CommError::World(message) | CommError::Machine(message) => {
                f.write_str(message)
            }
            CommError::Exhausted { asked, of, free, largest, used, leased, readers } => {
                write!(
                    f,
                    "heap: {asked} bytes do not fit: of {of} bytes {free} are free, {largest} in one piece, {used} are in use here, and {leased} were dropped but wait for peers to finish reading"
                )?;
                if !readers.is_empty() {
                    write!(f, ": {}", ranks_text(readers))?;
                }
                f.write_str("\n  note: drop buffers, or ask for a larger heap")
            }
            CommError::Deadline { what, missing, doing } => {
                write!(f, "{what}: the deadline passed; missing: {}", ranks_text(missing))?;
                write_sides(f, doing)?;
                f.write_str("\n  note: every member makes the same calls in the same order")
            }
            CommError::Leased { rank } => write!(
                f,
                "buffer: the deadline passed while rank {rank} could still read it\n  note: peers finish reading when they wait for the call"
            ),
            CommError::Mismatch { call, sides, .. } => {
                write!(f, "call {call} differs between ranks")?;
                write_sides(f, &**sides)?;
                write!(f, "\n  note: every member makes the same calls in the same order")
            }
            CommError::Splits { call, sides } => {
                write!(f, "all_to_all: call {call}: a part has another size than its receiver expects")?;
                write_sides(f, &**sides)
            }
            CommError::Lengths { sides } => {
                f.write_str("exchange: a message has another length than its receiver expects")?;
                write_sides(f, &**sides)
            }
            CommError::OtherGroup { error } => write!(f, "another group of this rank failed: {error}"),
            CommError::Left { rank, what } => write!(
                f,
                "{what}: rank {rank} has left the group without its part of it\n  note: every member makes the same calls in the same order"
            ),
            CommError::Elsewhere { rank, error } if error.is_empty() => write!(f, "rank {rank} stopped"),
            CommError::Elsewhere { rank, error } => write!(f, "rank {rank} stopped: {error}"),
            CommError::Panicked { rank } => {
                write!(f, "rank {rank} panicked\n  note: its own message says why")
            }
        }
    }
}

impl std::error::Error for CommError {}

/// An error on its way up. It is boxed, because what carries it is otherwise copied about where all goes well.
pub(crate) type Stop = Box<CommError>;

fn write_sides(f: &mut fmt::Formatter<'_>, sides: &[Side]) -> fmt::Result {
    for side in sides {
        write!(f, "\n  rank {}  {}  {}", side.rank, side.what, side.site)?;
    }
    Ok(())
}

/// `rank 2`, `ranks 0,1,3`.
pub(crate) fn ranks_text(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(","))
}
