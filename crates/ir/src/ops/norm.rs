//! Norms over the last dimension; composites as those in `composite.rs`.

use consort_types::{Dtype, Failure};

use crate::builder::Builder;
use crate::entity::Value;
use crate::literal::Literal;
use crate::op;
use crate::ops::composite::{fill, float_data, floats, widen};
use crate::ops::elementwise::times;
use crate::ops::{
    Add, Alias, Cast, Cost, CostCx, Cotangents, EvalCx, EvalError, InferCx, Mean, Mul, OpDef, Rsqrt, Sub,
    Term, VjpCx,
};
use crate::tolerance::{Size, Tolerance};
use crate::types::{TensorType, Type};

op! {
    /// x over the root of its mean square along the last dimension, times a weight for each place of it.
    ///
    /// (C1) Both operands have one element type, a float type.
    ///
    /// (C2) x has at least one dimension.
    ///
    /// (C3) The weight has the shape of x's last dimension.
    ///
    /// (C4) `eps` is positive and finite.
    pub struct RmsNorm("rms_norm")(x, weight) {
        /// Added to the mean square, so that rows of zeros stay finite.
        eps: f64
    }
    example "mesh ()\n\nfunc @f(v0: f32[1,2], v1: f32[2]) -> f32[1,2] {\n    v2 = rms_norm[eps=1e-30] v0, v1 : f32[1,2]\n    return v2\n}\n; run: @f([[3, 3]], [1, 10]) == [[1, 10]]\n"
}

/// The rule of norms over the last dimension: every operand but x has its shape.
fn norm(cx: &mut InferCx<'_>, names: &[&str], eps: f64) -> Result<Vec<Type>, Box<Failure>> {
    let x = floats(cx, "C1", 0)?;
    for (name, other) in names.iter().zip(&cx.tensors()?[1..]) {
        if other.dtype != x.dtype {
            let message = (format!("a {name} of type {}", x.dtype), other.dtype.to_string());
            return Err(Failure::rule("C1", message));
        }
        let Some(last) = x.shape.last() else {
            return Err(Failure::rule("C2", ("at least one dimension", "none")));
        };
        let what = format!("a {name} of shape");
        cx.require_same_shape("C3", &what, std::slice::from_ref(last), &other.shape)?;
    }
    // Also refuses NaN.
    if !eps.is_finite() || eps <= 0.0 {
        return Err(Failure::rule("C4", ("a positive, finite eps", eps.to_string())));
    }
    Ok(vec![x.clone().into()])
}

/// A cast, unless the type is the same.
pub(super) fn cast(b: &mut Builder<'_>, x: Value, to: Dtype) -> Result<Value, Box<Failure>> {
    if b.tensor_ty(x)?.dtype == to { Ok(x) } else { b.one(Cast { to }, &[x]) }
}

/// The cotangents of a norm: `normal` is x after the norm, `scale` what it was multiplied by, both before the weight.
/// The part of the cotangent along the normal row, and along rows of ones if the mean was subtracted, does not count.
fn norm_vjp<'c, 'm>(cx: &'c VjpCx<'m>, eps: f64, centers: bool) -> Cotangents<'c, 'm> {
    let TensorType { dtype, shape, .. } = cx.arg_ty(0);
    let wide = dtype.accumulator();
    let last = shape.len() - 1;
    let mean = |x: Term<'c, 'm>| x.then(Mean { dims: vec![last], keep: true }).widen_to(&shape);
    let rows: Vec<usize> = (0..last).collect();
    let (mut x, g) = (cx.arg(0).cast(wide), cx.cotangent(0).cast(wide));
    if centers {
        x = x - mean(x);
    }
    let scale = (mean(x * x) + eps).then(Rsqrt {});
    let normal = x * scale;
    cx.each(|i| {
        let cotangent = match i {
            0 => {
                let own = g * cx.arg(1).cast(wide).widen_to(&shape);
                let rest = own - normal * mean(own * normal);
                scale * if centers { rest - mean(own) } else { rest }
            }
            1 => (g * normal).sum(&rows, false),
            _ => g.sum(&rows, false),
        };
        Some(cotangent.cast(dtype))
    })
}

impl OpDef for RmsNorm {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        norm(cx, &["weight"], self.eps)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(times(4, &cx.result_numel()))
    }
    fn alias(&self) -> Alias {
        Alias::First
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::SUM
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (x, weight) = (float_data(args[0])?, float_data(args[1])?);
        let n = weight.len();
        let mut made = Vec::with_capacity(x.len());
        for row in x.chunks(n.max(1)) {
            let mean = row.iter().fold(0.0, |a, x| a + x * x) / n as f64;
            made.extend(row.iter().zip(weight).map(|(x, weight)| x / (mean + self.eps).sqrt() * weight));
        }
        Ok(vec![Literal::floats(args[0].dtype, args[0].shape.clone(), made)])
    }
    fn expand(&self, b: &mut Builder<'_>, args: &[Value]) -> Option<Result<Vec<Value>, Box<Failure>>> {
        let mut build = || {
            let TensorType { dtype, shape, .. } = b.tensor_ty(args[0])?;
            // Squares of 16-bit floats may overflow.
            let wide = dtype.accumulator();
            let (x, weight) = (cast(b, args[0], wide)?, cast(b, args[1], wide)?);
            let squares = b.one(Mul {}, &[x, x])?;
            let mean = b.one(Mean { dims: vec![shape.len() - 1], keep: true }, &[squares])?;
            let eps = fill(b, mean, self.eps)?;
            let safe = b.one(Add {}, &[mean, eps])?;
            let scale = b.one(Rsqrt {}, &[safe])?;
            let scale = widen(b, scale, x)?;
            let normal = b.one(Mul {}, &[x, scale])?;
            let weight = widen(b, weight, x)?;
            let result = b.one(Mul {}, &[normal, weight])?;
            Ok(vec![cast(b, result, dtype)?])
        };
        Some(build())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        norm_vjp(cx, self.eps, false)
    }
}

op! {
    /// x less its mean along the last dimension, over the root of its variance, times a weight and plus a bias
    /// for each place of it. The variance is the mean square of the differences.
    ///
    /// (C1) All operands have one element type, a float type.
    ///
    /// (C2) x has at least one dimension.
    ///
    /// (C3) Weight and bias have the shape of x's last dimension.
    ///
    /// (C4) `eps` is positive and finite.
    pub struct LayerNorm("layer_norm")(x, weight, bias) {
        /// Added to the variance, so that rows of equal elements stay finite.
        eps: f64
    }
    example "mesh ()\n\nfunc @f(v0: f32[1,2], v1: f32[2], v2: f32[2]) -> f32[1,2] {\n    v3 = layer_norm[eps=1e-30] v0, v1, v2 : f32[1,2]\n    return v3\n}\n; run: @f([[1, 5]], [1, 10], [0, 0.5]) == [[-1, 10.5]]\n"
}

impl OpDef for LayerNorm {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        norm(cx, &["weight", "bias"], self.eps)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(times(7, &cx.result_numel()))
    }
    fn alias(&self) -> Alias {
        Alias::First
    }
    fn tolerance(&self) -> Tolerance {
        // Subtracting the mean cancels: the difference has the rounding error of the largest element.
        Tolerance::Near { roundings: 32.0, of: Size::LargestResult }
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (x, weight, bias) = (float_data(args[0])?, float_data(args[1])?, float_data(args[2])?);
        let n = weight.len();
        let mut made = Vec::with_capacity(x.len());
        for row in x.chunks(n.max(1)) {
            let mean = row.iter().sum::<f64>() / n as f64;
            let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n as f64;
            let scale = (variance + self.eps).sqrt();
            let element = |((x, weight), bias): ((&f64, &f64), &f64)| (x - mean) / scale * weight + bias;
            made.extend(row.iter().zip(weight).zip(bias).map(element));
        }
        Ok(vec![Literal::floats(args[0].dtype, args[0].shape.clone(), made)])
    }
    fn expand(&self, b: &mut Builder<'_>, args: &[Value]) -> Option<Result<Vec<Value>, Box<Failure>>> {
        let mut build = || {
            let TensorType { dtype, shape, .. } = b.tensor_ty(args[0])?;
            // Squares of 16-bit floats may overflow.
            let wide = dtype.accumulator();
            let x = cast(b, args[0], wide)?;
            let mean = || Mean { dims: vec![shape.len() - 1], keep: true };
            let center = b.one(mean(), &[x])?;
            let center = widen(b, center, x)?;
            let centered = b.one(Sub {}, &[x, center])?;
            let squares = b.one(Mul {}, &[centered, centered])?;
            let variance = b.one(mean(), &[squares])?;
            let eps = fill(b, variance, self.eps)?;
            let safe = b.one(Add {}, &[variance, eps])?;
            let scale = b.one(Rsqrt {}, &[safe])?;
            let scale = widen(b, scale, x)?;
            let mut result = b.one(Mul {}, &[centered, scale])?;
            let weight = cast(b, args[1], wide)?;
            let weight = widen(b, weight, x)?;
            result = b.one(Mul {}, &[result, weight])?;
            let bias = cast(b, args[2], wide)?;
            let bias = widen(b, bias, x)?;
            result = b.one(Add {}, &[result, bias])?;
            Ok(vec![cast(b, result, dtype)?])
        };
        Some(build())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        norm_vjp(cx, self.eps, true)
    }
}
