//! Constants. Outside of a trace they may differ between ranks, so they vary over all axes unless they are declared
//! equal.

use std::panic::Location;

use consort_ir::ops::{self, Elements, OpDef};
use consort_types::Dtype;
use smallvec::smallvec;

use crate::apply::run_one;
use crate::element::Element;
use crate::error::{Error, Named, Result};
use crate::index::{Index, Shape, plain};
use crate::operand::{Operand, scalar};
use crate::tensor::{Tensor, Tensors};
use crate::trace::record_sizes;

impl Tensor {
    /// A tensor of one number.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::full(consort::Dtype::F32, &[2], 1.5)?;
    /// assert_eq!(x.to_string(), "[1.5 1.5]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn full(dtype: Dtype, shape: &(impl Shape + ?Sized), value: f64) -> Result<Tensor> {
        let value = if dtype.is_float() { Elements::Float(value) } else { Elements::Int(value as i64) };
        let (op, site) = (ops::Constant { dtype, shape: plain(shape.sizes()), value }, Location::caller());
        run_one(&op, Tensors::new(), site).named("full", site)
    }

    /// A 0-d tensor of one number, with the element type of its Rust type.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let rate = consort::Tensor::scalar(0.5f32)?;
    /// assert_eq!((rate.dtype(), rate.rank(), rate.item::<f32>()?), (consort::Dtype::F32, 0, 0.5));
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn scalar<T: Element>(value: T) -> Result<Tensor> {
        let site = Location::caller();
        scalar(T::DTYPE, value.constant(), site).named("scalar", site)
    }

    /// A tensor of zeros.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// assert_eq!(consort::Tensor::zeros(consort::Dtype::I64, &[3])?.to_string(), "[0 0 0]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn zeros(dtype: Dtype, shape: &(impl Shape + ?Sized)) -> Result<Tensor> {
        Tensor::full(dtype, shape, 0.0).named("zeros", Location::caller())
    }

    /// A tensor of ones.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// assert_eq!(consort::Tensor::ones(consort::Dtype::F32, &[3])?.to_string(), "[1. 1. 1.]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn ones(dtype: Dtype, shape: &(impl Shape + ?Sized)) -> Result<Tensor> {
        Tensor::full(dtype, shape, 1.0).named("ones", Location::caller())
    }

    /// 0, 1, 2 and so on along a dimension.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::iota(consort::Dtype::I64, &[2, 3], 1)?;
    /// assert_eq!(x.to_string(), "[[0 1 2]\n [0 1 2]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn iota(dtype: Dtype, shape: &(impl Shape + ?Sized), dim: usize) -> Result<Tensor> {
        let op = ops::Iota { dtype, shape: plain(shape.sizes()), dim };
        run_one(&op, Tensors::new(), Location::caller())
    }

    /// An index as a 0-d tensor of i64.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// assert_eq!(consort::Tensor::index(5usize)?.item::<i64>()?, 5);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn index(value: impl Into<Index>) -> Result<Tensor> {
        let (op, site) = (ops::IndexValue { value: value.into().0 }, Location::caller());
        run_one(&op, Tensors::new(), site).named("index", site)
    }

    /// The elements of a 0-d or 1-d tensor of integers as sizes. In a trace they become symbols that are known when the
    /// program runs, and there is no break.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let sizes = consort::Tensor::from_iter([2i64, 3])?.to_sizes()?;
    /// assert_eq!(consort::Tensor::from_iter(0..5i32)?.split(0, &sizes)?[1].to_string(), "[2 3 4]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn to_sizes(&self) -> Result<Vec<Index>> {
        let site = Location::caller();
        let n = self.ty.numel().as_const().and_then(|n| usize::try_from(n).ok());
        let wrong =
            || Error::new("to_sizes", "expected i32 or i64 in at most 1 dimension, of a known size", site);
        if let Some(sizes) = record_sizes(self, n.ok_or_else(wrong)?, site) {
            return Ok(sizes?.into_iter().map(Index).collect());
        }
        match (self.dtype(), self.rank()) {
            (Dtype::I64, 0 | 1) => self.elements::<i64>("to_sizes", site).map(indices),
            (Dtype::I32, 0 | 1) => self.elements::<i32>("to_sizes", site).map(indices),
            _ => Err(wrong()),
        }
    }

    /// Random numbers, evenly between 0 and 1, from a key: the same key gives the same numbers, on any machine. The key is
    /// a number, or a 0-d tensor of i64: as a tensor, a compiled function takes another one at each call.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// use consort::{Dtype, Tensor};
    /// let x = Tensor::uniform(Dtype::F32, &[2, 3], 7)?;
    /// assert_eq!(x.to_vec::<f32>()?, Tensor::uniform(Dtype::F32, &[2, 3], 7)?.to_vec::<f32>()?);
    /// let key = Tensor::scalar(7i64)?;
    /// assert_eq!(x.to_vec::<f32>()?, Tensor::uniform(Dtype::F32, &[2, 3], &key)?.to_vec::<f32>()?);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn uniform<'a>(
        dtype: Dtype,
        shape: &(impl Shape + ?Sized),
        key: impl Into<Operand<'a>>,
    ) -> Result<Tensor> {
        let shape = shape.sizes();
        let (start, site) = (vec![0usize; shape.len()], Location::caller());
        Tensor::uniform_part(dtype, &shape, &shape, &start, key).named("uniform", site)
    }

    /// The part of a larger tensor of random numbers that begins at `start`: the whole does not depend on how many
    /// ranks share it.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// use consort::{Dtype, Tensor};
    /// let whole = Tensor::uniform(Dtype::F32, &[4, 3], 7)?;
    /// let part = Tensor::uniform_part(Dtype::F32, &[2, 3], &[4, 3], &[2, 0], 7)?;
    /// assert_eq!(part.to_vec::<f32>()?, whole.narrow(0, 2, 2)?.to_vec::<f32>()?);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn uniform_part<'a>(
        dtype: Dtype,
        shape: &(impl Shape + ?Sized),
        of: &(impl Shape + ?Sized),
        start: &(impl Shape + ?Sized),
        key: impl Into<Operand<'a>>,
    ) -> Result<Tensor> {
        let [shape, of, start] = [shape.sizes(), of.sizes(), start.sizes()].map(plain);
        random(&ops::Uniform { dtype, shape, of, start }, key.into(), ("uniform_part", Location::caller()))
    }

    /// Random numbers of the normal distribution, from a key as that of [`uniform`](Tensor::uniform).
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::normal(consort::Dtype::F64, &[1000], 7)?;
    /// assert!(x.mean(&[0], false)?.item::<f64>()?.abs() < 0.1);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn normal<'a>(
        dtype: Dtype,
        shape: &(impl Shape + ?Sized),
        key: impl Into<Operand<'a>>,
    ) -> Result<Tensor> {
        let shape = shape.sizes();
        let (start, site) = (vec![0usize; shape.len()], Location::caller());
        Tensor::normal_part(dtype, &shape, &shape, &start, key).named("normal", site)
    }

    /// The part of a larger tensor of normal random numbers that begins at `start`, as
    /// [`uniform_part`](Tensor::uniform_part).
    ///
    /// [`uniform_part`](Tensor::uniform_part) has an example.
    #[track_caller]
    pub fn normal_part<'a>(
        dtype: Dtype,
        shape: &(impl Shape + ?Sized),
        of: &(impl Shape + ?Sized),
        start: &(impl Shape + ?Sized),
        key: impl Into<Operand<'a>>,
    ) -> Result<Tensor> {
        let [shape, of, start] = [shape.sizes(), of.sizes(), start.sizes()].map(plain);
        random(&ops::Normal { dtype, shape, of, start }, key.into(), ("normal_part", Location::caller()))
    }
}

fn indices(list: Vec<impl Into<Index>>) -> Vec<Index> {
    list.into_iter().map(Into::into).collect()
}

/// Runs a random op on a key.
fn random(
    op: &dyn OpDef,
    key: Operand<'_>,
    (method, site): (&str, &'static Location<'static>),
) -> Result<Tensor> {
    let key = key.tensor(Dtype::I64, (method, site))?;
    run_one(op, smallvec![key], site).named(method, site)
}
