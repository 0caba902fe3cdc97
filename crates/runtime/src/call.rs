//! Calls a kernel, or the evaluation of an op, on tensors in buffers: the one way for plans and eager code.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Instant;

use consort_comm::{Buffer, Bytes, BytesMut};
use consort_ir::literal::Literal;
use consort_ir::ops::{EvalCx, OpDef, eval_of};
use consort_types::Dtype;
use consort_types::layout::Layout;
use smallvec::SmallVec;

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
    pub fn read(&self) -> Result<Bytes<'a>, RunError> {
        Ok(self.buffer.bytes_of(self.bytes.clone())?)
    }

    /// Its bytes for writing. Never waits: while peers may read them, that is an error.
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

/// Calls a kernel. Results are contiguous, and all leases on them have ended.
#[inline]
pub fn call(
    cx: &KernelCx<'_>,
    (kernel, op): (&Kernel, &dyn OpDef),
    args: &[Operand<'_>],
    results: &[Stored<'_>],
) -> Result<(), RunError> {
    // Copies come first: a result that is claimed for writing cannot be read.
    let mut copies: SmallVec<[(Storage, Cow<'_, Layout>); 1]> = SmallVec::new();
    for arg in args {
        match arg {
            Operand::Stored(stored) | Operand::Overlapping(stored)
                if !kernel.strided && !stored.layout.is_contiguous() =>
            {
                let gapless = Layout::contiguous(&stored.layout.shape);
                copies.push((stored.packed(cx.threads)?, Cow::Owned(gapless)));
            }
            Operand::Overlapping(stored) => {
                copies.push((Storage::of(&stored.read()?), Cow::Borrowed(stored.layout)));
            }
            Operand::Stored(_) | Operand::Result => {}
        }
    }
    let is_read = |stored: &Stored<'_>| kernel.strided || stored.layout.is_contiguous();
    let mut writes: SmallVec<[_; 2]> = SmallVec::new();
    for result in results {
        writes.push(result.write()?);
    }
    let mut reads: SmallVec<[_; 4]> = SmallVec::new();
    for arg in args {
        reads.push(match arg {
            Operand::Stored(stored) if is_read(stored) => Some(stored.read()?),
            _ => None,
        });
    }
    let mut copies = copies.iter();
    let mut views: SmallVec<[Arg<'_>; 4]> = SmallVec::new();
    for (arg, bytes) in args.iter().zip(&reads) {
        views.push(match (arg, bytes) {
            (Operand::Stored(stored), Some(bytes)) => Arg::View(view(stored.dtype, stored.layout, bytes)),
            (Operand::Stored(stored) | Operand::Overlapping(stored), _) => match copies.next() {
                Some((copied, layout)) => Arg::View(view(stored.dtype, layout, copied.bytes())),
                None => return Err(RunError::new("an operand was not copied")),
            },
            (Operand::Result, _) => Arg::Result,
        });
    }
    let mut outs: SmallVec<[ViewMut<'_>; 2]> = SmallVec::new();
    for (result, bytes) in results.iter().zip(&mut writes) {
        outs.push(ViewMut { dtype: result.dtype, shape: &result.layout.shape, bytes });
    }
    Ok((kernel.run)(cx, op, &views, &mut outs)?)
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
