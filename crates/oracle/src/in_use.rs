//! The memory that the values of all ranks take in the oracle.

use std::cell::Cell;

use consort_ir::limits::{Excess, Resource};
use consort_ir::literal::Literal;
use consort_ir::ops::{EvalCx, EvalError};
use consort_ir::types::Type;

/// Elements of a literal are held in 64 bits, whatever their type.
const ELEMENT: u64 = 8;

/// Bytes in use, and their limit. A value with two names counts twice.
pub(super) struct InUse {
    bytes: Cell<u64>,
    most: u64,
}

impl InUse {
    pub(super) fn new(most: u64) -> InUse {
        InUse { bytes: Cell::new(0), most }
    }

    /// Checks that `more` bytes may be held.
    pub(super) fn check(&self, more: u64) -> Result<(), Excess> {
        Excess::check(Resource::Bytes, self.most, self.bytes.get().saturating_add(more))
    }

    pub(super) fn add(&self, bytes: u64) {
        self.bytes.set(self.bytes.get().saturating_add(bytes));
    }

    pub(super) fn drop(&self, bytes: u64) {
        self.bytes.set(self.bytes.get().saturating_sub(bytes));
    }
}

/// Bytes of a tensor.
pub(super) fn bytes_of(tensor: &Literal) -> u64 {
    tensor.numel() as u64 * ELEMENT
}

/// Bytes of the tensors of a type, those inside a pending included; an error if one of them is too large.
pub(super) fn bytes_of_type(cx: &EvalCx<'_>, ty: &Type) -> Result<u64, EvalError> {
    ty.tensors().iter().try_fold(0u64, |all, tensor| {
        let shape = cx.shape(&tensor.shape)?;
        Ok(all.saturating_add(shape.iter().product::<usize>() as u64 * ELEMENT))
    })
}
