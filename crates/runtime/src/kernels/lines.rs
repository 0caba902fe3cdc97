//! Ops along one dimension: by rows if it is the last, else by blocks of adjacent columns.

use std::hint::black_box;
use std::iter::repeat;

use super::formats::Format;
use super::numbers::Number;
use super::source::Source;
use super::{Arg, KernelCx, KernelError, ViewMut};

/// The extents of a tensor around a dimension.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    /// The size of the dimension.
    pub(super) size: usize,
    /// The stride of the dimension: the product of the sizes inside it.
    pub(super) inner: usize,
}

impl Lines {
    pub(super) fn new(shape: &[usize], dim: usize) -> Lines {
        Lines { size: shape[dim], inner: shape[dim + 1..].iter().product() }
    }
}

/// Approximate number of elements per thread task.
const PART: usize = 1 << 16;

/// Calls `work` with parts of a tensor, each a multiple of `unit` long, and their offsets.
fn in_parts<T: Send>(cx: &KernelCx<'_>, unit: usize, out: &mut [T], work: impl Fn(usize, &mut [T]) + Sync) {
    let part = (PART / unit).max(1) * unit;
    if cx.threads.count() > 1 && out.len() > part {
        let parts: Vec<(usize, &mut [T])> = out.chunks_mut(part).enumerate().collect();
        cx.threads.for_each(parts, |(i, out)| work(i * part, out));
    } else {
        work(0, out);
    }
}

/// Calls `work` with each row of the operand and of the result. Without a row of the operand, the elements are already
/// in the row of the result.
pub(super) fn each_row<F: Format>(
    cx: &KernelCx<'_>,
    x: &Arg<'_>,
    size: usize,
    result: &mut ViewMut<'_>,
    work: impl Fn(Option<&[F::Compute]>, &mut [F::Compute]) + Sync,
) -> Result<(), KernelError> {
    let out = result.elements::<F::Stored>()?;
    if out.is_empty() {
        return Ok(());
    }
    let source = Source::<F>::new(x)?;
    in_parts(cx, size, out, |start, out| {
        let direct = F::borrow_mut(&mut []).is_some();
        let mut block = vec![F::widen(out[0]); if direct { 0 } else { size }];
        for (i, out) in out.chunks_mut(size).enumerate() {
            let at = start + i * size;
            if !direct {
                source.copy(at, out, &mut block);
                work(None, &mut block);
                F::store(&block, out);
            } else if let Some(row) = F::borrow_mut(out) {
                let from = source.borrow(at, size);
                // An operand that aliases the result is in place already.
                if from.is_none() && !matches!(source, Source::Result) {
                    source.copy(at, &[], row);
                }
                work(from, row);
            }
        }
    });
    Ok(())
}

/// Elements per vector step. They are held by value, so that the compiler keeps them in registers.
const LANES: usize = 16;

/// Elements per partial sum, so that no sum takes too many sequential steps.
pub(super) const RUN: usize = 1024;

/// `f` of each lane of `to` and of `x`.
#[inline(always)]
fn side_by_side<T: Copy, C: Copy>(mut to: [T; LANES], x: &[C; LANES], f: impl Fn(T, C) -> T) -> [T; LANES] {
    for i in 0..LANES {
        to[i] = f(to[i], x[i]);
    }
    to
}

/// Folds the lanes into one.
#[inline(always)]
fn fold_lanes<T: Copy>(all: [T; LANES], step: impl Fn(T, T) -> T) -> T {
    // Without it, the compiler would scalarise the preceding loop too.
    let mut all = black_box(all);
    for i in 0..8 {
        all[i] = step(all[i], all[i + 8]);
    }
    for i in 0..4 {
        all[i] = step(all[i], all[i + 4]);
    }
    step(step(all[0], all[2]), step(all[1], all[3]))
}

/// Folds a cheap function of elements, with independent accumulators.
#[inline(always)]
pub(super) fn fold<C: Copy, T: Copy>(run: &[C], start: T, f: impl Fn(C) -> T, step: impl Fn(T, T) -> T) -> T {
    let add = |total: T, x: C| step(total, f(x));
    let (vectors, rest) = run.as_chunks::<LANES>();
    let mut total = start;
    if !vectors.is_empty() {
        let (pairs, others) = vectors.as_chunks::<2>();
        let (mut all, mut second) = ([start; LANES], [start; LANES]);
        for [x, y] in pairs {
            all = side_by_side(all, x, add);
            second = side_by_side(second, y, add);
        }
        for x in others {
            all = side_by_side(all, x, add);
        }
        total = fold_lanes(side_by_side(all, &second, &step), &step);
    }
    for x in rest {
        total = add(total, *x);
    }
    total
}

/// Writes `f` of the elements of `from`, or of the row itself, to a row, and returns the sum of the results.
#[inline(always)]
pub(super) fn replace_and_sum<C: Number>(from: Option<&[C]>, row: &mut [C], f: impl Fn(C) -> C) -> C {
    let mut sum = C::ZERO;
    for (i, run) in row.chunks_mut(RUN).enumerate() {
        let from = from.map(|from| from[i * RUN..][..run.len()].as_chunks::<LANES>());
        let (vectors, rest) = run.as_chunks_mut::<LANES>();
        if !vectors.is_empty() {
            let mut all = [C::ZERO; LANES];
            match from {
                Some((from, _)) => {
                    for (to, x) in vectors.iter_mut().zip(from) {
                        *to = side_by_side(*x, x, |x, _| f(x));
                        all = side_by_side(all, to, C::plus);
                    }
                }
                None => {
                    for x in vectors {
                        *x = side_by_side(*x, &{ *x }, |x, _| f(x));
                        all = side_by_side(all, x, C::plus);
                    }
                }
            }
            sum = sum.plus(fold_lanes(all, C::plus));
        }
        replace(from.map(|(_, rest)| rest), rest, repeat(()), |x, ()| f(x));
        for x in rest {
            sum = sum.plus(*x);
        }
    }
    sum
}

/// Writes `f` of the elements of `from`, or of the row itself, and of `others` to a row.
#[inline(always)]
pub(super) fn replace<C: Copy, W>(
    from: Option<&[C]>,
    row: &mut [C],
    others: impl Iterator<Item = W>,
    f: impl Fn(C, W) -> C,
) {
    match from {
        Some(from) => {
            for ((to, x), other) in row.iter_mut().zip(from).zip(others) {
                *to = f(*x, other);
            }
        }
        None => {
            for (x, other) in row.iter_mut().zip(others) {
                *x = f(*x, other);
            }
        }
    }
}

/// Columns per block.
const BLOCK: usize = 512;

/// A block of columns: rows are read and written one by one.
pub(super) struct Columns<'a, 'b, F: Format> {
    source: &'a Source<'b, F>,
    out: &'a mut [F::Stored],
    /// The offset of `out`.
    start: usize,
    lines: Lines,
    first: usize,
    /// The number of columns.
    pub(super) len: usize,
    blocks: (&'a mut [F::Compute], &'a mut [F::Compute]),
}

impl<F: Format> Columns<'_, '_, F> {
    /// The number of rows.
    pub(super) fn rows(&self) -> usize {
        self.lines.size
    }

    /// Calls `work` with a row.
    pub(super) fn read(&mut self, row: usize, work: impl FnOnce(&[F::Compute])) {
        let at = self.first + row * self.lines.inner;
        let here = &self.out[at - self.start..at - self.start + self.len];
        work(self.source.run(at, self.len, here, self.blocks.0, false));
    }

    /// Calls `work` with a row and the destination of its results.
    pub(super) fn write(&mut self, row: usize, work: impl FnOnce(&[F::Compute], &mut [F::Compute])) {
        let at = self.first + row * self.lines.inner;
        let out = &mut self.out[at - self.start..at - self.start + self.len];
        let x = self.source.run(at, self.len, out, self.blocks.0, false);
        match F::borrow_mut(out) {
            Some(out) => work(x, out),
            None => {
                let block = &mut self.blocks.1[..self.len];
                work(x, block);
                F::store(block, out);
            }
        }
    }
}

/// Calls `work` with blocks of columns along a dimension that is not the last.
pub(super) fn each_columns<F: Format>(
    cx: &KernelCx<'_>,
    x: &Arg<'_>,
    lines: Lines,
    result: &mut ViewMut<'_>,
    work: impl Fn(&mut Columns<'_, '_, F>) + Sync,
) -> Result<(), KernelError> {
    let out = result.elements::<F::Stored>()?;
    if out.is_empty() {
        return Ok(());
    }
    let source = Source::<F>::new(x)?;
    in_parts(cx, lines.size * lines.inner, out, |start, out| {
        let size = lines.inner.min(BLOCK);
        let mut blocks = vec![F::widen(out[0]); 2 * size];
        let (reading, writing) = blocks.split_at_mut(size);
        for outer in (0..out.len()).step_by(lines.size * lines.inner) {
            for column in (0..lines.inner).step_by(size) {
                work(&mut Columns {
                    source: &source,
                    out,
                    start,
                    lines,
                    first: start + outer + column,
                    len: size.min(lines.inner - column),
                    blocks: (reading, writing),
                });
            }
        }
    });
    Ok(())
}
