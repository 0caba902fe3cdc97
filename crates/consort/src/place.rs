//! Destinations of in-place collectives: tensors and mutable slices of tensors.
//!
//! Storage with one owner is written in place. Shared storage is copied on write, for value semantics: what one
//! owner writes the others do not see.

use std::panic::Location;
use std::rc::Rc;

use consort_ir::index as ir;
use consort_ir::ops;
use consort_types::layout::Layout;
use consort_types::{Axes, Dtype};
use smallvec::smallvec;

use crate::apply::{copy_into, run_one, write_into};
use crate::error::{Error, Named, Result};
use crate::index::{Index, Shape, plain};
use crate::placement::Origin;
use crate::storage::{Storage, alloc};
use crate::tensor::{CachedLayout, Tensor};
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
    pub(crate) layout: Rc<CachedLayout>,
    pub(crate) shape: Vec<ir::Index>,
    pub(crate) start: Vec<ir::Index>,
    /// The traced value of the slice, in a trace.
    traced: Option<Tensor>,
}

/// A destination of an in-place collective: `&mut Tensor`, or a slice of one.
///
/// [`all_reduce_`](crate::Group::all_reduce_) has an example.
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
        let site = Location::caller();
        let (starts, sizes) = self.narrowed("narrow_mut", dim, start.into(), size.into(), site)?;
        self.slice_mut_at(starts, sizes, site).named("narrow_mut", site)
    }

    /// A box of it, to be written in place: start and size along each dimension.
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
        let site = Location::caller();
        self.slice_mut_at(plain(start.sizes()), plain(size.sizes()), site).named("slice_mut", site)
    }

    pub(crate) fn slice_mut_at(
        &mut self,
        start: Vec<ir::Index>,
        size: Vec<ir::Index>,
        site: &'static Location<'static>,
    ) -> Result<SliceMut<'_>> {
        // Repeated elements share memory: a write to one would change all.
        if self.layout.repeats() && self.storage.is_some() {
            self.move_to_own(site)?;
        }
        let part = self.part(start.clone(), size, &vec![1; self.rank()], site)?;
        let (layout, shape) = (part.layout.clone(), part.ty.shape.clone());
        Ok(SliceMut { layout, shape, start, traced: is_tracing().then_some(part), tensor: self })
    }

    /// Assigns the elements of another tensor of the same shape and type.
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

    /// Makes this the only owner of contiguous storage that no peer reads, by a copy if necessary.
    /// Waits for its elements.
    pub(crate) fn make_writable(&mut self, site: &'static Location<'static>) -> Result<()> {
        if self.storage.is_none() {
            return Ok(());
        }
        self.wait()?;
        match self.held(1, true) {
            None => Ok(()),
            Some(_) => self.move_to_own(site),
        }
    }

    /// Moves the elements to new, contiguous storage.
    fn move_to_own(&mut self, site: &'static Location<'static>) -> Result<()> {
        let world = World::current()?;
        let buffer = alloc(&world, "copy", self.dtype(), &self.layout.shape, site)?;
        copy_into(self, &buffer, site)?;
        world.count_copy(buffer.len());
        self.layout = CachedLayout::new(Layout::contiguous(&self.layout.shape));
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

    /// The slice as a view that shares the storage.
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
            origin: Origin::NONE,
        }
    }

    /// Whether it is all of the tensor.
    pub(crate) fn is_whole(&self) -> bool {
        match &self.traced {
            None => self.layout == self.tensor.layout,
            Some(_) => {
                self.start.iter().all(|start| start.as_const() == Some(0))
                    && self.shape == self.tensor.ty.shape
            }
        }
    }

    /// Whether a traced tensor has its element type and shape at this call.
    fn has_type_of(&self, part: &Tensor, site: &'static Location<'static>) -> Result<bool> {
        let mut fits = part.dtype() == self.dtype() && part.rank() == self.shape.len();
        for (a, b) in part.ty.shape.iter().zip(&self.shape) {
            fits = fits && equal(a, b, site)?;
        }
        Ok(fits)
    }

    /// In a trace, replaces the tensor by one with `part` in the place of the slice.
    pub(crate) fn replace(&mut self, part: Tensor, site: &'static Location<'static>) -> Result<()> {
        if !self.has_type_of(&part, site)? {
            let (expected, got) = (&self.layout.shape[..], part.hint_shape());
            let message = (format!("{}{expected:?}", self.dtype()), format!("{}{got:?}", part.dtype()));
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

    /// Adds axes over which the tensor may differ after a write.
    pub(crate) fn may_differ(&mut self, varies: Axes) {
        self.tensor.ty = Rc::new(self.tensor.ty.with_varies(self.tensor.ty.varies.union(varies)));
        self.tensor.origin = Origin::NONE;
    }

    /// Copy-on-write: if the tensor has other owners, or peers still read it, the slice becomes one of a copy.
    pub(crate) fn make_own(&mut self, site: &'static Location<'static>) -> Result<()> {
        let Some(storage) = &self.tensor.storage else { return Ok(()) };
        if self.is_whole() || is_tracing() || self.layout.numel() == 0 {
            return Ok(());
        }
        let range = self.layout.bytes(self.tensor.dtype());
        storage.wait(range.clone())?;
        if storage.is_free(1, true, || range) {
            return Ok(());
        }
        // The slice has another offset in the copy: recover its start along each dimension from the strides.
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
        self.layout = CachedLayout::new(layout);
        Ok(())
    }

    /// Takes the result of an operation, completed or pending, written in place or elsewhere.
    pub(crate) fn take_result(&mut self, result: Tensor, site: &'static Location<'static>) -> Result<()> {
        if is_tracing() {
            if !self.has_type_of(&result, site)? {
                let (expected, got) = (result.hint_shape(), &self.layout.shape[..]);
                let message = (
                    format!("{}{expected:?} for the result", result.dtype()),
                    format!("{}{got:?}", self.dtype()),
                );
                return Err(Error::new("copy_from", message, site));
            }
            return self.replace(result, site);
        }
        if self.layout == self.tensor.layout {
            *self.tensor = result;
            return Ok(());
        }
        self.may_differ(result.ty.varies);
        let landed = match (&result.storage, &self.tensor.storage) {
            (Some(result), Some(own)) => Rc::ptr_eq(result, own),
            _ => true,
        };
        if landed {
            return Ok(());
        }
        // It could not be written in place, for example because it has gaps.
        self.make_own(site)?;
        World::current()?.count_copy(result.numel() * result.dtype().size());
        write_into(&self.view(), &result, site)
    }

    /// Assigns the elements of another tensor of the same shape and type.
    ///
    /// [`SliceMut`] has an example.
    #[track_caller]
    pub fn copy_from(self, other: &Tensor) -> Result<()> {
        self.assign(other, Location::caller())
    }

    pub(crate) fn assign(mut self, other: &Tensor, site: &'static Location<'static>) -> Result<()> {
        if is_tracing() {
            return self.replace(other.clone(), site).named("copy_from", site);
        }
        if self.tensor.traced.is_some() {
            *self.tensor = settle(self.tensor, "copy_from", site)?;
        }
        let other = &settle(other, "copy_from", site)?;
        if other.dtype() != self.dtype() || other.shape() != self.shape() {
            let message = (
                format!("{}{:?}", self.dtype(), self.shape()),
                format!("{}{:?}", other.dtype(), other.shape()),
            );
            return Err(Error::new("copy_from", message, site));
        }
        if self.tensor.storage.is_none() || other.storage.is_none() {
            return Ok(());
        }
        if self.layout == self.tensor.layout {
            // The whole tensor is overwritten: if it is not the only owner, it can share the other's storage.
            let ty = self.tensor.ty.with_varies(other.ty.varies);
            let is_own = |storage: &Rc<Storage>| storage.is_free(1, true, || self.tensor.byte_range());
            let own = self.tensor.storage.as_ref().is_some_and(is_own);
            if !own || self.layout.repeats() {
                *self.tensor = Tensor { ty: Rc::new(ty), ..other.clone() };
                return Ok(());
            }
        }
        self.make_own(site).named("copy_from", site)?;
        write_into(&self.view(), other, site).named("copy_from", site)?;
        self.may_differ(other.ty.varies);
        Ok(())
    }
}
