//! A group: every operation that its members can start. What is then in flight goes on in `progress.rs`.

use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;
use std::time::Instant;

use crate::CommError;
use crate::call::{Call, Members, Op};
use crate::element::{Element, Reduce};
use crate::heap::{Buffer, Heap};
use crate::mail::Message;
use crate::progress::{Alarm, Inner, Pending, What};
use crate::row::Row;

/// A rank's place among the ranks that communicate. One thread uses it; its clones are the same group.
#[derive(Clone)]
pub struct Group {
    inner: Rc<Inner>,
}

impl Group {
    pub(crate) fn new(
        rows: Vec<Row>,
        me: usize,
        ranks: Vec<usize>,
        heap: Arc<Heap>,
        alarm: Arc<Alarm>,
    ) -> Group {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = cores >= ranks.len();
        let members = Members { rows: Arc::new(rows), me };
        let inner = Inner { members, ranks, heap, alarm, spins, state: RefCell::default() };
        Group { inner: Rc::new(inner) }
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
        &self.inner.ranks
    }

    /// This rank's heap, for buffers that take part with no copy.
    pub fn heap(&self) -> &Arc<Heap> {
        &self.inner.heap
    }

    /// The members, and whether there is a core for each, for whoever measures.
    pub(crate) fn members(&self) -> &Members {
        &self.inner.members
    }

    pub(crate) fn spins(&self) -> bool {
        self.inner.spins
    }

    /// How many operations are in flight here.
    pub fn in_flight(&self) -> usize {
        let state = self.inner.state.borrow();
        state.active.len() + state.finished.len()
    }

    #[track_caller]
    fn start(&self, op: Op, operand: Option<Buffer>, result: Option<Buffer>) -> Result<Pending, CommError> {
        let mut state = self.inner.state.borrow_mut();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let number = state.next;
        state.next += 1;
        state.active.push_back(Call::new(number, op, operand, result, Location::caller()));
        drop(state);
        self.inner.advance()?;
        Ok(Pending { inner: Rc::clone(&self.inner), what: What::Call(number) })
    }

    fn check(&self, ok: bool, message: impl FnOnce() -> String) -> Result<(), CommError> {
        if ok { Ok(()) } else { Err(CommError::Argument(message())) }
    }

    fn check_reduction(&self, buffer: &Buffer, element: Element, reduce: Reduce) -> Result<(), CommError> {
        self.check(reduce.takes(element), || {
            format!("`{}` is not defined for {}", reduce.name(), element.name())
        })?;
        self.check_rows(buffer, element.size(), 1, "the size of an element")
    }

    /// The bytes are a whole number of `unit`s in each of `outer` rows.
    fn check_rows(&self, buffer: &Buffer, unit: usize, outer: usize, what: &str) -> Result<(), CommError> {
        let whole = unit.checked_mul(outer).filter(|whole| *whole > 0);
        self.check(whole.is_some_and(|whole| buffer.len().is_multiple_of(whole)), || {
            format!(
                "expected {} bytes to be a multiple of {unit}, {what}, in each of {outer} rows",
                buffer.len()
            )
        })
    }

    fn check_root(&self, root: usize) -> Result<(), CommError> {
        self.check(root < self.size(), || format!("expected a root below {}, got {root}", self.size()))
    }

    /// Reduces the members' buffers; every member's then holds the result.
    #[track_caller]
    pub fn all_reduce(&self, buffer: Buffer, element: Element, reduce: Reduce) -> Result<Pending, CommError> {
        self.check_reduction(&buffer, element, reduce)?;
        self.check_writable(&buffer)?;
        self.start(Op::AllReduce { element, reduce }, Some(buffer), None)
    }

    /// Joins the members' buffers side by side, in each of `outer` rows. Gives the operand, then the result.
    #[track_caller]
    pub fn all_gather(&self, buffer: Buffer, outer: usize) -> Result<Pending, CommError> {
        self.check_rows(&buffer, 1, outer, "a byte")?;
        let result = self.heap().alloc(buffer.len() * self.size())?;
        self.start(Op::AllGather { outer }, Some(buffer), Some(result))
    }

    /// Joins buffers of different sizes; `sizes` are those of all members in one row. Gives the operand, then the
    /// result.
    #[track_caller]
    pub fn all_gather_v(
        &self,
        buffer: Buffer,
        sizes: Vec<usize>,
        outer: usize,
    ) -> Result<Pending, CommError> {
        let mine = sizes.get(self.rank()).map(|size| size * outer);
        self.check(sizes.len() == self.size() && mine == Some(buffer.len()), || {
            format!(
                "expected a size for each of {} members, with {} bytes here, got {sizes:?} in {outer} rows",
                self.size(),
                buffer.len()
            )
        })?;
        let result = self.heap().alloc(sizes.iter().sum::<usize>() * outer)?;
        self.start(Op::AllGatherV { sizes, outer }, Some(buffer), Some(result))
    }

    /// Reduces the members' buffers and gives each its part of each of `outer` rows. Gives the operand, then the
    /// result.
    #[track_caller]
    pub fn reduce_scatter(
        &self,
        buffer: Buffer,
        element: Element,
        reduce: Reduce,
        outer: usize,
    ) -> Result<Pending, CommError> {
        self.check_reduction(&buffer, element, reduce)?;
        self.check_rows(&buffer, self.size() * element.size(), outer, "the members' elements")?;
        let result = self.heap().alloc(buffer.len() / self.size())?;
        self.start(Op::ReduceScatter { element, reduce, outer }, Some(buffer), Some(result))
    }

    /// Reduces the members' buffers and gives each a part of its own size of each row. Gives the operand, then the
    /// result.
    #[track_caller]
    pub fn reduce_scatter_v(
        &self,
        buffer: Buffer,
        element: Element,
        reduce: Reduce,
        sizes: Vec<usize>,
        outer: usize,
    ) -> Result<Pending, CommError> {
        self.check_reduction(&buffer, element, reduce)?;
        let whole = sizes.iter().sum::<usize>() * outer;
        let even = sizes.len() == self.size() && sizes.iter().all(|size| size.is_multiple_of(element.size()));
        self.check(even && whole == buffer.len(), || {
            format!("expected a size for each of {} members that add up to {} bytes in {outer} rows, got {sizes:?}", self.size(), buffer.len())
        })?;
        let result = self.heap().alloc(sizes[self.rank()] * outer)?;
        self.start(Op::ReduceScatterV { element, reduce, sizes, outer }, Some(buffer), Some(result))
    }

    /// Sends `ins[m]` bytes to each member m and receives `outs[m]` from it. Gives the operand, then the result.
    #[track_caller]
    pub fn all_to_all(
        &self,
        buffer: Buffer,
        ins: Vec<usize>,
        outs: Vec<usize>,
    ) -> Result<Pending, CommError> {
        let n = self.size();
        self.check(ins.len() == n && outs.len() == n && ins.iter().sum::<usize>() == buffer.len(), || {
            format!("expected {n} splits each way, with {} bytes in, got {ins:?} and {outs:?}", buffer.len())
        })?;
        self.check(n * 8 <= crate::row::STAGE, || {
            format!("expected at most {} members, got {n}", crate::row::STAGE / 8)
        })?;
        let result = self.heap().alloc(outs.iter().sum())?;
        self.start(Op::AllToAll { ins, outs }, Some(buffer), Some(result))
    }

    /// Gives every member the root's bytes, in place.
    #[track_caller]
    pub fn broadcast(&self, buffer: Buffer, root: usize) -> Result<Pending, CommError> {
        self.check_root(root)?;
        if self.rank() != root {
            self.check_writable(&buffer)?;
        }
        self.start(Op::Broadcast { root }, Some(buffer), None)
    }

    /// Reduces the members' buffers into the root's, in place; the others keep theirs.
    #[track_caller]
    pub fn reduce(
        &self,
        buffer: Buffer,
        element: Element,
        reduce: Reduce,
        root: usize,
    ) -> Result<Pending, CommError> {
        self.check_root(root)?;
        self.check_reduction(&buffer, element, reduce)?;
        if self.rank() == root {
            self.check_writable(&buffer)?;
        }
        self.start(Op::Reduce { element, reduce, root }, Some(buffer), None)
    }

    /// Joins the members' buffers at the root. Gives the operand, then at the root the result.
    #[track_caller]
    pub fn gather(&self, buffer: Buffer, root: usize, outer: usize) -> Result<Pending, CommError> {
        self.check_root(root)?;
        self.check_rows(&buffer, 1, outer, "a byte")?;
        let result =
            if self.rank() == root { Some(self.heap().alloc(buffer.len() * self.size())?) } else { None };
        self.start(Op::Gather { outer, root }, Some(buffer), result)
    }

    /// Gives each member its part of each row of the root's buffer. Gives the operand, then the result.
    #[track_caller]
    pub fn scatter(&self, buffer: Buffer, root: usize, outer: usize) -> Result<Pending, CommError> {
        self.check_root(root)?;
        self.check_rows(&buffer, self.size(), outer, "the number of members")?;
        let result = self.heap().alloc(buffer.len() / self.size())?;
        self.start(Op::Scatter { outer, root }, Some(buffer), Some(result))
    }

    /// Sends along a table from each member to another or none. Gives the operand, then what was received, zeros
    /// where nothing was.
    #[track_caller]
    pub fn permute(&self, buffer: Buffer, to: Vec<Option<usize>>) -> Result<Pending, CommError> {
        let n = self.size();
        let distinct = to
            .iter()
            .flatten()
            .enumerate()
            .all(|(i, a)| *a < n && !to.iter().flatten().take(i).any(|b| a == b));
        self.check(to.len() == n && distinct, || {
            format!("expected {n} entries, distinct members or none, got {to:?}")
        })?;
        let result = self.heap().alloc(buffer.len())?;
        self.start(Op::Permute { to }, Some(buffer), Some(result))
    }

    /// Completes after all members have started it.
    #[track_caller]
    pub fn barrier(&self) -> Result<Pending, CommError> {
        self.start(Op::Barrier, None, None)
    }

    /// A batch of sends and receives. Gives back their buffers, sends first, when all have met their other end.
    #[track_caller]
    pub fn exchange(&self, sends: Vec<Message>, recvs: Vec<Message>) -> Result<Pending, CommError> {
        for message in sends.iter().chain(&recvs) {
            self.check(message.peer < self.size(), || {
                format!("expected a peer below {}, got {}", self.size(), message.peer)
            })?;
        }
        recvs.iter().try_for_each(|message| self.check_writable(&message.buffer))?;
        let site = self.heap().site(Location::caller())?;
        let mut state = self.inner.state.borrow_mut();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let batch = state.next_batch;
        state.next_batch += 1;
        state.mails.start(batch, sends, recvs, site);
        drop(state);
        self.inner.advance()?;
        Ok(Pending { inner: Rc::clone(&self.inner), what: What::Batch(batch) })
    }

    /// A buffer that takes a result in place must not be read by peers any more.
    fn check_writable(&self, buffer: &Buffer) -> Result<(), CommError> {
        self.check(buffer.is_released(), || {
            "expected a buffer that no peer reads any more: ask for `bytes_mut` first, which waits for its release".into()
        })
    }

    /// Makes operations in flight go on; never waits.
    pub fn poll(&self) -> Result<(), CommError> {
        self.inner.advance()
    }

    /// The group of the list that holds this rank, where one does. All members call it with the same lists of their
    /// places in this group; lists share no member.
    #[track_caller]
    pub fn subgroup(&self, lists: &[Vec<usize>], until: Instant) -> Result<Option<Group>, CommError> {
        let mut seen = vec![false; self.size()];
        for member in lists.iter().flatten() {
            let free = seen.get(*member).is_some_and(|seen| !seen);
            self.check(free, || format!("expected distinct members below {}, got {member}", self.size()))?;
            seen[*member] = true;
        }
        let list = lists.iter().find(|list| list.contains(&self.rank()));
        // Never freed: a peer may look at a row after its owner has dropped the group.
        let row = list.map(|list| self.heap().alloc_for_ever(Row::size(list.len()))).transpose()?;
        let mut offset = self.heap().alloc(8)?;
        let at = row.map_or(u64::MAX, |at| at as u64);
        offset.bytes_mut(until)?.copy_from_slice(&at.to_le_bytes());
        if let (Some(at), Some(list)) = (row, list) {
            // Its memory may have been used before; nobody knows yet where it is.
            for word in (0..Row::size(list.len())).step_by(8) {
                self.heap().segment().word(at + word).store(0, Release);
            }
        }
        let offsets = self.all_gather(offset, 1)?.wait(until)?;
        let Some(list) = list else { return Ok(None) };
        let place = |member: &usize| {
            let bytes = &offsets[1].bytes()[member * 8..member * 8 + 8];
            let at = bytes.iter().rev().fold(0usize, |a, b| a << 8 | usize::from(*b));
            Row { segment: Arc::clone(&self.inner.members.rows[*member].segment), at }
        };
        let rows = list.iter().map(place).collect();
        let me = list.iter().position(|member| *member == self.rank()).unwrap_or(0);
        let ranks = list.iter().map(|member| self.inner.ranks[*member]).collect();
        Ok(Some(Group::new(rows, me, ranks, Arc::clone(self.heap()), Arc::clone(&self.inner.alarm))))
    }
}
