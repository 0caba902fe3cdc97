//! The position of the largest or smallest element over dimensions.

use std::marker::PhantomData;

use consort_ir::ops::{self, OpDef};

use super::formats::{Format, by_format};
use super::isa::{Loop, vectorize};
use super::numbers::Number;
use super::operand::{attributes, only, view};
use super::reduce::{BLOCK, Fold, Max, Min, Plan, fold_run, in_parts, last};
use super::source::{Offsets, place, strided};
use super::{Arg, Kernel, KernelCx, KernelError, ViewMut};

/// The order for a maximum or minimum; a NaN precedes everything.
trait Extreme<C: Number>: Fold<C> {
    /// Whether `x` replaces `best`.
    fn better(best: C, x: C) -> bool;
}

impl<C: Number> Extreme<C> for Max {
    #[inline(always)]
    fn better(best: C, x: C) -> bool {
        x > best || x.is_not_a_number() && !best.is_not_a_number()
    }
}

impl<C: Number> Extreme<C> for Min {
    #[inline(always)]
    fn better(best: C, x: C) -> bool {
        x < best || x.is_not_a_number() && !best.is_not_a_number()
    }
}

fn find_places<O: Extreme<F::Compute>, F: Format<Compute: Number>>(
    cx: &KernelCx<'_>,
    dims: &[usize],
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let x = view(args, 0)?;
    let result = only(results)?;
    let out = result.elements::<i64>()?;
    let stored = x.elements::<F::Stored>()?;
    let plan = Plan::new(&x, dims);
    in_parts(cx, plan.count, out, |start, out| match plan.count {
        0 => out.fill(0),
        // `columns` counts rows in 32 bits.
        _ if plan.by_rows() || plan.count > u32::MAX as usize => rows::<O, F>(&plan, stored, start, out),
        _ => columns::<O, F>(&plan, stored, start, out),
    });
    Ok(())
}

/// Calls `work` with each run of the elements folded into one, and the index of its first, until it returns true.
pub(super) fn each_run<F: Format>(
    plan: &Plan,
    stored: &[F::Stored],
    first: usize,
    block: &mut [F::Compute],
    mut work: impl FnMut(usize, &[F::Compute]) -> bool,
) {
    let (inner, stride) = last(&plan.reduced);
    let mut starts = Offsets::new(&plan.reduced[..plan.reduced.len() - 1], 0);
    for i in 0..plan.count / inner {
        let row = first + starts.next_offset();
        for at in (0..inner).step_by(block.len()) {
            let len = block.len().min(inner - at);
            let run = strided::<F>(&stored[row + at * stride..], stride, len, block);
            if work(i * inner + at, run) {
                return;
            }
        }
    }
}

/// Finds the extreme first, then the first element equal to it. In the second pass the row is in the cache.
fn rows<O: Extreme<F::Compute>, F: Format<Compute: Number>>(
    plan: &Plan,
    stored: &[F::Stored],
    start: usize,
    out: &mut [i64],
) {
    let mut firsts = Offsets::new(&plan.kept, start);
    let mut block = vec![O::START; last(&plan.reduced).0.min(BLOCK)];
    for out in out {
        let first = firsts.next_offset();
        let mut best = O::START;
        each_run::<F>(plan, stored, first, &mut block, |_, run| {
            best = O::step(best, fold_run::<O, _>(run));
            false
        });
        each_run::<F>(plan, stored, first, &mut block, |at, run| {
            let found = vectorize(Search { run, best });
            *out = (at + found.unwrap_or(0)) as i64;
            found.is_some()
        });
    }
}

struct Search<'a, C> {
    run: &'a [C],
    best: C,
}

impl<C: Number> Loop for Search<'_, C> {
    type Output = Option<usize>;
    #[inline(always)]
    fn run(self) -> Option<usize> {
        let nan = self.best.is_not_a_number();
        let hit = |x: &C| *x == self.best || nan && x.is_not_a_number();
        // Tests a whole chunk for a match at once, which vectorises.
        let chunks = self.run.chunks(64).enumerate();
        let any = |chunk: &[C]| chunk.iter().fold(false, |any, x| any | hit(x));
        let (i, chunk) = chunks.into_iter().find(|(_, chunk)| any(chunk))?;
        chunk.iter().position(hit).map(|place| i * 64 + place)
    }
}

/// The best element of each column so far, row by row.
fn columns<O: Extreme<F::Compute>, F: Format<Compute: Number>>(
    plan: &Plan,
    stored: &[F::Stored],
    start: usize,
    out: &mut [i64],
) {
    let (width, stride) = last(&plan.kept);
    let outer = &plan.kept[..plan.kept.len() - 1];
    let size = width.min(BLOCK).min(out.len());
    let (mut best, mut block, mut places) = (vec![O::START; size], vec![O::START; size], vec![0; size]);
    let (mut at, mut rest) = (start, out);
    while !rest.is_empty() {
        let column = at % width;
        let len = rest.len().min(size).min(width - column);
        let (out, after) = rest.split_at_mut(len);
        let first = place(outer, at / width).0 + column * stride;
        let mut rows = Offsets::new(&plan.reduced, 0);
        for number in 0..plan.count {
            let from = &stored[first + rows.next_offset()..];
            let row = strided::<F>(from, stride, len, &mut block);
            if number == 0 {
                best[..len].copy_from_slice(row);
                places.fill(0);
            } else {
                let (best, places, number) = (&mut best[..len], &mut places[..len], number as u32);
                vectorize(TakeBetter::<O, _> { best, places, row, number, fold: PhantomData });
            }
        }
        out.iter_mut().zip(&places).for_each(|(out, place)| *out = i64::from(*place));
        (rest, at) = (after, at + len);
    }
}

struct TakeBetter<'a, O, C> {
    best: &'a mut [C],
    places: &'a mut [u32],
    row: &'a [C],
    number: u32,
    fold: PhantomData<O>,
}

impl<O: Extreme<C>, C: Number> Loop for TakeBetter<'_, O, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        for ((best, place), x) in self.best.iter_mut().zip(self.places).zip(self.row) {
            let better = O::better(*best, *x);
            *best = if better { *x } else { *best };
            *place = if better { self.number } else { *place };
        }
    }
}

fn numbers<O>(
    cx: &KernelCx<'_>,
    dims: &[usize],
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError>
where
    O: Extreme<f32> + Extreme<f64> + Extreme<i32> + Extreme<i64> + Extreme<u8>,
{
    by_format!(view(args, 0)?.dtype, F => find_places::<O, F>(cx, dims, args, results))
}

/// The kernels of this family.
pub(crate) static KERNELS: &[Kernel] = &[
    Kernel {
        op: "argmax",
        family: "places",
        in_place: false,
        strided: true,
        run: |cx, op: &dyn OpDef, args, results| {
            numbers::<Max>(cx, &attributes::<ops::Argmax>(op)?.dims, args, results)
        },
    },
    Kernel {
        op: "argmin",
        family: "places",
        in_place: false,
        strided: true,
        run: |cx, op: &dyn OpDef, args, results| {
            numbers::<Min>(cx, &attributes::<ops::Argmin>(op)?.dims, args, results)
        },
    },
];
