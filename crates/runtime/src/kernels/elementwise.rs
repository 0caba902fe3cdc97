//! The elementwise ops: what each does to one element, for every type that it takes.
//!
//! 16-bit floats are computed in `f32` and rounded once; truth values are bytes of 0 and 1. Arithmetic, comparisons and
//! conversions are bit-identical to the definitions; `math` states the errors of the functions.
//!
//! No code is shared with the definitions in `consort_ir::ops`, which tests compare with these kernels.

use consort_ir::ops::OpDef;
use consort_types::Dtype;

use super::blocks::{ElementOp, Work, map, micro, select};
use super::cast::cast;
use super::formats::{Bits16, Format, I32, I64, U8, by_format};
use super::math::{double, single};
use super::numbers::Number;
use super::operand::only;
use super::{Arg, Kernel, KernelCx, KernelError, Run, ViewMut};

/// Declares ops as what they do to an element: `Op[operands] types => result: expression`.
macro_rules! ops {
    ($work:ident $($op:ident $x:tt $($($ty:ident)+ => $out:ident: $apply:expr),+;)*) => {$(
        struct $op;
        $(ops! { @each $work $op $x $apply, $out, $($ty)+ })+
    )*};
    (@each $work:ident $op:ident $x:tt $apply:expr, $out:ident, $($ty:ident)+) => {
        $(ops! { @one $work $op $ty $out $x $apply })+
    };
    (@one $work:ident $op:ident $ty:ident same $x:tt $apply:expr) => {
        ops! { @one $work $op $ty $ty $x $apply }
    };
    (@one $work:ident $op:ident $ty:ident $out:ident $x:tt $apply:expr) => {
        impl ElementOp<$ty, { ops!(@count $x) }> for $op {
            type Out = $out;
            const WORK: Work = Work::$work;
            #[inline(always)]
            fn apply($x: [$ty; ops!(@count $x)]) -> $out {
                $apply
            }
        }
    };
    (@count [$x:ident]) => { 1 };
    (@count [$x:ident, $y:ident]) => { 2 };
}

ops! {
    Light
    Add[x, y] f32 f64 i32 i64 u8 => same: x.plus(y);
    Sub[x, y] f32 f64 => same: x - y, i32 i64 u8 => same: x.wrapping_sub(y);
    Mul[x, y] f32 f64 i32 i64 u8 => same: x.times(y);
}

ops! {
    Short
    Div[x, y] f32 f64 => same: x / y, i32 i64 u8 => same: if y == 0 { 0 } else { x.wrapping_div(y) };
    Rem[x, y] f32 f64 => same: x % y, i32 i64 u8 => same: if y == 0 { 0 } else { x.wrapping_rem(y) };
    Maximum[x, y] f32 f64 i32 i64 u8 => same: x.larger_of(y);
    Minimum[x, y] f32 f64 i32 i64 u8 => same: x.smaller_of(y);

    Neg[x] f32 f64 => same: -x, i32 i64 u8 => same: x.wrapping_neg();
    Abs[x] f32 f64 => same: x.abs(), i32 i64 => same: x.wrapping_abs(), u8 => same: x;
    Relu[x] f32 f64 => same: if x <= 0.0 { 0.0 } else { x }, i32 i64 => same: x.max(0), u8 => same: x;
    Sign[x] f32 f64 => same: if x == 0.0 || x.is_nan() { x } else { x.signum() },
        i32 i64 => same: x.signum(), u8 => same: x.min(1);

    Sqrt[x] f32 f64 => same: x.sqrt();
    Rsqrt[x] f32 f64 => same: 1.0 / x.sqrt();
    Recip[x] f32 f64 => same: 1.0 / x;
    Floor[x] f32 f64 => same: x.floor();
    Ceil[x] f32 f64 => same: x.ceil();
    Round[x] f32 f64 => same: x.round_ties_even();
    Eq[x, y] f32 f64 i32 i64 u8 => u8: u8::from(x == y);
    Ne[x, y] f32 f64 i32 i64 u8 => u8: u8::from(x != y);
    Lt[x, y] f32 f64 i32 i64 u8 => u8: u8::from(x < y);
    Le[x, y] f32 f64 i32 i64 u8 => u8: u8::from(x <= y);
    Gt[x, y] f32 f64 i32 i64 u8 => u8: u8::from(x > y);
    Ge[x, y] f32 f64 i32 i64 u8 => u8: u8::from(x >= y);
    IsNan[x] f32 f64 => u8: u8::from(x.is_nan());
    IsFinite[x] f32 f64 => u8: u8::from(x.is_finite());

    And[x, y] i32 i64 u8 => same: x & y;
    Or[x, y] i32 i64 u8 => same: x | y;
    Xor[x, y] i32 i64 u8 => same: x ^ y;
    Not[x] i32 i64 u8 => same: !x;
    Flip[x] u8 => same: x ^ 1;
}

// Functions.
ops! {
    Long
    Exp[x] f32 => same: single::exp(x), f64 => same: double::exp(x);
    Exp2[x] f32 => same: single::exp2(x), f64 => same: double::exp2(x);
    Expm1[x] f32 => same: single::expm1(x), f64 => same: double::expm1(x);
    Log[x] f32 => same: single::log(x), f64 => same: double::log(x);
    Log2[x] f32 => same: single::log2(x), f64 => same: double::log2(x);
    Log1p[x] f32 => same: single::log1p(x), f64 => same: double::log1p(x);
    Tanh[x] f32 => same: single::tanh(x), f64 => same: double::tanh(x);
    Sigmoid[x] f32 => same: single::sigmoid(x), f64 => same: double::sigmoid(x);
    Silu[x] f32 => same: single::silu(x), f64 => same: double::silu(x);
    Softplus[x] f32 => same: softplus(x.into()) as f32, f64 => same: softplus(x);
    Erf[x] f32 => same: single::erf(x), f64 => same: libm::erf(x);
    Gelu[x] f32 => same: single::gelu(x), f64 => same: double::gelu(x);
}

// Scalar functions of the standard library.
ops! {
    Short
    Pow[x, y] f32 => same: f64::from(x).powf(f64::from(y)) as f32, f64 => same: x.powf(y),
        i32 u8 => same: power(x.into(), y.into()) as _, i64 => same: power(x, y);
    Atan2[y, x] f32 => same: f64::from(y).atan2(f64::from(x)) as f32, f64 => same: y.atan2(x);
}

/// Trigonometric ops: the few angles beyond `MAX_ANGLE` are computed one by one by the standard library.
macro_rules! angles {
    ($($op:ident($name:ident);)*) => {$(
        struct $op;

        impl ElementOp<f32, 1> for $op {
            type Out = f32;
            const WORK: Work = Work::Long;
            #[inline(always)]
            fn apply([x]: [f32; 1]) -> f32 {
                single::$name(x)
            }
            #[inline(always)]
            fn lanes<const L: usize>([x]: [[f32; L]; 1]) -> [f32; L] {
                if x.iter().any(|x| x.abs() > single::MAX_ANGLE) {
                    return x.map(|x| f64::from(x).$name() as f32);
                }
                let mut out = [0.0; L];
                for i in 0..L {
                    out[i] = single::$name(x[i]);
                }
                out
            }
        }

        impl ElementOp<f64, 1> for $op {
            type Out = f64;
            const WORK: Work = Work::Short;
            #[inline(always)]
            fn apply([x]: [f64; 1]) -> f64 {
                x.$name()
            }
        }
    )*};
}

angles! {
    Sin(sin);
    Cos(cos);
}

/// An integer power, wrapping; negative exponents round towards zero, also for base 0.
fn power(mut base: i64, exponent: i64) -> i64 {
    let Ok(mut rest) = u64::try_from(exponent) else {
        return if base.unsigned_abs() == 1 { power(base, exponent & 1) } else { 0 };
    };
    let mut result = 1i64;
    while rest > 0 {
        if rest & 1 == 1 {
            result = result.wrapping_mul(base);
        }
        base = base.wrapping_mul(base);
        rest >>= 1;
    }
    result
}

/// log(1 + exp(x)) as the larger of x and 0 and what it lacks, because exp(x) may overflow.
#[inline(always)]
fn softplus(x: f64) -> f64 {
    x.larger_of(0.0) + double::log1p(double::exp(-x.abs()))
}

/// The element type of the first operand.
fn operand_dtype(args: &[Arg<'_>], result: &ViewMut<'_>) -> Dtype {
    if let Some(Arg::View(view)) = args.first() { view.dtype } else { result.dtype }
}

/// The type in which a format is computed.
type Compute<F> = <F as Format>::Compute;

/// Ops over floats.
fn floats<O, const N: usize>(
    cx: &KernelCx<'_>,
    _op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError>
where
    O: ElementOp<f32, N, Out = f32> + ElementOp<f64, N, Out = f64>,
{
    let result = only(results)?;
    by_format!(result.dtype, floats F => map::<N, F, F>(cx, args, result, micro::<O, Compute<F>, N>))
}

/// Ops over integers and truth values.
fn ints<O, const N: usize>(
    cx: &KernelCx<'_>,
    _op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError>
where
    O: ElementOp<i32, N, Out = i32> + ElementOp<i64, N, Out = i64> + ElementOp<u8, N, Out = u8>,
{
    let result = only(results)?;
    by_format!(result.dtype, ints F => map::<N, F, F>(cx, args, result, micro::<O, Compute<F>, N>))
}

/// Ops over floats and integers.
fn numbers<O, const N: usize>(
    cx: &KernelCx<'_>,
    _op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError>
where
    O: ElementOp<f32, N, Out = f32> + ElementOp<f64, N, Out = f64>,
    O: ElementOp<i32, N, Out = i32> + ElementOp<i64, N, Out = i64> + ElementOp<u8, N, Out = u8>,
{
    let result = only(results)?;
    by_format!(result.dtype, F => map::<N, F, F>(cx, args, result, micro::<O, Compute<F>, N>))
}

/// Predicates on floats.
fn float_questions<O, const N: usize>(
    cx: &KernelCx<'_>,
    _op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError>
where
    O: ElementOp<f32, N, Out = u8> + ElementOp<f64, N, Out = u8>,
{
    let result = only(results)?;
    by_format!(operand_dtype(args, result), floats F => map::<N, F, U8>(cx, args, result, micro::<O, Compute<F>, N>))
}

/// Predicates on elements of any type.
fn questions<O, const N: usize>(
    cx: &KernelCx<'_>,
    _op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError>
where
    O: ElementOp<f32, N, Out = u8> + ElementOp<f64, N, Out = u8>,
    O: ElementOp<i32, N, Out = u8> + ElementOp<i64, N, Out = u8> + ElementOp<u8, N, Out = u8>,
{
    let result = only(results)?;
    by_format!(operand_dtype(args, result), F => map::<N, F, U8>(cx, args, result, micro::<O, Compute<F>, N>))
}

/// The complement; logical for truth values.
fn complement(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    match only(results)? {
        result if result.dtype == Dtype::Bool => map::<1, U8, U8>(cx, args, result, micro::<Flip, u8, 1>),
        _ => ints::<Not, 1>(cx, op, args, results),
    }
}

/// A select only moves elements, so only their size matters.
fn choice(
    _cx: &KernelCx<'_>,
    _op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let result = only(results)?;
    match result.dtype.size() {
        1 => select::<U8>(args, result),
        2 => select::<Bits16>(args, result),
        4 => select::<I32>(args, result),
        _ => select::<I64>(args, result),
    }
}

fn conversion(
    cx: &KernelCx<'_>,
    _op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let result = only(results)?;
    let from = operand_dtype(args, result);
    cast(cx, from, args, result)
}

const fn kernel(op: &'static str, run: Run) -> Kernel {
    Kernel { op, family: "elementwise", in_place: true, strided: true, run }
}

/// The kernels of this family.
pub(crate) static KERNELS: &[Kernel] = &[
    kernel("add", numbers::<Add, 2>),
    kernel("sub", numbers::<Sub, 2>),
    kernel("mul", numbers::<Mul, 2>),
    kernel("div", numbers::<Div, 2>),
    kernel("rem", numbers::<Rem, 2>),
    kernel("maximum", numbers::<Maximum, 2>),
    kernel("minimum", numbers::<Minimum, 2>),
    kernel("pow", numbers::<Pow, 2>),
    kernel("atan2", floats::<Atan2, 2>),
    kernel("neg", numbers::<Neg, 1>),
    kernel("abs", numbers::<Abs, 1>),
    kernel("relu", numbers::<Relu, 1>),
    kernel("sign", numbers::<Sign, 1>),
    kernel("sqrt", floats::<Sqrt, 1>),
    kernel("rsqrt", floats::<Rsqrt, 1>),
    kernel("recip", floats::<Recip, 1>),
    kernel("floor", floats::<Floor, 1>),
    kernel("ceil", floats::<Ceil, 1>),
    kernel("round", floats::<Round, 1>),
    kernel("exp", floats::<Exp, 1>),
    kernel("exp2", floats::<Exp2, 1>),
    kernel("expm1", floats::<Expm1, 1>),
    kernel("log", floats::<Log, 1>),
    kernel("log2", floats::<Log2, 1>),
    kernel("log1p", floats::<Log1p, 1>),
    kernel("tanh", floats::<Tanh, 1>),
    kernel("sigmoid", floats::<Sigmoid, 1>),
    kernel("silu", floats::<Silu, 1>),
    kernel("softplus", floats::<Softplus, 1>),
    kernel("erf", floats::<Erf, 1>),
    kernel("gelu", floats::<Gelu, 1>),
    kernel("sin", floats::<Sin, 1>),
    kernel("cos", floats::<Cos, 1>),
    kernel("eq", questions::<Eq, 2>),
    kernel("ne", questions::<Ne, 2>),
    kernel("lt", questions::<Lt, 2>),
    kernel("le", questions::<Le, 2>),
    kernel("gt", questions::<Gt, 2>),
    kernel("ge", questions::<Ge, 2>),
    kernel("is_nan", float_questions::<IsNan, 1>),
    kernel("is_finite", float_questions::<IsFinite, 1>),
    kernel("and", ints::<And, 2>),
    kernel("or", ints::<Or, 2>),
    kernel("xor", ints::<Xor, 2>),
    kernel("not", complement),
    kernel("select", choice),
    kernel("cast", conversion),
];
