//! Recipes that slice tensors and write the slices back, which a plan does in place if it can.
//!
//! Starts and sizes are constants, parts of a symbol (`s0/2`), or depend on the rank. The overwritten value is often
//! dead afterwards, as if the user had written `x.narrow_mut(..)`.

use consort_types::{Dtype, Message, Missing, Peer, Route};

use super::starts::reduction;
use super::{Growing, constants, is_number};
use crate::generate::{Flying, Into};
use consort_ir::entity::Value;
use consort_ir::index::{Index, Sym};
use consort_ir::ops::*;
use consort_ir::types::TensorType;

/// The start and the size of a part, along each dimension.
type Box = (Vec<Index>, Vec<Index>);

/// Whether a size is a number, or a multiple of a symbol. Parts of parts would grow into expressions that no user
/// writes.
fn is_plain(size: &Index) -> bool {
    let mut symbols = Vec::new();
    size.symbols(&mut |sym| symbols.push(sym));
    let [sym] = symbols[..] else { return size.as_const().is_some() };
    (1..9).any(|times| *size == &Index::constant(times) * &Index::sym(sym))
}

/// A part of one dimension: its start and size.
fn side(g: &mut Growing<'_>, size: &Index) -> (Index, Index) {
    if !is_plain(size) || g.rng.one_in(3) {
        return (Index::constant(0), size.clone());
    }
    let axes: Vec<_> = g.builder.mesh().all_axes().iter().collect();
    let n = (!axes.is_empty()).then(|| g.rng.pick(&axes)).map(|axis| {
        let n = Index::from(i64::from(g.builder.mesh().axis_size(axis)));
        (Index::sym(Sym::Rank(axis)), n)
    });
    if let Some((rank, n)) = n.filter(|_| g.rng.one_in(4)) {
        // This rank's own part.
        let part = size.div(&n);
        return (&part * &rank, part);
    }
    let (one, half) = (Index::constant(1), size.div(&Index::constant(2)));
    match size.as_const() {
        Some(size) => {
            let part = g.rng.below(size as usize + 1) as i64;
            let start = g.rng.below((size - part) as usize + 1) as i64;
            (Index::constant(start), Index::constant(part))
        }
        None => match g.rng.below(6) {
            0 => (Index::constant(0), half),
            1 => (half.clone(), half),
            2 => (half.clone(), size - &half),
            3 => (size - &one, one),
            4 => (one.clone(), size - &one),
            _ => (Index::constant(0), one),
        },
    }
}

fn a_box(g: &mut Growing<'_>, shape: &[Index]) -> Box {
    shape.iter().map(|size| side(g, size)).unzip()
}

fn part_of(g: &mut Growing<'_>, x: Value, (start, size): &Box) -> Option<Value> {
    let op = Slice { start: start.clone(), size: size.clone(), step: vec![1; start.len()] };
    g.builder.one(op, &[x]).ok()
}

pub(super) fn slice(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let (start, mut size) = a_box(g, &ty.shape);
    let mut step = vec![1; ty.rank()];
    for (i, sizes) in constants(&ty.shape).into_iter().flatten().enumerate() {
        if start[i] == Index::constant(0) && sizes >= 3 && g.rng.one_in(6) {
            (size[i], step[i]) = (Index::constant((sizes - 1) / 2 + 1), 2);
        }
    }
    g.add(Slice { start, size, step }, &[x]).map(drop)
}

/// A value of this type to write: a view, a new tensor, or an existing one.
fn something(g: &mut Growing<'_>, x: Value, ty: &TensorType, place: &Box) -> Option<Value> {
    let shape = &place.1;
    match g.rng.below(5) {
        0 => g.any_where(|other| other.dtype == ty.dtype && other.shape == *shape).map(|(value, _)| value),
        1 => g.builder.one(Iota { dtype: ty.dtype, shape: shape.clone(), dim: 0 }, &[]).ok(),
        way => {
            let y = g.like(x, ty);
            let part = part_of(g, y, place)?;
            match way {
                2 if is_number(ty) => g.builder.one(Neg {}, &[part]).ok(),
                _ => Some(part),
            }
        }
    }
}

/// Writes a part into a tensor, which the result usually replaces.
fn write(g: &mut Growing<'_>, x: Value, part: Value, start: Vec<Index>) -> Option<Value> {
    let written = g.add(UpdateSlice { start }, &[x, part])?;
    if !g.rng.one_in(3) {
        g.forget(x);
    }
    Some(written)
}

pub(super) fn update_slice(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let place = a_box(g, &ty.shape);
    let part = something(g, x, &ty, &place)?;
    let start = if g.rng.one_in(3) { vec![Index::constant(0); ty.rank()] } else { place.0 };
    write(g, x, part, start).map(drop)
}

/// Writes an existing tensor at the beginning or the end of another one.
pub(super) fn put(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let (part, small) = g.any_where(|other| other.dtype == ty.dtype && other.rank() == ty.rank())?;
    let start = ty.shape.iter().zip(&small.shape);
    let start = start.map(|(whole, size)| if g.rng.one_in(2) { Index::constant(0) } else { whole - size });
    let start = start.collect();
    write(g, x, part, start).map(drop)
}

impl Growing<'_> {
    /// Starts an operation whose results are written into a tensor, each to its place, after the wait.
    fn start_into(
        &mut self,
        op: impl OpDef,
        args: &[Value],
        base: Value,
        starts: Vec<Vec<Index>>,
    ) -> Option<()> {
        let pending = self.builder.one(op, args).ok()?;
        self.flying.push(Flying { pending, into: Some(Into { base, starts }) });
        if !self.rng.one_in(3) {
            self.forget(base);
        }
        if self.rng.one_in(3) { self.wait() } else { Some(()) }
    }
}

/// A collective of parts of a tensor, in place: rows, columns, boxes, one or two of them.
pub(super) fn in_place(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0)?;
    let n = if g.rng.one_in(4) { 2 } else { 1 };
    let boxes: Vec<Box> = (0..n).map(|_| a_box(g, &ty.shape)).collect();
    let parts = boxes.iter().map(|place| part_of(g, x, place)).collect::<Option<Vec<_>>>()?;
    let starts = boxes.into_iter().map(|(start, _)| start).collect();
    let over = g.group();
    let members = g.builder.mesh().group_size(over);
    let root = g.rng.below(members as usize);
    let kind = if n == 2 { 0 } else { g.rng.below(5) };
    match kind {
        0 | 1 => {
            let reduce = reduction(g, &[ty])?;
            g.start_into(AllReduceStart { reduce, over }, &parts, x, starts)
        }
        2 => g.start_into(BroadcastStart { root, over }, &parts, x, starts),
        3 => {
            let reduce = reduction(g, &[ty])?;
            g.start_into(ReduceStart { reduce, root, over }, &parts, x, starts)
        }
        _ => {
            let op = PermuteStart { route: Route::Ring(1), missing: Missing::Error, over };
            g.start_into(op, &parts, x, starts)
        }
    }
}

/// Each member's own part of a tensor: gathered into the whole, or summed from it, in place.
pub(super) fn own_part(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0 && is_number(ty))?;
    let (dim, over) = (g.dim(&ty)?, g.group());
    if !is_plain(&ty.shape[dim]) {
        return None;
    }
    let members = Index::from(i64::from(g.builder.mesh().group_size(over)));
    let part = ty.shape[dim].div(&members);
    let mut place: Box = (vec![Index::constant(0); ty.rank()], ty.shape.clone());
    place.0[dim] = &part * &group_rank(g.builder.mesh(), over);
    place.1[dim] = part;
    if g.rng.one_in(2) {
        let own = part_of(g, x, &place)?;
        g.forget(x);
        return g.start(AllGatherStart { dims: vec![dim], over }, &[own]);
    }
    let reduce = reduction(g, &[ty])?;
    g.start_into(ReduceScatterStart { reduce, dims: vec![dim], over }, &[x], x, vec![place.0])
}

/// Halo exchange: rows at the ends of a tensor come from the neighbours, which get the rows next to them.
pub(super) fn halo(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty) = g.any_where(|ty| ty.rank() > 0 && ty.dtype != Dtype::Bool)?;
    let (dim, over) = (g.dim(&ty)?, g.group());
    g.equal_shape(&ty, over)?;
    let size = &ty.shape[dim];
    let mut row = |at: Index| {
        let mut place: Box = (vec![Index::constant(0); ty.rank()], ty.shape.clone());
        (place.0[dim], place.1[dim]) = (at, Index::constant(1));
        part_of(g, x, &place).map(|part| (part, place.0))
    };
    let rows =
        [Index::constant(1), size - &Index::constant(2), size - &Index::constant(1), Index::constant(0)];
    let rows = rows.into_iter().map(&mut row).collect::<Option<Vec<_>>>()?;
    let route = if g.rng.one_in(2) { Route::Ring } else { Route::Shift };
    let message = |by: i64, tag: i64| Message { peer: Peer::Route(route(by)), tag: Index::constant(tag) };
    let (send, recv) = (vec![message(-1, 0), message(1, 1)], vec![message(1, 0), message(-1, 1)]);
    let args: Vec<Value> = rows.iter().map(|(part, _)| *part).collect();
    let starts = rows.into_iter().skip(2).map(|(_, start)| start).collect();
    g.start_into(ExchangeStart { send, recv, over }, &args, x, starts)
}
