//! Reductions that MPI does not have: those of 16-bit floats, and extremes of floats, where a NaN must win. Bytes are
//! among them because MPICH 4.0 compares them as signed, and the sums of Open MPI 4.1 saturate where they should wrap.
//!
//! Each is one function of the pair of element type and reduction, made known to MPI when it is first used.

use std::cell::Cell;
use std::ffi::{c_int, c_void};

use consort_types::{Dtype, Reduce};

use crate::kernels::{Part, reduce};
use crate::mpi::abi::Handle;
use crate::mpi::calls::Mpi;
use crate::mpi::error::MpiError;

/// What MPI calls: `inout[i] = in[i] op inout[i]`.
// SAFETY: only MPI calls it, with ranges of as many elements as it says.
pub(super) type Fold = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut Handle);

/// The reductions that may need a function, in the order of [`Reduce::ALL`].
const REDUCTIONS: usize = 5;

/// # Safety
/// MPI passes two ranges of `*count` elements that do not overlap.
unsafe extern "C" fn fold<const DTYPE: usize, const REDUCE: usize>(
    from: *mut c_void,
    into: *mut c_void,
    count: *mut c_int,
    _: *mut Handle,
) {
    let (dtype, reduction) = (Dtype::ALL[DTYPE], Reduce::ALL[REDUCE]);
    // SAFETY: MPI passes a valid count.
    let count = usize::try_from(unsafe { *count }).unwrap_or(0);
    if count == 0 {
        return;
    }
    let len = count * dtype.size();
    // SAFETY: as above; the elements are only read while this runs.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
    // SAFETY: as above; nobody else uses these while this runs.
    let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
    reduce(into, &[Part::Peer(from), Part::Own], dtype, reduction);
}

/// The function for a pair, if MPI's own operation does not do.
fn function(dtype: Dtype, reduce: Reduce) -> Option<Fold> {
    macro_rules! of {
        ($($dtype:ident: $($reduce:ident)*;)*) => {
            match (dtype, reduce) {
                $($((Dtype::$dtype, Reduce::$reduce) =>
                    Some(fold::<{ Dtype::$dtype as usize }, { code(Reduce::$reduce) }> as Fold),)*)*
                _ => None,
            }
        };
    }
    of! {
        F16: Sum Product Min Max;
        Bf16: Sum Product Min Max;
        F32: Min Max;
        F64: Min Max;
        U8: Sum Product Min Max;
    }
}

/// The index in [`Reduce::ALL`].
const fn code(reduce: Reduce) -> usize {
    match reduce {
        Reduce::Sum => 0,
        Reduce::Product => 2,
        Reduce::Min => 3,
        _ => 4,
    }
}

/// The operations that were made.
#[derive(Default)]
pub(super) struct UserOps([[Cell<Option<Handle>>; REDUCTIONS]; Dtype::ALL.len()]);

impl Mpi {
    /// MPI's operation for a reduction, and its element type. Factors and divisors are applied outside.
    pub(super) fn operation(&self, dtype: Dtype, reduce: Reduce) -> Result<(Handle, Handle), MpiError> {
        let reduce = if matches!(reduce, Reduce::Avg | Reduce::PremulSum(_)) { Reduce::Sum } else { reduce };
        let handles = &self.handles;
        let element = match dtype {
            Dtype::F32 => handles.float,
            Dtype::F64 => handles.double,
            Dtype::F16 | Dtype::Bf16 => handles.uint16,
            Dtype::I32 => handles.int32,
            Dtype::I64 => handles.int64,
            Dtype::U8 | Dtype::Bool => handles.uint8,
        };
        if let Some(function) = function(dtype, reduce) {
            return Ok((self.made(&self.user_ops.0[dtype as usize][code(reduce)], function)?, element));
        }
        let operation = match reduce {
            // The sum of truth values is true if any is.
            Reduce::Sum if dtype == Dtype::Bool => handles.bor,
            Reduce::Product => handles.prod,
            Reduce::Min => handles.min,
            Reduce::Max => handles.max,
            Reduce::And => handles.band,
            Reduce::Or => handles.bor,
            Reduce::Xor => handles.bxor,
            _ => handles.sum,
        };
        Ok((operation, element))
    }

    fn made(&self, known: &Cell<Option<Handle>>, function: Fold) -> Result<Handle, MpiError> {
        if let Some(handle) = known.get() {
            return Ok(handle);
        }
        let mut handle = 0;
        // SAFETY: the function is there as long as the process is; it commutes.
        let code = unsafe { (self.functions.op_create)(function, 1, &mut handle) };
        self.check("MPI_Op_create", code)?;
        known.set(Some(handle));
        Ok(handle)
    }
}
