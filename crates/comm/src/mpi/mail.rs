//! Batches of messages over MPI. A message is one of MPI's, with its tag; where calls are compared, a header on another
//! communicator says what it is, so that its receiver can tell what differs.

use smallvec::SmallVec;

use crate::error::{CommError, Side, message_text};
use crate::message::{End, Parcel};
use crate::mpi::engine::MpiGroup;
use crate::mpi::error::MpiError;
use crate::mpi::flight::Flight;
use crate::mpi::span::Span;
use crate::mpi::transfers::message_pieces;
use crate::recorder::Name;
use crate::shm::buffer::Access;
use crate::shm::buffers::Buffers;

/// The bytes of a header: a digest and a length, then two texts.
const HEADER: usize = 320;

/// A batch in flight.
pub(super) struct Batch {
    pub(super) buffers: Buffers,
    sends: usize,
    noted: bool,
    letters: Vec<Letter>,
    pub(super) event: u64,
    pub(super) site: Name,
    pub(super) is_abandoned: bool,
    is_finished: bool,
}

/// One message of a batch.
struct Letter {
    end: End,
    /// The buffer's length.
    len: usize,
    /// Its pieces.
    flights: SmallVec<[Flight; 1]>,
    header: Option<Flight>,
}

fn header(end: &End, len: usize, text: &str, site: &str) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        [end.about.digest, len as u64].iter().flat_map(|word| word.to_le_bytes()).collect();
    let clipped =
        |text: &str, most: usize| text.chars().filter(|c| *c != '\0').take(most).collect::<String>();
    bytes.extend_from_slice(format!("{}\0{}\0", clipped(text, 180), clipped(site, 80)).as_bytes());
    bytes.resize(HEADER, 0);
    bytes
}

impl MpiGroup {
    /// Starts the messages of a batch whose buffers are claimed.
    pub(super) fn batch_of(&self, parcel: &mut Parcel, site: Name) -> Result<Batch, CommError> {
        let Parcel { ends, buffers, sends, noted } = std::mem::take(parcel);
        let strict = self.settings.strict.get();
        let mut letters = Vec::with_capacity(ends.len());
        for (i, (end, buffer)) in ends.iter().zip(buffers.iter()).enumerate() {
            let (span, len) = (Span::of(buffer), buffer.len());
            let pieces = message_pieces(len, self.job.options().most);
            let pieces = pieces.map(|(at, len)| span.part(at, len));
            let (flights, told) = if i < sends {
                let text = end.about.text.text(self.heap.segment());
                let told = || {
                    let bytes = header(end, len, &text, &site.text(self.heap.segment()));
                    self.check.send(Span::bytes_of(bytes), end.peer, end.tag, false)
                };
                let flights = pieces.map(|piece| self.data.send(piece, end.peer, end.tag, strict));
                (flights.collect::<Result<_, MpiError>>()?, self.is_checked().then(told))
            } else {
                let room = || self.check.receive(Span::bytes_of(vec![0; HEADER]), end.peer, end.tag);
                let flights = pieces.map(|piece| self.data.receive(piece, end.peer, end.tag));
                (flights.collect::<Result<_, MpiError>>()?, self.is_checked().then(room))
            };
            letters.push(Letter { end: *end, len, flights, header: told.transpose()? });
        }
        let (event, is_abandoned, is_finished) = Default::default();
        Ok(Batch { buffers, sends, noted, letters, event, site, is_abandoned, is_finished })
    }

    /// Advances a batch; true when all its messages are over, for the first time.
    pub(super) fn advance_batch(&self, batch: &mut Batch) -> Result<bool, CommError> {
        if batch.is_finished {
            return Ok(false);
        }
        let mut over = true;
        for (i, letter) in batch.letters.iter_mut().enumerate() {
            over &= self.advance_letter(letter, i >= batch.sends, batch.site)?;
        }
        if !over {
            return Ok(false);
        }
        batch.is_finished = true;
        // The calls of MPI give their hold on the buffers up.
        batch.letters.clear();
        if batch.noted {
            let access = |index: usize| if index < batch.sends { Access::Read } else { Access::Write };
            batch.buffers.iter().enumerate().for_each(|(i, buffer)| buffer.unclaim(access(i)));
        }
        Ok(true)
    }

    fn advance_letter(&self, letter: &mut Letter, is_receive: bool, site: Name) -> Result<bool, CommError> {
        if let Some(header) = &mut letter.header {
            if !header.test()? {
                // MPI advances the message as well.
                return Ok(false);
            }
            if is_receive {
                self.compare(letter, site)?;
            }
            letter.header = None;
        }
        let (mut over, mut before, mut sent) = (true, 0, None);
        for flight in &mut letter.flights {
            match flight.test() {
                Ok(true) if is_receive && flight.received != flight.span(0).len() => {
                    sent = Some(format!("{} bytes", before + flight.received));
                    break;
                }
                Err(MpiError::Truncated) => {
                    sent = Some(format!("more than {} bytes", letter.len));
                    break;
                }
                other => over &= other?,
            }
            before += flight.span(0).len();
        }
        sent.map_or(Ok(over), |sent| Err(self.differing(letter, sent, String::new(), site)))
    }

    /// Compares what a sender says of its message with what this member expects.
    fn compare(&self, letter: &Letter, site: Name) -> Result<(), CommError> {
        let Some(header) = &letter.header else { return Ok(()) };
        let bytes = header.span(0).bytes();
        let word = |i: usize| bytes[i * 8..].first_chunk::<8>().map_or(0, |word| u64::from_le_bytes(*word));
        if word(0) == letter.end.about.digest && word(1) == letter.len as u64 {
            return Ok(());
        }
        let texts = String::from_utf8_lossy(&bytes[16..]).into_owned();
        let mut texts = texts.split('\0').map(str::to_string);
        let (text, sent_at) = (texts.next().unwrap_or_default(), texts.next().unwrap_or_default());
        let text = if text.is_empty() { format!("{} bytes", word(1)) } else { text };
        Err(self.differing(letter, text, sent_at, site))
    }

    fn differing(&self, letter: &Letter, sent: String, sent_at: String, site: Name) -> CommError {
        let segment = self.heap.segment();
        let mine = letter.end.about.text.text(segment);
        let mine = if mine.is_empty() { format!("{} bytes", letter.len) } else { mine };
        let what = message_text("send", &sent, letter.end.tag);
        let sender = Side { rank: self.ranks[letter.end.peer], what, site: sent_at };
        let what = message_text("receive", &mine, letter.end.tag);
        let receiver = Side { rank: self.rank(), what, site: site.text(segment) };
        CommError::Message { sides: Box::new([sender, receiver]) }
    }
}

impl Batch {
    pub(super) fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// The members of messages that are not over.
    pub(super) fn open(&self) -> Vec<usize> {
        let is_open =
            |letter: &&Letter| letter.header.is_some() || !letter.flights.iter().all(Flight::is_over);
        let open = self.letters.iter().filter(is_open);
        let mut members: Vec<usize> = open.map(|letter| letter.end.peer).collect();
        members.sort_unstable();
        members.dedup();
        members
    }
}
