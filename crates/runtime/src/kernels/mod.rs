//! The CPU kernels: one per op, found by the op's name.
//!
//! A kernel reads its operands in place, whatever their strides, and writes contiguous results in row-major order. The
//! op's rule has accepted its inputs, so it does not check types and shapes again. An in-place kernel is also called
//! with operands that alias its first result.

mod argmax;
mod attention;
mod attention_backward;
mod blocks;
mod cast;
mod convolution;
pub mod copy;
mod create;
mod cumsum;
mod element;
mod elementwise;
mod formats;
mod gaussian;
#[allow(unsafe_code, reason = "the crate that multiplies matrices takes pointers")]
mod gemm;
#[allow(unsafe_code, reason = "calls of functions compiled for an instruction set")]
pub mod isa;
mod lines;
mod logsumexp;
mod lookup;
mod math;
mod matmul;
mod movement;
mod normalize;
mod numbers;
pub(crate) mod operand;
mod order;
mod placement;
mod random;
mod reduce;
mod scratch;
mod skinny;
mod softmax;
mod source;

pub use gemm::gemm_alone;

use std::fmt;
use std::sync::OnceLock;

use bytemuck::Pod;
use consort_ir::ops::{EvalCx, OpDef};
use consort_types::layout::{is_row_major, span};
use consort_types::{Dtype, Failure, Headline};

use crate::threads::Threads;

/// The kernel of an op.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The op's name.
    pub op: &'static str,
    /// The file of `kernels` that contains it, for `consort ops`.
    pub family: &'static str,
    /// Whether an operand of the first result's type and shape may alias that result.
    pub in_place: bool,
    /// Whether it reads operands by their strides. For one that does not, operands with gaps, or in another order, are packed.
    pub strided: bool,
    /// Computes.
    pub run: Run,
}

/// The function of a kernel: the op with its attributes, operands, results.
pub type Run =
    for<'a> fn(&KernelCx<'a>, &dyn OpDef, &[Arg<'a>], &mut [ViewMut<'a>]) -> Result<(), KernelError>;

/// Context of a kernel call.
pub struct KernelCx<'a> {
    /// The values of size expressions in attributes.
    pub sizes: EvalCx<'a>,
    /// The threads that a rank may use.
    pub threads: &'a Threads,
}

/// Why a kernel did not compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelError(pub Box<Failure>);

impl KernelError {
    /// What was expected and got, or what happened.
    pub fn new(headline: impl Into<Headline>) -> KernelError {
        KernelError(Failure::new(headline))
    }
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An operand.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// It does not alias the first result.
    View(View<'a>),
    /// It aliases the first result, element for element.
    Result,
}

/// A tensor that is read in place.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The element type; truth values are bytes of 0 and 1.
    pub dtype: Dtype,
    /// The sizes, outermost first.
    pub shape: &'a [usize],
    /// The stride of each dimension, in elements; 0 broadcasts.
    pub strides: &'a [usize],
    /// The storage from the first element to the last.
    pub bytes: &'a [u8],
}

impl<'a> View<'a> {
    /// The elements from the first to the last: those of the tensor in row-major order if it is contiguous, as all operands
    /// of a kernel are that does not ask for strides; else with whatever lies between them. Elements that are wider than
    /// the tensor's are an error.
    pub fn elements<T: Pod>(&self) -> Result<&'a [T], KernelError> {
        let (n, size) = (span(self.shape, self.strides), size_of::<T>());
        let bytes = n.checked_mul(size).and_then(|n| self.bytes.get(..n)).ok_or_else(|| {
            KernelError::new((
                format!("{n} elements of {size} bytes"),
                format!("a tensor of {} with {} bytes of storage", self.dtype, self.bytes.len()),
            ))
        })?;
        bytemuck::try_cast_slice(bytes).map_err(|error| KernelError::new(format!("storage: {error}")))
    }

    /// How many elements it has.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements are contiguous in row-major order.
    pub fn is_contiguous(&self) -> bool {
        is_row_major(self.shape, self.strides)
    }
}

/// A result: contiguous, in row-major order. Unless it aliases an operand, its initial contents are unspecified.
#[derive(Debug)]
pub struct ViewMut<'a> {
    /// The element type.
    pub dtype: Dtype,
    /// The sizes, outermost first.
    pub shape: &'a [usize],
    /// The elements.
    pub bytes: &'a mut [u8],
}

impl ViewMut<'_> {
    /// The elements.
    pub fn elements<T: Pod>(&mut self) -> Result<&mut [T], KernelError> {
        bytemuck::try_cast_slice_mut(self.bytes)
            .map_err(|error| KernelError::new(format!("storage: {error}")))
    }

    /// How many elements it has.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// All kernels, by the names of their ops.
static FAMILIES: &[&[Kernel]] = &[
    elementwise::KERNELS,
    reduce::KERNELS,
    argmax::KERNELS,
    softmax::KERNELS,
    logsumexp::KERNELS,
    normalize::KERNELS,
    cumsum::KERNELS,
    movement::KERNELS,
    lookup::KERNELS,
    create::KERNELS,
    order::KERNELS,
    placement::KERNELS,
    random::KERNELS,
    matmul::KERNELS,
    attention::KERNELS,
    attention_backward::KERNELS,
    convolution::KERNELS,
];

/// The kernel of an op.
pub fn find(op: &str) -> Option<&'static Kernel> {
    static BY_NAME: OnceLock<Vec<&'static Kernel>> = OnceLock::new();
    let by_name = BY_NAME.get_or_init(|| {
        let mut all: Vec<&Kernel> = FAMILIES.iter().flat_map(|family| family.iter()).collect();
        all.sort_by_key(|kernel| kernel.op);
        all
    });
    by_name.binary_search_by_key(&op, |kernel| kernel.op).ok().map(|at| by_name[at])
}

/// The kernel of an op, as text: its family, with `in place` if it can work so; `-` if the op has no kernel.
pub fn label(op: &str) -> String {
    match find(op) {
        Some(kernel) if kernel.in_place => format!("{}, in place", kernel.family),
        Some(kernel) => kernel.family.to_string(),
        None => "-".to_string(),
    }
}
