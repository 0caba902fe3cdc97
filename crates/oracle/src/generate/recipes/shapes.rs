//! Recipes that reshape tensors and join them.

use consort_ir::index::Index;
use consort_ir::ops::*;

use super::Growing;

pub(super) fn reshape(g: &mut Growing<'_>) -> Option<()> {
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

pub(super) fn permute(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() >= 2)?;
    let mut dims: Vec<usize> = (0..ty.rank()).collect();
    for i in 1..dims.len() {
        let j = g.rng.below(i + 1);
        dims.swap(i, j);
    }
    g.add(Permute { dims }, &[x]).map(drop)
}

pub(super) fn concat(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let (y, dim) = (g.like(x, &ty), g.dim(&ty)?);
    g.add(Concat { dim }, &[x, y]).map(drop)
}

pub(super) fn split(g: &mut Growing<'_>) -> Option<()> {
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

pub(super) fn pad(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|_| true)?;
    let mut side = || (0..ty.rank()).map(|_| Index::constant(g.rng.below(3) as i64)).collect();
    let (low, high) = (side(), side());
    g.add(Pad { low, high, value: 1.0 }, &[x]).map(drop)
}

pub(super) fn broadcast(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() < 4)?;
    let mut shape: Vec<Index> = ty
        .shape
        .iter()
        .map(|size| if size.as_const() == Some(1) { Index::constant(3) } else { size.clone() })
        .collect();
    shape.insert(0, Index::constant(2));
    g.add(Broadcast { shape }, &[x]).map(drop)
}
