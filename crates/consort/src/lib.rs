//! Tensors and collectives of one program on many ranks.
//!
//! A [`Tensor`] is a value; a [`Mesh`] is all ranks, along named axes; a [`Group`] is ranks that communicate. Every
//! collective takes tensors and returns tensors: in place if an operand has no other owner, and pending until the
//! elements are needed.
//!
//! ```
//! use consort::{Reduce, Tensor};
//!
//! // Two ranks, here as threads; `consort run -n 2 -- PROGRAM` and `consort::init` make them processes.
//! let losses = consort::spawn(2, |mesh| {
//!     let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//!     let y = mesh.all_reduce(x.matmul(&x)?, Reduce::Sum)?; // On its way.
//!     y.sum_all()?.item::<f32>() // Waited for here.
//! });
//! assert!(losses.into_iter().all(|loss| loss.is_ok_and(|loss| loss == 108.0)));
//! ```
#![forbid(unsafe_code)]

// Lets `#[derive(Flatten)]` in this crate refer to it as `consort`, as users do.
extern crate self as consort;

mod apply;
mod chain;
mod coalesced;
mod collectives;
mod compile;
mod control;
mod create;
mod custom_vjp;
mod element;
mod elementwise;
mod error;
mod files;
mod flatten;
mod flight;
mod grad;
mod host;
mod in_place;
mod index;
mod init;
mod lists;
mod memo;
mod mesh;
#[cfg(feature = "ndarray")]
mod ndarrays;
pub mod nn;
mod nn_ops;
pub mod npy;
mod operand;
mod p2p;
mod pending;
mod place;
mod placement;
mod print;
mod recompute;
mod reduce;
mod shape;
mod start;
mod storage;
mod tensor;
mod trace;
mod world;

pub use apply::apply;
pub use chain::Chain;
pub use compile::{
    Compiled, CompiledMut, Cost, ExplainedGraph, Explanation, Stats, Steady, compile, compile_mut,
};
pub use consort_comm::CommError;
pub use consort_derive::Flatten;
pub use consort_ir::{ops, tolerance};
pub use consort_types::{
    Collective, Dtype, Failure, GroupName, Headline, Kind, Missing, Reduce, Route, Site, layout,
};
pub use control::{Iterations, cond, scan, while_loop};
pub use custom_vjp::custom_vjp;
pub use element::Element;
pub use error::{Error, Result};
pub use files::Safetensors;
pub use flatten::{Flatten, Map, Static, Visit};
pub use grad::{Backward, Budget, ExplainedGradient, grad, value_and_grad, value_and_grad_first, vjp};
pub use host::HostTensor;
pub use index::{Index, Shape};
pub use init::{Init, init, spawn};
pub use mesh::{Group, Mesh};
pub use operand::Operand;
pub use p2p::{Batched, Other};
pub use pending::{Pending, Started};
pub use place::{Place, SliceMut};
pub use placement::EqualOver;
pub use recompute::recompute;
pub use tensor::Tensor;
pub use trace::{Break, is_tracing, uncompiled};
pub use world::Unwaited;

/// Types of user-defined kernels; [`Mesh::add_kernel`] takes one.
pub mod kernels {
    pub use consort_runtime::kernels::{Arg, Kernel, KernelCx, KernelError, Run, View, ViewMut};
}

/// What ops of your own are made of, besides [`ops`] and [`kernels`]; [`apply`] runs them. `docs/own-ops.md` is the guide.
pub mod custom {
    pub use consort_ir::literal::{Data, Literal};
    pub use consort_ir::op;
    pub use consort_ir::types::{TensorType, Type};
}

/// The examples of the README and of the guides, as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../../../docs/getting-started.md")]
#[doc = include_str!("../../../docs/compile.md")]
#[doc = include_str!("../../../docs/tensor-parallel.md")]
#[doc = include_str!("../../../docs/messages.md")]
#[doc = include_str!("../../../docs/pipeline.md")]
#[doc = include_str!("../../../docs/placements.md")]
#[doc = include_str!("../../../docs/training.md")]
#[doc = include_str!("../../../docs/own-ops.md")]
#[doc = include_str!("../../../docs/from-pytorch.md")]
struct Examples;
