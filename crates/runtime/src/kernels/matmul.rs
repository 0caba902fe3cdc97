//! `matmul`: f32 and f64 by the `gemm` crates, 16-bit floats in blocks widened to f32 for it, integers and products with
//! few rows or columns by our own loops.

use consort_ir::ops::OpDef;
use consort_types::Dtype;
use half::{bf16, f16};

use crate::kernels::element::{Element, Wide};
use crate::kernels::gemm::{Gemm, Mat, MatMut, gemm};
use crate::kernels::scratch::with_scratch;
use crate::kernels::skinny::{MAX_VECTORS, blocks, gather, skinny, skinny_rows, widen};
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, View, ViewMut};

pub(crate) static KERNELS: &[Kernel] =
    &[Kernel { op: "matmul", family: "matmul", in_place: false, strided: true, run }];

/// Rows, columns and depth of a block of 16-bit floats: with the sums it fills half of an L2 cache.
const BLOCK: [usize; 3] = [256, 256, 256];

/// Multiplications that justify a thread.
const PIECE: usize = 1 << 20;

/// The maximum number of pieces per matrix.
const MAX_PIECES: usize = 16;

/// Multiplies two matrices.
type Product<E> = fn(MatMut<'_, E>, Mat<'_, E>, Mat<'_, E>);

fn run(
    cx: &KernelCx<'_>,
    _op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let ([Arg::View(x), Arg::View(y)], [out]) = (args, results) else {
        return Err(KernelError::new("expected two operands that lie apart from the result"));
    };
    match x.dtype {
        Dtype::F32 => products::<f32>(cx, x, y, out, multiply_wide),
        Dtype::F64 => products::<f64>(cx, x, y, out, multiply_wide),
        Dtype::F16 => products::<f16>(cx, x, y, out, multiply_narrow),
        Dtype::Bf16 => products::<bf16>(cx, x, y, out, multiply_narrow),
        Dtype::I32 => products::<i32>(cx, x, y, out, skinny_rows),
        Dtype::I64 => products::<i64>(cx, x, y, out, skinny_rows),
        Dtype::U8 => products::<u8>(cx, x, y, out, skinny_rows),
        Dtype::Bool => Err(KernelError::new(("a float or integer type", "bool"))),
    }
}

/// All products of a batch.
fn products<E: Element>(
    cx: &KernelCx<'_>,
    x: &View<'_>,
    y: &View<'_>,
    out: &mut ViewMut<'_>,
    product: Product<E>,
) -> Result<(), KernelError> {
    let (Some((xs, &[m, k])), Some(&[.., n])) = (x.shape.split_last_chunk::<2>(), y.shape.last_chunk::<2>())
    else {
        return Err(KernelError::new("expected at least two dimensions"));
    };
    let (x_strides, x_rs, x_cs) = split(x.strides);
    let (y_strides, y_rs, y_cs) = split(y.strides);
    let (xe, ye) = (x.elements::<E>()?, y.elements::<E>()?);
    let out = out.elements::<E>()?;
    if out.is_empty() {
        return Ok(());
    }
    // A shared y: the batch is one matrix product if the rows of x are evenly spaced.
    let one_y = y_strides.iter().zip(xs).all(|(stride, size)| *stride == 0 || *size == 1);
    let even = if one_y { even_rows(x.shape, x.strides) } else { None };
    let (xs, m, x_rs) = match even {
        Some(stride) => (&[][..], out.len() / n, stride),
        None => (xs, m, x_rs),
    };
    let matrices = |i: usize| {
        let x_at = offset(i, xs, x_strides).min(xe.len());
        let y_at = offset(i, xs, y_strides).min(ye.len());
        (Mat::new(&xe[x_at..], [m, k], [x_rs, x_cs]), Mat::new(&ye[y_at..], [k, n], [y_rs, y_cs]))
    };
    let outs = out.chunks_exact_mut(m * n).enumerate();
    if cx.threads.count() == 1 {
        outs.for_each(|(i, out)| {
            let (x, y) = matrices(i);
            product(MatMut::new(out, [m, n], n), x, y);
        });
        return Ok(());
    }
    let work = m.saturating_mul(n).saturating_mul(k);
    if work < PIECE {
        // Small matrices are grouped into thread tasks.
        let run = (PIECE / work.max(1)).clamp(1, out.len());
        let parts = out.chunks_mut(run.saturating_mul(m * n)).enumerate().collect();
        cx.threads.for_each(parts, |(part, outs)| {
            for (i, out) in outs.chunks_exact_mut(m * n).enumerate() {
                let (x, y) = matrices(part * run + i);
                product(MatMut::new(out, [m, n], n), x, y);
            }
        });
        return Ok(());
    }
    let mut parts = Vec::new();
    for (i, out) in outs {
        let (x, y) = matrices(i);
        cut(MatMut::new(out, [m, n], n), x, y, work, &mut parts);
    }
    cx.threads.for_each(parts, |(out, x, y)| product(out, x, y));
    Ok(())
}

/// The strides of leading dimensions, of rows and of columns.
fn split(strides: &[usize]) -> (&[usize], usize, usize) {
    match strides.split_last_chunk::<2>() {
        Some((leading, [rs, cs])) => (leading, *rs, *cs),
        None => (&[], 0, 0),
    }
}

/// The offset of matrix `i` of a batch. A 2-d operand has no strides here, so its offset is 0.
fn offset(i: usize, shape: &[usize], strides: &[usize]) -> usize {
    let (mut rest, mut at) = (i, 0);
    for (size, stride) in shape.iter().zip(strides).rev() {
        at += rest % size * stride;
        rest /= size;
    }
    at
}

/// The row stride if all rows of a batch are evenly spaced; ignores the last dimension.
fn even_rows(shape: &[usize], strides: &[usize]) -> Option<usize> {
    let rows = shape.len() - 1;
    let mut even: Option<(usize, usize)> = None;
    for (size, stride) in shape[..rows].iter().zip(&strides[..rows]).rev().filter(|(size, _)| **size != 1) {
        even = match even {
            None => Some((*stride, stride * size)),
            Some((first, next)) if *stride == next => Some((first, stride * size)),
            Some(_) => return None,
        };
    }
    Some(even.map_or(0, |(first, _)| first))
}

/// Splits a product along the longer side of its result. The pieces depend on sizes only.
fn cut<'a, E: Element>(
    out: MatMut<'a, E>,
    x: Mat<'a, E>,
    y: Mat<'a, E>,
    work: usize,
    parts: &mut Vec<(MatMut<'a, E>, Mat<'a, E>, Mat<'a, E>)>,
) {
    if out.cols > out.rows {
        let first = parts.len();
        cut(out.t(), y.t(), x.t(), work, parts);
        for part in parts.drain(first..).collect::<Vec<_>>() {
            parts.push((part.0.t(), part.2.t(), part.1.t()));
        }
        return;
    }
    let pieces = (work / PIECE).clamp(1, MAX_PIECES);
    // A multiple of 64, so that `gemm` works on every piece as it does on the whole.
    let step = out.rows.div_ceil(pieces).next_multiple_of(64);
    let (mut rest, mut row) = (out, 0);
    while rest.rows > 0 {
        let count = step.min(rest.rows);
        let (piece, below) = rest.split_rows(count);
        parts.push((piece, x.part(row..row + count, 0..x.cols), y));
        (rest, row) = (below, row + count);
    }
}

/// Computes a product with few rows or few columns; false if it has many of both.
fn multiply_few<E: Element>(out: &mut MatMut<'_, E>, x: Mat<'_, E>, y: Mat<'_, E>) -> bool {
    if x.rows <= MAX_VECTORS {
        skinny(out.reborrow(), x, y);
        return true;
    }
    if y.cols <= MAX_VECTORS {
        skinny(out.reborrow().t(), y.t(), x.t());
        return true;
    }
    false
}

fn multiply_wide<E: Gemm>(mut out: MatMut<'_, E>, x: Mat<'_, E>, y: Mat<'_, E>) {
    // For two to four rows `gemm` is as fast, if the rows of y are contiguous.
    if (x.rows == 1 || y.cs != 1) && multiply_few(&mut out, x, y) {
        return;
    }
    if y.cs == 1 || x.cols == 0 {
        return gemm(out, false, x, y, E::ONE);
    }
    // `gemm` packs columns with a power-of-two stride several times slower than the transposition here.
    let [_, cols, depth] = BLOCK;
    with_scratch(depth * cols, |block: &mut [E]| {
        for j in blocks(y.cols, cols) {
            for l in blocks(x.cols, depth) {
                let size = [l.len(), j.len()];
                gather(y.part(l.clone(), j.clone()), &mut block[..size[0] * size[1]]);
                let (x, y) = (x.part(0..x.rows, l.clone()), Mat::new(block, size, [size[1], 1]));
                gemm(out.reborrow().cols(j.clone()), l.start > 0, x, y, E::ONE);
            }
        }
    });
}

/// Blocks are widened, multiplied and accumulated in `f32`, and rounded once.
fn multiply_narrow<E>(mut out: MatMut<'_, E>, x: Mat<'_, E>, y: Mat<'_, E>)
where
    E: Element,
    E::Wide: Gemm,
{
    if multiply_few(&mut out, x, y) {
        return;
    }
    let [rows, cols, depth] = [x.rows.min(BLOCK[0]), y.cols.min(BLOCK[1]), x.cols.min(BLOCK[2])];
    with_scratch(rows * cols + rows * depth + depth * cols, |scratch: &mut [E::Wide]| {
        let (sums, scratch) = scratch.split_at_mut(rows * cols);
        let (xs, ys) = scratch.split_at_mut(rows * depth);
        for j in blocks(y.cols, cols) {
            for i in blocks(x.rows, rows) {
                let size = [i.len(), j.len()];
                let sums = &mut sums[..size[0] * size[1]];
                sums.fill(E::Wide::ZERO);
                for l in blocks(x.cols, depth) {
                    let x = widen(x.part(i.clone(), l.clone()), xs);
                    let y = widen(y.part(l.clone(), j.clone()), ys);
                    gemm(MatMut::new(sums, size, size[1]), l.start > 0, x, y, E::Wide::ONE);
                }
                for (row, sums) in i.zip(sums.chunks_exact(size[1])) {
                    out.put(row, j.start, sums);
                }
            }
        }
    });
}
