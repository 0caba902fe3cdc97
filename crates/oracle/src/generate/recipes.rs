//! How a random program grows by one step: each recipe picks operands and attributes that are likely to fit, and the
//! builder decides.

use consort_types::{Axes, Dtype, GroupName, Rank};

use super::{Flying, Growing};
use consort_ir::entity::Value;
use consort_ir::index::{Index, Sym};
use consort_ir::ops::*;
use consort_ir::types::TensorType;

mod arrays;
mod blocks;
mod shapes;
mod starts;
mod writes;

/// One step; `None` if it failed.
type Recipe = fn(&mut Growing<'_>) -> Option<()>;

/// The recipes; one that is listed more often is more likely.
const RECIPES: &[Recipe] = &[
    elementwise,
    elementwise,
    elementwise,
    elementwise,
    elementwise,
    elementwise,
    elementwise,
    example,
    mark,
    select,
    cast,
    fold,
    matmul,
    shapes::reshape,
    shapes::permute,
    shapes::concat,
    shapes::split,
    shapes::pad,
    shapes::broadcast,
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
    writes::slice,
    writes::slice,
    writes::update_slice,
    writes::update_slice,
    writes::update_slice,
    writes::put,
    writes::in_place,
    writes::in_place,
    writes::in_place,
    writes::own_part,
    writes::halo,
    blocks::cond,
    blocks::cond,
    blocks::scan,
    blocks::scan,
    blocks::scan_of_pendings,
    blocks::while_loop,
    blocks::while_loop,
    starts::collective,
    starts::collective,
    starts::collective,
    starts::collective,
    starts::rooted,
    starts::uneven,
    starts::all_to_all,
    starts::point_to_point,
    starts::point_to_point,
    starts::declare_equal,
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
        // The latest values are picked twice as often, so that programs grow deep as well as wide.
        let n = self.tensors.len();
        if n == 0 {
            return None;
        }
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

    fn add_op(&mut self, op: Op, args: &[Value]) -> Option<()> {
        let results = self.builder.node(op, args, Vec::new()).ok()?;
        self.tensors.extend(results);
        Some(())
    }

    /// Starts an operation. Sometimes an operand is dead afterwards, so that its storage may be reused.
    fn start(&mut self, op: impl OpDef, args: &[Value]) -> Option<()> {
        let pending = self.builder.one(op, args).ok()?;
        self.flying.push(Flying { pending, into: None });
        if !args.is_empty() && self.rng.one_in(3) {
            let operand = self.rng.pick(args);
            self.forget(operand);
        }
        Some(())
    }

    /// Excludes a value from further use.
    fn forget(&mut self, value: Value) {
        if self.tensors.iter().any(|other| *other != value) {
            self.tensors.retain(|other| *other != value);
        }
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

    /// Fails if the shape differs between members: both ends of a message must have one shape.
    fn equal_shape(&self, ty: &TensorType, over: GroupName) -> Option<()> {
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

/// Any elementwise op of one or two operands.
fn elementwise(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|_| true)?;
    let args = [x, g.like(x, &ty)];
    // Most ops do not take all element types.
    (0..4).find_map(|_| {
        let op = g.rng.pick(&g.known.elementwise);
        let arity = op.info().args.len();
        g.add_op(op, &args[..arity])
    })
}

/// Any op as its example calls it, on operands of those types: so an op needs no recipe of its own.
fn example(g: &mut Growing<'_>) -> Option<()> {
    let (op, types) = g.rng.pick(&g.known.examples);
    let mut args = Vec::new();
    for ty in types {
        let same = |other: &TensorType| other.dtype == ty.dtype && other.shape == ty.shape;
        let float = ty.dtype.is_float();
        // Integers are indices in some examples, and others of the program may be out of range.
        let found = if float { g.any_where(same).map(|(value, _)| value) } else { None };
        let value = if float { Elements::Float(0.5) } else { Elements::Int(0) };
        let constant = Constant { dtype: ty.dtype, shape: ty.shape.clone(), value };
        args.push(match found {
            Some(value) => value,
            None => g.builder.one(constant, &[]).ok()?,
        });
    }
    g.add_op(op, &args)
}

/// A view that only gradients ask for.
fn mark(g: &mut Growing<'_>) -> Option<()> {
    let (x, _) = g.any_where(|_| true)?;
    match g.rng.below(5) {
        0 => g.add(StopGradient {}, &[x]),
        1 => g.add(Recompute {}, &[x]),
        2 => g.add(Keep {}, &[x]),
        3 => g.add(Again {}, &[x]),
        _ => g.add(Regather {}, &[x]),
    }
    .map(drop)
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

/// Indices along a dimension of constant size.
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

/// A size from data, and a tensor of that size; the size may differ between ranks.
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
