//! Memory that several ranks reach: words for their protocol, and ranges for their data.
//!
//! This file is the only one that turns an offset into memory. Words are atomic and may be used by any thread at any
//! time. Ranges are plain bytes: a caller promises that the protocol keeps writers away from its range.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::limits::check_file_size;
use crate::shm::fixed::Words;
use crate::sync::{AtomicU32, AtomicU64};

/// One rank's memory, zeroed at first and fixed in place. Pages are allocated on first use.
pub(crate) struct Segment {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to the segment and stays where it is; all access is through atomic words, or
// through ranges for which the caller vouches.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// Sealed operations on a shared heap: a peer that shrinks it would kill every process that has it mapped.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

const PROTECTION: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Segment {
    /// `len` bytes for ranks that are threads.
    pub(crate) fn private(len: usize) -> io::Result<Segment> {
        // Miri does not allocate pages lazily.
        let flags = MapFlags::PRIVATE | if cfg!(miri) { MapFlags::empty() } else { MapFlags::NORESERVE };
        // SAFETY: a new mapping at a place that the kernel chooses replaces nothing.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, PROTECTION, flags) }?;
        Segment::at(base.cast(), len)
    }

    /// `len` bytes for ranks that are processes: memory that has no name in the file system and lives as long as it is
    /// mapped. Peers map it by the descriptor. Its size is fixed.
    pub(crate) fn shared(len: usize) -> io::Result<(Segment, OwnedFd)> {
        check_file_size(len as u64)?;
        let fd = memfd_create("consort", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, len as u64)?;
        fcntl_add_seals(&fd, SEALS)?;
        Ok((Segment::map(&fd, len)?, fd))
    }

    /// A peer's memory, by its descriptor.
    pub(crate) fn map(fd: impl AsFd, len: usize) -> io::Result<Segment> {
        // Touching a page past the end of the file would kill the process. The seals are checked first: without them
        // the size may change at any time.
        let wrong = |text: &str| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        if !fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SEALS)) {
            return wrong("expected memory whose size is sealed, got memory that a peer can shrink");
        }
        if !usize::try_from(fstat(&fd)?.st_size).is_ok_and(|size| size >= len) {
            return wrong("the memory of a peer is smaller than it should be");
        }
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: as in `private`.
        let base = unsafe { mmap(std::ptr::null_mut(), len, PROTECTION, flags, fd, 0) }?;
        Segment::at(base.cast(), len)
    }

    fn at(base: *mut u8, len: usize) -> io::Result<Segment> {
        Ok(Segment { base: NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether a range lies inside.
    #[inline(always)]
    fn check(&self, at: usize, len: usize) {
        if len > self.len || at > self.len - len {
            outside(at, len, self.len);
        }
    }

    /// The word at an offset that is a multiple of 8.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        self.words(at)
    }

    /// Words that follow one another, from an offset that is a multiple of 8.
    pub(crate) fn words<T: Words>(&self, at: usize) -> &T {
        self.check(at, size_of::<T>());
        assert!(at.is_multiple_of(8));
        // SAFETY: inside the allocation, and aligned; an atomic may be shared, and any bytes are one. Offsets of words
        // are never inside ranges that are handed out.
        unsafe { self.base.add(at).cast::<T>().as_ref() }
    }

    /// Prefetches the cache line of a word that will be written soon. Nothing changes, and readers of the word are not
    /// affected.
    #[inline(always)]
    pub(crate) fn fetch_to_write(word: &AtomicU64) {
        let word: *const AtomicU64 = word;
        // SAFETY: a hint to the processor, which writes to no register and no memory.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) word, options(nostack, readonly, preserves_flags))
        };
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = word;
    }

    /// The halves of the word at an offset, for futexes.
    pub(crate) fn halves(&self, at: usize) -> &[AtomicU32; 2] {
        let word: *const AtomicU64 = self.word(at);
        // SAFETY: as for `words`; what is used by halves is never used as a whole.
        unsafe { &*word.cast() }
    }

    /// Where a range lies, for a library that reads or writes it.
    pub(crate) fn address(&self, at: usize, len: usize) -> *mut u8 {
        self.check(at, len);
        self.base.as_ptr().wrapping_add(at)
    }

    /// A range to read.
    ///
    /// # Safety
    /// Nobody writes to the range while the slice lives.
    #[inline(always)]
    pub(crate) unsafe fn read(&self, at: usize, len: usize) -> &[u8] {
        self.check(at, len);
        // SAFETY: inside the allocation; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(self.base.add(at).as_ptr(), len) }
    }

    #[allow(
        clippy::mut_from_ref,
        reason = "the segment is shared by design; the caller vouches for the range"
    )]
    /// A range to write.
    ///
    /// # Safety
    /// Nobody else reads from or writes to the range while the slice lives.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, at: usize, len: usize) -> &mut [u8] {
        self.check(at, len);
        // SAFETY: inside the allocation; the caller keeps everybody else away.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at).as_ptr(), len) }
    }
}

/// Separate and cold, so that its message is not prepared when there is no error.
#[cold]
#[inline(never)]
pub(crate) fn outside(at: usize, len: usize, whole: usize) -> ! {
    panic!("range {at}+{len} of {whole}")
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and nobody in this process can reach it any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::SeqCst;

    #[test]
    fn two_mappings_are_one_memory() {
        let (mine, fd) = Segment::shared(10_000).unwrap();
        let theirs = Segment::map(&fd, 10_000).unwrap();
        mine.word(8).store(7, SeqCst);
        assert_eq!(theirs.word(8).load(SeqCst), 7);
        // SAFETY: one thread, one slice at a time.
        unsafe { theirs.write(4096, 3) }.copy_from_slice(b"abc");
        // SAFETY: as above.
        assert_eq!(unsafe { mine.read(4096, 3) }, b"abc");
        drop(mine);
        assert_eq!(theirs.word(8).load(SeqCst), 7);
        assert!(Segment::map(&fd, 1 << 20).is_err(), "larger than it is");
    }

    #[test]
    fn nobody_can_take_memory_away_from_those_who_have_it_mapped() {
        let (_mine, fd) = Segment::shared(10_000).unwrap();
        assert_eq!(ftruncate(&fd, 0), Err(rustix::io::Errno::PERM));
        assert_eq!(ftruncate(&fd, 20_000), Err(rustix::io::Errno::PERM));
        assert_eq!(fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE), Err(rustix::io::Errno::PERM));
        // A peer's memory is mapped only if it is sealed too.
        let refused = |fd: OwnedFd| Segment::map(fd, 4096).err().unwrap().to_string();
        let offered = |seals: SealFlags| {
            let fd = memfd_create("peer", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&fd, 10_000).unwrap();
            fcntl_add_seals(&fd, seals).unwrap();
            fd
        };
        for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::SHRINK | SealFlags::GROW] {
            assert!(refused(offered(seals)).contains("whose size is sealed"), "{seals:?}");
        }
        let never = memfd_create("peer", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&never, 10_000).unwrap();
        assert!(refused(never).contains("whose size is sealed"));
        assert!(
            refused(std::fs::File::open("/proc/self/exe").unwrap().into()).contains("whose size is sealed")
        );
        assert!(Segment::map(offered(SEALS), 4096).is_ok());
    }
}
