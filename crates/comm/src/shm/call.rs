//! An operation in flight: what it publishes, what it needs from the others, and which algorithm makes its result.
//!
//! All operations pull: a member publishes where its operand lies, and members that need it read it there. Small
//! operands travel in the slot's staging area, so that the caller's buffer is free at once.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use consort_types::{Dtype, Kind, Written};
use smallvec::SmallVec;

use crate::error::Stop;
use crate::op::{AGREEMENT, Key, Lists, Op, describe};
use crate::recorder::{self, CallText, Name};
use crate::request::Note;
use crate::shm::algorithms::two_phase::{self, LargeReduction};
use crate::shm::algorithms::{common_results, gather, one_shot, scatter, transfers};
use crate::shm::buffer::{Access, Buffer, unclaim_all};
use crate::shm::buffers::{Buffers, bytes, places};
use crate::shm::common_result::Common;
use crate::shm::heap::Heap;
use crate::shm::lease::Lease;
use crate::shm::members::{Item, Members, Source, copy};
use crate::shm::queue::Reusable;
use crate::shm::row::{Row, STAGE, Word};
use crate::shm::segment::Segment;
use crate::sync::AtomicU64;

/// An operation in flight.
#[derive(Default)]
pub(crate) struct Call {
    pub(crate) number: u64,
    pub(crate) op: Op,
    /// Lists that only few operations have.
    lists: Option<Box<Lists>>,
    /// The published buffers, which in place also take the result; then the results, if not in place.
    buffers: Buffers,
    /// How many are published.
    count: usize,
    /// Whether a claim was recorded.
    noted: bool,
    pub(crate) site: Name,
    /// The caller's text for it.
    pub(crate) text: CallText,
    /// Its event in the flight recorder.
    pub(crate) event: u64,
    pub(crate) key: Key,
    pub(crate) stage: Stage,
    /// Whether it had to wait for a free slot.
    pub(crate) held: bool,
    /// Whether its end is timed: it is large, or was not over at the first poll.
    pub(crate) is_slow: bool,
    /// How many members' calls were compared with this one.
    pub(crate) checked: usize,
    /// State that only large or unusual calls have.
    pub(crate) more: Option<Box<More>>,
    /// Nobody waits for it any more.
    pub(crate) abandoned: bool,
}

/// State that only large or unusual calls have.
#[derive(Default)]
pub(crate) struct More {
    /// Blocks that others read until they are done with the call: the table of a list's operands, and the common result
    /// at the member that gives it.
    blocks: Buffers,
    pub(crate) common: Option<Box<Common>>,
    /// A large all_reduce, which the progress thread may advance.
    pub(crate) large_reduction: Option<Arc<Mutex<LargeReduction>>>,
}

/// An operation's access to its operands; results are written.
#[inline]
pub(crate) fn access(op: &Op, me: usize, common: bool) -> Access {
    let in_place = !common && op.role(me).written == Written::InPlace;
    if in_place { Access::Write } else { Access::Read }
}

/// The stage of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Stage {
    #[default]
    New,
    Published,
    Finished,
}

impl Call {
    /// Initialises a call in a reused entry.
    #[inline(always)]
    pub(crate) fn renew(
        &mut self,
        number: u64,
        (op, lists): (Op, Option<Box<Lists>>),
        (buffers, count, noted): (Buffers, usize, bool),
        common: bool,
        n: usize,
        (site, note): (Name, &Note),
    ) {
        let (operands, results) = buffers.split_at(count);
        self.key = match (op.kind, operands) {
            // Members other than the root have no operand.
            (Kind::Scatter, _) => {
                let lengths: SmallVec<[usize; 2]> = results.iter().map(|result| result.len() * n).collect();
                op.key(lists.as_deref(), &lengths, common)
            }
            (_, [operand]) => op.key(lists.as_deref(), &[operand.len()], common),
            (_, operands) => {
                op.key(lists.as_deref(), &operands.iter().map(Buffer::len).collect::<Vec<_>>(), common)
            }
        };
        self.number = number;
        self.op = op;
        if lists.is_some() || self.lists.is_some() {
            self.lists = lists;
        }
        self.buffers = buffers;
        self.count = count;
        self.noted = noted;
        self.site = site;
        self.text = CallText { name: note.text, number: note.number };
        self.key.extra ^= note.digest;
        self.key.what |= if note.is_agreement { AGREEMENT } else { 0 };
        self.stage = Stage::New;
        self.checked = 0;
        self.held = false;
        self.is_slow = !self.key.is_staged();
        self.abandoned = false;
    }

    /// The published buffers; in place they also take the result.
    pub(crate) fn operands(&self) -> &[Buffer] {
        &self.buffers[..self.count]
    }

    /// Where the results go, if not in place.
    pub(crate) fn results(&self) -> &[Buffer] {
        &self.buffers[self.count..]
    }

    /// Ends the claims on its buffers.
    #[inline]
    pub(crate) fn unclaim(&self, me: usize) {
        if !self.noted {
            return;
        }
        unclaim_all(&self.buffers, (self.count, access(&self.op, me, self.key.is_common())));
    }

    /// The stripes of operand `item`; `alone` if the call has no list of them.
    pub(crate) fn outer(&self, item: usize, alone: usize) -> usize {
        match self.lists.as_deref() {
            Some(Lists::Operands(list)) => list[item].1,
            _ => alone,
        }
    }

    /// The element type of operand `item`, in a reduction.
    pub(crate) fn dtype(&self, item: usize) -> Dtype {
        match self.lists.as_deref() {
            Some(Lists::Operands(list)) => list[item].0,
            _ => self.op.dtype,
        }
    }

    /// The bytes of each member in one stripe.
    pub(crate) fn sizes(&self) -> &[usize] {
        match self.lists.as_deref() {
            Some(Lists::Sizes(list)) => list,
            _ => &[],
        }
    }

    /// The bytes to each member and from each, if they are not all equal.
    pub(crate) fn splits(&self) -> Option<(&[usize], &[usize])> {
        match self.lists.as_deref() {
            Some(Lists::Splits(ins, outs)) => Some((ins, outs)),
            _ => None,
        }
    }

    /// Where each member sends, if anywhere.
    pub(crate) fn routes(&self) -> &[Option<usize>] {
        match self.lists.as_deref() {
            Some(Lists::Routes(to)) => to,
            _ => &[],
        }
    }

    /// As text, for messages.
    pub(crate) fn describe(&self, segment: &Segment) -> String {
        if self.text.name.is_empty() { describe(self.key.what) } else { self.text.text(segment) }
    }

    /// Its record for the flight recorder.
    pub(crate) fn record(&self) -> recorder::CallRecord {
        recorder::CallRecord { number: self.number, key: self.key, text: self.text }
    }

    pub(crate) fn more(&mut self) -> &mut More {
        self.more.get_or_insert_default()
    }

    /// One of the operands of a member that has published the call and agrees with it.
    pub(crate) fn operand<'a>(&self, members: &'a Members, member: usize, item: usize) -> Source<'a> {
        members.operand(
            self.number,
            member,
            Item { index: item, of: self.count, start: bytes(&self.buffers[..item]) },
        )
    }

    /// Bytes of all operands.
    pub(crate) fn bytes(&self) -> usize {
        self.key.bytes as usize
    }

    /// Fills the slot and stores the stamp.
    pub(crate) fn publish(&mut self, members: &Members, heap: &Arc<Heap>) -> Result<(), Stop> {
        let (row, number) = (members.mine(), self.number);
        if self.key.is_common() && self.giver(members.n()) == members.me {
            self.give(members, heap)?;
        }
        if self.key.is_small() {
            self.publish_small(members);
            return Ok(());
        }
        let place = if !self.is_read(members.me) {
            0
        } else if self.key.is_staged() {
            self.copy_operands(members);
            0
        } else {
            self.lease_operands(members, heap)?
        };
        if let Some((ins, outs)) = self.splits() {
            let table = row.table(number);
            ins.iter().chain(outs).enumerate().for_each(|(i, size)| {
                row.segment.word(table + i * 8).store(*size as u64, Relaxed);
            });
        }
        row.words(number)[Word::TextNumber as usize].store(u64::from(self.text.number), Relaxed);
        if self.is_in_parts() {
            row.words(number)[Word::Ready as usize].store(0, Relaxed);
        }
        self.fill(row, place);
        if self.is_large_reduction() {
            let dtypes = (0..self.count).map(|item| self.dtype(item)).collect();
            let operands = (places(self.operands()), dtypes);
            let reduction = LargeReduction::new(members, number, self.key, operands, self.op.reduce);
            self.more().large_reduction = Some(Arc::new(Mutex::new(reduction)));
        }
        Ok(())
    }

    /// The same for a small call.
    #[inline]
    pub(crate) fn publish_small(&mut self, members: &Members) {
        if self.is_read(members.me) {
            self.copy_operands(members);
        }
        self.fill(members.mine(), u64::from(self.text.number));
    }

    /// Copies the operands into the staging area.
    #[inline]
    fn copy_operands(&self, members: &Members) {
        let mut rest = members.stage(self.number, self.bytes());
        if let [operand] = self.operands() {
            return copy(rest, members.given(operand.place(), 0, rest.len()));
        }
        for operand in self.operands() {
            let (this, others) = rest.split_at_mut(operand.len());
            copy(this, members.given(operand.place(), 0, operand.len()));
            rest = others;
        }
    }

    #[inline]
    fn fill(&mut self, row: &Row, place: u64) {
        let words = row.words(self.number);
        let set = |word: Word, value: u64| words[word as usize].store(value, Relaxed);
        set(Word::What, self.key.what);
        set(Word::Bytes, self.key.bytes);
        set(Word::Extra, self.key.extra);
        set(Word::Address, place);
        set(Word::Site, Name::pair(self.site, self.text.name));
        row.publish(self.number);
        self.stage = Stage::Published;
    }

    /// Whether any member reads this member's operands. The common result of a broadcast is itself an operand.
    fn is_read(&self, me: usize) -> bool {
        match self.op.kind {
            Kind::Permute => self.routes()[me].is_some(),
            Kind::Broadcast if self.key.is_common() => false,
            _ => self.op.role(me).is_read,
        }
    }

    /// Where the operands lie; leases them to peers until those are done with the call.
    fn lease_operands(&mut self, members: &Members, heap: &Arc<Heap>) -> Result<u64, Stop> {
        let lease = Lease::Call(Arc::clone(&members.rows), self.number);
        self.operands().iter().for_each(|operand| operand.lease(lease.clone()));
        if let [operand] = self.operands() {
            return Ok(operand.at() as u64);
        }
        let table = heap.alloc(self.count * 8)?;
        for (i, operand) in self.operands().iter().enumerate() {
            heap.segment().word(table.at() + i * 8).store(operand.at() as u64, Relaxed);
        }
        table.lease(lease);
        let place = table.at() as u64;
        self.more().blocks.push(table);
        Ok(place)
    }

    /// The member in whose heap a common result lies: the root, or each in turn.
    pub(crate) fn giver(&self, n: usize) -> usize {
        self.op.root().unwrap_or((self.number % n as u64) as usize)
    }

    /// Provides the common result, which all members hold at first, and publishes where it lies.
    fn give(&mut self, members: &Members, heap: &Arc<Heap>) -> Result<(), Stop> {
        let n = members.n();
        let block = match self.op.kind {
            Kind::Broadcast => {
                let operand = self.buffers.remove(0);
                operand.unclaim(Access::Read);
                self.count = 0;
                operand
            }
            Kind::AllGather => heap.alloc(self.bytes() * n)?,
            _ => heap.alloc(self.bytes())?,
        };
        members.mine().words(self.number)[Word::Common as usize].store(block.at() as u64, Relaxed);
        Common::open(members, &block);
        block.lease(Lease::Common(Arc::clone(&members.rows), members.me, block.at()));
        self.more().blocks.push(block);
        Ok(())
    }

    fn is_large_reduction(&self) -> bool {
        self.op.kind == Kind::AllReduce && !self.key.is_common() && self.bytes() > STAGE
    }

    /// Whether the result is made in parts that become ready one by one.
    fn is_in_parts(&self) -> bool {
        match self.op.kind {
            Kind::AllReduce => self.key.is_common() || self.is_large_reduction(),
            Kind::AllGather => self.key.is_common(),
            _ => false,
        }
    }

    /// The members whose parts are not all made yet.
    pub(crate) fn unready(&self, members: &Members) -> Vec<usize> {
        if !self.is_in_parts() {
            return Vec::new();
        }
        let whole = |m: usize| match self.op.kind {
            Kind::AllGather => 1,
            _ => two_phase::part(self.bytes(), members.n(), m).len(),
        };
        (0..members.n()).filter(|m| members.ready(*m, self.number) < whole(*m)).collect()
    }

    /// Makes sure that no other thread writes for it any more.
    pub(crate) fn cancel(&self) {
        if let Some(reduction) = self.large_reduction() {
            reduction.lock().unwrap_or_else(PoisonError::into_inner).cancel();
        }
    }

    pub(crate) fn large_reduction(&self) -> Option<&Arc<Mutex<LargeReduction>>> {
        self.more.as_ref().and_then(|more| more.large_reduction.as_ref())
    }

    /// The word that must change before this can advance, with the value seen; `None` if it may advance already.
    pub(crate) fn awaits<'a>(&self, members: &'a Members) -> Option<(&'a AtomicU64, u64)> {
        if self.stage != Stage::Published {
            return None;
        }
        if let Some(reduction) = self.large_reduction() {
            // If another thread holds the reduction, there is nothing to poll.
            let awaits = reduction.try_lock().ok().and_then(|reduction| reduction.awaits(members));
            return awaits.map(|(_, word, seen)| (word, seen));
        }
        let member = self.checked + usize::from(self.checked == members.me);
        if member < members.n() { members.unpublished(member, self.number) } else { None }
    }

    /// Does what can be done now; true when the operation is finished here. All members must have published and agree.
    pub(crate) fn step(&mut self, members: &Members) -> Result<bool, Stop> {
        if self.key.is_common() {
            return Ok(common_results::step(self, members));
        }
        let Op { kind, reduce, root, outer, part, .. } = self.op;
        match kind {
            Kind::AllReduce => one_shot::all_reduce(self, members, reduce),
            Kind::AllGather => gather::all(self, members, outer),
            Kind::AllGatherV => gather::uneven(self, members, outer),
            Kind::ReduceScatter => scatter::reduced(self, members, reduce, outer),
            Kind::ReduceScatterV => scatter::reduced_unevenly(self, members, reduce, outer),
            Kind::Scatter => scatter::of_root(self, members, outer, root),
            Kind::AllToAll => transfers::all_to_all(self, members, part)?,
            Kind::Permute => transfers::permute(self, members),
            Kind::Broadcast | Kind::Reduce | Kind::Gather => match (kind, self.op.role(members.me).written) {
                (Kind::Broadcast, Written::InPlace) => transfers::broadcast(self, members, root),
                (Kind::Reduce, Written::InPlace) => one_shot::reduce(self, members, reduce),
                (Kind::Gather, Written::New) => gather::all(self, members, outer),
                // The other members need nothing of anybody.
                _ => {}
            },
            Kind::Barrier | Kind::Exchange => {}
        }
        Ok(true)
    }

    /// The operands, then the results. After this nobody waits for the call.
    #[inline(always)]
    pub(crate) fn take_outcome(&mut self) -> (Buffers, Option<Box<Common>>) {
        self.abandoned = true;
        let common = if self.more.is_none() { None } else { self.more.take().and_then(|more| more.common) };
        (std::mem::take(&mut self.buffers), common)
    }
}

/// How the operands of a call travel.
impl Key {
    /// Whether the operands travel in the staging area. That of an all_to_all may hold a table instead.
    pub(crate) fn is_staged(self) -> bool {
        let tabled = self.what & 0xff == Kind::AllToAll as u64 && !self.is_even();
        self.bytes as usize <= STAGE && !tabled
    }

    /// Whether its operands are staged and its result is not common: most calls are.
    pub(crate) fn is_small(self) -> bool {
        self.is_staged() && !self.is_common()
    }
}

impl Reusable for Call {
    #[inline]
    fn empty(&mut self) {
        if !self.buffers.is_empty() {
            self.buffers = Buffers::default();
            self.count = 0;
        }
        self.more = None;
        self.lists = None;
    }
}
