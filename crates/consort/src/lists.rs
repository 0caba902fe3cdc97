//! Collectives of lists with a tensor for each member, in the order of the group: of one element type and, but for
//! [`Group::all_to_all_list_into`], of one shape.

use std::panic::Location;

use consort_ir::index as ir;
use consort_ir::ops;
use consort_ir::ops::OpDef;
use consort_types::Reduce;
use smallvec::smallvec;

use crate::apply::run_one;
use crate::error::{Error, Named, Result};
use crate::mesh::Group;
use crate::place::{Place, SliceMut};
use crate::tensor::{Tensor, Tensors};

impl Group {
    /// Gathers the members' tensors as separate tensors, which are views of one.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let all = mesh.all_gather_list(Tensor::from_slice(&[me, me + 10], &[2])?)?;
    ///     all[1].to_vec::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [1, 11])));
    /// ```
    #[track_caller]
    pub fn all_gather_list(&self, x: impl Into<Tensor>) -> Result<Vec<Tensor>> {
        let (name, site) = ("all_gather_list", Location::caller());
        let op = ops::AllGatherStart { dims: vec![0], over: self.over };
        let x = x.into().unsqueeze_at(0, site).named(name, site)?;
        let all = self.one(&op, x, site).named(name, site)?;
        self.rows(&all, site).named(name, site)
    }

    /// [`all_gather_list`](Group::all_gather_list) into given tensors or slices, one for each member. A whole tensor
    /// becomes a view of the gathered elements; a slice is copied to.
    ///
    /// ```
    /// use consort::{Dtype, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let mut list = vec![Tensor::zeros(Dtype::I64, &[1])?, Tensor::zeros(Dtype::I64, &[1])?];
    ///     mesh.all_gather_list_into(&mut list, Tensor::from_slice(&[me + 5], &[1])?)?;
    ///     Ok([list[0].item::<i64>()?, list[1].item::<i64>()?])
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [5, 6])));
    /// ```
    #[track_caller]
    pub fn all_gather_list_into<'a>(
        &self,
        list: impl IntoIterator<Item = impl Place<'a>>,
        x: impl Into<Tensor>,
    ) -> Result<()> {
        let (op, site) = (ops::AllGatherStart { dims: vec![0], over: self.over }, Location::caller());
        self.gather_to("all_gather_list_into", &op, list, x.into(), site)
    }

    /// Gathers the members' tensors for the root, as separate tensors; the others get zeros.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     mesh.gather_list(Tensor::from_slice(&[me + 5], &[1])?, 0)?[1].item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [6, 0]);
    /// ```
    #[track_caller]
    pub fn gather_list(&self, x: impl Into<Tensor>, root: usize) -> Result<Vec<Tensor>> {
        let (name, site) = ("gather_list", Location::caller());
        let op = ops::GatherStart { dims: vec![0], root, over: self.over };
        let x = x.into().unsqueeze_at(0, site).named(name, site)?;
        let all = self.one(&op, x, site).named(name, site)?;
        self.rows(&all, site).named(name, site)
    }

    /// [`gather_list`](Group::gather_list) into given tensors or slices, as
    /// [`all_gather_list_into`](Group::all_gather_list_into) does; members other than the root get zeros.
    ///
    /// ```
    /// use consort::{Dtype, Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let mut list = vec![Tensor::ones(Dtype::I64, &[1])?, Tensor::ones(Dtype::I64, &[1])?];
    ///     mesh.gather_list_into(&mut list, Tensor::from_slice(&[me + 5], &[1])?, 0)?; // 5 and 6, and zeros.
    ///     let mut mine = Tensor::ones(Dtype::I64, &[2])?;
    ///     mesh.scatter_list_into(mine.narrow_mut(0, 0usize, 1usize)?, &list, 0)?;
    ///     mesh.reduce_scatter_list_into(mine.narrow_mut(0, 1usize, 1usize)?, &list, Reduce::Sum)?;
    ///     mine.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[5, 5], [6, 6]]);
    /// ```
    #[track_caller]
    pub fn gather_list_into<'a>(
        &self,
        list: impl IntoIterator<Item = impl Place<'a>>,
        x: impl Into<Tensor>,
        root: usize,
    ) -> Result<()> {
        let (op, site) = (ops::GatherStart { dims: vec![0], root, over: self.over }, Location::caller());
        self.gather_to("gather_list_into", &op, list, x.into(), site)
    }

    /// Reduces the members' lists, which have a tensor for each member, and gives each member its own.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let list = [Tensor::from_slice(&[1i64], &[1])?, Tensor::from_slice(&[2i64], &[1])?];
    ///     mesh.reduce_scatter_list(&list, Reduce::Sum)?.item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [2, 4]);
    /// ```
    #[track_caller]
    pub fn reduce_scatter_list(&self, list: &[Tensor], reduce: Reduce) -> Result<Tensor> {
        let op = ops::ReduceScatterStart { reduce, dims: vec![0], over: self.over };
        self.scatter_stacked("reduce_scatter_list", &op, list, Location::caller())
    }

    /// [`reduce_scatter_list`](Group::reduce_scatter_list) into a given tensor or slice.
    ///
    /// [`gather_list_into`](Group::gather_list_into) has an example.
    #[track_caller]
    pub fn reduce_scatter_list_into<'a>(
        &self,
        out: impl Place<'a>,
        list: &[Tensor],
        reduce: Reduce,
    ) -> Result<()> {
        let (name, site) = ("reduce_scatter_list_into", Location::caller());
        let mut place = out.into_slice();
        list.first().map_or(Ok(()), |x| check_type(name, &place, x, site))?;
        let op = ops::ReduceScatterStart { reduce, dims: vec![0], over: self.over };
        let mine = self.scatter_stacked(name, &op, list, site)?;
        place.take_result(mine, site).named(name, site)
    }

    /// Gives each member its tensor of the root's list, which has one for each. The others' lists only give the shape.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let list = [Tensor::from_slice(&[10 * me], &[1])?, Tensor::from_slice(&[10 * me + 1], &[1])?];
    ///     mesh.scatter_list(&list, 1)?.item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [10, 11]);
    /// ```
    #[track_caller]
    pub fn scatter_list(&self, list: &[Tensor], root: usize) -> Result<Tensor> {
        let op = ops::ScatterStart { dims: vec![0], root, over: self.over };
        self.scatter_stacked("scatter_list", &op, list, Location::caller())
    }

    /// [`scatter_list`](Group::scatter_list) into a given tensor or slice.
    ///
    /// [`gather_list_into`](Group::gather_list_into) has an example.
    #[track_caller]
    pub fn scatter_list_into<'a>(&self, out: impl Place<'a>, list: &[Tensor], root: usize) -> Result<()> {
        let (name, site) = ("scatter_list_into", Location::caller());
        let mut place = out.into_slice();
        list.first().map_or(Ok(()), |x| check_type(name, &place, x, site))?;
        let op = ops::ScatterStart { dims: vec![0], root, over: self.over };
        let mine = self.scatter_stacked(name, &op, list, site)?;
        place.take_result(mine, site).named(name, site)
    }

    /// Sends a tensor of the list to each member, and returns those received, in the members' order. All have one shape.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let list = [Tensor::from_slice(&[10 * me], &[1])?, Tensor::from_slice(&[10 * me + 1], &[1])?];
    ///     let got = mesh.all_to_all_list(&list)?;
    ///     Ok([got[0].item::<i64>()?, got[1].item::<i64>()?])
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[0, 10], [1, 11]]);
    /// ```
    #[track_caller]
    pub fn all_to_all_list(&self, list: &[Tensor]) -> Result<Vec<Tensor>> {
        let (name, site) = ("all_to_all_list", Location::caller());
        let x = self.stacked(name, list, site)?;
        let op = ops::AllToAllStart { in_splits: None, out_splits: None, over: self.over };
        let all = self.one(&op, x, site).named(name, site)?;
        self.rows(&all, site).named(name, site)
    }

    /// [`all_to_all_list`](Group::all_to_all_list) into given tensors or slices, whose shapes are those of the tensors
    /// received: they may differ. A whole tensor becomes a view of the received elements; a slice is copied to.
    ///
    /// ```
    /// use consort::{Dtype, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()?;
    ///     // One element for member 0, two for member 1.
    ///     let list = [Tensor::full(Dtype::I64, &[1], me as f64)?, Tensor::full(Dtype::I64, &[2], me as f64)?];
    ///     let mut got = vec![Tensor::zeros(Dtype::I64, &[me + 1])?, Tensor::zeros(Dtype::I64, &[me + 1])?];
    ///     mesh.all_to_all_list_into(&mut got, &list)?;
    ///     got[1].to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [vec![1], vec![1, 1]]);
    /// ```
    #[track_caller]
    pub fn all_to_all_list_into<'a>(
        &self,
        out: impl IntoIterator<Item = impl Place<'a>>,
        list: &[Tensor],
    ) -> Result<()> {
        let (name, site) = ("all_to_all_list_into", Location::caller());
        let places: Vec<SliceMut<'_>> = out.into_iter().map(Place::into_slice).collect();
        self.check_count(name, list.len(), site)?;
        self.check_count(name, places.len(), site)?;
        let mut types = list.iter().map(Tensor::dtype).chain(places.iter().map(SliceMut::dtype));
        if let Some(other) = types.find(|dtype| *dtype != list[0].dtype()) {
            let message = ("tensors of one element type", format!("{} and {other}", list[0].dtype()));
            return Err(Error::new(name, message, site));
        }
        let numel = |shape: &[ir::Index]| shape.iter().fold(ir::Index::constant(1), |n, size| &n * size);
        let sent: Vec<ir::Index> = list.iter().map(|x| numel(&x.ty.shape)).collect();
        let got: Vec<ir::Index> = places.iter().map(|place| numel(&place.shape)).collect();
        let flat = list.iter().zip(&sent).map(|(x, numel)| reshaped(x, vec![numel.clone()], site));
        let flat = flat.collect::<Result<Tensors>>().named(name, site)?;
        let x = run_one(&ops::Concat { dim: 0 }, flat, site).named(name, site)?;
        let op = ops::AllToAllStart { in_splits: Some(sent), out_splits: Some(got.clone()), over: self.over };
        let all = self.one(&op, x, site).named(name, site)?;
        let mut start = ir::Index::constant(0);
        for (mut place, numel) in places.into_iter().zip(got) {
            let end = &start + &numel;
            let part = all.part(vec![start], vec![numel], &[1], site);
            let part = part.and_then(|part| reshaped(&part, place.shape.clone(), site));
            part.and_then(|part| place.take_result(part, site)).named(name, site)?;
            start = end;
        }
        Ok(())
    }

    /// Gathers along a new first dimension, and gives each place the tensor of its member.
    #[track_caller]
    fn gather_to<'a>(
        &self,
        name: &str,
        op: &dyn OpDef,
        list: impl IntoIterator<Item = impl Place<'a>>,
        x: Tensor,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let places: Vec<SliceMut<'_>> = list.into_iter().map(Place::into_slice).collect();
        self.check_count(name, places.len(), site)?;
        places.iter().try_for_each(|place| check_type(name, place, &x, site))?;
        let x = x.unsqueeze_at(0, site).named(name, site)?;
        let all = self.one(op, x, site).named(name, site)?;
        let rows = self.rows(&all, site).named(name, site)?;
        for (mut place, row) in places.into_iter().zip(rows) {
            place.take_result(row, site).named(name, site)?;
        }
        Ok(())
    }

    /// Runs an operation that gives each member its tensor of a list.
    #[track_caller]
    fn scatter_stacked(
        &self,
        name: &str,
        op: &dyn OpDef,
        list: &[Tensor],
        site: &'static Location<'static>,
    ) -> Result<Tensor> {
        let x = self.stacked(name, list, site)?;
        self.one(op, x, site).and_then(|mine| row(&mine, 0, site)).named(name, site)
    }

    /// The tensors of a list with one for each member, along a new first dimension.
    #[track_caller]
    fn stacked(&self, name: &str, list: &[Tensor], site: &'static Location<'static>) -> Result<Tensor> {
        self.check_count(name, list.len(), site)?;
        let mut parts = Tensors::new();
        for x in list {
            if x.dtype() != list[0].dtype() || x.hint_shape() != list[0].hint_shape() {
                let text = |x: &Tensor| format!("{}{:?}", x.dtype(), x.hint_shape());
                let message =
                    ("tensors of one shape and type", format!("{} and {}", text(&list[0]), text(x)));
                return Err(Error::new(name, message, site));
            }
            parts.push(x.unsqueeze_at(0, site).named(name, site)?);
        }
        run_one(&ops::Concat { dim: 0 }, parts, site).named(name, site)
    }

    /// The entries of the first dimension, one for each member, as views.
    fn rows(&self, all: &Tensor, site: &'static Location<'static>) -> Result<Vec<Tensor>> {
        (0..self.size()).map(|member| row(all, member, site)).collect()
    }

    fn check_count(&self, name: &str, count: usize, site: &'static Location<'static>) -> Result<()> {
        match self.size() {
            n if n == count => Ok(()),
            n => {
                Err(Error::new(name, (format!("a tensor for each of {n} members"), count.to_string()), site))
            }
        }
    }
}

/// An entry of the first dimension, as a view.
fn row(x: &Tensor, place: usize, site: &'static Location<'static>) -> Result<Tensor> {
    let (starts, sizes) = x.narrowed("at", 0, place.into(), 1usize.into(), site)?;
    let entry = x.part(starts, sizes, &vec![1; x.rank()], site)?;
    reshaped(&entry, x.ty.shape[1..].to_vec(), site)
}

fn reshaped(x: &Tensor, shape: Vec<ir::Index>, site: &'static Location<'static>) -> Result<Tensor> {
    run_one(&ops::Reshape { shape }, smallvec![x.clone()], site)
}

fn check_type(name: &str, place: &SliceMut<'_>, x: &Tensor, site: &'static Location<'static>) -> Result<()> {
    if place.dtype() == x.dtype() && place.shape() == x.hint_shape() {
        return Ok(());
    }
    let message =
        (format!("{}{:?}", x.dtype(), x.hint_shape()), format!("{}{:?}", place.dtype(), place.shape()));
    Err(Error::new(name, message, site))
}
