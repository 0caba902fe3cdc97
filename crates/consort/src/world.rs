//! State shared by the tensors of one thread: mesh, heap, groups, threads, deadline.

use std::cell::{Cell, OnceCell, Ref, RefCell, RefMut};
use std::collections::BTreeMap;
use std::panic::Location;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use consort_comm::{CommError, DEFAULT_DEADLINE, Heap, Note, from_now, report_unseen};
use consort_ir::index::{Facts, Sym};
use consort_ir::mesh;
use consort_ir::ops::EvalCx;
use consort_runtime::device::Cpu;
use consort_runtime::kernels::Kernel;
use consort_types::{Digest, GroupName, Rank};

use crate::error::{Error, Result};
use crate::flight::{Flight, Way};
use crate::memo::Memo;
use crate::pending::Started;

/// Default size of a rank's heap, in bytes. Pages are allocated on first use.
pub(crate) const HEAP: usize = 32 << 30;

/// Bytes that ops write between two polls of operations in flight: some tens of microseconds.
const POLL: usize = 1 << 17;

/// The world of a thread: this rank, and how it reaches the others.
pub(crate) struct World {
    /// Tensors of different worlds do not mix; 0 is a thread that has joined none, whose tensors mix with any.
    pub(crate) id: u32,
    pub(crate) rank: Rank,
    mesh: RefCell<mesh::Mesh>,
    /// The colours and keys by which this rank made groups, by their names.
    pub(crate) splits: RefCell<BTreeMap<String, (Option<u32>, i64)>>,
    facts: RefCell<Facts>,
    symbols: BTreeMap<Sym, i64>,
    /// The buffer by which compiled functions agree with the other ranks at each call.
    pub(crate) envelope: Cell<Option<consort_comm::Buffer>>,
    /// The last completed operation: the next one reuses its allocation, if it has no other owner.
    pub(crate) landed: Cell<Option<Rc<Flight>>>,
    /// The operations of the handle that is being made, if one is.
    pub(crate) starts: RefCell<Option<Started>>,
    /// `None` if there are only shapes.
    comm: Option<Comm>,
    cpu: Cpu,
    timeout: Cell<Duration>,
    /// Whether groups have progress threads.
    is_helped: Cell<bool>,
    /// Work, in bytes, since operations in flight were last advanced.
    work: Cell<usize>,
    copied: Cell<u64>,
    /// Whether calls are warm-up calls.
    pub(crate) warming: Cell<bool>,
    unwaited: RefCell<Vec<Unwaited>>,
    memo: RefCell<Memo>,
}

/// How a rank reaches the others.
struct Comm {
    all: consort_comm::Group,
    /// Groups made of it; `None` if this rank is in no list. They stay, so that their names keep their meaning.
    groups: RefCell<Vec<(GroupName, Option<consort_comm::Group>)>>,
    /// The control connection, dropped last.
    control: Option<consort_comm::World>,
}

/// An operation whose result nobody waited for before it was dropped. It completes all the same.
///
/// [`Mesh::unwaited`](crate::Mesh::unwaited) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unwaited {
    /// The operation.
    pub op: &'static str,
    /// Where it was started.
    pub site: &'static Location<'static>,
}

thread_local! {
    static CURRENT: RefCell<Weak<World>> = const { RefCell::new(Weak::new()) };
    static ALONE: OnceCell<Rc<World>> = const { OnceCell::new() };
}

static WORLDS: AtomicU32 = AtomicU32::new(1);

impl World {
    /// A world of ranks that communicate, which becomes this thread's.
    pub(crate) fn join(
        mesh: mesh::Mesh,
        all: consort_comm::Group,
        control: Option<consort_comm::World>,
    ) -> Rc<World> {
        let rank = Rank(all.rank() as u32);
        let comm = Comm { all, groups: RefCell::new(Vec::new()), control };
        let world = Rc::new(World::new(WORLDS.fetch_add(1, Relaxed), mesh, rank, Some(comm)));
        CURRENT.with(|current| *current.borrow_mut() = Rc::downgrade(&world));
        world
    }

    /// A world of shapes without data, seen from one of its ranks.
    pub(crate) fn of_shapes(mesh: mesh::Mesh, rank: Rank) -> Rc<World> {
        Rc::new(World::new(WORLDS.fetch_add(1, Relaxed), mesh, rank, None))
    }

    fn new(id: u32, mesh: mesh::Mesh, rank: Rank, comm: Option<Comm>) -> World {
        World {
            id,
            rank,
            facts: RefCell::new(Facts::new(&mesh)),
            mesh: RefCell::new(mesh),
            splits: RefCell::default(),
            symbols: BTreeMap::new(),
            comm,
            cpu: Cpu::default(),
            timeout: Cell::new(DEFAULT_DEADLINE),
            is_helped: Cell::new(false),
            work: Cell::new(0),
            copied: Cell::new(0),
            warming: Cell::new(false),
            unwaited: RefCell::new(Vec::new()),
            memo: RefCell::new(Memo::default()),
            envelope: Cell::new(None),
            landed: Cell::new(None),
            starts: RefCell::new(None),
        }
    }

    /// This thread's world; a world of one rank if it has joined none.
    pub(crate) fn current() -> Result<Rc<World>> {
        // While a thread exits, the thread-local may be gone.
        match CURRENT.try_with(|current| current.borrow().upgrade()).ok().flatten() {
            Some(world) => Ok(world),
            None => World::alone(),
        }
    }

    fn alone() -> Result<Rc<World>> {
        let over =
            |_| Error::new("heap", "tensors cannot be made while their thread exits", Location::caller());
        ALONE
            .try_with(|alone| {
                if let Some(world) = alone.get() {
                    return Ok(Rc::clone(world));
                }
                let launch = consort_comm::env::Launch::read(|_| None);
                let failed = |failure| Error::of("heap", failure, Location::caller());
                let launch = launch.map_err(|error| failed(error.failure()))?;
                let control = consort_comm::World::join(&launch, DEFAULT_DEADLINE);
                let control = control.map_err(|error| failed(error.failure()))?;
                let all = control.group(HEAP, DEFAULT_DEADLINE).map_err(|error| failed(error.failure()))?;
                let comm = Comm { all, groups: RefCell::new(Vec::new()), control: Some(control) };
                let world = Rc::new(World::new(0, mesh::Mesh::default(), Rank(0), Some(comm)));
                Ok(Rc::clone(alone.get_or_init(|| world)))
            })
            .map_err(over)?
    }

    pub(crate) fn mesh(&self) -> Ref<'_, mesh::Mesh> {
        self.mesh.borrow()
    }

    /// Changes the mesh: list groups are added to it.
    pub(crate) fn change_mesh<T>(&self, change: impl FnOnce(&mut mesh::Mesh) -> T) -> T {
        let mut mesh = self.mesh.borrow_mut();
        let outcome = change(&mut mesh);
        *self.facts.borrow_mut() = Facts::new(&mesh);
        outcome
    }

    pub(crate) fn facts(&self) -> RefMut<'_, Facts> {
        self.facts.borrow_mut()
    }

    /// The context in which size expressions are evaluated on this rank.
    pub(crate) fn sizes<'a>(&'a self, mesh: &'a mesh::Mesh) -> EvalCx<'a> {
        EvalCx { mesh, rank: self.rank, symbols: &self.symbols }
    }

    /// The heap of the tensors; `None` if there are only shapes.
    pub(crate) fn heap(&self) -> Option<&Arc<Heap>> {
        self.comm.as_ref().map(|comm| comm.all.heap())
    }

    /// The group of all ranks; `None` if there are only shapes.
    pub(crate) fn all(&self) -> Option<&consort_comm::Group> {
        self.comm.as_ref().map(|comm| &comm.all)
    }

    pub(crate) fn control(&self) -> Option<&consort_comm::World> {
        self.comm.as_ref()?.control.as_ref()
    }

    /// The group of this rank, if it is in one. All ranks must create a new one together.
    pub(crate) fn group(
        &self,
        over: GroupName,
        site: &'static Location<'static>,
    ) -> std::result::Result<Option<consort_comm::Group>, CommError> {
        let Some(comm) = &self.comm else { return Ok(None) };
        let mesh = self.mesh.borrow();
        if let GroupName::Axes(axes) = over
            && axes == mesh.all_axes()
        {
            return Ok(Some(comm.all.clone()));
        }
        if let Some((_, group)) = comm.groups.borrow().iter().find(|(other, _)| *other == over) {
            return Ok(group.clone());
        }
        let ranks = (0..mesh.n_ranks()).map(Rank);
        let mut lists: Vec<Vec<usize>> = ranks
            .filter_map(|rank| mesh.members(over, rank))
            .map(|members| members.into_iter().map(|rank| rank.0 as usize).collect())
            .collect();
        lists.sort();
        lists.dedup();
        let text = format!("make the group `{}` of the lists ", mesh.group_text(over));
        let digest = Digest::of(text.as_bytes());
        let recorder = comm.all.recorder();
        let (text, site) = (recorder.name(&text), recorder.site(site));
        let note = Note { digest, text, site, ..Note::default() };
        let group = comm.all.subgroup_as(&lists, from_now(self.timeout()), note)?;
        if let Some(group) = group.as_ref().filter(|_| self.is_helped.get()) {
            group.start_progress_thread();
        }
        comm.groups.borrow_mut().push((over, group.clone()));
        Ok(group)
    }

    /// All ranks' bytes, in rank order, in a numbered call on the group of all ranks.
    pub(crate) fn gather_bytes(
        &self,
        what: &str,
        mine: &[u8],
        site: &'static Location<'static>,
    ) -> Result<Vec<Vec<u8>>> {
        let Some(all) = self.all().filter(|all| all.size() > 1) else { return Ok(vec![mine.to_vec()]) };
        let note = || {
            let digest = Digest::of(what.as_bytes());
            let (text, site) = (all.recorder().name(what), all.recorder().site(site));
            Note { digest, text, site, ..Note::default() }
        };
        gather(all, self.timeout(), note, mine).map_err(|error| Error::comm("mesh", error, site))
    }

    /// All ranks' numbers, in rank order.
    pub(crate) fn gather(
        &self,
        what: &str,
        mine: &[i64],
        site: &'static Location<'static>,
    ) -> Result<Vec<i64>> {
        let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.gather_bytes(what, &bytes, site)?.concat();
        Ok(all.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
    }

    /// What computes.
    pub(crate) fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
        self.all().into_iter().for_each(|all| all.set_deadline(timeout));
    }

    /// Gives each group a progress thread; true if there are cores for them.
    pub(crate) fn start_progress_threads(&self) -> bool {
        self.is_helped.set(true);
        let Some(comm) = &self.comm else { return false };
        let groups = comm.groups.borrow();
        let all = groups.iter().filter_map(|(_, group)| group.as_ref()).chain([&comm.all]);
        // Counted, since `all` would stop at the first group without a core.
        all.filter(|group| !group.start_progress_thread()).count() == 0
    }

    /// Advances operations in flight before work that writes `bytes` bytes, if enough was done since the last time.
    #[inline]
    pub(crate) fn poll_for(&self, bytes: usize) -> std::result::Result<(), CommError> {
        let work = self.work.get().saturating_add(bytes);
        self.work.set(work);
        if work < POLL { Ok(()) } else { self.poll() }
    }

    #[cold]
    fn poll(&self) -> std::result::Result<(), CommError> {
        self.work.set(0);
        let Some(comm) = &self.comm else { return Ok(()) };
        let groups = comm.groups.borrow();
        let all = groups.iter().filter_map(|(_, group)| group.as_ref()).chain([&comm.all]);
        all.filter(|group| group.in_flight() > 0).try_for_each(consort_comm::Group::poll)
    }

    /// Bytes copied so that they could take part in communication.
    pub(crate) fn copied(&self) -> u64 {
        self.copied.get()
    }

    pub(crate) fn count_copy(&self, bytes: usize) {
        self.copied.set(self.copied.get() + bytes as u64);
    }

    /// Reports an error that the program has not seen and cannot see any more.
    #[cold]
    pub(crate) fn report(&self, error: &Error, note: &str) {
        report_unseen(Box::new(error.failure().clone()), note, self.control().is_some());
    }

    pub(crate) fn note_unwaited(&self, op: &'static str, site: &'static Location<'static>) {
        let mut list = self.unwaited.borrow_mut();
        let one = Unwaited { op, site };
        // Repeated drops at one line are one entry.
        if !list.contains(&one) {
            list.push(one);
        }
    }

    /// Adds an operation to the handle that is being made, if one is.
    #[inline]
    pub(crate) fn add_start(&self, way: impl FnOnce() -> Way) {
        if let Some(starts) = &mut *self.starts.borrow_mut() {
            starts.0.push(way());
        }
    }

    pub(crate) fn unwaited(&self) -> Vec<Unwaited> {
        self.unwaited.borrow().clone()
    }

    pub(crate) fn memo(&self) -> RefMut<'_, Memo> {
        self.memo.borrow_mut()
    }

    pub(crate) fn add_kernel(&self, kernel: Kernel) {
        self.cpu.add(kernel);
        *self.memo.borrow_mut() = Memo::default();
    }
}

/// All ranks' bytes, of any length, in rank order, gathered by agreements with these notes.
pub(crate) fn gather(
    all: &consort_comm::Group,
    timeout: Duration,
    note: impl Fn() -> Note,
    mine: &[u8],
) -> std::result::Result<Vec<Vec<u8>>, CommError> {
    let lengths = all.agree(&(mine.len() as u64).to_le_bytes(), note())?.wait_within(timeout)?;
    let lengths: Vec<usize> = lengths[1]
        .bytes()?
        .as_chunks::<8>()
        .0
        .iter()
        .map(|bytes| u64::from_le_bytes(*bytes) as usize)
        .collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    if longest == 0 {
        return Ok(vec![Vec::new(); lengths.len()]);
    }
    // Padded to one length, as a gather of equal parts needs.
    let mut padded = mine.to_vec();
    padded.resize(longest, 0);
    let bytes = all.agree(&padded, note())?.wait_within(timeout)?;
    let bytes = bytes[1].bytes()?;
    Ok(bytes.chunks_exact(longest).zip(&lengths).map(|(part, length)| part[..*length].to_vec()).collect())
}
