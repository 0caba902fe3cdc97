//! The explicit handle of an operation in flight.

use std::panic::Location;

use crate::error::Result;
use crate::flight::Way;

/// A pending operation and its result.
///
/// ```
/// use consort::{Reduce, Tensor};
///
/// let sums = consort::spawn(2, |mesh| {
///     let pending = mesh.all_reduce_async(Tensor::from_slice(&[1.0f32], &[1])?, Reduce::Sum)?;
///     assert_eq!(mesh.in_flight(), 1);
///     let sum = pending.wait()?;
///     assert_eq!(mesh.in_flight(), 0);
///     sum.item::<f32>()
/// });
/// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 2.0)));
/// ```
#[must_use = "what an operation gives comes by waiting for it"]
pub struct Pending<T> {
    pub(crate) gives: T,
    /// `None` if there are only shapes.
    pub(crate) flight: Option<Way>,
}

impl<T> Pending<T> {
    /// Waits for the operation and returns its result.
    ///
    /// [`Pending`] has an example.
    #[track_caller]
    pub fn wait(self) -> Result<T> {
        if let Some(flight) = &self.flight {
            flight.wait(Location::caller())?;
        }
        Ok(self.gives)
    }

    /// Whether it has completed; advances it, and never blocks.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let sums = consort::spawn(2, |mesh| {
    ///     let pending = mesh.all_reduce_async(Tensor::from_slice(&[1.0f32], &[1])?, Reduce::Sum)?;
    ///     while !pending.test()? {} // Other work goes here.
    ///     pending.wait()?.item::<f32>()
    /// });
    /// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 2.0)));
    /// ```
    pub fn test(&self) -> Result<bool> {
        self.flight.as_ref().map_or(Ok(true), |flight| flight.test())
    }
}
