//! The segment of the models. Words are the checkers' atomics. Bytes are marked at every access, so that a model fails
//! if two accesses, one of them a write, are not ordered by the members' synchronisation.
//!
//! Words and bytes are separate, so texts, which are written as words, read as zeros. An access counts when its slice
//! is requested: later uses of the slice are not seen.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::shm::fixed::Words;
use crate::sync::{AtomicU32, AtomicU64};

/// Bytes that share a mark. Parts of an operand that different members touch at once must not share one.
const GRAIN: usize = 8;
/// Half words are used at the beginning of a line only.
const LINE: usize = 64;

/// One member's memory.
pub(crate) struct Segment {
    words: Vec<AtomicU64>,
    halves: Vec<[AtomicU32; 2]>,
    bytes: Vec<UnsafeCell<u64>>,
    marks: Vec<Mark>,
    /// Never stored: a load of it yields to the other threads.
    turn: AtomicU64,
}

// SAFETY: the threads of a model take turns on one thread of the system, and it fails at an access that real threads
// could make at the same time as another.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    pub(crate) fn private(len: usize) -> io::Result<Segment> {
        Ok(Segment {
            words: (0..len / 8).map(|_| AtomicU64::new(0)).collect(),
            halves: (0..len / LINE).map(|_| [AtomicU32::new(0), AtomicU32::new(0)]).collect(),
            bytes: (0..len / 8).map(|_| UnsafeCell::new(0)).collect(),
            marks: (0..len / GRAIN).map(|_| Mark::default()).collect(),
            turn: AtomicU64::new(0),
        })
    }

    /// Models have no processes.
    pub(crate) fn shared(_: usize) -> io::Result<(Segment, OwnedFd)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn map(_: impl AsFd, _: usize) -> io::Result<Segment> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len() * 8
    }

    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        self.words(at)
    }

    pub(crate) fn words<T: Words>(&self, at: usize) -> &T {
        assert!(at.is_multiple_of(8), "words {at}");
        let words = &self.words[at / 8..];
        assert!(size_of::<T>() <= size_of_val(words), "words inside the segment");
        // SAFETY: so many of these words follow one another.
        unsafe { &*words.as_ptr().cast() }
    }

    pub(crate) fn fetch_to_write(_: &AtomicU64) {}

    pub(crate) fn halves(&self, at: usize) -> &[AtomicU32; 2] {
        &self.halves[at / LINE]
    }

    /// Models have no libraries.
    pub(crate) fn address(&self, at: usize, _: usize) -> *mut u8 {
        self.at(at)
    }

    /// A range to read.
    ///
    /// # Safety
    /// As in the segment of the system, and here it is checked.
    pub(crate) unsafe fn read(&self, at: usize, len: usize) -> &[u8] {
        self.touch(at, len, Mark::read);
        // SAFETY: inside the allocation, as `touch` checks; the model fails where the caller does not keep writers away.
        unsafe { std::slice::from_raw_parts(self.at(at), len) }
    }

    #[allow(clippy::mut_from_ref, reason = "as in the segment of the system")]
    /// A range to write.
    ///
    /// # Safety
    /// As in the segment of the system, and here it is checked.
    pub(crate) unsafe fn write(&self, at: usize, len: usize) -> &mut [u8] {
        self.touch(at, len, Mark::write);
        // SAFETY: as in `read`.
        unsafe { std::slice::from_raw_parts_mut(self.at(at), len) }
    }

    fn at(&self, at: usize) -> *mut u8 {
        self.bytes.as_ptr().cast::<u8>().cast_mut().wrapping_add(at)
    }

    fn touch(&self, at: usize, len: usize, access: impl Fn(&Mark)) {
        if at.checked_add(len).is_none_or(|end| end > self.len()) {
            outside(at, len, self.len());
        }
        if cfg!(shuttle) {
            self.turn.load(std::sync::atomic::Ordering::SeqCst);
        }
        self.marks[at / GRAIN..(at + len).div_ceil(GRAIN)].iter().for_each(access);
    }
}

pub(crate) fn outside(at: usize, len: usize, whole: usize) -> ! {
    panic!("range {at}+{len} of {whole}")
}

#[cfg(shuttle)]
use by_clock::Mark;
#[cfg(loom)]
use by_loom::Mark;

#[cfg(loom)]
mod by_loom {
    use loom::cell::UnsafeCell;

    /// loom itself tracks which access happens before which.
    #[derive(Default)]
    pub(super) struct Mark(UnsafeCell<()>);

    impl Mark {
        pub(super) fn read(&self) {
            self.0.with(|_| ());
        }

        pub(super) fn write(&self) {
            self.0.with_mut(|_| ());
        }
    }
}

#[cfg(shuttle)]
mod by_clock {
    use std::cell::RefCell;

    use shuttle::current::{clock, me};

    /// The last writer and the readers since, each by its thread and its clock.
    #[derive(Default)]
    pub(super) struct Mark(RefCell<Accesses>);

    #[derive(Default)]
    struct Accesses {
        write: Option<(usize, u32)>,
        reads: Vec<(usize, u32)>,
    }

    impl Mark {
        pub(super) fn read(&self) {
            let mut accesses = self.0.borrow_mut();
            let now = before("read", accesses.write.iter());
            accesses.reads.retain(|(thread, _)| *thread != now.0);
            accesses.reads.push(now);
        }

        pub(super) fn write(&self) {
            let mut accesses = self.0.borrow_mut();
            let now = before("write", accesses.write.iter().chain(&accesses.reads));
            *accesses = Accesses { write: Some(now), reads: Vec::new() };
        }
    }

    /// Fails unless all accesses happen before this thread's current step, whose thread and clock it returns. A
    /// thread's clock advances when it synchronises, so a thread that has seen an access knows a later time.
    fn before<'a>(what: &str, accesses: impl Iterator<Item = &'a (usize, u32)>) -> (usize, u32) {
        let (me, clock) = (usize::from(me()), clock());
        for (thread, time) in accesses {
            let known = clock.iter().nth(*thread).copied().unwrap_or(0);
            assert!(*thread == me || known > *time, "a {what} by thread {me} races with thread {thread}");
        }
        (me, clock[me])
    }
}
