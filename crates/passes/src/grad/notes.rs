//! What is said of a gradient besides its program: over which axes each cotangent is summed, and warnings.

use std::collections::BTreeMap;
use std::fmt;

use consort_ir::entity::{Value, ValueMap};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Alias, AllGatherStart, AllGatherVStart, AllReduceStart, Cast, Effects, Flow, Spread};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::Type;
use consort_types::{Axes, Axis, Failure, GroupName, Reduce, Site};

use super::active::{Active, links_in, links_out};

/// Where the gradient by an argument is summed over ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summed {
    /// The number of the argument.
    pub argument: usize,
    /// The axes of each sum, and the line that makes it necessary. A gradient without any is not summed.
    pub over: Vec<(Axes, Option<Site>)>,
}

impl Summed {
    /// The fact in words.
    pub fn display<'a>(&'a self, mesh: &'a Mesh) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| {
            write!(f, "argument {}: ", self.argument)?;
            if self.over.is_empty() {
                return f.write_str("not summed over ranks");
            }
            for (i, (axes, site)) in self.over.iter().enumerate() {
                let start = if i == 0 { "summed over" } else { ", and over" };
                write!(f, "{start} {}", mesh.axes_text(*axes))?;
                if let Some(site) = site {
                    write!(f, " for {site}")?;
                }
            }
            Ok(())
        })
    }
}

/// Where the gradients by these arguments are summed: at the spreads that values equal over an axis reach. What lies
/// beyond a spread differs. An argument of which each rank has a part counts from where it is gathered.
pub(super) fn sums(mesh: &Mesh, func: &Func, active: &Active, by: &[usize]) -> Vec<Summed> {
    let mut all: Vec<Summed> =
        by.iter().map(|number| Summed { argument: *number, over: Vec::new() }).collect();
    for axis in mesh.all_axes().iter().filter(|axis| mesh.axis_size(*axis) > 1) {
        let reached = Reached::of(func, active, axis);
        for Summed { argument, over } in &mut all {
            for site in reached.from(func.body.params[*argument]) {
                match over.iter_mut().find(|(_, other)| *other == site) {
                    Some((axes, _)) => *axes = axes.union(Axes::one(axis)),
                    None => over.push((Axes::one(axis), site)),
                }
            }
        }
    }
    all
}

/// The spreads over an axis that values reach, as far as a gradient passes through what depends on them. From a value
/// that is equal over the axis, only values that are equal too are followed; from one that differs, which is a part of a
/// parameter, its other forms. Found from the results backwards, for all parameters at once: for each on its own, the
/// time would be quadratic in their number.
struct Reached<'a> {
    func: &'a Func,
    active: &'a Active,
    axis: Axis,
    /// The lines of the spreads over the axis, each once, in their order.
    sites: Vec<Option<Site>>,
    /// The places of the lines in this list.
    places: BTreeMap<Line, usize>,
    /// For each value a bit for every line that it reaches.
    values: ValueMap<Vec<u64>>,
    changed: bool,
}

impl Reached<'_> {
    fn of<'a>(func: &'a Func, active: &'a Active, axis: Axis) -> Reached<'a> {
        let (sites, places, values) = (Vec::new(), BTreeMap::new(), ValueMap::default());
        let mut reached = Reached { func, active, axis, sites, places, values, changed: true };
        reached.number_sites(&func.body);
        while !reached.sites.is_empty() && std::mem::take(&mut reached.changed) {
            reached.block(&func.body);
        }
        reached
    }

    /// The lines that a parameter reaches.
    fn from(&self, param: Value) -> impl Iterator<Item = Option<Site>> {
        let bits = self.values.get(param).filter(|_| self.active.has(param)).map_or(&[][..], Vec::as_slice);
        let is_reached =
            |place: &usize| bits.get(place / 64).is_some_and(|word| word >> (place % 64) & 1 == 1);
        (0..self.sites.len()).filter(is_reached).map(|place| self.sites[place])
    }

    fn number_sites(&mut self, block: &Block) {
        for node in &block.nodes {
            node.blocks.iter().for_each(|inside| self.number_sites(inside));
            if self.sums(node) && !self.places.contains_key(&line(node)) {
                self.places.insert(line(node), self.sites.len());
                self.sites.push(node.site);
            }
        }
    }

    fn sums(&self, node: &Node) -> bool {
        matches!(
            node.op.as_op(),
            Some(Spread { over: GroupName::Axes(axes) }) if axes.contains(self.axis)
        )
    }

    fn is_equal(&self, value: Value) -> bool {
        self.func.ty(value).is_some_and(|ty| !ty.varies().contains(self.axis))
    }

    fn block(&mut self, block: &Block) {
        for node in block.nodes.iter().rev() {
            links_out(node).into_iter().for_each(|(from, to)| self.follow(from, to));
            node.blocks.iter().rev().for_each(|inside| self.block(inside));
            links_in(node).into_iter().for_each(|(from, to)| self.follow(from, to));
            if node.op.flow() != Flow::Straight {
                continue;
            }
            let place = self.places.get(&line(node)).copied().filter(|_| self.sums(node));
            for arg in &node.args {
                match place {
                    Some(place) if self.is_equal(*arg) => {
                        let mut bits = vec![0; place / 64 + 1];
                        bits[place / 64] = 1 << (place % 64);
                        self.add(*arg, &bits);
                    }
                    _ if self.is_equal(*arg) || keeps_form(node) => {
                        node.results.iter().for_each(|result| self.follow(*arg, *result));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Adds to a value what one that depends on it reaches.
    fn follow(&mut self, from: Value, to: Value) {
        if (self.is_equal(to) || !self.is_equal(from))
            && self.active.has(to)
            && let Some(bits) = self.values.get(to).cloned()
        {
            self.add(from, &bits);
        }
    }

    fn add(&mut self, value: Value, bits: &[u64]) {
        if self.values.get(value).is_none() {
            self.values.insert(value, Vec::new());
        }
        let Some(own) = self.values.get_mut(value) else { return };
        own.resize(own.len().max(bits.len()), 0);
        for (own, more) in own.iter_mut().zip(bits) {
            self.changed |= *more & !*own != 0;
            *own |= more;
        }
    }
}

/// The file and the number of a line.
type Line = Option<(&'static str, u32)>;

fn line(node: &Node) -> Line {
    node.site.map(|site| (site.file(), site.line()))
}

/// Whether results are the operands in another form: views, casts, and what is gathered.
fn keeps_form(node: &Node) -> bool {
    let gathers =
        || node.op.as_op::<AllGatherStart>().is_some() || node.op.as_op::<AllGatherVStart>().is_some();
    node.op.alias() == Alias::View
        || node.op.as_op::<Cast>().is_some()
        || node.op.effects() == Effects::Wait
        || gathers()
}

/// Sums over ranks of what is already equal on them: n times the value, and so n times the gradient.
pub(super) fn warnings(mesh: &Mesh, func: &Func, active: &Active) -> Vec<Failure> {
    let mut warnings = Vec::new();
    add_warnings(mesh, func, active, &func.body, &mut warnings);
    warnings
}

fn add_warnings(mesh: &Mesh, func: &Func, active: &Active, block: &Block, warnings: &mut Vec<Failure>) {
    for node in &block.nodes {
        node.blocks.iter().for_each(|inside| add_warnings(mesh, func, active, inside, warnings));
        let Some(AllReduceStart { reduce: Reduce::Sum, over: GroupName::Axes(axes) }) = node.op.as_op()
        else {
            continue;
        };
        for arg in node.args.iter().filter(|arg| active.has(**arg)) {
            let varies = func.ty(*arg).map_or(Axes::NONE, Type::varies);
            let equal: Axes = axes.minus(varies).iter().filter(|axis| mesh.axis_size(*axis) > 1).collect();
            if equal.is_empty() {
                continue;
            }
            let (text, n) = (mesh.axes_text(equal), mesh.group_size(GroupName::Axes(equal)));
            let failure = Failure::new(format!(
                "sums what is already equal over {text}: the result is {n} times the value, and so is its gradient"
            ))
            .of("all_reduce")
            .note(format!("leave {text} out of the sum, or reduce by `avg`"));
            warnings.push(match node.site {
                Some(site) => *failure.at(site),
                None => *failure,
            });
        }
    }
}
