//! Operations in which every member of a group takes part, and the wait that ends them.
//!
//! Every one is a start: its result is pending, and only `wait` gives the tensors. Starts that take `more` operands are
//! coalesced: any number of tensors is sent in one operation. Over axes, a result that all members share no longer
//! differs over them. The lists of a list group may cut across the mesh in any way, so their results are assumed to
//! differ everywhere, unless nothing differed and no rank was left out.

use consort_types::{Axes, Collective, Failure, GroupName, Kind, Rank, Reduce};

use crate::index::Index;
use crate::literal::Literal;
use crate::mesh::Mesh;
use crate::op;
use crate::ops::{
    Cost, CostCx, Cotangents, Effects, Eq, EvalError, GroupEvalCx, IndexValue, InferCx, OpDef, Takes, Term,
    Unmatched, VjpCx, fold, group_rank,
};
use crate::types::{TensorType, Type};

/// The axes over which a result that is equal on all members may differ.
pub(super) fn shared(varies: Axes, over: GroupName, mesh: &Mesh) -> Axes {
    match over {
        GroupName::Axes(axes) => varies.minus(axes),
        GroupName::List(_) if varies.is_empty() && mesh.covers(over) => varies,
        GroupName::List(_) => mesh.all_axes(),
    }
}

/// The axes over which a result that is split between members may differ.
pub(super) fn own(varies: Axes, over: GroupName, mesh: &Mesh) -> Axes {
    varies.union(mesh.group_axes(over))
}

/// A size expression of a rank's place in its instance of a group, `None` for a rank outside of it.
pub(super) fn by_rank(mesh: &Mesh, over: GroupName, of: impl Fn(Option<u32>) -> Index) -> Index {
    let table: Vec<Index> = (0..mesh.n_ranks()).map(|rank| of(mesh.group_rank(over, Rank(rank)))).collect();
    Index::pick(&group_rank(mesh, GroupName::Axes(mesh.all_axes())), &table)
}

pub(super) fn n_members(mesh: &Mesh, over: GroupName) -> Index {
    Index::from(i64::from(mesh.group_size(over)))
}

/// Checks that sizes on which all members must agree do not differ between them.
pub(super) fn check_equal_shapes(
    cx: &InferCx<'_>,
    rule: &'static str,
    over: GroupName,
) -> Result<(), Box<Failure>> {
    for x in cx.tensors()? {
        x.shape.iter().try_for_each(|size| cx.require_equal_on(rule, "a size", size, over))?;
    }
    Ok(())
}

/// Checks that no rank is left out of a group whose results and operands have different shapes.
pub(super) fn check_covers(
    cx: &InferCx<'_>,
    rule: &'static str,
    over: GroupName,
) -> Result<(), Box<Failure>> {
    if cx.mesh.covers(over) {
        return Ok(());
    }
    let name = cx.mesh.group_text(over);
    let violation =
        Failure::rule(rule, format!("expected a group with every rank in it, but `{name}` leaves some out"));
    Err(violation.note(
        "ranks outside a group pass their operands through, which only works where the shape stays the same",
    ))
}

pub(super) fn check_reduce(cx: &InferCx<'_>, rule: &'static str, reduce: Reduce) -> Result<(), Box<Failure>> {
    let Some(x) = cx.tensors()?.into_iter().find(|x| !reduce.takes(x.dtype)) else { return Ok(()) };
    let violation = Failure::rule(rule, format!("`{}` is not defined for {}", reduce.name(), x.dtype));
    Err(violation.note(match reduce {
        Reduce::Avg => "`cast` to a float type first, or reduce with `sum` and divide",
        Reduce::PremulSum(_) => "`cast` to a float type first",
        _ => "`cast` to an integer type first",
    }))
}

pub(super) fn check_dims(
    cx: &InferCx<'_>,
    rule: &'static str,
    dims: &[usize],
    scalars: bool,
) -> Result<(), Box<Failure>> {
    let xs = cx.tensors()?;
    if dims.len() != xs.len() {
        return Err(Failure::rule(
            rule,
            (format!("a dimension for each of {} operands", xs.len()), dims.len().to_string()),
        ));
    }
    for (x, dim) in xs.iter().zip(dims) {
        if !(scalars && x.rank() == 0 && *dim == 0) {
            cx.require_dim(rule, *dim, x.rank())?;
        }
    }
    Ok(())
}

/// The operands with a dimension multiplied by the group size; a 0-d tensor gets one dimension.
pub(super) fn gathered(
    cx: &InferCx<'_>,
    dims: &[usize],
    over: GroupName,
    varies: fn(Axes, GroupName, &Mesh) -> Axes,
) -> Result<Vec<Type>, Box<Failure>> {
    let n = n_members(cx.mesh, over);
    let gather = |(x, dim): (&&TensorType, &usize)| {
        let mut shape = x.shape.clone();
        match shape.get_mut(*dim) {
            Some(size) => *size = &*size * &n,
            None => shape.push(n.clone()),
        }
        x.with_shape(shape).with_varies(varies(x.varies, over, cx.mesh))
    };
    Ok(pending(cx.tensors()?.iter().zip(dims).map(gather).collect()))
}

/// The operands with a dimension divided by the group size, if it is divisible.
pub(super) fn scattered(
    cx: &mut InferCx<'_>,
    rule: &'static str,
    dims: &[usize],
    over: GroupName,
) -> Result<Vec<Type>, Box<Failure>> {
    let n = n_members(cx.mesh, over);
    let mut results = Vec::new();
    for (x, dim) in cx.tensors()?.iter().zip(dims) {
        let mut shape = x.shape.clone();
        shape[*dim] = check_divisible(cx, rule, x, *dim, &n)?;
        results.push(x.with_shape(shape).with_varies(own(x.varies, over, cx.mesh)));
    }
    Ok(pending(results))
}

/// A dimension divided by the group size, if it is divisible.
fn check_divisible(
    cx: &mut InferCx<'_>,
    rule: &'static str,
    x: &TensorType,
    dim: usize,
    n: &Index,
) -> Result<Index, Box<Failure>> {
    let size = &x.shape[dim];
    cx.require_eq(rule, &Index::constant(0), &size.rem(n), |cx| {
        let (size, n) = (size.display(cx.mesh).to_string(), n.display(cx.mesh).to_string());
        format!("expected dimension {dim} of size {size} to be divisible by {n} members")
    })?;
    Ok(size.div(n))
}

/// Each operand reduced over the members.
pub(super) fn fold_all(args: &[Vec<Literal>], reduce: Reduce) -> Result<Vec<Literal>, EvalError> {
    (0..n_operands(args)).map(|i| fold(reduce, &column(args, i))).collect()
}

pub(super) fn pending(types: Vec<TensorType>) -> Vec<Type> {
    vec![Type::Pending(types)]
}

/// The tensors of all members, 0-d ones as `[1]`, joined along a dimension.
pub(super) fn join(args: &[Vec<Literal>], i: usize, dim: usize) -> Literal {
    let rows: Vec<Literal> = args
        .iter()
        .map(
            |member| if member[i].shape.is_empty() { member[i].reshaped(vec![1]) } else { member[i].clone() },
        )
        .collect();
    Literal::concat(&rows.iter().collect::<Vec<_>>(), dim)
}

pub(super) fn column(args: &[Vec<Literal>], i: usize) -> Vec<&Literal> {
    args.iter().map(|member| &member[i]).collect()
}

fn n_operands(args: &[Vec<Literal>]) -> usize {
    args.first().map_or(0, Vec::len)
}

pub(super) fn check_same_shapes(args: &[Vec<Literal>]) -> Result<(), EvalError> {
    for i in 0..n_operands(args) {
        let shapes = column(args, i);
        if let Some(other) = shapes.iter().find(|x| x.shape != shapes[0].shape) {
            let (a, b) = (&shapes[0].shape, &other.shape);
            return Err(EvalError::new(("operands of one shape on all members", format!("{a:?} and {b:?}"))));
        }
    }
    Ok(())
}

/// The part of a dimension that belongs to a member.
pub(super) fn part(x: &Literal, dim: usize, member: usize, n: usize) -> Literal {
    let size = x.shape[dim] / n;
    x.narrow(dim, member * size, size)
}

/// The factor of a linear reduction over `n` members, for its gradient; an error for one that is not linear.
pub(super) fn slope(reduce: Reduce, n: u32) -> Result<f64, Box<Failure>> {
    match reduce {
        Reduce::Sum => Ok(1.0),
        Reduce::Avg => Ok(1.0 / f64::from(n)),
        Reduce::PremulSum(factor) => Ok(factor),
        other => Err(Failure::new(format!("a reduction by `{}` has no gradient", other.name()))
            .note("reduce by `sum` or `avg`, or stop the gradient before it with `stop_gradient`")),
    }
}

/// Cotangents times a factor.
pub(super) fn scaled<'c, 'm>(terms: &[Term<'c, 'm>], factor: f64) -> Vec<Term<'c, 'm>> {
    terms.iter().map(|term| if factor == 1.0 { *term } else { *term * factor }).collect()
}

/// Some entries of a list with one for each operand.
pub(super) fn at(list: &[usize], places: &[usize]) -> Vec<usize> {
    places.iter().filter_map(|place| list.get(*place).copied()).collect()
}

/// Whether an op over a list group has a result equal on all ranks: then all members have one cotangent, which the
/// gradient counts once for each of them.
pub(super) fn is_common(cx: &VjpCx<'_>, result: usize, over: GroupName) -> bool {
    matches!(over, GroupName::List(_)) && cx.result_ty(result).varies.is_empty()
}

/// Cotangents of an op over a list group: by `alone` where the result is equal on all ranks, the others together.
pub(super) fn unless_common<'c, 'm>(
    cx: &'c VjpCx<'m>,
    wanted: &[usize],
    terms: &[Term<'c, 'm>],
    over: GroupName,
    alone: impl Fn(usize, Term<'c, 'm>) -> Term<'c, 'm>,
    together: impl FnOnce(&[usize], &[Term<'c, 'm>]) -> Vec<Term<'c, 'm>>,
) -> Vec<Term<'c, 'm>> {
    let pairs = || wanted.iter().copied().zip(terms.iter().copied());
    let (places, others): (Vec<usize>, Vec<Term<'c, 'm>>) =
        pairs().filter(|(i, _)| !is_common(cx, *i, over)).unzip();
    let mut made = if places.is_empty() { Vec::new() } else { together(&places, &others) }.into_iter();
    let of = |(i, term)| if is_common(cx, i, over) { alone(i, term) } else { made.next().unwrap_or(term) };
    pairs().map(of).collect()
}

/// `x` at member `root`, zeros at all others.
pub(super) fn only_at<'c, 'm>(
    cx: &'c VjpCx<'m>,
    x: Term<'c, 'm>,
    root: usize,
    over: GroupName,
) -> Term<'c, 'm> {
    let me = cx.op(IndexValue { value: group_rank(cx.mesh(), over) }, &[]);
    me.compare(Eq {}, me.fill(root as f64)).widen(x).select(x, x.fill(0.0))
}

op! {
    /// Reduces tensors over the members; every member gets the same result.
    ///
    /// (C1) The reduction is defined for the element types.
    ///
    /// (C2) The shapes are equal on all members.
    pub struct AllReduceStart("all_reduce_start")(x; more..) {
        /// The reduction.
        reduce: Reduce,
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{tp}) -> f32[2] {\n    v1 = all_reduce_start[reduce=sum, over=tp] v0 : pending<f32[2]>\n    v2 = wait v1 : f32[2]\n    return v2\n}\n; run: @f([1, 2] | [10, 20]) == [11, 22]\n"
}

impl OpDef for AllReduceStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        check_reduce(cx, "C1", self.reduce)?;
        check_equal_shapes(cx, "C2", self.over)?;
        Ok(pending(
            cx.tensors()?.iter().map(|x| x.with_varies(shared(x.varies, self.over, cx.mesh))).collect(),
        ))
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        let n = n_members(cx.mesh, self.over);
        let others = &n - &Index::constant(1);
        let wire = (&(&Index::constant(2) * &others) * &cx.arg_bytes()).div(&n);
        cx.comm((&others * &cx.result_numel()).div(&n), wire)
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective { reduce: Some(self.reduce), ..Collective::new(Kind::AllReduce, self.over) })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        let sums = fold_all(args, self.reduce)?;
        Ok(vec![sums; cx.n()])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let slope = slope(self.reduce, cx.mesh().group_size(self.over))?;
        cx.together(|_, terms| match self.over {
            GroupName::Axes(_) => scaled(terms, slope),
            GroupName::List(_) => cx.start_wait(self.clone(), terms),
        })
    }
}

op! {
    /// Concatenates the members' shards along a dimension, in group order; every member gets the same result.
    /// A 0-d tensor becomes one of the group's size.
    ///
    /// (C1) There is a dimension for each operand, and it exists (0 for a 0-d tensor).
    ///
    /// (C2) The shapes are equal on all members.
    ///
    /// (C3) The group has every rank in it.
    pub struct AllGatherStart("all_gather_start")(x; more..) {
        /// The dimension to join along, for each operand.
        dims: Vec<usize>,
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{tp}) -> f32[4] {\n    v1 = all_gather_start[dims=[0], over=tp] v0 : pending<f32[4]>\n    v2 = wait v1 : f32[4]\n    return v2\n}\n; run: @f([1, 2] | [3, 4]) == [1, 2, 3, 4]\n"
}

impl OpDef for AllGatherStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        check_dims(cx, "C1", &self.dims, true)?;
        check_equal_shapes(cx, "C2", self.over)?;
        check_covers(cx, "C3", self.over)?;
        gathered(cx, &self.dims, self.over, shared)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.comm(Index::constant(0), &(&n_members(cx.mesh, self.over) - &Index::constant(1)) * &cx.arg_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective { dims: &self.dims, ..Collective::new(Kind::AllGather, self.over) })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        check_same_shapes(args)?;
        let all: Vec<Literal> = self.dims.iter().enumerate().map(|(i, dim)| join(args, i, *dim)).collect();
        Ok(vec![all; cx.n()])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let n = n_members(cx.mesh(), self.over);
        let own = |i: usize, term: Term<'c, 'm>| {
            let (dim, shape) = (self.dims[i], cx.arg_ty(i).shape);
            let size = shape.get(dim).cloned().unwrap_or(Index::constant(1));
            if is_common(cx, i, self.over) {
                let mut split = cx.result_ty(i).shape;
                split.splice(dim..dim + 1, [n.clone(), size]);
                return term.reshape(&split).sum(&[dim], false);
            }
            term.narrow(dim, &(&group_rank(cx.mesh(), self.over) * &size), &size)
        };
        cx.together(|wanted, terms| match self.over {
            GroupName::Axes(_) => wanted.iter().zip(terms).map(|(i, term)| own(*i, *term)).collect(),
            GroupName::List(_) => unless_common(cx, wanted, terms, self.over, own, |wanted, terms| {
                let dims = at(&self.dims, wanted);
                cx.start_wait(ReduceScatterStart { reduce: Reduce::Sum, dims, over: self.over }, terms)
            }),
        })
    }
}

op! {
    /// Reduces tensors over the members and gives each its shard along a dimension, in group order.
    ///
    /// (C1) The reduction is defined for the element types.
    ///
    /// (C2) There is a dimension for each operand, and it exists.
    ///
    /// (C3) The dimension is divisible by the size of the group.
    ///
    /// (C4) The shapes are equal on all members.
    ///
    /// (C5) The group has every rank in it.
    pub struct ReduceScatterStart("reduce_scatter_start")(x; more..) {
        /// The reduction.
        reduce: Reduce,
        /// The dimension to shard, for each operand.
        dims: Vec<usize>,
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{tp}) -> f32[1]{tp} {\n    v1 = reduce_scatter_start[reduce=sum, dims=[0], over=tp] v0 : pending<f32[1]{tp}>\n    v2 = wait v1 : f32[1]{tp}\n    return v2\n}\n; run: @f([1, 2] | [10, 20]) == [11] | [22]\n"
}

impl OpDef for ReduceScatterStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        check_reduce(cx, "C1", self.reduce)?;
        check_dims(cx, "C2", &self.dims, false)?;
        check_equal_shapes(cx, "C4", self.over)?;
        check_covers(cx, "C5", self.over)?;
        scattered(cx, "C3", &self.dims, self.over)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        let others = &n_members(cx.mesh, self.over) - &Index::constant(1);
        cx.comm(&others * &cx.result_numel(), &others * &cx.result_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective {
            reduce: Some(self.reduce),
            dims: &self.dims,
            ..Collective::new(Kind::ReduceScatter, self.over)
        })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        let sums = fold_all(args, self.reduce)?;
        let own = |m| sums.iter().zip(&self.dims).map(|(sum, dim)| part(sum, *dim, m, cx.n())).collect();
        Ok((0..cx.n()).map(own).collect())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let slope = slope(self.reduce, cx.mesh().group_size(self.over))?;
        cx.together(|wanted, terms| {
            let dims = at(&self.dims, wanted);
            cx.start_wait(AllGatherStart { dims, over: self.over }, &scaled(terms, slope))
        })
    }
}

op! {
    /// Each member sends a part of its tensor's first dimension to each member, and concatenates the parts it
    /// receives in group order. Without splits the parts are equal; with them, `in_splits` are the sizes this member
    /// sends and `out_splits` those it receives, and they may differ between members and be unbacked.
    ///
    /// (C1) Both splits are given or neither, with a size for each member.
    ///
    /// (C2) The operand has a first dimension: the sum of `in_splits`, or divisible by the size of the group.
    ///
    /// (C3) No split is negative.
    ///
    /// (C4) All dimensions but the first are equal on all members; without splits, the first too.
    ///
    /// (C5) The group has every rank in it.
    pub struct AllToAllStart("all_to_all_start")(x) {
        /// The sizes sent to each member.
        in_splits: Option<Vec<Index>>,
        /// The sizes received from each member.
        out_splits: Option<Vec<Index>>,
        /// The group.
        over: GroupName
    }
    example "mesh (ep: 2)\n\nfunc @f(v0: f32[2]{ep}) -> f32[2]{ep} {\n    v1 = all_to_all_start[in_splits=none, out_splits=none, over=ep] v0 : pending<f32[2]{ep}>\n    v2 = wait v1 : f32[2]{ep}\n    return v2\n}\n; run: @f([1, 2] | [3, 4]) == [1, 3] | [2, 4]\n"
}

impl OpDef for AllToAllStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        let n = cx.mesh.group_size(self.over) as usize;
        let (first, splits) = match (&self.in_splits, &self.out_splits) {
            (None, None) => (0, None),
            (Some(ins), Some(outs)) if ins.len() == n && outs.len() == n => (1, Some((ins, outs))),
            (Some(ins), Some(outs)) => {
                let message = (format!("{n} splits each way"), format!("{} and {}", ins.len(), outs.len()));
                return Err(Failure::rule("C1", message));
            }
            _ => {
                return Err(Failure::rule("C1", ("both in_splits and out_splits or neither", "one")));
            }
        };
        let Some(rows) = x.shape.first() else {
            return Err(Failure::rule("C2", ("a first dimension to split", "a 0-d tensor")));
        };
        x.shape[first..].iter().try_for_each(|size| cx.require_equal_on("C4", "a size", size, self.over))?;
        check_covers(cx, "C5", self.over)?;
        let mut shape = x.shape.clone();
        match splits {
            None => drop(check_divisible(cx, "C2", x, 0, &Index::from(n))?),
            Some((ins, outs)) => {
                ins.iter().chain(outs).try_for_each(|size| cx.require_size("C3", "a split", size))?;
                cx.require_eq("C2", rows, &Index::sum(ins), |cx| {
                    let (rows, ins) = (rows.display(cx.mesh).to_string(), cx.shape_text(ins));
                    (format!("in_splits that add up to {rows}"), ins.to_string())
                })?;
                shape[0] = Index::sum(outs);
            }
        }
        Ok(pending(vec![x.with_shape(shape).with_varies(own(x.varies, self.over, cx.mesh))]))
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        let n = n_members(cx.mesh, self.over);
        cx.comm(Index::constant(0), (&(&n - &Index::constant(1)) * &cx.result_bytes()).div(&n))
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective {
            splits: self.in_splits.as_deref().zip(self.out_splits.as_deref()),
            ..Collective::new(Kind::AllToAll, self.over)
        })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        let sizes = |splits: &Option<Vec<Index>>, m: usize| match splits {
            None => Ok(vec![args[m][0].shape[0] / cx.n(); cx.n()]),
            Some(list) => list.iter().map(|size| cx.members[m].size(size)).collect::<Result<Vec<_>, _>>(),
        };
        let ins = (0..cx.n()).map(|m| sizes(&self.in_splits, m)).collect::<Result<Vec<_>, _>>()?;
        let outs = (0..cx.n()).map(|m| sizes(&self.out_splits, m)).collect::<Result<Vec<_>, _>>()?;
        for (m, list) in ins.iter().enumerate() {
            let (sum, rows) = (list.iter().fold(0usize, |a, b| a.saturating_add(*b)), args[m][0].shape[0]);
            if sum != rows {
                let rank = cx.members[m].rank;
                let expected = format!("in_splits of {rank} that add up to {rows}");
                return Err(EvalError::new((expected, format!("{list:?}"))));
            }
        }
        let piece = |from: usize, to: usize| {
            let (sent, expected) = (ins[from][to], outs[to][from]);
            if sent != expected {
                let (from, to) = (cx.members[from].rank, cx.members[to].rank);
                let headline = format!("{from} sends {sent} to {to}, which expects {expected}");
                return Err(EvalError::unmatched(headline, Unmatched::Part { from, to }));
            }
            Ok(args[from][0].narrow(0, ins[from][..to].iter().sum(), sent))
        };
        let receive = |to: usize| {
            let pieces = (0..cx.n()).map(|from| piece(from, to)).collect::<Result<Vec<_>, _>>()?;
            Ok(vec![Literal::concat(&pieces.iter().collect::<Vec<_>>(), 0)])
        };
        (0..cx.n()).map(receive).collect()
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let (in_splits, out_splits) = (self.out_splits.clone(), self.in_splits.clone());
        cx.together(|_, terms| cx.start_wait(AllToAllStart { in_splits, out_splits, over: self.over }, terms))
    }
}

op! {
    /// Completes on every member after all of them have started it.
    pub struct BarrierStart("barrier_start")() {
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f() {\n    v0 = barrier_start[over=tp] : pending<>\n    wait v0\n    return\n}\n; run: @f() ==\n"
}

impl OpDef for BarrierStart {
    fn infer(&self, _cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(pending(vec![]))
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective::new(Kind::Barrier, self.over))
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        _args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        Ok(vec![vec![]; cx.n()])
    }
}

op! {
    /// Waits for a start and gives its tensors. Each pending is waited for exactly once.
    pub struct Wait("wait")(pending) {}
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[1]{tp}, v1: i32[1]{tp}) -> (f32[1], i32[1]) {\n    v2 = all_reduce_start[reduce=sum, over=tp] v0, v1 : pending<f32[1], i32[1]>\n    v3, v4 = wait v2 : f32[1], i32[1]\n    return v3, v4\n}\n; run: @f([1] | [2], [3] | [4]) == [3], [7]\n"
}

impl OpDef for Wait {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        match &cx.args[0] {
            Type::Pending(tensors) => Ok(tensors.iter().cloned().map(Type::Tensor).collect()),
            other => Err(Failure::rule("V2", ("a pending", cx.text(other).to_string()))),
        }
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn effects(&self) -> Effects {
        Effects::Wait
    }
    fn takes(&self) -> Takes {
        Takes::Pending
    }
}
