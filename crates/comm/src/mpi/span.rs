//! Bytes that MPI reads or writes while a call is in flight.
//!
//! A span of a buffer is claimed by the operation that uses it, so nobody else here touches it; it keeps its block. A span
//! of bytes of its own is for what ranks tell one another.

use crate::mpi::abi::Handle;
use crate::shm::buffer::Buffer;

/// A range of bytes that stays where it is.
pub(crate) struct Span {
    owner: Owner,
    at: *mut u8,
    len: usize,
}

enum Owner {
    Buffer(Buffer),
    Bytes(#[expect(dead_code, reason = "it keeps the bytes")] Vec<u8>),
}

impl Span {
    /// A whole buffer, which the operation has claimed.
    pub(crate) fn of(buffer: &Buffer) -> Span {
        Span { at: buffer.address(), len: buffer.len(), owner: Owner::Buffer(buffer.clone()) }
    }

    /// Bytes of its own.
    pub(crate) fn bytes_of(mut bytes: Vec<u8>) -> Span {
        Span { at: bytes.as_mut_ptr(), len: bytes.len(), owner: Owner::Bytes(bytes) }
    }

    /// `len` bytes of a buffer from `from` on.
    ///
    /// # Panics
    /// If they are not inside.
    pub(crate) fn part(&self, from: usize, len: usize) -> Span {
        assert!(from <= self.len && len <= self.len - from, "a part of {} bytes: {from}+{len}", self.len);
        let Owner::Buffer(buffer) = &self.owner else { unreachable!("only buffers are cut") };
        Span { at: self.at.wrapping_add(from), len, owner: Owner::Buffer(buffer.clone()) }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.at
    }

    /// The bytes, while no call of MPI writes them.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: inside its buffer, which it keeps; the operation has claimed it, and reads it before its calls start or
        // after they are over.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }

    /// The bytes for writing, while no call of MPI uses them.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the operation has claimed it for writing, and has one span of these bytes at that time.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

/// The elements of a span as MPI sees them: their type, and how many bytes each has.
#[derive(Clone, Copy)]
pub(super) struct Elements {
    pub(super) element: Handle,
    pub(super) size: usize,
}
