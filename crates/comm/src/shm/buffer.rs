//! Buffers: handles of blocks of a rank's heap, and of parts of them.
//!
//! A block may have many handles, and they may overlap. The block records the use of its bytes: claims by this rank,
//! ranges that operations in flight read or write, and ranges that peers may still read (*leases*). It grants
//!
//! - a read, unless an operation in flight writes the range;
//! - a write, once nothing in flight touches the range, all peers are done with it, and nobody here has a claim on it;
//! - an operation, like a read or a write by its access to the range. An only handle is moved into its operation, so
//!   that no conflict is possible and nothing need be recorded.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut, Range};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use consort_types::{Failure, Space, overlaps};

use crate::CommError;
use crate::shm::heap::{Heap, LINE};
use crate::shm::lease::{Lease, Leases};
use crate::shm::releasing::{Until, wait_for_release};
use crate::shm::segment::outside;
use crate::small_list::SmallList;

/// A block of a rank's heap, or a part of one. Clones are handles of the same bytes.
#[derive(Clone)]
pub struct Buffer(Rc<Handle>);

struct Handle {
    /// Where it begins in the segment.
    at: usize,
    len: usize,
    owner: Owner,
}

/// The block itself, or the handle that owns it.
#[allow(clippy::large_enum_variant, reason = "parts are few, and most that is done to a block begins here")]
enum Owner {
    Block(Block),
    Part(Buffer),
}

struct Block {
    heap: Arc<Heap>,
    start: usize,
    room: usize,
    /// Claims of this rank, to read or to write.
    claims: RefCell<SmallList<Claim>>,
    /// Ranges that operations in flight read or write.
    flights: RefCell<SmallList<Claim>>,
    /// Ranges that peers may still read.
    leases: RefCell<SmallList<Leased>>,
}

/// A range that is claimed for reading or writing.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Claim {
    start: usize,
    end: usize,
    access: Access,
}

impl Claim {
    fn conflicts_with(&self, range: &Range<usize>, access: Access) -> bool {
        overlaps(&(self.start..self.end), range) && (self.access == Access::Write || access == Access::Write)
    }
}

/// A range that peers may still read.
struct Leased {
    range: Range<usize>,
    lease: Lease,
}

impl Leased {
    fn is_held(&self) -> bool {
        self.lease.holder().is_some()
    }

    fn is_held_in(&self, range: &Range<usize>) -> bool {
        overlaps(&self.range, range) && self.is_held()
    }
}

/// Where a buffer lies in its segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) at: usize,
    pub(crate) len: usize,
}

impl Address {
    /// Whether a range lies inside.
    #[inline(always)]
    pub(crate) fn check(self, from: usize, len: usize) {
        if len > self.len || from > self.len - len {
            outside(from, len, self.len);
        }
    }
}

/// An operation's access to a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Claims all buffers of a list for an operation, or none: the first `first.0` with access `first.1`, the others for
/// writing. True if a claim was recorded, so that they must be unclaimed.
#[inline(always)]
pub(crate) fn claim_all(
    heap: &Arc<Heap>,
    list: &[Buffer],
    first: (usize, Access),
) -> Result<bool, CommError> {
    let mut noted = false;
    for (i, buffer) in list.iter().enumerate() {
        match buffer.claim(heap, nth(i, first)) {
            Ok(is_noted) => noted |= is_noted,
            Err(error) => {
                unclaim_all(&list[..i], first);
                return Err(error);
            }
        }
    }
    Ok(noted)
}

/// Ends an operation's claims on a list.
#[inline(always)]
pub(crate) fn unclaim_all(list: &[Buffer], first: (usize, Access)) {
    list.iter().enumerate().for_each(|(i, buffer)| buffer.unclaim(nth(i, first)));
}

/// The access to buffer `index` of a list: `access` for the first `count`, writing for the others.
fn nth(index: usize, (count, access): (usize, Access)) -> Access {
    if index < count { access } else { Access::Write }
}

pub(crate) fn busy() -> CommError {
    CommError::Argument(Failure::new((
        "a buffer that is not in use: wait for the operation that takes it first",
        "",
    )))
}

impl Block {
    /// Claims a range for reading or writing; an error on a conflict.
    fn look(&self, range: Range<usize>, access: Access) -> Result<(), CommError> {
        let in_the_way = |look: &Claim| look.conflicts_with(&range, access);
        let mut claims = self.claims.borrow_mut();
        if claims.any(in_the_way)
            || self.flights.borrow().any(in_the_way)
            || access == Access::Write && self.is_leased(&range)
        {
            return Err(busy());
        }
        claims.push(Claim { start: range.start, end: range.end, access });
        Ok(())
    }

    /// Ends such a claim.
    fn look_away(&self, range: &Range<usize>, access: Access) {
        let mine = Claim { start: range.start, end: range.end, access };
        self.claims.borrow_mut().take(|look| *look == mine);
    }

    /// Whether peers may still read some of these bytes.
    fn is_leased(&self, range: &Range<usize>) -> bool {
        self.leases.borrow().any(|leased| leased.is_held_in(range))
    }
}

/// Drops leases that nobody holds any more.
fn forget_ended(leases: &mut SmallList<Leased>) {
    while leases.take(|leased| !leased.is_held()).is_some() {}
}

impl Buffer {
    /// The buffer of a whole block.
    pub(crate) fn new(heap: Arc<Heap>, start: usize, room: usize, len: usize) -> Buffer {
        let (claims, flights, leases) = Default::default();
        let block = Block { heap, start, room, claims, flights, leases };
        Buffer(Rc::new(Handle { at: start + LINE, len, owner: Owner::Block(block) }))
    }

    /// A part of it.
    pub fn part(&self, range: Range<usize>) -> Result<Buffer, CommError> {
        let range = self.absolute(range)?;
        let owner = match &self.0.owner {
            Owner::Block(_) => self.clone(),
            Owner::Part(whole) => whole.clone(),
        };
        Ok(Buffer(Rc::new(Handle { at: range.start, len: range.len(), owner: Owner::Part(owner) })))
    }

    fn block(&self) -> &Block {
        let mut handle = self;
        loop {
            match &handle.0.owner {
                Owner::Block(block) => return block,
                Owner::Part(whole) => handle = whole,
            }
        }
    }

    /// How many bytes it holds.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Where its memory is.
    pub fn space(&self) -> Space {
        self.block().heap.space()
    }

    /// Whether it is a part of this heap.
    pub fn is_in(&self, heap: &Arc<Heap>) -> bool {
        Arc::ptr_eq(&self.block().heap, heap)
    }

    /// Whether it has bytes in common with another.
    pub fn overlaps(&self, other: &Buffer) -> bool {
        self.is_in(&other.block().heap) && overlaps(&self.range(), &other.range())
    }

    /// Where it begins in the segment.
    pub(crate) fn at(&self) -> usize {
        self.0.at
    }

    /// Where its bytes are in memory, for an operation that has claimed it.
    pub(crate) fn address(&self) -> *mut u8 {
        self.block().heap.segment().address(self.0.at, self.0.len)
    }

    /// Where it lies.
    pub(crate) fn place(&self) -> Address {
        Address { at: self.0.at, len: self.0.len }
    }

    /// Whether it is a whole block, which has a header.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.0.owner, Owner::Block(_))
    }

    fn range(&self) -> Range<usize> {
        self.0.at..self.0.at + self.0.len
    }

    /// Whether its block has no other handle, here or in an operation.
    pub fn is_only(&self) -> bool {
        Rc::strong_count(&self.0) == 1
            && match &self.0.owner {
                Owner::Block(_) => true,
                Owner::Part(whole) => Rc::strong_count(&whole.0) == 1,
            }
    }

    /// The bytes. An error while an operation in flight writes them.
    pub fn bytes(&self) -> Result<Bytes<'_>, CommError> {
        self.bytes_of(0..self.len())
    }

    /// Some of the bytes. An error while an operation in flight writes any of them.
    pub fn bytes_of(&self, range: Range<usize>) -> Result<Bytes<'_>, CommError> {
        let range = self.absolute(range)?;
        let block = self.block();
        block.look(range.clone(), Access::Read)?;
        Ok(Bytes { block, range })
    }

    #[inline]
    fn absolute(&self, range: Range<usize>) -> Result<Range<usize>, CommError> {
        if range.start > range.end || range.end > self.len() {
            return Err(self.outside(&range));
        }
        Ok(self.0.at + range.start..self.0.at + range.end)
    }

    #[cold]
    fn outside(&self, range: &Range<usize>) -> CommError {
        let expected = format!("a part of {} bytes", self.len());
        CommError::Argument(Failure::new((expected, format!("{range:?}"))))
    }

    /// Whether no peer can read it any more, and nothing in flight touches it.
    pub fn is_released(&self) -> bool {
        let (block, range) = (self.block(), self.range());
        let is_touched = || block.flights.borrow().any(|look| look.conflicts_with(&range, Access::Write));
        !block.is_leased(&range) && !is_touched()
    }

    /// The bytes for writing. Blocks while anything in flight touches them or a peer may read them, at most until
    /// `until`.
    pub fn bytes_mut(&mut self, until: Instant) -> Result<BytesMut<'_>, CommError> {
        if !self.is_released() {
            self.wait_for_release(Until::Deadline(until))?;
        }
        self.try_bytes_mut()
    }

    /// Whether it is released, or will be by then: for a caller that can do something else instead. Nothing fails.
    pub fn is_released_by(&self, patience: Instant) -> bool {
        self.is_released() || self.wait_for_release(Until::Patience(patience)).is_ok()
    }

    /// The bytes for writing; an error while anything in flight touches them or a peer may read them. Never blocks.
    pub fn try_bytes_mut(&self) -> Result<BytesMut<'_>, CommError> {
        self.try_bytes_mut_of(0..self.len())
    }

    /// The same for some of the bytes.
    pub fn try_bytes_mut_of(&self, range: Range<usize>) -> Result<BytesMut<'_>, CommError> {
        let range = self.absolute(range)?;
        let block = self.block();
        block.look(range.clone(), Access::Write)?;
        Ok(BytesMut { block, range })
    }

    fn wait_for_release(&self, until: Until) -> Result<(), CommError> {
        let block = self.block();
        let range = self.range();
        let mine = |leased: &&Leased| overlaps(&leased.range, &range);
        block.leases.borrow().iter().filter(mine).for_each(|leased| leased.lease.ask());
        let lease = || self.held_lease();
        wait_for_release(&block.heap, self.len(), until, || self.is_released(), lease)?;
        forget_ended(&mut block.leases.borrow_mut());
        Ok(())
    }

    /// A lease on it that is still held.
    fn held_lease(&self) -> Option<Lease> {
        let (leases, range) = (self.block().leases.borrow(), self.range());
        leases.iter().find(|leased| leased.is_held_in(&range)).map(|leased| leased.lease.clone())
    }

    /// Fills a new block.
    pub(crate) fn fill(&mut self, from: &[u8]) {
        let block = self.block();
        // SAFETY: this is called with the only handle of a block that nobody has seen yet.
        unsafe { block.heap.segment().write(self.0.at, self.0.len) }.copy_from_slice(from);
    }

    /// Records a lease. A later call of the same group replaces an earlier one, as it is released after it.
    pub(crate) fn lease(&self, lease: Lease) {
        let mut leases = self.block().leases.borrow_mut();
        let range = self.range();
        let is_old = |leased: &&mut Leased| leased.range == range && leased.lease.is_before(&lease);
        if let Some(old) = leases.iter_mut().find(is_old) {
            old.lease = lease;
            return;
        }
        if leases.len() >= 4 {
            forget_ended(&mut leases);
        }
        leases.push(Leased { range, lease });
    }

    /// Claims it for an operation, or gives the conflict as an error. True if the claim was recorded.
    #[inline(always)]
    fn claim(&self, heap: &Arc<Heap>, access: Access) -> Result<bool, CommError> {
        let block = self.block();
        if !Arc::ptr_eq(&block.heap, heap) {
            let headline = ("a buffer of this group's heap", "one of another");
            return Err(CommError::Argument(Failure::new(headline)));
        }
        let is_only = self.is_only();
        if is_only && block.leases.borrow().is_empty() {
            return Ok(false);
        }
        self.claim_shared(block, access)?;
        if !is_only {
            block.flights.borrow_mut().push(Claim { start: self.0.at, end: self.0.at + self.0.len, access });
        }
        Ok(!is_only)
    }

    /// An error if a claim or a lease conflicts with an operation.
    fn claim_shared(&self, block: &Block, access: Access) -> Result<(), CommError> {
        let range = self.range();
        let in_the_way = |look: &Claim| look.conflicts_with(&range, access);
        if block.flights.borrow().any(in_the_way) || block.claims.borrow().any(in_the_way) {
            return Err(busy());
        }
        if access == Access::Write && block.is_leased(&range) {
            return Err(CommError::Argument(Failure::new((
                "a buffer that no peer reads any more: ask for `bytes_mut` first, which waits for its release",
                "",
            ))));
        }
        Ok(())
    }

    /// Ends an operation's claim.
    #[inline]
    pub(crate) fn unclaim(&self, access: Access) {
        let mine = Claim { start: self.0.at, end: self.0.at + self.0.len, access };
        self.block().flights.borrow_mut().take(|look| *look == mine);
    }
}

/// The bytes of a buffer, to read.
pub struct Bytes<'a> {
    block: &'a Block,
    range: Range<usize>,
}

impl Deref for Bytes<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the block knows of this look, so nobody here gets any of them to write, and no operation that writes
        // them starts; none was in flight when it began.
        unsafe { self.block.heap.segment().read(self.range.start, self.range.len()) }
    }
}

impl Drop for Bytes<'_> {
    fn drop(&mut self) {
        self.block.look_away(&self.range, Access::Read);
    }
}

/// The bytes of a buffer, to write.
pub struct BytesMut<'a> {
    block: &'a Block,
    range: Range<usize>,
}

impl Deref for BytesMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: as below.
        unsafe { self.block.heap.segment().read(self.range.start, self.range.len()) }
    }
}

impl DerefMut for BytesMut<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block knows of this, so nobody else here gets any of them, and no operation on them starts; none
        // was in flight when it began, and no peer reads them any more.
        unsafe { self.block.heap.segment().write(self.range.start, self.range.len()) }
    }
}

impl Drop for BytesMut<'_> {
    fn drop(&mut self) {
        self.block.look_away(&self.range, Access::Write);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let leases = self.leases.get_mut();
        let mut held = Leases::new();
        while let Some(leased) = leases.take(Leased::is_held) {
            held.push(leased.lease);
        }
        self.heap.give_back(self.start, self.room, held);
    }
}
