//! An operation in flight: what it publishes, what it needs from the others, and which algorithm makes its result.
//!
//! All operations pull: a member publishes where its operand lies, and whoever needs it reads it there. Small operands
//! travel in the slot's staging area, so that the caller's buffer is free at once.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use crate::algorithms::two_phase::{self, Job};
use crate::algorithms::{gather, made_once, moves, one_shot, scatter};
use crate::buffer::{Access, Buffer};
use crate::buffers::Buffers;
use crate::common_result::Common;
use crate::error::Stop;
use crate::heap::Heap;
use crate::lease::Lease;
use crate::members::{Item, Members, Source};
use crate::op::{Key, Op};
use crate::recorder::{self, Name};
use crate::row::{STAGE, Word};
use crate::sync::AtomicU64;

/// An operation in flight.
#[derive(Default)]
pub(crate) struct Call {
    pub(crate) number: u64,
    pub(crate) op: Op,
    /// What is published; in place it also takes the result.
    pub(crate) operands: Buffers,
    /// Where the results go, if not in place.
    pub(crate) results: Buffers,
    pub(crate) site: Name,
    /// Its event in the flight recorder.
    pub(crate) event: u64,
    pub(crate) key: Key,
    pub(crate) stage: Stage,
    /// Whether it had to wait for a free slot.
    pub(crate) held: bool,
    /// How many members' calls were compared with this one, of those that are being compared.
    pub(crate) checked: usize,
    /// All members called the same.
    pub(crate) is_compared: bool,
    /// What only large or unusual calls have.
    pub(crate) more: Option<Box<More>>,
    /// Nobody waits for it any more.
    pub(crate) abandoned: bool,
}

/// What only large or unusual calls have.
#[derive(Default)]
pub(crate) struct More {
    /// Blocks that others read until they are done with the call: where the operands of a list lie, and the common
    /// result at the member that gives it.
    blocks: Buffers,
    pub(crate) common: Option<Box<Common>>,
    /// A large all_reduce, which another thread may help with.
    pub(crate) job: Option<Arc<Mutex<Job>>>,
}

/// What an operation does with each of its buffers.
#[inline]
pub(crate) fn accesses<'a>(
    op: &Op,
    me: usize,
    common: bool,
    operands: &'a Buffers,
    results: &'a Buffers,
) -> impl Iterator<Item = (&'a Buffer, Access)> + Clone {
    let in_place = match op {
        Op::AllReduce { .. } => !common,
        Op::Broadcast { root } => *root != me && !common,
        Op::Reduce { root, .. } => *root == me,
        _ => false,
    };
    let access = if in_place { Access::Write } else { Access::Read };
    let operands = operands.iter().map(move |operand| (operand, access));
    operands.chain(results.iter().map(|result| (result, Access::Write)))
}

/// How far a call is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Stage {
    #[default]
    New,
    Published,
    Finished,
}

impl Call {
    /// Fills in a call in the place of one that is over.
    #[inline(always)]
    pub(crate) fn renew(
        &mut self,
        number: u64,
        op: Op,
        (operands, results): (Buffers, Buffers),
        common: bool,
        n: usize,
        site: Name,
    ) {
        self.key = match (&op, &*operands) {
            // Members other than the root have no operand.
            (Op::Scatter { .. }, _) => op.key(&[results.bytes() * n], common),
            (_, [operand]) => op.key(&[operand.len()], common),
            (_, operands) => op.key(&operands.iter().map(Buffer::len).collect::<Vec<_>>(), common),
        };
        self.number = number;
        self.op = op;
        self.operands = operands;
        self.results = results;
        self.site = site;
        self.stage = Stage::New;
        self.checked = 0;
        self.held = false;
        self.is_compared = false;
        self.abandoned = false;
    }

    /// Gives its buffers back to whoever else has handles of them.
    #[inline]
    pub(crate) fn unclaim(&self, me: usize) {
        accesses(&self.op, me, self.key.is_common(), &self.operands, &self.results)
            .for_each(|(buffer, access)| buffer.unclaim(access));
    }

    /// Lets go of what nobody took.
    #[inline]
    pub(crate) fn empty(&mut self) {
        if !self.operands.is_empty() || !self.results.is_empty() {
            (self.operands, self.results) = (Buffers::default(), Buffers::default());
        }
        self.more = None;
    }

    /// What the flight recorder keeps of it.
    pub(crate) fn record(&self) -> recorder::Call {
        recorder::Call { number: self.number, key: self.key }
    }

    pub(crate) fn more(&mut self) -> &mut More {
        self.more.get_or_insert_default()
    }

    /// One of the operands of a member that has published the call and agrees with it.
    pub(crate) fn operand<'a>(&self, members: &'a Members, member: usize, item: usize) -> Source<'a> {
        members.operand(
            self.number,
            member,
            Item { index: item, of: self.operands.len(), start: self.operands.start_of(item) },
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
        let place = if !self.is_read(members.me) {
            0
        } else if self.key.is_staged() {
            let mut rest = members.stage(number, self.bytes());
            for operand in self.operands.iter() {
                let (this, others) = rest.split_at_mut(operand.len());
                this.copy_from_slice(members.given(operand.place(), 0, operand.len()));
                rest = others;
            }
            0
        } else {
            self.lease_operands(members, heap)?
        };
        if let Op::AllToAll { ins, .. } = &self.op
            && !self.key.is_even()
        {
            let table = row.table(number);
            ins.iter().enumerate().for_each(|(i, size)| {
                row.segment.word(table + i * 8).store(*size as u64, Relaxed);
            });
        }
        let words = row.words(number);
        let set = |word: Word, value: u64| words[word as usize].store(value, Relaxed);
        set(Word::What, self.key.what);
        set(Word::Bytes, self.key.bytes);
        set(Word::Extra, self.key.extra);
        set(Word::Place, place);
        set(Word::Site, self.site.word());
        if self.is_in_parts() {
            set(Word::Ready, 0);
        }
        row.publish(number);
        self.stage = Stage::Published;
        if self.is_large_reduction() {
            let job = Job::new(members, number, self.key, self.operands.places(), &self.op);
            self.more().job = job.map(Mutex::new).map(Arc::new);
        }
        Ok(())
    }

    /// Whether somebody reads this member's operands.
    fn is_read(&self, me: usize) -> bool {
        match &self.op {
            Op::Broadcast { root } => *root == me && !self.key.is_common(),
            Op::Scatter { root, .. } => *root == me,
            Op::Reduce { root, .. } | Op::Gather { root, .. } => *root != me,
            Op::Permute { to } => to[me].is_some(),
            Op::Barrier => false,
            _ => true,
        }
    }

    /// Where the operands lie, which peers may read from now on until they are done with the call.
    fn lease_operands(&mut self, members: &Members, heap: &Arc<Heap>) -> Result<u64, Stop> {
        let lease = Lease::Call(Arc::clone(&members.rows), self.number);
        self.operands.iter().for_each(|operand| operand.lease(lease.clone()));
        if let [operand] = &*self.operands {
            return Ok(operand.at() as u64);
        }
        let table = heap.alloc(self.operands.len() * 8)?;
        for (i, operand) in self.operands.iter().enumerate() {
            heap.segment().word(table.at() + i * 8).store(operand.at() as u64, Relaxed);
        }
        table.lease(lease);
        let place = table.at() as u64;
        self.more().blocks.push(table);
        Ok(place)
    }

    /// The member in whose heap a common result lies: the root, or each in turn.
    pub(crate) fn giver(&self, n: usize) -> usize {
        match &self.op {
            Op::Broadcast { root } => *root,
            _ => (self.number % n as u64) as usize,
        }
    }

    /// Makes room for the common result, which all members hold at first, and says where it is.
    fn give(&mut self, members: &Members, heap: &Arc<Heap>) -> Result<(), Stop> {
        let n = members.n();
        let block = match &self.op {
            Op::Broadcast { .. } => {
                let operand = self.operands.remove(0);
                operand.unclaim(Access::Read);
                operand
            }
            Op::AllGather { .. } => heap.alloc(self.bytes() * n)?,
            _ => heap.alloc(self.bytes())?,
        };
        members.mine().words(self.number)[Word::Common as usize].store(block.at() as u64, Relaxed);
        Common::open(members, &block);
        block.lease(Lease::Common(Arc::clone(&members.rows), members.me, block.at()));
        self.more().blocks.push(block);
        Ok(())
    }

    /// The members whose operands this one needs before it can do anything.
    pub(crate) fn needs(&self, members: &Members) -> std::ops::Range<usize> {
        let one = |member: usize| member..member + 1;
        match &self.op {
            Op::Broadcast { root } | Op::Scatter { root, .. } => one(*root),
            Op::Reduce { root, .. } | Op::Gather { root, .. } if *root != members.me => one(members.me),
            Op::Permute { to } => one(to.iter().position(|to| *to == Some(members.me)).unwrap_or(members.me)),
            _ => 0..members.n(),
        }
    }

    fn is_large_reduction(&self) -> bool {
        matches!(self.op, Op::AllReduce { .. }) && !self.key.is_common() && self.bytes() > STAGE
    }

    /// Whether the result is made in parts that become ready one by one.
    fn is_in_parts(&self) -> bool {
        match self.op {
            Op::AllReduce { .. } => self.key.is_common() || self.is_large_reduction(),
            Op::AllGather { .. } => self.key.is_common(),
            _ => false,
        }
    }

    /// The members whose parts are not all made yet.
    pub(crate) fn unready(&self, members: &Members) -> Vec<usize> {
        if !self.is_in_parts() {
            return Vec::new();
        }
        let whole = |m: usize| match self.op {
            Op::AllGather { .. } => 1,
            _ => two_phase::part(self.bytes(), members.n(), m).len(),
        };
        (0..members.n()).filter(|m| members.ready(*m, self.number) < whole(*m)).collect()
    }

    pub(crate) fn job(&self) -> Option<&Arc<Mutex<Job>>> {
        self.more.as_ref().and_then(|more| more.job.as_ref())
    }

    /// A word that changes before this can go on, and what it is now; none where it might go on already.
    pub(crate) fn awaits<'a>(&self, members: &'a Members) -> Option<(&'a AtomicU64, u64)> {
        if self.stage != Stage::Published {
            return None;
        }
        if let Some(job) = self.job() {
            // Where another thread is at it, there is nothing to look at.
            let awaits = job.try_lock().ok().and_then(|job| job.awaits(members));
            return awaits.map(|(_, word, seen)| (word, seen));
        }
        let needs = self.needs(members);
        let next = needs.start + self.checked;
        let member = next + usize::from(next == members.me);
        if member < needs.end { members.unpublished(member, self.number) } else { None }
    }

    /// Goes on; true when the operation is finished here. All needed members have published, and agree.
    pub(crate) fn step(&mut self, members: &Members) -> Result<bool, Stop> {
        if self.key.is_common() {
            return Ok(made_once::step(self, members));
        }
        let me = members.me;
        match &self.op {
            Op::AllReduce { element, reduce } => one_shot::all_reduce(self, members, *element, *reduce),
            Op::Reduce { element, reduce, root } if *root == me => {
                one_shot::reduce(self, members, *element, *reduce);
            }
            Op::AllGather { outers } => gather::all(self, members, outers),
            Op::Gather { outer, root } if *root == me => gather::all(self, members, &[*outer]),
            Op::AllGatherV { sizes, outer } => gather::uneven(self, members, sizes, *outer),
            Op::ReduceScatter { element, reduce, outers } => {
                scatter::reduced(self, members, *element, *reduce, outers);
            }
            Op::ReduceScatterV { element, reduce, sizes, outer } => {
                scatter::reduced_unevenly(self, members, *element, *reduce, sizes, *outer);
            }
            Op::Scatter { outer, root } => scatter::of_root(self, members, *outer, *root),
            Op::AllToAll { outs, .. } => moves::all_to_all(self, members, outs)?,
            Op::Broadcast { root } if *root != me => moves::broadcast(self, members, *root),
            Op::Permute { to } => moves::permute(self, members, to),
            Op::Broadcast { .. } | Op::Reduce { .. } | Op::Gather { .. } | Op::Barrier => {}
        }
        Ok(true)
    }

    /// The operands, then the results. Nobody waits for it after that.
    #[inline]
    pub(crate) fn take_outcome(&mut self) -> (Buffers, Option<Box<Common>>) {
        self.abandoned = true;
        let mut buffers = std::mem::take(&mut self.operands);
        if !self.results.is_empty() {
            buffers.append(&mut self.results);
        }
        (buffers, self.more.take().and_then(|more| more.common))
    }
}
