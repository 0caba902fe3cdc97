//! A short list of buffers: what an operation takes and gives back. One or two of them cost no allocation.

use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

use crate::heap::Buffer;

/// Buffers in order.
#[derive(Default)]
pub struct Buffers(SmallVec<[Buffer; 2]>);

impl Buffers {
    /// Takes one out; those behind it move up.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn remove(&mut self, index: usize) -> Buffer {
        self.0.remove(index)
    }

    pub(crate) fn push(&mut self, buffer: Buffer) {
        self.0.push(buffer);
    }

    pub(crate) fn append(&mut self, other: &mut Buffers) {
        self.0.append(&mut other.0);
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(Buffer::len).sum()
    }
}

impl Deref for Buffers {
    type Target = [Buffer];

    fn deref(&self) -> &[Buffer] {
        &self.0
    }
}

impl DerefMut for Buffers {
    fn deref_mut(&mut self) -> &mut [Buffer] {
        &mut self.0
    }
}

impl From<Buffer> for Buffers {
    fn from(buffer: Buffer) -> Buffers {
        // Not collected: this is on the way of every call.
        let mut buffers = SmallVec::new();
        buffers.push(buffer);
        Buffers(buffers)
    }
}

impl From<Option<Buffer>> for Buffers {
    fn from(buffer: Option<Buffer>) -> Buffers {
        buffer.map_or_else(Buffers::default, Buffers::from)
    }
}

impl From<Vec<Buffer>> for Buffers {
    fn from(buffers: Vec<Buffer>) -> Buffers {
        Buffers(buffers.into_iter().collect())
    }
}

impl<const N: usize> From<[Buffer; N]> for Buffers {
    fn from(buffers: [Buffer; N]) -> Buffers {
        Buffers(buffers.into_iter().collect())
    }
}

impl FromIterator<Buffer> for Buffers {
    fn from_iter<I: IntoIterator<Item = Buffer>>(buffers: I) -> Buffers {
        Buffers(buffers.into_iter().collect())
    }
}

impl IntoIterator for Buffers {
    type Item = Buffer;
    type IntoIter = smallvec::IntoIter<[Buffer; 2]>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}
