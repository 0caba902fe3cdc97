//! Reductions of values of several ranks.
//!
//! The order is fixed: the members' values are folded in group order, in the accumulator type of the
//! element type (`f32` for the 16-bit floats, else itself), rounded once at each step to that and at the end
//! to the element type. Every transport must give these bits.

use std::fmt::Write;

use consort_types::{Dtype, Reduce};

use crate::literal::{Data, Literal};
use crate::mesh::Mesh;
use crate::ops::attr::write_float;
use crate::ops::functions::{maximum, minimum};
use crate::ops::{Attr, EvalError};
use crate::text::{Cursor, ParseError};

/// Reduces the members' tensors, in group order.
pub fn fold(reduce: Reduce, members: &[&Literal]) -> Result<Literal, EvalError> {
    let first = members[0];
    if let Some(other) = members.iter().find(|m| m.shape != first.shape || m.dtype != first.dtype) {
        let (a, b) =
            (format!("{}{:?}", first.dtype, first.shape), format!("{}{:?}", other.dtype, other.shape));
        return Err(EvalError::new(("operands of one shape on all members", format!("{a} and {b}"))));
    }
    let (dtype, shape) = (first.dtype, first.shape.clone());
    let floats = |m: &Literal, i: usize| if let Data::Float(data) = &m.data { data[i] } else { 0.0 };
    let ints = |m: &Literal, i: usize| if let Data::Int(data) = &m.data { data[i] } else { 0 };
    let n = first.numel();
    Ok(if dtype.is_float() {
        Literal::floats(
            dtype,
            shape,
            (0..n).map(|i| fold_floats(reduce, dtype, members.iter().map(|m| floats(m, i)))).collect(),
        )
    } else {
        Literal::ints(
            dtype,
            shape,
            (0..n).map(|i| fold_ints(reduce, dtype, members.iter().map(|m| ints(m, i)))).collect(),
        )
    })
}

fn fold_floats(reduce: Reduce, dtype: Dtype, xs: impl ExactSizeIterator<Item = f64>) -> f64 {
    let acc = dtype.accumulator();
    let n = xs.len() as f64;
    let scaled =
        xs.map(|x| if let Reduce::PremulSum(factor) = reduce { acc.round(x * acc.round(factor)) } else { x });
    let folded = scaled.reduce(|a, x| match reduce {
        Reduce::Product => acc.round(a * x),
        Reduce::Min => minimum(a, x),
        Reduce::Max => maximum(a, x),
        _ => acc.round(a + x),
    });
    let folded = folded.unwrap_or(0.0);
    if reduce == Reduce::Avg { acc.round(folded / n) } else { folded }
}

fn fold_ints(reduce: Reduce, dtype: Dtype, xs: impl Iterator<Item = i64>) -> i64 {
    let folded = xs.reduce(|a, x| match reduce {
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
        let parts: Vec<Literal> =
            [2048.0, 1.0, 1.0].iter().map(|x| Literal::floats(Dtype::F16, vec![1], vec![*x])).collect();
        let sum = fold(Reduce::Sum, &parts.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(sum.data, Data::Float(vec![2050.0]));
    }

    #[test]
    fn the_order_is_that_of_the_group() {
        let parts: Vec<Literal> =
            [1e8, -1e8, 1.0].iter().map(|x| Literal::floats(Dtype::F32, vec![1], vec![*x])).collect();
        let sum = |order: [usize; 3]| fold(Reduce::Sum, &order.map(|i| &parts[i])).unwrap().data;
        assert_eq!(sum([0, 1, 2]), Data::Float(vec![1.0]));
        assert_eq!(sum([0, 2, 1]), Data::Float(vec![0.0]));
    }
}
