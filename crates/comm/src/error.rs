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
#[derive(Clone, Debug, PartialEq, Eq)]
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
        /// Bytes of dropped buffers that peers may still read.
        leased: usize,
    },
    /// The time was over before the members had done their part.
    Deadline {
        /// The operation.
        what: String,
        /// The ranks that have not.
        missing: Vec<usize>,
    },
    /// The time was over before peers had finished reading a buffer.
    Leased,
    /// Two members called different things.
    Mismatch {
        /// The call.
        call: u64,
        /// Both sides, by rank.
        sides: Box<[Side; 2]>,
    },
    /// A member sends another number of bytes than the other expects.
    Splits {
        /// The call.
        call: u64,
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Bytes sent.
        sent: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// A message has another length than its receiver expects.
    Lengths {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// The tag.
        tag: u64,
        /// Bytes sent.
        sent: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// Another rank found an error in a message and stopped.
    Elsewhere {
        /// The rank.
        rank: usize,
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

impl fmt::Display for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommError::Argument(message) | CommError::World(message) | CommError::Machine(message) => f.write_str(message),
            CommError::Exhausted { asked, of, free, largest, leased } => write!(
                f,
                "heap: {asked} bytes do not fit: of {of} bytes {free} are free, {largest} in one piece, and {leased} wait for peers to finish reading\n  \
                 note: drop buffers, or ask for a larger heap"
            ),
            CommError::Deadline { what, missing } => write!(
                f,
                "{what}: the deadline passed; missing: {}\n  note: every member makes the same calls in the same order",
                ranks_text(missing)
            ),
            CommError::Leased => f.write_str(
                "buffer: the deadline passed while peers could still read it\n  note: peers finish reading when they wait for the call",
            ),
            CommError::Mismatch { call, sides } => {
                write!(f, "call {call} differs between ranks")?;
                for side in &**sides {
                    write!(f, "\n  rank {}  {}  {}", side.rank, side.what, side.site)?;
                }
                write!(f, "\n  note: every member makes the same calls in the same order")
            }
            CommError::Splits { call, from, to, sent, expected } => write!(
                f,
                "all_to_all: call {call}: member {from} sends {sent} bytes to member {to}, which expects {expected}"
            ),
            CommError::Lengths { from, to, tag, sent, expected } => {
                write!(
                    f,
                    "exchange: member {from} sends {sent} bytes with tag {tag} to member {to}, which expects {expected}"
                )
            }
            CommError::Elsewhere { rank } => write!(f, "rank {rank} stopped: its own error says why"),
            CommError::Panicked { rank } => {
                write!(f, "rank {rank} panicked\n  note: its own message says why")
            }
        }
    }
}

impl std::error::Error for CommError {}

/// `rank 2`, `ranks 0,1,3`.
pub(crate) fn ranks_text(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(","))
}
