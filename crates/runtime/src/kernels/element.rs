//! Element types of products: the type they are multiplied and summed in, and the conversions to and from it.
//!
//! All of it is plain arithmetic without branches, so that loops over it are vectorised.

use bytemuck::Pod;
use half::{bf16, f16};

use crate::kernels::formats::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// The type in which products are summed.
pub(crate) trait Wide: Element<Wide = Self> + PartialEq {
    const ZERO: Self;
    const ONE: Self;
    /// `self * by + to`; integers wrap.
    fn times_plus(self, by: Self, to: Self) -> Self;
    fn plus(self, other: Self) -> Self;
}

/// A type of elements.
pub(crate) trait Element: Pod + Send + Sync {
    type Wide: Wide;
    fn wide(self) -> Self::Wide;
    /// The nearest value of this type.
    fn narrow(wide: Self::Wide) -> Self;
    /// The same elements, if they already have the wide type.
    fn as_wide(_: &[Self]) -> Option<&[Self::Wide]> {
        None
    }
    /// The same, mutable.
    fn as_wide_mut(_: &mut [Self]) -> Option<&mut [Self::Wide]> {
        None
    }
}

macro_rules! float {
    ($($ty:ident)*) => {$(
        impl Wide for $ty {
            const ZERO: $ty = 0.0;
            const ONE: $ty = 1.0;
            #[inline(always)]
            fn times_plus(self, by: $ty, to: $ty) -> $ty {
                self.mul_add(by, to)
            }
            #[inline(always)]
            fn plus(self, other: $ty) -> $ty {
                self + other
            }
        }
        itself!($ty);
    )*};
}

macro_rules! integer {
    ($($ty:ident)*) => {$(
        impl Wide for $ty {
            const ZERO: $ty = 0;
            const ONE: $ty = 1;
            #[inline(always)]
            fn times_plus(self, by: $ty, to: $ty) -> $ty {
                self.wrapping_mul(by).wrapping_add(to)
            }
            #[inline(always)]
            fn plus(self, other: $ty) -> $ty {
                self.wrapping_add(other)
            }
        }
        itself!($ty);
    )*};
}

macro_rules! itself {
    ($ty:ident) => {
        impl Element for $ty {
            type Wide = $ty;
            #[inline(always)]
            fn wide(self) -> $ty {
                self
            }
            #[inline(always)]
            fn narrow(wide: $ty) -> $ty {
                wide
            }
            fn as_wide(list: &[$ty]) -> Option<&[$ty]> {
                Some(list)
            }
            fn as_wide_mut(list: &mut [$ty]) -> Option<&mut [$ty]> {
                Some(list)
            }
        }
    };
}

float!(f32 f64);
integer!(i32 i64);

// A wrapping sum of bytes is a wrapping sum of 32-bit words, truncated once.
impl Element for u8 {
    type Wide = i32;
    #[inline(always)]
    fn wide(self) -> i32 {
        i32::from(self)
    }
    #[inline(always)]
    fn narrow(wide: i32) -> u8 {
        wide as u8
    }
}

impl Element for bf16 {
    type Wide = f32;
    #[inline(always)]
    fn wide(self) -> f32 {
        bf16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn narrow(wide: f32) -> bf16 {
        bf16::from_bits(f32_to_bf16(wide))
    }
}

impl Element for f16 {
    type Wide = f32;
    #[inline(always)]
    fn wide(self) -> f32 {
        f16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn narrow(wide: f32) -> f16 {
        f16::from_bits(f32_to_f16(wide))
    }
}
