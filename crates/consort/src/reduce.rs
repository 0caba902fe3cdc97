//! Reductions, cumulative sums, sorting.

use std::panic::Location;

use consort_ir::ops;
use consort_types::Dtype;
use smallvec::smallvec;

use crate::apply::{run, run_one};
use crate::error::{Error, Named, Result};
use crate::tensor::Tensor;

macro_rules! reductions {
    ($($(#[doc = $doc:expr])* $name:ident $all:ident $op:ident, $input:literal => $output:literal;)*) => {
        impl Tensor {$(
            $(#[doc = $doc])*
            /// With `keep` these dimensions stay, with a size of one.
            ///
            /// ```
            /// # fn main() -> consort::Result<()> {
            #[doc = concat!("let x = consort::Tensor::from_iter(", $input, ")?.reshape(&[2, 2])?;")]
            #[doc = concat!("assert_eq!(x.", stringify!($name), "(&[1], false)?.to_string(), \"", $output, "\");")]
            /// # Ok(()) }
            /// ```
            #[track_caller]
            pub fn $name(&self, dims: &[usize], keep: bool) -> Result<Tensor> {
                run_one(&ops::$op { dims: dims.to_vec(), keep }, smallvec![self.clone()], Location::caller())
            }

            reductions!(@all $name $all $op, $input);
        )*}
    };
    (@all $name:ident none $op:ident, $input:literal) => {};
    (@all $name:ident $all:ident $op:ident, $input:literal) => {
        #[doc = concat!("[`", stringify!($name), "`](Tensor::", stringify!($name), ") over all dimensions, as a 0-d tensor.")]
        ///
        /// ```
        /// # fn main() -> consort::Result<()> {
        #[doc = concat!("let x = consort::Tensor::from_iter(", $input, ")?;")]
        #[doc = concat!("assert_eq!(x.", stringify!($all), "()?.to_string(), x.", stringify!($name), "(&[0], false)?.to_string());")]
        /// # Ok(()) }
        /// ```
        #[track_caller]
        pub fn $all(&self) -> Result<Tensor> {
            let (dims, site) = ((0..self.rank()).collect(), Location::caller());
            run_one(&ops::$op { dims, keep: false }, smallvec![self.clone()], site).named(stringify!($all), site)
        }
    };
}

reductions! {
    /// The sum over dimensions.
    sum sum_all Sum, "[1.0f32, 2.0, 3.0, 4.0]" => "[3. 7.]";
    /// The mean over dimensions.
    mean mean_all Mean, "[1.0f32, 2.0, 3.0, 4.0]" => "[1.5 3.5]";
    /// The product over dimensions.
    prod none Prod, "[1.0f32, 2.0, 3.0, 4.0]" => "[ 2. 12.]";
    /// The largest over dimensions; NaN where one is.
    max max_all Max, "[1.0f32, 2.0, 3.0, 4.0]" => "[2. 4.]";
    /// The smallest over dimensions; NaN where one is.
    min min_all Min, "[1.0f32, 2.0, 3.0, 4.0]" => "[1. 3.]";
    /// The index of the largest over dimensions, the first of equals.
    argmax none Argmax, "[1.0f32, 2.0, 4.0, 3.0]" => "[1 0]";
    /// The index of the smallest over dimensions, the first of equals.
    argmin none Argmin, "[1.0f32, 2.0, 4.0, 3.0]" => "[0 1]";
    /// Whether any is true over dimensions.
    any none Any, "[true, false, false, false]" => "[ True False]";
    /// Whether all are true over dimensions.
    all none All, "[true, false, true, true]" => "[False  True]";
}

impl Tensor {
    /// Cumulative sums along a dimension.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// assert_eq!(consort::Tensor::from_iter(1..=4i64)?.cumsum(0)?.to_string(), "[ 1  3  6 10]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn cumsum(&self, dim: usize) -> Result<Tensor> {
        run_one(&ops::Cumsum { dim }, smallvec![self.clone()], Location::caller())
    }

    /// Reverses the order along dimensions.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// assert_eq!(consort::Tensor::from_iter(1..=4i64)?.flip(&[0])?.to_string(), "[4 3 2 1]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn flip(&self, dims: &[usize]) -> Result<Tensor> {
        run_one(&ops::Flip { dims: dims.to_vec() }, smallvec![self.clone()], Location::caller())
    }

    /// Sorts along a dimension; also gives the original index of each element. Equal ones keep their order.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let (values, places) = consort::Tensor::from_iter([3i32, 1, 2])?.sort(0, false)?;
    /// assert_eq!((values.to_string(), places.to_string()), ("[1 2 3]".into(), "[1 2 0]".into()));
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn sort(&self, dim: usize, descending: bool) -> Result<(Tensor, Tensor)> {
        self.pair(&ops::Sort { dim, descending }, Location::caller())
    }

    /// The `k` largest along a dimension, largest first, and their indices; equal ones in the order of their indices.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let (values, places) = consort::Tensor::from_iter([3i32, 1, 2])?.topk(0, 2)?;
    /// assert_eq!((values.to_string(), places.to_string()), ("[3 2]".into(), "[0 2]".into()));
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn topk(&self, dim: usize, k: usize) -> Result<(Tensor, Tensor)> {
        self.pair(&ops::Topk { dim, k: k.into() }, Location::caller())
    }

    fn pair(&self, op: &dyn ops::OpDef, site: &'static Location<'static>) -> Result<(Tensor, Tensor)> {
        let mut results = run(op, &mut smallvec![self.clone()], site)?;
        match (results.pop(), results.pop()) {
            (Some(places), Some(values)) => Ok((values, places)),
            _ => Err(Error::new(op.info().name, "expected two results", site)),
        }
    }

    /// A new last dimension with a one at the index that each element holds, and zeros elsewhere.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([2i64, 0])?;
    /// assert_eq!(x.one_hot(3, consort::Dtype::F32)?.to_string(), "[[0. 0. 1.]\n [1. 0. 0.]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn one_hot(&self, classes: usize, dtype: Dtype) -> Result<Tensor> {
        run_one(&ops::OneHot { classes: classes.into(), dtype }, smallvec![self.clone()], Location::caller())
    }
}
