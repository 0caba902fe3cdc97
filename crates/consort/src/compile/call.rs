//! A call of a compiled function: guards, agreement, then a replay; or a trace.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use consort_ir::index::{Index, Sym};
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::flatten::{Flatten, Map, MapTensors};
use crate::tensor::Tensor;
use crate::trace::{self, Finished, Input, Session};
use crate::world::World;

use super::agree::{self, MISS, digest, envelope, gather};
use super::graph::{Donated, Given, Graph, Results};
use super::guards::{self, Bound, Pattern, Signature, leaves_of};
use super::parts::{Part, check_declared, check_tensors, fill, has_shapes, parts_of};
use super::{Compiled, Site};

/// One compilation of a function: what it expects, and what it then runs.
pub(super) struct Entry<R> {
    pattern: Pattern,
    /// None where the function has breaks: then each call traces it again.
    replay: Option<Replay<R>>,
    /// Whether it communicates.
    communicates: bool,
    /// What ranks compare at each call.
    digest: u64,
}

/// What a call without breaks does.
pub(super) struct Replay<R> {
    graph: Rc<Graph>,
    inputs: Vec<Input>,
    /// The result, with traced tensors and symbolic sizes in it.
    template: R,
    /// For each tensor of the template, which result of the graph it is; none where it is itself.
    outs: Vec<Option<usize>>,
}

impl<A: Flatten + 'static, R: Flatten + 'static> Compiled<A, R> {
    /// Calls it with arguments that are given away where nobody else owns them.
    pub(super) fn run(&self, args: &A, site: Site) -> Result<R> {
        // Inside another trace it is a function like any other.
        let world = World::current()?;
        if trace::is_tracing() || world.heap().is_none() {
            return self.plain(args);
        }
        let found = self.find(args, &world);
        if found.is_none() {
            if has_shapes(args) {
                return self.plain(args);
            }
            check_tensors(args, &world, site)?;
        }
        let number = self.calls.get();
        if !world.warming.get() {
            self.calls.set(number + 1);
        }
        let entries = self.entries.borrow().len();
        // What all ranks have compiled; what does not communicate is each rank's own matter.
        let agreed = self.entries.borrow().iter().filter(|entry| entry.communicates).count();
        if agreed > 0 {
            let key = found.as_ref().map_or(MISS, |(entry, bound)| entry.key(number, bound));
            if !envelope(&world, key, site)? {
                return match agreed < self.options.limit {
                    true => self.compile_and_run(args, &world, true, site),
                    false => self.past_limit(args),
                };
            }
        }
        match found {
            Some((entry, bound)) => match &entry.replay {
                Some(replay) => {
                    if cfg!(debug_assertions) {
                        if number.is_power_of_two() {
                            self.retrace(args, &world, &entry.pattern, replay, site)?;
                        }
                        if entry.communicates {
                            check_declared(args, &world, site)?;
                        }
                    }
                    self.replay(&entry, replay, args, &world, &bound, site)
                }
                None => self.traced_call(args, &world, &entry.pattern, site),
            },
            None if entries >= self.options.limit => self.past_limit(args),
            None => self.compile_and_run(args, &world, false, site),
        }
    }

    /// The function as it is, because it was compiled too often.
    fn past_limit(&self, args: &A) -> Result<R> {
        self.log.borrow_mut().past_limit(self.options.limit);
        self.plain(args)
    }

    /// The function as it is.
    fn plain(&self, args: &A) -> Result<R> {
        (self.f)(args.map(&mut MapTensors(|tensor: &Tensor| tensor.clone())))
    }

    /// The compilation that fits, the one used last first.
    fn find(&self, args: &A, world: &World) -> Option<(Rc<Entry<R>>, Bound)> {
        let entries = self.entries.borrow();
        let (place, bound) = entries.iter().enumerate().find_map(|(place, entry)| {
            let bound = entry.pattern.bind(args, world)?;
            let holds = match &entry.replay {
                Some(replay) => bound.is_empty() || replay.graph.holds(&entry.pattern.values(&bound)),
                None => true,
            };
            holds.then_some((place, bound))
        })?;
        let entry = Rc::clone(&entries[place]);
        drop(entries);
        if place > 0 {
            let mut entries = self.entries.borrow_mut();
            entries[..=place].rotate_right(1);
        }
        Some((entry, bound))
    }

    /// Traces the function, agrees on it with the other ranks where it communicates, and runs it.
    fn compile_and_run(&self, args: &A, world: &Rc<World>, joint: bool, site: Site) -> Result<R> {
        let start = Instant::now();
        let leaves = leaves_of(args);
        let before: Vec<Pattern> = self.entries.borrow().iter().map(|entry| entry.pattern.clone()).collect();
        let own = Signature::new(&leaves, &before, &self.options.dynamic, &world.mesh());
        let recompiled = before.first().map(|pattern| pattern.misfit(&leaves, &world.mesh()));
        let agreed = || -> Result<Pattern> {
            let signatures = self.signatures(world, &own, site)?;
            Ok(Signature::pattern(&leaves, &signatures, &world.mesh()))
        };
        let mut pattern = match joint {
            true => agreed()?,
            false => Signature::pattern(&leaves, std::slice::from_ref(&own), &world.mesh()),
        };
        let started = Cell::new(false);
        let mut traced = self.trace(args, world, &pattern, &started, site);
        if started.get() && !joint {
            // Only now it is known that the others have a part in it.
            let agreed = agreed()?;
            if agreed.leaves != pattern.leaves {
                pattern = agreed;
                traced = self.trace(args, world, &pattern, &started, site);
            }
        }
        if started.get() || joint {
            // Where there is no program, the others learn that too.
            let none = |error: &Error| format!("no program: {error}");
            let text = traced.as_ref().map_or_else(none, |traced| traced.text.clone());
            let same = self.agreeing(|| agree::check_same(world, "program", &text, site));
            if traced.is_ok() {
                same?;
                check_declared(args, world, site)?;
            }
        }
        let traced = traced?;
        let digest = digest(traced.text.as_bytes()) | 1;
        self.log.borrow_mut().compiled(&traced, recompiled, &world.mesh());
        let entry = Entry { pattern, replay: traced.replay, communicates: traced.communicates, digest };
        let entry = Rc::new(entry);
        self.entries.borrow_mut().insert(0, Rc::clone(&entry));
        self.log.borrow_mut().compiling += start.elapsed();
        match (&entry.replay, traced.result) {
            (Some(replay), _) => {
                let bound = entry.pattern.bind(args, world).unwrap_or_default();
                self.replay(&entry, replay, args, world, &bound, site)
            }
            (None, Some(result)) => Ok(result),
            (None, None) => Err(Error::new("compile", "the function gave nothing", site)),
        }
    }

    /// Does a part of the agreement with other ranks.
    fn agreeing<T>(&self, part: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = part();
        self.log.borrow_mut().agreeing += start.elapsed();
        outcome
    }

    /// All ranks' signatures; an error on all where they are not of one kind.
    fn signatures(&self, world: &World, own: &Signature, site: Site) -> Result<Vec<Signature>> {
        let lost = || Error::new("compile", "another rank's signature cannot be read", site);
        let all = self.agreeing(|| gather(world, &own.bytes(), site))?;
        let all: Vec<Signature> =
            all.iter().map(|bytes| Signature::read(bytes).ok_or_else(lost)).collect::<Result<_>>()?;
        if all.iter().any(|other| other.kinds != own.kinds) {
            let texts: Vec<String> = all.iter().map(|one| one.kinds.join("\n")).collect();
            return Err(Error::new("compile", agree::difference("kind of arguments", &texts), site));
        }
        Ok(all)
    }

    /// The arguments as a trace sees them.
    fn arguments(session: &Rc<Session>, args: &A, pattern: &Pattern, bound: &Bound) -> Result<A> {
        for ((sym, facts), hint) in pattern.symbols.iter().zip(bound) {
            session.declare(*sym, facts.clone(), *hint)?;
        }
        struct Traced<'a> {
            session: &'a Rc<Session>,
            pattern: &'a Pattern,
            leaf: usize,
            failed: Option<Error>,
        }
        impl Traced<'_> {
            /// The next part of the arguments that is a tensor or a size.
            fn next(&mut self) -> (usize, Option<&guards::Expected>) {
                while let Some(guards::Expected::Setting(_)) = self.pattern.leaves.get(self.leaf) {
                    self.leaf += 1;
                }
                self.leaf += 1;
                (self.leaf - 1, self.pattern.leaves.get(self.leaf - 1))
            }
        }
        impl Map for Traced<'_> {
            fn tensor(&mut self, tensor: &Tensor) -> Tensor {
                let (leaf, expected) = self.next();
                let ty = expected.and_then(guards::Expected::ty).unwrap_or_else(|| (*tensor.ty).clone());
                self.session.argument(leaf, ty).unwrap_or_else(|error| {
                    self.failed.get_or_insert(error);
                    tensor.clone()
                })
            }
            fn index(&mut self, index: &crate::Index) -> crate::Index {
                let session = self.session;
                match self.next() {
                    (leaf, Some(guards::Expected::Number(guards::Size::Symbol(sym, _)))) => {
                        let sym = *sym;
                        let varies = self
                            .pattern
                            .symbols
                            .iter()
                            .find(|(own, _)| *own == sym)
                            .map(|(_, facts)| facts.varies);
                        if let Err(error) =
                            session.size_argument(leaf, sym, varies.unwrap_or(consort_ir::mesh::Axes::NONE))
                        {
                            self.failed.get_or_insert(error);
                        }
                        crate::Index(Index::sym(sym))
                    }
                    _ => index.clone(),
                }
            }
        }
        let mut map = Traced { session, pattern, leaf: 0, failed: None };
        let traced = args.map(&mut map);
        map.failed.map_or(Ok(traced), Err)
    }

    /// Runs the function under a trace, and says whether it communicates, even where it fails.
    fn trace(
        &self,
        args: &A,
        world: &Rc<World>,
        pattern: &Pattern,
        started: &Cell<bool>,
        site: Site,
    ) -> Result<Traced<R>> {
        let session = Session::new(Rc::clone(world), self.options.fullgraph);
        let bound = pattern.bind(args, world).unwrap_or_default();
        let traced_args = Self::arguments(&session, args, pattern, &bound)?;
        let used: Rc<RefCell<Vec<Rc<Graph>>>> = Rc::default();
        session.set_run(self.runner(args, &used, site));
        let result = trace::within(Some(Rc::clone(&session)), || (self.f)(traced_args));
        started.set(started.get() || session.started.get());
        session.check()?;
        let result = result?;
        let tensors = result.flatten();
        let live: Vec<Rc<trace::Traced>> =
            tensors.iter().filter_map(|tensor| tensor.traced.clone()).collect();
        let finished = session.finish(live, site)?;
        let graph = segment(&self.segments, world, &finished, site)?;
        let breaks = session.breaks.borrow().clone();
        let constants = constants(&finished);
        let place = |tensor: &Tensor| {
            let traced = tensor.traced.as_ref().filter(|traced| traced.landed().is_none())?;
            finished.results.iter().position(|list| list.iter().any(|own| Rc::ptr_eq(own, traced)))
        };
        let outs: Vec<Option<usize>> = tensors.iter().map(place).collect();
        let mut communicates = graph.communicates;
        let mut text = String::new();
        for graph in used.borrow().iter() {
            communicates |= graph.communicates;
            text.push_str(&graph.text);
        }
        text.push_str(&graph.text);
        if breaks.is_empty() {
            let graphs = vec![Rc::clone(&graph)];
            let replay = Replay { graph, inputs: finished.inputs, template: result, outs };
            return Ok(Traced {
                replay: Some(replay),
                result: None,
                communicates,
                text,
                breaks,
                constants,
                graphs,
            });
        }
        // The segments before have run; the last one does now.
        let tensors = run_segment(&session, &finished, &graph, &parts_of(args), site)?;
        let result = fill(&result, &outs, &tensors, &session.hints.borrow());
        let mut graphs = used.borrow().clone();
        graphs.push(graph);
        Ok(Traced { replay: None, result: Some(result), communicates, text, breaks, constants, graphs })
    }

    /// How breaks run what stands before them.
    fn runner(
        &self,
        args: &A,
        used: &Rc<RefCell<Vec<Rc<Graph>>>>,
        site: Site,
    ) -> Rc<trace::RunSegment<'static>> {
        let parts = parts_of(args);
        let used = Rc::clone(used);
        let segments = Rc::clone(&self.segments);
        Rc::new(move |session: &Session, finished: &Finished| {
            let graph = segment(&segments, &session.world, finished, site)?;
            let first = !used.borrow().iter().any(|own| Rc::ptr_eq(own, &graph));
            if first && graph.communicates && graph.planned.get() == 0 {
                agree::check_same(&session.world, "program", &graph.text, site)?;
            }
            used.borrow_mut().push(Rc::clone(&graph));
            run_segment(session, finished, &graph, &parts, site)
        })
    }

    /// A call of a function with breaks: it is traced again, with its segments at hand.
    fn traced_call(&self, args: &A, world: &Rc<World>, pattern: &Pattern, site: Site) -> Result<R> {
        let traced = self.trace(args, world, pattern, &Cell::new(false), site)?;
        self.log.borrow_mut().retraced += 1;
        traced
            .result
            .ok_or_else(|| Error::new("compile", "the function had breaks before, and has none now", site))
    }

    /// Traces the function again and compares: what it captured may have changed.
    fn retrace(
        &self,
        args: &A,
        world: &Rc<World>,
        pattern: &Pattern,
        replay: &Replay<R>,
        site: Site,
    ) -> Result<()> {
        let traced = self.trace(args, world, pattern, &Cell::new(false), site)?;
        if traced.text == replay.graph.text {
            return Ok(());
        }
        let texts = [replay.graph.text.clone(), traced.text];
        let difference = agree::difference("program", &texts).replace("on all ranks", "at every call");
        let difference = difference.replace("rank 0:", "first:").replace("rank 1:", "now:");
        let note = "\n  note: it depends on something that is no argument; pass that as one";
        Err(Error::new("compile", difference + note, site))
    }

    /// A call without breaks.
    fn replay(
        &self,
        entry: &Entry<R>,
        replay: &Replay<R>,
        args: &A,
        world: &Rc<World>,
        bound: &Bound,
        site: Site,
    ) -> Result<R> {
        let symbols = entry.pattern.values(bound);
        let mut donated = Donated::from_elem(0, replay.inputs.len().div_ceil(64));
        let (parts, missing) = (parts_of(args), || Error::new("compile", "an argument is missing", site));
        let mut given: SmallVec<[Given<'_>; 4]> = SmallVec::new();
        for (place, input) in replay.inputs.iter().enumerate() {
            given.push(match input {
                Input::Leaf(leaf) => match parts.get(*leaf) {
                    Some(Part::Tensor(tensor, own)) => {
                        donated[place / 64] |= u64::from(*own) << (place % 64);
                        Given::Tensor(tensor)
                    }
                    Some(Part::Number(number)) => Given::Size(*number),
                    _ => return Err(missing()),
                },
                Input::Constant(tensor, _) => Given::Tensor(tensor),
                Input::Symbol(sym) => Given::Size(value_of(&symbols, *sym)),
                Input::Carried(_) => return Err(missing()),
            });
        }
        let planned = replay.graph.plan(world, &symbols, &donated, site)?;
        let outcome = planned.run(world, &given, site)?;
        let hints = symbols.iter().copied().collect();
        Ok(fill(&replay.template, &replay.outs, &outcome, &hints))
    }
}

impl<R> Entry<R> {
    /// What ranks compare at a call: never `MISS`.
    fn key(&self, call: u64, bound: &Bound) -> u64 {
        let mix = |hash: u64, number: u64| (hash ^ number).wrapping_mul(0x0000_0100_0000_01b3);
        let symbols = self.pattern.symbols.iter().zip(bound);
        let equal = symbols.filter(|((_, facts), _)| facts.varies.is_empty());
        // A positive number, so that it and its complement compare like bits.
        let key = equal.fold(mix(self.digest, call), |hash, (_, number)| mix(hash, *number as u64));
        (key >> 1) | 1
    }
}

impl Pattern {
    fn values(&self, bound: &Bound) -> Vec<(Sym, i64)> {
        self.symbols.iter().zip(bound).map(|((sym, _), number)| (*sym, *number)).collect()
    }
}

/// What a trace gave.
pub(crate) struct Traced<R> {
    replay: Option<Replay<R>>,
    /// Where it had breaks, and so has run.
    result: Option<R>,
    communicates: bool,
    pub(crate) text: String,
    pub(crate) breaks: Vec<trace::Break>,
    pub(crate) constants: Vec<(String, Site)>,
    pub(crate) graphs: Vec<Rc<Graph>>,
}

fn value_of(symbols: &[(Sym, i64)], sym: Sym) -> i64 {
    symbols.iter().find(|(own, _)| *own == sym).map_or(0, |(_, value)| *value)
}

/// The constants that a segment met, in words.
fn constants(finished: &Finished) -> Vec<(String, Site)> {
    let constant = |input: &Input| match input {
        Input::Constant(tensor, site) => {
            Some((format!("{}{:?}", tensor.dtype(), &tensor.layout.shape[..]), *site))
        }
        _ => None,
    };
    finished.inputs.iter().filter_map(constant).collect()
}

/// The graph of a segment: one with the same text serves again.
fn segment(
    known: &RefCell<Vec<Rc<Graph>>>,
    world: &World,
    finished: &Finished,
    site: Site,
) -> Result<Rc<Graph>> {
    let graph = Graph::new(world, finished.func.clone(), site)?;
    if let Some(same) = known.borrow().iter().find(|other| other.text == graph.text) {
        return Ok(Rc::clone(same));
    }
    let graph = Rc::new(graph);
    known.borrow_mut().push(Rc::clone(&graph));
    Ok(graph)
}

/// Runs a segment with what its inputs are now.
fn run_segment(
    session: &Session,
    finished: &Finished,
    graph: &Graph,
    parts: &[Part],
    site: Site,
) -> Result<Results> {
    let missing = || Error::new("compile", "an argument is missing", site);
    let hints = session.hints.borrow();
    let mut given = Vec::new();
    for input in &finished.inputs {
        given.push(match input {
            Input::Carried(traced) => Given::Tensor(traced.landed().ok_or_else(missing)?),
            Input::Leaf(leaf) => match parts.get(*leaf) {
                Some(Part::Tensor(tensor, _)) => Given::Tensor(tensor),
                Some(Part::Number(number)) => Given::Size(*number),
                _ => return Err(missing()),
            },
            Input::Constant(tensor, _) => Given::Tensor(tensor),
            Input::Symbol(sym) => Given::Size(hints.get(sym).copied().ok_or_else(missing)?),
        });
    }
    let used = graph.func().map(consort_ir::program::Func::bound_symbols).unwrap_or_default();
    let symbols: Vec<(Sym, i64)> =
        used.into_iter().filter_map(|sym| Some((sym, *hints.get(&sym)?))).collect();
    let donated = Donated::from_elem(0, finished.inputs.len().div_ceil(64));
    graph.plan(&session.world, &symbols, &donated, site)?.run(&session.world, &given, site)
}
