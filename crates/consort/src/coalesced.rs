//! Collectives of several tensors in one communication, of any shapes and element types. An empty list gives an empty
//! list, without communication.

use std::panic::Location;

use consort_ir::ops;
use consort_ir::ops::OpDef;
use consort_types::Reduce;

use crate::error::{Error, Named, Result};
use crate::in_place::put_part;
use crate::mesh::Group;
use crate::place::Place;
use crate::tensor::Tensor;

impl Group {
    /// Runs an operation on a list, in one communication; without one if the list is empty.
    #[track_caller]
    fn coalesced(
        &self,
        op: &dyn OpDef,
        list: &[Tensor],
        site: &'static Location<'static>,
    ) -> Result<Vec<Tensor>> {
        match list {
            [] => Ok(Vec::new()),
            list => Ok(self.start(op, list, 1, &[], site)?.into_vec()),
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
        self.coalesced(&op, &list, site).named("all_reduce_coalesced", site)
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
        let (op, site) = (ops::AllReduceStart { reduce, over: self.over }, Location::caller());
        let results = self.coalesced(&op, list, site).named("all_reduce_coalesced_", site)?;
        list.iter_mut().zip(results).for_each(|(x, result)| *x = result);
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
        self.coalesced(&op, list, site).named("all_gather_coalesced", site)
    }

    /// [`all_gather_coalesced`](Group::all_gather_coalesced) in place: each member holds its part of dimension 0 of each
    /// tensor, at its place in the group, and receives the others' parts at theirs.
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
    pub fn all_gather_coalesced_(&self, list: &mut [Tensor]) -> Result<()> {
        let (name, site) = ("all_gather_coalesced_", Location::caller());
        let mut mine = Vec::new();
        for x in list.iter_mut() {
            let slice = x.into_slice();
            let (start, size) = self.own_part(name, &slice, 0, site)?;
            mine.push(slice.view().narrow(0, start, size).named(name, site)?);
        }
        let op = ops::AllGatherStart { dims: vec![0; list.len()], over: self.over };
        let results = self.coalesced(&op, &mine, site).named(name, site)?;
        list.iter_mut().zip(results).for_each(|(x, result)| *x = result);
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
        check_dims("reduce_scatter_coalesced", list, dims, site)?;
        let op = ops::ReduceScatterStart { reduce, dims: dims.to_vec(), over: self.over };
        self.coalesced(&op, list, site).named("reduce_scatter_coalesced", site)
    }

    /// [`reduce_scatter_coalesced`](Group::reduce_scatter_coalesced) in place: each member's part of a dimension of each
    /// tensor, by its place in the group, becomes the reduction; the rest is unchanged.
    ///
    /// [`all_gather_coalesced_`](Group::all_gather_coalesced_) has an example.
    #[track_caller]
    pub fn reduce_scatter_coalesced_(
        &self,
        list: &mut [Tensor],
        reduce: Reduce,
        dims: &[usize],
    ) -> Result<()> {
        let (name, site) = ("reduce_scatter_coalesced_", Location::caller());
        check_dims(name, list, dims, site)?;
        let mut own = Vec::new();
        for (x, dim) in list.iter_mut().zip(dims) {
            own.push(self.own_part(name, &x.into_slice(), *dim, site)?);
        }
        let op = ops::ReduceScatterStart { reduce, dims: dims.to_vec(), over: self.over };
        let results = self.coalesced(&op, list, site).named(name, site)?;
        for (((x, dim), own), result) in list.iter_mut().zip(dims).zip(own).zip(results) {
            put_part(x.into_slice(), *dim, own, result, site).named(name, site)?;
        }
        Ok(())
    }
}

fn check_dims(name: &str, list: &[Tensor], dims: &[usize], site: &'static Location<'static>) -> Result<()> {
    match dims.len() == list.len() {
        true => Ok(()),
        false => {
            let message = (format!("a dimension for each of {} tensors", list.len()), dims.len().to_string());
            Err(Error::new(name, message, site))
        }
    }
}
