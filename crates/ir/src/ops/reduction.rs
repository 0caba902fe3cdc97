//! How values of several ranks become one.
//!
//! The order is fixed: the members' values are folded in group order, in the accumulator type of the
//! element type (`f32` for the 16-bit floats, else itself), rounded once at each step to that and at the end
//! to the element type. Every transport must give these bits.

use std::fmt::Write;

use crate::dtype::Dtype;
use crate::mesh::Mesh;
use crate::ops::attr::write_float;
use crate::ops::elementwise::{maximum, minimum};
use crate::ops::{Attr, EvalError};
use crate::tensor::{Data, Tensor};
use crate::text::{Cursor, ParseError};

/// A reduction over ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduce {
    /// The sum; integers wrap.
    Sum,
    /// The sum over the number of members.
    Avg,
    /// The product; integers wrap.
    Product,
    /// The smallest; NaN where one is.
    Min,
    /// The largest; NaN where one is.
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
    /// Every reduction, one of each kind.
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

    /// How programs spell it, without a factor.
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

    /// Whether it is defined for an element type.
    pub fn takes(self, dtype: Dtype) -> bool {
        match self {
            Reduce::Sum | Reduce::Product => dtype != Dtype::Bool,
            Reduce::Avg | Reduce::PremulSum(_) => dtype.is_float(),
            Reduce::Min | Reduce::Max => true,
            Reduce::And | Reduce::Or | Reduce::Xor => !dtype.is_float(),
        }
    }

    /// One tensor out of the members', in group order.
    pub fn fold(self, members: &[&Tensor]) -> Result<Tensor, EvalError> {
        let first = members[0];
        if let Some(other) = members.iter().find(|m| m.shape != first.shape || m.dtype != first.dtype) {
            let (a, b) =
                (format!("{}{:?}", first.dtype, first.shape), format!("{}{:?}", other.dtype, other.shape));
            return Err(EvalError(format!("expected operands of one shape on all members, got {a} and {b}")));
        }
        let (dtype, shape) = (first.dtype, first.shape.clone());
        let floats = |m: &Tensor, i: usize| if let Data::Float(data) = &m.data { data[i] } else { 0.0 };
        let ints = |m: &Tensor, i: usize| if let Data::Int(data) = &m.data { data[i] } else { 0 };
        let n = first.numel();
        Ok(if dtype.is_float() {
            Tensor::floats(
                dtype,
                shape,
                (0..n).map(|i| self.fold_floats(dtype, members.iter().map(|m| floats(m, i)))).collect(),
            )
        } else {
            Tensor::ints(
                dtype,
                shape,
                (0..n).map(|i| self.fold_ints(dtype, members.iter().map(|m| ints(m, i)))).collect(),
            )
        })
    }

    fn fold_floats(self, dtype: Dtype, xs: impl ExactSizeIterator<Item = f64>) -> f64 {
        let acc = dtype.accumulator();
        let n = xs.len() as f64;
        let scaled = xs
            .map(|x| if let Reduce::PremulSum(factor) = self { acc.round(x * acc.round(factor)) } else { x });
        let folded = scaled.reduce(|a, x| match self {
            Reduce::Product => acc.round(a * x),
            Reduce::Min => minimum(a, x),
            Reduce::Max => maximum(a, x),
            _ => acc.round(a + x),
        });
        let folded = folded.unwrap_or(0.0);
        if self == Reduce::Avg { acc.round(folded / n) } else { folded }
    }

    fn fold_ints(self, dtype: Dtype, xs: impl Iterator<Item = i64>) -> i64 {
        let folded = xs.reduce(|a, x| match self {
            Reduce::Product => dtype.wrap(a.wrapping_mul(x)),
            Reduce::Min => a.min(x),
            Reduce::Max => a.max(x),
            Reduce::And => a & x,
            Reduce::Or => a | x,
            Reduce::Xor => a ^ x,
            _ => dtype.wrap(a.wrapping_add(x)),
        });
        folded.unwrap_or(0)
    }
}

impl Attr for Reduce {
    const KIND: &'static str = "sum, avg, product, min, max, and, or, xor or premul_sum(factor)";
    fn write(&self, out: &mut String, _mesh: &Mesh) {
        let _ = write!(out, "{}", self.name());
        if let Reduce::PremulSum(factor) = self {
            out.push('(');
            write_float(out, *factor);
            out.push(')');
        }
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Reduce, ParseError> {
        let reduce =
            cursor.one_of(Self::KIND, |word| Reduce::ALL.into_iter().find(|reduce| reduce.name() == word))?;
        if let Reduce::PremulSum(_) = reduce {
            cursor.expect("(")?;
            let factor = cursor.float()?;
            cursor.expect(")")?;
            return Ok(Reduce::PremulSum(factor));
        }
        Ok(reduce)
    }
    fn same(&self, other: &Reduce) -> bool {
        match (self, other) {
            (Reduce::PremulSum(a), Reduce::PremulSum(b)) => a.same(b),
            (a, b) => a == b,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_floats_accumulate_in_f32() {
        // 2048 + 1 is 2048 in f16; three of them only show when the sum is kept in f32.
        let parts: Vec<Tensor> =
            [2048.0, 1.0, 1.0].iter().map(|x| Tensor::floats(Dtype::F16, vec![1], vec![*x])).collect();
        let sum = Reduce::Sum.fold(&parts.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(sum.data, Data::Float(vec![2050.0]));
    }

    #[test]
    fn the_order_is_that_of_the_group() {
        let parts: Vec<Tensor> =
            [1e8, -1e8, 1.0].iter().map(|x| Tensor::floats(Dtype::F32, vec![1], vec![*x])).collect();
        let fold = |order: [usize; 3]| Reduce::Sum.fold(&order.map(|i| &parts[i])).unwrap().data;
        assert_eq!(fold([0, 1, 2]), Data::Float(vec![1.0]));
        assert_eq!(fold([0, 2, 1]), Data::Float(vec![0.0]));
    }
}
