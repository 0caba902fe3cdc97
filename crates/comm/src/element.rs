//! Element types and reductions of the data path.
//!
//! A reduction folds the members' values in group order, in the accumulator type of the element type (`f32` for
//! the 16-bit floats, else itself), and rounds once at the end, so that every member gets the same bits.

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 16-bit float with 11 bits of precision.
    F16,
    /// 16-bit float with 8 bits of precision.
    Bf16,
    /// 32-bit integer; arithmetic wraps.
    I32,
    /// 64-bit integer; arithmetic wraps.
    I64,
    /// Byte; arithmetic wraps.
    U8,
    /// Truth value, a byte of 0 or 1.
    Bool,
}

impl Element {
    /// Every element type.
    pub const ALL: [Element; 8] = [
        Element::F32,
        Element::F64,
        Element::F16,
        Element::Bf16,
        Element::I32,
        Element::I64,
        Element::U8,
        Element::Bool,
    ];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Element::F64 | Element::I64 => 8,
            Element::F32 | Element::I32 => 4,
            Element::F16 | Element::Bf16 => 2,
            Element::U8 | Element::Bool => 1,
        }
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::F64 => "f64",
            Element::F16 => "f16",
            Element::Bf16 => "bf16",
            Element::I32 => "i32",
            Element::I64 => "i64",
            Element::U8 => "u8",
            Element::Bool => "bool",
        }
    }

    fn is_float(self) -> bool {
        matches!(self, Element::F32 | Element::F64 | Element::F16 | Element::Bf16)
    }
}

/// A reduction over the members of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduce {
    /// The sum; integers wrap.
    Sum,
    /// The sum over the number of members.
    Avg,
    /// The product; integers wrap.
    Product,
    /// The smallest; NaN where one is, and -0 is smaller than 0.
    Min,
    /// The largest; NaN where one is, and 0 is larger than -0.
    Max,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// The sum of a factor times each.
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

    /// Its place in `ALL`.
    pub(crate) fn code(self) -> u64 {
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
    pub fn takes(self, element: Element) -> bool {
        match self {
            Reduce::Sum | Reduce::Product => element != Element::Bool,
            Reduce::Avg | Reduce::PremulSum(_) => element.is_float(),
            Reduce::Min | Reduce::Max => true,
            Reduce::And | Reduce::Or | Reduce::Xor => !element.is_float(),
        }
    }

    /// Its name in messages.
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
