//! Rust types that elements of tensors can be.

use consort_ir::ops::Elements;
use consort_types::Dtype;
use half::{bf16, f16};

/// A Rust type that elements of tensors can be.
///
/// ```
/// use consort::{Dtype, Element};
///
/// assert_eq!(<f32 as Element>::DTYPE, Dtype::F32);
/// assert_eq!(<bool as Element>::DTYPE, Dtype::Bool);
/// ```
pub trait Element: Copy + Send + Sync + 'static {
    /// The element type.
    const DTYPE: Dtype;
    /// It as the value of a constant.
    #[doc(hidden)]
    fn constant(self) -> Elements;
    /// Writes elements in the byte layout of tensors.
    #[doc(hidden)]
    fn write(elements: &[Self], out: &mut [u8]);
    /// Reads elements in the byte layout of tensors.
    #[doc(hidden)]
    fn read(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! element {
    ($($ty:ty: $dtype:ident $kind:ident),*) => {$(
        impl Element for $ty {
            const DTYPE: Dtype = Dtype::$dtype;
            fn constant(self) -> Elements {
                Elements::$kind(self.into())
            }
            fn write(elements: &[$ty], out: &mut [u8]) {
                out.copy_from_slice(bytemuck::cast_slice(elements));
            }
            fn read(bytes: &[u8]) -> Vec<$ty> {
                bytes.chunks_exact(size_of::<$ty>()).map(bytemuck::pod_read_unaligned).collect()
            }
        }
    )*};
}

element!(
    f32: F32 Float, f64: F64 Float, f16: F16 Float, bf16: Bf16 Float, i32: I32 Int, i64: I64 Int, u8: U8 Int
);

impl Element for bool {
    const DTYPE: Dtype = Dtype::Bool;
    fn constant(self) -> Elements {
        Elements::Int(self.into())
    }
    fn write(elements: &[bool], out: &mut [u8]) {
        out.iter_mut().zip(elements).for_each(|(byte, element)| *byte = u8::from(*element));
    }
    fn read(bytes: &[u8]) -> Vec<bool> {
        bytes.iter().map(|byte| *byte != 0).collect()
    }
}
