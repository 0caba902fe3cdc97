//! Reductions over the members of a group.

use crate::dtype::Dtype;

/// A reduction over the members of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduce {
    /// The sum; integers wrap, and the sum of truth values is `Or`.
    Sum,
    /// The sum over the number of members.
    Avg,
    /// The product; integers wrap, and the product of truth values is `And`.
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
            Reduce::Sum | Reduce::Product | Reduce::Min | Reduce::Max => true,
            Reduce::Avg | Reduce::PremulSum(_) => dtype.is_float(),
            Reduce::And | Reduce::Or | Reduce::Xor => !dtype.is_float(),
        }
    }

    /// The element types for which it is defined, as text.
    pub fn dtypes(self) -> String {
        let names: Vec<&str> =
            Dtype::ALL.into_iter().filter(|dtype| self.takes(*dtype)).map(Dtype::name).collect();
        names.join(" ")
    }

    /// What it computes, in one line.
    pub fn summary(self) -> &'static str {
        match self {
            Reduce::Sum => "the sum; integers wrap; of truth values, whether any is true",
            Reduce::Avg => "the sum over the number of members",
            Reduce::Product => "the product; integers wrap; of truth values, whether all are true",
            Reduce::Min => "the smallest; NaN if one is NaN",
            Reduce::Max => "the largest; NaN if one is NaN",
            Reduce::And => "bitwise and",
            Reduce::Or => "bitwise or",
            Reduce::Xor => "bitwise exclusive or",
            Reduce::PremulSum(_) => "the sum of all operands, each times a factor",
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
