//! A program that the ranks agreed on, and the plans made of it: one for each binding of its symbols and each set of
//! arguments that were given away.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::Location;
use std::rc::Rc;
use std::time::{Duration, Instant};

use consort_ir::entity::Value;
use consort_ir::index::{Guard, Sym};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Effects, EqualOver, call_name};
use consort_ir::plan::{Region, RegionKind};
use consort_ir::program::{Block, Func, Node, Program};
use consort_ir::text::print_used;
use consort_ir::types::{TensorType, Type};
use consort_passes::{Binding, CompileError, Decided, PassCx, PassError, compile};
use consort_runtime::execute::{ArgValue, Exec, Out, OutTensor, RunCx};
use consort_types::layout::Layout;
use consort_types::{Axes, Failure};
use smallvec::SmallVec;

use crate::compile::log::log;
use crate::error::{Error, Result};
use crate::flight::Flight;
use crate::placement::Origin;
use crate::storage::Storage;
use crate::tensor::{CachedLayout, Tensor, constant_shape};
use crate::trace::Session;
use crate::world::World;

type Site = &'static Location<'static>;

/// How many plans of a graph are kept.
const PLANS: usize = 32;

/// A program and its plans.
pub(crate) struct Graph {
    pub(crate) decided: Decided,
    pub(crate) text: String,
    pub(crate) communicates: bool,
    /// The axes along which the roles of its ranks differ: its results differ over them too.
    pub(crate) roles_over: Axes,
    /// The lines that recorded its guards, as far as known.
    guard_sites: BTreeMap<Guard, Site>,
    plans: RefCell<Vec<Rc<Planned>>>,
    /// How many plans were made.
    pub(crate) planned: Cell<u64>,
    /// How long that took.
    pub(crate) planning: Cell<Duration>,
}

/// The tensor that an `equal_over` compares.
pub(crate) enum Compared {
    /// The argument of this number.
    Argument(usize),
    /// The result of an op, and the line that called it.
    Result(&'static str, Option<consort_types::Site>),
}

/// A plan, ready to run.
pub(crate) struct Planned {
    symbols: Vec<(Sym, i64)>,
    donated: Donated,
    exec: RefCell<Exec>,
    groups: Vec<Option<consort_comm::Group>>,
    /// Bytes of arguments with gaps that were packed, in all calls.
    packed: Cell<u64>,
    /// The arguments that the previous call packed, with their bytes.
    packs: RefCell<Vec<(usize, u64)>>,
    /// The axes over which each tensor of each result may differ.
    varies: Vec<Vec<Axes>>,
    /// Cached types and layouts of the result tensors at the previous call, in order.
    made: RefCell<Vec<Option<Typed>>>,
    /// The conditions on sizes from data, as errors name them, and the lines that need them.
    data_guards: Vec<(String, Site)>,
    pub(crate) func: Func,
}

/// The type and layout of a result tensor, and the plan's layout that they were derived from.
struct Typed {
    from: Rc<Layout>,
    ty: Rc<TensorType>,
    layout: Rc<CachedLayout>,
}

pub(crate) type Results = SmallVec<[Made; 1]>;

/// A result of a graph: one tensor, or those of a pending operation. `flight` is `None` if that is over.
pub(crate) struct Made {
    pub(crate) tensors: SmallVec<[Tensor; 1]>,
    pub(crate) flight: Option<Rc<Flight>>,
}

/// Which parameters were donated, one bit for each.
pub(crate) type Donated = SmallVec<[u64; 2]>;

/// An argument of a graph.
pub(crate) enum Given<'a> {
    Tensor(&'a Tensor),
    Size(i64),
}

impl Graph {
    /// Verifies and simplifies a traced function.
    pub(crate) fn new(session: &Session, func: Func, site: Site) -> Result<Graph> {
        let program = Program { mesh: session.world.mesh().clone(), funcs: vec![func] };
        let decided = compile(&program, &mut PassCx::default()).map_err(|error| match error {
            CompileError::Program(_) | CompileError::Pass(PassError::UserOp(_)) => {
                refused(error.failure(), site)
            }
            error => Error::of("compile", error.failure(), site),
        })?;
        let text = print_used(decided.program());
        let communicates = decided.program().funcs.iter().any(|func| starts(&func.body));
        let (plans, planned, planning) = Default::default();
        let roles_over = session.about.roles_over;
        let guard_sites = session.guard_sites.borrow().clone();
        Ok(Graph { decided, text, communicates, roles_over, guard_sites, plans, planned, planning })
    }

    pub(crate) fn func(&self) -> Option<&Func> {
        self.decided.program().funcs.first()
    }

    /// Whether the guards on sizes hold.
    pub(crate) fn holds(&self, symbols: &[(Sym, i64)]) -> bool {
        self.failed_guard(symbols).is_none()
    }

    /// The first guard on sizes that fails, and the line that recorded it.
    pub(crate) fn failed_guard(&self, symbols: &[(Sym, i64)]) -> Option<(&Guard, Option<Site>)> {
        let env = |sym: Sym| symbols.iter().find(|(own, _)| *own == sym).map(|(_, value)| *value);
        // A guard on data-dependent sizes is checked when they are read.
        let failed = self.func()?.guards.iter().find(|guard| guard.holds(&env) == Ok(false))?;
        Some((failed, self.guard_sites.get(failed).copied()))
    }

    /// The guards as text, with the lines that recorded them.
    pub(crate) fn guards_text(&self) -> Vec<String> {
        let (mesh, guards) = (self.decided.mesh(), self.func().map_or(&[][..], |func| &func.guards));
        let text = |guard: &Guard| match self.guard_sites.get(guard) {
            Some(site) => format!("{} at {}:{}", guard.display(mesh), site.file(), site.line()),
            None => guard.display(mesh).to_string(),
        };
        guards.iter().map(text).collect()
    }

    /// The plan for these sizes and donated arguments; made on a cache miss.
    pub(crate) fn plan(
        &self,
        world: &World,
        symbols: &[(Sym, i64)],
        donated: &Donated,
        site: Site,
    ) -> Result<Rc<Planned>> {
        let fits = |planned: &&Rc<Planned>| planned.symbols == symbols && planned.donated == *donated;
        let found = self.plans.borrow().iter().position(|planned| fits(&planned));
        if let Some(at) = found {
            // The plan that runs is the first of the list.
            let mut plans = self.plans.borrow_mut();
            plans[..=at].rotate_right(1);
            return Ok(Rc::clone(&plans[0]));
        }
        let start = Instant::now();
        let planned = Rc::new(self.make_plan(world, symbols, donated, site)?);
        self.planning.set(self.planning.get() + start.elapsed());
        let mut plans = self.plans.borrow_mut();
        plans.insert(0, Rc::clone(&planned));
        plans.truncate(PLANS);
        self.planned.set(self.planned.get() + 1);
        Ok(planned)
    }

    fn make_plan(
        &self,
        world: &World,
        symbols: &[(Sym, i64)],
        donated: &Donated,
        site: Site,
    ) -> Result<Planned> {
        let failed = |failure| Error::of("compile", failure, site);
        let func = self.func().ok_or_else(|| failed(Failure::new("there is no function")))?;
        let is_given =
            |place: usize| donated.get(place / 64).is_some_and(|bits| bits >> (place % 64) & 1 == 1);
        let given: Vec<bool> = (0..func.body.params.len()).map(is_given).collect();
        let values: BTreeMap<Sym, i64> = symbols.iter().copied().collect();
        let binding = Binding { rank: world.rank, symbols: &values, donated: &given };
        let mesh = self.decided.mesh();
        let func = self.decided.bind(&func.name, &binding, &mut PassCx::default());
        let func = func.map_err(|error| match error {
            CompileError::UserOp(failure) => refused(failure, site),
            error => failed(error.failure()),
        })?;
        log("plan", || print_used(&Program { mesh: mesh.clone(), funcs: vec![func.clone()] }));
        let exec = Exec::lower(mesh, &func, world.cpu()).map_err(|error| failed(error.failure()))?;
        let groups =
            exec.groups().iter().map(|over| world.group(*over, site)).collect::<std::result::Result<_, _>>();
        let groups = groups.map_err(|error| Error::comm("compile", error, site))?;
        let of = |tensor: &TensorType| tensor.varies.union(self.roles_over);
        let varies = |ty: &Type| ty.tensors().iter().map(of).collect::<Vec<_>>();
        let varies: Vec<_> =
            func.body.results.iter().filter_map(|value| func.ty(*value)).map(varies).collect();
        let made = varies.iter().flatten().map(|_| None).collect();
        let made = RefCell::new(made);
        let (symbols, donated, exec) = (symbols.to_vec(), donated.clone(), RefCell::new(exec));
        let (packed, packs) = Default::default();
        let data_guards = func.guards.iter().filter_map(|guard| {
            let mut is_of_data = false;
            guard.symbols(&mut |sym| is_of_data |= matches!(sym, Sym::Unbacked(_)));
            let site = self.guard_sites.get(guard).filter(|_| is_of_data)?;
            Some((format!("`{}`", guard.display(mesh)), *site))
        });
        let data_guards = data_guards.collect();
        Ok(Planned { symbols, donated, exec, groups, packed, packs, varies, made, data_guards, func })
    }

    /// The cached plans, the last one used first.
    pub(crate) fn plans(&self) -> Vec<Rc<Planned>> {
        self.plans.borrow().clone()
    }
}

/// The error of an op in a program, at the user's line.
#[cold]
fn refused(mut failure: Box<Failure>, site: Site) -> Error {
    // Users know an operation by the name of its call.
    let op = std::mem::take(&mut failure.op);
    Error::of(if op.is_empty() { "compile" } else { call_name(&op) }, failure, site)
}

fn starts(block: &Block) -> bool {
    let starts = |effects| matches!(effects, Effects::Collective(_) | Effects::Messages(_));
    block.nodes.iter().any(|node| starts(node.op.effects()) || node.blocks.iter().any(self::starts))
}

impl Planned {
    /// Bytes that were copied so that they could take part in communication, in all calls.
    pub(crate) fn copied_bytes(&self) -> u64 {
        self.packed.get() + self.exec.try_borrow().map_or(0, |exec| exec.copied_bytes())
    }

    /// What it is for: the values of its symbols, and the arguments that it may write.
    pub(crate) fn about(&self, mesh: &Mesh) -> String {
        let donated = (0..self.func.body.params.len())
            .filter(|place| self.donated.get(place / 64).is_some_and(|bits| bits >> (place % 64) & 1 == 1));
        let donated = donated.filter_map(|place| self.func.body.params.get(place));
        let symbols = self
            .symbols
            .iter()
            .map(|(sym, value)| format!("{} = {value}", consort_ir::index::Index::sym(*sym).display(mesh)));
        let parts: Vec<String> = symbols.chain(donated.map(|value| format!("{value} donated"))).collect();
        if parts.is_empty() { "no argument donated".to_string() } else { parts.join(", ") }
    }

    /// The tensor that the `equal_over` of a source line compares.
    pub(crate) fn compared_at(&self, site: consort_types::Site) -> Option<Compared> {
        fn find<'a>(block: &'a Block, is_wanted: &impl Fn(&Node) -> bool) -> Option<&'a Node> {
            block.nodes.iter().find_map(|node| match is_wanted(node) {
                true => Some(node),
                false => node.blocks.iter().find_map(|block| find(block, is_wanted)),
            })
        }
        let body = &self.func.body;
        let node =
            find(body, &|node| node.op.info().name == EqualOver::INFO.name && node.site == Some(site))?;
        let mut tensor = *node.args.first()?;
        loop {
            if let Some(place) = body.params.iter().position(|param| *param == tensor) {
                return Some(Compared::Argument(place));
            }
            let made = find(body, &|node| node.results.contains(&tensor))?;
            // Of several axes each has a comparison: of the result of the one before.
            match (made.op.info().name == EqualOver::INFO.name, made.args.first()) {
                (true, Some(before)) => tensor = *before,
                _ => return Some(Compared::Result(made.op.info().name, made.site)),
            }
        }
    }

    /// The arguments with gaps that the previous call packed: parameters with their bytes.
    pub(crate) fn packs(&self) -> Vec<(Value, u64)> {
        let params = &self.func.body.params;
        let value = |(place, bytes): &(usize, u64)| params.get(*place).map(|value| (*value, *bytes));
        self.packs.borrow().iter().filter_map(value).collect()
    }

    /// The ops without a kernel, which run by their reference evaluation.
    pub(crate) fn evaluated(&self) -> Vec<&'static str> {
        self.exec.try_borrow().map_or_else(|_| Vec::new(), |exec| exec.evaluated().into_iter().collect())
    }

    /// Runs it. Arguments that were given away may be written.
    pub(crate) fn run(&self, world: &Rc<World>, given: &[Given<'_>], site: Site) -> Result<Results> {
        let failed = |error| Error::comm("compile", error, site);
        let heap = world
            .heap()
            .ok_or_else(|| Error::new("compile", "this mesh has no memory: it computes shapes only", site))?;
        let mut args: SmallVec<[ArgValue; 4]> = SmallVec::new();
        // Contiguous copies of the arguments that have gaps, by parameter.
        let mut whole: Vec<(usize, Tensor)> = Vec::new();
        for (place, one) in given.iter().enumerate() {
            let mut tensor = match one {
                Given::Size(size) => {
                    args.push(ArgValue::Size(*size));
                    continue;
                }
                Given::Tensor(tensor) => *tensor,
            };
            if !tensor.layout.is_contiguous() {
                whole.push((place, tensor.contiguous_at(site)?));
                tensor = whole.last().map_or(tensor, |(_, packed)| packed);
            }
            let storage = tensor.data("compile", site)?;
            let range = tensor.byte_range();
            let pending = storage.has_flights().then(|| {
                let (storage, range) = (Rc::clone(storage), range.clone());
                Rc::new(move || storage.wait(range.clone()).map_err(|error| error.to_string())) as Rc<_>
            });
            let buffer = match range.start == 0 && range.end == storage.buffer.len() {
                true => storage.buffer.clone(),
                false => storage.buffer.part(range).map_err(failed)?,
            };
            args.push(ArgValue::Tensor { buffer, pending });
        }
        if !whole.is_empty() || self.packed.get() > 0 {
            self.count_packs(world, &whole);
        }
        let (groups, timeout) = (&self.groups, world.timeout());
        let cx = RunCx { heap, groups, device: world.cpu(), timeout, clock: &Instant::now };
        let busy = |_| Error::new("compile", "it is running already", site);
        let mut exec = self.exec.try_borrow_mut().map_err(busy)?;
        let before = exec.copied_bytes();
        let outs = exec.run(&cx, &mut args);
        let outs = outs.map_err(|error| self.with_guard_line(Error::run("compile", &error, site)));
        world.count_copy((exec.copied_bytes() - before) as usize);
        let mut shared: SmallVec<[(Region, Rc<Storage>); 2]> = SmallVec::new();
        let (mut results, mut number) = (Results::new(), 0);
        for (out, varies) in outs?.into_iter().zip(&self.varies) {
            let (pending, tensors) = match out {
                Out::Size(_) => continue,
                Out::Tensor(tensor) => (None, smallvec::smallvec![tensor]),
                Out::Pending { pending, tensors } => (pending, tensors),
            };
            let mut list: SmallVec<[Tensor; 1]> = SmallVec::new();
            for (out, varies) in tensors.into_iter().zip(varies) {
                let argument = self.argument(given, &whole, out.region);
                list.push(self.tensor(world, argument, &mut shared, out, number, *varies));
                number += 1;
            }
            let flight = pending.map(|pending| Flight::new(pending, world, "compile", site));
            for (tensor, flight) in list.iter().zip(flight.iter().cycle()) {
                let storage = tensor.storage.iter();
                storage.for_each(|storage| storage.add_flight(tensor.byte_range(), Rc::clone(flight)));
            }
            results.push(Made { tensors: list, flight });
        }
        Ok(results)
    }

    /// An error of a condition on sizes from data, with the line that needs it.
    fn with_guard_line(&self, error: Error) -> Error {
        let got = &error.failure().got;
        match self.data_guards.iter().find(|(guard, _)| got.contains(guard)) {
            Some((_, site)) => {
                let (file, line) = (site.file(), site.line());
                error.note(format!(
                    "u0, u1, .. are the sizes read here, in order; {file}:{line} needs the condition: check the data, or \
                     bound the size with `min` and `max`"
                ))
            }
            None => error,
        }
    }

    /// Counts the arguments that a call packed.
    fn count_packs(&self, world: &World, whole: &[(usize, Tensor)]) {
        let mut packs = self.packs.borrow_mut();
        packs.clear();
        packs.extend(
            whole.iter().map(|(place, tensor)| (*place, (tensor.numel() * tensor.dtype().size()) as u64)),
        );
        let bytes: u64 = packs.iter().map(|(_, bytes)| bytes).sum();
        self.packed.set(self.packed.get() + bytes);
        world.count_copy(bytes as usize);
    }

    /// The argument that a result aliases, if it was not donated.
    fn argument<'a>(
        &self,
        given: &[Given<'a>],
        whole: &'a [(usize, Tensor)],
        region: Region,
    ) -> Option<&'a Tensor> {
        let RegionKind::Arg(place) = region.kind else { return None };
        let place = place as usize;
        let own = |given: &Given<'a>| if let Given::Tensor(tensor) = given { Some(*tensor) } else { None };
        let kept = self.donated.get(place / 64).is_none_or(|bits| bits >> (place % 64) & 1 == 0);
        let packed = whole.iter().find(|(own, _)| *own == place).map(|(_, tensor)| tensor);
        packed.or_else(|| given.get(place).and_then(own)).filter(|_| kept)
    }

    /// A result as a tensor. One that aliases an argument that was not donated shares its storage.
    fn tensor(
        &self,
        world: &Rc<World>,
        argument: Option<&Tensor>,
        shared: &mut SmallVec<[(Region, Rc<Storage>); 2]>,
        out: OutTensor,
        number: usize,
        varies: Axes,
    ) -> Tensor {
        let known =
            shared.iter().find(|(region, _)| *region == out.region).map(|(_, storage)| Rc::clone(storage));
        let first = argument.map_or(0, |argument| argument.layout.start);
        let storage = match (argument, known) {
            (Some(argument), _) => argument.storage.clone(),
            (None, Some(storage)) => Some(storage),
            (None, None) => {
                let storage = Storage::new(out.buffer);
                shared.push((out.region, Rc::clone(&storage)));
                Some(storage)
            }
        };
        let mut made = self.made.borrow_mut();
        let made = &mut made[number];
        let same = |made: &&mut Typed| {
            Rc::ptr_eq(&made.from, &out.layout) && made.layout.start == first + out.layout.start
        };
        let Typed { ty, layout, .. } = match made.as_mut().filter(same) {
            Some(made) => made,
            None => {
                let ty = TensorType::new(out.dtype, constant_shape(&out.layout.shape), varies);
                let layout = Layout { start: first + out.layout.start, ..Layout::clone(&out.layout) };
                let (ty, layout) = (world.memo().share(ty), CachedLayout::new(layout));
                made.insert(Typed { from: out.layout, ty, layout })
            }
        };
        let (ty, layout) = (Rc::clone(ty), Rc::clone(layout));
        Tensor { ty, layout, storage, traced: None, world: world.id, origin: Origin::NONE }
    }
}
