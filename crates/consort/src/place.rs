//! Collectives that write where something is: tensors and mutable slices of tensors.
//!
//! Storage with one owner is written where it lies. Storage with several is copied once, for value semantics: what one
//! owner writes the others do not see.

use std::panic::Location;
use std::rc::Rc;

use consort_ir::dtype::Dtype;
use consort_ir::index as ir;
use consort_ir::layout::Layout;
use consort_ir::mesh::Axes;
use consort_ir::ops::{self, OpDef, Reduce};
use smallvec::smallvec;

use crate::apply::{copy_into, run_one, write_into};
use crate::error::{Error, Result};
use crate::index::{Index, Shape, plain};
use crate::mesh::Group;
use crate::pending::Pending;
use crate::storage::Storage;
use crate::tensor::{Placed, Tensor, alloc};
use crate::trace::{equal, is_tracing, settle, update_later};
use crate::world::World;

/// A part of a tensor that is written in place.
///
/// ```
/// use consort::{Dtype, Tensor};
///
/// # fn main() -> consort::Result<()> {
/// let mut x = Tensor::zeros(Dtype::F32, &[3, 2])?;
/// x.narrow_mut(0, 1usize, 1usize)?.copy_from(&Tensor::from_slice(&[1.0f32, 2.0], &[1, 2])?)?;
/// assert_eq!(x.to_string(), "[[0. 0.]\n [1. 2.]\n [0. 0.]]");
/// # Ok(()) }
/// ```
pub struct SliceMut<'a> {
    pub(crate) tensor: &'a mut Tensor,
    pub(crate) layout: Rc<Placed>,
    shape: Vec<ir::Index>,
    start: Vec<ir::Index>,
    /// What lies there, in a trace.
    traced: Option<Tensor>,
}

/// What a collective can write in place: `&mut Tensor`, or a slice of one.
///
/// [`all_reduce_`](Group::all_reduce_) has an example.
pub trait Place<'a> {
    /// As a slice.
    fn into_slice(self) -> SliceMut<'a>;
}

impl<'a> Place<'a> for &'a mut Tensor {
    fn into_slice(self) -> SliceMut<'a> {
        let (shape, start) = (self.ty.shape.clone(), vec![ir::Index::constant(0); self.rank()]);
        let traced = is_tracing().then(|| self.clone());
        SliceMut { layout: self.layout.clone(), shape, start, traced, tensor: self }
    }
}

impl<'a> Place<'a> for SliceMut<'a> {
    fn into_slice(self) -> SliceMut<'a> {
        self
    }
}

impl Tensor {
    /// The part of a dimension that begins at `start` and has `size` entries, to be written in place.
    ///
    /// [`SliceMut`] has an example.
    #[track_caller]
    pub fn narrow_mut(
        &mut self,
        dim: usize,
        start: impl Into<Index>,
        size: impl Into<Index>,
    ) -> Result<SliceMut<'_>> {
        let (starts, sizes) =
            self.narrowed("narrow_mut", dim, start.into(), size.into(), Location::caller())?;
        self.slice_mut_at(starts, sizes, Location::caller())
    }

    /// A box of it, to be written in place: where it begins and how many places it has, along each dimension.
    ///
    /// ```
    /// use consort::{Dtype, Tensor};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let mut x = Tensor::zeros(Dtype::F32, &[3, 3])?;
    /// x.slice_mut(&[1, 1], &[1, 2])?.copy_from(&Tensor::from_slice(&[1.0f32, 2.0], &[1, 2])?)?;
    /// assert_eq!(x.to_string(), "[[0. 0. 0.]\n [0. 1. 2.]\n [0. 0. 0.]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn slice_mut(
        &mut self,
        start: &(impl Shape + ?Sized),
        size: &(impl Shape + ?Sized),
    ) -> Result<SliceMut<'_>> {
        self.slice_mut_at(plain(start.sizes()), plain(size.sizes()), Location::caller())
    }

    fn slice_mut_at(
        &mut self,
        start: Vec<ir::Index>,
        size: Vec<ir::Index>,
        site: &'static Location<'static>,
    ) -> Result<SliceMut<'_>> {
        // Elements that are repeated have one place: what is written to one would be written to all.
        if self.layout.repeats() && self.storage.is_some() {
            self.move_to_own(site)?;
        }
        let part = self.part(start.clone(), size, &vec![1; self.rank()], site)?;
        let (layout, shape) = (part.layout.clone(), part.ty.shape.clone());
        Ok(SliceMut { layout, shape, start, traced: is_tracing().then_some(part), tensor: self })
    }

    /// Takes over the elements of another tensor of the same shape and type.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let mut x = consort::Tensor::from_iter([0i32, 0])?;
    /// x.copy_from(&consort::Tensor::from_iter([1i32, 2])?)?;
    /// assert_eq!(x.to_string(), "[1 2]");
    /// assert!(x.copy_from(&consort::Tensor::from_iter([1.0f32, 2.0])?).is_err());
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn copy_from(&mut self, other: &Tensor) -> Result<()> {
        self.into_slice().copy_from(other)
    }

    /// Makes this the only owner of its storage, without gaps, by a copy where it is not. Waits for its elements.
    pub(crate) fn make_writable(&mut self, site: &'static Location<'static>) -> Result<()> {
        let Some(storage) = &self.storage else { return Ok(()) };
        if Rc::strong_count(storage) == 1 && self.layout.is_contiguous() {
            return self.wait();
        }
        self.move_to_own(site)
    }

    /// A copy of its own, without gaps.
    fn move_to_own(&mut self, site: &'static Location<'static>) -> Result<()> {
        let world = World::current()?;
        let buffer = alloc(&world, "copy", self.dtype(), &self.layout.shape, site)?;
        copy_into(self, &buffer, site)?;
        world.count_copy(buffer.len());
        self.layout = Placed::new(Layout::contiguous(&self.layout.shape));
        self.storage = Some(Storage::new(buffer));
        Ok(())
    }
}

impl SliceMut<'_> {
    /// The sizes, outermost first.
    ///
    /// [`SliceMut`] has an example.
    pub fn shape(&self) -> &[usize] {
        &self.layout.shape
    }

    /// The element type.
    ///
    /// [`SliceMut`] has an example.
    pub fn dtype(&self) -> Dtype {
        self.tensor.dtype()
    }

    /// What lies there, as a view that shares the storage.
    pub(crate) fn view(&self) -> Tensor {
        if let Some(traced) = &self.traced {
            return traced.clone();
        }
        Tensor {
            ty: Rc::new(self.tensor.ty.with_shape(self.shape.clone())),
            layout: self.layout.clone(),
            storage: self.tensor.storage.clone(),
            traced: self.tensor.traced.clone(),
            world: self.tensor.world,
        }
    }

    /// Whether it is all of the tensor.
    fn is_whole(&self) -> bool {
        match &self.traced {
            None => self.layout == self.tensor.layout,
            Some(_) => {
                self.start.iter().all(|start| start.as_const() == Some(0))
                    && self.shape == self.tensor.ty.shape
            }
        }
    }

    /// In a trace, the tensor becomes one with this in the place of the slice.
    pub(crate) fn replace(&mut self, part: Tensor, site: &'static Location<'static>) -> Result<()> {
        let mut fits = part.dtype() == self.dtype() && part.rank() == self.shape.len();
        for (a, b) in part.ty.shape.iter().zip(&self.shape) {
            fits = fits && equal(a, b, site)?;
        }
        if !fits {
            let (expected, got) = (&self.layout.shape[..], part.hint_shape());
            let message = format!("expected {}{expected:?}, got {}{got:?}", self.dtype(), part.dtype());
            return Err(Error::new("copy_from", message, site));
        }
        if self.is_whole() {
            *self.tensor = part;
            return Ok(());
        }
        if let Some(late) = update_later(self.tensor, &part, &self.start) {
            *self.tensor = late;
            return Ok(());
        }
        let op = ops::UpdateSlice { start: self.start.clone() };
        *self.tensor = run_one(&op, smallvec![self.tensor.clone(), part], site)?;
        Ok(())
    }

    /// Notes axes over which the tensor may differ, now that something is written to it.
    pub(crate) fn may_differ(&mut self, varies: Axes) {
        self.tensor.ty = Rc::new(self.tensor.ty.with_varies(self.tensor.ty.varies.union(varies)));
    }

    /// A slice of a tensor that has other owners becomes one of a copy.
    pub(crate) fn make_own(&mut self, site: &'static Location<'static>) -> Result<()> {
        let is_whole = self.is_whole() || is_tracing();
        let is_only = self.tensor.storage.as_ref().is_none_or(|storage| Rc::strong_count(storage) == 1);
        if is_whole || is_only || self.layout.numel() == 0 {
            return Ok(());
        }
        // The part lies elsewhere in the copy: find it by its distance from the first element along each dimension.
        let mut rest = self.layout.start - self.tensor.layout.start;
        let mut starts: Vec<usize> = vec![0; self.tensor.rank()];
        let mut by_stride: Vec<usize> = (0..self.tensor.rank()).collect();
        by_stride.sort_by_key(|dim| std::cmp::Reverse(self.tensor.layout.strides[*dim]));
        for dim in by_stride {
            let stride = self.tensor.layout.strides[dim];
            if stride > 0 && self.tensor.layout.shape[dim] > 1 {
                starts[dim] = rest / stride;
                rest %= stride;
            }
        }
        let sizes = self.layout.shape.clone();
        self.tensor.move_to_own(site)?;
        let mut layout = (**self.tensor.layout).clone();
        for (dim, start) in starts.into_iter().enumerate() {
            layout = layout.narrowed(dim, start, sizes[dim]);
        }
        self.layout = Placed::new(layout);
        Ok(())
    }

    /// Takes over the elements of another tensor of the same shape and type.
    ///
    /// [`SliceMut`] has an example.
    #[track_caller]
    pub fn copy_from(mut self, other: &Tensor) -> Result<()> {
        let site = Location::caller();
        if is_tracing() {
            return self.replace(other.clone(), site);
        }
        if self.tensor.traced.is_some() {
            *self.tensor = settle(self.tensor, "copy_from", site)?;
        }
        let other = &settle(other, "copy_from", site)?;
        if other.dtype() != self.dtype() || other.shape() != self.shape() {
            let message = format!(
                "expected {}{:?}, got {}{:?}",
                self.dtype(),
                self.shape(),
                other.dtype(),
                other.shape()
            );
            return Err(Error::new("copy_from", message, site));
        }
        if self.tensor.storage.is_none() || other.storage.is_none() {
            return Ok(());
        }
        if self.layout == self.tensor.layout {
            // The whole tensor: its old elements are of no meaning, so the other's storage serves as well.
            let ty = self.tensor.ty.with_varies(other.ty.varies);
            let own = self.tensor.storage.as_ref().is_some_and(|storage| Rc::strong_count(storage) == 1);
            if !own || self.layout.repeats() {
                *self.tensor = Tensor { ty: Rc::new(ty), ..other.clone() };
                return Ok(());
            }
        }
        self.make_own(site)?;
        write_into(&self.view(), other, site)?;
        self.may_differ(other.ty.varies);
        Ok(())
    }
}

impl Group {
    /// Runs an operation whose result goes where its operand is.
    #[track_caller]
    fn in_place<'a>(
        &self,
        op: &dyn OpDef,
        place: impl Place<'a>,
        site: &'static Location<'static>,
    ) -> Result<Pending<()>> {
        let mut slice = place.into_slice();
        slice.make_own(site)?;
        // The whole tensor is replaced by the result; of a slice, the tensor itself is one more owner.
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

    /// Runs an operation whose result goes into a tensor or slice that is there.
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
        // There is one communication for each run of one type.
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
    pub fn permute_<'a>(&self, x: impl Place<'a>, route: ops::Route, missing: ops::Missing) -> Result<()> {
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

    /// [`all_gather`](Group::all_gather) in place: each member has its part of a dimension, by its place in the group,
    /// and all get the others' parts where they belong.
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
    /// becomes the reduction; the rest stays as it was.
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

    /// Where this member's part of a dimension begins, and its size: all have equal parts.
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
        // The op refuses a group that leaves ranks out, so it does not matter where the part of such a rank is.
        let me = if self.has_me() { self.rank() } else { Index::from(0usize) };
        Ok((me * &size, size))
    }

    /// [`all_gather`](Group::all_gather) into a tensor or slice that is there.
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

    /// [`reduce_scatter`](Group::reduce_scatter) into a tensor or slice that is there.
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

    /// [`all_to_all`](Group::all_to_all) into a tensor or slice that is there.
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
