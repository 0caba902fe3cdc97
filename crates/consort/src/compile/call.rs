//! A call of a compiled function: guards, agreement, then a replay; or a trace.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use consort_ir::index::{Index, Sym};
use consort_ir::ops::{EqualOver, call_name};
use consort_types::{Digest, Failure};
use smallvec::SmallVec;

use super::agree::{Difference, MISS, Meeting, digest_of, same_program};
use super::entries::Graphs;
use super::graph::{Compared, Donated, Given, Graph, Planned, Results};
use super::guards::{self, Bound, Leaf, Pattern, Signature, leaves_of, setting_names};
use super::misfit::Misfit;
use super::parts::{Part, check_declared, check_fields, check_tensors, fill, has_shapes, parts_of};
use super::{Compiled, MAX_NAME, Options, Reach, Site};
use crate::error::{Error, Result};
use crate::flatten::{Flatten, Map, MapTensors};
use crate::grad::ExplainedGradient;
use crate::placement::check_axes;
use crate::storage::Storage;
use crate::tensor::Tensor;
use crate::trace::{self, About, Finished, Input, Session};
use crate::world::World;

/// The signatures of ranks that run one program, and these ranks.
type Signatures = (Vec<Signature>, Vec<usize>);

/// One compilation of a function: what it expects, and what it then runs.
pub(super) struct Entry<R> {
    pub(super) pattern: Pattern,
    /// `None` if the function has graph breaks: each call then traces it again.
    replay: Option<Replay<R>>,
    /// Whether it communicates.
    communicates: bool,
    /// What ranks compare at each call.
    digest: u64,
    /// The number of the agreement of ranks with roles, which they compare too.
    joint: u64,
}

/// The most calls of a function that are in progress at a time, because it calls itself.
const MAX_DEPTH: u32 = 32;

/// What a call without breaks does.
pub(super) struct Replay<R> {
    graph: Rc<Graph>,
    inputs: Vec<Input>,
    /// The result, with traced tensors and symbolic sizes in it.
    template: R,
    /// For each tensor of the template, its index among the graph's results; `None` if the tensor itself is returned.
    outs: Vec<Option<usize>>,
    /// Captured tensors with other owners: their storage, how many references to it are held here, and the line that
    /// captured them.
    captured: Vec<(Rc<Storage>, usize, Site)>,
}

impl<A: Flatten + 'static, R: Flatten + 'static> Compiled<A, R> {
    /// Calls the function; arguments without other owners are donated.
    pub(super) fn run(&self, args: &A, site: Site) -> Result<R> {
        // Inside another trace, or without data, the function runs uncompiled.
        let world = World::current()?;
        if trace::is_tracing() || world.heap().is_none() {
            return self.plain(args);
        }
        let found = self.entries.borrow_mut().find(args, &world);
        if found.is_none() {
            if has_shapes(args) {
                return self.plain(args);
            }
            check_tensors(args, &world, site)?;
            check_axes(args, &world, site)?;
        }
        self.check_member(&world, site)?;
        let (number, counted) = (self.calls.get(), self.counted.get());
        if !world.warming.get() {
            self.calls.set(number + 1);
            self.counted.set(counted + u64::from(self.is_joint()));
        }
        let meeting = self.meeting(&world, counted, site);
        let stale = found.as_ref().and_then(|(entry, _)| self.stale(entry, number, args, &meeting).err());
        if self.is_joint() && self.meets(counted) {
            let (key, joint) = match (&found, &stale) {
                (Some((entry, bound)), None) => (entry.key(bound), entry.joint),
                _ => (MISS, MISS),
            };
            if !meeting.envelope(key, joint)? {
                let left = self.entries.borrow().len() < self.options.limit;
                return match left || stale.is_some() {
                    true => self.compile_and_run(args, &meeting, stale, site),
                    false => self.past_limit(args),
                };
            }
        } else if let Some(error) = stale {
            return Err(error);
        } else if self.is_joint() && found.is_none() {
            return Err(self.missed(args, &meeting));
        }
        match found {
            Some((entry, bound)) => match &entry.replay {
                Some(replay) => {
                    if cfg!(debug_assertions) && entry.communicates {
                        check_declared(args, &entry.pattern, &meeting)?;
                    }
                    self.replay(&entry, replay, args, &world, &bound, site)
                }
                None => self.traced_call(args, &meeting, &entry.pattern, site),
            },
            None if self.entries.borrow().len() >= self.options.limit => self.past_limit(args),
            None => self.compile_and_run(args, &meeting, None, site),
        }
    }

    /// Whether its ranks meet at calls.
    fn is_joint(&self) -> bool {
        matches!(self.reach.get(), Reach::Unknown | Reach::Joint)
    }

    /// Fails if this rank is none of those that call it, or if it is the only one and has a role.
    fn check_member(&self, world: &Rc<World>, site: Site) -> Result<()> {
        if let (Some(role), Reach::Declared) = (&self.options.role, self.reach.get()) {
            let expected = format!("no role of `{}`, which was declared local", self.options.name);
            return Err(Error::new("compile", (expected, format!("role `{role}`")), site));
        }
        let Some(over) = self.options.over.as_ref() else { return Ok(()) };
        if Rc::ptr_eq(&over.world, world) && over.comm.is_some() {
            return Ok(());
        }
        let (group, name) = (over.world.mesh().group_text(over.over), &self.options.name);
        let expected = format!("a call of `{name}` by a rank of `{group}` only");
        let failure = Failure::new((expected, format!("one by rank {}", world.rank.0)));
        Err(Error::of("compile", failure, site))
    }

    /// The error of a name or a role that is none.
    fn refused_name(&self, site: Site) -> Option<Error> {
        let (what, name) = self.options.refused.as_ref()?;
        let expected =
            format!("a {what} of 1 to {MAX_NAME} characters, none of which is a backtick or a control");
        Some(Error::new("compile", (expected, format!("{name:?}")), site))
    }

    /// Whether its ranks meet at the call of this number, counted from 0 among those that they count together.
    fn meets(&self, number: u64) -> bool {
        self.reach.get() == Reach::Unknown || number.is_multiple_of(self.options.lockstep)
    }

    /// The error of a rank that needs another compilation between the calls at which its ranks meet.
    fn missed(&self, args: &A, meeting: &Meeting<'_>) -> Error {
        let leaves = leaves_of(args);
        let (every, call) = (self.options.lockstep, meeting.call);
        let failure = Failure::new(("a call for which it was compiled", format!("another, call {call}")));
        let world = meeting.world;
        let own = Signature::new(&leaves, None, &self.options.dynamic, &world.mesh());
        let why = self.nearest(args, &leaves, (&[own], &[world.rank.0 as usize]), meeting.site);
        let failure = why.into_iter().fold(failure, |failure, why| failure.row(why.message()));
        meeting.error(failure.note(format!(
            "with `lockstep({every})` its ranks meet at calls 1, {}, {}, .., and can compile only there",
            1 + every,
            1 + 2 * every
        )))
    }

    /// This call, as the ranks identify it.
    fn meeting<'a>(&'a self, world: &'a Rc<World>, number: u64, site: Site) -> Meeting<'a> {
        let (over, role) = (self.options.over.as_ref(), self.options.role.as_deref());
        let (name, said, roles) = (&self.options.name, &self.said, &self.roles);
        Meeting { world, over, name, call: number + 1, site, said, role, roles }
    }

    /// Fails if the compilation is stale: a captured tensor was replaced, or the function now traces to a different
    /// program, which some calls check by tracing it again.
    fn stale(&self, entry: &Entry<R>, number: u64, args: &A, meeting: &Meeting<'_>) -> Result<()> {
        let Some(replay) = &entry.replay else { return Ok(()) };
        for (storage, own, captured) in &replay.captured {
            if Rc::strong_count(storage) <= *own {
                let (file, line) = (captured.file(), captured.line());
                let stays = format!(
                    "expected the captured tensor of {file}:{line} to stay, but it was replaced or dropped"
                );
                return Err(meeting.error(Failure::new(stays).note("pass what changes as an argument")));
            }
        }
        if self.options.retrace && number.is_power_of_two() {
            return self.check_retraced(args, meeting, &entry.pattern, replay);
        }
        Ok(())
    }

    /// Runs the function uncompiled, because the compilation limit was reached.
    fn past_limit(&self, args: &A) -> Result<R> {
        self.log.borrow_mut().past_limit(self.options.limit);
        self.plain(args)
    }

    /// Runs the function uncompiled. It may call itself, to a limit.
    fn plain(&self, args: &A) -> Result<R> {
        let depth = self.depth.get();
        if depth >= MAX_DEPTH {
            let got = format!("more than {MAX_DEPTH}");
            let failure = Failure::new((format!("at most {MAX_DEPTH} calls of itself in a function"), got))
                .of(format!("`{}`", self.options.name))
                .note("use `scan` or `while_loop`");
            return Err(Error::of("compile", failure, self.site));
        }
        self.depth.set(depth + 1);
        let outcome = (self.f)(args.map(&mut MapTensors(|tensor: &Tensor| tensor.clone())));
        self.depth.set(depth);
        outcome
    }

    /// Traces the function, agrees on the program with the other ranks unless the function is local, and runs it. A
    /// rank that fails before that reports its error to the others.
    fn compile_and_run(
        &self,
        args: &A,
        meeting: &Meeting<'_>,
        stale: Option<Error>,
        site: Site,
    ) -> Result<R> {
        let (start, world) = (Instant::now(), meeting.world);
        let stale = stale.or_else(|| self.refused_name(site));
        if let (Some(error), false) = (&stale, self.is_joint()) {
            return Err(error.clone());
        }
        let leaves = leaves_of(args);
        let own = {
            let entries = self.entries.borrow();
            Signature::new(&leaves, entries.sizes(&leaves), &self.options.dynamic, &world.mesh())
        };
        let agreed = || -> Result<(Pattern, Signatures)> {
            let signatures = self.signatures(meeting, &own, stale.clone())?;
            let mut pattern = Signature::pattern(&leaves, &signatures.0, &world.mesh(), true);
            pattern.roles_over = meeting.roles_over();
            Ok((pattern, signatures))
        };
        let joint = self.is_joint();
        let (mut pattern, mut signatures) = match joint {
            true => agreed()?,
            false => {
                let alone = world.mesh().n_ranks() == 1;
                let pattern = Signature::pattern(&leaves, std::slice::from_ref(&own), &world.mesh(), alone);
                (pattern, Default::default())
            }
        };
        let started = Cell::new(false);
        let mut traced = self.trace(args, meeting, &pattern, &started, site);
        if !joint && started.get() && self.reach.get() == Reach::Local {
            // The function was local and now communicates, so its ranks must agree on it.
            self.reach.set(Reach::Joint);
            if !world.warming.get() {
                self.counted.set(meeting.call);
            }
            (pattern, signatures) = agreed()?;
            traced = self.trace(args, meeting, &pattern, &started, site);
        }
        if signatures.0.is_empty() {
            signatures = (vec![own], vec![world.rank.0 as usize]);
        }
        traced = traced.map_err(|error| {
            let sizes = pattern.sizes_named((&signatures.0, &signatures.1), &world.mesh(), error.failure());
            sizes.into_iter().fold(error, Error::note)
        });
        let mut number = MISS;
        if self.is_joint() {
            let agreed = self.agreeing(|| self.agree_on_program(args, meeting, &mut pattern, traced))?;
            let is_joint = agreed.0.communicates || self.options.role.is_some();
            self.reach.set(if is_joint { Reach::Joint } else { self.reach.get().without() });
            if is_joint || self.reach.get() == Reach::Joint {
                check_declared(args, &pattern, meeting)?;
            }
            number = agreed.1;
            traced = Ok(agreed.0);
        }
        let traced = traced?;
        let digest = digest_of(&traced.text) | 1;
        let recompiled = self.nearest(args, &leaves, (&signatures.0, &signatures.1), site);
        self.log.borrow_mut().compiled(&traced, recompiled);
        let (replay, communicates) = (traced.replay, traced.communicates);
        let entry = Entry { pattern, replay, communicates, digest, joint: number };
        let entry = Rc::new(entry);
        self.entries.borrow_mut().add(Rc::clone(&entry), args, &leaves);
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

    /// Why a call fits none of the compilations: the conditions of the nearest one that failed, which are the fewest; of
    /// several the most recent ones. `None` if there is no compilation.
    fn nearest(
        &self,
        args: &A,
        leaves: &[Leaf],
        (signatures, ranks): (&[Signature], &[usize]),
        site: Site,
    ) -> Option<Box<Failure>> {
        let world = World::current().ok()?;
        let (entries, mesh, settings) = (self.entries.borrow(), world.mesh(), setting_names(args));
        let (mesh, settings) = (&*mesh, &settings[..]);
        let misfit = |entry: &Rc<Entry<R>>| {
            let (pattern, graph) = (&entry.pattern, entry.graph().map(|graph| &**graph));
            let misfit = Misfit { pattern, graph, leaves, settings, signatures, ranks, mesh, site };
            (misfit.failed(), misfit.failure(), entry.graph().map(Rc::clone))
        };
        let (_, failure, graph) =
            entries.all().iter().rev().map(misfit).min_by_key(|(failed, ..)| *failed)?;
        let graphs = self.graphs.borrow().list();
        let number = graph.and_then(|graph| graphs.iter().position(|own| Rc::ptr_eq(own, &graph)));
        Some(match number {
            Some(number) if entries.len() > 1 => {
                failure.row(format!("compared with graph {number}, the nearest of {}", entries.len()))
            }
            _ => failure,
        })
    }

    /// Does a part of the agreement with other ranks.
    pub(super) fn agreeing<T>(&self, part: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = part();
        self.log.borrow_mut().agreeing += start.elapsed();
        outcome
    }

    /// The signatures of all ranks, or of all with the role of this one, and these ranks. Fails on all ranks if the kinds of
    /// arguments differ, or if one of them reports an error.
    fn signatures(&self, meeting: &Meeting<'_>, own: &Signature, stale: Option<Error>) -> Result<Signatures> {
        let site = meeting.site;
        let Options { role, given_name, lockstep, .. } = &self.options;
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let head = format!("{}\t{}\t{lockstep}\n", text(role), text(given_name));
        let bytes = [head.into_bytes(), own.bytes()].concat();
        let mine = stale.as_ref().map_or(Ok(&bytes[..]), Err);
        let outcomes = self.agreeing(|| meeting.gather_outcomes("its arguments", mine))?;
        if let Some(error) = stale {
            return Err(error);
        }
        let lost = || Error::new("compile", "another rank's signature cannot be read", site);
        let (mut all, mut given, mut names, mut meets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for bytes in meeting.all_fine(outcomes)? {
            let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(lost)?;
            let head = String::from_utf8_lossy(&bytes[..end]);
            let [role, name, every] = head.split('\t').collect::<Vec<_>>()[..] else { return Err(lost()) };
            given.push(role.to_string());
            names.push(name.to_string());
            meets.push(format!("`lockstep({every})`"));
            all.push(Signature::read(&bytes[end + 1..]).ok_or_else(lost)?);
        }
        let note = "all ranks of a function must give `lockstep` the same number; without it, every call is compared";
        meeting.check_alike("its ranks must compare their calls equally often", &meets, note)?;
        if role.is_some() {
            let named =
                names.iter().map(|name| if name.is_empty() { String::new() } else { format!("`{name}`") });
            meeting.check_alike(
                "ranks must call the function of one name together",
                &named.collect::<Vec<_>>(),
                "all roles of a function have its name",
            )?;
            meeting.set_roles(&given);
        }
        for (places, over) in meeting.sets_alike() {
            let first = places.first().and_then(|place| all.get(*place));
            if places.iter().any(|place| all.get(*place).map(|one| &one.kinds) != first.map(|one| &one.kinds))
            {
                let of = |place: &usize| all.get(*place).map(|one| one.kinds.join("\n"));
                let texts: Vec<String> = places.iter().filter_map(of).collect();
                return Err(meeting.difference(
                    (&places, &over),
                    &texts,
                    "the kinds of its arguments",
                    "part",
                ));
            }
        }
        let mine: Vec<usize> = (0..all.len()).filter(|place| meeting.is_my_role(*place)).collect();
        let ranks = meeting.ranks_at(&mine);
        let all = all.into_iter().enumerate().filter(|(place, _)| mine.contains(place)).map(|(_, one)| one);
        Ok((all.collect(), ranks))
    }

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
        let finished = session.finish(live, site)?;
        let graph = graph_of(&self.graphs, session, &finished, site)?;
        let (breaks, gradients) = (session.breaks.borrow().clone(), session.gradients.borrow().clone());
        let constants = constants(&finished);
        let place = |tensor: &Tensor| {
            let traced = tensor.traced.as_ref().filter(|traced| traced.landed().is_none())?;
            finished.results.iter().position(|list| list.iter().any(|own| Rc::ptr_eq(own, traced)))
        };
        let outs: Vec<Option<usize>> = tensors.iter().map(place).collect();
        check_fields(&result, session, &finished.func, &outs)?;
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
        let tensors = run_graph(session, &finished, &graph, &parts_of(args), site)?;
        let result = fill(&result, &outs, &tensors, &session.hints.borrow());
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
    fn traced_call(&self, args: &A, meeting: &Meeting<'_>, pattern: &Pattern, site: Site) -> Result<R> {
        let traced = self.trace(args, meeting, pattern, &Cell::new(false), site)?;
        self.log.borrow_mut().retraced += 1;
        traced
            .result
            .ok_or_else(|| Error::new("compile", "the function had breaks before, and has none now", site))
    }

    /// Traces the function again without running it, and compares: captured values may have changed.
    fn check_retraced(
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
        let outcome = planned.run(world, &given, site);
        let outcome = outcome.map_err(|error| name_compared(error, &planned, replay, entry))?;
        let hints = symbols.iter().copied().collect();
        Ok(fill(&replay.template, &replay.outs, &outcome, &hints))
    }
}

/// A failed comparison with the tensor that was compared, which the user knows as an argument or by the line that made it.
fn name_compared<R>(error: Error, planned: &Planned, replay: &Replay<R>, entry: &Entry<R>) -> Error {
    let made = match planned.compared_at(error.site()).filter(|_| error.op() == EqualOver::INFO.name) {
        Some(Compared::Argument(place)) => match replay.inputs.get(place) {
            Some(Input::Leaf(leaf)) => {
                let is_tensor = |leaf: &&guards::Expected| matches!(leaf, guards::Expected::Tensor { .. });
                let before = entry.pattern.leaves.iter().take(*leaf).filter(is_tensor).count();
                format!("it is tensor {before} of the arguments")
            }
            Some(Input::Constant(_, site)) => format!("it was captured at {}:{}", site.file(), site.line()),
            _ => return error,
        },
        Some(Compared::Result(op, site)) => {
            let at = site.map_or(String::new(), |site| format!(" at {site}"));
            format!("it is the result of `{}`{at}", call_name(op))
        }
        None => return error,
    };
    error.row(made)
}

impl<R> Entry<R> {
    /// The graph of its program, if the function has no breaks.
    pub(super) fn graph(&self) -> Option<&Rc<Graph>> {
        self.replay.as_ref().map(|replay| &replay.graph)
    }

    /// The values of the symbols, or `None` if a guard fails.
    pub(super) fn fits(&self, args: &impl Flatten, world: &World) -> Option<Bound> {
        let bound = self.pattern.bind(args, world)?;
        let values = if self.pattern.fixed.is_empty() { Vec::new() } else { self.pattern.values(&bound) };
        if self.pattern.fixed.iter().any(|fixed| !values.contains(fixed)) {
            return None;
        }
        let holds = match &self.replay {
            Some(replay) => bound.sizes.is_empty() || replay.graph.holds(&self.pattern.values(&bound)),
            None => true,
        };
        holds.then_some(bound)
    }

    /// The key that ranks compare at a call besides its number; never `MISS`.
    fn key(&self, bound: &Bound) -> u64 {
        let mut key = Digest::default();
        key.add(self.digest);
        key.add(bound.origins);
        let symbols = self.pattern.symbols.iter().zip(&bound.sizes);
        let equal = symbols.filter(|((_, facts), _)| facts.varies.is_empty());
        key.add_all(equal.map(|(_, number)| *number as u64));
        // Positive as an i64, since ranks compare keys by a signed maximum.
        (key.get() >> 1) | 1
    }
}

impl Pattern {
    pub(super) fn values(&self, bound: &Bound) -> Vec<(Sym, i64)> {
        self.symbols.iter().zip(&bound.sizes).map(|((sym, _), number)| (*sym, *number)).collect()
    }
}

/// The outcome of a trace.
pub(crate) struct Traced<R> {
    replay: Option<Replay<R>>,
    /// The result, if the function has breaks and so ran during the trace.
    result: Option<R>,
    pub(super) communicates: bool,
    pub(crate) text: String,
    /// The peers that it names by numbers.
    pub(super) peers: Vec<i64>,
    pub(crate) breaks: Vec<trace::Break>,
    pub(crate) constants: Vec<(String, Site)>,
    pub(crate) gradients: Vec<ExplainedGradient>,
    pub(crate) graphs: Vec<Rc<Graph>>,
}

fn value_of(symbols: &[(Sym, i64)], sym: Sym) -> i64 {
    symbols.iter().find(|(own, _)| *own == sym).map_or(0, |(_, value)| *value)
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
