//! Whether the members make the same call, where that is checked: in debug builds, or as `CONSORT_CHECK` says. Each then
//! tells all others what it calls, and its data begin to move only when all agree: a call takes one small gather more,
//! about as long as a small call. A common result of a broadcast is always compared: only the root knows its size.
//!
//! What members agree on is compared in every build: to make groups and to compile functions by the same gather, since both
//! are rare, and before a compiled call by its envelope.

use consort_types::{Digest, Dtype, Reduce};

use crate::error::{CommError, Parties};
use crate::mpi::comm::Comm;
use crate::mpi::engine::MpiGroup;
use crate::mpi::error::MpiError;
use crate::mpi::flight::Flight;
use crate::mpi::span::Span;
use crate::op::Key;
use crate::shm::buffer::Buffer;

/// The bytes that a member tells: three words, then two texts.
const RECORD: usize = 320;
const WORDS: usize = 24;

/// A comparison in flight.
pub(super) struct Comparison(Flight);

/// What one member called.
struct Called {
    key: Key,
    text: String,
    site: String,
}

fn record(key: Key, text: &str, site: &str) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        [key.what, key.extra, key.bytes].iter().flat_map(|word| word.to_le_bytes()).collect();
    let clipped =
        |text: &str, most: usize| text.chars().filter(|c| *c != '\0').take(most).collect::<String>();
    let texts = format!("{}\0{}\0", clipped(text, 180), clipped(site, 80));
    bytes.extend_from_slice(texts.as_bytes());
    bytes.resize(RECORD, 0);
    bytes
}

fn called(record: &[u8]) -> Called {
    let word = |i: usize| record[i * 8..].first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let text = String::from_utf8_lossy(&record[WORDS..]).into_owned();
    let mut texts = text.split('\0').map(str::to_string);
    let mut next = || texts.next().unwrap_or_default();
    Called { key: Key { what: word(0), extra: word(1), bytes: word(2) }, text: next(), site: next() }
}

impl Comparison {
    pub(super) fn start(comm: &Comm, key: Key, text: &str, site: &str) -> Result<Comparison, MpiError> {
        let mine = Span::bytes_of(record(key, text, site));
        comm.all_gather(mine, Span::bytes_of(vec![0; RECORD * comm.size()])).map(Comparison)
    }

    pub(super) fn test(&mut self) -> Result<bool, MpiError> {
        self.0.test()
    }

    /// The bytes of the operand that a member brings.
    pub(super) fn bytes(&self, member: usize) -> usize {
        called(&self.0.span(1).bytes()[member * RECORD..][..RECORD]).key.bytes as usize
    }

    /// The error if not all agree with this member's call.
    pub(super) fn mismatch(&self, group: &MpiGroup, number: u64, mine: Key) -> Option<CommError> {
        let all: Vec<Called> = self.0.span(1).bytes().chunks_exact(RECORD).map(called).collect();
        all.iter().find(|other| !mine.agrees(other.key))?;
        // The same on all members: the first that differs from the first.
        let first = all[0].key;
        let other = all.iter().find(|other| !first.agrees(other.key)).map_or(mine, |other| other.key);
        let mut parties = Parties::default();
        for (member, Called { key, text, site }) in all.into_iter().enumerate() {
            let what = if text.is_empty() { key.describe() } else { text };
            parties.add(group.ranks[member], what, site, key.extra);
        }
        let (difference, group) = (first.difference(other), group.recorder.group_name().to_string());
        Some(CommError::Mismatch { call: number, group, difference, parties: parties.list() })
    }
}

/// The bytes of an envelope that are reduced with the digest. Those of ranks without roles have no more.
const WORDS_BESIDE: usize = 16;

/// The envelope of a compiled call, which is a max-reduction of words, where calls are not compared: a digest of the call, its
/// complement, and the first words. All members have the same digest exactly if both come back unchanged. Its length
/// is fixed, so that members whose envelopes differ in length find that out too.
pub(super) struct Envelope {
    flight: Flight,
    pair: [u64; 2],
}

/// What an envelope has reduced.
pub(super) enum Reduced {
    /// All words.
    All,
    /// The first ones, of more.
    Some,
    /// Nothing: the members make different calls.
    Differs,
}

impl Envelope {
    pub(super) fn start(comm: &Comm, key: Key, operand: &Buffer) -> Result<Envelope, MpiError> {
        let mut digest = Digest::default();
        digest.add_all([key.what, key.extra, key.bytes]);
        let pair = [digest.get(), !digest.get()];
        let mut bytes: Vec<u8> = pair.iter().flat_map(|word| word.to_le_bytes()).collect();
        let words = Span::of(operand);
        bytes.extend(words.bytes().iter().take(WORDS_BESIDE));
        bytes.resize(size_of_val(&pair) + WORDS_BESIDE, 0);
        let flight = comm.all_reduce(Span::bytes_of(bytes), Dtype::I64, Reduce::Max)?;
        Ok(Envelope { flight, pair })
    }

    pub(super) fn test(&mut self) -> Result<bool, MpiError> {
        self.flight.test()
    }

    /// Writes the words that it has reduced to the operand, if the members make the same call.
    pub(super) fn write(&self, operand: &Buffer) -> Reduced {
        let (pair, words) = self.flight.span(0).bytes().split_at(size_of_val(&self.pair));
        if pair != self.pair.map(u64::to_le_bytes).as_flattened() {
            return Reduced::Differs;
        }
        if operand.len() > WORDS_BESIDE {
            return Reduced::Some;
        }
        Span::of(operand).bytes_mut().copy_from_slice(&words[..operand.len()]);
        Reduced::All
    }
}
