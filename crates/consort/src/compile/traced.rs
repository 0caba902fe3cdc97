//! The trace of a compiled function: its arguments become traced values, a graph break runs what was recorded so far.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use consort_ir::index::{Index, Sym};
use consort_types::Failure;

use super::agree::{Difference, Meeting, same_program};
use super::call::Replay;
use super::entries::Graphs;
use super::graph::{Donated, Given, Graph, Results};
use super::guards::{self, Bound, Pattern};
use super::parts::{Outs, Part, Parts, check_fields, fill, parts_of, starts_of};
use super::{Compiled, Reach, Site};
use crate::error::{Error, Result};
use crate::flatten::{Flatten, Map};
use crate::grad::ExplainedGradient;
use crate::pending::Started;
use crate::storage::Storage;
use crate::tensor::Tensor;
use crate::trace::{self, About, Finished, Input, Session};

/// The outcome of a trace.
pub(crate) struct Traced<R> {
    pub(super) replay: Option<Replay<R>>,
    /// The result, if the function has breaks and so ran during the trace.
    pub(super) result: Option<R>,
    pub(super) communicates: bool,
    pub(crate) text: String,
    /// The peers that it names by numbers.
    pub(super) peers: Vec<i64>,
    pub(crate) breaks: Vec<trace::Break>,
    pub(crate) constants: Vec<(String, Site)>,
    pub(crate) gradients: Vec<ExplainedGradient>,
    pub(crate) graphs: Vec<Rc<Graph>>,
}

impl<A: Flatten + 'static, R: Flatten + 'static> Compiled<A, R> {
    /// The arguments as traced tensors and symbolic sizes.
    fn arguments(session: &Rc<Session>, args: &A, pattern: &Pattern, bound: &Bound) -> Result<A> {
        for ((sym, facts), hint) in pattern.symbols.iter().zip(&bound.sizes) {
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
                let mut ty = expected.and_then(guards::Expected::ty).unwrap_or_else(|| (*tensor.ty).clone());
                // Ranks of other roles have other arguments.
                ty.varies = ty.varies.union(self.pattern.roles_over);
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
                            session.size_argument(leaf, sym, varies.unwrap_or(consort_types::Axes::NONE))
                        {
                            self.failed.get_or_insert(error);
                        }
                        crate::Index(Index::sym(sym))
                    }
                    _ => index.clone(),
                }
            }
            /// The call waits for it before it returns.
            fn started(&mut self, _: &Started) -> Started {
                Started::default()
            }
        }
        let mut map = Traced { session, pattern, leaf: 0, failed: None };
        let traced = args.map(&mut map);
        map.failed.map_or(Ok(traced), Err)
    }

    /// Traces the function; sets `started` if it communicates, even if the trace fails.
    pub(super) fn trace(
        &self,
        args: &A,
        meeting: &Meeting<'_>,
        pattern: &Pattern,
        started: &Cell<bool>,
        site: Site,
    ) -> Result<Traced<R>> {
        let session = self.session(meeting, pattern);
        let used: Rc<RefCell<Vec<Rc<Graph>>>> = Rc::default();
        session.set_run(self.runner(args, &used, meeting.call, site));
        let traced = self.trace_in(&session, &used, args, (pattern, meeting), site);
        started.set(started.get() || session.started.get());
        traced
    }

    fn session(&self, meeting: &Meeting<'_>, pattern: &Pattern) -> Rc<Session> {
        let ranks = match (self.reach.get(), &self.options.over) {
            (Reach::Declared, _) => trace::Ranks::Own,
            (_, Some(over)) => trace::Ranks::Of(over.over),
            (_, None) => trace::Ranks::All,
        };
        let about = About {
            name: self.options.name.clone(),
            fullgraph: self.options.fullgraph,
            ranks,
            role: self.options.role.clone(),
            roles_over: pattern.roles_over,
            peers: pattern.peers.clone(),
        };
        Session::new(Rc::clone(meeting.world), about, meeting.site)
    }

    /// Runs the function in a session.
    fn trace_in(
        &self,
        session: &Rc<Session>,
        used: &Rc<RefCell<Vec<Rc<Graph>>>>,
        args: &A,
        (pattern, meeting): (&Pattern, &Meeting<'_>),
        site: Site,
    ) -> Result<Traced<R>> {
        let world = &session.world;
        let bound = pattern.bind(args, world).unwrap_or_default();
        let traced_args = Self::arguments(session, args, pattern, &bound)?;
        let result = trace::within(Some(Rc::clone(session)), || (self.f)(traced_args));
        session.check()?;
        let result = result?;
        let tensors = result.flatten();
        let live: Vec<Rc<trace::Traced>> =
            tensors.iter().filter_map(|tensor| tensor.traced.clone()).collect();
        let handles = starts_of(&result);
        let finished = session.finish(live, &handles, site)?;
        let graph = graph_of(&self.graphs, session, &finished, site)?;
        let (breaks, gradients) = (session.breaks.borrow().clone(), session.gradients.borrow().clone());
        let constants = constants(&finished);
        let place = |tensor: &Tensor| {
            finished.place(tensor.traced.as_ref().filter(|traced| traced.landed().is_none())?)
        };
        let outs = Outs {
            tensors: tensors.iter().map(place).collect(),
            starts: handles.iter().map(|start| finished.place_of(start)).collect(),
        };
        check_fields(&result, session, pattern.covered, &finished.func, &outs.tensors)?;
        let mut communicates = graph.communicates;
        let mut text = String::new();
        for graph in used.borrow().iter() {
            communicates |= graph.communicates;
            text.push_str(&graph.text);
        }
        text.push_str(&graph.text);
        if breaks.is_empty() {
            let graphs = vec![Rc::clone(&graph)];
            let captured = captured(&finished.inputs);
            let replay = Replay { graph, inputs: finished.inputs, template: result, outs, captured };
            let (replay, result, peers) = (Some(replay), None, session.peers());
            return Ok(Traced {
                replay,
                result,
                communicates,
                text,
                peers,
                breaks,
                constants,
                gradients,
                graphs,
            });
        }
        // The earlier graphs have run already; this runs the last one.
        agree_on_graph(meeting, session, &graph, &used.borrow(), true)?;
        let parts = parts_of(args);
        let made = run_graph(session, &finished, &graph, &parts, site)?;
        parts.given.wait(site)?;
        let result = fill(&result, &outs, &made, &session.hints.borrow());
        let mut graphs = used.borrow().clone();
        graphs.push(graph);
        // Graphs have run already, so their peers cannot become tables.
        let (replay, result, peers) = (None, Some(result), Vec::new());
        Ok(Traced { replay, result, communicates, text, peers, breaks, constants, gradients, graphs })
    }

    /// The callback by which a graph break runs the graph before it.
    fn runner(
        &self,
        args: &A,
        used: &Rc<RefCell<Vec<Rc<Graph>>>>,
        call: u64,
        site: Site,
    ) -> Rc<trace::RunGraph<'static>> {
        let parts = parts_of(args);
        let (used, graphs) = (Rc::clone(used), Rc::clone(&self.graphs));
        let (name, over) = (self.options.name.clone(), self.options.over.clone());
        Rc::new(move |session: &Rc<Session>, finished: &Finished| {
            let graph = graph_of(&graphs, session, finished, site)?;
            let (world, said, roles) = (&session.world, &Cell::new(None), &RefCell::default());
            agree_on_graph(
                &Meeting { world, over: over.as_ref(), name: &name, call, site, said, role: None, roles },
                session,
                &graph,
                &used.borrow(),
                false,
            )?;
            used.borrow_mut().push(Rc::clone(&graph));
            run_graph(session, finished, &graph, &parts, site)
        })
    }

    /// A call of a function with breaks: traces it again, and reuses the graphs of its graphs.
    pub(super) fn traced_call(
        &self,
        args: &A,
        meeting: &Meeting<'_>,
        pattern: &Pattern,
        site: Site,
    ) -> Result<R> {
        let traced = self.trace(args, meeting, pattern, &Cell::new(false), site)?;
        self.log.borrow_mut().retraced += 1;
        traced
            .result
            .ok_or_else(|| Error::new("compile", "the function had breaks before, and has none now", site))
    }

    /// Traces the function again without running it, and compares: captured values may have changed.
    pub(super) fn check_retraced(
        &self,
        args: &A,
        meeting: &Meeting<'_>,
        pattern: &Pattern,
        replay: &Replay<R>,
    ) -> Result<()> {
        let site = meeting.site;
        let differs = |failure: Box<Failure>| {
            meeting.error(failure.note("it depends on something that is no argument; pass that as one"))
        };
        // The session has no graph runner, so a break is an error.
        let session = self.session(meeting, pattern);
        let traced = self.trace_in(&session, &Rc::default(), args, (pattern, meeting), site);
        let traced = traced.map_err(|error| {
            differs(Failure::new(format!("expected the same program at every call, but now: {error}")))
        })?;
        if !same_program(&traced.text, &replay.graph.text) {
            let texts = [replay.graph.text.clone(), traced.text];
            let when = |texts: &[usize]| if texts == [0] { "first" } else { "now" }.to_string();
            let failure = Difference::of(&texts).failure("its program", "line", "at every call", when);
            return Err(differs(failure));
        }
        let now = traced.replay.map_or_else(Vec::new, |replay| replay.inputs);
        for (before, now) in replay.inputs.iter().zip(&now) {
            let (Input::Constant(before, _), Input::Constant(now, met)) = (before, now) else { continue };
            if !is_equal(before, now, site)? {
                let (file, line) = (met.file(), met.line());
                let same = format!("the tensor of {file}:{line} to have the same elements at every call");
                return Err(differs(Failure::new((same, ""))));
            }
        }
        Ok(())
    }
}

/// Constant inputs with other owners: tensors that the function captured rather than created.
fn captured(inputs: &[Input]) -> Vec<(Rc<Storage>, usize, Site)> {
    let constants = || {
        inputs.iter().filter_map(|input| match input {
            Input::Constant(tensor, site) => Some((tensor.storage.as_ref()?, *site)),
            _ => None,
        })
    };
    let mut found: Vec<(Rc<Storage>, usize, Site)> = Vec::new();
    for (storage, site) in constants() {
        let here = constants().filter(|(other, _)| Rc::ptr_eq(other, storage)).count();
        let kept = found.iter().filter(|(other, _, _)| Rc::ptr_eq(other, storage)).count();
        if kept == 0 && Rc::strong_count(storage) > here {
            // The list itself holds one more reference.
            found.push((Rc::clone(storage), here + 1, site));
        }
    }
    found
}

/// Whether two tensors have the same elements, bit by bit.
fn is_equal(a: &Tensor, b: &Tensor, site: Site) -> Result<bool> {
    let is_same = |a: &Rc<Storage>, b: &Rc<Storage>| Rc::ptr_eq(a, b);
    if a.layout == b.layout && a.storage.as_ref().zip(b.storage.as_ref()).is_some_and(|(a, b)| is_same(a, b))
    {
        return Ok(true);
    }
    let a = a.with_bytes("compile", site, <[u8]>::to_vec)?;
    b.with_bytes("compile", site, |b| a == b)
}

/// The types of a graph's constants as text, and the lines that captured them.
fn constants(finished: &Finished) -> Vec<(String, Site)> {
    let constant = |input: &Input| match input {
        Input::Constant(tensor, site) => {
            Some((format!("{}{:?}", tensor.dtype(), &tensor.layout.shape[..]), *site))
        }
        _ => None,
    };
    finished.inputs.iter().filter_map(constant).collect()
}

/// The graph of a graph; an earlier graph with the same text is reused.
fn graph_of(
    known: &RefCell<Graphs>,
    session: &Session,
    finished: &Finished,
    site: Site,
) -> Result<Rc<Graph>> {
    let graph = Graph::new(session, finished.func.clone(), site)?;
    Ok(known.borrow_mut().share(graph))
}

/// Checks that all ranks run the same graph of a function with breaks, if it communicates and is new.
fn agree_on_graph(
    meeting: &Meeting<'_>,
    session: &Session,
    graph: &Rc<Graph>,
    before: &[Rc<Graph>],
    is_last: bool,
) -> Result<()> {
    let first = !before.iter().any(|own| Rc::ptr_eq(own, graph));
    if !first || !graph.communicates || graph.planned.get() > 0 {
        return Ok(());
    }
    let at = session.breaks.borrow().last().map_or_else(String::new, |last| {
        let at = format!("`{}` at {}:{}", last.op, last.site.file(), last.site.line());
        if is_last { format!(", after {at}") } else { format!(", which {at} ends") }
    });
    meeting.check_same(&format!("its graph {}{at}", before.len()), Ok(&graph.text))
}

/// Runs a graph on the current values of its inputs.
fn run_graph(
    session: &Session,
    finished: &Finished,
    graph: &Graph,
    parts: &Parts,
    site: Site,
) -> Result<Results> {
    let missing = || Error::new("compile", "an argument is missing", site);
    let hints = session.hints.borrow();
    let mut given = Vec::new();
    for input in &finished.inputs {
        given.push(match input {
            Input::Carried(traced) => Given::Tensor(traced.landed().ok_or_else(missing)?),
            Input::Leaf(leaf) => match parts.leaves.get(*leaf) {
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
