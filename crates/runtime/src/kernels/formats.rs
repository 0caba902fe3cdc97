//! The storage and computation types of elements: 16-bit floats compute in `f32`, all others in their own type.

use bytemuck::Pod;

use super::isa::{Loop, vectorize};

/// An element type: how it is stored and computed with.
pub(crate) trait Format: Copy + Send + Sync + 'static {
    /// The stored representation.
    type Stored: Pod + Send + Sync;
    /// The type that kernels compute in.
    type Compute: Pod + Send + Sync;

    /// The stored elements, if they need no conversion for computing.
    fn borrow(stored: &[Self::Stored]) -> Option<&[Self::Compute]>;
    /// The stored elements, mutable, if they need no conversion for computing.
    fn borrow_mut(stored: &mut [Self::Stored]) -> Option<&mut [Self::Compute]>;
    /// Converts one element.
    fn widen(x: Self::Stored) -> Self::Compute;
    /// Converts elements for computing. Both slices must have the same length.
    fn load(from: &[Self::Stored], to: &mut [Self::Compute]);
    /// Rounds elements for storage. Both slices must have the same length.
    fn store(from: &[Self::Compute], to: &mut [Self::Stored]);
}

macro_rules! plain {
    ($($(#[doc = $doc:expr])* $name:ident($ty:ty);)*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name;

        impl Format for $name {
            type Stored = $ty;
            type Compute = $ty;
            #[inline(always)]
            fn borrow(stored: &[$ty]) -> Option<&[$ty]> {
                Some(stored)
            }
            #[inline(always)]
            fn borrow_mut(stored: &mut [$ty]) -> Option<&mut [$ty]> {
                Some(stored)
            }
            #[inline(always)]
            fn widen(x: $ty) -> $ty {
                x
            }
            fn load(from: &[$ty], to: &mut [$ty]) {
                to.copy_from_slice(from);
            }
            fn store(from: &[$ty], to: &mut [$ty]) {
                to.copy_from_slice(from);
            }
        }
    )*};
}

plain! {
    /// 32-bit floats.
    F32(f32);
    /// 64-bit floats.
    F64(f64);
    /// 32-bit integers.
    I32(i32);
    /// 64-bit integers.
    I64(i64);
    /// Bytes and truth values.
    U8(u8);
    /// 16 bits that are only moved, never computed with.
    Bits16(u16);
}

macro_rules! sixteen_bits {
    ($($(#[doc = $doc:expr])* $name:ident($widen:path, $narrow:path);)*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name;

        impl Format for $name {
            type Stored = u16;
            type Compute = f32;
            #[inline(always)]
            fn borrow(_stored: &[u16]) -> Option<&[f32]> {
                None
            }
            #[inline(always)]
            fn borrow_mut(_stored: &mut [u16]) -> Option<&mut [f32]> {
                None
            }
            #[inline(always)]
            fn widen(x: u16) -> f32 {
                $widen(x)
            }
            fn load(from: &[u16], to: &mut [f32]) {
                vectorize(Convert(from, to, #[inline(always)] |x| $widen(x)));
            }
            fn store(from: &[f32], to: &mut [u16]) {
                vectorize(Convert(from, to, #[inline(always)] |x| $narrow(x)));
            }
        }
    )*};
}

sixteen_bits! {
    /// 16-bit floats with 11 bits of precision.
    F16(f16_to_f32, f32_to_f16);
    /// 16-bit floats with 8 bits of precision.
    Bf16(bf16_to_f32, f32_to_bf16);
}

/// Evaluates an expression with a name bound to the format of an element type: `by_format!(dtype, F => f::<F>())` for
/// all types, with `floats F` or `ints F` for those alone; others are an error. Truth values are bytes.
macro_rules! by_format {
    ($dtype:expr, $format:ident => $work:expr) => {
        match $dtype {
            dtype if dtype.is_float() => by_format!(dtype, floats $format => $work),
            dtype => by_format!(dtype, ints $format => $work),
        }
    };
    ($dtype:expr, floats $format:ident => $work:expr) => {
        by_format!(@each $dtype, $format, $work, F32 F32, F64 F64, F16 F16, Bf16 Bf16)
    };
    ($dtype:expr, ints $format:ident => $work:expr) => {
        by_format!(@each $dtype, $format, $work, I32 I32, I64 I64, U8 U8, Bool U8)
    };
    (@each $dtype:expr, $format:ident, $work:expr, $($name:ident $ty:ident),*) => {
        match $dtype {
            $(consort_types::Dtype::$name => {
                type $format = $crate::kernels::formats::$ty;
                $work
            })*
            other => Err($crate::kernels::KernelError::new(format!("not defined for {other}"))),
        }
    };
}
pub(crate) use by_format;

struct Convert<'a, A, B, F>(&'a [A], &'a mut [B], F);

impl<A: Pod, B: Pod, F: Fn(A) -> B> Loop for Convert<'_, A, B, F> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        for (from, to) in self.0.iter().zip(self.1) {
            *to = (self.2)(*from);
        }
    }
}

/// The value of an `f16`, exactly.
#[inline(always)]
pub(crate) fn f16_to_f32(x: u16) -> f32 {
    let bits = u32::from(x & 0x7fff) << 13;
    // The product rebiases the exponent and normalises subnormals.
    let value = f32::from_bits(bits) * f32::from_bits(0x7780_0000);
    let value = if x & 0x7c00 == 0x7c00 { f32::from_bits(bits | 0x7f80_0000) } else { value };
    f32::from_bits(value.to_bits() | u32::from(x & 0x8000) << 16)
}

/// The nearest `f16`, ties to even.
#[inline(always)]
pub(crate) fn f32_to_f16(x: f32) -> u16 {
    let size = x.to_bits() & 0x7fff_ffff;
    // Rounds at bit 13; a carry propagates into the exponent, and at the top into infinity.
    let normal = size.wrapping_add(0xfff).wrapping_add(size >> 13 & 1).wrapping_sub(112 << 23) >> 13;
    // For subnormals, the sum with 0.5 has the rounded result in its last bits.
    let small = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let value = if size < 0x3880_0000 { small } else { normal };
    let value = if size >= 0x4780_0000 { 0x7c00 } else { value };
    let value = if size > 0x7f80_0000 { 0x7e00 } else { value };
    (value | x.to_bits() >> 16 & 0x8000) as u16
}

/// The value of a `bf16`, exactly.
#[inline(always)]
pub(crate) fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// The nearest `bf16`, ties to even.
#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff).wrapping_add(bits >> 16 & 1) >> 16;
    // The carry could turn a NaN into infinity.
    (if x.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

/// `x` if it is an `f32`, else its neighbour whose last bit is 1 (round to odd): rounding that to 16 bits gives the
/// same as rounding `x` directly.
#[inline(always)]
pub(crate) fn to_odd_f32(x: f64) -> f32 {
    let near = x as f32;
    let bits = near.to_bits();
    let away = f64::from(near).abs() > x.abs();
    let odd = if away { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
    let exact = f64::from(near) == x || x.is_nan() || bits & 1 == 1;
    f32::from_bits(if exact { bits } else { odd })
}

#[cfg(test)]
mod tests {
    use super::*;
    use consort_types::Dtype;

    #[test]
    fn sixteen_bit_floats_are_converted_as_the_definition_says() {
        let value = |dtype, bits: u16| {
            let tensor =
                consort_ir::literal::Literal::from_bytes(dtype, vec![], &bits.to_le_bytes()).unwrap();
            if let consort_ir::literal::Data::Float(data) = tensor.data { data[0] } else { 0.0 }
        };
        let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        for bits in 0..=u16::MAX {
            assert!(same(f64::from(f16_to_f32(bits)), value(Dtype::F16, bits)), "{bits:#x}");
            assert!(same(f64::from(bf16_to_f32(bits)), value(Dtype::Bf16, bits)), "{bits:#x}");
        }
        // All exponents, and all patterns of the bits that decide rounding.
        for high in 0..1u32 << 20 {
            for low in [0, 1, 0x7ff, 0x800, 0x801, 0xfff] {
                let x = f32::from_bits(high << 12 | low);
                let wide = f64::from(x);
                assert!(same(f64::from(f16_to_f32(f32_to_f16(x))), Dtype::F16.round(wide)), "{x:e}");
                assert!(same(f64::from(bf16_to_f32(f32_to_bf16(x))), Dtype::Bf16.round(wide)), "{x:e}");
            }
        }
        for x in [1.0 + 2f64.powi(-11) + 2f64.powi(-40), 1e300, -1e-300, 1.0, 65_520.0 - 1e-9, f64::NAN, 0.1]
        {
            assert!(same(f64::from(f16_to_f32(f32_to_f16(to_odd_f32(x)))), Dtype::F16.round(x)), "{x:e}");
            assert!(same(f64::from(bf16_to_f32(f32_to_bf16(to_odd_f32(x)))), Dtype::Bf16.round(x)), "{x:e}");
        }
    }
}
