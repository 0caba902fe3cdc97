//! Per-thread scratch memory for kernel blocks. It is kept from call to call, so that a kernel in a loop allocates
//! nothing.

use std::cell::Cell;

use bytemuck::Pod;

/// A cache line, and the widest vector.
const ALIGN: usize = 64;

thread_local! {
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Calls `work` with `len` elements of unspecified contents. A nested call gets different memory.
pub(crate) fn with_scratch<T: Pod, R>(len: usize, work: impl FnOnce(&mut [T]) -> R) -> R {
    let bytes = len * size_of::<T>();
    let mut memory = SCRATCH.take();
    if memory.len() < bytes + ALIGN {
        memory.resize(bytes + ALIGN, 0);
    }
    let start = memory.as_ptr().align_offset(ALIGN).min(ALIGN);
    let result = work(bytemuck::cast_slice_mut(&mut memory[start..start + bytes]));
    SCRATCH.set(memory);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_within_calls_get_other_memory() {
        with_scratch(100, |outer: &mut [f32]| {
            outer.fill(1.0);
            with_scratch(50, |inner: &mut [f64]| inner.fill(2.0));
            assert!(outer.len() == 100 && outer.iter().all(|x| *x == 1.0));
        });
        with_scratch(0, |none: &mut [f64]| assert!(none.is_empty()));
    }
}
