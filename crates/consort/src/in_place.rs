//! Collectives that write to existing storage: in place, or into a given tensor or slice.

use std::panic::Location;

use consort_ir::ops;
use consort_ir::ops::OpDef;
use consort_types::{Dtype, Reduce};

use crate::error::{Error, Result};
use crate::index::{Index, Shape, plain};
use crate::mesh::Group;
use crate::pending::Pending;
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
    ) -> Result<Pending<()>> {
        let mut slice = place.into_slice();
        slice.make_own(site)?;
        // A whole tensor is replaced by the result. A slice has one more owner: the tensor itself.
        if slice.is_whole() {
            return Ok(Pending { gives: (), flight: self.start_on(op, slice.tensor, site)? });
        }
        let view = [slice.view()];
        let mut started = self.start(op, &view, 2, &[], site)?;
        if let Some(result) = started.results.pop() {
            slice.take_result(result, site)?;
        }
        Ok(Pending { gives: (), flight: started.flight })
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
            let mut started = self.start(op, &args, 1, std::slice::from_ref(slice.tensor), site)?;
            if let Some(result) = started.results.pop() {
                *slice.tensor = result;
            }
            return Ok(());
        }
        let view = [slice.view()];
        let mut started = self.start(op, &args, 2, &view, site)?;
        if let Some(result) = started.results.pop() {
            slice.take_result(result, site)?;
        }
        Ok(())
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
        let op = ops::AllReduceStart { reduce, over: self.over };
        let _ = self.in_place(&op, x, Location::caller())?;
        Ok(())
    }

    /// [`all_reduce_`](Group::all_reduce_) with an explicit handle, which does not borrow the tensor.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let mut x = Tensor::from_slice(&[1i64], &[1])?;
    ///     let pending = mesh.all_reduce_async_(&mut x, Reduce::Sum)?;
    ///     pending.wait()?;
    ///     x.item::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == 2)));
    /// ```
    #[track_caller]
    pub fn all_reduce_async_<'a>(&self, x: impl Place<'a>, reduce: Reduce) -> Result<Pending<()>> {
        let op = ops::AllReduceStart { reduce, over: self.over };
        self.in_place(&op, x, Location::caller())
    }

    /// [`all_reduce_coalesced`](Group::all_reduce_coalesced) in place.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let mut list = vec![Tensor::from_slice(&[1i64], &[1])?, Tensor::from_slice(&[2i64, 3], &[2])?];
    ///     mesh.all_reduce_coalesced_(&mut list, Reduce::Sum)?;
    ///     list[1].to_vec::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [4, 6])));
    /// ```
    #[track_caller]
    pub fn all_reduce_coalesced_(&self, list: &mut [Tensor], reduce: Reduce) -> Result<()> {
        let op = ops::AllReduceStart { reduce, over: self.over };
        let site = Location::caller();
        let mut types: Vec<Dtype> = list.iter().map(Tensor::dtype).collect();
        types.dedup();
        // One communication for each run of tensors of one element type.
        let mut start = 0;
        for dtype in types {
            let end = start + list[start..].iter().take_while(|x| x.dtype() == dtype).count();
            let started = self.start(&op, &list[start..end], 1, &[], site)?;
            list[start..end].iter_mut().zip(started.results).for_each(|(x, result)| *x = result);
            start = end;
        }
        Ok(())
    }

    /// [`broadcast`](Group::broadcast) in place.
    ///
    /// ```
    /// use consort::{Missing, Reduce, Route, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.number(&mesh.rank())? as i64;
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
        let _ = self.in_place(&ops::BroadcastStart { root, over: self.over }, x, Location::caller())?;
        Ok(())
    }

    /// [`reduce`](Group::reduce) in place.
    ///
    /// [`broadcast_`](Group::broadcast_) has an example.
    #[track_caller]
    pub fn reduce_<'a>(&self, x: impl Place<'a>, reduce: Reduce, root: usize) -> Result<()> {
        let _ = self.in_place(&ops::ReduceStart { reduce, root, over: self.over }, x, Location::caller())?;
        Ok(())
    }

    /// [`permute`](Group::permute) in place.
    ///
    /// [`broadcast_`](Group::broadcast_) has an example.
    #[track_caller]
    pub fn permute_<'a>(
        &self,
        x: impl Place<'a>,
        route: consort_types::Route,
        missing: consort_types::Missing,
    ) -> Result<()> {
        let _ =
            self.in_place(&ops::PermuteStart { route, missing, over: self.over }, x, Location::caller())?;
        Ok(())
    }

    /// [`all_to_all`](Group::all_to_all) with equal parts, in place.
    ///
    /// [`broadcast_`](Group::broadcast_) has an example.
    #[track_caller]
    pub fn all_to_all_<'a>(&self, x: impl Place<'a>) -> Result<()> {
        let op = ops::AllToAllStart { in_splits: None, out_splits: None, over: self.over };
        let _ = self.in_place(&op, x, Location::caller())?;
        Ok(())
    }

    /// [`all_gather`](Group::all_gather) in place: each member holds its part of a dimension, at its place in the
    /// group, and receives the others' parts at theirs.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.number(&mesh.rank())?;
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
        let site = Location::caller();
        let mut slice = x.into_slice();
        let (start, size) = self.own_part("all_gather_", &slice, dim, site)?;
        let op = ops::AllGatherStart { dims: vec![dim], over: self.over };
        let result = self.one(&op, slice.view().narrow(dim, start, size)?, site)?.gives;
        if slice.is_whole() {
            *slice.tensor = result;
            return Ok(());
        }
        slice.make_own(site)?;
        slice.take_result(result, site)
    }

    /// [`reduce_scatter`](Group::reduce_scatter) in place: each member's part of a dimension, by its place in the group,
    /// becomes the reduction; the rest is unchanged.
    ///
    /// [`all_gather_`](Group::all_gather_) has an example.
    #[track_caller]
    pub fn reduce_scatter_<'a>(&self, x: impl Place<'a>, reduce: Reduce, dim: usize) -> Result<()> {
        let site = Location::caller();
        let slice = x.into_slice();
        let (start, size) = self.own_part("reduce_scatter_", &slice, dim, site)?;
        let op = ops::ReduceScatterStart { reduce, dims: vec![dim], over: self.over };
        let result = self.one(&op, slice.view(), site)?.gives;
        let (mut starts, mut sizes) = (slice.start, slice.shape);
        (starts[dim], sizes[dim]) = (&starts[dim] + &start.0, size.0);
        let mut part = slice.tensor.slice_mut_at(starts, sizes, site)?;
        part.make_own(site)?;
        part.take_result(result, site)
    }

    /// Start and size of this member's part of a dimension; all parts are equal.
    fn own_part(
        &self,
        op: &str,
        slice: &SliceMut<'_>,
        dim: usize,
        site: &'static Location<'static>,
    ) -> Result<(Index, Index)> {
        let n = self.size();
        let Some(size) = slice.shape.get(dim) else {
            let message = format!("expected a dimension below {}, got {dim}", slice.shape.len());
            return Err(Error::new(op, message, site));
        };
        let places = slice.layout.shape[dim];
        if !places.is_multiple_of(n) {
            let message = format!(
                "expected dimension {dim} to be shared out evenly among {n} members, got {places} places"
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
    ///     let me = mesh.number(&mesh.rank())? as i64;
    ///     let mut out = Tensor::zeros(Dtype::I64, &[4])?;
    ///     mesh.all_gather_into(out.narrow_mut(0, 1usize, 2usize)?, Tensor::from_slice(&[me + 1], &[1])?, 0)?;
    ///     out.to_vec::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [0, 1, 2, 0])));
    /// ```
    #[track_caller]
    pub fn all_gather_into<'a>(&self, out: impl Place<'a>, x: impl Into<Tensor>, dim: usize) -> Result<()> {
        let op = ops::AllGatherStart { dims: vec![dim], over: self.over };
        self.write_to_place(&op, out, x.into(), Location::caller())
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
        self.write_to_place(&op, out, x.into(), Location::caller())
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
        let splits = |list: Option<&dyn Shape>| list.map(|list| plain(list.sizes()));
        let op = ops::AllToAllStart {
            in_splits: splits(in_splits),
            out_splits: splits(out_splits),
            over: self.over,
        };
        self.write_to_place(&op, out, x.into(), Location::caller())
    }
}
