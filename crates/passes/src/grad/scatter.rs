//! The own slice of a sum over ranks is a reduce_scatter: each rank gets what it keeps, and no more. Slices may have a size
//! of their own on each rank.
//!
//! A parameter that is gathered where it is used, on data that differs between the ranks that it is gathered from, has
//! such a gradient: the sum of a spread, of which the gradient of the all_gather takes the rank's own slice. Between the
//! two may be ops on single elements with one tensor operand and numbers, reshapes that keep the dimension apart from
//! those before it, and permutations. They are then done on the slice. A sum over more axes than the slice is of is
//! finished by an all_reduce of the slice over the others.
//!
//! Does not: touch sums that the function itself computes, or a sum that something else reads whole.

use consort_ir::entity::{Value, ValueMap};
use consort_ir::index::{Index, Sym};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{
    AllReduceStart, Broadcast, Effects, Op, Permute, ReduceScatterStart, ReduceScatterVStart, Reshape, Slice,
    Wait, group_rank,
};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::{TensorType, Type};
use consort_types::{Axes, GroupName, Reduce};

/// Rewrites the sums whose pending is `from` or younger: those of the backward.
pub(super) fn scatter_sums(mesh: &Mesh, func: &mut Func, from: Value) {
    let next = func.types.iter().map(|(value, _)| value.0 + 1).max().unwrap_or(0);
    let mut scatterer = Scatterer { mesh, types: &mut func.types, from, next };
    scatterer.block(&mut func.body);
}

struct Scatterer<'a> {
    mesh: &'a Mesh,
    types: &'a mut ValueMap<Type>,
    from: Value,
    next: u32,
}

/// How a tensor is split: along which dimension, and the size of each member's part.
#[derive(Clone)]
struct Cut {
    dim: usize,
    sizes: Vec<Index>,
}

impl Cut {
    fn is_even(&self) -> bool {
        self.sizes.iter().all(|size| *size == self.sizes[0])
    }

    /// How a dimension of size `of` is split that has the same parts as one of size `to`, split like this.
    fn scaled(&self, dim: usize, of: &Index, to: &Index) -> Option<Cut> {
        let n = Index::from(self.sizes.len());
        let quotient = |product: Index, by: &Index| {
            let quotient = product.div(by);
            (&quotient * by == product).then_some(quotient)
        };
        let sizes = if self.is_even() {
            vec![quotient(of.clone(), &n)?; self.sizes.len()]
        } else {
            self.sizes.iter().map(|size| quotient(size * of, to)).collect::<Option<Vec<Index>>>()?
        };
        Some(Cut { dim, sizes })
    }
}

/// A slice of a sum that becomes a reduce_scatter.
struct Found {
    /// The numbers of the start and its wait.
    start: usize,
    wait: usize,
    /// The ops between, the last first: the number of each, and how its result is split.
    between: Vec<(usize, Cut)>,
    /// How the sum is split, and over which axes.
    cut: Cut,
    over: Axes,
    /// Over which axes it is summed besides.
    rest: Axes,
}

impl Scatterer<'_> {
    fn block(&mut self, block: &mut Block) {
        block.nodes.iter_mut().flat_map(|node| &mut node.blocks).for_each(|inside| self.block(inside));
        let (mut uses, mut places) = (ValueMap::default(), ValueMap::default());
        for value in block.nodes.iter().flat_map(|node| &node.args).chain(&block.results) {
            let before = uses.get(*value).copied().unwrap_or(0);
            uses.insert(*value, before + 1);
        }
        for (at, node) in block.nodes.iter().enumerate() {
            node.results.iter().for_each(|result| {
                places.insert(*result, at);
            });
        }
        // New nodes, with the number of the node before which each stands.
        let mut more: Vec<(usize, Node)> = Vec::new();
        let mut replaced: ValueMap<Value> = ValueMap::default();
        let mut gone = vec![false; block.nodes.len()];
        for (at, gone) in gone.iter_mut().enumerate() {
            let Some(found) = self.find(block, at, &uses, &places) else { continue };
            let Some(end) = self.rewrite(block, &found, &places, &mut more) else { continue };
            replaced.insert(block.nodes[at].results[0], end);
            *gone = true;
        }
        if !gone.contains(&true) {
            return;
        }
        more.sort_by_key(|(before, _)| *before);
        let mut more = more.into_iter().peekable();
        let mut nodes = Vec::new();
        for (at, mut node) in std::mem::take(&mut block.nodes).into_iter().enumerate() {
            while let Some((_, new)) = more.next_if(|(before, _)| *before <= at) {
                nodes.push(new);
            }
            if gone[at] {
                node.results.iter().for_each(|result| drop(self.types.remove(*result)));
                continue;
            }
            node.args.iter_mut().for_each(|arg| *arg = replaced.get(*arg).copied().unwrap_or(*arg));
            nodes.push(node);
        }
        block.nodes = nodes;
        block.results.iter_mut().for_each(|value| *value = replaced.get(*value).copied().unwrap_or(*value));
    }

    fn tensor(&self, value: Value) -> Option<&TensorType> {
        self.types.get(value)?.as_tensor()
    }

    /// Whether node `at` is the own slice of a sum that nothing else reads.
    fn find(
        &self,
        block: &Block,
        at: usize,
        uses: &ValueMap<usize>,
        places: &ValueMap<usize>,
    ) -> Option<Found> {
        let node = &block.nodes[at];
        let mut value = *node.args.first()?;
        let (mut cut, over) = self.own_slice(node.op.as_op()?, &self.tensor(value)?.shape)?;
        let mut between = Vec::new();
        let wait = loop {
            let number = *places.get(value)?;
            let node = &block.nodes[number];
            if uses.get(value) != Some(&1) || node.results.len() != 1 {
                return None;
            }
            if node.op.effects() == Effects::Wait {
                break number;
            }
            let before = self.before(block, node, &cut, places)?;
            between.push((number, cut));
            (value, cut) = before;
        };
        let start = *places.get(*block.nodes[wait].args.first()?)?;
        let node = &block.nodes[start];
        let AllReduceStart { reduce: Reduce::Sum, over: GroupName::Axes(axes) } = *node.op.as_op()? else {
            return None;
        };
        let is_own = node.args.len() == 1 && *node.results.first()? >= self.from && over.is_subset(axes);
        is_own.then_some(Found { start, wait, between, cut, over, rest: axes.minus(over) })
    }

    /// How a tensor is split of which a slice is the part of the executing rank, and the axes along which the parts lie.
    fn own_slice(&self, slice: &Slice, shape: &[Index]) -> Option<(Cut, Axes)> {
        let is_full = |i: usize| slice.size[i] == shape[i] && slice.start[i].as_const() == Some(0);
        let mut cut = (0..shape.len()).filter(|i| !is_full(*i));
        let (Some(dim), None) = (cut.next(), cut.next()) else { return None };
        let (start, size) = (&slice.start[dim], &slice.size[dim]);
        if start.as_const().is_some() || slice.step[dim] != 1 {
            return None;
        }
        let cut = |over: Axes| {
            let (me, n) = (self.me(over), self.mesh.group_size(GroupName::Axes(over)));
            let sizes: Vec<Index> = (0..n).map(|member| self.of_member(size, over, member)).collect();
            let starts: Vec<Index> = (0..sizes.len()).map(|i| Index::sum(&sizes[..i])).collect();
            let is_own = &me * size == *start || Index::pick(&me, &starts) == *start;
            let is_all = Index::pick(&me, &sizes) == *size && Index::sum(&sizes) == shape[dim];
            (is_own && is_all).then_some((Cut { dim, sizes }, over))
        };
        subsets(self.mesh.all_axes()).find_map(cut)
    }

    /// The place of the executing rank in its group.
    fn me(&self, over: Axes) -> Index {
        group_rank(self.mesh, GroupName::Axes(over))
    }

    /// A size on a member of a group.
    fn of_member(&self, size: &Index, over: Axes, member: u32) -> Index {
        let mut places: Vec<(Sym, Index)> = Vec::new();
        let mut rest = member;
        // The last axis counts fastest.
        for axis in over.iter().collect::<Vec<_>>().into_iter().rev() {
            let n = self.mesh.axis_size(axis).max(1);
            places.push((Sym::Rank(axis), Index::from(i64::from(rest % n))));
            rest /= n;
        }
        size.substitute(&|sym| places.iter().find(|(other, _)| *other == sym).map(|(_, place)| place.clone()))
    }

    /// The operand of an op through which a slice is pushed, and how it is split.
    fn before(
        &self,
        block: &Block,
        node: &Node,
        cut: &Cut,
        places: &ValueMap<usize>,
    ) -> Option<(Value, Cut)> {
        let first = *node.args.first()?;
        if let Some(op) = node.op.as_op::<Permute>() {
            return Some((first, Cut { dim: *op.dims.get(cut.dim)?, sizes: cut.sizes.clone() }));
        }
        if let Some(op) = node.op.as_op::<Reshape>() {
            let (from, before) = (&self.tensor(first)?.shape, Index::product(&op.shape[..cut.dim]));
            let mut at = (0..from.len()).filter(|i| Index::product(&from[..*i]) == before);
            return Some((first, at.find_map(|i| cut.scaled(i, &from[i], &op.shape[cut.dim]))?));
        }
        if !node.op.is_elementwise() {
            return None;
        }
        let mut tensors = node.args.iter().filter(|arg| self.number(block, **arg, places).is_none());
        let (Some(tensor), None) = (tensors.next(), tensors.next()) else { return None };
        Some((*tensor, cut.clone()))
    }

    /// The number that a tensor repeats, if it is one.
    fn number(&self, block: &Block, value: Value, places: &ValueMap<usize>) -> Option<Value> {
        let node = &block.nodes[*places.get(value)?];
        let of = *node.args.first()?;
        (node.op.as_op::<Broadcast>().is_some() && self.tensor(of)?.rank() == 0).then_some(of)
    }

    fn value(&mut self, ty: Type) -> Value {
        self.next += 1;
        self.types.insert(Value(self.next - 1), ty);
        Value(self.next - 1)
    }

    /// The type of a tensor of which each member of a group has its part.
    fn part(&self, value: Value, cut: &Cut, over: Axes) -> Option<TensorType> {
        let ty = self.tensor(value)?;
        let mut shape = ty.shape.clone();
        shape[cut.dim] = Index::pick(&self.me(over), &cut.sizes);
        Some(ty.with_shape(shape).with_varies(ty.varies.union(over)))
    }

    /// Makes a sum that is sliced a reduce_scatter; returns what takes the place of the slice.
    fn rewrite(
        &mut self,
        block: &mut Block,
        found: &Found,
        places: &ValueMap<usize>,
        more: &mut Vec<(usize, Node)>,
    ) -> Option<Value> {
        let Found { start, wait, over, rest, ref cut, .. } = *found;
        let sum = block.nodes[wait].results[0];
        let part = self.part(sum, cut, over)?;
        let x = self.tensor(block.nodes[start].args[0])?.varies;
        let scattered = part.with_varies(x.union(over));
        let (reduce, group) = (Reduce::Sum, GroupName::Axes(over));
        block.nodes[start].op = if cut.is_even() {
            Op::new(ReduceScatterStart { reduce, dims: vec![cut.dim], over: group })
        } else {
            Op::new(ReduceScatterVStart { reduce, dim: cut.dim, sizes: cut.sizes.clone(), over: group })
        };
        self.types.insert(block.nodes[start].results[0], Type::Pending(vec![scattered.clone()]));
        self.types.insert(sum, scattered.into());
        let mut end = sum;
        if !rest.is_empty() {
            let op = AllReduceStart { reduce: Reduce::Sum, over: GroupName::Axes(rest) };
            let pending = self.value(Type::Pending(vec![part.clone()]));
            end = self.value(part.into());
            for (op, arg, result) in [(Op::new(op), sum, pending), (Op::new(Wait {}), pending, end)] {
                more.push((wait + 1, node_like(&block.nodes[wait], op, arg, result)));
            }
        }
        for (at, cut) in found.between.iter().rev() {
            let result = block.nodes[*at].results[0];
            let ty = self.part(result, cut, over)?;
            for i in 0..block.nodes[*at].args.len() {
                let arg = block.nodes[*at].args[i];
                if let Some(number) = self.number(block, arg, places) {
                    let repeated = self.tensor(arg)?.with_shape(ty.shape.clone());
                    // A size of its own on each rank differs over the axes.
                    let differs = if cut.is_even() { Axes::NONE } else { over };
                    let repeated = repeated.with_varies(repeated.varies.union(differs));
                    let repeated = self.value(repeated.into());
                    let op = Op::new(Broadcast { shape: ty.shape.clone() });
                    more.push((*at, node_like(&block.nodes[*at], op, number, repeated)));
                    block.nodes[*at].args[i] = repeated;
                } else {
                    block.nodes[*at].args[i] = end;
                }
            }
            if block.nodes[*at].op.as_op::<Reshape>().is_some() {
                block.nodes[*at].op = Op::new(Reshape { shape: ty.shape.clone() });
            }
            self.types.insert(result, ty.into());
            end = result;
        }
        Some(end)
    }
}

/// A node on the line of another.
fn node_like(other: &Node, op: Op, arg: Value, result: Value) -> Node {
    Node { op, args: vec![arg], results: vec![result], blocks: Vec::new(), site: other.site, plan: None }
}

/// All sets of these axes, without the empty one.
fn subsets(axes: Axes) -> impl Iterator<Item = Axes> {
    let axes: Vec<Axes> = axes.iter().map(Axes::one).collect();
    (1..1u32 << axes.len()).map(move |bits| {
        let chosen = axes.iter().enumerate().filter(|(i, _)| bits & (1 << i) != 0);
        chosen.fold(Axes::NONE, |all, (_, axis)| all.union(*axis))
    })
}
