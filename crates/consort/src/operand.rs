//! The other operand of an elementwise op, or the key of a random one: a tensor, or a number.

use std::panic::Location;

use consort_ir::ops::{Constant, Elements};
use consort_types::Dtype;

use crate::apply::run_one;
use crate::error::{Error, Named, Result};
use crate::tensor::{Tensor, Tensors};

/// The other operand of an elementwise op: a tensor, or a number, which becomes a 0-d tensor of the first operand's
/// element type. Integer types need whole numbers. The key of random numbers is one of i64.
///
/// ```
/// use consort::Tensor;
///
/// # fn main() -> consort::Result<()> {
/// let x = Tensor::from_iter([1.0f32, -2.0])?;
/// assert_eq!(x.mul(&x)?.to_string(), "[1. 4.]");
/// assert_eq!(x.pow(2.0)?.to_string(), "[1. 4.]");
/// assert_eq!(x.gt(0)?.to_string(), "[ True False]");
/// assert_eq!(x.div(x.numel())?.to_string(), "[ 0.5 -1. ]");
/// let error = Tensor::from_iter([1i32])?.add(0.5).map(drop).unwrap_err();
/// assert!(error.to_string().starts_with("add: expected a whole number for i32, got 0.5"));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy)]
pub enum Operand<'a> {
    /// A tensor.
    Tensor(&'a Tensor),
    /// A number.
    Float(f64),
    /// A whole number.
    Int(i64),
}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(tensor: &'a Tensor) -> Operand<'a> {
        Operand::Tensor(tensor)
    }
}

macro_rules! numbers {
    ($($ty:ty: $kind:ident),*) => {$(
        impl From<$ty> for Operand<'_> {
            fn from(number: $ty) -> Self {
                Operand::$kind(number.into())
            }
        }
    )*};
}

numbers!(f32: Float, f64: Float, i32: Int, u32: Int, i64: Int);

impl From<usize> for Operand<'_> {
    fn from(number: usize) -> Self {
        i64::try_from(number).map_or(Operand::Float(number as f64), Operand::Int)
    }
}

impl Operand<'_> {
    /// As a tensor; a number gets this element type.
    #[inline]
    pub(crate) fn tensor(
        self,
        dtype: Dtype,
        (method, site): (&str, &'static Location<'static>),
    ) -> Result<Tensor> {
        let value = match self {
            Operand::Tensor(tensor) => return Ok(tensor.clone()),
            Operand::Int(number) if dtype.is_float() => Elements::Float(number as f64),
            Operand::Int(number) => Elements::Int(number),
            Operand::Float(number) if dtype.is_float() => Elements::Float(number),
            Operand::Float(number) if number.fract() == 0.0 => Elements::Int(number as i64),
            Operand::Float(number) => {
                let message = (format!("a whole number for {dtype}"), number.to_string());
                return Err(Error::new(method, message, site));
            }
        };
        scalar(dtype, value, site).named(method, site)
    }

    /// The element type, if it is a tensor's.
    pub(crate) fn dtype(self) -> Option<Dtype> {
        match self {
            Operand::Tensor(tensor) => Some(tensor.dtype()),
            Operand::Float(_) | Operand::Int(_) => None,
        }
    }
}

/// A 0-d tensor.
pub(crate) fn scalar(dtype: Dtype, value: Elements, site: &'static Location<'static>) -> Result<Tensor> {
    run_one(&Constant { dtype, shape: Vec::new(), value }, Tensors::new(), site)
}
