//! The leaves of arguments and results: extracted, checked, reassembled.

use std::collections::BTreeMap;
use std::rc::Rc;

use consort_ir::index::{Index, Sym};
use consort_ir::literal::Literal;
use consort_ir::program::Func;
use consort_types::{Axes, Axis, Failure, Headline, Rank};
use smallvec::SmallVec;

use super::agree::{Meeting, digest};
use super::graph::Results;
use super::guards::Pattern;
use super::{Site, guards};
use crate::error::{Error, Result};
use crate::flatten::{Flatten, Map, Static, Visit};
use crate::flight::Way;
use crate::pending::Started;
use crate::placement::{SHOWN, declared_axes};
use crate::tensor::Tensor;
use crate::trace::{Session, Start};
use crate::world::World;

/// A leaf of the arguments.
pub(super) enum Part {
    /// A tensor, and whether it can be donated: its storage has no other owner, and no peer reads it.
    Tensor(Tensor, bool),
    Number(i64),
    Other,
}

pub(super) struct Parts {
    pub(super) leaves: SmallVec<[Part; 4]>,
    /// What the handles among the arguments wait for.
    pub(super) given: Started,
}

/// Whether some tensor of the arguments has no data.
pub(super) fn has_shapes(args: &impl Flatten) -> bool {
    let mut found = false;
    guards::for_each_tensor(args, |tensor| found |= !tensor.has_data());
    found
}

/// Whether a tensor belongs to this world, and not to a finished trace.
pub(super) fn is_of(tensor: &Tensor, world: &World) -> bool {
    tensor.traced.is_none() && (tensor.world == 0 || tensor.world == world.id)
}

/// Checks that tensors belong to this world, and not to a finished trace.
pub(super) fn check_tensors(args: &impl Flatten, world: &World, site: Site) -> Result<()> {
    let mut wrong = None;
    guards::for_each_tensor(args, |tensor| {
        if !is_of(tensor, world) {
            wrong = Some(("tensors of this world", "one of another, or one that a traced function kept"));
        }
    });
    wrong.map_or(Ok(()), |message| Err(Error::new("compile", message, site)))
}

/// Checks that arguments that a pattern takes to be equal on some ranks are equal there: the passes rely on it.
pub(super) fn check_declared(args: &impl Flatten, pattern: &Pattern, meeting: &Meeting<'_>) -> Result<()> {
    let (world, site) = (meeting.world, meeting.site);
    let (mut declared, mut fields, mut failed) = (Vec::new(), Vec::new(), None);
    let mut tensors_declared = Vec::new();
    let all_axes = world.mesh().all_axes();
    let mut tensors = 0;
    let mut placements = pattern.leaves.iter().filter_map(guards::Expected::varies);
    for_each_typed(args, world, pattern.covered, |tensor, _, field| {
        tensors += 1;
        let varies = placements.next().unwrap_or(all_axes);
        if varies == all_axes {
            return;
        }
        match tensor.with_bytes("compile", site, digest) {
            Ok(digest) => declared.extend([digest, varies.iter().map(|axis| 1 << axis.0).sum()]),
            Err(error) => failed = Some(error),
        }
        fields.push((field, tensors - 1));
        tensors_declared.push(tensor.clone());
    });
    if let Some(error) = failed {
        return Err(error);
    }
    let declared: Vec<u8> = declared.iter().flat_map(|number: &u64| number.to_le_bytes()).collect();
    let all = meeting.gather(COMPARED, &declared)?;
    let number = |at: usize, place: usize| {
        let bytes = all.get(at).and_then(|bytes| bytes.as_chunks::<8>().0.get(place));
        bytes.map(|bytes| u64::from_le_bytes(*bytes))
    };
    let (mesh, ranks) = (world.mesh(), meeting.ranks());
    // Along the axes over which a tensor may differ, ranks with other coordinates have other ones; so have other roles.
    let is_other = |a: usize, b: usize, varies: u64| {
        let has_other = |axis: Axis| {
            let of = |at: usize| mesh.coordinate(Rank(ranks[at] as u32), axis);
            varies >> axis.0 & 1 == 1 && of(a) != of(b)
        };
        !meeting.is_same_role(a, b) || all_axes.iter().any(has_other)
    };
    for at in 1..all.len().min(ranks.len()) {
        for place in 0..all[at].len() / 16 {
            let varies = number(at, 2 * place + 1).unwrap_or_default();
            let first = (0..at).find(|first| !is_other(*first, at, varies)).unwrap_or(at);
            if number(first, 2 * place) != number(at, 2 * place) {
                let what = match fields.get(place).filter(|_| meeting.is_my_role(at)) {
                    Some((Some(field), _)) => format!("field `{field}`"),
                    Some((None, tensor)) => format!("tensor {tensor} of the arguments"),
                    None => format!("tensor {place} of those declared equal"),
                };
                // The ranks on which it should be equal to that of the first, and what stands for it there. All ranks find
                // the same difference, so all of them exchange what their errors show.
                let mine =
                    tensors_declared.get(place).map_or(Ok(String::new()), |own| short_text(own, site))?;
                let shown = meeting.gather(COMPARED, mine.as_bytes())?;
                let alike: Vec<usize> = (0..all.len().min(ranks.len()))
                    .filter(|other| !is_other(first, *other, varies))
                    .collect();
                let digests: Vec<Option<u64>> = alike.iter().map(|at| number(*at, 2 * place)).collect();
                let over = mesh.axes_text(all_axes.iter().filter(|axis| varies >> axis.0 & 1 == 0).collect());
                let is_field = fields.get(place).is_some_and(|(field, _)| field.is_some());
                let says = if is_field { "it is declared" } else { "its placement says" };
                let expected = format!("{what} equal over {over}, as {says}");
                let headline = Headline::unequal(expected, &meeting.ranks_at(&alike), &digests);
                let rows = alike
                    .iter()
                    .filter(|at| !shown[**at].is_empty())
                    .map(|at| format!("rank {} has {}", ranks[*at], String::from_utf8_lossy(&shown[*at])));
                let failure = Failure::new(headline).rows(rows);
                return Err(meeting.error(failure.note("declare only tensors that are equal on these ranks")));
            }
        }
    }
    Ok(())
}

/// What a rank compares at the first call, as other ranks read it if they do something else.
const COMPARED: &str = "comparison of the arguments that are declared equal";

/// The elements of a small tensor; empty for a large one.
fn short_text(tensor: &Tensor, site: Site) -> Result<String> {
    if tensor.numel() > SHOWN {
        return Ok(String::new());
    }
    tensor.with_bytes("compile", site, |bytes| {
        let elements = Literal::from_bytes(tensor.dtype(), tensor.hint_shape().to_vec(), bytes);
        elements.map_or_else(String::new, |elements| elements.text())
    })
}

/// Calls `f` with each tensor of a value, the axes over which it may differ, and the field that declares it, if one does.
/// Declarations over axes that are not in `covered` do not count.
pub(super) fn for_each_typed(
    value: &impl Flatten,
    world: &World,
    covered: Axes,
    f: impl FnMut(&Tensor, Axes, Option<&'static str>),
) {
    struct Typed<'a, F>(&'a World, Axes, F);
    impl<F: FnMut(&Tensor, Axes, Option<&'static str>)> Visit for Typed<'_, F> {
        fn tensor(&mut self, tensor: &Tensor) {
            self.2(tensor, tensor.ty.varies, None);
        }
        fn equal_over(&mut self, tensor: &Tensor, field: &'static str, axes: &[&'static str]) {
            let declared = declared_axes(self.0, axes, self.1);
            self.2(tensor, tensor.ty.varies.minus(declared), Some(field));
        }
    }
    value.visit(&mut Typed(world, covered, f));
}

/// Whether fields of the arguments are declared equal.
pub(super) fn has_fields(args: &impl Flatten, world: &World) -> bool {
    let mut found = false;
    for_each_typed(args, world, Axes::NONE, |_, _, field| found |= field.is_some());
    found
}

/// Fails if a field of a result may differ over axes over which it is declared equal.
pub(super) fn check_fields(
    result: &impl Flatten,
    session: &Session,
    covered: Axes,
    func: &Func,
    made: &[Option<(usize, usize)>],
) -> Result<()> {
    let (mut place, mut wrong) = (0, None);
    for_each_typed(result, &session.world, covered, |tensor, varies, field| {
        place += 1;
        if let (Some(field), true, None) = (field, varies != tensor.ty.varies, &wrong) {
            wrong = Some((field, tensor.ty.varies.minus(varies), place - 1));
        }
    });
    let Some((field, axes, place)) = wrong else { return Ok(()) };
    let over = session.world.mesh().axes_text(axes);
    let value =
        made.get(place).copied().flatten().and_then(|(result, _)| func.body.results.get(result).copied());
    let node = value.and_then(|value| func.body.nodes.iter().find(|node| node.results.contains(&value)));
    let expected = format!("field `{field}` equal over {over}, as it is declared");
    let failure = Failure::new((expected, format!("one that may differ over {over}")))
        .of(format!("`{}`", session.about.name))
        .note(format!("reduce what changes it over {over}, as by all_reduce"));
    let failure = match node.and_then(|node| node.site) {
        Some(site) => failure.at(site),
        None => failure,
    };
    Err(Error::of("compile", failure, session.last_site()))
}

/// Where the parts of a function's result come from.
pub(super) struct Outs {
    /// For each tensor the result of the graph that gives it, and its place there; `None` if the tensor itself is returned.
    pub(super) tensors: Vec<Option<(usize, usize)>>,
    /// For each start that a handle waits for the result of the graph that is its pending; `None` if it is waited for.
    pub(super) starts: Vec<Option<usize>>,
}

/// The starts for which the handles in a result of a trace wait.
pub(super) fn starts_of(result: &impl Flatten) -> Vec<Rc<Start>> {
    struct Starts(Vec<Rc<Start>>);
    impl Visit for Starts {
        fn tensor(&mut self, _: &Tensor) {}
        fn started(&mut self, started: &Started) {
            self.0.extend(started.0.iter().filter_map(Way::traced).cloned());
        }
    }
    let mut starts = Starts(Vec::new());
    result.visit(&mut starts);
    starts.0
}

/// Replaces the traced tensors of a result by concrete ones, its symbols by numbers, and what its handles wait for.
pub(super) fn fill<R: Flatten>(
    template: &R,
    outs: &Outs,
    results: &Results,
    hints: &BTreeMap<Sym, i64>,
) -> R {
    struct Fill<'a> {
        tensors: std::slice::Iter<'a, Option<(usize, usize)>>,
        starts: std::slice::Iter<'a, Option<usize>>,
        results: &'a Results,
        hints: &'a BTreeMap<Sym, i64>,
    }
    impl Map for Fill<'_> {
        fn tensor(&mut self, tensor: &Tensor) -> Tensor {
            let made = self.tensors.next().copied().flatten();
            let made = made.and_then(|(result, place)| self.results.get(result)?.tensors.get(place));
            let landed = || tensor.traced.as_ref().and_then(|traced| traced.landed().cloned());
            made.cloned().or_else(landed).unwrap_or_else(|| tensor.clone())
        }
        fn index(&mut self, index: &crate::Index) -> crate::Index {
            crate::Index(index.0.substitute(&|sym| self.hints.get(&sym).map(|value| Index::constant(*value))))
        }
        fn started(&mut self, started: &Started) -> Started {
            let flights = started.0.iter().filter_map(|way| match way {
                Way::Flying(flight) => Some(flight.clone()),
                Way::Traced(start) => {
                    let made = self.starts.next().copied().flatten();
                    let flight = made.and_then(|result| self.results.get(result)?.flight.as_ref());
                    flight.or_else(|| start.flight()).cloned()
                }
            });
            Started(flights.map(Way::Flying).collect())
        }
    }
    template.map(&mut Fill { tensors: outs.tensors.iter(), starts: outs.starts.iter(), results, hints })
}

impl Visit for Parts {
    fn tensor(&mut self, tensor: &Tensor) {
        // A tensor that peers still read is not donated: a plan that writes it would wait for them.
        let own = tensor.storage.is_some() && tensor.held(1, false).is_none();
        self.leaves.push(Part::Tensor(tensor.clone(), own));
    }
    fn index(&mut self, index: &crate::Index) {
        self.leaves.push(index.0.as_const().map_or(Part::Other, Part::Number));
    }
    fn started(&mut self, started: &Started) {
        self.given.0.extend(started.0.iter().cloned());
    }
    fn setting(&mut self, _: Static<'_>) {
        self.leaves.push(Part::Other);
    }
}

/// The leaves of the arguments.
pub(super) fn parts_of(args: &impl Flatten) -> Parts {
    let mut parts = Parts { leaves: SmallVec::new(), given: Started::default() };
    args.visit(&mut parts);
    parts
}
