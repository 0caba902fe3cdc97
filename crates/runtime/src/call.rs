//! Calls a kernel, or the evaluation of an op, on tensors in buffers: the one way for plans and eager code.

use std::ops::Range;
use std::time::Instant;

use consort_comm::{Buffer, Bytes, BytesMut};
use consort_ir::literal::Literal;
use consort_ir::ops::{EvalCx, OpDef, eval_of};
use consort_types::Dtype;
use consort_types::layout::Layout;

use crate::RunError;
use crate::kernels::operand::Storage;
use crate::kernels::{Arg, Kernel, KernelCx, View, ViewMut, copy};
use crate::threads::Threads;

/// A tensor in a buffer.
#[derive(Clone)]
pub struct Stored<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// Its part from the first element to the last.
    pub bytes: Range<usize>,
    /// The element type.
    pub dtype: Dtype,
    /// Sizes and strides, in elements.
    pub layout: &'a Layout,
}

/// An operand of a kernel.
pub enum Operand<'a> {
    /// It is read where it lies.
    Stored(Stored<'a>),
    /// It overlaps a result, so the kernel reads a copy.
    Overlapping(Stored<'a>),
    /// It is the first result, element for element.
    Result,
}

impl<'a> Stored<'a> {
    /// Its bytes, gaps included.
    #[inline]
    pub fn read(&self) -> Result<Bytes<'a>, RunError> {
        Ok(self.buffer.bytes_of(self.bytes.clone())?)
    }

    /// Its bytes for writing. Never waits: while peers may read them, that is an error.
    #[inline]
    pub fn write(&self) -> Result<BytesMut<'a>, RunError> {
        match self.buffer.try_bytes_mut_of(self.bytes.clone()) {
            Ok(bytes) => Ok(bytes),
            Err(error) => Err(if self.is_released()? { error.into() } else { RunError::leased() }),
        }
    }

    /// Whether no peer reads it any more, and nothing in flight touches it.
    pub fn is_released(&self) -> Result<bool, RunError> {
        Ok(self.buffer.is_released() || self.buffer.part(self.bytes.clone())?.is_released())
    }

    /// Waits until then. The clock is read only if it must block.
    pub fn release(&self, until: impl FnOnce() -> Instant) -> Result<(), RunError> {
        if !self.is_released()? {
            self.buffer.part(self.bytes.clone())?.bytes_mut(until())?;
        }
        Ok(())
    }

    #[inline]
    fn view_mut<'b>(&'b self, bytes: &'b mut [u8]) -> ViewMut<'b> {
        ViewMut { dtype: self.dtype, shape: &self.layout.shape, bytes }
    }

    /// Its elements without gaps.
    pub(crate) fn packed(&self, threads: &Threads) -> Result<Storage, RunError> {
        let mut packed = Storage::new(self.dtype, self.layout.numel());
        copy::copy(threads, &view(self.dtype, self.layout, &self.read()?), packed.bytes_mut())?;
        Ok(packed)
    }

    /// Its elements in the form that evaluations take.
    pub(crate) fn literal(&self) -> Result<Literal, RunError> {
        let packed = self.packed(&Threads::ONE)?;
        let literal = Literal::from_bytes(self.dtype, self.layout.shape.to_vec(), packed.bytes());
        literal.ok_or_else(|| RunError::new("expected a tensor that the evaluation can hold"))
    }
}

/// A tensor as kernels see it, over its bytes.
pub fn view<'a>(dtype: Dtype, layout: &'a Layout, bytes: &'a [u8]) -> View<'a> {
    View { dtype, shape: &layout.shape, strides: &layout.strides, bytes }
}

/// The elements of an operand, while a kernel reads them.
enum Read<'a> {
    /// Where they lie.
    InPlace(Bytes<'a>),
    /// A copy, and its layout if that is not the operand's.
    Copied(Box<(Storage, Option<Layout>)>),
}

impl<'a> Read<'a> {
    /// `None` if they are those of the first result.
    #[inline]
    fn of(arg: &Operand<'a>, kernel: &Kernel, threads: &Threads) -> Result<Option<Read<'a>>, RunError> {
        let is_read = |stored: &Stored<'_>| kernel.strided || stored.layout.is_contiguous();
        Ok(match arg {
            Operand::Result => None,
            Operand::Stored(stored) if is_read(stored) => Some(Read::InPlace(stored.read()?)),
            Operand::Overlapping(stored) if is_read(stored) => {
                Some(Read::Copied(Box::new((Storage::of(&stored.read()?), None))))
            }
            Operand::Stored(stored) | Operand::Overlapping(stored) => {
                let gapless = Layout::contiguous(&stored.layout.shape);
                Some(Read::Copied(Box::new((stored.packed(threads)?, Some(gapless)))))
            }
        })
    }

    #[inline]
    fn view<'b>(&'b self, stored: &'b Stored<'_>) -> View<'b> {
        match self {
            Read::InPlace(bytes) => view(stored.dtype, stored.layout, bytes),
            Read::Copied(copied) => {
                view(stored.dtype, copied.1.as_ref().unwrap_or(stored.layout), copied.0.bytes())
            }
        }
    }
}

/// A list whose length is known when it is made, without an allocation for up to three items. That takes fewer instructions
/// than a list that grows, of which every call of a kernel needs several.
pub enum Few<T> {
    #[doc(hidden)]
    InPlace([T; 3], usize),
    #[doc(hidden)]
    Many(Vec<T>),
}

impl<T> Few<T> {
    /// `n` items.
    #[inline]
    pub fn new(n: usize, each: impl Fn() -> T) -> Few<T> {
        match n {
            0..=3 => Few::InPlace([each(), each(), each()], n),
            _ => Few::Many((0..n).map(|_| each()).collect()),
        }
    }

    /// Its items.
    #[inline]
    pub fn items(&mut self) -> &mut [T] {
        match self {
            Few::InPlace(items, n) => &mut items[..*n],
            Few::Many(items) => items,
        }
    }
}

/// Calls a kernel. Results are contiguous, and all leases on them have ended.
#[inline]
pub fn call(
    cx: &KernelCx<'_>,
    (kernel, op): (&Kernel, &dyn OpDef),
    args: &[Operand<'_>],
    results: &[Stored<'_>],
) -> Result<(), RunError> {
    // Operands come first: what is claimed for writing cannot be copied.
    let mut reads = Few::new(args.len(), || None);
    for (read, arg) in reads.items().iter_mut().zip(args) {
        *read = Read::of(arg, kernel, cx.threads)?;
    }
    let reads = reads.items();
    let mut views = Few::new(args.len(), || Arg::Result);
    let views = views.items();
    for (view, (read, arg)) in views.iter_mut().zip(reads.iter().zip(args)) {
        if let (Some(read), Operand::Stored(stored) | Operand::Overlapping(stored)) = (read, arg) {
            *view = Arg::View(read.view(stored));
        }
    }
    // Nearly always there is one result.
    if let [result] = results {
        let mut bytes = result.write()?;
        return Ok((kernel.run)(cx, op, views, &mut [result.view_mut(&mut bytes)])?);
    }
    let writes = results.iter().map(Stored::write);
    let mut writes = writes.collect::<Result<Vec<BytesMut<'_>>, RunError>>()?;
    let outs = results.iter().zip(&mut writes).map(|(result, bytes)| result.view_mut(bytes));
    Ok((kernel.run)(cx, op, views, &mut outs.collect::<Vec<_>>())?)
}

/// Runs an op that has no kernel through its reference evaluation.
pub fn evaluate(
    sizes: &EvalCx<'_>,
    op: &dyn OpDef,
    args: &[Stored<'_>],
    results: &[Stored<'_>],
) -> Result<(), RunError> {
    let given = args.iter().map(Stored::literal).collect::<Result<Vec<_>, _>>()?;
    let wanted: Vec<_> = results.iter().map(|result| (result.dtype, &result.layout.shape[..])).collect();
    let made = eval_of(op, sizes, &given.iter().collect::<Vec<_>>(), &wanted)?;
    for (result, made) in results.iter().zip(made) {
        result.write()?.copy_from_slice(&made.to_bytes());
    }
    Ok(())
}
