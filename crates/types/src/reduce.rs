//! Reductions over the members of a group.

use crate::dtype::Dtype;

/// A reduction over the members of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduce {
    /// The sum; integers wrap.
    Sum,
    /// The sum over the number of members.
    Avg,
    /// The product; integers wrap.
    Product,
    /// The smallest; NaN if one is NaN, and -0 is smaller than 0.
    Min,
    /// The largest; NaN if one is NaN, and 0 is larger than -0.
    Max,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// The sum of all operands, each times a factor.
    PremulSum(f64),
}

impl Reduce {
    /// One of each kind.
    pub const ALL: [Reduce; 9] = [
        Reduce::Sum,
        Reduce::Avg,
        Reduce::Product,
        Reduce::Min,
        Reduce::Max,
        Reduce::And,
        Reduce::Or,
        Reduce::Xor,
        Reduce::PremulSum(0.5),
    ];

    /// Its index in `ALL`.
    pub fn code(self) -> u64 {
        match self {
            Reduce::Sum => 0,
            Reduce::Avg => 1,
            Reduce::Product => 2,
            Reduce::Min => 3,
            Reduce::Max => 4,
            Reduce::And => 5,
            Reduce::Or => 6,
            Reduce::Xor => 7,
            Reduce::PremulSum(_) => 8,
        }
    }

    /// Whether it is defined for an element type.
    pub fn takes(self, dtype: Dtype) -> bool {
        match self {
            Reduce::Sum | Reduce::Product => dtype != Dtype::Bool,
            Reduce::Avg | Reduce::PremulSum(_) => dtype.is_float(),
            Reduce::Min | Reduce::Max => true,
            Reduce::And | Reduce::Or | Reduce::Xor => !dtype.is_float(),
        }
    }

    /// Its name in programs and messages, without a factor.
    pub fn name(self) -> &'static str {
        match self {
            Reduce::Sum => "sum",
            Reduce::Avg => "avg",
            Reduce::Product => "product",
            Reduce::Min => "min",
            Reduce::Max => "max",
            Reduce::And => "and",
            Reduce::Or => "or",
            Reduce::Xor => "xor",
            Reduce::PremulSum(_) => "premul_sum",
        }
    }
}
