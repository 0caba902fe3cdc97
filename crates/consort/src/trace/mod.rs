//! Tracing: ops and collectives of a function are recorded instead of run.
//!
//! A session is one traced call. It records a graph at a time: a function of the program, with its captured values.
//! Reading a traced value on the host ends the graph: it is compiled and run, all live values become concrete,
//! and the next graph takes them as inputs. The rules are in docs/design/0004-compile.md.

mod blocks;
mod late;
mod peers;
mod sizes;
mod value;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::Location;
use std::rc::{Rc, Weak};

use consort_ir::builder::{Builder, Draft};
use consort_ir::entity::Value;
use consort_ir::index::{Guard, Index, Sym, SymbolFacts};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{OpDef, Wait, call_name, check_name};
use consort_ir::program::Func;
use consort_ir::types::{TensorType, Type};
use consort_types::{Axes, Failure, GroupName};

use crate::compile::Results;
use crate::error::{Error, Result};
use crate::grad::ExplainedGradient;
use crate::tensor::{Tensor, Tensors};
use crate::world::World;

use late::Late;
pub(crate) use late::{outside_of_updates, update_later};
pub(crate) use peers::{Peers, traced_message};
pub(crate) use sizes::{at_most, check_sizes, compare, equal, number_of, pin_shape, size_here};
pub(crate) use value::{Start, Traced, settle};

type Site = &'static Location<'static>;

/// The source of a graph's parameter.
#[derive(Clone)]
pub(crate) enum Input {
    /// A leaf of the arguments, by its place among them.
    Leaf(usize),
    /// A result of an earlier graph.
    Carried(Rc<Traced>),
    /// A tensor that the function captured: not one of its arguments.
    Constant(Tensor, Site),
    /// The value of a symbol.
    Symbol(Sym),
}

/// A graph that is complete.
pub(crate) struct Finished {
    pub(crate) func: Func,
    pub(crate) inputs: Vec<Input>,
    pub(crate) results: Vec<Returned>,
}

/// A result of a graph: a tensor, or a pending with the start that made it.
pub(crate) struct Returned {
    value: Value,
    start: Option<Rc<Start>>,
    /// The tensors that are it, or among those of the pending.
    tensors: Vec<Rc<Traced>>,
}

impl Finished {
    /// The result that gives a tensor, and the tensor's place in it.
    pub(crate) fn place(&self, tensor: &Rc<Traced>) -> Option<(usize, usize)> {
        let is_in = |result: &Returned| result.tensors.iter().any(|own| Rc::ptr_eq(own, tensor));
        Some((self.results.iter().position(is_in)?, tensor.number()))
    }

    /// The result that is the pending of a start.
    pub(crate) fn place_of(&self, start: &Rc<Start>) -> Option<usize> {
        let is_it = |result: &Returned| result.start.as_ref().is_some_and(|own| Rc::ptr_eq(own, start));
        self.results.iter().position(is_it)
    }
}

/// Compiles and runs a graph; returns a tensor for each one in the results.
pub(crate) type RunGraph<'a> = dyn Fn(&Rc<Session>, &Finished) -> Result<Results> + 'a;

/// The ranks with which a traced function may communicate.
pub(crate) enum Ranks {
    All,
    Of(GroupName),
    /// None: it was declared local.
    Own,
}

/// What is known of a function before it is traced.
pub(crate) struct About {
    /// Its name, for errors.
    pub(crate) name: String,
    pub(crate) fullgraph: bool,
    /// The ranks with which it may communicate.
    pub(crate) ranks: Ranks,
    /// Its role on this rank, if it has one.
    pub(crate) role: Option<String>,
    /// The axes along which the roles of its ranks differ.
    pub(crate) roles_over: Axes,
    /// The peers and tags that its ranks name by different numbers, if they are known.
    pub(crate) peers: Option<Rc<Peers>>,
}

/// One traced call of a function.
pub(crate) struct Session {
    pub(crate) world: Rc<World>,
    pub(crate) about: About,
    /// The peers and tags that were named by numbers so far.
    numbers: RefCell<Vec<i64>>,
    recording: RefCell<Recording>,
    /// The number of the graph being recorded.
    number: Cell<u32>,
    /// How many blocks were opened.
    blocks: Cell<u32>,
    /// Whether it has communicated, or tried to.
    pub(crate) started: Cell<bool>,
    /// The values of the symbols at this call.
    pub(crate) hints: RefCell<BTreeMap<Sym, i64>>,
    pub(crate) breaks: RefCell<Vec<Break>>,
    /// The sizes that were read from data, and the lines that read them.
    read: RefCell<Vec<(Sym, Site)>>,
    /// The gradients that it takes.
    pub(crate) gradients: RefCell<Vec<ExplainedGradient>>,
    /// How many functions of which gradients are taken are being traced, one in another.
    gradients_open: Cell<usize>,
    /// The lines that recorded guards.
    pub(crate) guard_sites: RefCell<BTreeMap<Guard, Site>>,
    /// The line of the last recorded op; at first that of the call.
    last: Cell<Site>,
    /// The first error that could not be returned where it occurred.
    failed: RefCell<Option<Error>>,
    run: RefCell<Option<Rc<RunGraph<'static>>>>,
}

/// A graph break: where a traced value was read on the host, and by which op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Break {
    /// The op that read it.
    pub op: String,
    /// The user's line.
    pub site: Site,
}

/// The graph being recorded.
struct Recording {
    /// `None` only while a builder has it.
    draft: Option<Draft>,
    inputs: Vec<(Value, Input)>,
    live: Vec<Weak<Traced>>,
    starts: Vec<Rc<Start>>,
    late: Vec<Weak<Late>>,
    /// The open blocks.
    frames: Vec<Frame>,
}

/// An open block.
struct Frame {
    /// Its number, of which no two blocks of a trace have the same; from 1.
    number: u32,
    /// The function that runs it, for errors.
    name: &'static str,
    /// The values that it captured: outside and inside.
    captured: Vec<(Value, Value)>,
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<Session>>> = const { RefCell::new(None) };
}

/// The current trace of this thread.
pub(crate) fn current() -> Option<Rc<Session>> {
    CURRENT.with(|current| current.borrow().clone())
}

/// Whether a function is being traced rather than run.
///
/// ```
/// assert!(!consort::is_tracing());
/// ```
pub fn is_tracing() -> bool {
    CURRENT.with(|current| current.borrow().is_some())
}

/// Runs `f` with another session as this thread's current one, or with none.
pub(crate) fn within<T>(session: Option<Rc<Session>>, f: impl FnOnce() -> T) -> T {
    /// Restores the session, also after a panic.
    struct Back(Option<Rc<Session>>);
    impl Drop for Back {
        fn drop(&mut self) {
            CURRENT.with(|current| *current.borrow_mut() = self.0.take());
        }
    }
    let _back = Back(CURRENT.with(|current| current.replace(session)));
    f()
}

fn new_recording(world: &World) -> Recording {
    let draft = Some(Builder::new(&world.mesh(), "f").pause());
    let (inputs, live, starts, late, frames) = Default::default();
    Recording { draft, inputs, live, starts, late, frames }
}

impl About {
    /// The axes along which ranks take gradients of losses of their own: those of other roles, and of ranks outside.
    pub(crate) fn apart(&self, mesh: &Mesh) -> Axes {
        self.outside(mesh).union(self.roles_over)
    }

    /// The axes along which there are ranks that do not call the function.
    pub(crate) fn outside(&self, mesh: &Mesh) -> Axes {
        match self.ranks {
            Ranks::All | Ranks::Of(GroupName::List(_)) => Axes::NONE,
            Ranks::Of(GroupName::Axes(axes)) => mesh.all_axes().minus(axes),
            Ranks::Own => mesh.all_axes(),
        }
    }
}

impl Session {
    pub(crate) fn new(world: Rc<World>, about: About, site: Site) -> Rc<Session> {
        let recording = RefCell::new(new_recording(&world));
        Rc::new(Session {
            world,
            about,
            numbers: RefCell::default(),
            recording,
            number: Cell::new(0),
            blocks: Cell::new(0),
            started: Cell::new(false),
            hints: RefCell::default(),
            breaks: RefCell::default(),
            read: RefCell::default(),
            gradients: RefCell::default(),
            gradients_open: Cell::new(0),
            guard_sites: RefCell::default(),
            last: Cell::new(site),
            failed: RefCell::default(),
            run: RefCell::default(),
        })
    }

    /// Fails if a start communicates outside the ranks that the function was declared for.
    pub(crate) fn check_reach(&self, op: &dyn OpDef, site: Site) -> Result<()> {
        let Some(over) = op.effects().starts() else { return Ok(()) };
        let (mesh, name) = (self.world.mesh(), &self.about.name);
        let failure = match self.about.ranks {
            Ranks::All => return Ok(()),
            // A group of this rank alone.
            Ranks::Own if mesh.members(over, self.world.rank).is_none_or(|ranks| ranks.len() == 1) => {
                return Ok(());
            }
            Ranks::Own => {
                let expected = format!("no communication in `{name}`, which was declared local");
                Failure::new((expected, "")).note("leave out `.local()`, and call it on all ranks")
            }
            Ranks::Of(group) => {
                let own = mesh.members(group, self.world.rank).unwrap_or_default();
                let others = mesh.members(over, self.world.rank).unwrap_or_default();
                if others.iter().all(|rank| own.contains(rank)) {
                    return Ok(());
                }
                let (group, over) = (mesh.group_text(group), mesh.group_text(over));
                let expected = format!("communication among the ranks of `{group}`, which call `{name}`");
                Failure::new((expected, format!("some over `{over}`")))
                    .note(format!("call it on all ranks of `{over}`, or communicate outside of it"))
            }
        };
        Err(Error::of(call_name(op.info().name), failure, site))
    }

    /// Sets the graph runner. Without one a break is an error.
    pub(crate) fn set_run(&self, run: Rc<RunGraph<'static>>) {
        *self.run.borrow_mut() = Some(run);
    }

    /// The line of the last recorded op; at first that of the call.
    pub(crate) fn last_site(&self) -> Site {
        self.last.get()
    }

    /// Records an error that cannot be returned here; the trace fails with it.
    pub(crate) fn fail(&self, error: Error) {
        self.failed.borrow_mut().get_or_insert(error);
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.failed.borrow().clone().map_or(Ok(()), Err)
    }

    pub(crate) fn explain_gradient(&self, gradient: ExplainedGradient) {
        self.gradients.borrow_mut().push(gradient);
    }

    /// Calls `f` with the graph's builder.
    fn build<T>(&self, f: impl FnOnce(&mut Builder<'_>) -> T) -> Result<T> {
        let lost = || {
            Error::new(
                "compile",
                "the trace is already borrowed, which is a defect of consort",
                Location::caller(),
            )
        };
        let draft = self.recording.borrow_mut().draft.take().ok_or_else(lost)?;
        let mesh = self.world.mesh();
        let mut builder = Builder::resume(&mesh, draft);
        let outcome = f(&mut builder);
        self.recording.borrow_mut().draft = Some(builder.pause());
        Ok(outcome)
    }

    /// A traced tensor.
    fn tensor(self: &Rc<Self>, ty: TensorType, traced: Traced) -> Tensor {
        let traced = Rc::new(traced);
        self.recording.borrow_mut().live.push(Rc::downgrade(&traced));
        Tensor::of_trace(ty, &self.hints.borrow(), traced, &self.world)
    }

    /// A parameter of the function, not of the block being filled.
    fn param(&self, ty: Type, input: Input) -> Result<Value> {
        let value = self.build(|builder| builder.outside(0, |builder| builder.param(ty)))?;
        self.recording.borrow_mut().inputs.push((value, input));
        Ok(value)
    }

    /// Declares a symbol and its value at this call. A tensor or a size binds it.
    pub(crate) fn declare(&self, sym: Sym, facts: SymbolFacts, hint: i64) -> Result<()> {
        self.hints.borrow_mut().insert(sym, hint);
        self.build(|builder| builder.declare(sym, facts))
    }

    /// An argument.
    pub(crate) fn argument(self: &Rc<Self>, leaf: usize, ty: TensorType) -> Result<Tensor> {
        let value = self.param(ty.clone().into(), Input::Leaf(leaf))?;
        Ok(self.tensor(ty, Traced::value(self, value)))
    }

    /// Binds a symbol to a size argument.
    pub(crate) fn size_argument(&self, leaf: usize, sym: Sym, varies: Axes) -> Result<()> {
        self.param(Type::Size(Index::sym(sym), varies), Input::Leaf(leaf)).map(drop)
    }

    /// The value of a tensor as an operand: traced here, a result of an earlier graph, or a constant.
    fn operand(self: &Rc<Self>, tensor: &Tensor, op: &str, site: Site) -> Result<Value> {
        let blocks = self.recording.borrow().frames.len();
        self.operand_at(tensor, blocks, op, site)
    }

    /// The same for a node inside of this many blocks.
    fn operand_at(self: &Rc<Self>, tensor: &Tensor, blocks: usize, op: &str, site: Site) -> Result<Value> {
        let (value, depth) = match &tensor.traced {
            None => (self.constant(tensor, op, site)?, 0),
            Some(traced) if traced.landed().is_some() => (self.carried(traced, tensor)?, 0),
            Some(traced) => {
                traced.check(self, op, site)?;
                if let Some(start) = traced.start() {
                    self.wait_for(&start, site)?;
                }
                traced.join(self, site)?;
                traced.place()
            }
        };
        self.enter(value, depth, blocks)
    }

    /// A value inside of `depth` blocks, captured into this many blocks.
    fn enter(&self, value: Value, depth: usize, blocks: usize) -> Result<Value> {
        let mut value = value;
        for frame in depth..blocks {
            let known = self.recording.borrow().frames[frame]
                .captured
                .iter()
                .find(|(outer, _)| *outer == value)
                .copied();
            value = match known {
                Some((_, inner)) => inner,
                None => {
                    let inner = self.build(|builder| {
                        let ty = builder.ty(value).cloned();
                        ty.map(|ty| builder.outside(frame + 1, |builder| builder.param(ty)))
                    })?;
                    let inner = inner.map_err(|failure| Error::of("compile", failure, Location::caller()))?;
                    self.recording.borrow_mut().frames[frame].captured.push((value, inner));
                    inner
                }
            };
        }
        Ok(value)
    }

    fn constant(self: &Rc<Self>, tensor: &Tensor, op: &str, site: Site) -> Result<Value> {
        let same = |input: &Input| match input {
            Input::Constant(other, _) => {
                other.layout == tensor.layout
                    && match (&other.storage, &tensor.storage) {
                        (Some(a), Some(b)) => Rc::ptr_eq(a, b),
                        _ => false,
                    }
            }
            _ => false,
        };
        let known =
            self.recording.borrow().inputs.iter().find(|(_, input)| same(input)).map(|(value, _)| *value);
        let value = match known {
            Some(value) => value,
            None if self.about.fullgraph => {
                let got = "one that was captured or made from numbers";
                let failure = Failure::new(("tensors that come from the arguments", got))
                    .note("pass it as an argument, or compile without fullgraph: then it is a constant");
                return Err(Error::of(call_name(op), failure, site));
            }
            None => self.param((*tensor.ty).clone().into(), Input::Constant(tensor.clone(), site))?,
        };
        Ok(value)
    }

    /// A result of an earlier graph, as a parameter of this one. Its symbolic sizes become new symbols.
    fn carried(self: &Rc<Self>, traced: &Rc<Traced>, tensor: &Tensor) -> Result<Value> {
        let same = |input: &Input| matches!(input, Input::Carried(other) if Rc::ptr_eq(other, traced));
        let known =
            self.recording.borrow().inputs.iter().find(|(_, input)| same(input)).map(|(value, _)| *value);
        if let Some(value) = known {
            return Ok(value);
        }
        let mut ty = (*tensor.ty).clone();
        let sizes: Vec<usize> = tensor.hint_shape().to_vec();
        for (size, hint) in ty.shape.iter_mut().zip(sizes) {
            if size.as_const().is_some() {
                continue;
            }
            *size = if hint < 2 { Index::from(hint) } else { Index::sym(self.fresh(hint as i64)?) };
        }
        self.param(ty.into(), Input::Carried(Rc::clone(traced)))
    }

    /// A new backed symbol.
    fn fresh(&self, hint: i64) -> Result<Sym> {
        let last = self.hints.borrow().keys().rev().find_map(|sym| match sym {
            Sym::Backed(number) => Some(*number),
            _ => None,
        });
        let sym = Sym::Backed(last.map_or(0, |number| number + 1));
        self.declare(sym, SymbolFacts { min: 2, ..SymbolFacts::default() }, hint)?;
        Ok(sym)
    }

    /// Binds the symbols in an op's attributes in this graph.
    fn bind_symbols(&self, op: &dyn OpDef, site: Site) -> Result<()> {
        let mut missing = Vec::new();
        self.build(|builder| {
            op.indices(&mut |index| {
                index.symbols(&mut |sym| {
                    if builder.facts().get(sym).is_none() && !missing.contains(&sym) {
                        missing.push(sym);
                    }
                });
            });
        })?;
        for sym in missing {
            self.bind(sym, op.info().name, site)?;
        }
        Ok(())
    }

    /// A symbol of an earlier graph, as a parameter of this one.
    fn bind(&self, sym: Sym, op: &str, site: Site) -> Result<()> {
        if !self.hints.borrow().contains_key(&sym) {
            let message = ("sizes of this function", "one of another, or one read from data before a break");
            let failure = Failure::new(message)
                .note("pass it as an argument, or take the size of a tensor of this function");
            return Err(Error::of(call_name(op), failure, site));
        }
        self.build(|builder| builder.declare(sym, SymbolFacts::default()))?;
        self.param(Type::Size(Index::sym(sym), Axes::NONE), Input::Symbol(sym)).map(drop)
    }

    /// Records an op; returns the values and types of its results.
    fn node(self: &Rc<Self>, op: &dyn OpDef, args: &[Tensor], site: Site) -> Result<Vec<(Value, Type)>> {
        self.check()?;
        let name = call_name(op.info().name);
        check_name(op.info()).map_err(|failure| Error::of(name, failure, site))?;
        self.last.set(site);
        self.bind_symbols(op, site)?;
        let values = args.iter().map(|arg| self.operand(arg, name, site)).collect::<Result<Vec<_>>>()?;
        let known = self.build(|builder| builder.guards().len())?;
        let results = self.build(|builder| {
            builder.set_site(Some(site.into()));
            let results = builder.node(op.to_op(), &values, Vec::new())?;
            results
                .into_iter()
                .map(|value| Ok((value, builder.ty(value)?.clone())))
                .collect::<std::result::Result<Vec<_>, _>>()
        })?;
        let results = results.map_err(|failure| Error::of(name, self.with_sizes_named(failure), site))?;
        self.check_guards(known, name, site)?;
        Ok(results)
    }

    /// A failure with a note on each size from data that it names: the line that read it.
    fn with_sizes_named(&self, failure: Box<Failure>) -> Box<Failure> {
        let text = failure.headline().to_string();
        let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric()).collect();
        self.read.borrow().iter().fold(failure, |failure, (sym, site)| {
            let name = Index::sym(*sym).display(&self.world.mesh()).to_string();
            match words.contains(&&name[..]) {
                true => failure.note(format!(
                    "{name} is a size read from data at {}:{}: it has the properties of the tensor that it is read from",
                    site.file(),
                    site.line()
                )),
                false => failure,
            }
        })
    }

    /// Remembers the line of newly recorded guards, and checks that they hold at this call.
    fn check_guards(&self, known: usize, op: &str, site: Site) -> Result<()> {
        let (hints, mesh) = (self.hints.borrow(), self.world.mesh());
        let env = |sym: Sym| hints.get(&sym).copied();
        let broken = self.recording.borrow().draft.as_ref().and_then(|draft| {
            let new = draft.guards().get(known..).unwrap_or(&[]);
            let mut sites = self.guard_sites.borrow_mut();
            for guard in new {
                sites.entry(guard.clone()).or_insert(site);
            }
            new.iter()
                .find(|guard| guard.holds(&env) == Ok(false))
                .map(|guard| guard.display(&mesh).to_string())
        });
        match broken {
            Some(guard) => Err(Error::new(op, format!("guard {guard} failed"), site)),
            None => Ok(()),
        }
    }

    /// Records the wait of a start, unless it is recorded already.
    pub(crate) fn wait_for(&self, start: &Rc<Start>, site: Site) -> Result<()> {
        if start.waited() {
            return Ok(());
        }
        let values = self.build(|builder| {
            builder.outside(start.depth, |builder| {
                builder.set_site(Some(site.into()));
                builder.op(Wait {}, &[start.pending])
            })
        })?;
        start.set_waited(values.map_err(|failure| Error::of("wait", failure, site))?);
        Ok(())
    }

    /// Ends the graph, because its values are read on the host: live values become concrete.
    pub(crate) fn break_at(self: &Rc<Self>, op: &str, site: Site) -> Result<()> {
        self.check()?;
        if let Some(name) = self.recording.borrow().frames.last().map(|frame| frame.name) {
            let failure = Failure::new((format!("no host read inside {name}"), ""));
            return Err(Error::of(op, failure.note("return the tensor and read it outside"), site));
        }
        if let Some(role) = &self.about.role {
            let expected = format!("no host read of a traced tensor in role `{role}`");
            let failure = Failure::new((expected, ""))
                .note("the programs of all roles are checked before they run; return it and read it outside");
            return Err(Error::of(op, failure, site));
        }
        if self.about.fullgraph {
            let failure = Failure::new(("no host read of a traced tensor under fullgraph", ""))
                .note("return it and read it outside, or compile without fullgraph");
            return Err(Error::of(op, failure, site));
        }
        let run = self.run.borrow().clone();
        let run = run.ok_or_else(|| Error::new(op, "expected no host read here", site))?;
        self.breaks.borrow_mut().push(Break { op: op.to_string(), site });
        self.join_all(site)?;
        let live: Vec<Rc<Traced>> = self.recording.borrow().live.iter().filter_map(Weak::upgrade).collect();
        // What was kept of a block that has ended is an error where it is used.
        let live = live.into_iter().filter(|traced| traced.is_in_scope(self)).collect();
        let finished = self.finish(live, &[], site)?;
        let this = Rc::clone(self);
        let made = within(None, || run(&this, &finished))?;
        for (result, made) in finished.results.iter().zip(made) {
            for traced in &result.tensors {
                made.tensors.get(traced.number()).into_iter().for_each(|tensor| traced.land(tensor.clone()));
            }
            result.start.iter().for_each(|start| start.land(made.flight.clone()));
        }
        Ok(())
    }

    /// Finishes the graph with these values as its results, and begins a new one. What handles wait for is returned
    /// as a pending.
    pub(crate) fn finish(
        self: &Rc<Self>,
        live: Vec<Rc<Traced>>,
        handles: &[Rc<Start>],
        site: Site,
    ) -> Result<Finished> {
        self.check()?;
        let live: Vec<Rc<Traced>> = live.into_iter().filter(|traced| traced.landed().is_none()).collect();
        // First, because what waits for a pending uses it up.
        for traced in &live {
            traced.check(self, "return", site)?;
            // Here and below at the line of the start: the program must not depend on the caller's line.
            traced.join(self, traced.start_site().unwrap_or(site))?;
        }
        let mut results: Vec<Returned> = Vec::new();
        for traced in live {
            let start = traced.start().filter(|start| !start.waited());
            let value = match &start {
                // Without a handle, several tensors are used one by one: their pending is waited for.
                Some(start) if start.tensors > 1 && !handles.iter().any(|own| Rc::ptr_eq(own, start)) => {
                    self.wait_for(start, start.site)?;
                    traced.place().0
                }
                Some(start) => start.return_pending(),
                None => traced.place().0,
            };
            match results.iter_mut().find(|result| result.value == value) {
                Some(result) => result.tensors.push(traced),
                None => {
                    let start = start.filter(|start| start.returned());
                    results.push(Returned { value, start, tensors: vec![traced] });
                }
            }
        }
        let started: Vec<Rc<Start>> = self.recording.borrow().starts.clone();
        for start in started.into_iter().filter(|start| !start.returned() && !start.waited()) {
            if handles.iter().any(|own| Rc::ptr_eq(own, &start)) {
                let value = start.return_pending();
                results.push(Returned { value, start: Some(start), tensors: Vec::new() });
            } else {
                self.wait_for(&start, start.site)?;
            }
        }
        let recording = self.recording.replace(new_recording(&self.world));
        self.number.set(self.number.get() + 1);
        let draft = recording.draft.ok_or_else(|| {
            Error::new("compile", "the trace is already borrowed, which is a defect of consort", site)
        })?;
        let values: Vec<Value> = results.iter().map(|result| result.value).collect();
        let func = Builder::resume(&self.world.mesh(), draft).finish(&values);
        let inputs = recording.inputs.into_iter().map(|(_, input)| input).collect();
        Ok(Finished { func, inputs, results })
    }
}

/// Records an op, if a trace is active.
pub(crate) fn record(op: &dyn OpDef, args: &[Tensor], site: Site) -> Option<Result<Tensors>> {
    let session = current()?;
    Some((|| {
        if let Some(tensors) = session.view_later(op, args, site)? {
            return Ok(tensors);
        }
        let depth = session.recording.borrow().frames.len();
        let mut tensors = Tensors::new();
        for (value, ty) in session.node(op, args, site)? {
            match ty {
                Type::Tensor(ty) => tensors.push(session.tensor(ty, Traced::at(&session, value, depth))),
                _ => return Err(Error::new(op.info().name, "it gives no tensor", site)),
            }
        }
        Ok(tensors)
    })())
}

/// Records a start, if a trace is active.
pub(crate) fn record_start(
    op: &dyn OpDef,
    args: &[Tensor],
    site: Site,
) -> Option<Result<(Tensors, Rc<Start>)>> {
    let session = current()?;
    session.started.set(true);
    Some((|| {
        session.check_reach(op, site)?;
        let depth = session.recording.borrow().frames.len();
        let results = session.node(op, args, site)?;
        let [(pending, Type::Pending(types))] = &results[..] else {
            return Err(Error::new(call_name(op.info().name), "expected one pending", site));
        };
        let start = Start::new(&session, *pending, depth, types.len(), site);
        session.recording.borrow_mut().starts.push(Rc::clone(&start));
        let one = |(place, ty): (usize, &TensorType)| {
            session.tensor(ty.clone(), Traced::pending(&session, Rc::clone(&start), place))
        };
        Ok((types.iter().enumerate().map(one).collect(), start))
    })())
}

/// Reads sizes from a tensor in a trace, as data-dependent symbols.
pub(crate) fn record_sizes(x: &Tensor, n: usize, site: Site) -> Option<Result<Vec<Index>>> {
    let session = current()?;
    Some((|| {
        let symbols = session.build(|builder| (0..n).map(|_| builder.fresh_symbol()).collect::<Vec<_>>())?;
        let op = consort_ir::ops::ToSize { symbols: symbols.clone(), min: Index::constant(0), max: None };
        session.node(&op, std::slice::from_ref(x), site)?;
        session.read.borrow_mut().extend(symbols.iter().map(|sym| (*sym, site)));
        Ok(symbols.into_iter().map(Index::sym).collect())
    })())
}

/// Ends the graph and runs `f` untraced: its result enters the next graph like an argument.
///
/// ```
/// use consort::{Tensor, compile};
///
/// # fn main() -> consort::Result<()> {
/// let f = compile(|x: Tensor| {
///     let y = x.exp()?;
///     let most = consort::uncompiled(|| y.to_vec::<f32>().map(|y| y.into_iter().fold(0.0, f32::max)))?;
///     y.div(most)
/// });
/// assert_eq!(f.call(Tensor::from_slice(&[0.0f32, 0.0], &[2])?)?.to_vec::<f32>()?, [1.0, 1.0]);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn uncompiled<T: crate::Flatten>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    uncompiled_at("uncompiled", Location::caller(), f)
}

/// The same for an operation, which the break names.
pub(crate) fn uncompiled_at<T: crate::Flatten>(
    op: &str,
    site: Site,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let Some(session) = current() else { return f() };
    session.break_at(op, site)?;
    let made = within(None, f)?;
    Ok(made.map(&mut crate::flatten::MapTensors(|tensor: &Tensor| match tensor.traced {
        Some(_) => tensor.clone(),
        None => session.landed(tensor.clone()),
    })))
}

impl Session {
    /// A concrete tensor, as a value of this trace.
    fn landed(self: &Rc<Self>, tensor: Tensor) -> Tensor {
        let traced = Rc::new(Traced::at(self, Value(0), 0));
        let ty = (*tensor.ty).clone();
        traced.land(tensor);
        Tensor::of_trace(ty, &self.hints.borrow(), traced, &self.world)
    }

    /// The number of the graph being recorded.
    pub(crate) fn graph_number(&self) -> u32 {
        self.number.get()
    }

    /// The number of the innermost open block; 0 if there is none.
    fn block_number(&self) -> u32 {
        self.recording.borrow().frames.last().map_or(0, |frame| frame.number)
    }

    /// Whether a block is open; what is outside of blocks always is.
    fn is_open(&self, block: u32) -> bool {
        block == 0 || self.recording.borrow().frames.iter().any(|frame| frame.number == block)
    }
}
