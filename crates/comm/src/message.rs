//! Messages: what a program says of one, and a batch of them as engines take it.

use smallvec::SmallVec;

use crate::recorder::Name;
use crate::shm::buffer::Buffer;
use crate::shm::buffers::Buffers;

/// One end of a message: the other member, the tag, and the buffer.
pub struct Message {
    /// The other end, by its place in the group.
    pub peer: usize,
    /// Messages match by sender, receiver and tag, in order.
    pub tag: u64,
    /// The bytes to send, or their destination; both ends must have the same size.
    pub buffer: Buffer,
    /// A description of the bytes, which must be equal at both ends.
    pub about: About,
}

/// What the bytes do not say themselves: types and shapes.
#[derive(Clone, Copy, Debug, Default)]
pub struct About {
    /// A digest, which both ends compare.
    pub digest: u64,
    /// A text for error messages, by a name of the group's recorder.
    pub text: Name,
}

impl Message {
    /// A message without a description of its bytes.
    pub fn new(peer: usize, tag: u64, buffer: Buffer) -> Message {
        Message { peer, tag, buffer, about: About::default() }
    }
}

/// The other end of a message.
#[derive(Clone, Copy)]
pub(crate) struct End {
    pub(crate) peer: usize,
    pub(crate) tag: u64,
    pub(crate) about: About,
}

/// The other ends of a batch, sends first.
pub(crate) type Ends = SmallVec<[End; 2]>;

/// A batch of messages that is to be started.
#[derive(Default)]
pub(crate) struct Parcel {
    pub(crate) ends: Ends,
    /// In the same order.
    pub(crate) buffers: Buffers,
    /// How many are sends.
    pub(crate) sends: usize,
    /// Whether a claim was recorded.
    pub(crate) noted: bool,
}
