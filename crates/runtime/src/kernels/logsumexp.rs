//! The logarithm of the sum of exponentials over dimensions: first the maximum, then the exponentials of the
//! differences from it.

use consort_ir::ops::{self, OpDef};

use super::argmax::each_run;
use super::formats::{Format, by_format};
use super::isa::{Loop, vectorize};
use super::lines::fold;
use super::numbers::{Number, Real};
use super::operand::{attributes, only, view};
use super::reduce::{BLOCK, Plan, in_parts, last};
use super::softmax::{AddPowers, Largest, larger, sum_of_powers};
use super::source::{Offsets, place, strided};
use super::{Arg, Kernel, KernelCx, KernelError, ViewMut};

struct LargestOf<'a, C>(&'a [C]);

impl<C: Real> Loop for LargestOf<'_, C> {
    type Output = C;
    #[inline(always)]
    fn run(self) -> C {
        fold(self.0, C::LOWEST, |x| x, larger)
    }
}

struct SumOfPowers<'a, C> {
    run: &'a [C],
    shift: C,
}

impl<C: Real> Loop for SumOfPowers<'_, C> {
    type Output = C;
    #[inline(always)]
    fn run(self) -> C {
        sum_of_powers(self.run, self.shift)
    }
}

/// The subtrahend. Subtracting an infinity would turn infinite elements into NaN.
fn shift<C: Real>(largest: C) -> C {
    if largest > C::LOWEST && largest < C::HIGHEST { largest } else { C::ZERO }
}

fn end<C: Real>(sum: C, shift: C) -> C {
    C::nearest(sum.wide().ln() + shift.wide())
}

/// The result if the maximum is infinite.
fn infinite<F: Format<Compute: Real>>(plan: &Plan, stored: &[F::Stored], first: usize) -> F::Compute {
    let mut places = Offsets::new(&plan.reduced, 0);
    let mut elements = (0..plan.count).map(|_| F::widen(stored[first + places.next_offset()]));
    elements.find(|x| x.is_not_a_number()).unwrap_or(F::Compute::HIGHEST)
}

fn rows<F: Format<Compute: Real>>(plan: &Plan, stored: &[F::Stored], start: usize, out: &mut [F::Stored]) {
    let mut firsts = Offsets::new(&plan.kept, start);
    let mut block = vec![F::Compute::ZERO; last(&plan.reduced).0.min(BLOCK)];
    for out in out.chunks_mut(1) {
        let first = firsts.next_offset();
        let mut largest = F::Compute::LOWEST;
        each_run::<F>(plan, stored, first, &mut block, |_, run| {
            largest = larger(largest, vectorize(LargestOf(run)));
            false
        });
        if largest == F::Compute::HIGHEST {
            F::store(&[infinite::<F>(plan, stored, first)], out);
            continue;
        }
        let (mut sum, shift) = (F::Compute::ZERO, shift(largest));
        each_run::<F>(plan, stored, first, &mut block, |_, run| {
            sum = sum.plus(vectorize(SumOfPowers { run, shift }));
            false
        });
        F::store(&[end(sum, shift)], out);
    }
}

/// A block of columns at a time, row by row.
fn columns<F: Format<Compute: Real>>(plan: &Plan, stored: &[F::Stored], start: usize, out: &mut [F::Stored]) {
    let (width, stride) = last(&plan.kept);
    let outer = &plan.kept[..plan.kept.len() - 1];
    let size = width.min(BLOCK).min(out.len());
    let [mut largest, mut sums, mut block] = [(); 3].map(|()| vec![F::Compute::ZERO; size]);
    let (mut at, mut rest) = (start, out);
    while !rest.is_empty() {
        let column = at % width;
        let len = rest.len().min(size).min(width - column);
        let (out, after) = rest.split_at_mut(len);
        let first = place(outer, at / width).0 + column * stride;
        let (largest, sums) = (&mut largest[..len], &mut sums[..len]);
        largest.fill(F::Compute::LOWEST);
        sums.fill(F::Compute::ZERO);
        let mut rows = Offsets::new(&plan.reduced, 0);
        for _ in 0..plan.count {
            let row = strided::<F>(&stored[first + rows.next_offset()..], stride, len, &mut block);
            vectorize(Largest(largest, row));
        }
        let endless: Vec<usize> = (0..len).filter(|i| largest[*i] == F::Compute::HIGHEST).collect();
        largest.iter_mut().for_each(|largest| *largest = shift(*largest));
        for _ in 0..plan.count {
            let row = strided::<F>(&stored[first + rows.next_offset()..], stride, len, &mut block);
            vectorize(AddPowers { sums, largest, row });
        }
        sums.iter_mut().zip(&*largest).for_each(|(sum, shift)| *sum = end(*sum, *shift));
        endless.into_iter().for_each(|i| sums[i] = infinite::<F>(plan, stored, first + i * stride));
        F::store(sums, out);
        (rest, at) = (after, at + len);
    }
}

fn logsumexp<F: Format<Compute: Real>>(
    cx: &KernelCx<'_>,
    dims: &[usize],
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let x = view(args, 0)?;
    let result = only(results)?;
    let (out, stored) = (result.elements::<F::Stored>()?, x.elements::<F::Stored>()?);
    let plan = Plan::new(&x, dims);
    if plan.count == 0 {
        return Err(KernelError::new("expected at least one element to sum up"));
    }
    in_parts(cx, plan.count, out, |start, out| {
        if plan.by_rows() {
            rows::<F>(&plan, stored, start, out)
        } else {
            columns::<F>(&plan, stored, start, out)
        }
    });
    Ok(())
}

fn run(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let dims = &attributes::<ops::Logsumexp>(op)?.dims;
    by_format!(view(args, 0)?.dtype, floats F => logsumexp::<F>(cx, dims, args, results))
}

/// The kernels of this family.
pub(crate) static KERNELS: &[Kernel] =
    &[Kernel { op: "logsumexp", family: "logsumexp", in_place: false, strided: true, run }];
