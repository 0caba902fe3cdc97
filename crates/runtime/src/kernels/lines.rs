//! Ops along one dimension: rows where it is the last, else many columns next to each other.

use super::formats::Format;
use super::source::Source;
use super::{Arg, KernelCx, KernelError, ViewMut};

/// How a tensor lies around a dimension.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    /// Elements along the dimension.
    pub(super) size: usize,
    /// Elements from one of them to the next: those of the dimensions within.
    pub(super) inner: usize,
}

impl Lines {
    pub(super) fn new(shape: &[usize], dim: usize) -> Lines {
        Lines { size: shape[dim], inner: shape[dim + 1..].iter().product() }
    }
}

/// Threads take turns of about so many elements.
const PART: usize = 1 << 16;

/// Calls `work` with parts of a tensor, each some multiple of `unit` long, and where they begin.
fn in_parts<T: Send>(cx: &KernelCx<'_>, unit: usize, out: &mut [T], work: impl Fn(usize, &mut [T]) + Sync) {
    let part = (PART / unit).max(1) * unit;
    if cx.threads.count() > 1 && out.len() > part {
        let parts: Vec<(usize, &mut [T])> = out.chunks_mut(part).enumerate().collect();
        cx.threads.for_each(parts, |(i, out)| work(i * part, out));
    } else {
        work(0, out);
    }
}

/// Calls `work` with each row of the operand and of the result. Where there is no row of the operand, its elements are
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
                // An operand that lies where the result goes is there already.
                if from.is_none() && !matches!(source, Source::Result) {
                    source.copy(at, &[], row);
                }
                work(from, row);
            }
        }
    });
    Ok(())
}

/// Elements that are folded side by side: a loop over fewer is unrolled by the compiler before it can become vector
/// instructions. Then how many of them are folded into one at a time, and so many that the same again leaves as many.
const LANES: usize = 64;
const PARTS: usize = 4;
pub(super) const RUN: usize = PARTS * PARTS * LANES;

/// Folds `f` of up to `RUN` elements, in steps that do not wait for each other.
#[inline(always)]
pub(super) fn fold<C: Copy, T: Copy>(run: &[C], start: T, f: impl Fn(C) -> T, step: impl Fn(T, T) -> T) -> T {
    if run.len() < LANES {
        let mut total = start;
        for x in run {
            total = step(total, f(*x));
        }
        return total;
    }
    let mut totals = [start; PARTS * LANES];
    let (whole, rest) = run.as_chunks::<{ PARTS * LANES }>();
    for (total, chunk) in totals.as_chunks_mut().0.iter_mut().zip(whole) {
        fold_parts(chunk, total, &f, &step);
    }
    for (total, x) in totals.iter_mut().zip(rest) {
        *total = step(*total, f(*x));
    }
    let mut last = [start; LANES];
    fold_parts(&totals, &mut last, |x| x, &step);
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            last[i] = step(last[i], last[i + width]);
        }
    }
    last[0]
}

#[inline(always)]
fn fold_parts<C: Copy, T: Copy>(
    chunk: &[C; PARTS * LANES],
    totals: &mut [T; LANES],
    f: impl Fn(C) -> T,
    step: impl Fn(T, T) -> T,
) {
    for i in 0..LANES {
        let pair = |j: usize| step(f(chunk[j * LANES + i]), f(chunk[(j + 1) * LANES + i]));
        totals[i] = step(pair(0), pair(2));
    }
}

/// Replaces the elements of a row, or of the row of an operand, by `f` of them and of others.
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

/// Columns that are worked on together.
const BLOCK: usize = 512;

/// A block of columns: rows are read and written one by one.
pub(super) struct Columns<'a, 'b, F: Format> {
    source: &'a Source<'b, F>,
    out: &'a mut [F::Stored],
    /// Where `out` begins.
    start: usize,
    lines: Lines,
    first: usize,
    /// How many there are.
    pub(super) len: usize,
    blocks: (&'a mut [F::Compute], &'a mut [F::Compute]),
}

impl<F: Format> Columns<'_, '_, F> {
    /// How many rows there are.
    pub(super) fn rows(&self) -> usize {
        self.lines.size
    }

    /// Calls `work` with a row.
    pub(super) fn read(&mut self, row: usize, work: impl FnOnce(&[F::Compute])) {
        let at = self.first + row * self.lines.inner;
        let here = &self.out[at - self.start..at - self.start + self.len];
        work(self.source.run(at, self.len, here, self.blocks.0, false));
    }

    /// Calls `work` with a row and where its results go.
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
