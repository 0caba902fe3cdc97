//! Normalization of rows. Sums and results are computed in `f64` and rounded once: squares of large elements leave the
//! range of `f32`, and memory is slower than either.

use consort_ir::dtype::Dtype;
use consort_ir::ops::{self, OpDef};

use super::formats::{Bf16, F16, F32, F64, Format};
use super::isa::{Loop, vectorize};
use super::lines::each_row;
use super::numbers::Real;
use super::operand::attributes;
use super::source::Source;
use super::{Arg, Kernel, KernelCx, KernelError, ViewMut};

/// Partial sums of a row. A loop over fewer is unrolled by the compiler before it can become vector instructions.
const LANES: usize = 64;

/// The sum of `f` of all elements.
#[inline(always)]
fn sum<C: Real>(row: &[C], f: impl Fn(f64) -> f64) -> f64 {
    // Sums of `f64` have no wider type to be rounded from: in order, they are what the definition gives.
    if size_of::<C>() == size_of::<f64>() {
        return row.iter().fold(0.0, |sum, x| sum + f(x.wide()));
    }
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x.wide());
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += f(x.wide());
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// x over the root of its mean square, times the weight.
struct RmsRow<'a, C> {
    row: &'a mut [C],
    weight: &'a [f64],
    eps: f64,
}

impl<C: Real> Loop for RmsRow<'_, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let mean = sum(self.row, |x| x * x) / self.row.len() as f64;
        let scale = 1.0 / (mean + self.eps).sqrt();
        for (x, weight) in self.row.iter_mut().zip(self.weight) {
            *x = C::nearest(x.wide() * scale * weight);
        }
    }
}

/// x less its mean, over the root of its variance, times the weight, plus the bias.
struct LayerRow<'a, C> {
    row: &'a mut [C],
    weight: &'a [f64],
    bias: &'a [f64],
    eps: f64,
}

impl<C: Real> Loop for LayerRow<'_, C> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let n = self.row.len() as f64;
        let mean = sum(self.row, |x| x) / n;
        let variance = sum(self.row, |x| (x - mean) * (x - mean)) / n;
        let scale = 1.0 / (variance + self.eps).sqrt();
        for ((x, weight), bias) in self.row.iter_mut().zip(self.weight).zip(self.bias) {
            *x = C::nearest((x.wide() - mean) * scale * weight + bias);
        }
    }
}

/// The elements of an operand with one dimension.
fn elements<F: Format<Compute: Real>>(
    arg: &Arg<'_>,
    result: &mut ViewMut<'_>,
) -> Result<Vec<f64>, KernelError> {
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
    Ok(elements.into_iter().map(Real::wide).collect())
}

fn rms_norm<F: Format<Compute: Real>>(
    cx: &KernelCx<'_>,
    eps: f64,
    args: &[Arg<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    let [x, weight] = args else { return Err(KernelError("expected two operands".into())) };
    let weight = elements::<F>(weight, result)?;
    each_row::<F>(cx, x, weight.len(), result, |row| vectorize(RmsRow { row, weight: &weight, eps }))
}

fn layer_norm<F: Format<Compute: Real>>(
    cx: &KernelCx<'_>,
    eps: f64,
    args: &[Arg<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    let [x, weight, bias] = args else { return Err(KernelError("expected three operands".into())) };
    let (weight, bias) = (elements::<F>(weight, result)?, elements::<F>(bias, result)?);
    each_row::<F>(cx, x, weight.len(), result, |row| {
        vectorize(LayerRow { row, weight: &weight, bias: &bias, eps });
    })
}

/// Calls a function with the format of the result.
macro_rules! floats {
    ($function:ident($cx:expr, $eps:expr, $args:expr, $results:expr)) => {{
        let [result] = $results else { return Err(KernelError("expected a result".into())) };
        match result.dtype {
            Dtype::F32 => $function::<F32>($cx, $eps, $args, result),
            Dtype::F64 => $function::<F64>($cx, $eps, $args, result),
            Dtype::F16 => $function::<F16>($cx, $eps, $args, result),
            Dtype::Bf16 => $function::<Bf16>($cx, $eps, $args, result),
            other => Err(KernelError(format!("not defined for {other}"))),
        }
    }};
}

/// The kernels of this family.
pub(crate) static KERNELS: &[Kernel] = &[
    Kernel {
        op: "rms_norm",
        family: "normalize",
        in_place: true,
        run: |cx, op: &dyn OpDef, args, results| {
            floats!(rms_norm(cx, attributes::<ops::RmsNorm>(op)?.eps, args, results))
        },
    },
    Kernel {
        op: "layer_norm",
        family: "normalize",
        in_place: true,
        run: |cx, op: &dyn OpDef, args, results| {
            floats!(layer_norm(cx, attributes::<ops::LayerNorm>(op)?.eps, args, results))
        },
    },
];
