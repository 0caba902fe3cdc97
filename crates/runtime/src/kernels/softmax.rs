//! Softmax along a dimension. A row is read from memory once for its maximum, the exponentials and the quotients.

use std::iter::repeat;
use std::marker::PhantomData;

use consort_ir::ops::{self, OpDef};

use super::formats::{Format, by_format};
use super::isa::{Loop, vectorize};
use super::lines::{Lines, RUN, each_columns, each_row, fold, replace, replace_and_sum};
use super::numbers::Real;
use super::operand::attributes;
use super::{Arg, Kernel, KernelCx, KernelError, ViewMut};

/// Turns x minus the maximum, or its exponential, into the result once the sum of exponentials is known.
trait Ending {
    /// Whether the result is computed from the exponential instead of x.
    const POWERS: bool;
    /// The common factor or term of a line.
    fn factor<C: Real>(sum: C) -> C;
    /// The result.
    fn result<C: Real>(x: C, factor: C) -> C;
}

/// Softmax: the exponentials over their sum.
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

/// Log-softmax: x minus the logarithm of the sum.
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

/// The larger of two; either may be returned if one is NaN, since the sum will be NaN.
#[inline(always)]
pub(super) fn larger<C: Real>(x: C, y: C) -> C {
    if x > y { x } else { y }
}

struct Row<'a, C, E> {
    from: Option<&'a [C]>,
    row: &'a mut [C],
    ending: PhantomData<E>,
}

impl<C: Real, E: Ending> Loop for Row<'_, C, E> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let (from, row) = (self.from, self.row);
        let largest = fold(from.unwrap_or(row), C::LOWEST, |x| x, larger);
        if E::POWERS {
            let sum = replace_and_sum(from, row, |x| x.minus(largest).power_below_one());
            let factor = E::factor(sum);
            for x in row {
                *x = E::result(*x, factor);
            }
        } else {
            let factor = E::factor(sum_of_powers(from.unwrap_or(row), largest));
            replace(from, row, repeat(()), |x, ()| E::result(x.minus(largest), factor));
        }
    }
}

/// The sum of exponentials of elements minus the maximum of a row. They are stored on the way.
#[inline(always)]
pub(super) fn sum_of_powers<C: Real>(row: &[C], largest: C) -> C {
    let (mut powers, mut sum) = ([C::ZERO; RUN], C::ZERO);
    for run in row.chunks(RUN) {
        let power = |x: C| x.minus(largest).power_below_one();
        sum = sum.plus(replace_and_sum(Some(run), &mut powers[..run.len()], power));
    }
    sum
}

/// The elementwise maximum with a row, in place.
pub(super) struct Largest<'a, C>(pub(super) &'a mut [C], pub(super) &'a [C]);

impl<C: Real> Loop for Largest<'_, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        self.0.iter_mut().zip(self.1).for_each(|(largest, x)| *largest = larger(*x, *largest));
    }
}

/// Adds the exponentials of a row minus the maxima to the sums.
pub(super) struct AddPowers<'a, C> {
    pub(super) sums: &'a mut [C],
    pub(super) largest: &'a [C],
    pub(super) row: &'a [C],
}

impl<C: Real> Loop for AddPowers<'_, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        for ((sum, largest), x) in self.sums.iter_mut().zip(self.largest).zip(self.row) {
            *sum = sum.plus(x.minus(*largest).power_below_one());
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
            *out = E::result(if E::POWERS { x.power_below_one() } else { x }, *factor);
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
        return each_row::<F>(cx, x, lines.size, result, |from, row| {
            vectorize(Row { from, row, ending: PhantomData::<E> });
        });
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
        // The exponentials are computed twice, because 16-bit floats could not store them in between.
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
        return Err(KernelError::new("expected an operand and a result"));
    };
    by_format!(result.dtype, floats F => along::<E, F>(cx, dim, x, result))
}

/// The kernels of this family.
pub(crate) static KERNELS: &[Kernel] = &[
    Kernel {
        op: "softmax",
        family: "softmax",
        in_place: true,
        strided: true,
        run: |cx, op: &dyn OpDef, args, results| {
            floats::<Quotient>(cx, attributes::<ops::Softmax>(op)?.dim, args, results)
        },
    },
    Kernel {
        op: "log_softmax",
        family: "softmax",
        in_place: true,
        strided: true,
        run: |cx, op: &dyn OpDef, args, results| {
            floats::<Difference>(cx, attributes::<ops::LogSoftmax>(op)?.dim, args, results)
        },
    },
];
