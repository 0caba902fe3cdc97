//! Conversions between element types.

use consort_types::Dtype;

use super::blocks::{ElementOp, Work, map, micro};
use super::formats::{Bf16, F16, F32, F64, Format, I32, I64, U8, by_format, to_odd_f32};
use super::{Arg, KernelCx, KernelError, ViewMut};

/// To the format: floats to integers truncate and saturate, NaN gives 0; wider integers wrap.
struct To<G>(G);

/// To truth values: whether a number is not 0.
struct ToTruth;

macro_rules! conversions {
    ($($from:ident $to:ident($x:ident) $convert:expr;)*) => {$(
        impl ElementOp<$from, 1> for To<$to> {
            type Out = <$to as Format>::Compute;
            const WORK: Work = Work::Short;
            #[inline(always)]
            fn apply([$x]: [$from; 1]) -> Self::Out {
                $convert
            }
        }
    )*};
}

macro_rules! plain {
    ($($from:ident)*) => {$(
        conversions! {
            $from F32(x) x as f32;
            $from F64(x) x as f64;
            $from I32(x) x as i32;
            $from I64(x) x as i64;
            $from U8(x) x as u8;
        }
        impl ElementOp<$from, 1> for ToTruth {
            type Out = u8;
            const WORK: Work = Work::Short;
            #[inline(always)]
            fn apply([x]: [$from; 1]) -> u8 {
                u8::from(x != 0 as $from)
            }
        }
    )*};
}

#[allow(clippy::unnecessary_cast, clippy::cast_lossless, reason = "one macro for all pairs of types")]
mod plain {
    use super::*;
    plain!(f32 f64 i32 i64 u8);
}

// 16-bit floats are computed in `f32`, but must be rounded only once.
conversions! {
    f32 F16(x) x;
    f32 Bf16(x) x;
    f64 F16(x) to_odd_f32(x);
    f64 Bf16(x) to_odd_f32(x);
    // Larger values are infinite in `f16`, and up to 100,000 an `f32` is exact.
    i32 F16(x) x.clamp(-100_000, 100_000) as f32;
    i64 F16(x) x.clamp(-100_000, 100_000) as f32;
    i32 Bf16(x) to_odd_f32(f64::from(x));
    i64 Bf16(x) to_odd_f32(fewer_bits(x) as f64);
    u8 F16(x) f32::from(x);
    u8 Bf16(x) f32::from(x);
}

/// The same number if an `f64` can hold it; else the low bits become one sticky bit. An `f64` holds the rest exactly,
/// and rounding to 16 bits is not affected.
#[inline(always)]
fn fewer_bits(x: i64) -> i64 {
    const LOW: i64 = 0xfff;
    let any = if x & LOW == 0 { 0 } else { LOW + 1 };
    if x.unsigned_abs() < 1 << 52 { x } else { x & !LOW | any }
}

/// Converts all elements.
pub(super) fn cast(
    cx: &KernelCx<'_>,
    from: Dtype,
    args: &[Arg<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    by_format!(from, F => cast_from::<F>(cx, args, result))
}

fn cast_from<F: Format>(
    cx: &KernelCx<'_>,
    args: &[Arg<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), KernelError>
where
    To<F32>: ElementOp<F::Compute, 1, Out = f32>,
    To<F64>: ElementOp<F::Compute, 1, Out = f64>,
    To<F16>: ElementOp<F::Compute, 1, Out = f32>,
    To<Bf16>: ElementOp<F::Compute, 1, Out = f32>,
    To<I32>: ElementOp<F::Compute, 1, Out = i32>,
    To<I64>: ElementOp<F::Compute, 1, Out = i64>,
    To<U8>: ElementOp<F::Compute, 1, Out = u8>,
    ToTruth: ElementOp<F::Compute, 1, Out = u8>,
{
    if result.dtype == Dtype::Bool {
        return map::<1, F, U8>(cx, args, result, micro::<ToTruth, F::Compute, 1>);
    }
    by_format!(result.dtype, G => map::<1, F, G>(cx, args, result, micro::<To<G>, F::Compute, 1>))
}
