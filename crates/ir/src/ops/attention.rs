//! `attention` and its backward: composites as those in `composite.rs`, with kernels that hold a block of the scores at
//! a time.

use consort_types::{Dtype, Failure};

use crate::builder::Builder;
use crate::entity::Value;
use crate::index::{Guard, Index};
use crate::literal::{Literal, ravel, unravel};
use crate::op;
use crate::ops::composite::{fill, float_data, floats, widen};
use crate::ops::elementwise::times;
use crate::ops::norm::cast;
use crate::ops::{
    Add, Broadcast, Cost, CostCx, Cotangents, EvalCx, EvalError, IndexValue, InferCx, Iota, Le, Matmul, Mul,
    OpDef, Permute, Reshape, Select, Softmax, Sub, Sum, Term, VjpCx,
};
use crate::tolerance::{Size, Tolerance};
use crate::types::{TensorType, Type};

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
        Ok(vec![self.result(cx)?.into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cost(cx, [2, 2, 5])
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::Near { roundings: 4.0, of: Size::LargestOfLastByScores { scale: self.scale } }
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (q, k, v) = (args[0], args[1], args[2]);
        let vs = float_data(v)?;
        let offset = self.causal.as_ref().map(|c| cx.index(c)).transpose()?;
        let shape = vec![q.shape[0], q.shape[1], q.shape[2], v.shape[3]];
        // Without columns there may be any number of queries.
        let n: usize = if shape[3] == 0 { 0 } else { shape[..3].iter().product() };
        let mut results = Vec::new();
        for i in 0..n {
            let at = unravel(i, &shape[..3]);
            // The results of a query are computed together, because they share its scores.
            let (powers, total) = self.powers(q, k, offset, [at[0], at[1], at[2]])?;
            let own = at[1] / group(q, k);
            results.extend((0..shape[3]).map(|column| {
                let sum = powers
                    .iter()
                    .fold(0.0, |a, (j, power)| a + power * vs[ravel(&[at[0], own, *j, column], &v.shape)]);
                if powers.is_empty() { 0.0 } else { sum / total }
            }));
        }
        Ok(vec![Literal::floats(q.dtype, shape, results)])
    }
    fn expand(&self, b: &mut Builder<'_>, args: &[Value]) -> Option<Result<Vec<Value>, Box<Failure>>> {
        let mut build = || {
            let heads = b.tensor_ty(args[0])?.shape[1].clone();
            let k = repeat_heads(b, args[1], &heads)?;
            let v = repeat_heads(b, args[2], &heads)?;
            let weights = self.weights(b, args[0], k)?;
            Ok(vec![b.one(Matmul {}, &[weights, v])?])
        };
        Some(build())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let backward = AttentionBackward { scale: self.scale, causal: self.causal.clone() };
        let args = [cx.arg(0), cx.arg(1), cx.arg(2), cx.result(0), cx.cotangent(0)];
        let cotangents = cx.ops(backward, &args);
        cx.each(|i| cotangents.get(i).copied())
    }
}

impl Attention {
    /// The type of the result, if the operands fit.
    fn result(&self, cx: &mut InferCx<'_>) -> Result<TensorType, Box<Failure>> {
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
        Ok(q.with_shape([&q.shape[..3], &v.shape[3..]].concat()))
    }

    /// The keys that a query sees, with the exponentials of their scores less the largest, and the sum of these.
    fn powers(
        &self,
        q: &Literal,
        k: &Literal,
        offset: Option<i64>,
        [batch, head, query]: [usize; 3],
    ) -> Result<(Vec<(usize, f64)>, f64), EvalError> {
        let (qs, ks) = (float_data(q)?, float_data(k)?);
        let own = head / group(q, k);
        let seen = |j: &usize| offset.is_none_or(|c| *j as i64 <= (query as i64).saturating_add(c));
        let score = |j: usize| {
            let dot = (0..q.shape[3]).fold(0.0, |a, d| {
                a + qs[ravel(&[batch, head, query, d], &q.shape)] * ks[ravel(&[batch, own, j, d], &k.shape)]
            });
            (j, dot * self.scale)
        };
        let scores: Vec<(usize, f64)> = (0..k.shape[2]).filter(seen).map(score).collect();
        let largest = scores.iter().fold(f64::NEG_INFINITY, |a, (_, score)| a.max(*score));
        let powers: Vec<(usize, f64)> =
            scores.iter().map(|(j, score)| (*j, (score - largest).exp())).collect();
        let total = powers.iter().fold(0.0, |a, (_, power)| a + power);
        Ok((powers, total))
    }

    /// How much each query takes of each key, with a head of `k` for each of `q`.
    fn weights(&self, b: &mut Builder<'_>, q: Value, k: Value) -> Result<Value, Box<Failure>> {
        let k = transposed(b, k)?;
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
}

op! {
    /// The cotangents of q, k and v from that of the result of `attention`, which is computed with these attributes.
    /// Weights w = softmax(scale q k^T) are computed again; scores have the cotangents w (cotangent v^T - d), where d is
    /// the sum of `result` times `cotangent` along the row. A query that sees no key adds nothing.
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
    ///
    /// (C6) `result` and `cotangent` have the shape of the result of `attention`.
    pub struct AttentionBackward("attention_backward")(q, k, v, result, cotangent) {
        /// What the scores are multiplied by.
        scale: f64,
        /// The causal offset, or none if every query sees every key.
        causal: Option<Index>
    }
    example "mesh ()\n\nfunc @f(v0: f32[1,1,1,1], v1: f32[1,1,2,1], v2: f32[1,1,2,1], v3: f32[1,1,1,1], v4: f32[1,1,1,1]) -> (f32[1,1,1,1], f32[1,1,2,1], f32[1,1,2,1]) {\n    v5, v6, v7 = attention_backward[scale=1.0, causal=none] v0, v1, v2, v3, v4 : f32[1,1,1,1], f32[1,1,2,1], f32[1,1,2,1]\n    return v5, v6, v7\n}\n; run: @f([[[[3]]]], [[[[2], [2]]]], [[[[10], [20]]]], [[[[15]]]], [[[[1]]]]) == [[[[0]]]], [[[[-7.5], [7.5]]]], [[[[0.5], [0.5]]]]\n"
}

impl OpDef for AttentionBackward {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let expected = self.forward().result(cx)?;
        for (i, what) in [(3, "a result of shape"), (4, "a cotangent of shape")] {
            let x = cx.tensor(i)?;
            if x.dtype != expected.dtype || x.rank() != 4 {
                let message = (format!("{} in 4 dimensions", expected.dtype), x.display(cx.mesh).to_string());
                return Err(Failure::rule("C1", message));
            }
            cx.require_same_shape("C6", what, &expected.shape, &x.shape)?;
        }
        (0..3).map(|i| Ok(cx.tensor(i)?.clone().into())).collect()
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        // The scores are computed twice: for the sums of their exponentials, and for the weights.
        cost(cx, [8, 4, 12])
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::Near { roundings: 4.0, of: Size::AttentionCotangents { scale: self.scale } }
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let [q, k, v, result, _] = args else { return Err(EvalError::new("not five tensors")) };
        let data = args.iter().map(|x| float_data(x)).collect::<Result<Vec<_>, _>>()?;
        let [qs, ks, vs, results, gs] = data[..] else { return Err(EvalError::new("not five tensors")) };
        let offset = self.causal.as_ref().map(|c| cx.index(c)).transpose()?;
        let (depth, width) = (q.shape[3], v.shape[3]);
        let mut made = [qs, ks, vs].map(|x| vec![0.0; x.len()]);
        // Without columns there may be any number of queries.
        let n: usize = if depth + width == 0 { 0 } else { q.shape[..3].iter().product() };
        for i in 0..n {
            let at = unravel(i, &q.shape[..3]);
            let (powers, total) = self.forward().powers(q, k, offset, [at[0], at[1], at[2]])?;
            let first = |x: &Literal, head: usize, place: usize| ravel(&[at[0], head, place, 0], &x.shape);
            let (q_at, g_at, own) =
                (first(q, at[1], at[2]), first(result, at[1], at[2]), at[1] / group(q, k));
            let along = (0..width).fold(0.0, |a, c| a + results[g_at + c] * gs[g_at + c]);
            for (j, power) in powers {
                let (k_at, v_at) = (first(k, own, j), first(v, own, j));
                let weight = power / total;
                let of_weight = (0..width).fold(0.0, |a, c| a + gs[g_at + c] * vs[v_at + c]);
                let of_score = weight * (of_weight - along) * self.scale;
                for d in 0..depth {
                    made[0][q_at + d] += of_score * ks[k_at + d];
                    made[1][k_at + d] += of_score * qs[q_at + d];
                }
                (0..width).for_each(|c| made[2][v_at + c] += weight * gs[g_at + c]);
            }
        }
        let literal = |(x, made): (&&Literal, Vec<f64>)| Literal::floats(q.dtype, x.shape.clone(), made);
        Ok([q, k, v].into_iter().zip(made).map(literal).collect())
    }
    fn expand(&self, b: &mut Builder<'_>, args: &[Value]) -> Option<Result<Vec<Value>, Box<Failure>>> {
        Some(self.expansion(b, args))
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        self.cotangents(cx)
    }
}

impl AttentionBackward {
    fn forward(&self) -> Attention {
        Attention { scale: self.scale, causal: self.causal.clone() }
    }

    fn expansion(&self, b: &mut Builder<'_>, args: &[Value]) -> Result<Vec<Value>, Box<Failure>> {
        let types = args.iter().map(|x| b.tensor_ty(*x)).collect::<Result<Vec<_>, _>>()?;
        let (dtype, heads) = (types[0].dtype, &types[0].shape[1]);
        let wide = args.iter().map(|x| cast(b, *x, dtype.accumulator())).collect::<Result<Vec<_>, _>>()?;
        let (q, result, cotangent) = (wide[0], wide[3], wide[4]);
        let (k, v) = (repeat_heads(b, wide[1], heads)?, repeat_heads(b, wide[2], heads)?);
        let weights = self.forward().weights(b, q, k)?;
        let columns = transposed(b, v)?;
        let of_weights = b.one(Matmul {}, &[cotangent, columns])?;
        let product = b.one(Mul {}, &[cotangent, result])?;
        let along = b.one(Sum { dims: vec![3], keep: true }, &[product])?;
        let along = widen(b, along, of_weights)?;
        let rest = b.one(Sub {}, &[of_weights, along])?;
        let scale = fill(b, rest, self.scale)?;
        let of_scores = b.one(Mul {}, &[weights, rest])?;
        let of_scores = b.one(Mul {}, &[of_scores, scale])?;
        let of_q = b.one(Matmul {}, &[of_scores, k])?;
        let rows = transposed(b, of_scores)?;
        let of_k = b.one(Matmul {}, &[rows, q])?;
        let rows = transposed(b, weights)?;
        let of_v = b.one(Matmul {}, &[rows, cotangent])?;
        let (of_k, of_v) = (join_heads(b, of_k, &types[1].shape)?, join_heads(b, of_v, &types[2].shape)?);
        [of_q, of_k, of_v].into_iter().map(|x| cast(b, x, dtype)).collect()
    }

    /// The rule of the expansion. `of_weights` is what the weights are multiplied by in the cotangents of the scores.
    fn cotangents<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let TensorType { dtype, shape: qs, .. } = cx.arg_ty(0);
        let wide = |x: Term<'c, 'm>| x.cast(dtype.accumulator());
        let heads = |x: Term<'c, 'm>| cx.build(|b, x| repeat_heads(b, x, &qs[1]), wide(x));
        let (ks, vs) = (cx.arg_ty(1).shape, cx.arg_ty(2).shape);
        let join = |x: Term<'c, 'm>, shape: &[Index]| cx.build(|b, x| join_heads(b, x, shape), x);
        let product = |x: Term<'c, 'm>, y: Term<'c, 'm>| cx.op(Matmul {}, &[x, y]);
        let (q, k, v) = (wide(cx.arg(0)), heads(cx.arg(1)), heads(cx.arg(2)));
        let (result, g) = (wide(cx.arg(3)), wide(cx.arg(4)));
        let (by_q, by_k, by_v) = (wide(cx.cotangent(0)), heads(cx.cotangent(1)), heads(cx.cotangent(2)));
        let weights = cx.build(|b, k| self.forward().weights(b, q.value(), k), k);
        let of_weights = product(g, v.transpose());
        let of_weights = of_weights - (g * result).sum(&[3], true).widen(of_weights);
        let of_scores = weights * of_weights * self.scale;
        // Cotangents of `of_scores` before the scale, of `of_weights`, of the weights and of the scores before theirs.
        let by_scores = (product(by_q, k.transpose()) + product(q, by_k.transpose())) * self.scale;
        let by_rest = by_scores * weights;
        let by_weights = by_scores * of_weights + product(g, by_v.transpose());
        let again = weights * (by_weights - (weights * by_weights).sum_along(&[3])) * self.scale;
        let along = by_rest.sum(&[3], true).widen(g);
        cx.each(|i| {
            let cotangent = match i {
                0 => product(again, k) + product(of_scores, by_k),
                1 => join(product(again.transpose(), q) + product(of_scores.transpose(), by_q), &ks),
                2 => join(product(by_rest.transpose(), g), &vs),
                3 => -(along * g),
                _ => product(weights, by_v) + product(by_rest, v) - along * result,
            };
            Some(cotangent.cast(dtype))
        })
    }
}

/// The cost of a number of operations per score: for each place of a row of q and of v, and others.
fn cost(cx: &CostCx<'_>, [of_q, of_v, others]: [i64; 3]) -> Cost {
    let (Some(Type::Tensor(q)), Some(Type::Tensor(v))) = (cx.args.first(), cx.args.get(2)) else {
        return cx.free();
    };
    let scores = Index::product(q.shape[..3].iter().chain([&v.shape[2]]));
    let per_score = &(&times(of_q, &q.shape[3]) + &times(of_v, &v.shape[3])) + &Index::constant(others);
    cx.kernel(&scores * &per_score)
}

/// The number of heads of q that share one of k.
fn group(q: &Literal, k: &Literal) -> usize {
    q.shape[1].checked_div(k.shape[1]).unwrap_or(1).max(1)
}

/// With the last two dimensions exchanged.
fn transposed(b: &mut Builder<'_>, x: Value) -> Result<Value, Box<Failure>> {
    b.one(Permute { dims: vec![0, 1, 3, 2] }, &[x])
}

/// The sum over the heads of q that one head of k or v serves, in the shape of k or v.
fn join_heads(b: &mut Builder<'_>, x: Value, shape: &[Index]) -> Result<Value, Box<Failure>> {
    let heads = b.tensor_ty(x)?.shape[1].clone();
    let [batch, own, length, width] = shape else { return Ok(x) };
    if b.facts().eq(own, &heads) == Some(true) {
        return Ok(x);
    }
    let split = vec![batch.clone(), own.clone(), heads.div(own), length.clone(), width.clone()];
    let split = b.one(Reshape { shape: split }, &[x])?;
    b.one(Sum { dims: vec![2], keep: false }, &[split])
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
