//! Element types, and the meaning of arithmetic on each of them.
//!
//! The reference evaluations hold every float as an `f64` and every integer as an `i64` that is exactly
//! representable in the element type. An operation computes in the wide type and rounds (or wraps) once:
//! for `+ - * /` and square root this gives the same bits as computing in the narrow type, because `f64`
//! has more than twice the precision of the others.

use std::fmt;

use half::{bf16, f16};

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 16-bit float with 11 bits of precision.
    F16,
    /// 16-bit float with 8 bits of precision and the range of `f32`.
    Bf16,
    /// 32-bit integer; arithmetic wraps.
    I32,
    /// 64-bit integer; arithmetic wraps.
    I64,
    /// Byte; arithmetic wraps.
    U8,
    /// Truth value, one byte.
    Bool,
}

impl Dtype {
    /// Every element type, in the order in which docs and tests list them.
    pub const ALL: [Dtype; 8] =
        [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16, Dtype::I32, Dtype::I64, Dtype::U8, Dtype::Bool];

    /// How programs spell it.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::I32 => "i32",
            Dtype::I64 => "i64",
            Dtype::U8 => "u8",
            Dtype::Bool => "bool",
        }
    }

    /// The element type of this spelling.
    pub fn from_name(name: &str) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::U8 | Dtype::Bool => 1,
        }
    }

    /// Whether it is one of the float types.
    pub fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::Bf16)
    }

    /// Whether it is one of the integer types (truth values are not).
    pub fn is_int(self) -> bool {
        matches!(self, Dtype::I32 | Dtype::I64 | Dtype::U8)
    }

    /// The type in which reductions over ranks accumulate: `f32` for the 16-bit floats, else itself.
    pub fn accumulator(self) -> Dtype {
        match self {
            Dtype::F16 | Dtype::Bf16 => Dtype::F32,
            other => other,
        }
    }

    /// The nearest value of this float type (ties to even).
    pub fn round(self, x: f64) -> f64 {
        match self {
            Dtype::F32 => f64::from(x as f32),
            Dtype::F16 => to_f16(x).to_f64(),
            Dtype::Bf16 => to_bf16(x).to_f64(),
            _ => x,
        }
    }

    /// The value of this integer type that is equal modulo its width; for `bool`, whether it is not 0.
    pub fn wrap(self, x: i64) -> i64 {
        match self {
            Dtype::I32 => i64::from(x as i32),
            Dtype::U8 => i64::from(x as u8),
            Dtype::Bool => i64::from(x != 0),
            _ => x,
        }
    }

    /// The smallest and the largest value of this integer type.
    pub fn int_range(self) -> (i64, i64) {
        match self {
            Dtype::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
            Dtype::U8 => (0, 255),
            Dtype::Bool => (0, 1),
            _ => (i64::MIN, i64::MAX),
        }
    }
}

/// The nearest `f16` (ties to even).
pub fn to_f16(x: f64) -> f16 {
    f16::from_f32(to_odd_f32(x))
}

/// The nearest `bf16` (ties to even).
pub fn to_bf16(x: f64) -> bf16 {
    bf16::from_f32(to_odd_f32(x))
}

/// `x` if it is an `f32`, else its neighbour whose last bit is 1 (round to odd). Rounding that once more, to a type
/// with at least two bits less, gives the same as rounding `x` directly: the odd bit records that bits were cut off.
/// (`half` converts from `f64` without it.)
fn to_odd_f32(x: f64) -> f32 {
    let near = x as f32;
    let bits = near.to_bits();
    if x.is_nan() || f64::from(near) == x || bits & 1 == 1 {
        return near;
    }
    f32::from_bits(if f64::from(near).abs() > x.abs() { bits - 1 } else { bits + 1 })
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        assert_eq!(Dtype::F16.round(2049.0), 2048.0);
        assert_eq!(Dtype::F16.round(2051.0), 2052.0);
        assert_eq!(Dtype::Bf16.round(257.0), 256.0);
        assert_eq!(Dtype::Bf16.round(259.0), 260.0);
        assert_eq!(Dtype::F32.round(16_777_217.0), 16_777_216.0);
        assert_eq!(Dtype::F16.round(1e6), f64::INFINITY);
        // Just above the tie: rounding to f32 first would lose the last bit and go to the even side.
        assert_eq!(Dtype::Bf16.round(1.0 + 2f64.powi(-8) + 2f64.powi(-40)), 1.0 + 2f64.powi(-7));
        assert_eq!(Dtype::F16.round(1.0 + 2f64.powi(-11) + 2f64.powi(-40)), 1.0 + 2f64.powi(-10));
        assert_eq!(Dtype::F16.round(-1.0 - 2f64.powi(-11) + 2f64.powi(-40)), -1.0);
        assert_eq!(Dtype::Bf16.round(1e300), f64::INFINITY);
        assert_eq!(Dtype::Bf16.round(-1e-300).to_bits(), (-0.0f64).to_bits());
    }

    #[test]
    fn names_read_back() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(Dtype::I32.wrap(i64::from(i32::MAX) + 1), i64::from(i32::MIN));
        assert_eq!(Dtype::U8.wrap(-1), 255);
        assert_eq!(Dtype::Bool.wrap(7), 1);
    }
}
