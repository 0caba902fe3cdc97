//! Ops that depend on the order along a dimension: running sums, flips, sorts, the largest few.

use std::cmp::Ordering;

use consort_types::{Dtype, Failure};

use crate::index::{Guard, Index};
use crate::literal::{Data, Literal, ravel, unravel};
use crate::op;
use crate::ops::elementwise::times;
use crate::ops::lookup::add_along;
use crate::ops::{Alias, Cost, CostCx, Cotangents, EvalCx, EvalError, InferCx, OpDef, VjpCx};
use crate::tolerance::Tolerance;
use crate::types::{TensorType, Type};

fn numbers<'a>(cx: &InferCx<'a>, dim: usize) -> Result<&'a TensorType, Box<Failure>> {
    let x = cx.tensor(0)?;
    if x.dtype == Dtype::Bool {
        return Err(Failure::rule("C1", ("a float or integer type", "bool")));
    }
    cx.require_dim("C2", dim, x.rank())?;
    Ok(x)
}

/// The row-major indices of the elements in each line along a dimension.
pub(super) fn lines(shape: &[usize], dim: usize) -> Vec<Vec<usize>> {
    // An empty tensor may have any number of empty lines.
    if shape.contains(&0) {
        return Vec::new();
    }
    let (size, inner) = (shape[dim], shape[dim + 1..].iter().product::<usize>());
    let outer: usize = shape[..dim].iter().product();
    let line = |i: usize| (0..size).map(|j| i / inner * inner * size + j * inner + i % inner).collect();
    (0..outer * inner).map(line).collect()
}

op! {
    /// The sum of each element and all before it along a dimension. Each sum is rounded once; integers wrap.
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimension exists.
    pub struct Cumsum("cumsum")(x) {
        /// Along which dimension.
        dim: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,3]) -> f32[2,3] {\n    v1 = cumsum[dim=1] v0 : f32[2,3]\n    return v1\n}\n; run: @f([[1, 2, 3], [4, 5, 6]]) == [[1, 3, 6], [4, 9, 15]]\n"
}

impl OpDef for Cumsum {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![numbers(cx, self.dim)?.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn alias(&self) -> Alias {
        Alias::First
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::SUM
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (x, lines) = (args[0], lines(&args[0].shape, self.dim));
        let pairs = || lines.iter().flat_map(|line| line.windows(2).map(|pair| (pair[0], pair[1])));
        let shape = x.shape.clone();
        Ok(vec![match &x.data {
            Data::Float(data) => {
                let mut sums = data.clone();
                pairs().for_each(|(before, at)| sums[at] += sums[before]);
                Literal::floats(x.dtype, shape, sums)
            }
            Data::Int(data) => {
                let mut sums = data.clone();
                pairs().for_each(|(before, at)| sums[at] = sums[at].wrapping_add(sums[before]));
                Literal::ints(x.dtype, shape, sums)
            }
        }])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let flip = || Flip { dims: vec![self.dim] };
        Ok(vec![Some(cx.cotangent(0).then(flip()).then(Cumsum { dim: self.dim }).then(flip()))])
    }
}

op! {
    /// The elements in the opposite order along dimensions.
    ///
    /// (C1) The dimensions exist and are distinct.
    pub struct Flip("flip")(x) {
        /// Along which dimensions; none changes nothing.
        dims: Vec<usize>
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,3]) -> f32[2,3] {\n    v1 = flip[dims=[1]] v0 : f32[2,3]\n    return v1\n}\n; run: @f([[1, 2, 3], [4, 5, 6]]) == [[3, 2, 1], [6, 5, 4]]\n"
}

impl OpDef for Flip {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        cx.require_dims("C1", &self.dims, x.rank())?;
        Ok(vec![x.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(Index::constant(0))
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let x = args[0];
        Ok(vec![x.pick(x.shape.clone(), |i| {
            let mut at = unravel(i, &x.shape);
            self.dims.iter().for_each(|dim| at[*dim] = x.shape[*dim] - 1 - at[*dim]);
            ravel(&at, &x.shape)
        })])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        Ok(vec![Some(cx.cotangent(0).then(self.clone()))])
    }
}

/// The order of two elements: NaN above everything and equal to itself, 0 and -0 equal.
fn order(x: &Literal, a: usize, b: usize) -> Ordering {
    match &x.data {
        Data::Float(data) => {
            let by_nan = || data[a].is_nan().cmp(&data[b].is_nan());
            data[a].partial_cmp(&data[b]).unwrap_or_else(by_nan)
        }
        Data::Int(data) => data[a].cmp(&data[b]),
    }
}

/// The first `k` entries of each sorted line along a dimension, and their original indices.
fn sorted(x: &Literal, dim: usize, k: usize, descending: bool) -> Vec<Literal> {
    let mut shape = x.shape.clone();
    shape[dim] = k;
    let (mut values, mut places) =
        (Literal::zeros(x.dtype, shape.clone()), Literal::zeros(Dtype::I64, shape));
    let outs = lines(&values.shape, dim);
    for (from, to) in lines(&x.shape, dim).into_iter().zip(outs) {
        let mut line: Vec<usize> = (0..from.len()).collect();
        // The sort is stable in both directions: equal elements keep their order.
        line.sort_by(|a, b| {
            let order = order(x, from[*a], from[*b]);
            if descending { order.reverse() } else { order }
        });
        for (place, to) in line.into_iter().zip(to) {
            values.set(to, x, from[place]);
            places.set(to, &Literal::size(place as i64), 0);
        }
    }
    vec![values, places]
}

/// A logarithm is not a size expression; this is the assumed number of sort steps per element.
const SORT_STEPS: i64 = 16;

op! {
    /// The elements in order along a dimension, and the places that they come from. Equal elements keep
    /// their order in both directions. NaN counts as the largest, and 0 and -0 as equal.
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimension exists.
    pub struct Sort("sort")(x) {
        /// Along which dimension.
        dim: usize,
        /// Whether the largest comes first.
        descending: bool
    }
    example "mesh ()\n\nfunc @f(v0: f32[4]) -> (f32[4], i64[4]) {\n    v1, v2 = sort[dim=0, descending=false] v0 : f32[4], i64[4]\n    return v1, v2\n}\n; run: @f([3, nan, 1, 3]) == [1, 3, 3, nan], [2, 0, 3, 1]\n"
}

impl OpDef for Sort {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = numbers(cx, self.dim)?;
        Ok(vec![x.clone().into(), x.with_dtype(Dtype::I64).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(times(SORT_STEPS, &cx.arg_numel(0)))
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(sorted(args[0], self.dim, args[0].shape[self.dim], self.descending))
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        Ok(vec![Some(add_along(cx, &cx.arg_ty(0), cx.result(1), self.dim, cx.cotangent(0)))])
    }
}

op! {
    /// The `k` largest elements along a dimension, the largest first, and the places that they come from:
    /// what comes first in a descending `sort`. Of equal elements the first counts more, and NaN is the largest.
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimension exists.
    ///
    /// (C3) `k` is not negative and not more than the dimension has.
    pub struct Topk("topk")(x) {
        /// Along which dimension.
        dim: usize,
        /// How many.
        k: Index
    }
    example "mesh ()\n\nfunc @f(v0: f32[4]) -> (f32[2], i64[2]) {\n    v1, v2 = topk[dim=0, k=2] v0 : f32[2], i64[2]\n    return v1, v2\n}\n; run: @f([1, 5, 2, 5]) == [5, 5], [1, 3]\n"
}

impl OpDef for Topk {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = numbers(cx, self.dim)?;
        cx.require_size("C3", "k", &self.k)?;
        let size = &x.shape[self.dim];
        cx.require("C3", Guard::Le(self.k.clone(), size.clone()), |cx| {
            (format!("k of at most {}", size.display(cx.mesh)), self.k.display(cx.mesh).to_string())
        })?;
        let mut shape = x.shape.clone();
        shape[self.dim] = self.k.clone();
        let values = x.with_shape(shape);
        Ok(vec![values.clone().into(), values.with_dtype(Dtype::I64).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(times(SORT_STEPS, &cx.arg_numel(0)))
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (k, size) = (cx.size(&self.k)?, args[0].shape[self.dim]);
        if k > size {
            return Err(EvalError::new((format!("k of at most {size}"), k.to_string())));
        }
        Ok(sorted(args[0], self.dim, k, true))
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        Ok(vec![Some(add_along(cx, &cx.arg_ty(0), cx.result(1), self.dim, cx.cotangent(0)))])
    }
}
