//! Collectives that return new tensors. An operand passed by value without other owners is used in place; one passed by
//! reference is not modified.
//!
//! The result is pending: the first access to its elements waits for it.

use std::panic::Location;
use std::rc::Rc;

use consort_ir::index::Index;
use consort_ir::ops;
use consort_ir::ops::{OpDef, call_name};
use consort_types::{Kind, Missing, Reduce, Route};

use crate::error::{Error, Named, Result};
use crate::index::{Shape, plain};
use crate::mesh::Group;
use crate::pending::Starts;
use crate::tensor::Tensor;
use crate::trace::{is_tracing, settle, size_here, uncompiled_at};

impl Group {
    /// Starts an operation with one operand and one result.
    #[track_caller]
    pub(crate) fn one(
        &self,
        op: &dyn OpDef,
        mut x: Tensor,
        site: &'static Location<'static>,
    ) -> Result<Tensor> {
        self.start_on(op, &mut x, site)?;
        Ok(x)
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
        let site = Location::caller();
        let message = match op.collective() {
            None => "expected an op that communicates: `consort::apply` runs the others",
            Some(collective) if collective.kind == Kind::Exchange => {
                "expected a collective: `Group::batch` sends and receives"
            }
            Some(collective) if collective.over != self.over => {
                "expected an op over this group: see `Group::name`"
            }
            Some(_) => {
                let args: Vec<Tensor> = args.into_iter().collect();
                return Ok(self.start(op, &args, 1, &[], site)?.into_vec());
            }
        };
        Err(Error::new(call_name(op.info().name), message, site))
    }
}

impl Group {
    /// Sizes as an operation on this group takes them: symbols in a trace, in eager code this rank's numbers.
    pub(crate) fn own_sizes(
        &self,
        op: &str,
        sizes: &(impl Shape + ?Sized),
        site: &'static Location<'static>,
    ) -> Result<Vec<Index>> {
        let sizes = plain(sizes.sizes());
        if is_tracing() && !self.breaks {
            return Ok(sizes);
        }
        let number = |size: &Index| match size.as_const() {
            Some(_) => Ok(size.clone()),
            None => size_here(size, &self.world, site).map(Index::constant),
        };
        sizes.iter().map(number).collect::<Result<_>>().named(op, site)
    }

    /// The same of splits, which may be left out.
    pub(crate) fn own_splits(
        &self,
        op: &str,
        splits: Option<&dyn Shape>,
        site: &'static Location<'static>,
    ) -> Result<Option<Vec<Index>>> {
        splits.map(|splits| self.own_sizes(op, splits, site)).transpose()
    }
}

/// Declares a collective of one tensor.
macro_rules! collectives {
    ($($(#[doc = $doc:expr])* $name:ident ($group:ident, $site:ident; $($arg:ident: $ty:ty),*) $op:expr;)*) => {
        impl Group {$(
            $(#[doc = $doc])*
            #[track_caller]
            pub fn $name(&self, x: impl Into<Tensor> $(, $arg: $ty)*) -> Result<Tensor> {
                let ($group, $site) = (self, Location::caller());
                self.one(&$op, x.into(), $site)
            }
        )*}
    };
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
    all_reduce (group, site; reduce: Reduce)
        ops::AllReduceStart { reduce, over: group.over };

    /// Joins the members' tensors along a dimension. 0-d tensors give a 1-d tensor with one element per member.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let all = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     mesh.all_gather(Tensor::from_slice(&[me, me + 10], &[2, 1])?, 1)?.to_vec::<i64>()
    /// });
    /// assert!(all.into_iter().all(|all| all.is_ok_and(|all| all == [0, 1, 10, 11])));
    /// ```
    all_gather (group, site; dim: usize)
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
    reduce_scatter (group, site; reduce: Reduce, dim: usize)
        ops::ReduceScatterStart { reduce, dims: vec![dim], over: group.over };

    /// Sends a part along dimension 0 to each member and joins the received parts. Part sizes are given for sends and
    /// receives, or for neither: then all parts are equal.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let x = Tensor::from_slice(&[10 * me, 10 * me + 1], &[2])?;
    ///     mesh.all_to_all(x, None, None)?.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[0, 10], [1, 11]]);
    /// ```
    all_to_all (group, site; out_splits: Option<&dyn Shape>, in_splits: Option<&dyn Shape>)
        ops::AllToAllStart {
            in_splits: group.own_splits("all_to_all", in_splits, site)?,
            out_splits: group.own_splits("all_to_all", out_splits, site)?,
            over: group.over,
        };

    /// Gives every member the tensor of the root.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(3, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     mesh.broadcast(Tensor::from_slice(&[me], &[1])?, 2)?.item::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == 2)));
    /// ```
    broadcast (group, site; root: usize)
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
    reduce (group, site; reduce: Reduce, root: usize)
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
    gather (group, site; dim: usize, root: usize)
        ops::GatherStart { dims: vec![dim], root, over: group.over };

    /// Gives each member its part, along a dimension, of the root's tensor. The others' tensors only give the shape.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     mesh.scatter(Tensor::from_slice(&[10 * me, 10 * me + 1], &[2])?, 0, 1)?.item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [10, 11]);
    /// ```
    scatter (group, site; dim: usize, root: usize)
        ops::ScatterStart { dims: vec![dim], root, over: group.over };

    /// Sends along a route: `Route::Ring(1)` to the next member, around the end; `Route::Shift(1)` to the next one, if
    /// there is one; or a table. A member without a sender gets zeros, or all get an error, as `Missing` selects.
    ///
    /// ```
    /// use consort::{Missing, Route, Tensor};
    ///
    /// let got = consort::spawn(3, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     mesh.permute(Tensor::from_slice(&[me], &[1])?, Route::Ring(1), Missing::Error)?.item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [2, 0, 1]);
    /// ```
    permute (group, site; route: impl Into<Route>, missing: Missing)
        ops::PermuteStart { route: route.into(), missing, over: group.over };

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
    reduce_scatter_v (group, site; reduce: Reduce, dim: usize, sizes: &(impl Shape + ?Sized))
        ops::ReduceScatterVStart {
            reduce,
            dim,
            sizes: group.own_sizes("reduce_scatter_v", sizes, site)?,
            over: group.over,
        };
}

impl Group {
    /// Joins tensors of different sizes along a dimension; `sizes` are those of all members.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     let me = mesh.my_rank()?;
    ///     let x = Tensor::from_iter((0..=me as i64).map(|i| i + 10 * me as i64))?;
    ///     mesh.all_gather_v(x, 0, &[1, 2])?.to_vec::<i64>()
    /// });
    /// assert!(got.into_iter().all(|got| got.is_ok_and(|got| got == [0, 10, 11])));
    /// ```
    #[track_caller]
    pub fn all_gather_v(
        &self,
        x: impl Into<Tensor>,
        dim: usize,
        sizes: &(impl Shape + ?Sized),
    ) -> Result<Tensor> {
        let site = Location::caller();
        self.uneven(x.into(), dim, self.own_sizes("all_gather_v", sizes, site)?, site)
    }

    #[track_caller]
    fn uneven(
        &self,
        mut x: Tensor,
        dim: usize,
        sizes: Vec<Index>,
        site: &'static Location<'static>,
    ) -> Result<Tensor> {
        if self.breaks && is_tracing() {
            return uncompiled_at("all_gather_v", site, || self.uneven(x, dim, sizes, site));
        }
        if x.traced.is_some() && !is_tracing() {
            x = settle(&x, "all_gather_v", site)?;
        }
        let place = if is_tracing() || !self.has_me() { None } else { Some(self.my_rank()?) };
        let mine = place.and_then(|place| sizes.get(place)).and_then(Index::as_const);
        // The size differs between ranks: the type picks the entry of the size table at this member's place.
        if let (Some(mine), Some(size)) = (mine, x.layout.shape.get(dim)) {
            if usize::try_from(mine) != Ok(*size) {
                let numbers: Vec<String> =
                    sizes.iter().filter_map(Index::as_const).map(|n| n.to_string()).collect();
                let numbers = numbers.join(", ");
                let expected =
                    format!("dimension {dim} to be {mine}, this member's entry of the sizes [{numbers}]");
                return Err(Error::new("all_gather_v", (expected, size.to_string()), site));
            }
            let mut shape = x.ty.shape.clone();
            shape[dim] = Index::pick(&self.rank().0, &sizes);
            x.ty = Rc::new(x.ty.with_shape(shape));
        }
        self.one(&ops::AllGatherVStart { dim, sizes, over: self.over }, x, site)
    }

    /// Completes after all members have called it. It waits, unless [`pending`](Group::pending) makes a handle of it.
    ///
    /// ```
    /// let done = consort::spawn(2, |mesh| mesh.barrier());
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        let site = Location::caller();
        let has_handle = self.world.starts.borrow().is_some();
        let starts = Starts::collect(&self.world);
        self.start(&ops::BarrierStart { over: self.over }, &[], 1, &[], site)?;
        match has_handle {
            true => Ok(()),
            false => starts.finish().wait(site),
        }
    }
}
