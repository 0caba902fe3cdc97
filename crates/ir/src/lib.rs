//! The program: types, ops, text, verifier and oracle.
//!
//! A [`program::Program`] is a mesh of ranks and functions of nodes; communication is an ordinary value of
//! it. It is read from text or built ([`builder::Builder`]), checked ([`verify::verify`]), and run on all
//! ranks at once by the [`oracle`], slowly and plainly. Everything fast is compared with the oracle.
//!
//! ```
//! use consort_ir::{oracle, ops::OpTable, tensor::Tensor, text, verify::verify};
//! use consort_types::Dtype;
//!
//! let source = "mesh (tp: 2)
//!
//! func @f(v0: f32[2]{tp}) -> f32[2] {
//!     v1 = all_reduce_start[reduce=sum, over=tp] v0 : pending<f32[2]>
//!     v2 = wait v1 : f32[2]
//!     return v2
//! }";
//! let program = text::parse(source, &OpTable::built_in())?.program;
//! assert!(verify(&program).is_empty());
//! let input = |x| vec![Tensor::floats(Dtype::F32, vec![2], vec![x, 2.0 * x])];
//! let results = oracle::run(&program, "f", &[input(1.0), input(10.0)])?;
//! assert_eq!(results[0][0].text(), "[11, 22]");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Nothing here reads a file, a clock or the environment, and nothing is `unsafe`.
#![forbid(unsafe_code)]

pub mod builder;
pub mod cost;
pub mod diagnostic;
pub mod entity;
pub mod generate;
pub mod index;
pub mod infer;
pub mod limits;
pub mod mesh;
pub mod ops;
pub mod oracle;
pub mod plan;
pub mod program;
pub mod random;
pub mod storage;
pub mod tensor;
pub mod text;
pub mod types;
pub mod verify;

#[doc(hidden)] // For `op!`, in crates that declare ops of their own.
pub use consort_types::GroupName;
