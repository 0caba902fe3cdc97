//! A short list of buffers: what an operation takes and gives back. One or two of them cost no allocation.

use std::ops::{Deref, DerefMut, Range};

use smallvec::SmallVec;

use crate::shm::buffer::{Address, Buffer};

/// Buffers in order.
#[derive(Default)]
pub struct Buffers(SmallVec<[Buffer; 2]>);

impl Buffers {
    /// Takes one out; those behind it move up.
    ///
    /// # Panics
    /// If `index` is out of range.
    pub fn remove(&mut self, index: usize) -> Buffer {
        self.0.remove(index)
    }

    /// Adds one.
    #[inline]
    pub fn push(&mut self, buffer: Buffer) {
        self.0.push(buffer);
    }
}

/// Total bytes of a list.
pub(crate) fn bytes(list: &[Buffer]) -> usize {
    list.iter().map(Buffer::len).sum()
}

/// Where they lie.
pub(crate) fn places(list: &[Buffer]) -> Places {
    list.iter().map(Buffer::place).collect()
}

/// Where the buffers of a list lie.
pub(crate) type Places = SmallVec<[Address; 2]>;

/// Where buffer `index` begins when the list is laid end to end.
pub(crate) fn start_of(list: &[Address], index: usize) -> usize {
    list[..index].iter().map(|place| place.len).sum()
}

/// A range of the list, laid end to end, as ranges of its buffers: index, offset, length.
pub(crate) fn spans(list: &[Address], range: Range<usize>) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut start = 0;
    list.iter().enumerate().filter_map(move |(item, place)| {
        let here = start..start + place.len;
        start = here.end;
        let (from, to) = (range.start.max(here.start), range.end.min(here.end));
        (from < to).then(|| (item, from - here.start, to - from))
    })
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
        // Not collected: every call takes this path.
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
