//! Whether the arguments of an operation fit together, before anything is started.

use consort_types::{Dtype, Reduce};

use crate::CommError;
use crate::buffer::Buffer;

/// Total bytes of `rows` rows of these sizes, or `None` on overflow.
pub(crate) fn total(sizes: &[usize], outer: usize) -> Option<usize> {
    sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size))?.checked_mul(outer)
}

pub(crate) fn check(ok: bool, message: impl FnOnce() -> String) -> Result<(), CommError> {
    if ok { Ok(()) } else { Err(CommError::Argument(message())) }
}

pub(crate) fn check_reduction(buffer: &Buffer, dtype: Dtype, reduce: Reduce) -> Result<(), CommError> {
    check(reduce.takes(dtype), || format!("`{}` is not defined for {}", reduce.name(), dtype.name()))?;
    check(is_multiple(buffer.at(), dtype.size()), || {
        format!("expected a part that begins on a multiple of {} bytes", dtype.size())
    })?;
    check_rows(buffer, dtype.size(), 1, "the size of an element")
}

/// Checks that the bytes are a whole number of `unit`s in each of `outer` rows.
pub(crate) fn check_rows(buffer: &Buffer, unit: usize, outer: usize, what: &str) -> Result<(), CommError> {
    let whole = unit.checked_mul(outer);
    check(whole.is_some_and(|whole| is_multiple(buffer.len(), whole)), || {
        format!("expected {} bytes to be a multiple of {unit}, {what}, in each of {outer} rows", buffer.len())
    })
}

/// A division takes as long as ten other instructions, and most units are powers of two.
fn is_multiple(bytes: usize, unit: usize) -> bool {
    if unit.is_power_of_two() { bytes & (unit - 1) == 0 } else { unit > 0 && bytes.is_multiple_of(unit) }
}

pub(crate) fn check_length(buffer: &Buffer, what: &str, bytes: Option<usize>) -> Result<(), CommError> {
    check(bytes == Some(buffer.len()), || {
        let expected = bytes.map_or("fewer".into(), |bytes| bytes.to_string());
        format!("expected {expected} bytes for the {what}, got {}", buffer.len())
    })
}

pub(crate) fn check_result(result: &Buffer, bytes: Option<usize>) -> Result<(), CommError> {
    check_length(result, "result", bytes)
}
