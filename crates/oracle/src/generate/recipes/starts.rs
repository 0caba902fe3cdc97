//! Recipes that start communication.

use consort_types::{GroupName, Message, Missing, Peer, Reduce, Route};

use super::Growing;
use consort_ir::index::Index;
use consort_ir::ops::*;
use consort_ir::types::TensorType;

/// A reduction that the element types allow.
pub(super) fn reduction(g: &mut Growing<'_>, types: &[TensorType]) -> Option<Reduce> {
    let reduce = g.rng.pick(&Reduce::ALL);
    types.iter().all(|ty| reduce.takes(ty.dtype)).then_some(reduce)
}

pub(super) fn collective(g: &mut Growing<'_>) -> Option<()> {
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

/// Declares a tensor to be equal over axes, which its elements show and its type does not.
pub(super) fn declare_equal(g: &mut Growing<'_>) -> Option<()> {
    let over = g.group();
    let GroupName::Axes(axes) = over else { return None };
    let (x, ty) = g.any_where(|ty| ty.varies.intersect(axes).is_empty())?;
    g.equal_shape(&ty, over)?;
    let spread = g.add(Spread { over }, &[x])?;
    let digest = g.builder.one(Digest {}, &[spread]).ok()?;
    let digests = g.builder.start_wait(AllGatherStart { dims: vec![0], over }, &[digest]).ok()?;
    g.add(EqualOver { over }, &[spread, *digests.first()?]).map(drop)
}

pub(super) fn rooted(g: &mut Growing<'_>) -> Option<()> {
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

/// Splits a tensor into uneven parts, one for each member, reduced or gathered.
pub(super) fn uneven(g: &mut Growing<'_>) -> Option<()> {
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

pub(super) fn all_to_all(g: &mut Growing<'_>) -> Option<()> {
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

pub(super) fn point_to_point(g: &mut Growing<'_>) -> Option<()> {
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
    // The inverse of each of these routes: a receive must name its sender.
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
    if g.rng.one_in(2) {
        // The received value replaces the old one.
        g.forget(y);
    }
    g.start(ExchangeStart { send, recv, over }, &args)
}
