//! Collectives that write to existing storage: in place, or into a given tensor or slice.

use std::panic::Location;

use consort_ir::ops;
use consort_ir::ops::OpDef;
use consort_types::{Headline, Reduce};

use crate::error::{Error, Named, Result};
use crate::index::{Index, Shape};
use crate::mesh::Group;
use crate::place::{Place, SliceMut};
use crate::tensor::Tensor;
use crate::trace::is_tracing;

impl Group {
    /// Runs an operation whose result replaces its operand in place.
    #[track_caller]
    fn in_place<'a>(
        &self,
        op: &dyn OpDef,
        place: impl Place<'a>,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let mut slice = place.into_slice();
        slice.make_own(site)?;
        // A whole tensor is replaced by the result. A slice has one more owner: the tensor itself.
        if slice.is_whole() {
            return self.start_on(op, slice.tensor, site);
        }
        // The view is another owner, so it ends before the result is taken.
        let result = self.start(op, &[slice.view()], 2, &[], site)?.pop();
        match result {
            Some(result) => slice.take_result(result, site),
            None => Ok(()),
        }
    }

    /// Runs an operation whose result is written to a given tensor or slice.
    #[track_caller]
    fn write_to_place<'a>(
        &self,
        op: &dyn OpDef,
        out: impl Place<'a>,
        x: Tensor,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let mut slice = out.into_slice();
        let whole = slice.is_whole() && !is_tracing();
        slice.make_own(site)?;
        let args = [x];
        if whole {
            if let Some(result) = self.start(op, &args, 1, std::slice::from_ref(slice.tensor), site)?.pop() {
                *slice.tensor = result;
            }
            return Ok(());
        }
        let result = self.start(op, &args, 2, &[slice.view()], site)?.pop();
        match result {
            Some(result) => slice.take_result(result, site),
            None => Ok(()),
        }
    }

    /// Joins the members' parts of a tensor: the result replaces it.
    #[track_caller]
    fn join_parts<'a>(
        &self,
        name: &str,
        op: &dyn OpDef,
        x: impl Place<'a>,
        dim: usize,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let slice = x.into_slice();
        let (start, size) = self.own_part(name, &slice, dim, site)?;
        let mine = slice.view().narrow(dim, start, size)?;
        let result = self.one(op, mine, site)?;
        put_joined(slice, result, site)
    }

    /// Runs an operation that gives each member its part of a tensor: the result replaces that part.
    #[track_caller]
    fn replace_part<'a>(
        &self,
        name: &str,
        op: &dyn OpDef,
        x: impl Place<'a>,
        dim: usize,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let slice = x.into_slice();
        let own = self.own_part(name, &slice, dim, site)?;
        let result = self.one(op, slice.view(), site)?;
        put_part(slice, dim, own, result, site)
    }

    /// [`all_reduce`](Group::all_reduce) in place.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let mut x = Tensor::from_slice(&[1i64, 2, 3], &[3])?;
    ///     mesh.all_reduce_(&mut x, Reduce::Sum)?;
    ///     mesh.all_reduce_(x.narrow_mut(0, 0usize, 1usize)?, Reduce::Sum)?;
    ///     x.to_vec::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [4, 4, 6])));
    /// ```
    #[track_caller]
    pub fn all_reduce_<'a>(&self, x: impl Place<'a>, reduce: Reduce) -> Result<()> {
        let (op, site) = (ops::AllReduceStart { reduce, over: self.over }, Location::caller());
        self.in_place(&op, x, site).named("all_reduce_", site)
    }

    /// [`broadcast`](Group::broadcast) in place.
    ///
    /// ```
    /// use consort::{Missing, Reduce, Route, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let mut x = Tensor::from_slice(&[me + 1, me + 3], &[2])?;
    ///     mesh.broadcast_(&mut x, 1)?; // [2, 4] on both.
    ///     mesh.reduce_(&mut x, Reduce::Sum, 0)?; // [4, 8] and zeros.
    ///     mesh.permute_(&mut x, Route::Ring(1), Missing::Error)?; // The other way round.
    ///     mesh.all_to_all_(&mut x)?; // Each gets a part of both.
    ///     x.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[0, 4], [0, 8]]);
    /// ```
    #[track_caller]
    pub fn broadcast_<'a>(&self, x: impl Place<'a>, root: usize) -> Result<()> {
        let (op, site) = (ops::BroadcastStart { root, over: self.over }, Location::caller());
        self.in_place(&op, x, site).named("broadcast_", site)
    }

    /// [`reduce`](Group::reduce) in place.
    ///
    /// [`broadcast_`](Group::broadcast_) has an example.
    #[track_caller]
    pub fn reduce_<'a>(&self, x: impl Place<'a>, reduce: Reduce, root: usize) -> Result<()> {
        let (op, site) = (ops::ReduceStart { reduce, root, over: self.over }, Location::caller());
        self.in_place(&op, x, site).named("reduce_", site)
    }

    /// [`permute`](Group::permute) in place.
    ///
    /// [`broadcast_`](Group::broadcast_) has an example.
    #[track_caller]
    pub fn permute_<'a>(
        &self,
        x: impl Place<'a>,
        route: impl Into<consort_types::Route>,
        missing: consort_types::Missing,
    ) -> Result<()> {
        let route = route.into();
        let (op, site) = (ops::PermuteStart { route, missing, over: self.over }, Location::caller());
        self.in_place(&op, x, site).named("permute_", site)
    }

    /// [`all_to_all`](Group::all_to_all) with equal parts, in place.
    ///
    /// [`broadcast_`](Group::broadcast_) has an example.
    #[track_caller]
    pub fn all_to_all_<'a>(&self, x: impl Place<'a>) -> Result<()> {
        let op = ops::AllToAllStart { in_splits: None, out_splits: None, over: self.over };
        let site = Location::caller();
        self.in_place(&op, x, site).named("all_to_all_", site)
    }

    /// [`all_gather`](Group::all_gather) in place: each member holds its part of a dimension, at its place in the
    /// group, and receives the others' parts at theirs.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()?;
    ///     let mut x = Tensor::from_slice(&[0i64, 0], &[2])?;
    ///     x.narrow_mut(0, me, 1usize)?.copy_from(&Tensor::from_slice(&[me as i64 + 5], &[1])?)?;
    ///     mesh.all_gather_(&mut x, 0)?; // [5, 6] on both.
    ///     mesh.reduce_scatter_(&mut x, Reduce::Sum, 0)?; // Each reduces its part, and leaves the other.
    ///     x.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[10, 6], [5, 12]]);
    /// ```
    #[track_caller]
    pub fn all_gather_<'a>(&self, x: impl Place<'a>, dim: usize) -> Result<()> {
        let (op, site) = (ops::AllGatherStart { dims: vec![dim], over: self.over }, Location::caller());
        self.join_parts("all_gather_", &op, x, dim, site).named("all_gather_", site)
    }

    /// [`gather`](Group::gather) in place: each member holds its part of a dimension, at its place in the group. The root
    /// receives the others' parts at theirs; the others get zeros.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()?;
    ///     let mut x = Tensor::from_slice(&[0i64, 0], &[2])?;
    ///     x.narrow_mut(0, me, 1usize)?.copy_from(&Tensor::from_slice(&[me as i64 + 5], &[1])?)?;
    ///     mesh.gather_(&mut x, 0, 1)?; // Zeros, and [5, 6] on the root.
    ///     mesh.scatter_(&mut x, 0, 1)?; // Each gets its part of the root's, and leaves the other.
    ///     x.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[5, 0], [5, 6]]);
    /// ```
    #[track_caller]
    pub fn gather_<'a>(&self, x: impl Place<'a>, dim: usize, root: usize) -> Result<()> {
        let (op, site) = (ops::GatherStart { dims: vec![dim], root, over: self.over }, Location::caller());
        self.join_parts("gather_", &op, x, dim, site).named("gather_", site)
    }

    /// [`scatter`](Group::scatter) in place: each member's part of a dimension, by its place in the group, becomes that
    /// of the root; the rest is unchanged.
    ///
    /// [`gather_`](Group::gather_) has an example.
    #[track_caller]
    pub fn scatter_<'a>(&self, x: impl Place<'a>, dim: usize, root: usize) -> Result<()> {
        let (op, site) = (ops::ScatterStart { dims: vec![dim], root, over: self.over }, Location::caller());
        self.replace_part("scatter_", &op, x, dim, site).named("scatter_", site)
    }

    /// [`reduce_scatter`](Group::reduce_scatter) in place: each member's part of a dimension, by its place in the group,
    /// becomes the reduction; the rest is unchanged.
    ///
    /// [`all_gather_`](Group::all_gather_) has an example.
    #[track_caller]
    pub fn reduce_scatter_<'a>(&self, x: impl Place<'a>, reduce: Reduce, dim: usize) -> Result<()> {
        let op = ops::ReduceScatterStart { reduce, dims: vec![dim], over: self.over };
        let site = Location::caller();
        self.replace_part("reduce_scatter_", &op, x, dim, site).named("reduce_scatter_", site)
    }

    /// Start and size of this member's part of a dimension; all parts are equal.
    pub(crate) fn own_part(
        &self,
        op: &str,
        slice: &SliceMut<'_>,
        dim: usize,
        site: &'static Location<'static>,
    ) -> Result<(Index, Index)> {
        let n = self.size();
        let Some(size) = slice.shape.get(dim) else {
            return Err(Error::new(op, Headline::dimension(dim, slice.shape.len()), site));
        };
        let places = slice.layout.shape[dim];
        if !places.is_multiple_of(n) {
            let message = (
                format!("dimension {dim} to be shared out evenly among {n} members"),
                format!("{places} places"),
            );
            return Err(Error::new(op, message, site));
        }
        let size = Index(size.clone()) / n;
        // The op rejects a group that leaves ranks out, so the start of such a rank does not matter.
        let me = if self.has_me() { self.rank() } else { Index::from(0usize) };
        Ok((me * &size, size))
    }

    /// [`all_gather`](Group::all_gather) into a given tensor or slice.
    ///
    /// ```
    /// use consort::{Dtype, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let mut out = Tensor::zeros(Dtype::I64, &[4])?;
    ///     mesh.all_gather_into(out.narrow_mut(0, 1usize, 2usize)?, Tensor::from_slice(&[me + 1], &[1])?, 0)?;
    ///     out.to_vec::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [0, 1, 2, 0])));
    /// ```
    #[track_caller]
    pub fn all_gather_into<'a>(&self, out: impl Place<'a>, x: impl Into<Tensor>, dim: usize) -> Result<()> {
        let (op, site) = (ops::AllGatherStart { dims: vec![dim], over: self.over }, Location::caller());
        self.write_to_place(&op, out, x.into(), site).named("all_gather_into", site)
    }

    /// [`reduce_scatter`](Group::reduce_scatter) into a given tensor or slice.
    ///
    /// ```
    /// use consort::{Dtype, Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let mut out = Tensor::zeros(Dtype::I64, &[2])?;
    ///     let x = Tensor::from_slice(&[1i64, 2], &[2])?;
    ///     mesh.reduce_scatter_into(out.narrow_mut(0, 1usize, 1usize)?, &x, Reduce::Sum, 0)?;
    ///     let mut all = Tensor::zeros(Dtype::I64, &[2])?;
    ///     mesh.all_to_all_into(&mut all, out, None, None)?;
    ///     all.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[0, 0], [2, 4]]);
    /// ```
    #[track_caller]
    pub fn reduce_scatter_into<'a>(
        &self,
        out: impl Place<'a>,
        x: impl Into<Tensor>,
        reduce: Reduce,
        dim: usize,
    ) -> Result<()> {
        let op = ops::ReduceScatterStart { reduce, dims: vec![dim], over: self.over };
        let site = Location::caller();
        self.write_to_place(&op, out, x.into(), site).named("reduce_scatter_into", site)
    }

    /// [`gather`](Group::gather) into a given tensor or slice; members other than the root get zeros.
    ///
    /// ```
    /// use consort::{Dtype, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let (mut all, mut mine) = (Tensor::ones(Dtype::I64, &[2])?, Tensor::ones(Dtype::I64, &[1])?);
    ///     mesh.gather_into(&mut all, Tensor::from_slice(&[me + 5], &[1])?, 0, 1)?; // Zeros, and [5, 6].
    ///     mesh.scatter_into(&mut mine, &all, 0, 1)?;
    ///     mine.item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [5, 6]);
    /// ```
    #[track_caller]
    pub fn gather_into<'a>(
        &self,
        out: impl Place<'a>,
        x: impl Into<Tensor>,
        dim: usize,
        root: usize,
    ) -> Result<()> {
        let (op, site) = (ops::GatherStart { dims: vec![dim], root, over: self.over }, Location::caller());
        self.write_to_place(&op, out, x.into(), site).named("gather_into", site)
    }

    /// [`scatter`](Group::scatter) into a given tensor or slice.
    ///
    /// [`gather_into`](Group::gather_into) has an example.
    #[track_caller]
    pub fn scatter_into<'a>(
        &self,
        out: impl Place<'a>,
        x: impl Into<Tensor>,
        dim: usize,
        root: usize,
    ) -> Result<()> {
        let (op, site) = (ops::ScatterStart { dims: vec![dim], root, over: self.over }, Location::caller());
        self.write_to_place(&op, out, x.into(), site).named("scatter_into", site)
    }

    /// [`all_to_all`](Group::all_to_all) into a given tensor or slice.
    ///
    /// [`reduce_scatter_into`](Group::reduce_scatter_into) has an example.
    #[track_caller]
    pub fn all_to_all_into<'a>(
        &self,
        out: impl Place<'a>,
        x: impl Into<Tensor>,
        out_splits: Option<&dyn Shape>,
        in_splits: Option<&dyn Shape>,
    ) -> Result<()> {
        let site = Location::caller();
        let op = ops::AllToAllStart {
            in_splits: self.own_splits("all_to_all_into", in_splits, site)?,
            out_splits: self.own_splits("all_to_all_into", out_splits, site)?,
            over: self.over,
        };
        self.write_to_place(&op, out, x.into(), site).named("all_to_all_into", site)
    }
}

/// Writes the members' joined parts to the tensor or slice that they are the parts of.
pub(crate) fn put_joined(
    mut slice: SliceMut<'_>,
    result: Tensor,
    site: &'static Location<'static>,
) -> Result<()> {
    if slice.is_whole() {
        *slice.tensor = result;
        return Ok(());
    }
    slice.take_result(result, site)
}

/// Writes a result to the part of a dimension with this start and size.
pub(crate) fn put_part(
    slice: SliceMut<'_>,
    dim: usize,
    (start, size): (Index, Index),
    result: Tensor,
    site: &'static Location<'static>,
) -> Result<()> {
    let (mut starts, mut sizes) = (slice.start, slice.shape);
    (starts[dim], sizes[dim]) = (&starts[dim] + &start.0, size.0);
    let mut part = slice.tensor.slice_mut_at(starts, sizes, site)?;
    part.make_own(site)?;
    part.take_result(result, site)
}
