//! `attention`: keys are processed in blocks with an online softmax, so that at most one block of scores is
//! held.
//!
//! For each query the running maximum, the sum of exponentials and the weighted sum of values are kept; if a block
//! raises the maximum, the sums are rescaled. 16-bit floats are computed in `f32`.
//!
//! A NaN or a positive infinity among the scores of visible keys makes the result NaN; a score of negative infinity has
//! weight 0, and gives NaN only if all visible scores are so. Masked keys and values have no effect, whatever they
//! hold. A weight that underflows is 0, which gives NaN with an infinite value.

use std::ops::Range;

use consort_ir::index::Index;
use consort_ir::ops::{Attention, OpDef};
use consort_types::Dtype;
use half::{bf16, f16};

use crate::kernels::element::{Element, Wide};
use crate::kernels::gemm::{Gemm, Mat, MatMut, gemm};
use crate::kernels::isa::{Loop, vectorize};
use crate::kernels::math::{double, single};
use crate::kernels::operand::attributes;
use crate::kernels::scratch::with_scratch;
use crate::kernels::skinny::{gather, skinny_rows, widen};
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, View, ViewMut};

pub(crate) static KERNELS: &[Kernel] =
    &[Kernel { op: "attention", family: "attention", in_place: false, strided: true, run }];

/// Queries and keys of a block of scores.
pub(super) const QUERIES: usize = 128;
pub(super) const KEYS: usize = 512;

/// Heads that share keys are processed together if they have fewer queries than this.
const FEW_QUERIES: usize = 32;

/// Up to this many rows, keys and values are multiplied in place: a transposition would take longer.
const FEW_ROWS: usize = 8;

/// The type in which scores are computed.
pub(super) trait Score: Gemm + PartialOrd {
    const LOWEST: Self;
    fn from_f64(x: f64) -> Self;
    fn exp(self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn over(self, other: Self) -> Self;
}

macro_rules! score {
    ($($ty:ident: $math:ident),*) => {$(
        impl Score for $ty {
            const LOWEST: $ty = $ty::NEG_INFINITY;
            fn from_f64(x: f64) -> $ty {
                x as $ty
            }
            #[inline(always)]
            fn exp(self) -> $ty {
                $math::exp(self)
            }
            #[inline(always)]
            fn minus(self, other: $ty) -> $ty {
                self - other
            }
            #[inline(always)]
            fn times(self, other: $ty) -> $ty {
                self * other
            }
            #[inline(always)]
            fn over(self, other: $ty) -> $ty {
                self / other
            }
        }
    )*};
}

score!(f32: single, f64: double);

fn run(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let op: &Attention = attributes(op)?;
    let ([Arg::View(q), Arg::View(k), Arg::View(v)], [out]) = (args, results) else {
        return Err(KernelError::new("expected three operands that lie apart from the result"));
    };
    match q.dtype {
        Dtype::F32 => attend::<f32>(cx, op, [q, k, v], out),
        Dtype::F64 => attend::<f64>(cx, op, [q, k, v], out),
        Dtype::F16 => attend::<f16>(cx, op, [q, k, v], out),
        Dtype::Bf16 => attend::<bf16>(cx, op, [q, k, v], out),
        other => Err(KernelError::new(("a float type", other.to_string()))),
    }
}

/// Consecutive rows of the result that share a head of keys.
struct Part<'a, E> {
    out: &'a mut [E],
    /// The first row, counted over all batch entries and heads.
    first: usize,
}

fn attend<E>(
    cx: &KernelCx<'_>,
    op: &Attention,
    [q, k, v]: [&View<'_>; 3],
    out: &mut ViewMut<'_>,
) -> Result<(), KernelError>
where
    E: Element,
    E::Wide: Score,
{
    let (&[_, heads, queries, _], &[_, own_heads, _, width]) = (q.shape, v.shape) else {
        return Err(KernelError::new("expected four dimensions"));
    };
    let task = Task {
        q: Heads::<E>::new(q)?,
        k: Heads::new(k)?,
        v: Heads::new(v)?,
        group: heads.checked_div(own_heads).unwrap_or(1).max(1),
        scale: E::Wide::from_f64(op.scale),
        mask: Mask::new(cx, op.causal.as_ref(), queries, k.shape[2])?,
    };
    let out = out.elements::<E>()?;
    if out.is_empty() {
        return Ok(());
    }
    let together = if queries < FEW_QUERIES { task.group * queries } else { queries };
    let parts = out.chunks_exact_mut(together * width).enumerate().flat_map(|(i, out)| {
        let block = QUERIES * width;
        out.chunks_mut(block).enumerate().map(move |(j, out)| Part { out, first: i * together + j * QUERIES })
    });
    if cx.threads.count() == 1 {
        parts.for_each(|part| task.run(part));
    } else {
        cx.threads.for_each(parts.collect(), |part| task.run(part));
    }
    Ok(())
}

/// An operand, `[batch, heads, length, width]`.
pub(super) struct Heads<'a, E> {
    data: &'a [E],
    pub(super) view: &'a View<'a>,
}

impl<'a, E: Element> Heads<'a, E> {
    pub(super) fn new(view: &'a View<'a>) -> Result<Heads<'a, E>, KernelError> {
        Ok(Heads { data: view.elements()?, view })
    }

    /// The matrix of one head.
    pub(super) fn head(&self, batch: usize, head: usize) -> Mat<'a, E> {
        let (shape, strides) = (self.view.shape, self.view.strides);
        let start = (batch * strides[0] + head * strides[1]).min(self.data.len());
        Mat::new(&self.data[start..], [shape[2], shape[3]], [strides[2], strides[3]])
    }
}

struct Task<'a, E: Element> {
    q: Heads<'a, E>,
    k: Heads<'a, E>,
    v: Heads<'a, E>,
    /// The number of query heads per key head.
    group: usize,
    scale: E::Wide,
    mask: Mask,
}

/// Which keys a row of queries sees: its first ones.
pub(super) struct Mask {
    offset: Option<i64>,
    queries: usize,
    keys: usize,
}

impl Mask {
    pub(super) fn new(
        cx: &KernelCx<'_>,
        causal: Option<&Index>,
        queries: usize,
        keys: usize,
    ) -> Result<Mask, KernelError> {
        let offset = causal.map(|offset| cx.sizes.index(offset)).transpose();
        let offset = offset.map_err(|error| KernelError::new(error.to_string()))?;
        Ok(Mask { offset, queries, keys })
    }

    /// The number of keys visible to a row, counted over all batch entries and heads.
    pub(super) fn seen(&self, row: usize) -> usize {
        let query = (row % self.queries) as i64;
        self.offset.map_or(self.keys, |offset| {
            let last = query.saturating_add(offset);
            usize::try_from(last.saturating_add(1)).map_or(0, |seen| seen.min(self.keys))
        })
    }

    /// The number of them in a block of keys.
    pub(super) fn seen_in(&self, row: usize, keys: &Range<usize>) -> usize {
        self.seen(row).saturating_sub(keys.start).min(keys.len())
    }
}

impl<E> Task<'_, E>
where
    E: Element,
    E::Wide: Score,
{
    fn run(&self, part: Part<'_, E>) {
        let &[_, heads, queries, depth] = self.q.view.shape else { return };
        let width = self.v.view.shape[3];
        let rows = part.out.len() / width;
        let head = part.first / queries;
        let (batch, own_head) = (head / heads, head % heads / self.group);
        let (k, v) = (self.k.head(batch, own_head), self.v.head(batch, own_head));
        let end = (0..rows).map(|row| self.mask.seen(part.first + row)).max().unwrap_or(0);
        let keys = KEYS.min(end);
        // 16-bit keys and values are widened for `gemm`; few rows are multiplied without widening.
        let few = rows <= FEW_ROWS;
        let (wide_keys, wide_values) = if few { (0, 0) } else { (keys * depth, keys * width) };
        let sizes =
            [rows * depth, rows * keys, rows * width, rows * width, rows, rows, wide_keys, wide_values];
        with_scratch(sizes.iter().sum(), |scratch: &mut [E::Wide]| {
            let mut rest = scratch;
            let [q, scores, sums, products, largest, totals, wide_keys, wide_values] = sizes.map(|size| {
                let (here, others) = std::mem::take(&mut rest).split_at_mut(size);
                rest = others;
                here
            });
            for (row, q) in (part.first..).zip(q.chunks_exact_mut(depth.max(1))) {
                let (head, query) = (row / queries, row % queries);
                gather(self.q.head(head / heads, head % heads).part(query..query + 1, 0..depth), q);
            }
            q.iter_mut().for_each(|q| *q = q.times(self.scale));
            let q = Mat::new(q, [rows, depth], [depth, 1]);
            sums.fill(E::Wide::ZERO);
            totals.fill(E::Wide::ZERO);
            largest.fill(E::Wide::LOWEST);
            for start in (0..end).step_by(KEYS) {
                let here = start..end.min(start + KEYS);
                let (k, v) = (k.part(here.clone(), 0..depth).t(), v.part(here.clone(), 0..width));
                let scores = &mut scores[..rows * here.len()];
                product(MatMut::new(scores, [rows, here.len()], here.len()), q, k, few, wide_keys);
                for (row, scores) in scores.chunks_exact_mut(here.len()).enumerate() {
                    let seen = self.mask.seen_in(part.first + row, &here);
                    let sums = &mut sums[row * width..][..width];
                    vectorize(Follow {
                        scores,
                        seen,
                        sums,
                        total: &mut totals[row],
                        largest: &mut largest[row],
                    });
                }
                let scores = Mat::new(scores, [rows, here.len()], [here.len(), 1]);
                let all_seen = (0..rows).all(|row| self.mask.seen(part.first + row) >= here.end);
                let wide = if few { None } else { Some(widen(v, wide_values)) };
                match wide {
                    // Masked keys have weight 0, which gives NaN with a value that is not finite.
                    Some(v) if all_seen || is_finite(v.data()) => {
                        gemm(MatMut::new(sums, [rows, width], width), true, scores, v, E::Wide::ONE);
                        continue;
                    }
                    None if all_seen => skinny_rows(MatMut::new(products, [rows, width], width), scores, v),
                    _ => {
                        for (row, products) in products.chunks_exact_mut(width).enumerate() {
                            let seen = self.mask.seen_in(part.first + row, &here);
                            let (scores, v) = (scores.part(row..row + 1, 0..seen), v.part(0..seen, 0..width));
                            skinny_rows(MatMut::new(products, [1, width], width), scores, v);
                        }
                    }
                }
                sums.iter_mut().zip(&*products).for_each(|(sum, product)| *sum = sum.plus(*product));
            }
            let rows = part.out.chunks_exact_mut(width).zip(sums.chunks_exact(width));
            for (row, (out, sums)) in rows.enumerate() {
                // No visible key: the sums are 0, and so is the result.
                let seen = self.mask.seen(part.first + row) > 0;
                let total = if seen { totals[row] } else { E::Wide::ONE };
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = E::narrow(sum.over(total)));
            }
        });
    }
}

/// The scores of a block.
fn product<E>(
    out: MatMut<'_, E::Wide>,
    q: Mat<'_, E::Wide>,
    k: Mat<'_, E>,
    few: bool,
    scratch: &mut [E::Wide],
) where
    E: Element,
    E::Wide: Score,
{
    if few {
        skinny_rows(out, q, k);
    } else {
        gemm(out, false, q, widen(k, scratch), E::Wide::ONE);
    }
}

/// Whether all elements are finite.
pub(super) fn is_finite<W: Score>(elements: &[W]) -> bool {
    vectorize(Finite(elements))
}

struct Finite<'a, W>(&'a [W]);

impl<W: Score> Loop for Finite<'_, W> {
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        // 0 times any other is NaN.
        let finite = |run: &[W]| run.iter().fold(true, |all, x| all & (x.times(W::ZERO) == W::ZERO));
        self.0.chunks(64).all(finite)
    }
}

/// Reduces up to `KEYS` values to one, by halving, which vectorises. There is at least one.
#[inline(always)]
fn fold<W: Copy>(values: &[W], room: &mut [W; KEYS], f: impl Fn(W, W) -> W) -> W {
    let (low, high) = values.split_at(values.len().div_ceil(2));
    let room = &mut room[..low.len()];
    room.copy_from_slice(low);
    room.iter_mut().zip(high).for_each(|(a, b)| *a = f(*a, *b));
    let mut count = room.len();
    while count > 1 {
        let (low, high) = room[..count].split_at_mut(count.div_ceil(2));
        low.iter_mut().zip(&*high).for_each(|(a, b)| *a = f(*a, *b));
        count = low.len();
    }
    room[0]
}

/// What is subtracted from scores. If all are negative infinity or NaN, nothing: the exponentials are 0 or NaN.
#[inline(always)]
pub(super) fn subtracted<W: Score>(largest: W) -> W {
    if largest > W::LOWEST { largest } else { W::ZERO }
}

/// Turns the scores of a query into exponentials and rescales its sums to a new maximum.
pub(super) struct Follow<'a, W> {
    pub(super) scores: &'a mut [W],
    /// The number of visible keys.
    pub(super) seen: usize,
    pub(super) sums: &'a mut [W],
    pub(super) total: &'a mut W,
    pub(super) largest: &'a mut W,
}

impl<W: Score> Loop for Follow<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let (scores, hidden) = self.scores.split_at_mut(self.seen);
        hidden.fill(W::ZERO);
        if scores.is_empty() {
            return;
        }
        let mut room = [W::ZERO; KEYS];
        let larger = |a: W, b: W| if b > a { b } else { a };
        let largest = larger(*self.largest, fold(scores, &mut room, larger));
        let from = subtracted(largest);
        scores.iter_mut().for_each(|score| *score = score.minus(from).exp());
        let total = fold(scores, &mut room, W::plus);
        if largest > *self.largest {
            let less = self.largest.minus(largest).exp();
            self.sums.iter_mut().for_each(|sum| *sum = sum.times(less));
            *self.total = self.total.times(less);
            *self.largest = largest;
        }
        *self.total = self.total.plus(total);
    }
}
