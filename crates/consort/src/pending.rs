//! The explicit handle of operations in flight.

use std::panic::Location;

use smallvec::SmallVec;

use crate::error::Result;
use crate::flight::Way;
use crate::mesh::Group;
use crate::world::World;

/// Pending operations and the result of the calls that started them. [`Group::pending`] returns one.
///
/// ```
/// use consort::{Reduce, Tensor};
///
/// let sums = consort::spawn(2, |mesh| {
///     let pending = mesh.pending(|| mesh.all_reduce(Tensor::from_slice(&[1.0f32], &[1])?, Reduce::Sum))?;
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
    pub(crate) started: Started,
}

/// The operations that a handle waits for; none if there are only shapes.
///
/// [`Visit::started`](crate::Visit::started) and [`Map::started`](crate::Map::started) see it.
#[derive(Clone, Default)]
pub struct Started(pub(crate) SmallVec<[Way; 1]>);

impl Started {
    pub(crate) fn wait(&self, site: &'static Location<'static>) -> Result<()> {
        self.0.iter().try_for_each(|way| way.wait(site))
    }
}

impl<T> Pending<T> {
    /// Waits for the operations and returns the result.
    ///
    /// [`Pending`] has an example.
    #[track_caller]
    pub fn wait(self) -> Result<T> {
        self.started.wait(Location::caller())?;
        Ok(self.gives)
    }

    /// Whether all operations have completed; advances them, and never blocks. Fails if another rank has failed or left.
    ///
    /// All tests of an operation together may take as long as a wait: a loop that does nothing else ends at the deadline. Work
    /// between them does not count, so that a program may look now and then for a message that comes much later.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let sums = consort::spawn(2, |mesh| {
    ///     let pending = mesh.pending(|| mesh.all_reduce(Tensor::from_slice(&[1.0f32], &[1])?, Reduce::Sum))?;
    ///     while !pending.test()? {} // Other work goes here.
    ///     pending.wait()?.item::<f32>()
    /// });
    /// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 2.0)));
    /// ```
    #[track_caller]
    pub fn test(&self) -> Result<bool> {
        let (mut all, site) = (true, Location::caller());
        for way in &self.started.0 {
            all &= way.test(site)?;
        }
        Ok(all)
    }
}

impl Group {
    /// Makes calls, and returns a handle of the operations that they start, on any groups of the mesh. Any call has a
    /// handle in this way: in place, into a tensor, of a list, several calls together. The handle does not
    /// borrow what the calls write. A barrier among the calls is not waited for; the handle is.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let (mut x, mut y) = (Tensor::from_slice(&[1i64], &[1])?, Tensor::from_slice(&[2.0f32], &[1])?);
    ///     let pending = mesh.pending(|| {
    ///         mesh.all_reduce_(&mut x, Reduce::Sum)?;
    ///         mesh.broadcast_(&mut y, 0)?;
    ///         mesh.barrier()
    ///     })?;
    ///     while !pending.test()? {} // Other work goes here.
    ///     pending.wait()?;
    ///     x.item::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == 2)));
    /// ```
    pub fn pending<T>(&self, calls: impl FnOnce() -> Result<T>) -> Result<Pending<T>> {
        let starts = Starts::collect(&self.world);
        let gives = calls()?;
        Ok(Pending { gives, started: starts.finish() })
    }
}

/// Collects the operations that are started, until it is finished or dropped.
pub(crate) struct Starts<'a> {
    world: &'a World,
    /// Those of the handle in whose calls this one is made.
    outer: Option<Started>,
}

impl Starts<'_> {
    pub(crate) fn collect(world: &World) -> Starts<'_> {
        Starts { world, outer: world.starts.replace(Some(Started::default())) }
    }

    pub(crate) fn finish(self) -> Started {
        let mut started = self.world.starts.borrow().clone().unwrap_or_default();
        // A compiled call that traced: what it then ran is among the others.
        started.0.retain(|way| !matches!(way, Way::Traced(start) if start.has_ended()));
        started
    }
}

impl Drop for Starts<'_> {
    fn drop(&mut self) {
        let inner = self.world.starts.replace(self.outer.take());
        if let (Some(outer), Some(inner)) = (&mut *self.world.starts.borrow_mut(), inner) {
            outer.0.extend(inner.0);
        }
    }
}
