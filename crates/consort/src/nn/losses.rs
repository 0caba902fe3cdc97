//! Losses: 0-d tensors in f32, or in f64 for f64.

use std::panic::Location;

use consort_ir::index::Index;
use consort_types::Failure;

use crate::{Dtype, Error, Reduce, Result, Tensor};

use super::layers::Embedding;

/// The element type in which losses, and angles, are computed.
pub(super) fn wide(dtype: Dtype) -> Dtype {
    if dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 }
}

/// The mean of the squares of the differences.
///
/// ```
/// use consort::Tensor;
/// use consort::nn::mean_squared_error;
///
/// # fn main() -> consort::Result<()> {
/// let (x, y) = (Tensor::from_iter([1.0f64, 2.0])?, Tensor::from_iter([1.0f64, 5.0])?);
/// assert_eq!(mean_squared_error(&x, &y)?.item::<f64>()?, 4.5);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn mean_squared_error(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    // To broadcast one of them is almost always a mistake: [n] and [n, 1] would give n x n differences.
    let (a, b) = (&x.ty.shape, &y.ty.shape);
    if differ(a, b) {
        let headline = (format!("targets of shape {:?}", x.shape()), format!("{:?}", y.shape()));
        return Err(Error::new("mean_squared_error", headline, Location::caller()));
    }
    let off = x.cast(wide(x.dtype()))?.sub(&y.cast(wide(y.dtype()))?)?;
    off.mul(&off)?.mean_all()
}

/// The mean of -log softmax(logits) at the targets: logits are `[.., classes]`, targets integers `[..]`.
///
/// ```
/// use consort::Tensor;
/// use consort::nn::cross_entropy;
///
/// # fn main() -> consort::Result<()> {
/// // The targets have probabilities of 1/2 and 3/4.
/// let logits = Tensor::from_slice(&[0.0f64, 0.0, 3f64.ln(), 0.0], &[2, 2])?;
/// let loss = cross_entropy(&logits, &Tensor::from_iter([1i64, 0])?)?.item::<f64>()?;
/// assert!((loss + (0.5f64.ln() + 0.75f64.ln()) / 2.0).abs() < 1e-15);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    check_targets(logits, targets, Location::caller())?;
    let (logits, last) = (logits.cast(wide(logits.dtype()))?, targets.rank());
    let own = logits.take_along(&targets.unsqueeze(last)?, last)?.squeeze(last)?;
    logits.logsumexp(&[last], false)?.sub(&own)?.mean_all()
}

/// Whether shapes are known to differ.
fn differ(a: &[Index], b: &[Index]) -> bool {
    let differ = |(a, b): (&Index, &Index)| a.as_const().zip(b.as_const()).is_some_and(|(a, b)| a != b);
    a.len() != b.len() || a.iter().zip(b).any(differ)
}

/// Fails unless there is one target, the number of a class, for each line of x.
fn check_targets(x: &Tensor, targets: &Tensor, site: &'static Location<'static>) -> Result<()> {
    let wrong = |failure: Box<Failure>| Err(Error::of("cross_entropy", failure, site));
    if !matches!(targets.dtype(), Dtype::I32 | Dtype::I64) {
        return wrong(Failure::new(("targets of i32 or i64", targets.dtype().to_string())));
    }
    match x.ty.shape.split_last() {
        Some((_, lines)) if !differ(lines, &targets.ty.shape) => Ok(()),
        Some(_) => {
            let shape = x.shape();
            let expected =
                format!("targets of shape {:?}, one for each line of {shape:?}", &shape[..shape.len() - 1]);
            wrong(Failure::new((expected, format!("{:?}", targets.shape()))))
        }
        None => wrong(Failure::new(("at least 1 dimension", "a 0-d tensor"))),
    }
}

impl Embedding {
    /// The [`cross_entropy`] of its [`logits`](Embedding::logits) for x. Each member computes those of its rows of the
    /// vocabulary; only maxima, sums and the targets' logits travel. Targets must be in the vocabulary.
    ///
    /// ```
    /// use consort::nn::{Embedding, cross_entropy, share};
    /// use consort::{Dtype, Tensor};
    ///
    /// let done = consort::spawn(2, |mesh| {
    ///     let own = share(5, mesh.my_rank()?, mesh.size());
    ///     let table = Tensor::normal(Dtype::F64, &[5, 3], 1)?.narrow(0, own.start, own.len())?;
    ///     let head = Embedding { table, sizes: vec![2, 3], group: (*mesh).clone() };
    ///     let (x, targets) = (Tensor::normal(Dtype::F64, &[4, 3], 2)?, Tensor::from_iter([4i64, 0, 1, 2])?);
    ///     let whole = cross_entropy(&head.logits(&x)?, &targets)?.item::<f64>()?;
    ///     assert!((head.cross_entropy(&x, &targets)?.item::<f64>()? - whole).abs() < 1e-14);
    ///     Ok(())
    /// });
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    #[track_caller]
    pub fn cross_entropy(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        check_targets(x, targets, Location::caller())?;
        let (logits, last) = (x.matmul(&self.table.t()?)?, targets.rank());
        let logits = logits.cast(wide(logits.dtype()))?;
        // The loss does not depend on what is subtracted from all logits of a row.
        let most = self.group.all_reduce(logits.stop_gradient()?.max(&[last], true)?, Reduce::Max)?;
        let logits = logits.sub(&most)?;
        let (place, mine) = self.own_places(targets)?;
        let own = logits.take_along(&place.unsqueeze(last)?, last)?.squeeze(last)?;
        let parts = vec![logits.exp()?.sum(&[last], false)?, mine.select(&own, 0.0)?];
        let sums = self.group.all_reduce_coalesced(parts, Reduce::Sum)?;
        sums[0].log()?.sub(&sums[1])?.mean_all()
    }
}
