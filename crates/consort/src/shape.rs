//! Shape ops: views, and ops that move elements.

use std::panic::Location;

use consort_ir::index as ir;
use consort_ir::ops;
use consort_types::Headline;
use smallvec::smallvec;

use crate::apply::{run, run_one};
use crate::error::{Error, Named, Result};
use crate::index::{Index, Shape, plain};
use crate::tensor::{Tensor, Tensors};
use crate::trace::outside_of_updates;

impl Tensor {
    /// The same elements in another shape. A view if the layout allows it.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter(0..6i32)?.reshape(&[2, 3])?;
    /// assert_eq!(x.to_string(), "[[0 1 2]\n [3 4 5]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn reshape(&self, shape: &(impl Shape + ?Sized)) -> Result<Tensor> {
        run_one(&ops::Reshape { shape: plain(shape.sizes()) }, smallvec![self.clone()], Location::caller())
    }

    /// The dimensions in another order, as a view.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter(0..6i32)?.reshape(&[2, 3])?;
    /// assert_eq!(x.permute(&[1, 0])?.to_string(), "[[0 3]\n [1 4]\n [2 5]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn permute(&self, dims: &[usize]) -> Result<Tensor> {
        run_one(&ops::Permute { dims: dims.to_vec() }, smallvec![self.clone()], Location::caller())
    }

    /// The same elements, as a constant for gradients: none flows through it.
    ///
    /// ```
    /// use consort::{Tensor, grad};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let f = grad(|x: Tensor| x.mul(&x.stop_gradient()?)?.sum_all());
    /// assert_eq!(f.call(Tensor::from_iter([3.0f64])?)?.to_vec::<f64>()?, [3.0]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn stop_gradient(&self) -> Result<Tensor> {
        run_one(&ops::StopGradient {}, smallvec![self.clone()], Location::caller())
    }

    /// The same elements, the result of an all_gather: a gradient gathers them again instead of keeping them.
    ///
    /// ```
    /// use consort::{Reduce, Tensor, grad};
    ///
    /// let parts = consort::spawn(2, |mesh| {
    ///     let (group, x) = (mesh.clone(), Tensor::from_iter([1.0f64, 2.0])?);
    ///     let slope = grad(move |part: Tensor| {
    ///         let w = group.all_gather(&part, 0)?.regather()?; // Whole only while it is used.
    ///         group.all_reduce(w.mul(&w)?.mul(&x)?.sum_all()?, Reduce::Avg)
    ///     });
    ///     slope.call(Tensor::from_iter([3.0f64])?)?.item::<f64>()
    /// });
    /// let parts: Vec<f64> = parts.into_iter().filter_map(|part| part.ok()).collect();
    /// assert_eq!(parts, [6.0, 12.0]);
    /// ```
    #[track_caller]
    pub fn regather(&self) -> Result<Tensor> {
        run_one(&ops::Regather {}, smallvec![self.clone()], Location::caller())
    }

    /// Two dimensions exchanged, as a view.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter(0..6i32)?.reshape(&[1, 2, 3])?;
    /// assert_eq!(x.transpose(1, 2)?.shape(), [1, 3, 2]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn transpose(&self, a: usize, b: usize) -> Result<Tensor> {
        let site = Location::caller();
        if let Some(dim) = [a, b].into_iter().find(|dim| *dim >= self.rank()) {
            return Err(Error::new("transpose", Headline::dimension(dim, self.rank()), site));
        }
        let mut dims: Vec<usize> = (0..self.rank()).collect();
        dims.swap(a, b);
        run_one(&ops::Permute { dims }, smallvec![self.clone()], site).named("transpose", site)
    }

    /// The transpose of a matrix, or of each matrix in the last two dimensions, as a view.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter(0..6i32)?.reshape(&[2, 3])?;
    /// assert_eq!(x.t()?.to_string(), "[[0 3]\n [1 4]\n [2 5]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn t(&self) -> Result<Tensor> {
        let (rank, site) = (self.rank(), Location::caller());
        if rank < 2 {
            return Err(Error::new("t", ("at least 2 dimensions", rank.to_string()), site));
        }
        self.transpose(rank - 2, rank - 1).named("t", site)
    }

    /// The part of a dimension that begins at `start` and has `size` entries, as a view. `start` and `size` may depend
    /// on the rank, and the result then differs between ranks.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter(0..6i32)?;
    /// assert_eq!(x.narrow(0, 2, 3)?.to_string(), "[2 3 4]");
    ///
    /// let shards = consort::spawn(3, |mesh| {
    ///     let x = consort::Tensor::from_iter(0..6i32)?.replicated()?;
    ///     let shard = x.narrow(0, mesh.rank() * 2, 2)?;
    ///     assert_eq!(shard.varies(), ["world"]);
    ///     shard.to_vec::<i32>()
    /// });
    /// assert_eq!(shards.into_iter().flatten().collect::<Vec<_>>(), [[0, 1], [2, 3], [4, 5]]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn narrow(&self, dim: usize, start: impl Into<Index>, size: impl Into<Index>) -> Result<Tensor> {
        let site = Location::caller();
        let (start, size) = self.narrowed("narrow", dim, start.into(), size.into(), site)?;
        self.part(start, size, &vec![1; self.rank()], site).named("narrow", site)
    }

    /// Starts and sizes, along all dimensions, of the part of a dimension.
    pub(crate) fn narrowed(
        &self,
        op: &str,
        dim: usize,
        start: Index,
        size: Index,
        site: &'static Location<'static>,
    ) -> Result<(Vec<ir::Index>, Vec<ir::Index>)> {
        if dim >= self.rank() {
            return Err(Error::new(op, Headline::dimension(dim, self.rank()), site));
        }
        let (mut starts, mut sizes) = (vec![ir::Index::constant(0); self.rank()], self.ty.shape.clone());
        (starts[dim], sizes[dim]) = (start.0, size.0);
        Ok((starts, sizes))
    }

    /// A box of it. A box that does not overlap a pending message is not waited for.
    pub(crate) fn part(
        &self,
        start: Vec<ir::Index>,
        size: Vec<ir::Index>,
        step: &[usize],
        site: &'static Location<'static>,
    ) -> Result<Tensor> {
        let whole = outside_of_updates(self, &start, &size, step);
        run_one(&ops::Slice { start, size, step: step.to_vec() }, smallvec![whole], site)
    }

    /// A box of it, as a view: start, size and step along each
    /// dimension.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter(0..6i32)?;
    /// assert_eq!(x.slice(&[1], &[3], &[2])?.to_string(), "[1 3 5]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn slice(
        &self,
        start: &(impl Shape + ?Sized),
        size: &(impl Shape + ?Sized),
        step: &[usize],
    ) -> Result<Tensor> {
        self.part(plain(start.sizes()), plain(size.sizes()), step, Location::caller())
    }

    /// One entry along a dimension, which is removed.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter(0..6i32)?.reshape(&[2, 3])?;
    /// assert_eq!(x.at(0, 1)?.to_string(), "[3 4 5]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn at(&self, dim: usize, place: impl Into<Index>) -> Result<Tensor> {
        let site = Location::caller();
        let entry = self.narrow(dim, place, 1usize).named("at", site)?;
        entry.squeeze(dim).named("at", site)
    }

    /// A copy with the box that begins at `start` replaced by `part`.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1i32, 2, 3, 4])?;
    /// let y = x.update_slice(&consort::Tensor::from_iter([20, 30])?, &[1])?;
    /// assert_eq!(y.to_string(), "[ 1 20 30  4]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn update_slice(&self, part: &Tensor, start: &(impl Shape + ?Sized)) -> Result<Tensor> {
        let op = ops::UpdateSlice { start: plain(start.sizes()) };
        run_one(&op, smallvec![self.clone(), part.clone()], Location::caller())
    }

    /// Concatenates tensors along a dimension.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1i32, 2])?;
    /// assert_eq!(consort::Tensor::concat(&[&x, &x], 0)?.to_string(), "[1 2 1 2]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn concat(parts: &[&Tensor], dim: usize) -> Result<Tensor> {
        run_one(&ops::Concat { dim }, parts.iter().map(|part| (*part).clone()).collect(), Location::caller())
    }

    /// Stacks tensors of one shape along a new dimension.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1i32, 2])?;
    /// assert_eq!(consort::Tensor::stack(&[&x, &x], 0)?.to_string(), "[[1 2]\n [1 2]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn stack(parts: &[&Tensor], dim: usize) -> Result<Tensor> {
        let site = Location::caller();
        let parts: Result<Tensors> = parts.iter().map(|part| part.unsqueeze_at(dim, site)).collect();
        parts.and_then(|parts| run_one(&ops::Concat { dim }, parts, site)).named("stack", site)
    }

    /// Splits along a dimension into parts of these sizes, as views.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let parts = consort::Tensor::from_iter([1i32, 2, 3])?.split(0, &[1, 2])?;
    /// assert_eq!(parts[1].to_string(), "[2 3]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn split(&self, dim: usize, sizes: &(impl Shape + ?Sized)) -> Result<Vec<Tensor>> {
        let op = ops::Split { dim, sizes: plain(sizes.sizes()) };
        Ok(run(&op, &mut smallvec![self.clone()], Location::caller())?.into_vec())
    }

    /// Broadcasts to a larger shape, as a view: dimensions are aligned at the end, and sizes of one repeat.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1i32, 2])?;
    /// assert_eq!(x.broadcast_to(&[2, 2])?.to_string(), "[[1 2]\n [1 2]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn broadcast_to(&self, shape: &(impl Shape + ?Sized)) -> Result<Tensor> {
        let (op, site) = (ops::Broadcast { shape: plain(shape.sizes()) }, Location::caller());
        run_one(&op, smallvec![self.clone()], site).named("broadcast_to", site)
    }

    /// Inserts a dimension of size one, before the one at `dim`.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// assert_eq!(consort::Tensor::from_iter([1i32, 2])?.unsqueeze(1)?.shape(), [2, 1]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn unsqueeze(&self, dim: usize) -> Result<Tensor> {
        self.unsqueeze_at(dim, Location::caller())
    }

    pub(crate) fn unsqueeze_at(&self, dim: usize, site: &'static Location<'static>) -> Result<Tensor> {
        if dim > self.rank() {
            let message = (format!("a dimension up to {}", self.rank()), dim.to_string());
            return Err(Error::new("unsqueeze", message, site));
        }
        let mut shape = self.ty.shape.clone();
        shape.insert(dim, ir::Index::constant(1));
        run_one(&ops::Reshape { shape }, smallvec![self.clone()], site).named("unsqueeze", site)
    }

    /// Removes a dimension of size one.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1i32, 2])?.reshape(&[2, 1])?;
    /// assert_eq!(x.squeeze(1)?.shape(), [2]);
    /// assert!(x.squeeze(0).is_err());
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn squeeze(&self, dim: usize) -> Result<Tensor> {
        let site = Location::caller();
        if self.ty.shape.get(dim).and_then(ir::Index::as_const) != Some(1) {
            let message = ("a dimension of size 1", format!("{dim} of {:?}", self.hint_shape()));
            return Err(Error::new("squeeze", message, site));
        }
        let mut shape = self.ty.shape.clone();
        shape.remove(dim);
        run_one(&ops::Reshape { shape }, smallvec![self.clone()], site).named("squeeze", site)
    }

    /// Pads each dimension with entries of a value, before and after its own.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1i32, 2])?;
    /// assert_eq!(x.pad(&[1], &[2], 9.0)?.to_string(), "[9 1 2 9 9]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn pad(
        &self,
        before: &(impl Shape + ?Sized),
        after: &(impl Shape + ?Sized),
        value: f64,
    ) -> Result<Tensor> {
        let op = ops::Pad { low: plain(before.sizes()), high: plain(after.sizes()), value };
        run_one(&op, smallvec![self.clone()], Location::caller())
    }

    /// The entries along a dimension at these indices. Along dimension 0 of a table this is an embedding.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let table = consort::Tensor::from_iter(0..6i32)?.reshape(&[3, 2])?;
    /// let places = consort::Tensor::from_iter([2i64, 0])?;
    /// assert_eq!(table.gather(&places, 0)?.to_string(), "[[4 5]\n [0 1]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn gather(&self, places: &Tensor, dim: usize) -> Result<Tensor> {
        run_one(&ops::Gather { dim }, smallvec![self.clone(), places.clone()], Location::caller())
    }

    /// Picks elements along a dimension by index: along the second of two dimensions, index (i, j)
    /// names an element of row i, which becomes element (i, j) of the result.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1i32, 2, 3, 4])?.reshape(&[2, 2])?;
    /// let places = consort::Tensor::from_iter([1i64, 0])?.reshape(&[2, 1])?;
    /// assert_eq!(x.take_along(&places, 1)?.to_string(), "[[2]\n [3]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn take_along(&self, places: &Tensor, dim: usize) -> Result<Tensor> {
        run_one(&ops::TakeAlong { dim }, smallvec![self.clone(), places.clone()], Location::caller())
    }

    /// A copy with the entries along a dimension at these indices replaced by updates; of several for one index, the
    /// last is kept.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([0i32, 0, 0])?;
    /// let (places, updates) = (consort::Tensor::from_iter([2i64, 2])?, consort::Tensor::from_iter([1i32, 5])?);
    /// assert_eq!(x.scatter(&places, &updates, 0)?.to_string(), "[0 0 5]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn scatter(&self, places: &Tensor, updates: &Tensor, dim: usize) -> Result<Tensor> {
        let args = smallvec![self.clone(), places.clone(), updates.clone()];
        run_one(&ops::Scatter { dim }, args, Location::caller())
    }

    /// A copy with updates added to the entries along a dimension at these indices.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([0i32, 0, 0])?;
    /// let (places, updates) = (consort::Tensor::from_iter([2i64, 2])?, consort::Tensor::from_iter([1i32, 5])?);
    /// assert_eq!(x.scatter_add(&places, &updates, 0)?.to_string(), "[0 0 6]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn scatter_add(&self, places: &Tensor, updates: &Tensor, dim: usize) -> Result<Tensor> {
        let args = smallvec![self.clone(), places.clone(), updates.clone()];
        run_one(&ops::ScatterAdd { dim }, args, Location::caller())
    }
}
