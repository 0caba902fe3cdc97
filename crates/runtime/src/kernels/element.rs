//! What products need of an element type: what it is multiplied and summed in, and how it gets there and back.
//!
//! All of it is plain arithmetic without branches, so that loops over it are vectorised. That is also why 16-bit
//! floats are converted here and not by `half`, which asks for the machine's instructions at every element.

use bytemuck::Pod;
use half::{bf16, f16};

/// The type in which products are summed.
pub(crate) trait Wide: Element<Wide = Self> {
    const ZERO: Self;
    const ONE: Self;
    /// `self * by + to`, for integers modulo their width.
    fn times_plus(self, by: Self, to: Self) -> Self;
    fn plus(self, other: Self) -> Self;
}

/// A type of elements.
pub(crate) trait Element: Pod + Send + Sync {
    type Wide: Wide;
    fn wide(self) -> Self::Wide;
    /// The nearest value of this type.
    fn narrow(wide: Self::Wide) -> Self;
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
        }
    };
}

float!(f32 f64);
integer!(i32 i64);

// Sums of bytes modulo 256 are sums of words modulo 2^32, cut off once.
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
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> bf16 {
        let bits = wide.to_bits();
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // A NaN is made quiet: its payload might be in the bits that are cut off.
        bf16::from_bits(if wide.is_nan() { bits >> 16 | 0x40 } else { nearest } as u16)
    }
}

impl Element for f16 {
    type Wide = f32;
    #[inline(always)]
    fn wide(self) -> f32 {
        let (sign, rest) = (u32::from(self.to_bits()) & 0x8000, u32::from(self.to_bits()) & 0x7fff);
        // The exponent moves from a bias of 15 to one of 127.
        let normal = (rest << 13) + (112 << 23);
        // A subnormal is counted in units of 2^-24: as the fraction of 2^-14, less that.
        let tiny = (f32::from_bits(normal + (1 << 23)) - f32::from_bits(113 << 23)).to_bits();
        let huge = normal + (112 << 23);
        let size = if rest < 0x400 {
            tiny
        } else if rest >= 0x7c00 {
            huge
        } else {
            normal
        };
        f32::from_bits(size | sign << 16)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> f16 {
        let (sign, rest) = (wide.to_bits() >> 16 & 0x8000, wide.to_bits() & 0x7fff_ffff);
        // Ties to even: half of the last bit that stays, less one, plus that bit.
        let normal = rest.wrapping_sub(112 << 23).wrapping_add(0xfff + (rest >> 13 & 1)) >> 13;
        // Adding 2^-1 leaves units of 2^-24 in the fraction, rounded by the addition.
        let tiny = (f32::from_bits(rest) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let size = if rest > 0x7f80_0000 {
            0x7e00
        } else if rest >= 143 << 23 {
            0x7c00
        } else if rest < 113 << 23 {
            tiny
        } else {
            normal
        };
        f16::from_bits((size | sign) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_floats_convert_as_half_does() {
        for bits in 0..=u16::MAX {
            let (a, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(a.wide().to_bits() == a.to_f32().to_bits() || a.is_nan() && a.wide().is_nan());
            assert!(b.wide().to_bits() == b.to_f32().to_bits() || b.is_nan() && b.wide().is_nan());
        }
        // Every exponent and sign, with the fractions around ties.
        for high in 0..=u16::MAX {
            for low in [0u16, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | u32::from(low));
                let (a, b) = (f16::narrow(x), bf16::narrow(x));
                assert!(a.to_bits() == f16::from_f32(x).to_bits() || x.is_nan() && a.is_nan(), "{x:e}");
                assert!(b.to_bits() == bf16::from_f32(x).to_bits() || x.is_nan() && b.is_nan(), "{x:e}");
            }
        }
    }
}
