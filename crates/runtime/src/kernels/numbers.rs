//! The number types that kernels compute with, and the operations that ops need on all of them.

use bytemuck::Pod;

use super::math::{double, single};

/// A type that kernels compute in.
pub(crate) trait Number: Pod + PartialOrd + Send + Sync {
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// The identity of addition: -0 for floats, because adding 0 would turn -0 into 0.
    const NOTHING: Self;
    /// The smallest value.
    const LOWEST: Self;
    /// The largest value.
    const HIGHEST: Self;
    /// The sum; integers wrap.
    fn plus(self, other: Self) -> Self;
    /// The product; integers wrap.
    fn times(self, other: Self) -> Self;
    /// The larger; NaN if either is NaN, and 0 is larger than -0.
    fn larger_of(self, other: Self) -> Self;
    /// The smaller; NaN if either is NaN, and -0 is smaller than 0.
    fn smaller_of(self, other: Self) -> Self;
    /// Whether it is NaN.
    fn is_not_a_number(self) -> bool;
}

macro_rules! floats {
    ($($ty:ident)*) => {$(
        impl Number for $ty {
            const ZERO: $ty = 0.0;
            const ONE: $ty = 1.0;
            const NOTHING: $ty = -0.0;
            const LOWEST: $ty = $ty::NEG_INFINITY;
            const HIGHEST: $ty = $ty::INFINITY;
            #[inline(always)]
            fn plus(self, other: $ty) -> $ty {
                self + other
            }
            #[inline(always)]
            fn times(self, other: $ty) -> $ty {
                self * other
            }
            #[inline(always)]
            fn larger_of(self, other: $ty) -> $ty {
                let larger = if self > other { self } else { other };
                // Equal numbers have equal bits except for zeros, whose sign bits must be ANDed.
                let equal = $ty::from_bits(self.to_bits() & other.to_bits());
                let larger = if self == other { equal } else { larger };
                if self.is_nan() { self } else { larger }
            }
            #[inline(always)]
            fn smaller_of(self, other: $ty) -> $ty {
                let smaller = if self < other { self } else { other };
                let equal = $ty::from_bits(self.to_bits() | other.to_bits());
                let smaller = if self == other { equal } else { smaller };
                if self.is_nan() { self } else { smaller }
            }
            #[inline(always)]
            fn is_not_a_number(self) -> bool {
                self.is_nan()
            }
        }
    )*};
}
floats!(f32 f64);

macro_rules! ints {
    ($($ty:ident)*) => {$(
        impl Number for $ty {
            const ZERO: $ty = 0;
            const ONE: $ty = 1;
            const NOTHING: $ty = 0;
            const LOWEST: $ty = $ty::MIN;
            const HIGHEST: $ty = $ty::MAX;
            #[inline(always)]
            fn plus(self, other: $ty) -> $ty {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn times(self, other: $ty) -> $ty {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn larger_of(self, other: $ty) -> $ty {
                self.max(other)
            }
            #[inline(always)]
            fn smaller_of(self, other: $ty) -> $ty {
                self.min(other)
            }
            #[inline(always)]
            fn is_not_a_number(self) -> bool {
                false
            }
        }
    )*};
}
ints!(i32 i64 u8);

/// A float type that kernels compute in.
pub(crate) trait Real: Number {
    /// Converts to `f64`, exactly.
    fn wide(self) -> f64;
    /// Rounds an `f64` to the nearest value.
    fn nearest(x: f64) -> Self;
    /// The difference.
    fn minus(self, other: Self) -> Self;
    /// exp of it, for values <= 0.
    fn power_below_one(self) -> Self;
}

impl Real for f32 {
    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn nearest(x: f64) -> f32 {
        x as f32
    }
    #[inline(always)]
    fn minus(self, other: f32) -> f32 {
        self - other
    }
    #[inline(always)]
    fn power_below_one(self) -> f32 {
        single::exp_below_one(self)
    }
}

impl Real for f64 {
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
    #[inline(always)]
    fn nearest(x: f64) -> f64 {
        x
    }
    #[inline(always)]
    fn minus(self, other: f64) -> f64 {
        self - other
    }
    #[inline(always)]
    fn power_below_one(self) -> f64 {
        double::exp(self)
    }
}
