//! A call of a compiled function: guards, agreement, then a replay; or a trace.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

use consort_ir::index::Sym;
use consort_ir::ops::{EqualOver, call_name};
use consort_types::{Axes, Digest, Failure, GroupName};
use smallvec::SmallVec;

use super::agree::{MISS, Meeting, digest_of};
use super::graph::{Compared, Donated, Given, Graph, Planned};
use super::guards::{self, Bound, Leaf, Pattern, Signature, leaf_names, leaves_of};
use super::misfit::Misfit;
use super::parts::{Outs, Part, check_declared, check_tensors, fill, has_fields, has_shapes, parts_of};
use super::traced::Traced;
use super::{Compiled, MAX_NAME, Options, Reach, Site};
use crate::error::{Error, Result};
use crate::flatten::{Flatten, MapTensors};
use crate::placement::check_axes;
use crate::storage::Storage;
use crate::tensor::Tensor;
use crate::trace::{self, Input};
use crate::world::World;

/// The signatures of ranks that run one program, and these ranks.
type Signatures = (Vec<Signature>, Vec<usize>);

/// One compilation of a function: what it expects, and what it then runs.
pub(super) struct Entry<R> {
    pub(super) pattern: Pattern,
    /// `None` if the function has graph breaks: each call then traces it again.
    replay: Option<Replay<R>>,
    /// Whether its ranks are in each of its calls together: it communicates, or fields of its arguments are declared equal.
    is_joint: bool,
    /// What ranks compare at each call.
    digest: u64,
    /// The number of the agreement of ranks with roles, which they compare too.
    joint: u64,
}

/// The most calls of a function that are in progress at a time, because it calls itself.
const MAX_DEPTH: u32 = 32;

/// What a call without breaks does.
pub(super) struct Replay<R> {
    pub(super) graph: Rc<Graph>,
    pub(super) inputs: Vec<Input>,
    /// The result, with traced tensors and symbolic sizes in it.
    pub(super) template: R,
    pub(super) outs: Outs,
    /// Captured tensors with other owners: their storage, how many references to it are held here, and the line that
    /// captured them.
    pub(super) captured: Vec<(Rc<Storage>, usize, Site)>,
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
                    if cfg!(debug_assertions) && entry.is_joint {
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

    /// The axes that the ranks which compare its arguments span.
    fn covered(&self, world: &World) -> Axes {
        let all = world.mesh().all_axes();
        match (self.reach.get(), &self.options.over) {
            (Reach::Declared, _) if world.mesh().n_ranks() > 1 => Axes::NONE,
            (_, None) => all,
            (_, Some(group)) => match group.over {
                GroupName::Axes(axes) => axes,
                // Its ranks may be any.
                GroupName::List(_) => Axes::NONE,
            },
        }
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
        let leaves = leaves_of(args, self.covered(meeting.world));
        let (every, call) = (self.options.lockstep, meeting.call);
        let failure = Failure::new(("a call for which it was compiled", format!("another, call {call}")));
        let world = meeting.world;
        let own = Signature::new(&leaves, None, &self.options.dynamic, &world.mesh());
        let why = self.nearest(args, &leaves, (&[own], &[world.rank.0 as usize]), meeting.site);
        let failure = why.into_iter().fold(failure, |failure, why| failure.row(why.message()));
        meeting.error(failure.note(format!(
            "with `lockstep({every})` its ranks meet at calls 1, {}, {}, .., and can compile only there",
            every.saturating_add(1),
            every.saturating_mul(2).saturating_add(1)
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
        let covered = self.covered(world);
        let leaves = leaves_of(args, covered);
        let own = {
            let entries = self.entries.borrow();
            Signature::new(&leaves, entries.sizes(&leaves), &self.options.dynamic, &world.mesh())
        };
        let agreed = || -> Result<(Pattern, Signatures)> {
            let signatures = self.signatures(meeting, (args, &own), stale.clone())?;
            let mut pattern = Signature::pattern(&leaves, &signatures.0, &world.mesh(), covered, true);
            pattern.roles_over = meeting.roles_over();
            Ok((pattern, signatures))
        };
        let joint = self.is_joint();
        // What a field declares is taken as true, and a call of one rank alone cannot compare it.
        let declares = joint && has_fields(args, world);
        let (mut pattern, mut signatures) = match joint {
            true => agreed()?,
            false => {
                let alone = world.mesh().n_ranks() == 1;
                let own = std::slice::from_ref(&own);
                (Signature::pattern(&leaves, own, &world.mesh(), covered, alone), Default::default())
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
            let is_joint = agreed.0.communicates || self.options.role.is_some() || declares;
            self.reach.set(if is_joint { Reach::Joint } else { self.reach.get().without() });
            check_declared(args, &pattern, meeting)?;
            number = agreed.1;
            traced = Ok(agreed.0);
            if self.reach.get() == Reach::Local && pattern.has_origins() {
                let careful = Signature::pattern(&leaves, &signatures.0, &world.mesh(), covered, false);
                (pattern, traced) = self.careful(args, meeting, (careful, pattern), traced, site);
            }
        }
        let traced = traced?;
        let digest = digest_of(&traced.text) | 1;
        let recompiled = self.nearest(args, &leaves, (&signatures.0, &signatures.1), site);
        self.log.borrow_mut().compiled(&traced, recompiled);
        let (replay, is_joint) = (traced.replay, traced.communicates || declares);
        let entry = Entry { pattern, replay, is_joint, digest, joint: number };
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

    /// The trace of a function whose later calls are calls of one rank, which compare nothing: with nothing taken as equal
    /// because of how it was made. If that fails, the first trace stays, for arguments that are made as those compared now.
    fn careful(
        &self,
        args: &A,
        meeting: &Meeting<'_>,
        (careful, mut made): (Pattern, Pattern),
        traced: Result<Traced<R>>,
        site: Site,
    ) -> (Pattern, Result<Traced<R>>) {
        made.exact = true;
        let Ok(Traced { replay: Some(replay), .. }) = &traced else { return (made, traced) };
        let again = self.trace(args, meeting, &careful, &Cell::new(false), site);
        let Ok(Traced { replay: Some(other), .. }) = &again else { return (made, traced) };
        if !Rc::ptr_eq(&replay.graph, &other.graph) {
            self.graphs.borrow_mut().forget(&replay.graph);
        }
        (careful, again)
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
        let settings =
            leaf_names(args).into_iter().filter_map(|(name, is_setting)| is_setting.then_some(name));
        let (entries, mesh, settings) = (self.entries.borrow(), world.mesh(), settings.collect::<Vec<_>>());
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
    fn signatures(
        &self,
        meeting: &Meeting<'_>,
        (args, own): (&A, &Signature),
        stale: Option<Error>,
    ) -> Result<Signatures> {
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
                let names = leaf_names(args);
                let part = |(at, kind): (usize, &String)| match names.get(at) {
                    Some((name, _)) if !name.is_empty() => format!("`{name}` {kind}"),
                    _ => kind.clone(),
                };
                let text =
                    |one: &Signature| one.kinds.iter().enumerate().map(part).collect::<Vec<_>>().join("\n");
                let of = |place: &usize| all.get(*place).map(text);
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
                Input::Leaf(leaf) => match parts.leaves.get(*leaf) {
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
        parts.given.wait(site)?;
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

fn value_of(symbols: &[(Sym, i64)], sym: Sym) -> i64 {
    symbols.iter().find(|(own, _)| *own == sym).map_or(0, |(_, value)| *value)
}
