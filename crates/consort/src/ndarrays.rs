//! Tensors from and to arrays of the ndarray crate, behind the feature `ndarray`.

use std::panic::Location;

use ndarray::{Array, ArrayD, ArrayRef, Dimension, IxDyn};

use crate::element::Element;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

impl Tensor {
    /// A tensor of an array's elements, or of a view's, whatever their order in memory.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// # fn main() -> consort::Result<()> {
    /// let array = ndarray::arr2(&[[1i64, 2], [3, 4], [5, 6]]);
    /// let x = Tensor::from_ndarray(&array.t())?;
    /// assert_eq!(x.to_string(), "[[1 3 5]\n [2 4 6]]");
    /// assert_eq!(x.to_ndarray::<i64>()?, array.t().into_dyn());
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn from_ndarray<T: Element, D: Dimension>(array: &ArrayRef<T, D>) -> Result<Tensor> {
        match array.as_slice() {
            Some(elements) => Tensor::from_slice(elements, array.shape()),
            None => Tensor::from_slice(&array.iter().copied().collect::<Vec<T>>(), array.shape()),
        }
    }

    /// An array of its elements. Waits for them.
    ///
    /// [`from_ndarray`](Tensor::from_ndarray) has an example.
    #[track_caller]
    pub fn to_ndarray<T: Element>(&self) -> Result<ArrayD<T>> {
        let site = Location::caller();
        Array::from_shape_vec(IxDyn(self.shape()), self.elements::<T>("to_ndarray", site)?)
            .map_err(|error| Error::new("to_ndarray", error.to_string(), site))
    }
}
