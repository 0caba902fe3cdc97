//! The messages of the control plane, as bytes.
//!
//! A frame is a kind (1 byte), the number of file descriptors that come with it (2 bytes), the length of its body (4
//! bytes), both little-endian, and the body: the message as postcard encodes it, whose variant number (from 1) is the
//! kind. Each kind has a limit for its body and for its descriptors, which is checked as soon as the header has
//! arrived: a peer cannot make us hold more than the limit. A buffer grows with the bytes that arrive, never by a
//! claimed length; a list reserves room for no more items than bytes are left.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use postcard::fixint::le;
use serde::{Deserialize, Serialize};

use super::failure::JobFailure;

/// Maximum bytes of a blob that a rank may bring to a meeting.
pub const MAX_BLOB: usize = 64 * 1024;
/// Maximum bytes of a call's name, and of a source line.
pub(crate) const MAX_NAME: usize = 256;
/// Maximum bytes of the reason for an abort.
pub(crate) const MAX_REASON: usize = 2048;
/// Changes whenever the messages do.
pub(super) const PROTOCOL: u8 = 5;

const HEADER: usize = 7;

/// The messages between a rank and the coordinator. A kind is the number of its variant, from 1.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// From a rank, first: its claim to a rank. Its length does not depend on the number, so that its limit is exact.
    Hello {
        protocol: u8,
        #[serde(with = "le")]
        rank: u32,
        #[serde(with = "le")]
        size: u32,
        secret: [u8; 16],
    },
    /// From a rank: it arrived at a meeting, and waits at most `milliseconds`. Carries at most one descriptor.
    Meet { name: String, site: String, milliseconds: u64, blob: Vec<u8> },
    /// From a rank: it aborts the job.
    Abort { reason: String, site: String },
    /// From a rank: it is done; its connection closes next.
    Goodbye,
    /// From the coordinator: the claim is accepted. Says whether a launcher runs the coordinator, or rank 0.
    Welcome { launched: bool },
    /// From the coordinator, to a peer that knows the secret: the claim is rejected, for this reason.
    Refused { reason: String },
    /// From the coordinator: all arrived. For each rank its process, whether its descriptor is attached, its blob.
    Met { peers: Vec<(u32, bool, Vec<u8>)> },
    /// From the coordinator: the job failed.
    Failed(JobFailure),
    /// From the coordinator: it ends normally.
    Closing,
}

/// The reader of a connection, which decides which messages are allowed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reader {
    /// The coordinator, reading from a peer that has not shown the secret.
    Lobby,
    /// The coordinator, reading from a rank.
    Coordinator,
    /// A rank of a world of this size.
    Rank(usize),
}

impl Reader {
    /// The maximum body and number of descriptors of a kind for this reader; `None` if the kind is not allowed.
    fn limits(self, kind: u8) -> Option<(usize, usize)> {
        Some(match (self, kind) {
            (Reader::Lobby, 1) => (25, 0),
            (Reader::Coordinator, 2) => (MAX_BLOB + 2 * MAX_NAME + 64, 1),
            (Reader::Coordinator, 3) => (MAX_REASON + MAX_NAME + 64, 0),
            (Reader::Coordinator, 4) => (0, 0),
            (Reader::Rank(_), 5) => (1, 0),
            (Reader::Rank(_), 9) => (0, 0),
            (Reader::Rank(_), 6) => (MAX_REASON, 0),
            (Reader::Rank(size), 7) => (8 + size * (MAX_BLOB + 16), size),
            (Reader::Rank(size), 8) => (2 * MAX_REASON + size * (2 * MAX_NAME + 32), 0),
            _ => return None,
        })
    }
}

/// The received bytes are not a message that is allowed here.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Garbage;

/// Received bytes and descriptors that are not decoded yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    pub(crate) bytes: VecDeque<u8>,
    pub(crate) fds: VecDeque<OwnedFd>,
}

impl Inbox {
    /// The next message with its descriptors, if it has arrived completely.
    pub(super) fn next(&mut self, reader: Reader) -> Result<Option<(Message, Vec<OwnedFd>)>, Garbage> {
        if self.bytes.len() < HEADER {
            // A stranger is not given time to complete a header that is already wrong.
            return match self.bytes.front() {
                Some(kind) if reader.limits(*kind).is_none() => Err(Garbage),
                _ => Ok(None),
            };
        }
        let head: [u8; HEADER] = std::array::from_fn(|i| self.bytes[i]);
        let fds = usize::from(u16::from_le_bytes([head[1], head[2]]));
        let length = u32::from_le_bytes([head[3], head[4], head[5], head[6]]) as usize;
        let (longest, most_fds) = reader.limits(head[0]).ok_or(Garbage)?;
        if length > longest || fds > most_fds {
            return Err(Garbage);
        }
        if self.bytes.len() < HEADER + length {
            return Ok(None);
        }
        let frame: Vec<u8> = self.bytes.drain(..HEADER + length).collect();
        // Descriptors arrive with the bytes of their frame, so they are there.
        if self.fds.len() < fds {
            return Err(Garbage);
        }
        let message = decode(head[0], &frame[HEADER..]).ok_or(Garbage)?;
        Ok(Some((message, self.fds.drain(..fds).collect())))
    }
}

impl Message {
    /// The frame of a message that carries `fds` descriptors.
    pub(super) fn encode(&self, fds: usize) -> Vec<u8> {
        // The byte before the body is for postcard's variant number.
        let mut frame = bytes_after(vec![0; HEADER - 1], self);
        let (kind, length) = (frame[HEADER - 1] + 1, (frame.len() - HEADER) as u32);
        frame[0] = kind;
        frame[1..3].copy_from_slice(&(fds as u16).to_le_bytes());
        frame[3..HEADER].copy_from_slice(&length.to_le_bytes());
        frame
    }
}

/// The message of a body; `None` unless every byte of it is used.
fn decode(kind: u8, body: &[u8]) -> Option<Message> {
    let message = whole(&[&[kind.checked_sub(1)?], body].concat())?;
    let other = matches!(message, Message::Hello { protocol, .. } if protocol != PROTOCOL);
    (!other).then_some(message)
}

/// The bytes, followed by the encoding of a value.
fn bytes_after(bytes: Vec<u8>, value: &(impl Serialize + ?Sized)) -> Vec<u8> {
    postcard::to_extend(value, bytes).expect("texts, numbers and lists have bytes")
}

/// The value that is encoded by exactly these bytes.
fn whole<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    let (value, rest) = postcard::take_from_bytes(bytes).ok()?;
    rest.is_empty().then_some(value)
}

/// The longest prefix of a text that fits into `limit` bytes.
pub(super) fn shortened(text: &str, limit: usize) -> String {
    let end = (0..=limit.min(text.len())).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    text[..end].to_string()
}

/// Key and value pairs as the blob of a meeting.
pub(super) fn encode_pairs(pairs: &[(String, String)]) -> Vec<u8> {
    bytes_after(Vec::new(), pairs)
}

/// The pairs of such a blob.
pub(super) fn decode_pairs(blob: &[u8]) -> Option<Vec<(String, String)>> {
    whole(blob)
}

#[cfg(test)]
mod tests {
    use consort_types::{Failure, Rng};

    use super::*;
    use crate::cause::Cause;
    use crate::control::failure::{Exit, What};

    fn failure(rank: Option<usize>, what: What) -> Message {
        Message::Failed(JobFailure { rank, what, at: "barrier \"a\"".to_string() })
    }

    fn all() -> Vec<(Message, Reader)> {
        let secret = [9; 16];
        let rank = Reader::Rank(3);
        let differs = vec![("a".into(), "x.rs:1".into(), vec![0, 2]), ("b".into(), "x.rs:2".into(), vec![1])];
        vec![
            (Message::Hello { protocol: PROTOCOL, rank: 2, size: 3, secret }, Reader::Lobby),
            (
                Message::Meet { name: "n".into(), site: "s".into(), milliseconds: 1 << 40, blob: vec![1, 2] },
                Reader::Coordinator,
            ),
            (Message::Abort { reason: "r".into(), site: "s".into() }, Reader::Coordinator),
            (Message::Goodbye, Reader::Coordinator),
            (Message::Welcome { launched: true }, rank),
            (Message::Welcome { launched: false }, rank),
            (Message::Refused { reason: "r".into() }, rank),
            (Message::Met { peers: vec![(1, false, vec![]), (2, false, vec![3; 300])] }, rank),
            (failure(None, What::Lost), rank),
            (failure(Some(0), What::Left), rank),
            (failure(Some(1), What::Ended(Exit::Code(-3))), rank),
            (failure(Some(1), What::Ended(Exit::Signal(9))), rank),
            (failure(Some(1), What::Aborted("r".into())), rank),
            (failure(Some(1), What::Late(vec![1, 2])), rank),
            (failure(Some(1), What::Caused(Cause::new(2, Failure::new("t").note("n"), vec![1, 0]))), rank),
            (failure(Some(1), What::Differs(differs)), rank),
            (Message::Closing, rank),
        ]
    }

    #[test]
    fn every_message_is_read_back_and_no_cut_of_it_is_one() {
        for (message, reader) in all() {
            let frame = message.encode(0);
            let mut inbox = Inbox::default();
            for byte in &frame[..frame.len() - 1] {
                inbox.bytes.push_back(*byte);
                assert_eq!(inbox.next(reader).unwrap().map(|(message, _)| message), None);
            }
            inbox.bytes.push_back(frame[frame.len() - 1]);
            assert_eq!(inbox.next(reader).unwrap().unwrap().0, message);
            // A body that is too short or too long is rejected, and none panics.
            for length in 0..frame.len() - HEADER {
                assert_eq!(decode(frame[0], &frame[HEADER..HEADER + length]), None, "{message:?}");
            }
            assert_eq!(decode(frame[0], &[&frame[HEADER..], &[0]].concat()), None, "{message:?}");
        }
    }

    #[test]
    fn no_body_makes_a_panic() {
        let mut rng = Rng::new(1);
        for _ in 0..20_000 {
            let small = rng.one_in(2);
            let body: Vec<u8> =
                (0..rng.below(40)).map(|_| rng.next_u64() as u8 % if small { 4 } else { 255 }).collect();
            decode(rng.below(11) as u8, &body);
            decode_pairs(&body);
        }
        // A list that claims more items than there are bytes.
        assert_eq!(decode(7, &[255, 255, 255, 255, 255, 255, 255, 255, 255, 1]), None);
    }

    #[test]
    fn limits_are_checked_at_the_header() {
        let read = |reader: Reader, head: [u8; HEADER]| {
            let mut inbox = Inbox { bytes: head.into(), fds: VecDeque::new() };
            inbox.next(reader).map(|_| ())
        };
        // The reader waits for a hello of 25 bytes, and rejects one of 26, one with a descriptor and any other kind.
        assert_eq!(read(Reader::Lobby, [1, 0, 0, 25, 0, 0, 0]), Ok(()));
        assert_eq!(read(Reader::Lobby, [1, 0, 0, 26, 0, 0, 0]), Err(Garbage));
        assert_eq!(read(Reader::Lobby, [1, 1, 0, 25, 0, 0, 0]), Err(Garbage));
        assert_eq!(read(Reader::Lobby, [2, 0, 0, 25, 0, 0, 0]), Err(Garbage));
        assert_eq!(read(Reader::Coordinator, [2, 1, 0, 0, 0, 1, 0]), Ok(()));
        assert_eq!(read(Reader::Coordinator, [2, 2, 0, 0, 0, 1, 0]), Err(Garbage));
        assert_eq!(read(Reader::Coordinator, [2, 1, 0, 0, 0, 2, 0]), Err(Garbage));
        assert_eq!(read(Reader::Rank(2), [7, 0, 0, 255, 255, 255, 255]), Err(Garbage));
        let mut first = Inbox { bytes: [0xff].into(), fds: VecDeque::new() };
        assert!(first.next(Reader::Lobby).is_err(), "one wrong byte is enough");
    }

    #[test]
    fn pairs_are_read_back() {
        let pairs = vec![("a".to_string(), "1".to_string()), ("b".to_string(), String::new())];
        assert_eq!(decode_pairs(&encode_pairs(&pairs)), Some(pairs));
        assert_eq!(decode_pairs(&[1, 255, 255, 255, 255, 15]), None);
    }
}
