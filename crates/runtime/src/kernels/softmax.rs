//! Softmax along a dimension. A row is read from memory once: its maximum, powers with their sum, the quotients.

use std::marker::PhantomData;

use consort_ir::dtype::Dtype;
use consort_ir::ops::{self, OpDef};

use super::formats::{Bf16, F16, F32, F64, Format};
use super::isa::{Loop, vectorize};
use super::lines::{Lines, each_columns, each_row};
use super::numbers::Real;
use super::operand::attributes;
use super::{Arg, Kernel, KernelCx, KernelError, ViewMut};

/// What becomes of x less the maximum, and of its power, when the sum of the powers is known.
trait Ending {
    /// Whether the result is made of the power and not of x.
    const POWERS: bool;
    /// What all elements of a line are combined with.
    fn factor<C: Real>(sum: C) -> C;
    /// The result.
    fn result<C: Real>(x: C, factor: C) -> C;
}

/// The powers over their sum.
struct Quotient;

impl Ending for Quotient {
    const POWERS: bool = true;
    #[inline(always)]
    fn factor<C: Real>(sum: C) -> C {
        C::nearest(1.0 / sum.wide())
    }
    #[inline(always)]
    fn result<C: Real>(x: C, factor: C) -> C {
        x.times(factor)
    }
}

/// x less the logarithm of the sum.
struct Difference;

impl Ending for Difference {
    const POWERS: bool = false;
    #[inline(always)]
    fn factor<C: Real>(sum: C) -> C {
        C::nearest(sum.wide().ln())
    }
    #[inline(always)]
    fn result<C: Real>(x: C, factor: C) -> C {
        x.minus(factor)
    }
}

/// Partial sums of a row, and elements that are computed together.
const LANES: usize = 32;

/// Elements whose powers are summed up before they are added to the sum of others.
const RUN: usize = 1024;

/// The larger of two, where it does not matter which of a NaN and a number comes out: the sum will be NaN.
#[inline(always)]
fn larger<C: Real>(x: C, y: C) -> C {
    if x > y { x } else { y }
}

struct Row<'a, C, E>(&'a mut [C], PhantomData<E>);

impl<C: Real, E: Ending> Loop for Row<'_, C, E> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let row = self.0;
        let mut lanes = [C::LOWEST; 2 * LANES];
        let (chunks, rest) = row.as_chunks::<{ 2 * LANES }>();
        for chunk in chunks {
            for i in 0..2 * LANES {
                lanes[i] = larger(chunk[i], lanes[i]);
            }
        }
        lanes.iter_mut().zip(rest).for_each(|(lane, x)| *lane = larger(*x, *lane));
        let largest = lanes.into_iter().fold(C::LOWEST, |a, x| larger(x, a));
        let mut sum = C::ZERO;
        for run in row.chunks_mut(RUN) {
            let mut lanes = [C::ZERO; LANES];
            let (chunks, rest) = run.as_chunks_mut::<LANES>();
            for chunk in chunks {
                powers::<C, E>(chunk, &mut lanes, largest);
            }
            if !rest.is_empty() {
                let mut chunk = [C::LOWEST; LANES];
                chunk[..rest.len()].copy_from_slice(rest);
                powers::<C, E>(&mut chunk, &mut lanes, largest);
                rest.copy_from_slice(&chunk[..rest.len()]);
            }
            let mut width = LANES;
            while width > 1 {
                width /= 2;
                for i in 0..width {
                    lanes[i] = lanes[i].plus(lanes[i + width]);
                }
            }
            sum = sum.plus(lanes[0]);
        }
        let factor = E::factor(sum);
        for x in row {
            *x = E::result(*x, factor);
        }
    }
}

/// Replaces elements by what the ending needs, and adds their powers to sums.
#[inline(always)]
fn powers<C: Real, E: Ending>(chunk: &mut [C; LANES], sums: &mut [C; LANES], largest: C) {
    // In arrays of their own, so that it is plain that none lies where another does.
    let mut x = *chunk;
    let mut power = [C::ZERO; LANES];
    for i in 0..LANES {
        x[i] = x[i].minus(largest);
        power[i] = x[i].power_of_e();
    }
    *chunk = if E::POWERS { power } else { x };
    for i in 0..LANES {
        sums[i] = sums[i].plus(power[i]);
    }
}

struct Largest<'a, C>(&'a mut [C], &'a [C]);

impl<C: Real> Loop for Largest<'_, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        self.0.iter_mut().zip(self.1).for_each(|(largest, x)| *largest = larger(*x, *largest));
    }
}

struct AddPowers<'a, C> {
    sums: &'a mut [C],
    largest: &'a [C],
    row: &'a [C],
}

impl<C: Real> Loop for AddPowers<'_, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        for ((sum, largest), x) in self.sums.iter_mut().zip(self.largest).zip(self.row) {
            *sum = sum.plus(x.minus(*largest).power_of_e());
        }
    }
}

struct End<'a, C, E> {
    factors: &'a [C],
    largest: &'a [C],
    row: &'a [C],
    out: &'a mut [C],
    ending: PhantomData<E>,
}

impl<C: Real, E: Ending> Loop for End<'_, C, E> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let lines = self.factors.iter().zip(self.largest);
        for ((out, x), (factor, largest)) in self.out.iter_mut().zip(self.row).zip(lines) {
            let x = x.minus(*largest);
            *out = E::result(if E::POWERS { x.power_of_e() } else { x }, *factor);
        }
    }
}

fn along<E: Ending, F: Format<Compute: Real>>(
    cx: &KernelCx<'_>,
    dim: usize,
    x: &Arg<'_>,
    result: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    let lines = Lines::new(result.shape, dim);
    if lines.inner == 1 {
        return each_row::<F>(cx, x, lines.size, result, |row| vectorize(Row(row, PhantomData::<E>)));
    }
    type C<F> = <F as Format>::Compute;
    each_columns::<F>(cx, x, lines, result, |columns| {
        use super::numbers::Number;
        let mut largest = vec![C::<F>::LOWEST; columns.len];
        let mut sums = vec![C::<F>::ZERO; columns.len];
        for i in 0..columns.rows() {
            columns.read(i, |row| vectorize(Largest(&mut largest, row)));
        }
        for i in 0..columns.rows() {
            columns.read(i, |row| vectorize(AddPowers { sums: &mut sums, largest: &largest, row }));
        }
        sums.iter_mut().for_each(|sum| *sum = E::factor(*sum));
        // The powers are computed twice, because 16-bit floats could not hold them in between.
        for i in 0..columns.rows() {
            columns.write(i, |row, out| {
                vectorize(End { factors: &sums, largest: &largest, row, out, ending: PhantomData::<E> });
            });
        }
    })
}

fn floats<E: Ending>(
    cx: &KernelCx<'_>,
    dim: usize,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let ([x], [result]) = (args, results) else {
        return Err(KernelError("expected an operand and a result".into()));
    };
    match result.dtype {
        Dtype::F32 => along::<E, F32>(cx, dim, x, result),
        Dtype::F64 => along::<E, F64>(cx, dim, x, result),
        Dtype::F16 => along::<E, F16>(cx, dim, x, result),
        Dtype::Bf16 => along::<E, Bf16>(cx, dim, x, result),
        other => Err(KernelError(format!("not defined for {other}"))),
    }
}

/// The kernels of this family.
pub(crate) static KERNELS: &[Kernel] = &[
    Kernel {
        op: "softmax",
        family: "softmax",
        in_place: true,
        run: |cx, op: &dyn OpDef, args, results| {
            floats::<Quotient>(cx, attributes::<ops::Softmax>(op)?.dim, args, results)
        },
    },
    Kernel {
        op: "log_softmax",
        family: "softmax",
        in_place: true,
        run: |cx, op: &dyn OpDef, args, results| {
            floats::<Difference>(cx, attributes::<ops::LogSoftmax>(op)?.dim, args, results)
        },
    },
];
