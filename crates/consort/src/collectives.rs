//! Collectives that return new tensors. An operand passed by value without other owners is used in place; one passed by
//! reference is not modified.
//!
//! The result is pending: the first access to its elements waits for it. Each operation also has a form with
//! an explicit handle (`_async`).

use std::panic::Location;
use std::rc::Rc;

use consort_ir::index::Index;
use consort_ir::ops;
use consort_ir::ops::{OpDef, call_name};
use consort_types::{Dtype, Kind, Missing, Reduce, Route};

use crate::error::{Error, Result};
use crate::index::{Shape, plain};
use crate::mesh::Group;
use crate::pending::Pending;
use crate::tensor::{Tensor, constant_shape};
use crate::trace::{is_tracing, settle, uncompiled_at};

impl Group {
    /// Starts an operation with one operand and one result.
    #[track_caller]
    pub(crate) fn one(
        &self,
        op: &dyn OpDef,
        mut x: Tensor,
        site: &'static Location<'static>,
    ) -> Result<Pending<Tensor>> {
        let flight = self.start_on(op, &mut x, site)?;
        Ok(Pending { gives: x, flight })
    }

    /// Starts an operation on a list.
    #[track_caller]
    fn list(
        &self,
        op: &dyn OpDef,
        args: &[Tensor],
        site: &'static Location<'static>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let started = self.start(op, args, 1, &[], site)?;
        Ok(Pending { gives: started.results.into_vec(), flight: started.flight })
    }
}

impl Group {
    /// Runs a built-in or user-defined op that communicates over this group: the op's `over` must be
    /// [`Group::name`]. Operands passed by value may be written in place.
    ///
    /// ```
    /// use consort::{Reduce, Tensor, ops};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let sums = consort::spawn(2, |mesh| {
    ///     let group = mesh.axis("world")?;
    ///     let op = ops::AllReduceStart { reduce: Reduce::Sum, over: group.name() };
    ///     group.apply(&op, [Tensor::from_slice(&[1i32, 2], &[2])?])?[0].to_vec::<i32>()
    /// });
    /// for sum in sums {
    ///     assert_eq!(sum?, [2, 4]);
    /// }
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn apply(&self, op: &dyn OpDef, args: impl IntoIterator<Item = Tensor>) -> Result<Vec<Tensor>> {
        Ok(self.apply_async(op, args)?.gives)
    }

    /// [`apply`](Group::apply) with an explicit handle.
    #[track_caller]
    pub fn apply_async(
        &self,
        op: &dyn OpDef,
        args: impl IntoIterator<Item = Tensor>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let site = Location::caller();
        let message = match op.collective() {
            None => "expected an op that communicates: `consort::apply` runs the others",
            Some(collective) if collective.kind == Kind::Exchange => {
                "expected a collective: `Group::batch` sends and receives"
            }
            Some(collective) if collective.over != self.over => {
                "expected an op over this group: see `Group::name`"
            }
            Some(_) => return self.list(op, &args.into_iter().collect::<Vec<_>>(), site),
        };
        Err(Error::new(call_name(op.info().name), message, site))
    }
}

/// Declares a collective of one tensor and its form with a handle.
macro_rules! collectives {
    ($($(#[doc = $doc:expr])* $name:ident, $name_async:ident ($group:ident; $($arg:ident: $ty:ty),*) $op:expr;)*) => {
        impl Group {$(
            $(#[doc = $doc])*
            #[track_caller]
            pub fn $name(&self, x: impl Into<Tensor> $(, $arg: $ty)*) -> Result<Tensor> {
                let $group = self;
                Ok(self.one(&$op, x.into(), Location::caller())?.gives)
            }

            #[doc = concat!("[`", stringify!($name), "`](Group::", stringify!($name), ") with an explicit handle.")]
            #[track_caller]
            pub fn $name_async(&self, x: impl Into<Tensor> $(, $arg: $ty)*) -> Result<Pending<Tensor>> {
                let $group = self;
                self.one(&$op, x.into(), Location::caller())
            }
        )*}
    };
}

fn splits(list: Option<&dyn Shape>) -> Option<Vec<Index>> {
    list.map(|list| plain(list.sizes()))
}

collectives! {
    /// Reduces the members' tensors; every member gets the result.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let sums = consort::spawn(4, |mesh| {
    ///     let x = Tensor::from_slice(&[1.0f32, 10.0], &[2])?;
    ///     mesh.all_reduce(x, Reduce::Sum)?.to_vec::<f32>()
    /// });
    /// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == [4.0, 40.0])));
    /// ```
    all_reduce, all_reduce_async (group; reduce: Reduce)
        ops::AllReduceStart { reduce, over: group.over };

    /// Joins the members' tensors along a dimension. 0-d tensors give a 1-d tensor with one element per member.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let all = consort::spawn(2, |mesh| {
    ///     let me = mesh.number(&mesh.rank())? as i64;
    ///     mesh.all_gather(Tensor::from_slice(&[me, me + 10], &[2, 1])?, 1)?.to_vec::<i64>()
    /// });
    /// assert!(all.into_iter().all(|all| all.is_ok_and(|all| all == [0, 1, 10, 11])));
    /// ```
    all_gather, all_gather_async (group; dim: usize)
        ops::AllGatherStart { dims: vec![dim], over: group.over };

    /// Reduces the members' tensors and gives each its part along a dimension.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let parts = consort::spawn(2, |mesh| {
    ///     let x = Tensor::from_slice(&[1i64, 2], &[2])?;
    ///     mesh.reduce_scatter(x, Reduce::Sum, 0)?.item::<i64>()
    /// });
    /// assert_eq!(parts.into_iter().flatten().collect::<Vec<_>>(), [2, 4]);
    /// ```
    reduce_scatter, reduce_scatter_async (group; reduce: Reduce, dim: usize)
        ops::ReduceScatterStart { reduce, dims: vec![dim], over: group.over };

    /// Sends a part along dimension 0 to each member and joins the received parts. Part sizes are given for sends and
    /// receives, or for neither: then all parts are equal.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.number(&mesh.rank())? as i64;
    ///     let x = Tensor::from_slice(&[10 * me, 10 * me + 1], &[2])?;
    ///     mesh.all_to_all(x, None, None)?.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[0, 10], [1, 11]]);
    /// ```
    all_to_all, all_to_all_async (group; out_splits: Option<&dyn Shape>, in_splits: Option<&dyn Shape>)
        ops::AllToAllStart { in_splits: splits(in_splits), out_splits: splits(out_splits), over: group.over };

    /// Gives every member the tensor of the root.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(3, |mesh| {
    ///     let me = mesh.number(&mesh.rank())? as i64;
    ///     mesh.broadcast(Tensor::from_slice(&[me], &[1])?, 2)?.item::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == 2)));
    /// ```
    broadcast, broadcast_async (group; root: usize)
        ops::BroadcastStart { root, over: group.over };

    /// Reduces the members' tensors for the root; the others get zeros.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(3, |mesh| {
    ///     mesh.reduce(Tensor::from_slice(&[5i64], &[1])?, Reduce::Max, 1)?.item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [0, 5, 0]);
    /// ```
    reduce, reduce_async (group; reduce: Reduce, root: usize)
        ops::ReduceStart { reduce, root, over: group.over };

    /// Joins the members' tensors along a dimension for the root; the others get zeros.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     mesh.gather(Tensor::from_slice(&[7i64], &[1])?, 0, 0)?.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[7, 7], [0, 0]]);
    /// ```
    gather, gather_async (group; dim: usize, root: usize)
        ops::GatherStart { dims: vec![dim], root, over: group.over };

    /// Gives each member its part, along a dimension, of the root's tensor. The others' tensors only give the shape.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.number(&mesh.rank())? as i64;
    ///     mesh.scatter(Tensor::from_slice(&[10 * me, 10 * me + 1], &[2])?, 0, 1)?.item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [10, 11]);
    /// ```
    scatter, scatter_async (group; dim: usize, root: usize)
        ops::ScatterStart { dims: vec![dim], root, over: group.over };

    /// Sends along a route: `Route::Ring(1)` to the next member, around the end; `Route::Shift(1)` to the next one, if
    /// there is one; or a table. A member without a sender gets zeros, or all get an error, as `Missing` selects.
    ///
    /// ```
    /// use consort::{Missing, Route, Tensor};
    ///
    /// let got = consort::spawn(3, |mesh| {
    ///     let me = mesh.number(&mesh.rank())? as i64;
    ///     mesh.permute(Tensor::from_slice(&[me], &[1])?, Route::Ring(1), Missing::Error)?.item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [2, 0, 1]);
    /// ```
    permute, permute_async (group; route: Route, missing: Missing)
        ops::PermuteStart { route, missing, over: group.over };

    /// Reduces the members' tensors and gives each a part of its own size along a dimension.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let x = Tensor::from_slice(&[1i64, 2, 3], &[3])?;
    ///     mesh.reduce_scatter_v(x, Reduce::Sum, 0, &[1, 2])?.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [vec![2], vec![4, 6]]);
    /// ```
    reduce_scatter_v, reduce_scatter_v_async (group; reduce: Reduce, dim: usize, sizes: &[usize])
        ops::ReduceScatterVStart { reduce, dim, sizes: constant_shape(sizes), over: group.over };
}

impl Group {
    /// Joins tensors of different sizes along a dimension; `sizes` are those of all members.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.number(&mesh.rank())?;
    ///     let x = Tensor::from_iter((0..=me as i64).map(|i| i + 10 * me as i64))?;
    ///     mesh.all_gather_v(x, 0, &[1, 2])?.to_vec::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [0, 10, 11])));
    /// ```
    #[track_caller]
    pub fn all_gather_v(&self, x: impl Into<Tensor>, dim: usize, sizes: &[usize]) -> Result<Tensor> {
        Ok(self.uneven(x.into(), dim, sizes, Location::caller())?.gives)
    }

    /// [`all_gather_v`](Group::all_gather_v) with an explicit handle.
    ///
    /// [`Pending`](crate::Pending) has an example.
    #[track_caller]
    pub fn all_gather_v_async(
        &self,
        x: impl Into<Tensor>,
        dim: usize,
        sizes: &[usize],
    ) -> Result<Pending<Tensor>> {
        self.uneven(x.into(), dim, sizes, Location::caller())
    }

    #[track_caller]
    fn uneven(
        &self,
        mut x: Tensor,
        dim: usize,
        sizes: &[usize],
        site: &'static Location<'static>,
    ) -> Result<Pending<Tensor>> {
        let list = constant_shape(sizes);
        if self.breaks && is_tracing() {
            let between = || Ok(self.uneven(x, dim, sizes, site)?.gives);
            return Ok(Pending { gives: uncompiled_at("all_gather_v", site, between)?, flight: None });
        }
        if x.traced.is_some() && !is_tracing() {
            x = settle(&x, "all_gather_v", site)?;
        }
        let mine = self.number(&self.rank()).ok().and_then(|me| sizes.get(me)).filter(|_| !is_tracing());
        // The size differs between ranks: the type picks the entry of the size table at this member's place.
        if let (Some(mine), Some(size)) = (mine, x.layout.shape.get(dim)) {
            if mine != size {
                let message = format!("expected a size of {mine} along dimension {dim}, got {size}");
                return Err(Error::new("all_gather_v", message, site));
            }
            let mut shape = x.ty.shape.clone();
            shape[dim] = Index::pick(&self.rank().0, &list);
            x.ty = Rc::new(x.ty.with_shape(shape));
        }
        self.one(&ops::AllGatherVStart { dim, sizes: list, over: self.over }, x, site)
    }

    /// Completes after all members have called it.
    ///
    /// ```
    /// let done = consort::spawn(2, |mesh| mesh.barrier());
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        let started = self.start(&ops::BarrierStart { over: self.over }, &[], 1, &[], Location::caller())?;
        started.flight.map_or(Ok(()), |flight| flight.wait(Location::caller()))
    }

    /// Gathers the members' tensors as separate tensors, which are views of one.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.number(&mesh.rank())? as i64;
    ///     let all = mesh.all_gather_list(Tensor::from_slice(&[me, me + 10], &[2])?)?;
    ///     all[1].to_vec::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [1, 11])));
    /// ```
    #[track_caller]
    pub fn all_gather_list(&self, x: impl Into<Tensor>) -> Result<Vec<Tensor>> {
        let x: Tensor = x.into().unsqueeze(0)?;
        let all = self.all_gather(x, 0)?;
        (0..self.size()).map(|member| all.at(0, member)).collect()
    }

    /// Reduces each of a list, in one communication for each element type among them.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let list = vec![Tensor::from_slice(&[1i64], &[1])?, Tensor::from_slice(&[2i64, 3], &[2])?];
    ///     let sums = mesh.all_reduce_coalesced(list, Reduce::Sum)?;
    ///     sums[1].to_vec::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [4, 6])));
    /// ```
    #[track_caller]
    pub fn all_reduce_coalesced(&self, list: Vec<Tensor>, reduce: Reduce) -> Result<Vec<Tensor>> {
        let site = Location::caller();
        self.by_type(list, |_| Box::new(ops::AllReduceStart { reduce, over: self.over }), site)
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
        Ok(self.list(&op, list, Location::caller())?.gives)
    }

    /// Reduces each of a list and gives each member its part along a dimension of each, in one communication for each
    /// element type among them.
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
        if dims.len() != list.len() {
            let message =
                format!("expected a dimension for each of {} tensors, got {}", list.len(), dims.len());
            return Err(Error::new("reduce_scatter_coalesced", message, site));
        }
        let op = |places: &[usize]| -> Box<dyn OpDef> {
            let dims = places.iter().map(|place| dims[*place]).collect();
            Box::new(ops::ReduceScatterStart { reduce, dims, over: self.over })
        };
        self.by_type(list.to_vec(), op, site)
    }

    /// Starts one operation for the tensors of each element type, in the order in which the types first occur. `op`
    /// builds it for the given list indices.
    #[track_caller]
    fn by_type(
        &self,
        list: Vec<Tensor>,
        op: impl Fn(&[usize]) -> Box<dyn OpDef>,
        site: &'static Location<'static>,
    ) -> Result<Vec<Tensor>> {
        let mut types: Vec<Dtype> = Vec::new();
        for tensor in &list {
            if !types.contains(&tensor.dtype()) {
                types.push(tensor.dtype());
            }
        }
        let mut list: Vec<Option<Tensor>> = list.into_iter().map(Some).collect();
        let mut results: Vec<Option<Tensor>> = list.iter().map(|_| None).collect();
        for dtype in types {
            let is = |one: &Option<Tensor>| one.as_ref().is_some_and(|one| one.dtype() == dtype);
            let places: Vec<usize> = (0..list.len()).filter(|place| is(&list[*place])).collect();
            let args: Vec<Tensor> = places.iter().filter_map(|place| list[*place].take()).collect();
            let started = self.list(&*op(&places), &args, site)?;
            for (place, result) in places.iter().zip(started.gives) {
                results[*place] = Some(result);
            }
        }
        Ok(results.into_iter().flatten().collect())
    }
}
