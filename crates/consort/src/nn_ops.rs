//! Products, norms, attention, convolution.

use std::panic::Location;

use consort_ir::ops;
use smallvec::smallvec;

use crate::apply::run_one;
use crate::error::Result;
use crate::index::Index;
use crate::tensor::Tensor;

impl Tensor {
    /// The product of matrices in the last two dimensions. A 2-d `other` is multiplied with every matrix of this one.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// let y = consort::Tensor::from_slice(&[10.0f32, 1.0], &[2, 1])?;
    /// assert_eq!(x.matmul(&y)?.to_string(), "[[12.]\n [34.]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Result<Tensor> {
        run_one(&ops::Matmul {}, smallvec![self.clone(), other.clone()], Location::caller())
    }

    /// exp(x) over the sum of exp(x) along a dimension.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_slice(&[0.0f32, 0.0, 0.0, f32::NEG_INFINITY], &[2, 2])?;
    /// assert_eq!(x.softmax(1)?.to_string(), "[[0.5 0.5]\n [1.  0. ]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn softmax(&self, dim: usize) -> Result<Tensor> {
        run_one(&ops::Softmax { dim }, smallvec![self.clone()], Location::caller())
    }

    /// The logarithm of [`softmax`](Tensor::softmax), without its rounding.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([0.0f32, f32::NEG_INFINITY])?;
    /// assert_eq!(x.log_softmax(0)?.to_string(), "[  0. -inf]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn log_softmax(&self, dim: usize) -> Result<Tensor> {
        run_one(&ops::LogSoftmax { dim }, smallvec![self.clone()], Location::caller())
    }

    /// The logarithm of the sum of exp(x) over dimensions, also where exp(x) would be too large. With `keep` these
    /// dimensions stay, with a size of one.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_slice(&[1000.0f32, f32::NEG_INFINITY], &[1, 2])?;
    /// assert_eq!(x.logsumexp(&[1], false)?.to_string(), "[1000.]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn logsumexp(&self, dims: &[usize], keep: bool) -> Result<Tensor> {
        run_one(&ops::Logsumexp { dims: dims.to_vec(), keep }, smallvec![self.clone()], Location::caller())
    }

    /// Divides by the root of the mean square along the last dimension, times a weight for each element of it.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_slice(&[3.0f32, 3.0], &[1, 2])?;
    /// let weight = consort::Tensor::from_iter([1.0f32, 10.0])?;
    /// assert_eq!(x.rms_norm(&weight, 1e-30)?.to_string(), "[[ 1. 10.]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn rms_norm(&self, weight: &Tensor, eps: f64) -> Result<Tensor> {
        run_one(&ops::RmsNorm { eps }, smallvec![self.clone(), weight.clone()], Location::caller())
    }

    /// Subtracts the mean and divides by the standard deviation along the last dimension; times a weight, plus a bias.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_slice(&[1.0f32, 3.0], &[1, 2])?;
    /// let (weight, bias) = (consort::Tensor::from_iter([1.0f32, 2.0])?, consort::Tensor::from_iter([0.0f32, 5.0])?);
    /// assert_eq!(x.layer_norm(&weight, &bias, 1e-30)?.to_string(), "[[-1.  7.]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn layer_norm(&self, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
        let args = smallvec![self.clone(), weight.clone(), bias.clone()];
        run_one(&ops::LayerNorm { eps }, args, Location::caller())
    }

    /// softmax(scale q k^T) v for each batch entry and head; operands are `[batch, heads, length, width]`. With a causal
    /// offset c, query i sees keys up to i + c.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let q = consort::Tensor::from_slice(&[0.0f32, 0.0], &[1, 1, 2, 1])?;
    /// let v = consort::Tensor::from_slice(&[10.0f32, 20.0], &[1, 1, 2, 1])?;
    /// let y = q.attention(&q, &v, 1.0, Some(0.into()))?;
    /// assert_eq!(y.to_vec::<f32>()?, [10.0, 15.0]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn attention(&self, k: &Tensor, v: &Tensor, scale: f64, causal: Option<Index>) -> Result<Tensor> {
        let args = smallvec![self.clone(), k.clone(), v.clone()];
        run_one(&ops::Attention { scale, causal: causal.map(|offset| offset.0) }, args, Location::caller())
    }

    /// The convolution of `[batch, in, length]` with weights `[out, in / groups, k]`.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[1, 1, 3])?;
    /// let weight = consort::Tensor::from_slice(&[1.0f32, 10.0], &[1, 1, 2])?;
    /// assert_eq!(x.conv1d(&weight, 1, 0, 1, 1)?.to_string(), "[[[21. 32.]]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn conv1d(
        &self,
        weight: &Tensor,
        stride: usize,
        padding: usize,
        dilation: usize,
        groups: usize,
    ) -> Result<Tensor> {
        let op = ops::Conv1d { stride, padding, dilation, groups };
        run_one(&op, smallvec![self.clone(), weight.clone()], Location::caller())
    }

    /// The convolution of `[batch, in, height, width]` with weights `[out, in / groups, kh, kw]`.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 2, 2])?;
    /// let weight = consort::Tensor::from_slice(&[1.0f32], &[1, 1, 1, 1])?;
    /// assert_eq!(x.conv2d(&weight, [1, 1], [0, 0], [1, 1], 1)?.shape(), [1, 1, 2, 2]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn conv2d(
        &self,
        weight: &Tensor,
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        groups: usize,
    ) -> Result<Tensor> {
        let op = ops::Conv2d {
            stride: stride.to_vec(),
            padding: padding.to_vec(),
            dilation: dilation.to_vec(),
            groups,
        };
        run_one(&op, smallvec![self.clone(), weight.clone()], Location::caller())
    }
}
