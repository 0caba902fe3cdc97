//! What computes on a CPU: one kernel for each op, found by the op's name.
//!
//! A kernel reads its operands where they lie, whatever their strides, and writes results without gaps in row-major
//! order. It is given what the op's rule has accepted, so it checks no types and no shapes again. One that can compute
//! in place is also called with operands that lie where its first result goes.

mod argmax;
mod attention;
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
use consort_types::Dtype;
use consort_types::layout::{is_row_major, span};

use crate::threads::Threads;

/// The kernel of an op.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The op's name.
    pub op: &'static str,
    /// Which file of `kernels` it comes from, for `consort ops`.
    pub family: &'static str,
    /// Whether an operand of the first result's type and shape may lie where that result goes.
    pub in_place: bool,
    /// Computes.
    pub run: Run,
}

/// What a kernel is: the op with its attributes, operands, results.
pub type Run =
    for<'a> fn(&KernelCx<'a>, &dyn OpDef, &[Arg<'a>], &mut [ViewMut<'a>]) -> Result<(), KernelError>;

/// In which a kernel runs.
pub struct KernelCx<'a> {
    /// The values of size expressions in attributes.
    pub sizes: EvalCx<'a>,
    /// The threads that a rank may use.
    pub threads: &'a Threads,
}

/// Why a kernel did not compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelError(pub String);

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An operand.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// It lies somewhere else.
    View(View<'a>),
    /// It lies where the first result goes, element for element.
    Result,
}

/// A tensor that is read where it lies.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The element type; truth values are bytes of 0 and 1.
    pub dtype: Dtype,
    /// The sizes, outermost first.
    pub shape: &'a [usize],
    /// How far apart neighbours along each dimension lie, in elements; 0 repeats one.
    pub strides: &'a [usize],
    /// The storage from the first element to the last.
    pub bytes: &'a [u8],
}

impl<'a> View<'a> {
    /// The elements from the first to the last, with whatever lies between them.
    pub fn elements<T: Pod>(&self) -> Result<&'a [T], KernelError> {
        let bytes = &self.bytes[..span(self.shape, self.strides) * size_of::<T>()];
        bytemuck::try_cast_slice(bytes).map_err(|error| KernelError(format!("storage: {error}")))
    }

    /// How many elements it has.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements lie without gaps, in row-major order.
    pub fn is_contiguous(&self) -> bool {
        is_row_major(self.shape, self.strides)
    }
}

/// A result: without gaps, in row-major order. Where it is not also an operand, its contents are of no meaning before.
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
        bytemuck::try_cast_slice_mut(self.bytes).map_err(|error| KernelError(format!("storage: {error}")))
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
    random::KERNELS,
    matmul::KERNELS,
    attention::KERNELS,
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

/// What computes an op, in words: the family of its kernel, `view` where nothing need move, `-` where nothing does.
pub fn label(op: &str) -> String {
    match find(op) {
        Some(kernel) if kernel.in_place => format!("{}, in place", kernel.family),
        Some(kernel) => kernel.family.to_string(),
        None => "-".to_string(),
    }
}
