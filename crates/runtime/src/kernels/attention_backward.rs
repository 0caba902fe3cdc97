//! `attention_backward`: the weights are computed again, a block of them at a time, so that memory grows with the length
//! and not with its square.
//!
//! A part is a head of keys with all queries that it serves, so that parts share no result. For a block of queries the
//! largest score and the sum of exponentials of each are found first; then each block of keys gives the weights and the
//! cotangents of the scores, and adds to the three results. Sums are kept in the type of computation and rounded once:
//! 16-bit floats are computed in `f32`.
//!
//! What is not finite is as in `attention`: only what a query sees has an effect on it, and it only on what it sees.

use std::ops::Range;

use consort_ir::ops::{AttentionBackward, OpDef};
use consort_types::Dtype;
use half::{bf16, f16};

use crate::kernels::attention::{Follow, Heads, KEYS, Mask, QUERIES, Score, is_finite, subtracted};
use crate::kernels::element::{Element, Wide};
use crate::kernels::gemm::{Mat, MatMut, gemm};
use crate::kernels::isa::{Loop, vectorize};
use crate::kernels::operand::{attributes, view};
use crate::kernels::scratch::with_scratch;
use crate::kernels::skinny::{blocks, gather, widen};
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, View, ViewMut};

pub(crate) static KERNELS: &[Kernel] =
    &[Kernel { op: "attention_backward", family: "attention_backward", in_place: false, strided: true, run }];

fn run(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let op: &AttentionBackward = attributes(op)?;
    let args = [view(args, 0)?, view(args, 1)?, view(args, 2)?, view(args, 3)?, view(args, 4)?];
    let [of_q, of_k, of_v] = results else { return Err(KernelError::new("expected three results")) };
    let results = [of_q, of_k, of_v];
    match args[0].dtype {
        Dtype::F32 => backward::<f32>(cx, op, &args, results),
        Dtype::F64 => backward::<f64>(cx, op, &args, results),
        Dtype::F16 => backward::<f16>(cx, op, &args, results),
        Dtype::Bf16 => backward::<bf16>(cx, op, &args, results),
        other => Err(KernelError::new(("a float type", other.to_string()))),
    }
}

/// The cotangents of a head of keys and of the queries that it serves.
struct Part<'a, E> {
    /// Which head, counted over all batch entries.
    head: usize,
    of_q: &'a mut [E],
    of_k: &'a mut [E],
    of_v: &'a mut [E],
}

fn backward<E>(
    cx: &KernelCx<'_>,
    op: &AttentionBackward,
    [q, k, v, result, cotangent]: &[View<'_>; 5],
    [of_q, of_k, of_v]: [&mut ViewMut<'_>; 3],
) -> Result<(), KernelError>
where
    E: Element,
    E::Wide: Score,
{
    let (&[batch, heads, queries, depth], &[_, own_heads, keys, width]) = (q.shape, v.shape) else {
        return Err(KernelError::new("expected four dimensions"));
    };
    let group = heads.checked_div(own_heads).unwrap_or(1);
    let task = Task {
        q: Heads::<E>::new(q)?,
        k: Heads::new(k)?,
        v: Heads::new(v)?,
        result: Heads::new(result)?,
        cotangent: Heads::new(cotangent)?,
        group,
        scale: E::Wide::from_f64(op.scale),
        mask: Mask::new(cx, op.causal.as_ref(), queries, keys)?,
    };
    let (mut of_q, mut of_k, mut of_v) =
        (of_q.elements::<E>()?, of_k.elements::<E>()?, of_v.elements::<E>()?);
    let parts = (0..batch * own_heads).map(|head| Part {
        head,
        of_q: take(&mut of_q, group * queries * depth),
        of_k: take(&mut of_k, keys * depth),
        of_v: take(&mut of_v, keys * width),
    });
    if cx.threads.count() == 1 {
        parts.for_each(|part| task.run(part));
    } else {
        cx.threads.for_each(parts.collect(), |part| task.run(part));
    }
    Ok(())
}

/// Takes elements off the front.
fn take<'a, T>(rest: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    rest.split_off_mut(..count).unwrap_or_default()
}

struct Task<'a, E: Element> {
    q: Heads<'a, E>,
    k: Heads<'a, E>,
    v: Heads<'a, E>,
    result: Heads<'a, E>,
    cotangent: Heads<'a, E>,
    /// The number of query heads per key head.
    group: usize,
    scale: E::Wide,
    mask: Mask,
}

/// The keys and values of a head, and the sums of their cotangents.
struct Keys<'a, W> {
    k: Mat<'a, W>,
    v: Mat<'a, W>,
    of_k: &'a mut [W],
    of_v: &'a mut [W],
    finite: bool,
}

/// A block of queries.
struct Queries<'a, W> {
    /// The first row, counted over all batch entries and heads.
    first: usize,
    count: usize,
    /// The queries times the scale, and the sums of their cotangents before the scale.
    q: &'a mut [W],
    of_q: &'a mut [W],
    cotangent: &'a mut [W],
    /// Of each row, what is subtracted from its scores, and what exponentials are multiplied by to be weights.
    largest: &'a mut [W],
    factor: &'a mut [W],
    /// The sum of the result times its cotangent.
    along: &'a mut [W],
    /// A block of scores and then of weights, and of their cotangents.
    weights: &'a mut [W],
    of_weights: &'a mut [W],
    finite: bool,
}

impl<E> Task<'_, E>
where
    E: Element,
    E::Wide: Score,
{
    fn run(&self, part: Part<'_, E>) {
        let (&[_, own_heads, keys, width], depth) = (self.v.view.shape, self.q.view.shape[3]) else { return };
        let rows = self.group * self.q.view.shape[2];
        let (most, block) = (rows.min(QUERIES), keys.min(KEYS));
        let sizes = 2 * keys * (depth + width) + most * (2 * depth + 2 * width + 2 * block + 3);
        with_scratch(sizes, |mut room: &mut [E::Wide]| {
            let (batch, own_head) = (part.head / own_heads, part.head % own_heads);
            let k = widen(self.k.head(batch, own_head), take(&mut room, keys * depth));
            let v = widen(self.v.head(batch, own_head), take(&mut room, keys * width));
            let finite = is_finite(k.data()) && is_finite(v.data());
            let (of_k, of_v) = (take(&mut room, keys * depth), take(&mut room, keys * width));
            of_k.fill(E::Wide::ZERO);
            of_v.fill(E::Wide::ZERO);
            let mut keys = Keys { k, v, of_k, of_v, finite };
            let result = take(&mut room, most * width);
            let mut queries = Queries {
                first: 0,
                count: most,
                q: take(&mut room, most * depth),
                of_q: take(&mut room, most * depth),
                cotangent: take(&mut room, most * width),
                largest: take(&mut room, most),
                factor: take(&mut room, most),
                along: take(&mut room, most),
                weights: take(&mut room, most * block),
                of_weights: take(&mut room, most * block),
                finite,
            };
            for here in blocks(rows, QUERIES) {
                queries.count = here.len();
                queries.first = part.head * rows + here.start;
                self.begin(&mut queries, result);
                self.follow(&mut queries, &keys);
                self.add(&mut queries, &mut keys);
                let of_q = part.of_q[here.start * depth..here.end * depth].iter_mut();
                of_q.zip(&*queries.of_q).for_each(|(out, sum)| *out = E::narrow(sum.times(self.scale)));
            }
            part.of_k.iter_mut().zip(&*keys.of_k).for_each(|(out, sum)| *out = E::narrow(*sum));
            part.of_v.iter_mut().zip(&*keys.of_v).for_each(|(out, sum)| *out = E::narrow(*sum));
        });
    }

    /// Reads a block of queries.
    fn begin(&self, queries: &mut Queries<'_, E::Wide>, result: &mut [E::Wide]) {
        let &[_, heads, length, depth] = self.q.view.shape else { return };
        let width = self.v.view.shape[3];
        for row in 0..queries.count {
            let (head, query) = ((queries.first + row) / length, (queries.first + row) % length);
            let read = |from: &Heads<'_, E>, width: usize, to: &mut [E::Wide]| {
                gather(from.head(head / heads, head % heads).part(query..query + 1, 0..width), to);
            };
            let (q, g) = (row * depth..(row + 1) * depth, row * width..(row + 1) * width);
            read(&self.q, depth, &mut queries.q[q]);
            read(&self.cotangent, width, &mut queries.cotangent[g.clone()]);
            read(&self.result, width, &mut result[g.clone()]);
            queries.along[row] = vectorize(Dot(&result[g.clone()], &queries.cotangent[g]));
        }
        let q = &mut queries.q[..queries.count * depth];
        q.iter_mut().for_each(|q| *q = q.times(self.scale));
        queries.finite = is_finite(q) && is_finite(&queries.cotangent[..queries.count * width]);
        queries.of_q.fill(E::Wide::ZERO);
    }

    /// The number of keys visible to any of these queries.
    fn end(&self, queries: &Queries<'_, E::Wide>) -> usize {
        (0..queries.count).map(|row| self.mask.seen(queries.first + row)).max().unwrap_or(0)
    }

    /// Finds the largest score and the sum of the exponentials of each query.
    fn follow(&self, queries: &mut Queries<'_, E::Wide>, keys: &Keys<'_, E::Wide>) {
        queries.largest.fill(E::Wide::LOWEST);
        // The sums first, which become factors.
        queries.factor.fill(E::Wide::ZERO);
        for here in blocks(self.end(queries), KEYS) {
            queries.score(0..queries.count, keys.k.part(here.clone(), 0..keys.k.cols));
            let rows = queries.weights.chunks_exact_mut(here.len()).take(queries.count);
            let of_rows = queries.largest.iter_mut().zip(&mut *queries.factor);
            for (row, (scores, (largest, total))) in rows.zip(of_rows).enumerate() {
                let seen = self.mask.seen_in(queries.first + row, &here);
                vectorize(Follow { scores, seen, sums: &mut [], total, largest });
            }
        }
        queries.largest.iter_mut().for_each(|largest| *largest = subtracted(*largest));
        queries.factor.iter_mut().for_each(|total| *total = E::Wide::ONE.over(*total));
    }

    /// Adds what these queries give to the cotangents.
    fn add(&self, queries: &mut Queries<'_, E::Wide>, keys: &mut Keys<'_, E::Wide>) {
        let finite = keys.finite && queries.finite;
        for here in blocks(self.end(queries), KEYS) {
            let all_seen = (0..queries.count).all(|row| self.mask.seen(queries.first + row) >= here.end);
            if finite || all_seen {
                self.add_block(queries, 0..queries.count, keys, here);
                continue;
            }
            // Masked keys have weight 0, which gives NaN with what is not finite.
            for row in 0..queries.count {
                let end = self.mask.seen(queries.first + row).min(here.end);
                if end > here.start {
                    self.add_block(queries, row..row + 1, keys, here.start..end);
                }
            }
        }
    }

    /// The same for some of them and the keys of a block.
    fn add_block(
        &self,
        queries: &mut Queries<'_, E::Wide>,
        rows: Range<usize>,
        keys: &mut Keys<'_, E::Wide>,
        here: Range<usize>,
    ) {
        let (depth, width, shape) = (keys.k.cols, keys.v.cols, [rows.len(), here.len()]);
        let (k, v) = (keys.k.part(here.clone(), 0..depth), keys.v.part(here.clone(), 0..width));
        queries.score(rows.clone(), k);
        let q = Mat::new(&queries.q[rows.start * depth..], [rows.len(), depth], [depth, 1]);
        let g = Mat::new(&queries.cotangent[rows.start * width..], [rows.len(), width], [width, 1]);
        let weights = &mut queries.weights[..rows.len() * here.len()];
        let of_weights = &mut queries.of_weights[..rows.len() * here.len()];
        gemm(MatMut::new(of_weights, shape, here.len()), false, g, v.t(), E::Wide::ONE);
        let lines = weights.chunks_exact_mut(here.len()).zip(of_weights.chunks_exact_mut(here.len()));
        for (row, (weights, of_weights)) in rows.clone().zip(lines) {
            let seen = self.mask.seen_in(queries.first + row, &here);
            let (largest, factor, along) = (queries.largest[row], queries.factor[row], queries.along[row]);
            vectorize(Weigh { weights, of_weights, seen, largest, factor, along });
        }
        let weights = Mat::new(weights, shape, [here.len(), 1]);
        let of_scores = Mat::new(of_weights, shape, [here.len(), 1]);
        let of_v = &mut keys.of_v[here.start * width..here.end * width];
        gemm(MatMut::new(of_v, [here.len(), width], width), true, weights.t(), g, E::Wide::ONE);
        let of_k = &mut keys.of_k[here.start * depth..here.end * depth];
        gemm(MatMut::new(of_k, [here.len(), depth], depth), true, of_scores.t(), q, E::Wide::ONE);
        let of_q = &mut queries.of_q[rows.start * depth..rows.end * depth];
        gemm(MatMut::new(of_q, [rows.len(), depth], depth), true, of_scores, k, E::Wide::ONE);
    }
}

impl<W: Score> Queries<'_, W> {
    /// Computes the scores of some rows and a block of keys.
    fn score(&mut self, rows: Range<usize>, k: Mat<'_, W>) {
        let q = Mat::new(&self.q[rows.start * k.cols..], [rows.len(), k.cols], [k.cols, 1]);
        let scores = &mut self.weights[..rows.len() * k.rows];
        gemm(MatMut::new(scores, [rows.len(), k.rows], k.rows), false, q, k.t(), W::ONE);
    }
}

/// Turns the scores of a query into weights, and the cotangents of these into those of the scores.
struct Weigh<'a, W> {
    weights: &'a mut [W],
    of_weights: &'a mut [W],
    /// The number of visible keys.
    seen: usize,
    largest: W,
    factor: W,
    along: W,
}

impl<W: Score> Loop for Weigh<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let (weights, hidden) = self.weights.split_at_mut(self.seen);
        hidden.fill(W::ZERO);
        let (of_weights, hidden) = self.of_weights.split_at_mut(self.seen);
        hidden.fill(W::ZERO);
        for (weight, of_weight) in weights.iter_mut().zip(of_weights) {
            *weight = weight.minus(self.largest).exp().times(self.factor);
            *of_weight = weight.times(of_weight.minus(self.along));
        }
    }
}

/// Sums that are added side by side.
const LANES: usize = 16;

/// The sum of the products of two rows.
struct Dot<'a, W>(&'a [W], &'a [W]);

impl<W: Wide> Loop for Dot<'_, W> {
    type Output = W;
    #[inline(always)]
    fn run(self) -> W {
        let mut sums = [W::ZERO; LANES];
        for (x, y) in self.0.chunks(LANES).zip(self.1.chunks(LANES)) {
            sums.iter_mut().zip(x.iter().zip(y)).for_each(|(sum, (x, y))| *sum = x.times_plus(*y, *sum));
        }
        sums.into_iter().fold(W::ZERO, W::plus)
    }
}
