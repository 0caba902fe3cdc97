//! Running sums along a dimension. Those of floats are kept in `f64`, so that each is rounded once.

use consort_ir::ops::{self, OpDef};

use super::formats::{Format, by_format};
use super::isa::{Loop, vectorize};
use super::lines::{Lines, each_columns, each_row};
use super::numbers::Number;
use super::operand::attributes;
use super::{Arg, Kernel, KernelCx, KernelError, ViewMut};

/// Elements with a wider accumulator.
trait Summed: Number {
    /// The accumulator type.
    type Total: Number;
    /// An element converted to the accumulator type.
    fn total(self) -> Self::Total;
    /// The accumulator rounded to an element.
    fn element(total: Self::Total) -> Self;
}

macro_rules! summed {
    ($($ty:ident $total:ident;)*) => {$(
        impl Summed for $ty {
            type Total = $total;
            #[inline(always)]
            fn total(self) -> $total {
                $total::from(self)
            }
            #[inline(always)]
            #[allow(clippy::unnecessary_cast, reason = "one macro for all types")]
            fn element(total: $total) -> $ty {
                total as $ty
            }
        }
    )*};
}

summed! {
    f32 f64;
    f64 f64;
    i32 i32;
    i64 i64;
    u8 u8;
}

struct AddRow<'a, C: Summed> {
    totals: &'a mut [C::Total],
    row: &'a [C],
    out: &'a mut [C],
}

impl<C: Summed> Loop for AddRow<'_, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        for ((total, x), out) in self.totals.iter_mut().zip(self.row).zip(self.out) {
            *total = total.plus(x.total());
            *out = C::element(*total);
        }
    }
}

fn along<F: Format<Compute: Summed>>(
    cx: &KernelCx<'_>,
    dim: usize,
    x: &Arg<'_>,
    result: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    type Total<F> = <<F as Format>::Compute as Summed>::Total;
    let lines = Lines::new(result.shape, dim);
    if lines.inner == 1 {
        return each_row::<F>(cx, x, lines.size, result, |from, row| {
            if let Some(from) = from {
                row.copy_from_slice(from);
            }
            let mut total = Total::<F>::NOTHING;
            for x in row {
                total = total.plus(x.total());
                *x = <F::Compute as Summed>::element(total);
            }
        });
    }
    each_columns::<F>(cx, x, lines, result, |columns| {
        let mut totals = vec![Total::<F>::NOTHING; columns.len];
        for i in 0..columns.rows() {
            columns.write(i, |row, out| vectorize(AddRow { totals: &mut totals, row, out }));
        }
    })
}

fn cumsum(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let dim = attributes::<ops::Cumsum>(op)?.dim;
    let ([x], [result]) = (args, results) else {
        return Err(KernelError::new("expected an operand and a result"));
    };
    by_format!(result.dtype, F => along::<F>(cx, dim, x, result))
}

/// The kernels of this family.
pub(crate) static KERNELS: &[Kernel] =
    &[Kernel { op: "cumsum", family: "cumsum", in_place: true, strided: true, run: cumsum }];
