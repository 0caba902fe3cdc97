//! The inputs of a kernel in the form it needs: attributes, operands, temporary storage.

use consort_ir::ops::{EvalError, OpDef};
use consort_types::Dtype;
use consort_types::layout::Layout;

use crate::kernels::{Arg, KernelError, View, ViewMut};

/// The op with its attributes, as its own type.
pub(crate) fn attributes<T: OpDef>(op: &dyn OpDef) -> Result<&T, KernelError> {
    let other = || KernelError::new(format!("the kernel of another op was called for {}", op.info().name));
    op.as_any().downcast_ref().ok_or_else(other)
}

/// An operand of a kernel that does not compute in place.
pub(crate) fn view<'a>(args: &[Arg<'a>], i: usize) -> Result<View<'a>, KernelError> {
    match args.get(i) {
        Some(Arg::View(view)) => Ok(*view),
        Some(Arg::Result) => Err(KernelError::new(format!("operand {i} cannot be computed on in place"))),
        None => Err(KernelError::new(format!("operand {i} is missing"))),
    }
}

/// The result of an op that has one.
pub(crate) fn only<'r, 'a>(results: &'r mut [ViewMut<'a>]) -> Result<&'r mut ViewMut<'a>, KernelError> {
    results.first_mut().ok_or_else(|| KernelError::new("expected a result"))
}

/// The part of a view that a layout selects.
pub(crate) fn part<'a>(view: &View<'a>, layout: &'a Layout) -> View<'a> {
    let bytes = view.bytes.get(layout.start * view.dtype.size()..).unwrap_or_default();
    View { dtype: view.dtype, shape: &layout.shape, strides: &layout.strides, bytes }
}

/// The layout of a view, relative to its first element.
pub(crate) fn layout(view: &View<'_>) -> Layout {
    Layout { shape: view.shape.into(), strides: view.strides.into(), start: 0 }
}

/// Storage for elements of any type, aligned for all of them.
pub(crate) struct Storage {
    words: Vec<u64>,
    len: usize,
}

impl Storage {
    /// `n` zeros.
    pub(crate) fn new(dtype: Dtype, n: usize) -> Storage {
        let len = n * dtype.size();
        Storage { words: vec![0; len.div_ceil(8)], len }
    }

    /// A copy of these bytes.
    pub(crate) fn of(bytes: &[u8]) -> Storage {
        let mut storage = Storage::new(Dtype::U8, bytes.len());
        storage.bytes_mut().copy_from_slice(bytes);
        storage
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    /// The bytes, to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

impl From<EvalError> for KernelError {
    fn from(error: EvalError) -> KernelError {
        KernelError::new(error.headline)
    }
}
