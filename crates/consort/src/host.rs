//! Elements in memory of no rank, which can be sent to another thread.

use std::panic::Location;

use consort_types::Dtype;
use consort_types::layout::numel;

use crate::element::Element;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Elements and their shape, in memory of no rank, so that another thread may own it: a thread that loads data makes host
/// tensors, and a rank makes tensors of them.
///
/// A [`Tensor`] cannot be sent: its memory is a part of the rank's heap, which the other ranks map. [`HostTensor::from_vec`]
/// takes its list without a copy; [`Tensor::from_host`] copies the elements once, into the heap, and
/// [`Tensor::to_host`] copies them once, out of it.
///
/// ```
/// use std::sync::mpsc::sync_channel;
///
/// use consort::{HostTensor, Tensor};
///
/// # fn main() -> consort::Result<()> {
/// let (sends, receives) = sync_channel(2); // At most two batches ahead.
/// let loader = std::thread::spawn(move || -> consort::Result<()> {
///     for batch in 0..3 {
///         let batch = HostTensor::from_vec(vec![batch as f32; 4], &[2, 2])?;
///         if sends.send(batch).is_err() {
///             break; // Nobody wants more.
///         }
///     }
///     Ok(())
/// });
/// let mut sum = Tensor::scalar(0.0f32)?;
/// for batch in receives {
///     sum.add_(&Tensor::from_host(&batch)?.sum_all()?)?;
/// }
/// assert_eq!(sum.item::<f32>()?, 12.0);
/// loader.join().expect("the loader does not panic")
/// # }
/// ```
pub struct HostTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    elements: Box<dyn WriteTo>,
}

/// Elements that can be written in the byte layout of tensors.
trait WriteTo: Send + Sync {
    fn write_to(&self, out: &mut [u8]);
}

impl<T: Element> WriteTo for Vec<T> {
    fn write_to(&self, out: &mut [u8]) {
        T::write(self, out);
    }
}

/// Elements that are in that layout already.
struct Written(Vec<u8>);

impl WriteTo for Written {
    fn write_to(&self, out: &mut [u8]) {
        out.copy_from_slice(&self.0);
    }
}

impl HostTensor {
    /// Takes elements in row-major order, without a copy.
    ///
    /// [`HostTensor`] has an example.
    #[track_caller]
    pub fn from_vec<T: Element>(elements: Vec<T>, shape: &[usize]) -> Result<HostTensor> {
        if numel(shape) != Some(elements.len()) {
            let message = (format!("as many elements as {shape:?} has"), elements.len().to_string());
            return Err(Error::new("from_vec", message, Location::caller()));
        }
        Ok(HostTensor { dtype: T::DTYPE, shape: shape.to_vec(), elements: Box::new(elements) })
    }

    /// The element type.
    ///
    /// [`Tensor::to_host`] has an example.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The sizes, outermost first.
    ///
    /// [`Tensor::to_host`] has an example.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }
}

impl Tensor {
    /// A tensor with a copy of these elements.
    ///
    /// [`HostTensor`] has an example.
    #[track_caller]
    pub fn from_host(host: &HostTensor) -> Result<Tensor> {
        Tensor::build("from_host", host.dtype, &host.shape, Location::caller(), |bytes| {
            host.elements.write_to(bytes);
            Ok(())
        })
    }

    /// A copy of the elements that can be sent to another thread. Waits for them.
    ///
    /// ```
    /// use consort::{Dtype, Tensor};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let host = Tensor::from_iter([1i64, 2])?.to_host()?;
    /// assert_eq!((host.dtype(), host.shape()), (Dtype::I64, &[2][..]));
    /// let sum = std::thread::spawn(move || Tensor::from_host(&host)?.sum_all()?.item::<i64>());
    /// assert_eq!(sum.join().expect("it does not panic")?, 3);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn to_host(&self) -> Result<HostTensor> {
        let written = self.with_bytes("to_host", Location::caller(), |bytes| Written(bytes.to_vec()))?;
        let shape = self.hint_shape().to_vec();
        Ok(HostTensor { dtype: self.dtype(), shape, elements: Box::new(written) })
    }
}
