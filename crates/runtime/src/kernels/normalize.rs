//! Normalization of rows. Sums and results are computed in `f64` and rounded once: squares of large elements overflow
//! `f32`, and an element minus its mean has the rounding errors of both. The root of the mean square needs neither if
//! elements and weights have moderate magnitudes.

use consort_ir::ops::{self, OpDef};

use super::formats::{Format, by_format};
use super::isa::{Loop, vectorize};
use super::lines::{RUN, each_row, fold, replace};
use super::numbers::Real;
use super::operand::{attributes, only};
use super::source::Source;
use super::{Arg, Kernel, KernelCx, KernelError, ViewMut};

/// The sum of `f` of all elements.
#[inline(always)]
fn sum<C: Real>(row: &[C], f: impl Fn(f64) -> f64) -> f64 {
    let mut sum = 0.0;
    // `f64` has no wider accumulator: summing in order gives the same bits as the definition.
    if size_of::<C>() == size_of::<f64>() {
        for x in row {
            sum += f(x.wide());
        }
        return sum;
    }
    for run in row.chunks(RUN) {
        sum += fold(run, 0.0, |x| f(x.wide()), |a, b| a + b);
    }
    sum
}

/// The sum of `f` of all elements, each run summed in the element type.
#[inline(always)]
fn quick_sum<C: Real>(row: &[C], f: impl Fn(C) -> C) -> f64 {
    let mut sum = 0.0;
    for run in row.chunks(RUN) {
        sum += fold(run, C::ZERO, &f, C::plus).wide();
    }
    sum
}

/// Whether squares with this mean, and values computed from them, are well within the range of `f32`.
#[inline(always)]
fn is_usual(mean_square: f64) -> bool {
    mean_square > 1e-20 && mean_square < 1e30
}

/// The weights of a row.
struct Weight<C> {
    elements: Vec<C>,
    /// Whether no product with a weight over- or underflows, so that the scale can be multiplied with it before x.
    quick: bool,
}

impl<C: Real> Weight<C> {
    fn new(elements: Vec<C>) -> Weight<C> {
        let usual = |x: &C| x.wide() == 0.0 || (1e-15..1e15).contains(&x.wide().abs());
        // `f64` has no wider type: computing in order gives the same bits as the definition.
        let quick = size_of::<C>() < size_of::<f64>() && elements.iter().all(usual);
        Weight { elements, quick }
    }
}

/// x over its root mean square, times the weight.
struct RmsRow<'a, C> {
    from: Option<&'a [C]>,
    row: &'a mut [C],
    weight: &'a Weight<C>,
    eps: f64,
}

impl<C: Real> Loop for RmsRow<'_, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let RmsRow { from, row, weight, eps } = self;
        let (x, n) = (from.unwrap_or(row), row.len() as f64);
        let weights = weight.elements.iter();
        let mean = if weight.quick { quick_sum(x, |x| x.times(x)) / n } else { 0.0 };
        if is_usual(mean) && is_usual(mean + eps) {
            let scale = C::nearest(1.0 / (mean + eps).sqrt());
            return replace(from, row, weights, |x, weight| x.times(scale.times(*weight)));
        }
        let scale = 1.0 / (sum(x, |x| x * x) / n + eps).sqrt();
        replace(from, row, weights, |x, weight| C::nearest(x.wide() * scale * weight.wide()));
    }
}

/// x minus its mean, over its standard deviation, times the weight, plus the bias.
struct LayerRow<'a, C> {
    from: Option<&'a [C]>,
    row: &'a mut [C],
    weight: &'a [C],
    bias: &'a [C],
    eps: f64,
}

impl<C: Real> Loop for LayerRow<'_, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let LayerRow { from, row, weight, bias, eps } = self;
        let (x, n) = (from.unwrap_or(row), row.len() as f64);
        let others = weight.iter().zip(bias);
        let mean = sum(x, |x| x) / n;
        let variance = sum(x, |x| (x - mean) * (x - mean)) / n;
        let scale = 1.0 / (variance + eps).sqrt();
        replace(from, row, others, |x, (weight, bias)| {
            C::nearest((x.wide() - mean) * scale * weight.wide() + bias.wide())
        });
    }
}

/// The elements of an operand with one dimension.
fn elements<F: Format<Compute: Real>>(
    arg: &Arg<'_>,
    result: &mut ViewMut<'_>,
) -> Result<Vec<F::Compute>, KernelError> {
    let source = Source::<F>::new(arg)?;
    let n = match arg {
        Arg::View(view) => view.numel(),
        Arg::Result => result.numel(),
    };
    let here = result.elements::<F::Stored>()?;
    let mut elements = vec![<F::Compute as bytemuck::Zeroable>::zeroed(); n];
    if n > 0 {
        source.copy(0, here, &mut elements);
    }
    Ok(elements)
}

fn rms_norm<F: Format<Compute: Real>>(
    cx: &KernelCx<'_>,
    eps: f64,
    args: &[Arg<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    let [x, weight] = args else { return Err(KernelError::new("expected two operands")) };
    let weight = Weight::new(elements::<F>(weight, result)?);
    each_row::<F>(cx, x, weight.elements.len(), result, |from, row| {
        vectorize(RmsRow { from, row, weight: &weight, eps });
    })
}

fn layer_norm<F: Format<Compute: Real>>(
    cx: &KernelCx<'_>,
    eps: f64,
    args: &[Arg<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    let [x, weight, bias] = args else { return Err(KernelError::new("expected three operands")) };
    let (weight, bias) = (elements::<F>(weight, result)?, elements::<F>(bias, result)?);
    each_row::<F>(cx, x, weight.len(), result, |from, row| {
        vectorize(LayerRow { from, row, weight: &weight, bias: &bias, eps });
    })
}

/// The kernels of this family.
pub(crate) static KERNELS: &[Kernel] = &[
    Kernel {
        op: "rms_norm",
        family: "normalize",
        in_place: true,
        strided: true,
        run: |cx, op: &dyn OpDef, args, results| {
            let (eps, result) = (attributes::<ops::RmsNorm>(op)?.eps, only(results)?);
            by_format!(result.dtype, floats F => rms_norm::<F>(cx, eps, args, result))
        },
    },
    Kernel {
        op: "layer_norm",
        family: "normalize",
        in_place: true,
        strided: true,
        run: |cx, op: &dyn OpDef, args, results| {
            let (eps, result) = (attributes::<ops::LayerNorm>(op)?.eps, only(results)?);
            by_format!(result.dtype, floats F => layer_norm::<F>(cx, eps, args, result))
        },
    },
];
