//! Groups of ranks, and the data they exchange.
//!
//! This crate knows nothing of programs: it moves and sums numbers for whoever asks, and does not depend on
//! the crate that defines ops. Today ranks are threads of one process (`local.rs`). Symmetric memory,
//! processes, the launcher and the control plane are not built yet.
#![forbid(unsafe_code)]

mod local;

pub use local::{Group, Pending, spawn};

use std::fmt;

/// Why a call on a group gave no result. Calls are numbered per group, from 0, alike on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommError {
    /// The deadline passed before every rank had made the call.
    Deadline {
        /// The number of the call.
        call: u64,
        /// The ranks that have not made it.
        missing: Vec<usize>,
    },
    /// A rank brought another number of elements than those before it. Every rank gets the same error.
    Lengths {
        /// The number of the call.
        call: u64,
        /// The ranks that agreed so far.
        ranks: Vec<usize>,
        /// How many elements they brought.
        length: usize,
        /// The rank that came next, and how many it brought.
        other: (usize, usize),
    },
    /// A rank panicked before every rank had made the call.
    Panicked {
        /// The number of the call.
        call: u64,
        /// The rank that panicked first.
        rank: usize,
    },
}

impl fmt::Display for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommError::Deadline { call, missing } => {
                let missing = ranks_text(missing);
                writeln!(f, "all_reduce: call {call}: the deadline passed; missing: {missing}")?;
                f.write_str("  note: every rank of a group makes the same calls in the same order")
            }
            CommError::Lengths { call, ranks, length, other: (rank, other) } => {
                let ranks = ranks_text(ranks);
                write!(f, "all_reduce: call {call}: expected equal lengths, got {length} on {ranks}")?;
                write!(f, " and {other} on rank {rank}\n  note: pad the data of all ranks to one length")
            }
            CommError::Panicked { call, rank } => {
                write!(f, "all_reduce: call {call}: rank {rank} panicked\n  note: its own message says why")
            }
        }
    }
}

impl std::error::Error for CommError {}

fn ranks_text(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(","))
}
