//! Named composites: softmax and related ops; the norms are in `norm.rs`, attention in `attention.rs`. Each has an
//! expansion into simpler ops, and an independent evaluation; a test compares the two on finite numbers.
//! The name is kept down to the kernel, because a dedicated softmax kernel is several times faster than
//! its expansion.

use consort_types::Failure;

use crate::builder::Builder;
use crate::entity::Value;
use crate::index::{Guard, Index};
use crate::literal::{Data, Literal};
use crate::op;
use crate::ops::elementwise::times;
use crate::ops::order::lines;
use crate::ops::{
    Add, Alias, Broadcast, Constant, Cost, CostCx, Cotangents, Div, Elements, EvalCx, EvalError, Exp,
    InferCx, IsFinite, Log, Max, OpDef, Reshape, Select, Sub, Sum, Term, VjpCx, reduce,
};
use crate::tolerance::Tolerance;
use crate::types::{TensorType, Type};

pub(super) fn floats<'a>(
    cx: &InferCx<'a>,
    rule: &'static str,
    i: usize,
) -> Result<&'a TensorType, Box<Failure>> {
    let x = cx.tensor(i)?;
    if x.dtype.is_float() { Ok(x) } else { Err(Failure::rule(rule, ("a float type", x.dtype.to_string()))) }
}

pub(super) fn float_data(x: &Literal) -> Result<&[f64], EvalError> {
    if let Data::Float(data) = &x.data { Ok(data) } else { Err(EvalError::new("not a float tensor")) }
}

/// Broadcasts `x` to the shape of `like`.
pub(super) fn widen(b: &mut Builder<'_>, x: Value, like: Value) -> Result<Value, Box<Failure>> {
    let shape = b.tensor_ty(like)?.shape;
    b.one(Broadcast { shape }, &[x])
}

/// A float broadcast to the shape of `like`.
pub(super) fn fill(b: &mut Builder<'_>, like: Value, value: f64) -> Result<Value, Box<Failure>> {
    let TensorType { dtype, shape, .. } = b.tensor_ty(like)?;
    b.one(Constant { dtype, shape, value: Elements::Float(value) }, &[])
}

op! {
    /// exp(x) over the sum of exp(x) along a dimension, computed from x less its maximum.
    ///
    /// (C1) The element type is a float type.
    ///
    /// (C2) The dimension exists.
    ///
    /// (C3) The dimension has at least one element.
    pub struct Softmax("softmax")(x) {
        /// Along which dimension.
        dim: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,2]) -> f32[2,2] {\n    v1 = softmax[dim=1] v0 : f32[2,2]\n    return v1\n}\n; run: @f([[0, 0], [0, -inf]]) == [[0.5, 0.5], [1, 0]]\n"
}

/// The rule of ops that normalise the elements along a dimension.
fn along(cx: &mut InferCx<'_>, dim: usize) -> Result<Vec<Type>, Box<Failure>> {
    let x = floats(cx, "C1", 0)?;
    cx.require_dim("C2", dim, x.rank())?;
    cx.require("C3", Guard::Le(Index::constant(1), x.shape[dim].clone()), |cx| {
        (format!("at least one element along dimension {dim}"), cx.shape_text(&x.shape).to_string())
    })?;
    Ok(vec![x.clone().into()])
}

/// A tensor computed line by line along a dimension: from a line's elements, `rule` gives the function for each.
fn by_lines<R: Fn(f64) -> f64>(
    x: &Literal,
    dim: usize,
    rule: impl Fn(&[f64]) -> R,
) -> Result<Literal, EvalError> {
    let data = float_data(x)?;
    let mut made = vec![0.0; data.len()];
    for line in lines(&x.shape, dim) {
        let own: Vec<f64> = line.iter().map(|i| data[*i]).collect();
        let rule = rule(&own);
        line.iter().for_each(|i| made[*i] = rule(data[*i]));
    }
    Ok(Literal::floats(x.dtype, x.shape.clone(), made))
}

impl OpDef for Softmax {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        along(cx, self.dim)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(times(5, &cx.result_numel()))
    }
    fn alias(&self) -> Alias {
        Alias::First
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::EXPONENTIALS
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let softmax = by_lines(args[0], self.dim, |line| {
            let largest = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total = line.iter().fold(0.0, |a, x| a + (x - largest).exp());
            move |x| (x - largest).exp() / total
        });
        Ok(vec![softmax?])
    }
    fn expand(&self, b: &mut Builder<'_>, args: &[Value]) -> Option<Result<Vec<Value>, Box<Failure>>> {
        let mut build = || {
            let largest = b.one(Max { dims: vec![self.dim], keep: true }, args)?;
            let largest = widen(b, largest, args[0])?;
            let shifted = b.one(Sub {}, &[args[0], largest])?;
            let powers = b.one(Exp {}, &[shifted])?;
            let total = b.one(Sum { dims: vec![self.dim], keep: true }, &[powers])?;
            let total = widen(b, total, powers)?;
            Ok(vec![b.one(Div {}, &[powers, total])?])
        };
        Some(build())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let (z, g) = (cx.result(0), cx.cotangent(0));
        Ok(vec![Some(z * (g - (g * z).sum_along(&[self.dim])))])
    }
}

op! {
    /// The logarithm of `softmax`, computed directly: x less the logarithm of the sum of exp(x) along a dimension.
    ///
    /// (C1) The element type is a float type.
    ///
    /// (C2) The dimension exists.
    ///
    /// (C3) The dimension has at least one element.
    pub struct LogSoftmax("log_softmax")(x) {
        /// Along which dimension.
        dim: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,2]) -> f32[2,2] {\n    v1 = log_softmax[dim=1] v0 : f32[2,2]\n    return v1\n}\n; run: @f([[0, 0], [0, -inf]]) == [[-0.69314718, -0.69314718], [0, -inf]]\n"
}

impl OpDef for LogSoftmax {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        along(cx, self.dim)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(times(5, &cx.result_numel()))
    }
    fn alias(&self) -> Alias {
        Alias::First
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::EXPONENTIALS
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let log_softmax = by_lines(args[0], self.dim, |line| {
            let largest = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total = line.iter().fold(0.0, |a, x| a + (x - largest).exp());
            move |x| (x - largest) - total.ln()
        });
        Ok(vec![log_softmax?])
    }
    fn expand(&self, b: &mut Builder<'_>, args: &[Value]) -> Option<Result<Vec<Value>, Box<Failure>>> {
        let mut build = || {
            let largest = b.one(Max { dims: vec![self.dim], keep: true }, args)?;
            let largest = widen(b, largest, args[0])?;
            let shifted = b.one(Sub {}, &[args[0], largest])?;
            let powers = b.one(Exp {}, &[shifted])?;
            let total = b.one(Sum { dims: vec![self.dim], keep: true }, &[powers])?;
            let total = b.one(Log {}, &[total])?;
            let total = widen(b, total, shifted)?;
            Ok(vec![b.one(Sub {}, &[shifted, total])?])
        };
        Some(build())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let (z, g) = (cx.result(0), cx.cotangent(0));
        Ok(vec![Some(g - z.then(Exp {}) * g.sum_along(&[self.dim]))])
    }
}

op! {
    /// The logarithm of the sum of exp(x) over dimensions, computed from x less its maximum: it combines
    /// partial softmaxes, as in ring attention. It is -inf where all elements are.
    ///
    /// (C1) The element type is a float type.
    ///
    /// (C2) The dimensions exist and are distinct.
    ///
    /// (C3) There is at least one element to sum up.
    pub struct Logsumexp("logsumexp")(x) {
        /// The dimensions to reduce; an empty list reduces none.
        dims: Vec<usize>,
        /// Whether reduced dimensions stay, with size 1.
        keep: bool
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,2]) -> f32[2] {\n    v1 = logsumexp[dims=[1], keep=false] v0 : f32[2]\n    return v1\n}\n; run: @f([[1000, 1000], [-inf, 3]]) == [1000.6931471806, 3]\n"
}

impl OpDef for Logsumexp {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![reduce::infer(cx, &self.dims, self.keep, reduce::FLOATS, false)?.into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(times(4, &cx.arg_numel(0)))
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::EXPONENTIALS
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (x, data) = (args[0], float_data(args[0])?);
        let (_, groups) = reduce::folded(x, &self.dims);
        let element = |group: &Vec<usize>| {
            let largest = group.iter().fold(f64::NEG_INFINITY, |a, i| a.max(data[*i]));
            // Subtracting an infinity would turn infinite elements into NaN.
            let shift = if largest.is_finite() { largest } else { 0.0 };
            group.iter().fold(0.0, |a, i| a + (data[*i] - shift).exp()).ln() + shift
        };
        let shape = reduce::reduced(&x.shape, &self.dims, self.keep, 1);
        Ok(vec![Literal::floats(x.dtype, shape, groups.iter().map(element).collect())])
    }
    fn expand(&self, b: &mut Builder<'_>, args: &[Value]) -> Option<Result<Vec<Value>, Box<Failure>>> {
        let mut build = || {
            let largest = b.one(Max { dims: self.dims.clone(), keep: true }, args)?;
            let finite = b.one(IsFinite {}, &[largest])?;
            let zero = fill(b, largest, 0.0)?;
            let shift = b.one(Select {}, &[finite, largest, zero])?;
            let wide = widen(b, shift, args[0])?;
            let shifted = b.one(Sub {}, &[args[0], wide])?;
            let powers = b.one(Exp {}, &[shifted])?;
            let total = b.one(Sum { dims: self.dims.clone(), keep: true }, &[powers])?;
            let total = b.one(Log {}, &[total])?;
            let result = b.one(Add {}, &[total, shift])?;
            if self.keep {
                return Ok(vec![result]);
            }
            let shape = reduce::reduced(&b.tensor_ty(result)?.shape, &self.dims, false, Index::constant(1));
            Ok(vec![b.one(Reshape { shape }, &[result])?])
        };
        Some(build())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let (x, shape) = (cx.arg(0), cx.arg_ty(0).shape);
        let over = |z: Term<'c, 'm>| z.unreduce(&shape, &self.dims).widen_to(&shape);
        let (z, g) = (over(cx.result(0)), over(cx.cotangent(0)));
        // Where all elements are -inf, so is the result, and their difference would be NaN.
        let share = (x - z).then(Exp {});
        Ok(vec![Some(g * z.then(IsFinite {}).select(share, z.fill(0.0)))])
    }
}
