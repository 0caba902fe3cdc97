//! Words at a fixed place of a segment, looked up once because every call uses them.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::shm::segment::Segment;
use crate::sync::AtomicU64;

/// What words are taken together as.
///
/// # Safety
/// It is atomic words and nothing else.
pub(crate) unsafe trait Words {}
// SAFETY: it is one.
unsafe impl Words for AtomicU64 {}
// SAFETY: an array has nothing between its elements.
unsafe impl<T: Words, const N: usize> Words for [T; N] {}

/// A pointer that keeps its segment alive.
pub(crate) struct Fixed<T> {
    to: NonNull<T>,
    segment: Arc<Segment>,
}

// SAFETY: it is a reference that its segment outlives.
unsafe impl<T: Sync> Send for Fixed<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Fixed<T> {}

impl<T> Fixed<T> {
    /// The reference that `find` gives for a segment.
    pub(crate) fn new(segment: &Arc<Segment>, find: impl FnOnce(&Segment) -> &T) -> Fixed<T> {
        Fixed { to: NonNull::from(find(segment)), segment: Arc::clone(segment) }
    }
}

impl<T> Clone for Fixed<T> {
    fn clone(&self) -> Fixed<T> {
        Fixed { to: self.to, segment: Arc::clone(&self.segment) }
    }
}

impl<T> Deref for Fixed<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: a reference that was borrowed from the segment, whose memory stays where it is while it lives.
        unsafe { self.to.as_ref() }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn what_is_found_keeps_its_segment() {
        let segment = Arc::new(Segment::private(4096).unwrap());
        let words: Fixed<[[AtomicU64; 2]; 4]> = Fixed::new(&segment, |segment| segment.words(64));
        words[3][1].store(7, Relaxed);
        assert_eq!(segment.word(64 + 3 * 16 + 8).load(Relaxed), 7);
        let other = words.clone();
        drop((segment, words));
        assert_eq!(other[3][1].load(Relaxed), 7, "the memory is still there");
    }
}
