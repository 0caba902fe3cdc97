//! Named composites: softmax and related ops, attention; the norms are in `norm.rs`. Each has an
//! expansion into simpler ops, and an independent evaluation; a test compares the two on finite numbers.
//! The name is kept down to the kernel, because a dedicated softmax kernel is several times faster than
//! its expansion.

use consort_types::{Dtype, Failure};

use crate::builder::Builder;
use crate::entity::Value;
use crate::index::{Guard, Index};
use crate::literal::{Data, Literal, ravel, unravel};
use crate::op;
use crate::ops::elementwise::times;
use crate::ops::order::lines;
use crate::ops::{
    Add, Alias, Broadcast, Constant, Cost, CostCx, Cotangents, Div, Elements, EvalCx, EvalError, Exp,
    IndexValue, InferCx, Iota, IsFinite, Le, Log, Matmul, Max, Mul, OpDef, Permute, Reshape, Select, Sub,
    Sum, Term, VjpCx, reduce,
};
use crate::tolerance::{Size, Tolerance};
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

op! {
    /// softmax(scale q k^T) v for each batch entry and head. Operands are `[batch, heads, length, width]`;
    /// if q has n times the heads of k and v, each head of k and v serves n consecutive heads of q. With a causal
    /// offset c, query i sees keys j up to i + c; a query that sees no key gives zeros.
    ///
    /// (C1) All operands have one element type, a float type, and four dimensions.
    ///
    /// (C2) Batch sizes are equal; k and v have equal heads and lengths; q and k have equal widths.
    ///
    /// (C3) The heads of q are a multiple of those of k.
    ///
    /// (C4) `scale` is finite.
    ///
    /// (C5) There is at least one key.
    pub struct Attention("attention")(q, k, v) {
        /// What the scores are multiplied by, usually 1 / sqrt(width).
        scale: f64,
        /// The causal offset, or none if every query sees every key.
        causal: Option<Index>
    }
    example "mesh ()\n\nfunc @f(v0: f32[1,1,2,1], v1: f32[1,1,2,1], v2: f32[1,1,2,1]) -> f32[1,1,2,1] {\n    v3 = attention[scale=1.0, causal=0] v0, v1, v2 : f32[1,1,2,1]\n    return v3\n}\n; run: @f([[[[0], [0]]]], [[[[1], [2]]]], [[[[10], [20]]]]) == [[[[10], [15]]]]\n"
}

impl OpDef for Attention {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (q, k, v) = (floats(cx, "C1", 0)?, cx.tensor(1)?, cx.tensor(2)?);
        for other in [q, k, v] {
            if other.dtype != q.dtype || other.rank() != 4 {
                let message = (format!("{} in 4 dimensions", q.dtype), other.display(cx.mesh).to_string());
                return Err(Failure::rule("C1", message));
            }
        }
        let expected_k = [&q.shape[..1], &k.shape[1..3], &q.shape[3..]].concat();
        cx.require_same_shape("C2", "k of shape", &expected_k, &k.shape)?;
        let expected_v = [&q.shape[..1], &k.shape[1..3], &v.shape[3..]].concat();
        cx.require_same_shape("C2", "v of shape", &expected_v, &v.shape)?;
        let rest = q.shape[1].rem(&k.shape[1]);
        cx.require_eq("C3", &Index::constant(0), &rest, |cx| {
            let (q, k) = (q.shape[1].display(cx.mesh).to_string(), k.shape[1].display(cx.mesh).to_string());
            ("heads of q to be a multiple of those of k", format!("{q} and {k}"))
        })?;
        if !self.scale.is_finite() {
            return Err(Failure::rule("C4", ("a finite scale", self.scale.to_string())));
        }
        cx.require("C5", Guard::Le(Index::constant(1), k.shape[2].clone()), |cx| {
            ("at least one key", k.shape[2].display(cx.mesh).to_string())
        })?;
        Ok(vec![q.with_shape([&q.shape[..3], &v.shape[3..]].concat()).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        let (Some(Type::Tensor(q)), Some(Type::Tensor(v))) = (cx.args.first(), cx.args.get(2)) else {
            return cx.free();
        };
        let scores = Index::product(q.shape[..3].iter().chain([&v.shape[2]]));
        let per_score = &(&times(2, &q.shape[3]) + &times(2, &v.shape[3])) + &Index::constant(5);
        cx.kernel(&scores * &per_score)
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::Near { roundings: 4.0, of: Size::LargestOfLastByScores { scale: self.scale } }
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (q, k, v) = (args[0], args[1], args[2]);
        let (qs, ks, vs) = (float_data(q)?, float_data(k)?, float_data(v)?);
        let offset = self.causal.as_ref().map(|c| cx.index(c)).transpose()?;
        let (keys, width, group) =
            (k.shape[2], q.shape[3], q.shape[1].checked_div(k.shape[1]).unwrap_or(1).max(1));
        let shape = vec![q.shape[0], q.shape[1], q.shape[2], v.shape[3]];
        // The results of a query are computed together, because they share its scores.
        let results = |i: usize| {
            let at = unravel(i, &shape[..3]);
            let (batch, head, query) = (at[0], at[1], at[2]);
            let seen = |j: &usize| offset.is_none_or(|c| *j as i64 <= (query as i64).saturating_add(c));
            let scores: Vec<(usize, f64)> = (0..keys)
                .filter(seen)
                .map(|j| {
                    let dot = (0..width).fold(0.0, |a, d| {
                        a + qs[ravel(&[batch, head, query, d], &q.shape)]
                            * ks[ravel(&[batch, head / group, j, d], &k.shape)]
                    });
                    (j, dot * self.scale)
                })
                .collect();
            let largest = scores.iter().fold(f64::NEG_INFINITY, |a, (_, s)| a.max(*s));
            let column = |column: usize| {
                if scores.is_empty() {
                    return 0.0;
                }
                let (mut total, mut sum) = (0.0, 0.0);
                for (j, score) in &scores {
                    let power = (score - largest).exp();
                    total += power;
                    sum += power * vs[ravel(&[batch, head / group, *j, column], &v.shape)];
                }
                sum / total
            };
            (0..shape[3]).map(column).collect::<Vec<f64>>()
        };
        // Without columns there may be any number of queries.
        let n: usize = if shape[3] == 0 { 0 } else { shape[..3].iter().product() };
        Ok(vec![Literal::floats(q.dtype, shape.clone(), (0..n).flat_map(results).collect())])
    }
    fn expand(&self, b: &mut Builder<'_>, args: &[Value]) -> Option<Result<Vec<Value>, Box<Failure>>> {
        Some(self.expansion(b, args))
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        self.cotangents(cx)
    }
}

impl Attention {
    fn expansion(&self, b: &mut Builder<'_>, args: &[Value]) -> Result<Vec<Value>, Box<Failure>> {
        let heads = b.tensor_ty(args[0])?.shape[1].clone();
        let k = repeat_heads(b, args[1], &heads)?;
        let v = repeat_heads(b, args[2], &heads)?;
        let weights = self.weights(b, args[0], k)?;
        Ok(vec![b.one(Matmul {}, &[weights, v])?])
    }

    /// How much each query takes of each key, with a head of `k` for each of `q`.
    fn weights(&self, b: &mut Builder<'_>, q: Value, k: Value) -> Result<Value, Box<Failure>> {
        let k = b.one(Permute { dims: vec![0, 1, 3, 2] }, &[k])?;
        let scores = b.one(Matmul {}, &[q, k])?;
        let scale = fill(b, scores, self.scale)?;
        let mut scores = b.one(Mul {}, &[scores, scale])?;
        let Some(offset) = &self.causal else { return b.one(Softmax { dim: 3 }, &[scores]) };
        let shape = b.tensor_ty(scores)?.shape;
        let places = |dim| Iota { dtype: Dtype::I64, shape: shape[2..].to_vec(), dim };
        let (query, key) = (b.one(places(0), &[])?, b.one(places(1), &[])?);
        let offset = b.one(IndexValue { value: offset.clone() }, &[])?;
        let offset = widen(b, offset, query)?;
        let limit = b.one(Add {}, &[query, offset])?;
        let seen = b.one(Le {}, &[key, limit])?;
        let seen = widen(b, seen, scores)?;
        // A row in which all keys are masked becomes NaN here, and zeros by the second select.
        let hidden = fill(b, scores, f64::NEG_INFINITY)?;
        scores = b.one(Select {}, &[seen, scores, hidden])?;
        let weights = b.one(Softmax { dim: 3 }, &[scores])?;
        let zero = fill(b, weights, 0.0)?;
        b.one(Select {}, &[seen, weights, zero])
    }

    /// The weights are computed again. That of a cotangent of the scores along a row of weights does not count, and it is
    /// the product of the result and its cotangent.
    fn cotangents<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let TensorType { dtype, shape: qs, .. } = cx.arg_ty(0);
        let wide = dtype.accumulator();
        let (q, g, z) = (cx.arg(0).cast(wide), cx.cotangent(0).cast(wide), cx.result(0).cast(wide));
        let heads = |i: usize| cx.build(|b, x| repeat_heads(b, x, &qs[1]), cx.arg(i).cast(wide));
        let (k, v) = (heads(1), heads(2));
        let weights = cx.build(|b, k| self.weights(b, q.value(), k), k);
        let product = |x: Term<'c, 'm>, y: Term<'c, 'm>| cx.op(Matmul {}, &[x, y]);
        let by_weight = product(g, v.transpose());
        let scores = weights * (by_weight - (g * z).sum(&[3], true).widen(by_weight)) * self.scale;
        cx.each(|i| {
            let cotangent = match i {
                0 => product(scores, k),
                1 => join_heads(product(scores.transpose(), q), &cx.arg_ty(1).shape),
                _ => join_heads(product(weights.transpose(), g), &cx.arg_ty(2).shape),
            };
            Some(cotangent.cast(dtype))
        })
    }
}

/// The sum over the heads of q that one head of k or v serves.
fn join_heads<'c, 'm>(x: Term<'c, 'm>, shape: &[Index]) -> Term<'c, 'm> {
    let own = x.ty().shape;
    let ([_, heads, length, width], [batch, kept, ..]) = (&own[..], shape) else { return x };
    if heads == kept {
        return x;
    }
    let times = heads.div(kept);
    x.reshape(&[batch.clone(), kept.clone(), times, length.clone(), width.clone()]).sum(&[2], false)
}

/// Repeats each head of k or v to match the number of heads of q.
fn repeat_heads(b: &mut Builder<'_>, x: Value, heads: &Index) -> Result<Value, Box<Failure>> {
    let shape = b.tensor_ty(x)?.shape;
    if b.facts().eq(&shape[1], heads) == Some(true) {
        return Ok(x);
    }
    let [batch, own, length, width] = &shape[..] else { return Ok(x) };
    let one = b.one(
        Reshape {
            shape: vec![batch.clone(), own.clone(), Index::constant(1), length.clone(), width.clone()],
        },
        &[x],
    )?;
    let times = heads.div(own);
    let wide = vec![batch.clone(), own.clone(), times, length.clone(), width.clone()];
    let wide = b.one(Broadcast { shape: wide }, &[one])?;
    b.one(Reshape { shape: vec![batch.clone(), heads.clone(), length.clone(), width.clone()] }, &[wide])
}
