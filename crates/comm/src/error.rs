//! Errors between ranks, and their texts.

use std::fmt;

use crate::control::write_rows;

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
        /// The ranks that may read them.
        readers: Vec<usize>,
    },
    /// The deadline passed before the members had done their part.
    Deadline {
        /// The operation.
        what: String,
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
    },
    /// A member left the group without doing its part of an operation.
    Left {
        /// The rank.
        rank: usize,
        /// The operation.
        what: String,
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
        /// Its error.
        error: String,
        /// The ranks that it blames.
        culprits: Vec<usize>,
    },
    /// A rank of the world died, aborted or left, as the control plane reports it.
    World {
        /// The ranks that are to blame, if any is.
        culprits: Vec<usize>,
        /// What happened.
        error: String,
    },
    /// The machine refused a request.
    Machine(String),
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
            CommError::Deadlock { cycle } => ranks_of(cycle),
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
const ALIKE: &str = "\n  note: every member must make the same calls in the same order; look for a branch on the rank, or on \
                     data that differ between ranks";

/// The note for messages without a matching end.
const MATCHED: &str = "\n  note: every send needs a receive with its tag, and every receive a send";

impl fmt::Display for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommError::Argument(message) | CommError::Machine(message) => f.write_str(message),
            CommError::World { error, .. } => f.write_str(error),
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
                f.write_str(ALIKE)
            }
            CommError::Leased { rank } => write!(
                f,
                "buffer: the deadline passed while rank {rank} could still read it\n  note: peers finish reading when they wait for the call"
            ),
            CommError::Mismatch { call, group, difference, parties } => {
                write!(f, "call {call} on {group}: {difference} must be the same on all ranks")?;
                write_parties(f, parties)?;
                f.write_str(ALIKE)
            }
            CommError::Splits { call, sides } => {
                write!(f, "all_to_all: call {call}: splits must fit together")?;
                write_sides(f, &**sides)?;
                f.write_str("\n  note: what a rank sends to another must be what that one expects of it")
            }
            CommError::Message { sides } => {
                f.write_str("exchange: a message must have the type and shape that its receiver expects")?;
                write_sides(f, &**sides)?;
                f.write_str("\n  note: messages match by sender, receiver and tag, in order")
            }
            CommError::Unreceived { from, to, tag, what, site } => {
                write!(f, "exchange: a message of rank {from} to rank {to} was never received")?;
                let what = if what.is_empty() { String::new() } else { format!("{what}, ") };
                write_sides(
                    f,
                    &[Side { rank: *from, what: format!("send {what}tag {tag}"), site: site.clone() }],
                )?;
                f.write_str(MATCHED)
            }
            CommError::Skipped { rank, call, group, parties } => {
                write!(f, "call {call} on {group}: rank {rank} left without making it")?;
                write_parties(f, parties)?;
                f.write_str(ALIKE)
            }
            CommError::Deadlock { cycle } => {
                f.write_str("deadlock: no rank can go on: each of these waits for the next")?;
                write_sides(f, cycle)?;
                f.write_str("\n  note: start the operations that others wait for before you wait yourself")?;
                let has = |word: &str| cycle.iter().any(|side| side.what.starts_with(word));
                if has("send ") && has("receive ") {
                    f.write_str(
                        "\n  note: messages match by tag; and at most 16 messages of one rank to another may wait for \
                         receives: start these earlier, or receive in the order of the sends",
                    )?;
                }
                Ok(())
            }
            CommError::OtherGroup { error } => write!(f, "another group of this rank failed: {error}"),
            CommError::Left { rank, what, called } => {
                write!(f, "{what}: rank {rank} has left the group without its part of it")?;
                write_sides(f, called)?;
                f.write_str(if what.starts_with("exchange") { MATCHED } else { ALIKE })
            }
            CommError::Elsewhere { rank, error, .. } if error.is_empty() => write!(f, "rank {rank} stopped"),
            // A rank in the cycle did not stop because of another.
            CommError::Elsewhere { error, .. } if error.starts_with("deadlock: ") => f.write_str(error),
            CommError::Elsewhere { rank, error, .. } => {
                write!(f, "rank {rank} stopped: {}", error.replace("\n  ", "\n    "))
            }
            CommError::Panicked { rank } => {
                write!(f, "rank {rank} panicked\n  note: its own message says why")
            }
        }
    }
}

impl std::error::Error for CommError {}

/// An error on its way up. Boxed, so that results without an error are cheap to move.
pub(crate) type Stop = Box<CommError>;

fn write_sides(f: &mut fmt::Formatter<'_>, sides: &[Side]) -> fmt::Result {
    let row = |side: &Side| [format!("rank {}", side.rank), side.what.clone(), side.site.clone()];
    write_rows(f, &sides.iter().map(row).collect::<Vec<_>>())
}

fn write_parties(f: &mut fmt::Formatter<'_>, parties: &[Party]) -> fmt::Result {
    let row = |party: &Party| [ranks_text(&party.ranks), party.what.clone(), party.site.clone()];
    write_rows(f, &parties.iter().map(row).collect::<Vec<_>>())
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

/// `rank 2`, `ranks 0,1,3`.
pub(crate) fn ranks_text(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(","))
}
