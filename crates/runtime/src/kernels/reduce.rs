//! Reductions over dimensions.
//!
//! Kept and reduced dimensions are coalesced separately. If the reduced ones have the smallest strides, each element of
//! the result folds rows; otherwise whole rows are folded elementwise. The order depends on sizes and strides alone:
//! many partial results keep rounding errors small, and they are the same for any number of threads.

use std::array;

use consort_ir::ops::{self, OpDef};
use consort_types::layout::Dims;

use super::formats::{Format, U8, by_format};
use super::isa::{Loop, vectorize};
use super::numbers::{Number, Real};
use super::operand::{attributes, only, view};
use super::source::{Offsets, Steps, coalesce, place, strided};
use super::{Arg, Kernel, KernelCx, KernelError, View, ViewMut};

/// A fold of elements into one.
pub(super) trait Fold<C: Copy> {
    /// The identity of the fold.
    const START: C;
    /// Folds in an element, or another partial result.
    fn step(total: C, x: C) -> C;
    /// The result from the fold of `count` elements.
    #[inline(always)]
    fn finish(total: C, _count: usize) -> C {
        total
    }
}

struct Sum;
struct Mean;
pub(super) struct Max;
pub(super) struct Min;
struct Prod;
struct Any;
struct All;

impl<C: Number> Fold<C> for Sum {
    const START: C = C::NOTHING;
    #[inline(always)]
    fn step(total: C, x: C) -> C {
        total.plus(x)
    }
    #[inline(always)]
    fn finish(total: C, count: usize) -> C {
        if count == 0 { C::ZERO } else { total }
    }
}

macro_rules! mean {
    ($($ty:ty)*) => {$(
        impl Fold<$ty> for Mean {
            const START: $ty = 0.0;
            #[inline(always)]
            fn step(total: $ty, x: $ty) -> $ty {
                total + x
            }
            #[inline(always)]
            fn finish(total: $ty, count: usize) -> $ty {
                total / count as $ty
            }
        }
    )*};
}
mean!(f32 f64);

impl<C: Number> Fold<C> for Max {
    const START: C = C::LOWEST;
    #[inline(always)]
    fn step(total: C, x: C) -> C {
        total.larger_of(x)
    }
}

impl<C: Number> Fold<C> for Min {
    const START: C = C::HIGHEST;
    #[inline(always)]
    fn step(total: C, x: C) -> C {
        total.smaller_of(x)
    }
}

impl<C: Number> Fold<C> for Prod {
    const START: C = C::ONE;
    #[inline(always)]
    fn step(total: C, x: C) -> C {
        total.times(x)
    }
}

impl Fold<u8> for Any {
    const START: u8 = 0;
    #[inline(always)]
    fn step(total: u8, x: u8) -> u8 {
        total | x
    }
}

impl Fold<u8> for All {
    const START: u8 = 1;
    #[inline(always)]
    fn step(total: u8, x: u8) -> u8 {
        total & x
    }
}

/// Partial results per run, one per lane.
const LANES: usize = 64;

/// Rows that are folded in parallel: the prefetcher handles a few streams better than one.
const OPEN: usize = 4;

/// Elements of a row that are folded before switching to the next row.
const TURN: usize = 4 * LANES;

/// Folds a whole number of vectors of `LANES` elements into partial results.
struct FoldTurn<'a, O, C> {
    lanes: &'a mut [C; LANES],
    run: &'a [C],
    fold: std::marker::PhantomData<O>,
}

impl<O: Fold<C>, C: Copy> Loop for FoldTurn<'_, O, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let mut lanes = *self.lanes;
        for chunk in self.run.as_chunks::<LANES>().0 {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = O::step(*lane, *x);
            }
        }
        *self.lanes = lanes;
    }
}

/// Folds the tail of a run into the partial results of its other elements, then folds the partial results.
struct FoldRun<'a, O, C> {
    lanes: [C; LANES],
    run: &'a [C],
    /// The length of the whole run.
    len: usize,
    fold: std::marker::PhantomData<O>,
}

impl<O: Fold<C>, C: Copy> Loop for FoldRun<'_, O, C> {
    type Output = C;
    #[inline(always)]
    fn run(self) -> C {
        let mut lanes = self.lanes;
        let (chunks, rest) = self.run.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = O::step(*lane, *x);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = O::step(*lane, *x);
        }
        if self.len < LANES {
            return fold_first::<O, C>(lanes, self.len);
        }
        halve::<O, C, 32>(&mut lanes);
        halve::<O, C, 16>(&mut lanes);
        halve::<O, C, 8>(&mut lanes);
        halve::<O, C, 4>(&mut lanes);
        halve::<O, C, 2>(&mut lanes);
        halve::<O, C, 1>(&mut lanes);
        lanes[0]
    }
}

/// Folds a run of elements.
pub(super) fn fold_run<O: Fold<C>, C: Copy>(run: &[C]) -> C {
    vectorize(FoldRun::<O, C> {
        lanes: [O::START; LANES],
        run,
        len: run.len(),
        fold: std::marker::PhantomData,
    })
}

/// Folds runs of equal length separately, interleaved in turns.
fn fold_runs<O: Fold<C>, C: Copy>(runs: [&[C]; OPEN]) -> [C; OPEN] {
    let fold = std::marker::PhantomData::<O>;
    let mut lanes = [[O::START; LANES]; OPEN];
    let len = runs[0].len();
    let last = len.saturating_sub(1) / TURN * TURN;
    for at in (0..last).step_by(TURN) {
        for (lanes, run) in lanes.iter_mut().zip(runs) {
            vectorize(FoldTurn { lanes, run: &run[at..at + TURN], fold });
        }
    }
    array::from_fn(|i| vectorize(FoldRun { lanes: lanes[i], run: &runs[i][last..], len, fold }))
}

/// Folds the upper half of the lanes into the lower half. The width is a constant, so that lanes stay in registers:
/// through memory, each step would stall on earlier stores.
#[inline(always)]
fn halve<O: Fold<C>, C: Copy, const WIDTH: usize>(lanes: &mut [C; LANES]) {
    for i in 0..WIDTH {
        lanes[i] = O::step(lanes[i], lanes[i + WIDTH]);
    }
}

/// Folds the first `len` lanes, fewer than `LANES`, by halving.
fn fold_first<O: Fold<C>, C: Copy>(mut lanes: [C; LANES], len: usize) -> C {
    let mut width = len.next_power_of_two();
    while width > 1 {
        width /= 2;
        let (low, high) = lanes.split_at_mut(width);
        for (low, high) in low.iter_mut().zip(high) {
            *low = O::step(*low, *high);
        }
    }
    lanes[0]
}

/// Folds a row into `totals`, element by element.
struct FoldRow<'a, O, C> {
    totals: &'a mut [C],
    row: &'a [C],
    fold: std::marker::PhantomData<O>,
}

fn fold_row<O: Fold<C>, C: Copy>(totals: &mut [C], row: &[C]) {
    vectorize(FoldRow::<O, C> { totals, row, fold: std::marker::PhantomData });
}

impl<O: Fold<C>, C: Copy> Loop for FoldRow<'_, O, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        for (total, x) in self.totals.iter_mut().zip(self.row) {
            *total = O::step(*total, *x);
        }
    }
}

/// The layout of a reduction.
pub(super) struct Plan {
    /// The dimensions of the result.
    pub(super) kept: Steps,
    /// The dimensions that are folded.
    pub(super) reduced: Steps,
    /// The number of elements folded into one.
    pub(super) count: usize,
}

impl Plan {
    pub(super) fn new(x: &View<'_>, dims: &[usize]) -> Plan {
        let side = |reduced: bool| -> (Dims, Dims) {
            let chosen = (0..x.shape.len()).filter(|dim| dims.contains(dim) == reduced);
            chosen.map(|dim| (x.shape[dim], x.strides[dim])).unzip()
        };
        let ((kept, kept_strides), (reduced, strides)) = (side(false), side(true));
        Plan {
            kept: coalesce(&kept, &kept_strides),
            reduced: coalesce(&reduced, &strides),
            count: reduced.iter().product(),
        }
    }

    /// Whether each element of the result folds rows; otherwise rows are folded elementwise.
    pub(super) fn by_rows(&self) -> bool {
        let (size, stride) = last(&self.reduced);
        let (width, kept_stride) = last(&self.kept);
        width == 1 || size >= 16 && (stride <= kept_stride || kept_stride == 0)
    }
}

/// The innermost dimension.
pub(super) fn last(steps: &Steps) -> (usize, usize) {
    steps.last().copied().unwrap_or((1, 1))
}

/// Elements of a block.
pub(super) const BLOCK: usize = 1024;

/// Elements of a run that are folded into one partial result.
const RUN: usize = 4096;

/// Runs, and rows, that are folded into one partial result.
const RUNS: usize = 64;
const ROWS: usize = 64;

/// Approximate number of elements per thread task.
const PART: usize = 1 << 16;

/// Calls `work` with parts of a result, on several threads if there is enough work.
pub(super) fn in_parts<T: Send>(
    cx: &KernelCx<'_>,
    count: usize,
    out: &mut [T],
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    let part = (PART / count.max(1)).max(1);
    if cx.threads.count() > 1 && out.len() > part {
        let parts: Vec<(usize, &mut [T])> = out.chunks_mut(part).enumerate().collect();
        cx.threads.for_each(parts, |(i, out)| work(i * part, out));
    } else {
        work(0, out);
    }
}

fn reduce<O: Fold<F::Compute>, F: Format>(
    cx: &KernelCx<'_>,
    dims: &[usize],
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let x = view(args, 0)?;
    let result = only(results)?;
    let out = result.elements::<F::Stored>()?;
    let stored = x.elements::<F::Stored>()?;
    // A single run needs no plan, which would take longer than folding a short run.
    if let ([_], 1..=RUN, true) = (&*out, stored.len(), x.is_contiguous())
        && let Some(run) = F::borrow(stored)
    {
        F::store(&[O::finish(fold_run::<O, _>(run), run.len())], out);
        return Ok(());
    }
    let plan = Plan::new(&x, dims);
    in_parts(cx, plan.count, out, |start, out| match plan.count {
        0 => out.chunks_mut(1).for_each(|out| F::store(&[O::finish(O::START, 0)], out)),
        _ if plan.by_rows() => rows::<O, F>(&plan, stored, start, out),
        _ => columns::<O, F>(&plan, stored, start, out),
    });
    Ok(())
}

/// Each element of the result folds its rows.
fn rows<O: Fold<F::Compute>, F: Format>(
    plan: &Plan,
    stored: &[F::Stored],
    start: usize,
    out: &mut [F::Stored],
) {
    let (inner, stride) = last(&plan.reduced);
    let outer = &plan.reduced[..plan.reduced.len() - 1];
    // Elements that cannot be borrowed are copied in blocks, which then are the runs.
    let borrowed = stride == 1 && F::borrow(&stored[..0]).is_some();
    let most = if borrowed { RUN } else { inner.min(BLOCK) };
    let mut block = vec![O::START; if borrowed { 0 } else { most }];
    let apart = if borrowed && outer.is_empty() && inner <= RUN { out.len() / OPEN } else { 0 };
    if apart > 0 {
        let mut firsts: [_; OPEN] = array::from_fn(|i| Offsets::new(&plan.kept, start + i * apart));
        for at in 0..apart {
            let mut runs = [&[][..]; OPEN];
            for (run, first) in runs.iter_mut().zip(&mut firsts) {
                *run = strided::<F>(&stored[first.next_offset()..], 1, inner, &mut []);
            }
            for (i, total) in fold_runs::<O, _>(runs).into_iter().enumerate() {
                let total = O::step(O::START, O::step(O::START, total));
                F::store(&[O::finish(total, inner)], &mut out[i * apart + at..][..1]);
            }
        }
    }
    let (_, out) = out.split_at_mut(OPEN * apart);
    let mut firsts = Offsets::new(&plan.kept, start + OPEN * apart);
    for out in out.chunks_mut(1) {
        let first = firsts.next_offset();
        let mut starts = Offsets::new(outer, 0);
        // Runs are folded in two levels, so that no partial result takes too many sequential steps.
        let (mut total, mut some, mut runs) = (O::START, O::START, 0);
        for _ in 0..plan.count / inner {
            let row = first + starts.next_offset();
            for at in (0..inner).step_by(most) {
                let len = most.min(inner - at);
                let run = strided::<F>(&stored[row + at * stride..], stride, len, &mut block);
                some = O::step(some, fold_run::<O, _>(run));
                runs += 1;
                if runs % RUNS == 0 {
                    (total, some) = (O::step(total, some), O::START);
                }
            }
        }
        F::store(&[O::finish(O::step(total, some), plan.count)], out);
    }
}

/// Rows are folded elementwise, one block of the result at a time.
fn columns<O: Fold<F::Compute>, F: Format>(
    plan: &Plan,
    stored: &[F::Stored],
    start: usize,
    out: &mut [F::Stored],
) {
    let (width, stride) = last(&plan.kept);
    let outer = &plan.kept[..plan.kept.len() - 1];
    let size = width.min(BLOCK).min(out.len());
    let mut blocks = vec![O::START; 4 * size];
    let (totals, blocks) = blocks.split_at_mut(size);
    let (many, blocks) = blocks.split_at_mut(size);
    let (some, block) = blocks.split_at_mut(size);
    let (mut at, mut rest) = (start, out);
    while !rest.is_empty() {
        let column = at % width;
        let len = rest.len().min(size).min(width - column);
        let (out, after) = rest.split_at_mut(len);
        let first = place(outer, at / width).0 + column * stride;
        let (totals, many, some) = (&mut totals[..len], &mut many[..len], &mut some[..len]);
        totals.fill(O::START);
        let mut rows = Offsets::new(&plan.reduced, 0);
        // Rows are folded in levels, so that no partial result takes too many sequential steps.
        for begin in (0..plan.count).step_by(ROWS * ROWS) {
            many.fill(O::START);
            for begin in (begin..plan.count.min(begin + ROWS * ROWS)).step_by(ROWS) {
                some.fill(O::START);
                for _ in begin..plan.count.min(begin + ROWS) {
                    let from = &stored[first + rows.next_offset()..];
                    fold_row::<O, _>(some, strided::<F>(from, stride, len, block));
                }
                fold_row::<O, _>(many, some);
            }
            fold_row::<O, _>(totals, many);
        }
        totals.iter_mut().for_each(|total| *total = O::finish(*total, plan.count));
        F::store(totals, out);
        (rest, at) = (after, at + len);
    }
}

fn floats<O: Fold<f32> + Fold<f64>>(
    cx: &KernelCx<'_>,
    dims: &[usize],
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    by_format!(view(args, 0)?.dtype, floats F => reduce::<O, F>(cx, dims, args, results))
}

fn numbers<O: Fold<f32> + Fold<f64> + Fold<i32> + Fold<i64> + Fold<u8>>(
    cx: &KernelCx<'_>,
    dims: &[usize],
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    by_format!(view(args, 0)?.dtype, F => reduce::<O, F>(cx, dims, args, results))
}

fn truths<O: Fold<u8>>(
    cx: &KernelCx<'_>,
    dims: &[usize],
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    reduce::<O, U8>(cx, dims, args, results)
}

/// Products of floats, in order and in `f64`: partial products could overflow although the result does not.
fn products<F: Format<Compute: Real>>(
    cx: &KernelCx<'_>,
    dims: &[usize],
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let x = view(args, 0)?;
    let result = only(results)?;
    let (out, stored) = (result.elements::<F::Stored>()?, x.elements::<F::Stored>()?);
    let plan = Plan::new(&x, dims);
    in_parts(cx, plan.count, out, |start, out| {
        let mut firsts = Offsets::new(&plan.kept, start);
        for out in out.chunks_mut(1) {
            let first = firsts.next_offset();
            let mut places = Offsets::new(&plan.reduced, 0);
            let step = |product: f64, _| product * F::widen(stored[first + places.next_offset()]).wide();
            F::store(&[Real::nearest((0..plan.count).fold(1.0, step))], out);
        }
    });
    Ok(())
}

fn prod(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let dims = &attributes::<ops::Prod>(op)?.dims;
    match view(args, 0)?.dtype {
        dtype if dtype.is_float() => by_format!(dtype, floats F => products::<F>(cx, dims, args, results)),
        dtype => by_format!(dtype, ints F => reduce::<Prod, F>(cx, dims, args, results)),
    }
}

/// Declares kernels that read the dimensions from their op.
macro_rules! kernels {
    ($($name:literal $op:ident $types:ident;)*) => {
        /// The kernels of this family.
        pub(crate) static KERNELS: &[Kernel] = &[Kernel { op: "prod", family: "reduce", in_place: false, strided: true, run: prod }, $(Kernel {
            op: $name,
            family: "reduce",
            in_place: false, strided: true,
            run: |cx, op: &dyn OpDef, args, results| {
                $types::<$op>(cx, &attributes::<ops::$op>(op)?.dims, args, results)
            },
        }),*];
    };
}

kernels! {
    "sum" Sum numbers;
    "mean" Mean floats;
    "max" Max numbers;
    "min" Min numbers;
    "any" Any truths;
    "all" All truths;
}
