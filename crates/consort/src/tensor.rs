//! Tensors: values with an element type, a shape, and the axes over which they may differ between ranks.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::panic::Location;
use std::rc::Rc;

use consort_ir::index::{self as ir, Sym};
use consort_ir::types::TensorType;
use consort_types::layout::{Layout, numel};
use consort_types::{Axes, Dtype, Headline, Held};
use smallvec::SmallVec;

use crate::element::Element;
use crate::error::{Error, Named, Result};
use crate::index::Index;
use crate::placement::Origin;
use crate::storage::{Storage, alloc, fill_new};
use crate::trace::{Traced, pin_shape, settle};
use crate::world::World;

/// A tensor. It behaves as a value: what is written to one is never seen through another.
///
/// Clones and views share storage. A write to storage with one owner happens in place; a write to shared storage
/// copies first. Tensors belong to the thread that made them; a [`HostTensor`](crate::HostTensor) can be sent.
///
/// ```
/// use consort::Tensor;
///
/// # fn main() -> consort::Result<()> {
/// let mut x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// let y = x.clone();
/// x.add_(&y)?;
/// assert_eq!(x.to_vec::<f32>()?, [2.0, 4.0, 6.0, 8.0]);
/// assert_eq!(y.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Tensor {
    pub(crate) ty: Rc<TensorType>,
    pub(crate) layout: Rc<CachedLayout>,
    /// `None` for a shape without data.
    pub(crate) storage: Option<Rc<Storage>>,
    /// Its value in a trace, current or finished.
    pub(crate) traced: Option<Rc<Traced>>,
    /// The world whose mesh the axes belong to; 0 for a thread that has joined none.
    pub(crate) world: u32,
    pub(crate) origin: Origin,
}

/// Operands or results, usually few.
pub(crate) type Tensors = SmallVec<[Tensor; 2]>;

/// A layout with cached properties.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CachedLayout {
    layout: Layout,
    span: usize,
    contiguous: bool,
}

impl CachedLayout {
    pub(crate) fn new(mut layout: Layout) -> Rc<CachedLayout> {
        // An empty tensor has no first element, so it starts at 0, which is valid in every storage.
        if layout.span() == 0 {
            layout.start = 0;
        }
        Rc::new(CachedLayout { span: layout.span(), contiguous: layout.is_contiguous(), layout })
    }

    /// The bytes of storage from the first element to the last.
    pub(crate) fn bytes(&self, dtype: Dtype) -> std::ops::Range<usize> {
        // What is too large for any memory is refused when it is allocated.
        let start = self.layout.start.saturating_mul(dtype.size());
        start..start.saturating_add(self.span.saturating_mul(dtype.size()))
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        self.contiguous
    }
}

impl Deref for CachedLayout {
    type Target = Layout;
    fn deref(&self) -> &Layout {
        &self.layout
    }
}

/// Sizes as a tensor type holds them.
pub(crate) fn constant_shape(shape: &[usize]) -> Vec<ir::Index> {
    shape.iter().map(|size| ir::Index::from(*size)).collect()
}

impl Tensor {
    /// A new tensor whose bytes are filled in by `fill`. It may differ between ranks over every axis.
    pub(crate) fn build(
        op: &str,
        dtype: Dtype,
        shape: &[usize],
        site: &'static Location<'static>,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<Tensor> {
        let world = World::current()?;
        let buffer = alloc(&world, op, dtype, shape, site)?;
        fill_new(op, &buffer, site, fill)?;
        let ty = TensorType::new(dtype, constant_shape(shape), world.mesh().all_axes());
        let (ty, layout) = (world.memo().share(ty), CachedLayout::new(Layout::contiguous(shape)));
        Ok(Tensor {
            ty,
            layout,
            storage: Some(Storage::new(buffer)),
            traced: None,
            world: world.id,
            origin: Origin::NONE,
        })
    }

    /// A tensor of given elements, in row-major order.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_slice(&[1i64, 2, 3, 4, 5, 6], &[2, 3])?;
    /// assert_eq!(x.to_string(), "[[1 2 3]\n [4 5 6]]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn from_slice<T: Element>(elements: &[T], shape: &[usize]) -> Result<Tensor> {
        let site = Location::caller();
        if numel(shape) != Some(elements.len()) {
            let message = (format!("as many elements as {shape:?} has"), elements.len().to_string());
            return Err(Error::new("from_slice", message, site));
        }
        Tensor::build("from_slice", T::DTYPE, shape, site, |bytes| {
            T::write(elements, bytes);
            Ok(())
        })
    }

    /// A tensor of the elements of an iterator, along one dimension.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let squares = consort::Tensor::from_iter((0..4).map(|i| (i * i) as f32))?;
    /// assert_eq!(squares.to_vec::<f32>()?, [0.0, 1.0, 4.0, 9.0]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    #[allow(clippy::should_implement_trait, reason = "there may be no room, so it gives a result")]
    pub fn from_iter<T: Element>(elements: impl IntoIterator<Item = T>) -> Result<Tensor> {
        let elements: Vec<T> = elements.into_iter().collect();
        Tensor::from_slice(&elements, &[elements.len()]).named("from_iter", Location::caller())
    }

    /// A tensor without data: ops on it, and collectives, give the shapes and types that they would give with data.
    ///
    /// ```
    /// use consort::{Dtype, Tensor};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let (x, w) = (Tensor::of_shape(Dtype::Bf16, &[8, 512]), Tensor::of_shape(Dtype::Bf16, &[512, 1 << 20]));
    /// assert_eq!(x.matmul(&w)?.shape(), [8, 1 << 20]);
    /// # Ok(()) }
    /// ```
    pub fn of_shape(dtype: Dtype, shape: &[usize]) -> Tensor {
        let ty = TensorType::new(dtype, constant_shape(shape), Axes::NONE);
        let layout = CachedLayout::new(Layout::contiguous(shape));
        Tensor { ty: Rc::new(ty), layout, storage: None, traced: None, world: 0, origin: Origin::NONE }
    }

    /// A tensor of a trace. Symbolic sizes show their values at this call; data-dependent ones show 1.
    pub(crate) fn of_trace(
        ty: TensorType,
        hints: &BTreeMap<Sym, i64>,
        traced: Rc<Traced>,
        world: &World,
    ) -> Tensor {
        let mesh = world.mesh();
        let env = |sym: Sym| match sym {
            Sym::Backed(_) => hints.get(&sym).copied(),
            _ => world.sizes(&mesh).index(&ir::Index::sym(sym)).ok(),
        };
        let size =
            |size: &ir::Index| size.eval(&env).ok().and_then(|size| usize::try_from(size).ok()).unwrap_or(1);
        let shape: Vec<usize> = ty.shape.iter().map(size).collect();
        let layout = CachedLayout::new(Layout::contiguous(&shape));
        Tensor {
            ty: Rc::new(ty),
            layout,
            storage: None,
            traced: Some(traced),
            world: world.id,
            origin: Origin::NONE,
        }
    }

    /// The current sizes; in a trace this records no guard.
    pub(crate) fn hint_shape(&self) -> &[usize] {
        match self.traced.as_ref().and_then(|traced| traced.landed()) {
            Some(landed) => &landed.layout.shape,
            None => &self.layout.shape,
        }
    }

    /// The element type.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// use consort::{Dtype, Index, Tensor};
    ///
    /// let x = Tensor::zeros(Dtype::F32, &[2, 3])?;
    /// assert_eq!((x.dtype(), x.shape(), x.rank(), x.numel()), (Dtype::F32, &[2, 3][..], 2, 6));
    /// assert_eq!(x.dim(1)?, Index::from(3usize));
    /// assert!(x.has_data() && !Tensor::of_shape(Dtype::F32, &[2]).has_data());
    /// # Ok(()) }
    /// ```
    pub fn dtype(&self) -> Dtype {
        self.ty.dtype
    }

    /// The sizes, outermost first. Does not wait. In a trace this records a guard for each symbolic size;
    /// [`dim`](Tensor::dim) keeps sizes symbolic.
    ///
    /// [`dtype`](Tensor::dtype) has an example.
    #[track_caller]
    pub fn shape(&self) -> &[usize] {
        if self.traced.is_some() {
            pin_shape(self, Location::caller());
        }
        self.hint_shape()
    }

    /// One size. Does not wait.
    ///
    /// [`dtype`](Tensor::dtype) has an example.
    #[track_caller]
    pub fn dim(&self, dim: usize) -> Result<Index> {
        let (size, site) = (self.ty.shape.get(dim), Location::caller());
        let none = || Error::new("dim", Headline::dimension(dim, self.ty.rank()), site);
        size.cloned().map(Index).ok_or_else(none)
    }

    /// How many dimensions it has.
    ///
    /// [`dtype`](Tensor::dtype) has an example.
    pub fn rank(&self) -> usize {
        self.layout.shape.len()
    }

    /// How many elements it has.
    ///
    /// [`dtype`](Tensor::dtype) has an example.
    #[track_caller]
    pub fn numel(&self) -> usize {
        self.layout.numel()
    }

    /// Whether it has data.
    ///
    /// [`dtype`](Tensor::dtype) has an example.
    pub fn has_data(&self) -> bool {
        self.storage.is_some() || self.traced.is_some()
    }

    /// Waits for its elements.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let done = consort::spawn(2, |mesh| {
    ///     let y = mesh.all_reduce(Tensor::from_iter([1.0f32])?, Reduce::Sum)?;
    ///     while !y.is_ready()? {} // Other work goes here.
    ///     y.wait() // Is over at once.
    /// });
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    #[track_caller]
    pub fn wait(&self) -> Result<()> {
        match (&self.storage, &self.traced) {
            (Some(storage), _) => storage.wait(self.byte_range()),
            (None, Some(traced)) => traced.wait(Location::caller()),
            (None, None) => Ok(()),
        }
    }

    /// Whether its elements are available; advances pending operations, and never blocks.
    ///
    /// [`wait`](Tensor::wait) has an example.
    #[track_caller]
    pub fn is_ready(&self) -> Result<bool> {
        match (&self.storage, &self.traced) {
            (Some(storage), _) => storage.is_ready(),
            (None, Some(traced)) => traced.is_ready(Location::caller()),
            (None, None) => Ok(true),
        }
    }

    /// The bytes of storage from its first element to its last.
    pub(crate) fn byte_range(&self) -> std::ops::Range<usize> {
        self.layout.bytes(self.ty.dtype)
    }

    /// Why its storage cannot be overwritten by one of `owners` owners, if so. [`Storage::is_free`] explains `or_copy`.
    #[inline]
    pub(crate) fn held(&self, owners: usize, or_copy: bool) -> Option<Held> {
        if !self.layout.is_contiguous() {
            return Some(Held::Gaps);
        }
        let is_free = |storage: &Rc<Storage>| storage.is_free(owners, or_copy, || self.byte_range());
        (!self.storage.as_ref().is_some_and(is_free)).then_some(Held::Needed)
    }

    pub(crate) fn data(&self, op: &str, site: &'static Location<'static>) -> Result<&Rc<Storage>> {
        self.storage.as_ref().ok_or_else(|| Error::new(op, ("a tensor with data", "a shape"), site))
    }

    /// The elements, in row-major order. Waits for them.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1i64, 2])?;
    /// assert_eq!(x.to_vec::<i64>()?, [1, 2]);
    /// assert!(x.to_vec::<f32>().is_err()); // Nothing is converted: `cast` does that.
    /// assert_eq!(x.sum_all()?.item::<i64>()?, 3);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.elements("to_vec", Location::caller())
    }

    pub(crate) fn elements<T: Element>(&self, op: &str, site: &'static Location<'static>) -> Result<Vec<T>> {
        self.check_type::<T>(op, site)?;
        self.with_bytes(op, site, |bytes| T::read(bytes))
    }

    /// The only element. Waits for it.
    ///
    /// [`to_vec`](Tensor::to_vec) has an example.
    #[track_caller]
    pub fn item<T: Element>(&self) -> Result<T> {
        let site = Location::caller();
        match &self.elements::<T>("item", site)?[..] {
            [element] => Ok(*element),
            elements => Err(Error::new("item", ("one element", elements.len().to_string()), site)),
        }
    }

    /// Calls `f` with the elements, in row-major order, without a copy if they are contiguous. Waits for them.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1.0f32, 2.0])?;
    /// assert_eq!(x.read(|elements: &[f32]| elements.iter().sum::<f32>())?, 3.0);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn read<T: Element + bytemuck::Pod, R>(&self, f: impl FnOnce(&[T]) -> R) -> Result<R> {
        let site = Location::caller();
        self.check_type::<T>("read", site)?;
        self.with_bytes("read", site, |bytes| {
            bytemuck::try_cast_slice(bytes)
                .map(f)
                .map_err(|error| Error::new("read", error.to_string(), site))
        })?
    }

    /// Calls `f` with the elements to change, in row-major order: in place if this tensor is the only owner and
    /// contiguous, otherwise in a copy that replaces its storage.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let mut x = consort::Tensor::from_iter([1.0f32, 2.0])?;
    /// x.update(|elements: &mut [f32]| elements[1] = 5.0)?;
    /// assert_eq!(x.to_vec::<f32>()?, [1.0, 5.0]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn update<T: Element + bytemuck::Pod, R>(&mut self, f: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        let site = Location::caller();
        self.check_type::<T>("update", site)?;
        if self.traced.is_some() {
            *self = settle(self, "update", site)?;
        }
        self.make_writable(site).named("update", site)?;
        let (world, range) = (World::current()?, self.byte_range());
        // The closure may write different values on each rank.
        self.origin = Origin::NONE;
        let all = world.mesh().all_axes();
        if self.ty.varies != all {
            self.ty = world.memo().varying(&self.ty, all);
        }
        let buffer = &self.data("update", site)?.buffer;
        let bytes = buffer.try_bytes_mut_of(range);
        let mut bytes = bytes.map_err(|error| Error::comm("update", error, site))?;
        let elements = bytemuck::try_cast_slice_mut(&mut bytes);
        elements.map(f).map_err(|error| Error::new("update", error.to_string(), site))
    }

    fn check_type<T: Element>(&self, op: &str, site: &'static Location<'static>) -> Result<()> {
        if T::DTYPE == self.dtype() {
            return Ok(());
        }
        Err(Error::new(op, (format!("the element type {}", self.dtype()), format!("{}", T::DTYPE)), site))
    }

    /// Calls `f` with the bytes of the elements, contiguous and in row-major order.
    pub(crate) fn with_bytes<R>(
        &self,
        op: &str,
        site: &'static Location<'static>,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        let copy;
        let whole = match self.traced.is_none() && self.layout.is_contiguous() {
            true => self,
            false => {
                copy = settle(self, op, site)?.contiguous_at(site).named(op, site)?;
                &copy
            }
        };
        let storage = whole.data(op, site)?;
        storage.wait(whole.byte_range())?;
        let bytes = storage.buffer.bytes_of(whole.byte_range());
        Ok(f(&bytes.map_err(|error| Error::comm(op, error, site))?))
    }

    /// The same elements, contiguous in row-major order: itself if they already are.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter(0..4i32)?.reshape(&[2, 2])?.permute(&[1, 0])?;
    /// assert_eq!(x.contiguous()?.to_vec::<i32>()?, [0, 2, 1, 3]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        let site = Location::caller();
        self.contiguous_at(site).named("contiguous", site)
    }

    pub(crate) fn contiguous_at(&self, site: &'static Location<'static>) -> Result<Tensor> {
        if self.layout.is_contiguous() || self.storage.is_none() {
            return Ok(self.clone());
        }
        let world = World::current()?;
        let buffer = alloc(&world, "copy", self.dtype(), &self.layout.shape, site)?;
        crate::apply::copy_into(self, &buffer, site)?;
        let layout = CachedLayout::new(Layout::contiguous(&self.layout.shape));
        Ok(Tensor { layout, storage: Some(Storage::new(buffer)), ..self.clone() })
    }
}
