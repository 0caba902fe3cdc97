//! What is said of a gradient besides its program: over which axes each cotangent is summed, and warnings.

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
    let of = |number: &usize| {
        let mut places: Vec<(Axes, Option<Site>)> = Vec::new();
        for axis in mesh.all_axes().iter().filter(|axis| mesh.axis_size(*axis) > 1) {
            for site in Reached::of(func, active, func.body.params[*number], axis) {
                match places.iter_mut().find(|(_, other)| *other == site) {
                    Some((axes, _)) => *axes = axes.union(Axes::one(axis)),
                    None => places.push((Axes::one(axis), site)),
                }
            }
        }
        Summed { argument: *number, over: places }
    };
    by.iter().map(of).collect()
}

/// What a value is to a parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Is {
    /// The parameter itself, in another form: it differs over the axis.
    Part,
    /// Computed from it, and equal over the axis.
    Equal,
}

/// The values that depend on a parameter, as far as a gradient passes through them and they are equal over an axis.
struct Reached<'a> {
    func: &'a Func,
    active: &'a Active,
    axis: Axis,
    values: ValueMap<Is>,
    /// The lines of the spreads over the axis that they enter.
    sites: Vec<Option<Site>>,
    changed: bool,
}

impl Reached<'_> {
    fn of(func: &Func, active: &Active, param: Value, axis: Axis) -> Vec<Option<Site>> {
        let (values, sites) = (ValueMap::default(), Vec::new());
        let mut reached = Reached { func, active, axis, values, sites, changed: false };
        reached.add(param, Is::Part);
        while std::mem::take(&mut reached.changed) {
            reached.block(&func.body);
        }
        reached.sites
    }

    /// Adds a value that depends on one that is so, if it is equal over the axis or a form of the parameter.
    fn add(&mut self, value: Value, from: Is) {
        let is_equal = self.func.ty(value).is_some_and(|ty| !ty.varies().contains(self.axis));
        let is = if is_equal { Is::Equal } else { Is::Part };
        if (is_equal || from == Is::Part) && self.active.has(value) && self.values.get(value).is_none() {
            self.values.insert(value, is);
            self.changed = true;
        }
    }

    fn block(&mut self, block: &Block) {
        for node in &block.nodes {
            self.follow(&links_in(node));
            node.blocks.iter().for_each(|inside| self.block(inside));
            self.follow(&links_out(node));
            if node.op.flow() != Flow::Straight {
                continue;
            }
            let reached: Vec<Is> =
                node.args.iter().filter_map(|arg| self.values.get(*arg).copied()).collect();
            let sums = matches!(
                node.op.as_op(),
                Some(Spread { over: GroupName::Axes(axes) }) if axes.contains(self.axis)
            );
            if reached.contains(&Is::Equal) && sums {
                if !self.sites.contains(&node.site) {
                    self.sites.push(node.site);
                }
            } else if reached.contains(&Is::Equal) {
                node.results.iter().for_each(|result| self.add(*result, Is::Equal));
            } else if reached.contains(&Is::Part) && keeps_form(node) {
                node.results.iter().for_each(|result| self.add(*result, Is::Part));
            }
        }
    }

    fn follow(&mut self, links: &[(Value, Value)]) {
        for (from, to) in links {
            if let Some(is) = self.values.get(*from) {
                self.add(*to, *is);
            }
        }
    }
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
