//! How a random program grows by one step: each recipe picks operands and attributes that are likely to fit,
//! and the builder has the last word.

use crate::dtype::Dtype;
use crate::entity::Value;
use crate::index::{Index, Sym};
use crate::mesh::{Axes, Group, Rank};
use crate::ops::*;
use crate::types::{TensorType, Type};

use super::Growing;

mod arrays;

/// One step; none where it did not work out.
type Recipe = fn(&mut Growing<'_>) -> Option<()>;

/// The recipes, the likelier the more often they stand here.
const RECIPES: &[Recipe] = &[
    unary,
    unary,
    binary,
    binary,
    binary,
    compare,
    logic,
    select,
    cast,
    fold,
    matmul,
    reshape,
    permute,
    slice,
    update_slice,
    concat,
    split,
    pad,
    broadcast,
    gather,
    scatter,
    arrays::cumsum,
    arrays::flip,
    arrays::sort,
    arrays::topk,
    arrays::one_hot,
    arrays::convolution,
    arrays::convolution,
    arrays::random,
    create,
    size,
    composite,
    composite,
    cond,
    scan,
    collective,
    collective,
    collective,
    collective,
    rooted,
    uneven,
    all_to_all,
    point_to_point,
    point_to_point,
    wait,
    wait,
    wait,
];

pub(super) fn grow(g: &mut Growing<'_>) -> Option<()> {
    let recipe = g.rng.pick(RECIPES);
    recipe(g)
}

fn wait(g: &mut Growing<'_>) -> Option<()> {
    g.wait()
}

impl Growing<'_> {
    fn any(&mut self) -> Option<Value> {
        // The latest values twice as often, so that programs grow deep as well as wide.
        let n = self.tensors.len();
        let at = if self.rng.one_in(2) { self.rng.below(n) } else { n - 1 - self.rng.below(n.min(4)) };
        self.tensors.get(at).copied()
    }

    fn any_where(&mut self, fits: impl Fn(&TensorType) -> bool) -> Option<(Value, TensorType)> {
        for _ in 0..8 {
            let value = self.any()?;
            let ty = self.ty(value)?;
            if fits(&ty) {
                return Some((value, ty));
            }
        }
        None
    }

    fn ty(&self, value: Value) -> Option<TensorType> {
        self.builder.tensor_ty(value).ok()
    }

    fn add(&mut self, op: impl OpDef, args: &[Value]) -> Option<Value> {
        let value = self.builder.one(op, args).ok()?;
        self.tensors.push(value);
        Some(value)
    }

    fn start(&mut self, op: impl OpDef, args: &[Value]) -> Option<()> {
        let value = self.builder.one(op, args).ok()?;
        self.pending.push(value);
        Some(())
    }

    /// A value of the same element type and shape, possibly the same one.
    fn like(&mut self, value: Value, ty: &TensorType) -> Value {
        for _ in 0..6 {
            if let Some(other) = self.any()
                && self.ty(other).is_some_and(|o| o.dtype == ty.dtype && o.shape == ty.shape)
            {
                return other;
            }
        }
        value
    }

    /// A dimension of a tensor that has one.
    fn dim(&mut self, ty: &TensorType) -> Option<usize> {
        (ty.rank() > 0).then(|| self.rng.below(ty.rank()))
    }

    /// Some dimensions, each once.
    fn dims(&mut self, ty: &TensorType) -> Vec<usize> {
        (0..ty.rank()).filter(|_| self.rng.one_in(2)).collect()
    }

    /// Nothing, where the shape differs between members: the two ends of a message have one shape.
    fn equal_shape(&self, ty: &TensorType, over: Group) -> Option<()> {
        let varies =
            ty.shape.iter().fold(Axes::NONE, |set, size| set.union(self.builder.facts().varies(size)));
        varies.intersect(self.builder.mesh().group_axes(over)).is_empty().then_some(())
    }

    /// A 0-d truth value; it may differ between ranks.
    fn condition(&mut self) -> Option<Value> {
        let axes: Vec<_> = self.builder.mesh().all_axes().iter().collect();
        let value = match axes.is_empty() || self.rng.one_in(2) {
            true => Index::constant(self.rng.below(2) as i64),
            false => Index::sym(Sym::Rank(self.rng.pick(&axes))),
        };
        let value = self.builder.one(IndexValue { value }, &[]).ok()?;
        let one = Constant { dtype: Dtype::I64, shape: vec![], value: Elements::Int(1) };
        let one = self.builder.one(one, &[]).ok()?;
        self.builder.one(Lt {}, &[value, one]).ok()
    }
}

fn is_float(ty: &TensorType) -> bool {
    ty.dtype.is_float()
}

fn is_number(ty: &TensorType) -> bool {
    ty.dtype != Dtype::Bool
}

fn constants(shape: &[Index]) -> Option<Vec<i64>> {
    shape.iter().map(Index::as_const).collect()
}

/// Adds one of several ops that differ only in their type.
macro_rules! one_of {
    ($g:expr, $args:expr, $($op:ident),+) => {{
        let n = [$(stringify!($op)),+].len();
        let at = $g.rng.below(n);
        let mut i = 0;
        let mut added = None;
        $(
            if i == at {
                added = $g.add($op {}, $args);
            }
            i += 1;
        )+
        debug_assert_eq!(i, n);
        added.map(drop)
    }};
}

fn unary(g: &mut Growing<'_>) -> Option<()> {
    let (x, _) = g.any_where(is_number)?;
    match g.rng.below(3) {
        0 => one_of!(g, &[x], Neg, Abs, Exp, Log, Sqrt, Rsqrt, Tanh, Sigmoid, Erf, Gelu, Silu, Relu),
        1 => one_of!(g, &[x], Sign, Recip, Sin, Cos, Exp2, Expm1, Log2, Log1p),
        _ => one_of!(g, &[x], Floor, Ceil, Round, IsNan, IsFinite),
    }
}

fn binary(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(is_number)?;
    let y = g.like(x, &ty);
    one_of!(g, &[x, y], Add, Sub, Mul, Div, Rem, Maximum, Minimum, Pow, Atan2)
}

fn compare(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|_| true)?;
    let y = g.like(x, &ty);
    one_of!(g, &[x, y], Eq, Ne, Lt, Le, Gt, Ge)
}

fn logic(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| !ty.dtype.is_float())?;
    let y = g.like(x, &ty);
    if g.rng.one_in(3) {
        return g.add(Not {}, &[x]).map(drop);
    }
    one_of!(g, &[x, y], And, Or, Xor)
}

fn select(g: &mut Growing<'_>) -> Option<()> {
    let (condition, ty) = g.any_where(|ty| ty.dtype == Dtype::Bool)?;
    let (x, x_ty) = g.any_where(|other| other.shape == ty.shape)?;
    let y = g.like(x, &x_ty);
    g.add(Select {}, &[condition, x, y]).map(drop)
}

fn cast(g: &mut Growing<'_>) -> Option<()> {
    let x = g.any()?;
    let to = g.rng.pick(&Dtype::ALL);
    g.add(Cast { to }, &[x]).map(drop)
}

fn fold(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|_| true)?;
    let (dims, keep) = (g.dims(&ty), g.rng.one_in(2));
    if ty.dtype == Dtype::Bool {
        let any = g.rng.one_in(2);
        return if any { g.add(Any { dims, keep }, &[x]) } else { g.add(All { dims, keep }, &[x]) }.map(drop);
    }
    match g.rng.below(7) {
        0 => g.add(Sum { dims, keep }, &[x]),
        1 => g.add(Mean { dims, keep }, &[x]),
        2 => g.add(Max { dims, keep }, &[x]),
        3 => g.add(Min { dims, keep }, &[x]),
        4 => g.add(Prod { dims, keep }, &[x]),
        5 => g.add(Argmin { dims, keep }, &[x]),
        _ => g.add(Argmax { dims, keep }, &[x]),
    }
    .map(drop)
}

fn matmul(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() >= 2 && is_number(ty))?;
    let mut dims: Vec<usize> = (0..ty.rank()).collect();
    dims.swap(ty.rank() - 1, ty.rank() - 2);
    let y = g.builder.one(Permute { dims }, &[x]).ok()?;
    g.add(Matmul {}, &[x, y]).map(drop)
}

fn reshape(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|_| true)?;
    let mut shape = ty.shape.clone();
    match g.rng.below(3) {
        0 => shape = vec![ty.numel()],
        1 => shape.insert(g.rng.below(ty.rank() + 1), Index::constant(1)),
        _ if ty.rank() >= 2 => {
            let last = shape.pop()?;
            let before = shape.pop()?;
            shape.push(&last * &before);
        }
        _ => return None,
    }
    g.add(Reshape { shape }, &[x]).map(drop)
}

fn permute(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() >= 2)?;
    let mut dims: Vec<usize> = (0..ty.rank()).collect();
    for i in 1..dims.len() {
        let j = g.rng.below(i + 1);
        dims.swap(i, j);
    }
    g.add(Permute { dims }, &[x]).map(drop)
}

/// A box inside a tensor of constant sizes; its start may depend on the rank.
fn a_box(g: &mut Growing<'_>, sizes: &[i64]) -> (Vec<Index>, Vec<Index>) {
    let axes: Vec<_> = g.builder.mesh().all_axes().iter().collect();
    let mut side = |size: i64| {
        let part = g.rng.below(size as usize + 1) as i64;
        let start = g.rng.below((size - part) as usize + 1) as i64;
        if let Some(axis) = (!axes.is_empty()).then(|| g.rng.pick(&axes)) {
            let n = i64::from(g.builder.mesh().axis_size(axis));
            if size % n == 0 && g.rng.one_in(2) {
                let part = size / n;
                return (&Index::constant(part) * &Index::sym(Sym::Rank(axis)), Index::constant(part));
            }
        }
        (Index::constant(start), Index::constant(part))
    };
    sizes.iter().map(|size| side(*size)).unzip()
}

fn slice(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let (mut start, mut size): (Vec<_>, Vec<_>) =
        ty.shape.iter().map(|size| (Index::constant(0), size.clone())).unzip();
    let mut step = vec![1; ty.rank()];
    if let Some(sizes) = constants(&ty.shape) {
        (start, size) = a_box(g, &sizes);
        for i in 0..step.len() {
            if start[i] == Index::constant(0) && sizes[i] >= 3 && g.rng.one_in(4) {
                (size[i], step[i]) = (Index::constant((sizes[i] - 1) / 2 + 1), 2);
            }
        }
    } else {
        let dim = g.dim(&ty)?;
        size[dim] = size[dim].div(&Index::constant(2));
    }
    g.add(Slice { start, size, step }, &[x]).map(drop)
}

fn update_slice(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| constants(&ty.shape).is_some())?;
    let (start, size) = a_box(g, &constants(&ty.shape)?);
    let step = vec![1; ty.rank()];
    let y = g.like(x, &ty);
    let part = g.builder.one(Slice { start: start.clone(), size, step }, &[y]).ok()?;
    let moved = if g.rng.one_in(2) { start } else { vec![Index::constant(0); ty.rank()] };
    g.add(UpdateSlice { start: moved }, &[x, part]).map(drop)
}

fn concat(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let (y, dim) = (g.like(x, &ty), g.dim(&ty)?);
    g.add(Concat { dim }, &[x, y]).map(drop)
}

fn split(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let dim = g.dim(&ty)?;
    let first = match ty.shape[dim].as_const() {
        Some(size) => Index::constant(g.rng.below(size as usize + 1) as i64),
        None => ty.shape[dim].div(&Index::constant(2)),
    };
    let rest = &ty.shape[dim] - &first;
    let parts = g.builder.op(Split { dim, sizes: vec![first, rest] }, &[x]).ok()?;
    g.tensors.extend(parts);
    Some(())
}

fn pad(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|_| true)?;
    let mut side = || (0..ty.rank()).map(|_| Index::constant(g.rng.below(3) as i64)).collect();
    let (low, high) = (side(), side());
    g.add(Pad { low, high, value: 1.0 }, &[x]).map(drop)
}

fn broadcast(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() < 4)?;
    let mut shape: Vec<Index> = ty
        .shape
        .iter()
        .map(|size| if size.as_const() == Some(1) { Index::constant(3) } else { size.clone() })
        .collect();
    shape.insert(0, Index::constant(2));
    g.add(Broadcast { shape }, &[x]).map(drop)
}

/// Places along a dimension of constant size.
fn places(g: &mut Growing<'_>, size: i64) -> Option<Value> {
    if size == 0 {
        return None;
    }
    let list = (0..3).map(|_| g.rng.below(size as usize) as i64).collect();
    let dtype = g.rng.pick(&[Dtype::I32, Dtype::I64]);
    g.builder.one(Constant { dtype, shape: vec![Index::constant(3)], value: Elements::Ints(list) }, &[]).ok()
}

fn gather(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let dim = g.dim(&ty)?;
    let places = places(g, ty.shape[dim].as_const()?)?;
    g.add(Gather { dim }, &[x, places]).map(drop)
}

fn scatter(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0 && is_number(ty))?;
    let dim = g.dim(&ty)?;
    let places = places(g, ty.shape[dim].as_const()?)?;
    let updates = g.builder.one(Gather { dim }, &[x, places]).ok()?;
    if g.rng.one_in(3) {
        return g.add(Scatter { dim }, &[x, places, updates]).map(drop);
    }
    g.add(ScatterAdd { dim }, &[x, places, updates]).map(drop)
}

fn create(g: &mut Growing<'_>) -> Option<()> {
    let shape = vec![g.rng.pick(&[Index::constant(4), Index::constant(3), Index::sym(Sym::Backed(0))])];
    if shape[0].as_const().is_none() && g.builder.facts().get(Sym::Backed(0)).is_none() {
        return None;
    }
    match g.rng.below(3) {
        0 => {
            let dtype = g.rng.pick(&Dtype::ALL);
            g.add(Iota { dtype, shape, dim: 0 }, &[])
        }
        1 => g.add(Constant { dtype: Dtype::F32, shape, value: Elements::Float(0.1) }, &[]),
        _ => {
            let axes: Vec<_> = g.builder.mesh().all_axes().iter().collect();
            let rank =
                if axes.is_empty() { Index::constant(3) } else { Index::sym(Sym::Rank(g.rng.pick(&axes))) };
            g.add(IndexValue { value: &rank + &Index::constant(1) }, &[])
        }
    }
    .map(drop)
}

/// A size out of data, and a tensor of that size; the size may differ between ranks.
fn size(g: &mut Growing<'_>) -> Option<()> {
    if let (true, Some((x, ty))) = (g.rng.one_in(3), g.any_where(|ty| ty.rank() > 0)) {
        let dim = g.dim(&ty)?;
        return g.builder.one(SizeOf { dim }, &[x]).ok().map(drop);
    }
    let axes: Vec<_> = g.builder.mesh().all_axes().iter().collect();
    let value = match axes.is_empty() || g.rng.one_in(2) {
        true => Index::constant(g.rng.below(4) as i64),
        false => &Index::sym(Sym::Rank(g.rng.pick(&axes))) + &Index::constant(1),
    };
    let sym = g.builder.fresh_symbol();
    let data = g.builder.one(IndexValue { value: value.clone() }, &[]).ok()?;
    let to_size = ToSize { symbols: vec![sym], min: Index::constant(0), max: Some(Index::constant(8)) };
    g.builder.one(to_size, &[data]).ok()?;
    let mesh = g.builder.mesh();
    for (rank, symbols) in (0u32..).zip(&mut g.chosen) {
        let cx = EvalCx { mesh, rank: Rank(rank), symbols };
        let value = cx.index(&value).ok()?;
        symbols.insert(sym, value);
    }
    let shape = vec![Index::sym(sym), Index::constant(2)];
    g.add(Iota { dtype: Dtype::F32, shape, dim: 0 }, &[]).map(drop)
}

fn composite(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| is_float(ty) && ty.rank() > 0)?;
    match g.rng.below(6) {
        0 => {
            let dim = g.dim(&ty)?;
            g.add(Softmax { dim }, &[x]).map(drop)
        }
        1 => {
            let dim = g.dim(&ty)?;
            g.add(LogSoftmax { dim }, &[x]).map(drop)
        }
        4 => {
            let (dims, keep) = (g.dims(&ty), g.rng.one_in(2));
            g.add(Logsumexp { dims, keep }, &[x]).map(drop)
        }
        norm @ (2 | 3) => {
            let last = ty.shape.last()?.clone();
            let weight = Constant { dtype: ty.dtype, shape: vec![last], value: Elements::Float(0.5) };
            let weight = g.builder.one(weight, &[]).ok()?;
            match norm {
                2 => g.add(RmsNorm { eps: 1e-5 }, &[x, weight]).map(drop),
                _ => g.add(LayerNorm { eps: 1e-5 }, &[x, weight, weight]).map(drop),
            }
        }
        _ => {
            let mut shape = ty.shape.clone();
            while shape.len() < 4 {
                shape.insert(0, Index::constant(1));
            }
            let x = g.builder.one(Reshape { shape }, &[x]).ok()?;
            let causal = g.rng.pick(&[None, Some(Index::constant(0)), Some(Index::constant(-1))]);
            g.add(Attention { scale: 0.5, causal }, &[x, x, x]).map(drop)
        }
    }
}

fn cond(g: &mut Growing<'_>) -> Option<()> {
    let condition = g.condition()?;
    let (x, ty) = g.any_where(is_float)?;
    let y = g.like(x, &ty);
    let types = vec![Type::Tensor(g.ty(x)?), Type::Tensor(g.ty(y)?)];
    let params = g.builder.begin_block(types.clone());
    let sum = g.builder.one(Add {}, &params).ok()?;
    let then = g.builder.end_block(&[sum, params[0]]);
    let params = g.builder.begin_block(types);
    let product = g.builder.one(Mul {}, &params).ok()?;
    // Over no axis that the condition differs over.
    let differs = g.builder.ty(condition).ok()?.varies();
    let start = AllReduceStart { reduce: Reduce::Max, over: Group::Axes(g.axes().minus(differs)) };
    let reduced = g.builder.start_wait(start, &[product]).ok()?;
    let other = g.builder.end_block(&[reduced[0], params[1]]);
    let results = g.builder.node(Op::new(Cond {}), &[condition, x, y], vec![then, other]).ok()?;
    g.tensors.extend(results);
    Some(())
}

fn scan(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| is_float(ty) && ty.rank() > 0)?;
    // Over no axis that the length differs over.
    let differs = g.builder.facts().varies(&ty.shape[0]);
    let over = Group::Axes(g.axes().minus(differs));
    let entry = ty.with_shape(ty.shape[1..].to_vec());
    let whole = entry.with_varies(g.builder.mesh().all_axes());
    let zero = Constant { dtype: ty.dtype, shape: entry.shape.clone(), value: Elements::Float(0.0) };
    let zero = g.builder.one(zero, &[]).ok()?;
    let start = || AllReduceStart { reduce: Reduce::Avg, over };
    if g.rng.one_in(2) {
        // A pending is carried from one iteration to the next.
        let first = g.builder.one(start(), &[zero]).ok()?;
        let pending = Type::Pending(vec![whole]);
        let params = g.builder.begin_block(vec![pending, entry.into()]);
        let got = g.builder.op(Wait {}, &params[..1]).ok()?;
        let sum = g.builder.one(Add {}, &[got[0], params[1]]).ok()?;
        let next = g.builder.one(start(), &[sum]).ok()?;
        let body = g.builder.end_block(&[next, sum]);
        let scan = Scan { length: ty.shape[0].clone(), carries: 1, slices: 1 };
        let results = g.builder.node(Op::new(scan), &[first, x], vec![body]).ok()?;
        g.pending.push(results[0]);
        g.tensors.push(results[1]);
        return Some(());
    }
    let params = g.builder.begin_block(vec![whole.into(), entry.clone().into(), entry.into()]);
    let sum = g.builder.one(Add {}, &params[..2]).ok()?;
    let sum = g.builder.one(Sub {}, &[sum, params[2]]).ok()?;
    let reduced = g.builder.start_wait(start(), &[sum]).ok()?;
    let body = g.builder.end_block(&[sum, reduced[0]]);
    let scan = Scan { length: ty.shape[0].clone(), carries: 1, slices: 1 };
    let fixed = g.builder.one(Sum { dims: vec![0], keep: false }, &[x]).ok()?;
    let results = g.builder.node(Op::new(scan), &[zero, x, fixed], vec![body]).ok()?;
    g.tensors.extend(results);
    Some(())
}

/// A reduction that the element types allow.
fn reduction(g: &mut Growing<'_>, types: &[TensorType]) -> Option<Reduce> {
    let reduce = g.rng.pick(&Reduce::ALL);
    types.iter().all(|ty| reduce.takes(ty.dtype)).then_some(reduce)
}

fn collective(g: &mut Growing<'_>) -> Option<()> {
    let n = 1 + g.rng.below(3);
    let args = (0..n).map(|_| g.any()).collect::<Option<Vec<_>>>()?;
    let types = args.iter().map(|arg| g.ty(*arg)).collect::<Option<Vec<_>>>()?;
    let over = g.group();
    let dims = types.iter().map(|ty| g.dim(ty).unwrap_or(0)).collect();
    match g.rng.below(5) {
        0 | 1 => {
            let reduce = reduction(g, &types)?;
            g.start(AllReduceStart { reduce, over }, &args)
        }
        2 => g.start(AllGatherStart { dims, over }, &args),
        3 => {
            let reduce = reduction(g, &types)?;
            g.start(ReduceScatterStart { reduce, dims, over }, &args)
        }
        _ => g.start(BarrierStart { over }, &[]),
    }
}

fn rooted(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|_| true)?;
    let over = g.group();
    let root = g.rng.below(g.builder.mesh().group_size(over) as usize);
    let dims = vec![g.dim(&ty).unwrap_or(0)];
    match g.rng.below(4) {
        0 => g.start(BroadcastStart { root, over }, &[x]),
        1 => {
            let reduce = reduction(g, &[ty])?;
            g.start(ReduceStart { reduce, root, over }, &[x])
        }
        2 => g.start(GatherStart { dims, root, over }, &[x]),
        _ => g.start(ScatterStart { dims, root, over }, &[x]),
    }
}

/// Cuts a tensor into uneven parts, one for each member, reduced or gathered.
fn uneven(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let dim = g.dim(&ty)?;
    let over = g.group();
    let n = g.builder.mesh().group_size(over) as usize;
    let total = ty.shape[dim].as_const()? as usize;
    let mut cuts: Vec<usize> = (1..n).map(|_| g.rng.below(total + 1)).collect();
    cuts.extend([0, total]);
    cuts.sort_unstable();
    let sizes: Vec<Index> = cuts.windows(2).map(|pair| Index::from(pair[1] - pair[0])).collect();
    let reduce = reduction(g, &[ty])?;
    let scatter = ReduceScatterVStart { reduce, dim, sizes: sizes.clone(), over };
    if g.rng.one_in(2) {
        return g.start(scatter, &[x]);
    }
    let part = g.builder.start_wait(scatter, &[x]).ok()?;
    g.start(AllGatherVStart { dim, sizes, over }, &part)
}

fn all_to_all(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let over = g.group();
    let n = i64::from(g.builder.mesh().group_size(over));
    if g.rng.one_in(2) {
        return g.start(AllToAllStart { in_splits: None, out_splits: None, over }, &[x]);
    }
    g.equal_shape(&ty, over)?;
    // Member i sends everything to member i + 1: one split is the whole dimension, the others are 0.
    let me = group_rank(g.builder.mesh(), over);
    let rows = ty.shape[0].clone();
    let at = |to: i64| {
        let table: Vec<Index> =
            (0..n).map(|i| if i == to.rem_euclid(n) { rows.clone() } else { Index::constant(0) }).collect();
        Index::pick(&me, &table)
    };
    let ins = (0..n).map(|to| at(to - 1)).collect();
    let outs = (0..n).map(|from| at(from + 1)).collect();
    g.start(AllToAllStart { in_splits: Some(ins), out_splits: Some(outs), over }, &[x])
}

fn point_to_point(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|_| true)?;
    let y = g.like(x, &ty);
    let over = g.group();
    let n = g.builder.mesh().group_size(over);
    g.equal_shape(&ty, over)?;
    let by = g.rng.below(5) as i64 - 2;
    let route = match g.rng.below(3) {
        0 => Route::Ring(by),
        1 => Route::Shift(by),
        _ => Route::Table((0..n).map(|i| (i + 1 < n).then_some(n - 1 - i)).collect()),
    };
    if g.rng.one_in(2) {
        let missing = if route.reaches_all(n) { Missing::Error } else { Missing::Zeros };
        return g.start(PermuteStart { route, missing, over }, &[x]);
    }
    // The way back of each of these routes: a receive must name its sender.
    let back = match &route {
        Route::Ring(by) => Route::Ring(-by),
        Route::Shift(by) => Route::Shift(-by),
        Route::Table(_) => Route::Table((0..n).map(|i| (i > 0).then(|| n - 1 - i)).collect()),
    };
    let tag = Index::constant(g.rng.below(3) as i64);
    let me = group_rank(g.builder.mesh(), over);
    let message = |peer, tag: &Index| Message { peer, tag: tag.clone() };
    let (mut send, mut recv) =
        (vec![message(Peer::Route(route), &tag)], vec![message(Peer::Route(back), &tag)]);
    let mut args = vec![x, y];
    if g.rng.one_in(2) {
        // A second message to oneself, by a size expression.
        send.push(message(Peer::At(me.clone()), &Index::constant(7)));
        recv.push(message(Peer::At(me), &Index::constant(7)));
        args = vec![x, x, y, y];
    }
    g.start(ExchangeStart { send, recv, over }, &args)
}
