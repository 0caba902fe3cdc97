//! Collectives of several tensors in one communication, of any shapes and element types. An empty list gives an empty
//! list, without communication.

use std::panic::Location;

use consort_ir::ops;
use consort_ir::ops::OpDef;
use consort_types::Reduce;

use crate::error::{Error, Named, Result};
use crate::in_place::{put_joined, put_part};
use crate::mesh::Group;
use crate::place::{Place, SliceMut};
use crate::tensor::Tensor;

impl Group {
    /// Runs an operation on a list, in one communication; without one if the list is empty. A tensor that it writes in
    /// place may have at most `owners` owners.
    #[track_caller]
    fn coalesced(
        &self,
        op: &dyn OpDef,
        list: &[Tensor],
        owners: usize,
        site: &'static Location<'static>,
    ) -> Result<Vec<Tensor>> {
        match list {
            [] => Ok(Vec::new()),
            list => Ok(self.start(op, list, owners, &[], site)?.into_vec()),
        }
    }

    /// Reduces each of a list, in one communication.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let list = vec![Tensor::from_slice(&[1i64], &[1])?, Tensor::from_slice(&[2.0f32, 3.0], &[2])?];
    ///     let sums = mesh.all_reduce_coalesced(list, Reduce::Sum)?;
    ///     assert_eq!(mesh.in_flight(), 1);
    ///     sums[1].to_vec::<f32>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [4.0, 6.0])));
    /// ```
    #[track_caller]
    pub fn all_reduce_coalesced(&self, list: Vec<Tensor>, reduce: Reduce) -> Result<Vec<Tensor>> {
        let (op, site) = (ops::AllReduceStart { reduce, over: self.over }, Location::caller());
        self.coalesced(&op, &list, 1, site).named("all_reduce_coalesced", site)
    }

    /// [`all_reduce_coalesced`](Group::all_reduce_coalesced) in place: of tensors, or of slices.
    ///
    /// ```
    /// use consort::{Place, Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let mut list = vec![Tensor::from_slice(&[1i64], &[1])?, Tensor::from_slice(&[2i64, 3], &[2])?];
    ///     mesh.all_reduce_coalesced_(&mut list, Reduce::Sum)?; // [2] and [4, 6].
    ///     let [x, y] = &mut list[..] else { unreachable!() };
    ///     mesh.all_reduce_coalesced_([x.into_slice(), y.narrow_mut(0, 1usize, 1usize)?], Reduce::Sum)?;
    ///     Ok((list[0].to_vec::<i64>()?, list[1].to_vec::<i64>()?))
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == (vec![4], vec![4, 12]))));
    /// ```
    #[track_caller]
    pub fn all_reduce_coalesced_<'a>(
        &self,
        list: impl IntoIterator<Item = impl Place<'a>>,
        reduce: Reduce,
    ) -> Result<()> {
        let (name, site) = ("all_reduce_coalesced_", Location::caller());
        let mut places = slices(list);
        places.iter_mut().try_for_each(|place| place.make_own(site)).named(name, site)?;
        let op = ops::AllReduceStart { reduce, over: self.over };
        // Each has two owners: the tensor, and the view.
        let results = self.coalesced(&op, &views(&places), 2, site).named(name, site)?;
        for (mut place, result) in places.into_iter().zip(results) {
            place.take_result(result, site).named(name, site)?;
        }
        Ok(())
    }

    /// Joins the members' tensors along dimension 0, for each of a list, in one communication.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let list = [Tensor::from_slice(&[1i64], &[1])?, Tensor::from_slice(&[0.5f32], &[1])?];
    ///     mesh.all_gather_coalesced(&list)?[1].to_vec::<f32>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [0.5, 0.5])));
    /// ```
    #[track_caller]
    pub fn all_gather_coalesced(&self, list: &[Tensor]) -> Result<Vec<Tensor>> {
        let op = ops::AllGatherStart { dims: vec![0; list.len()], over: self.over };
        let site = Location::caller();
        self.coalesced(&op, list, 1, site).named("all_gather_coalesced", site)
    }

    /// [`all_gather_coalesced`](Group::all_gather_coalesced) in place: each member holds its part of dimension 0 of each
    /// tensor or slice, at its place in the group, and receives the others' parts at theirs.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let mut list = vec![Tensor::from_slice(&[me, 10 + me], &[2])?, Tensor::from_slice(&[0.5f32, 1.0], &[2])?];
    ///     mesh.all_gather_coalesced_(&mut list)?; // [0, 11] and [0.5, 1.0] on both.
    ///     mesh.reduce_scatter_coalesced_(&mut list, Reduce::Sum, &[0, 0])?; // Each reduces its parts.
    ///     Ok((list[0].to_vec::<i64>()?, list[1].to_vec::<f32>()?))
    /// });
    /// let got: Vec<_> = got.into_iter().flatten().collect();
    /// assert_eq!(got, [(vec![0, 11], vec![1.0, 1.0]), (vec![0, 22], vec![0.5, 2.0])]);
    /// ```
    #[track_caller]
    pub fn all_gather_coalesced_<'a>(&self, list: impl IntoIterator<Item = impl Place<'a>>) -> Result<()> {
        let (name, site) = ("all_gather_coalesced_", Location::caller());
        let places = slices(list);
        let mut mine = Vec::new();
        for place in &places {
            let (start, size) = self.own_part(name, place, 0, site)?;
            mine.push(place.view().narrow(0, start, size).named(name, site)?);
        }
        let op = ops::AllGatherStart { dims: vec![0; mine.len()], over: self.over };
        let results = self.coalesced(&op, &mine, 1, site).named(name, site)?;
        // The views are other owners, so they end before the results are taken.
        drop(mine);
        for (place, result) in places.into_iter().zip(results) {
            put_joined(place, result, site).named(name, site)?;
        }
        Ok(())
    }

    /// Reduces each of a list and gives each member its part along a dimension of each, in one communication.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let list = [Tensor::from_slice(&[1i64, 2], &[2])?, Tensor::from_slice(&[3i64, 4], &[1, 2])?];
    ///     let parts = mesh.reduce_scatter_coalesced(&list, Reduce::Sum, &[0, 1])?;
    ///     Ok((parts[0].item::<i64>()?, parts[1].item::<i64>()?))
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [(2, 6), (4, 8)]);
    /// ```
    #[track_caller]
    pub fn reduce_scatter_coalesced(
        &self,
        list: &[Tensor],
        reduce: Reduce,
        dims: &[usize],
    ) -> Result<Vec<Tensor>> {
        let site = Location::caller();
        check_dims("reduce_scatter_coalesced", list.len(), dims, site)?;
        let op = ops::ReduceScatterStart { reduce, dims: dims.to_vec(), over: self.over };
        self.coalesced(&op, list, 1, site).named("reduce_scatter_coalesced", site)
    }

    /// [`reduce_scatter_coalesced`](Group::reduce_scatter_coalesced) in place: each member's part of a dimension of each
    /// tensor or slice, by its place in the group, becomes the reduction; the rest is unchanged.
    ///
    /// [`all_gather_coalesced_`](Group::all_gather_coalesced_) has an example.
    #[track_caller]
    pub fn reduce_scatter_coalesced_<'a>(
        &self,
        list: impl IntoIterator<Item = impl Place<'a>>,
        reduce: Reduce,
        dims: &[usize],
    ) -> Result<()> {
        let (name, site) = ("reduce_scatter_coalesced_", Location::caller());
        let places = slices(list);
        check_dims(name, places.len(), dims, site)?;
        let mut own = Vec::new();
        for (place, dim) in places.iter().zip(dims) {
            own.push(self.own_part(name, place, *dim, site)?);
        }
        let op = ops::ReduceScatterStart { reduce, dims: dims.to_vec(), over: self.over };
        let results = self.coalesced(&op, &views(&places), 1, site).named(name, site)?;
        for (((place, dim), own), result) in places.into_iter().zip(dims).zip(own).zip(results) {
            put_part(place, *dim, own, result, site).named(name, site)?;
        }
        Ok(())
    }
}

fn slices<'a>(list: impl IntoIterator<Item = impl Place<'a>>) -> Vec<SliceMut<'a>> {
    list.into_iter().map(Place::into_slice).collect()
}

fn views(places: &[SliceMut<'_>]) -> Vec<Tensor> {
    places.iter().map(SliceMut::view).collect()
}

fn check_dims(name: &str, tensors: usize, dims: &[usize], site: &'static Location<'static>) -> Result<()> {
    match dims.len() == tensors {
        true => Ok(()),
        false => {
            let message = (format!("a dimension for each of {tensors} tensors"), dims.len().to_string());
            Err(Error::new(name, message, site))
        }
    }
}
