//! Learning rates as functions of the step, which is a tensor: a step is compiled once.

use crate::{Dtype, Result, Tensor};

/// A rate that rises linearly for `warmup` steps, then falls along half a cosine, and stays from `total` steps on.
///
/// ```
/// use consort::Tensor;
/// use consort::nn::Cosine;
///
/// # fn main() -> consort::Result<()> {
/// let rate = Cosine { peak: 1.0, least: 0.5, warmup: 2, total: 6 };
/// for (step, expected) in [(0, 0.5), (1, 1.0), (2, 1.0), (4, 0.75), (6, 0.5), (9, 0.5)] {
///     assert!((rate.at(&Tensor::scalar(step as i64)?)?.item::<f64>()? - expected).abs() < 1e-15);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cosine {
    /// The largest rate.
    pub peak: f64,
    /// The last rate.
    pub least: f64,
    /// How many steps the rate rises.
    pub warmup: usize,
    /// At which step it is at its least.
    pub total: usize,
}

impl Cosine {
    /// The rate at a step, counted from 0: a 0-d f64.
    ///
    /// [`Cosine`] has an example.
    #[track_caller]
    pub fn at(&self, step: &Tensor) -> Result<Tensor> {
        let step = step.cast(Dtype::F64)?;
        let rising = step.add(1.0)?.mul(self.peak / self.warmup.max(1) as f64)?;
        let length = self.total.saturating_sub(self.warmup).max(1) as f64;
        let done = step.sub(self.warmup)?.div(length)?.clamp(0.0, 1.0)?;
        let height = done.mul(std::f64::consts::PI)?.cos()?.add(1.0)?.mul((self.peak - self.least) / 2.0)?;
        step.lt(self.warmup)?.select(&rising, &height.add(self.least)?)
    }
}

/// A rate that goes from `first` to `last` in `steps` steps, and stays.
///
/// ```
/// use consort::Tensor;
/// use consort::nn::Linear;
///
/// # fn main() -> consort::Result<()> {
/// let rate = Linear { first: 1.0, last: 0.0, steps: 4 };
/// for (step, expected) in [(0, 1.0), (1, 0.75), (4, 0.0), (5, 0.0)] {
///     assert_eq!(rate.at(&Tensor::scalar(step as i64)?)?.item::<f64>()?, expected);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Linear {
    /// The rate at step 0.
    pub first: f64,
    /// The rate from step `steps` on.
    pub last: f64,
    /// How many steps lie between them.
    pub steps: usize,
}

impl Linear {
    /// The rate at a step, counted from 0: a 0-d f64.
    ///
    /// [`Linear`] has an example.
    #[track_caller]
    pub fn at(&self, step: &Tensor) -> Result<Tensor> {
        let done = step.cast(Dtype::F64)?.div(self.steps.max(1))?.clamp(0.0, 1.0)?;
        done.mul(self.last - self.first)?.add(self.first)
    }
}
