//! Recipes of ops on whole arrays: order along a dimension, convolutions, random numbers.

use consort_types::Dtype;

use super::{Growing, constants, is_float, is_number};
use consort_ir::index::{Index, Sym};
use consort_ir::ops::*;

pub(super) fn cumsum(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0 && is_number(ty))?;
    let dim = g.dim(&ty)?;
    g.add(Cumsum { dim }, &[x]).map(drop)
}

pub(super) fn flip(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let dims = g.dims(&ty);
    g.add(Flip { dims }, &[x]).map(drop)
}

/// A sort, and another tensor permuted into the resulting order.
pub(super) fn sort(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0 && is_number(ty))?;
    let (dim, descending) = (g.dim(&ty)?, g.rng.one_in(2));
    let sorted = g.builder.op(Sort { dim, descending }, &[x]).ok()?;
    g.tensors.extend(&sorted);
    let other = g.like(x, &ty);
    g.add(TakeAlong { dim }, &[other, sorted[1]]).map(drop)
}

pub(super) fn topk(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0 && is_number(ty))?;
    let dim = g.dim(&ty)?;
    let k = match ty.shape[dim].as_const() {
        Some(size) => Index::constant(g.rng.below(size as usize + 1) as i64),
        None => ty.shape[dim].div(&Index::constant(2)),
    };
    let found = g.builder.op(Topk { dim, k }, &[x]).ok()?;
    g.tensors.extend(found);
    Some(())
}

pub(super) fn one_hot(g: &mut Growing<'_>) -> Option<()> {
    let (x, _) = g.any_where(|ty| ty.dtype.is_int() && ty.rank() < 4)?;
    let dtype = g.rng.pick(&Dtype::ALL);
    g.add(OneHot { classes: Index::constant(3), dtype }, &[x]).map(drop)
}

/// A tensor convolved with a kernel of one number, or with the first of its own channels.
pub(super) fn convolution(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| is_float(ty) && (1..=4).contains(&ty.rank()))?;
    let dims = if ty.rank() < 4 && g.rng.one_in(2) { 1 } else { 2 };
    let mut shape = ty.shape.clone();
    if shape.len() > dims + 2 {
        return None;
    }
    while shape.len() < dims + 2 {
        shape.insert(0, Index::constant(1));
    }
    let x = g.builder.one(Reshape { shape: shape.clone() }, &[x]).ok()?;
    let channels = shape[1].as_const().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0)?;
    let groups = g.rng.pick(&[1, channels]);
    let kernel: Vec<usize> = (0..dims).map(|_| 1 + g.rng.below(3)).collect();
    let mut weight = vec![Index::from(2 * groups), Index::from(channels / groups)];
    weight.extend(kernel.iter().map(|size| Index::from(*size)));
    let n: i64 = constants(&weight)?.iter().product();
    let value = Elements::Floats((0..n).map(|i| (i % 5) as f64 - 2.0).collect());
    let weight = g.builder.one(Constant { dtype: ty.dtype, shape: weight, value }, &[]).ok()?;
    let mut numbers = |low: usize| (0..dims).map(|_| low + g.rng.below(2)).collect::<Vec<usize>>();
    let (stride, padding, dilation) = (numbers(1), numbers(0), numbers(1));
    if dims == 1 {
        let (stride, padding, dilation) = (stride[0], padding[0], dilation[0]);
        return g.add(Conv1d { stride, padding, dilation, groups }, &[x, weight]).map(drop);
    }
    g.add(Conv2d { stride, padding, dilation, groups }, &[x, weight]).map(drop)
}

/// A part of a stream of random numbers; its start and its key may depend on the rank.
pub(super) fn random(g: &mut Growing<'_>) -> Option<()> {
    let axes: Vec<_> = g.builder.mesh().all_axes().iter().collect();
    let mut rank = || match axes.is_empty() || g.rng.one_in(2) {
        true => Index::constant(1),
        false => Index::sym(Sym::Rank(g.rng.pick(&axes))),
    };
    let (value, start) = (rank(), rank());
    let key = g.builder.one(IndexValue { value }, &[]).ok()?;
    let dtype = g.rng.pick(&[Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16]);
    let (shape, of) =
        (vec![Index::constant(2), Index::constant(3)], vec![Index::constant(9), Index::constant(3)]);
    let start = vec![start, Index::constant(0)];
    match g.rng.one_in(2) {
        true => g.add(Uniform { dtype, shape, of, start }, &[key]),
        false => g.add(Normal { dtype, shape, of, start }, &[key]),
    }
    .map(drop)
}
