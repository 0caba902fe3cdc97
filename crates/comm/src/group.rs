//! A group: every operation that its members can start. `progress.rs` advances operations in flight.

use std::panic::Location;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use consort_types::{Dtype, Reduce};

use crate::CommError;
use crate::alarm::Alarm;
use crate::arguments::{check, check_length, check_reduction, check_result, check_rows, total};
use crate::buffer::Buffer;
use crate::buffers::Buffers;
use crate::common_result::Common;
use crate::cores::Cores;
use crate::event::Event;
use crate::flight::Flight;
use crate::heap::Heap;
use crate::mail::{End, Ends, Message, Parcel};
use crate::members::Members;
use crate::op::{Lists, Op};
use crate::pending::{Outcome, Pending};
use crate::progress::{Inner, Note};
use crate::progress_thread::ProgressThread;
use crate::recorder::{Recorder, read_segment};
use crate::row::STAGE;
use crate::rows::Rows;
use crate::settings::Settings;
use crate::siblings;
use crate::waiter::What;

/// A rank's place among the ranks that communicate. One thread uses it; its clones are the same group.
///
/// Operations take buffers and give them back when they are finished: first the operands, then the results. All buffers
/// of a list move in one communication. Sizes are in bytes; an operand is `outer` rows, so that any dimension can be
/// gathered or split without a copy.
#[derive(Clone)]
pub struct Group {
    pub(crate) inner: Rc<Inner>,
    ranks: Rc<[usize]>,
}

/// A weak handle of a group, which does not keep its members' memory alive.
#[derive(Clone)]
pub struct WeakGroup {
    inner: Weak<Inner>,
    ranks: Rc<[usize]>,
}

impl WeakGroup {
    /// The group, if a handle of it is left.
    pub fn upgrade(&self) -> Option<Group> {
        Some(Group { inner: self.inner.upgrade()?, ranks: Rc::clone(&self.ranks) })
    }
}

/// One item of a list: its operand, the buffer for its result, and the number of rows.
pub struct Moved {
    /// The operand.
    pub operand: Buffer,
    /// The buffer for the result.
    pub result: Buffer,
    /// How many times the layout repeats.
    pub outer: usize,
}

impl Group {
    pub(crate) fn new(
        rows: Rows,
        me: usize,
        heap: Arc<Heap>,
        alarm: Arc<Alarm>,
        recorder: Recorder,
        cores: Cores,
        settings: Rc<Settings>,
    ) -> Group {
        let ranks = rows.iter().map(|row| row.rank).collect();
        let members = Members::new(rows, me);
        let inner = Rc::new(Inner::new(members, heap, alarm, cores, recorder, settings));
        siblings::add(&inner);
        inner.alarm.add(&inner.members.rows);
        Group { inner, ranks }
    }

    /// A weak handle.
    pub fn downgrade(&self) -> WeakGroup {
        WeakGroup { inner: Rc::downgrade(&self.inner), ranks: Rc::clone(&self.ranks) }
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.inner.members.me
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.inner.members.n()
    }

    /// The members by their number in the world, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// This rank's heap, for buffers that take part with no copy.
    pub fn heap(&self) -> &Arc<Heap> {
        &self.inner.heap
    }

    /// The members, and whether each has a core, for measurements.
    pub(crate) fn members(&self) -> &Members {
        &self.inner.members
    }

    pub(crate) fn spins(&self) -> bool {
        self.inner.cores.one_each()
    }

    /// How many operations were not waited for yet.
    pub fn in_flight(&self) -> usize {
        self.inner.state().in_flight()
    }

    /// Starts a thread that advances large reductions while this one computes. True if there is a core for it besides
    /// one for each rank on this host; without one it would only take turns with the ranks.
    pub fn start_progress_thread(&self) -> bool {
        self.inner.cores.two_each() && self.force_progress_thread()
    }

    pub(crate) fn force_progress_thread(&self) -> bool {
        let Some(thread) = ProgressThread::start(&self.inner.members, &self.inner.alarm) else {
            return false;
        };
        // If there is one already, the new one ends at once.
        let _ = self.inner.progress_thread.set(thread);
        true
    }

    /// How many bytes of this member's part of a call are ready.
    #[cfg(test)]
    pub(crate) fn ready_bytes(&self, call: u64) -> usize {
        self.inner.members.ready(self.rank(), call)
    }

    /// Adds a note to the next operation that is started.
    pub fn note(&self, note: Note) {
        self.inner.note.set(note);
    }

    /// How long this rank waits for operations in flight when its groups are dropped. Applies to all groups of this
    /// rank.
    pub fn set_deadline(&self, deadline: Duration) {
        self.inner.settings.deadline.set(deadline);
    }

    /// Whether waiting for a send needs its receive, even for a small message. Applies to all groups of this rank; the
    /// default is `CONSORT_STRICT`, or else true in debug builds.
    pub fn set_strict(&self, strict: bool) {
        self.inner.settings.strict.set(strict);
    }

    /// Advances operations in flight; never blocks.
    pub fn poll(&self) -> Result<(), CommError> {
        self.inner.advance(&mut self.inner.state()).map_err(|stop| self.inner.give(*stop))
    }

    /// Joins the members' bytes, of one length, by which they agree on what the note says.
    #[track_caller]
    pub fn agree(&self, mine: &[u8], note: Note) -> Result<Pending, CommError> {
        let operand = self.heap().alloc_from(mine)?;
        let result = self.heap().alloc(mine.len() * self.size())?;
        self.note(Note { is_agreement: true, ..note });
        self.start(Op::AllGather { outer: 1 }, operand, [result])
    }

    #[track_caller]
    #[inline(always)]
    fn start(
        &self,
        op: Op,
        operands: impl Into<Buffers>,
        results: impl IntoIterator<Item = Buffer>,
    ) -> Result<Pending, CommError> {
        self.start_as(op, None, operands, results, false)
    }

    /// The same with lists.
    #[track_caller]
    fn start_listed(
        &self,
        op: Op,
        lists: Lists,
        operands: impl Into<Buffers>,
        results: impl IntoIterator<Item = Buffer>,
    ) -> Result<Pending, CommError> {
        self.start_as(op, Some(Box::new(lists)), operands, results, false)
    }

    #[track_caller]
    #[inline(always)]
    fn start_as<T: Outcome>(
        &self,
        op: Op,
        lists: Option<Box<Lists>>,
        operands: impl Into<Buffers>,
        results: impl IntoIterator<Item = Buffer>,
        common: bool,
    ) -> Result<Pending<T>, CommError> {
        let mut buffers = operands.into();
        let count = buffers.len();
        results.into_iter().for_each(|result| buffers.push(result));
        let number = self.inner.start((op, lists), (buffers, count), common, Location::caller())?;
        Ok(Pending::new(&self.inner, What::Call(number)))
    }

    /// Reduces the members' buffers, one or a list; every member's then hold the result.
    #[track_caller]
    pub fn all_reduce(
        &self,
        operands: impl Into<Buffers>,
        dtype: Dtype,
        reduce: Reduce,
    ) -> Result<Pending, CommError> {
        let operands = operands.into();
        for operand in operands.iter() {
            check_reduction(operand, dtype, reduce)?;
        }
        self.start(Op::AllReduce { dtype, reduce }, operands, None)
    }

    /// Reduces the members' buffers into one common result.
    #[track_caller]
    pub fn all_reduce_common(
        &self,
        operand: Buffer,
        dtype: Dtype,
        reduce: Reduce,
    ) -> Result<Pending<(Buffers, Common)>, CommError> {
        check_reduction(&operand, dtype, reduce)?;
        self.start_as(Op::AllReduce { dtype, reduce }, None, operand, None, true)
    }

    /// Joins the members' buffers side by side, in each of `outer` rows.
    #[track_caller]
    pub fn all_gather(&self, operand: Buffer, result: Buffer, outer: usize) -> Result<Pending, CommError> {
        self.check_gathered(&operand, &result, outer)?;
        self.start(Op::AllGather { outer }, operand, [result])
    }

    fn check_gathered(&self, operand: &Buffer, result: &Buffer, outer: usize) -> Result<(), CommError> {
        check_rows(operand, 1, outer, "a byte")?;
        check_result(result, operand.len().checked_mul(self.size()))
    }

    /// The same for each of a list.
    #[track_caller]
    pub fn all_gather_list(&self, list: Vec<Moved>) -> Result<Pending, CommError> {
        list.iter().try_for_each(|moved| self.check_gathered(&moved.operand, &moved.result, moved.outer))?;
        let (operands, results, outers) = unzip(list);
        self.start_listed(Op::AllGather { outer: 0 }, Lists::Outers(outers), operands, results)
    }

    /// Joins the members' buffers side by side, in each of `outer` rows, into one common result.
    #[track_caller]
    pub fn all_gather_common(
        &self,
        operand: Buffer,
        outer: usize,
    ) -> Result<Pending<(Buffers, Common)>, CommError> {
        check_rows(&operand, 1, outer, "a byte")?;
        self.start_as(Op::AllGather { outer }, None, operand, None, true)
    }

    /// Joins buffers of different sizes; `sizes` are those of all members in one row.
    #[track_caller]
    pub fn all_gather_v(
        &self,
        operand: Buffer,
        result: Buffer,
        sizes: Vec<usize>,
        outer: usize,
    ) -> Result<Pending, CommError> {
        let mine = sizes.get(self.rank()).and_then(|size| size.checked_mul(outer));
        check(outer > 0 && sizes.len() == self.size() && mine == Some(operand.len()), || {
            format!(
                "expected a size for each of {} members, with {} bytes here, got {sizes:?} in {outer} rows",
                self.size(),
                operand.len()
            )
        })?;
        check_result(&result, total(&sizes, outer))?;
        self.start_listed(Op::AllGatherV { outer }, Lists::Sizes(sizes), operand, [result])
    }

    /// Reduces the members' buffers and gives each its part of each of `outer` rows.
    #[track_caller]
    pub fn reduce_scatter(
        &self,
        operand: Buffer,
        result: Buffer,
        dtype: Dtype,
        reduce: Reduce,
        outer: usize,
    ) -> Result<Pending, CommError> {
        self.check_scattered(&operand, &result, dtype, reduce, outer)?;
        self.start(Op::ReduceScatter { dtype, reduce, outer }, operand, [result])
    }

    fn check_scattered(
        &self,
        operand: &Buffer,
        result: &Buffer,
        dtype: Dtype,
        reduce: Reduce,
        outer: usize,
    ) -> Result<(), CommError> {
        check_reduction(operand, dtype, reduce)?;
        check_rows(operand, self.size() * dtype.size(), outer, "the members' elements")?;
        check_result(result, Some(operand.len() / self.size()))
    }

    /// The same for each of a list.
    #[track_caller]
    pub fn reduce_scatter_list(
        &self,
        list: Vec<Moved>,
        dtype: Dtype,
        reduce: Reduce,
    ) -> Result<Pending, CommError> {
        for Moved { operand, result, outer } in &list {
            self.check_scattered(operand, result, dtype, reduce, *outer)?;
        }
        let (operands, results, outers) = unzip(list);
        let op = Op::ReduceScatter { dtype, reduce, outer: 0 };
        self.start_listed(op, Lists::Outers(outers), operands, results)
    }

    /// Reduces the members' buffers and gives each a part of its own size of each row.
    #[track_caller]
    pub fn reduce_scatter_v(
        &self,
        operand: Buffer,
        result: Buffer,
        dtype: Dtype,
        reduce: Reduce,
        sizes: Vec<usize>,
        outer: usize,
    ) -> Result<Pending, CommError> {
        check_reduction(&operand, dtype, reduce)?;
        let even = sizes.len() == self.size() && sizes.iter().all(|size| size.is_multiple_of(dtype.size()));
        check(even && outer > 0 && total(&sizes, outer) == Some(operand.len()), || {
            format!(
                "expected a size for each of {} members that add up to {} bytes in {outer} rows, got {sizes:?}",
                self.size(),
                operand.len()
            )
        })?;
        check_result(&result, sizes[self.rank()].checked_mul(outer))?;
        self.start_listed(Op::ReduceScatterV { dtype, reduce, outer }, Lists::Sizes(sizes), operand, [result])
    }

    /// Sends `ins[m]` bytes to each member m and receives `outs[m]` from it.
    #[track_caller]
    pub fn all_to_all(
        &self,
        operand: Buffer,
        result: Buffer,
        ins: &[usize],
        outs: &[usize],
    ) -> Result<Pending, CommError> {
        let n = self.size();
        check(ins.len() == n && outs.len() == n && total(ins, 1) == Some(operand.len()), || {
            format!("expected {n} splits each way, with {} bytes in, got {ins:?} and {outs:?}", operand.len())
        })?;
        check(n * 16 <= STAGE, || format!("expected at most {} members, got {n}", STAGE / 16))?;
        check_result(&result, total(outs, 1))?;
        let part = ins[0];
        if ins.iter().chain(outs).all(|size| *size == part) {
            return self.start(Op::AllToAll { part }, operand, [result]);
        }
        let splits = Lists::Splits(ins.to_vec(), outs.to_vec());
        self.start_listed(Op::AllToAll { part: 0 }, splits, operand, [result])
    }

    /// Gives every member the root's bytes, in place, one buffer or a list.
    #[track_caller]
    pub fn broadcast(&self, operands: impl Into<Buffers>, root: usize) -> Result<Pending, CommError> {
        self.check_root(root)?;
        self.start(Op::Broadcast { root }, operands, None)
    }

    /// Gives every member the root's buffer itself, as a common result. The others bring none.
    #[track_caller]
    pub fn broadcast_common(
        &self,
        operand: Option<Buffer>,
        root: usize,
    ) -> Result<Pending<(Buffers, Common)>, CommError> {
        self.check_root(root)?;
        self.check_at_root(&operand, root, "an operand")?;
        check(operand.as_ref().is_none_or(Buffer::is_whole), || {
            "expected a whole buffer, got a part of one".into()
        })?;
        self.start_as(Op::Broadcast { root }, None, operand, None, true)
    }

    /// Reduces the members' buffers, one or a list, into the root's, in place; the others keep theirs.
    #[track_caller]
    pub fn reduce(
        &self,
        operands: impl Into<Buffers>,
        dtype: Dtype,
        reduce: Reduce,
        root: usize,
    ) -> Result<Pending, CommError> {
        self.check_root(root)?;
        let operands = operands.into();
        for operand in operands.iter() {
            check_reduction(operand, dtype, reduce)?;
        }
        self.start(Op::Reduce { dtype, reduce, root }, operands, None)
    }

    /// Joins the members' buffers at the root, which alone brings a buffer for the result.
    #[track_caller]
    pub fn gather(
        &self,
        operand: Buffer,
        result: Option<Buffer>,
        root: usize,
        outer: usize,
    ) -> Result<Pending, CommError> {
        self.check_root(root)?;
        check_rows(&operand, 1, outer, "a byte")?;
        self.check_at_root(&result, root, "a result")?;
        result.iter().try_for_each(|result| check_result(result, operand.len().checked_mul(self.size())))?;
        self.start(Op::Gather { outer, root }, operand, result)
    }

    /// Gives each member its part of each row of the buffer that the root alone brings.
    #[track_caller]
    pub fn scatter(
        &self,
        operand: Option<Buffer>,
        result: Buffer,
        root: usize,
        outer: usize,
    ) -> Result<Pending, CommError> {
        self.check_root(root)?;
        check_rows(&result, 1, outer, "a byte")?;
        self.check_at_root(&operand, root, "an operand")?;
        let whole = result.len() * self.size();
        operand.iter().try_for_each(|operand| check_length(operand, "operand", Some(whole)))?;
        self.start(Op::Scatter { outer, root }, operand, [result])
    }

    /// Sends along a table from each member to another or none; a member that receives nothing gets zeros.
    #[track_caller]
    pub fn permute(
        &self,
        operand: Buffer,
        result: Buffer,
        to: Vec<Option<usize>>,
    ) -> Result<Pending, CommError> {
        let n = self.size();
        let receivers = || to.iter().flatten();
        let distinct = |(i, a): (usize, &usize)| *a < n && !receivers().take(i).any(|b| a == b);
        check(to.len() == n && receivers().enumerate().all(distinct), || {
            format!("expected {n} entries, distinct members or none, got {to:?}")
        })?;
        check_result(&result, Some(operand.len()))?;
        self.start_listed(Op::Permute, Lists::Routes(to), operand, [result])
    }

    /// Completes after all members have started it.
    #[track_caller]
    pub fn barrier(&self) -> Result<Pending, CommError> {
        self.start(Op::Barrier, None, None)
    }

    /// A batch of sends and receives. Gives back their buffers, sends first, when all receives have arrived and all
    /// sends are taken, or copied if they are small.
    #[track_caller]
    #[inline]
    pub fn exchange(
        &self,
        sends: impl IntoIterator<Item = Message>,
        recvs: impl IntoIterator<Item = Message>,
    ) -> Result<Pending, CommError> {
        // Pushed one by one: there are few, and collecting them takes longer than sending one.
        let mut parcel = Parcel { ends: Ends::new(), buffers: Buffers::default(), sends: 0, noted: false };
        for message in sends {
            self.check_peer(&message)?;
            parcel.ends.push(End { peer: message.peer, tag: message.tag, about: message.about });
            parcel.buffers.push(message.buffer);
            parcel.sends += 1;
        }
        for message in recvs {
            self.check_peer(&message)?;
            parcel.ends.push(End { peer: message.peer, tag: message.tag, about: message.about });
            parcel.buffers.push(message.buffer);
        }
        let batch = self.inner.start_batch(&mut parcel, Location::caller())?;
        Ok(Pending::new(&self.inner, What::Batch(batch)))
    }

    /// Sends a message: an exchange of one.
    #[track_caller]
    pub fn send(&self, message: Message) -> Result<Pending, CommError> {
        self.exchange([message], [])
    }

    /// Receives a message: an exchange of one.
    #[track_caller]
    pub fn recv(&self, message: Message) -> Result<Pending, CommError> {
        self.exchange([], [message])
    }

    /// This rank's flight recorder, for events other than a group's operations: kernels, compilations.
    pub fn recorder(&self) -> &Recorder {
        &self.inner.recorder
    }

    /// What the flight recorders of all members hold.
    pub fn flight(&self) -> Flight {
        let mut flight = Flight::new(self.ranks.iter().copied());
        for row in self.inner.members.rows.iter() {
            flight.add(row.rank, read_segment(&row.segment, row.rank));
        }
        flight.sorted()
    }

    /// The last events of all members, in the order of time.
    pub fn events(&self) -> Vec<Event> {
        self.flight().events
    }

    fn check_peer(&self, message: &Message) -> Result<(), CommError> {
        check(message.peer < self.size(), || {
            format!("expected a peer below {}, got {}", self.size(), message.peer)
        })
    }

    fn check_root(&self, root: usize) -> Result<(), CommError> {
        check(root < self.size(), || format!("expected a root below {}, got {root}", self.size()))
    }

    /// Checks that the root passes a buffer and no other member does.
    fn check_at_root(&self, buffer: &Option<Buffer>, root: usize, what: &str) -> Result<(), CommError> {
        check(buffer.is_some() == (self.rank() == root), || {
            let got = if buffer.is_some() { "one" } else { "none" };
            format!("expected {what} at the root {root} and nowhere else, got {got} at {}", self.rank())
        })
    }
}

fn unzip(list: Vec<Moved>) -> (Buffers, Buffers, Vec<usize>) {
    let (mut operands, mut results, mut outers) = (Buffers::default(), Buffers::default(), Vec::new());
    for Moved { operand, result, outer } in list {
        operands.push(operand);
        results.push(result);
        outers.push(outer);
    }
    (operands, results, outers)
}
