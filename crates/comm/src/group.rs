//! A group: starts operations, makes them go on, and waits for them, never past a deadline.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use crate::CommError;
use crate::call::{Call, Members, Op};
use crate::element::{Element, Reduce};
use crate::error::Side;
use crate::heap::{Buffer, Heap};
use crate::mail::{Mails, Message};
use crate::row::{Row, SLOTS, Word};

/// A rank's place among the ranks that communicate. One thread uses it; its clones are the same group.
#[derive(Clone)]
pub struct Group {
    inner: Rc<Inner>,
}

struct Inner {
    members: Members,
    /// The members by their number in the world.
    ranks: Vec<usize>,
    heap: Arc<Heap>,
    alarm: Arc<Alarm>,
    /// Whether waiting may spin: there is a core for each rank.
    spins: bool,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// The number of the next collective.
    next: u64,
    active: VecDeque<Call>,
    finished: BTreeMap<u64, Vec<Buffer>>,
    mails: Mails,
    next_batch: u64,
    failed: Option<CommError>,
}

/// Says that a rank of the world has failed: one that panicked here, or one that somebody who watches reports.
#[derive(Default)]
pub(crate) struct Alarm {
    panicked: AtomicU64,
    watch: Option<Watch>,
}

/// Whoever watches over ranks that are processes: what has happened, if anything. Asked while waiting, so it must be
/// quick where nothing has.
pub(crate) type Watch = Box<dyn Fn() -> Option<String> + Send + Sync>;

impl Alarm {
    pub(crate) fn watched(watch: Watch) -> Alarm {
        Alarm { watch: Some(watch), ..Alarm::default() }
    }

    pub(crate) fn raise(&self, rank: usize) {
        // The first one counts.
        let _ = self.panicked.compare_exchange(0, rank as u64 + 1, Release, Acquire);
    }

    pub(crate) fn panicked(&self) -> Option<usize> {
        self.panicked.load(Acquire).checked_sub(1).map(|rank| rank as usize)
    }

    fn failure(&self) -> Option<CommError> {
        let panicked = self.panicked().map(|rank| CommError::Panicked { rank });
        panicked.or_else(|| self.watch.as_ref().and_then(|watch| watch()).map(CommError::World))
    }
}

/// How long a waiter spins before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

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
        Ok(Pending { group: self.clone(), what: What::Call(number) })
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
        Ok(Pending { group: self.clone(), what: What::Batch(batch) })
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

impl Inner {
    /// Makes everything in flight go as far as it can.
    fn advance(&self) -> Result<(), CommError> {
        let outcome = self.try_advance();
        if let Err(error) = &outcome {
            self.state.borrow_mut().failed.get_or_insert_with(|| error.clone());
            if let CommError::Lengths { from, .. } | CommError::Splits { from, .. } = error {
                // Only this member can see it, so it tells the others that it stopped.
                let row = &self.members.rows[self.members.me];
                row.set_failure(*from, u64::MAX);
                row.ring();
            }
        }
        outcome
    }

    fn try_advance(&self) -> Result<(), CommError> {
        if let Some(error) = &self.state.borrow().failed {
            return Err(error.clone());
        }
        let members = &self.members;
        let mut active = std::mem::take(&mut self.state.borrow_mut().active);
        let mut outcome = Ok(());
        let mut kept = VecDeque::new();
        for mut call in active.drain(..) {
            match outcome.clone().and_then(|()| self.advance_call(&mut call)) {
                Ok(true) => {
                    let buffers = call.operand.into_iter().chain(call.result).collect();
                    self.state.borrow_mut().finished.insert(call.number, buffers);
                }
                Ok(false) => kept.push_back(call),
                Err(error) => {
                    outcome = Err(error);
                    kept.push_back(call);
                }
            }
        }
        let mut state = self.state.borrow_mut();
        let done = kept.front().map_or(state.next, |call| call.number);
        state.active = kept;
        let row = &members.rows[members.me];
        if row.done() != done {
            row.set_done(done);
            row.ring();
        }
        outcome?;
        state.mails.advance(members)
    }

    /// One call; true when it is finished.
    fn advance_call(&self, call: &mut Call) -> Result<bool, CommError> {
        let members = &self.members;
        if !call.published {
            let free = |row: &Row| call.number < SLOTS || row.done() > call.number - SLOTS;
            if !members.rows.iter().all(free) {
                return Ok(false);
            }
            let site = self.heap.site(call.site)?;
            call.publish(members, site);
        }
        for member in call.needs(members) {
            let row = &members.rows[member];
            if !row.has_published(call.number) {
                return Ok(false);
            }
            if !call.agrees(row) {
                let mine = &members.rows[members.me];
                mine.set_failure(member, call.number);
                mine.ring();
                return Err(self.mismatch(members.me, member, call.number));
            }
        }
        call.step(members)
    }

    /// What two members published for one call.
    fn mismatch(&self, a: usize, b: usize, call: u64) -> CommError {
        let mut sides = [self.side(a.min(b), call), self.side(a.max(b), call)];
        if sides[0].what == sides[1].what {
            sides.iter_mut().for_each(|side| side.what += ", with other sizes, routes or factors");
        }
        CommError::Mismatch { call, sides: Box::new(sides) }
    }

    fn side(&self, member: usize, call: u64) -> Side {
        let row = &self.members.rows[member];
        let (at, len) = (row.get(call, Word::Site) as usize, row.get(call, Word::SiteLength) as usize);
        // SAFETY: the text of a call site is written once, before its place is published, and never freed.
        let text = unsafe { row.segment.read(at, len) };
        Side {
            rank: self.ranks[member],
            what: format!(
                "{}, {} bytes",
                Op::describe(row.get(call, Word::What)),
                row.get(call, Word::Bytes)
            ),
            site: String::from_utf8_lossy(text).into_owned(),
        }
    }

    /// What has gone wrong elsewhere.
    fn elsewhere(&self) -> Option<CommError> {
        if let Some(error) = self.alarm.failure() {
            return Some(error);
        }
        let rows = self.members.rows.iter().enumerate();
        let (member, (other, call)) = rows.filter_map(|(i, row)| Some((i, row.failure()?))).next()?;
        if call == u64::MAX {
            return Some(CommError::Elsewhere { rank: self.ranks[member] });
        }
        Some(self.mismatch(member, other, call))
    }
}

impl Drop for Inner {
    /// What is in flight still completes: peers may need this member's part of it.
    fn drop(&mut self) {
        let until = Instant::now() + DRAIN;
        let busy = || {
            let state = self.state.borrow();
            !state.active.is_empty() || state.mails.has_unposted()
        };
        while busy() && self.advance().is_ok() && self.elsewhere().is_none() && Instant::now() < until {
            std::thread::yield_now();
        }
    }
}

/// How long a dropped group goes on with what is in flight.
const DRAIN: Duration = Duration::from_secs(1);

enum What {
    Call(u64),
    Batch(u64),
}

/// An operation in flight. Dropping it lets the operation run on; its buffers are freed when it has finished.
#[must_use = "the buffers of an operation come back by waiting for it"]
pub struct Pending {
    group: Group,
    what: What,
}

impl Pending {
    fn take(&self) -> Option<Vec<Buffer>> {
        let mut state = self.group.inner.state.borrow_mut();
        match self.what {
            What::Call(number) => state.finished.remove(&number),
            What::Batch(batch) => state.mails.take_finished(batch),
        }
    }

    /// The buffers, if the operation is finished; never waits.
    pub fn test(&self) -> Result<Option<Vec<Buffer>>, CommError> {
        if let Some(buffers) = self.take() {
            return Ok(Some(buffers));
        }
        self.group.inner.advance()?;
        Ok(self.take())
    }

    /// The buffers, when the operation is finished: the operand where there is one, then the result where it is
    /// another. Never waits past the time given.
    pub fn wait(self, until: Instant) -> Result<Vec<Buffer>, CommError> {
        let inner = &self.group.inner;
        let start = Instant::now();
        loop {
            if let Some(buffers) = self.test()? {
                return Ok(buffers);
            }
            if let Some(error) = inner.elsewhere() {
                inner.state.borrow_mut().failed.get_or_insert_with(|| error.clone());
                return Err(error);
            }
            let now = Instant::now();
            if now >= until {
                let error = self.late();
                inner.state.borrow_mut().failed.get_or_insert_with(|| error.clone());
                return Err(error);
            }
            if inner.spins && now - start < SPIN {
                std::hint::spin_loop();
                continue;
            }
            match self.waits_for() {
                Some(member) => inner.members.rows[member].sleep(until, || self.could_go_on(member)),
                None => std::thread::yield_now(),
            }
        }
    }

    /// The members that have not done their part, for messages and for sleeping.
    fn missing(&self) -> Vec<usize> {
        let inner = &self.group.inner;
        let state = inner.state.borrow();
        let number = match self.what {
            What::Call(number) => number,
            What::Batch(batch) => return state.mails.waits_for(batch).into_iter().collect(),
        };
        let Some(call) = state.active.iter().find(|call| call.number == number) else { return Vec::new() };
        let rows = &inner.members.rows;
        if !call.published {
            return (0..rows.len()).filter(|m| rows[*m].done() + SLOTS <= number).collect();
        }
        let unpublished: Vec<usize> =
            call.needs(&inner.members).filter(|m| !rows[*m].has_published(number)).collect();
        if unpublished.is_empty() { call.unready(&inner.members) } else { unpublished }
    }

    fn waits_for(&self) -> Option<usize> {
        self.missing().into_iter().find(|member| *member != self.group.rank())
    }

    /// Whether something changed since the last look, so that sleeping would miss it.
    fn could_go_on(&self, member: usize) -> bool {
        !self.missing().contains(&member) || self.group.inner.alarm.panicked().is_some()
    }

    fn late(&self) -> CommError {
        let ranks = self.missing().into_iter().map(|member| self.group.inner.ranks[member]).collect();
        match self.what {
            What::Call(number) => {
                let state = self.group.inner.state.borrow();
                let call = state.active.iter().find(|call| call.number == number);
                let what = call.map_or(String::new(), |call| Op::describe(call.op.what()));
                CommError::Deadline { what: format!("{what}: call {number}"), missing: ranks }
            }
            What::Batch(_) => CommError::Deadline { what: "exchange".into(), missing: ranks },
        }
    }
}
