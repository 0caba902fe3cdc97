//! The program: types, ops, text and verifier.
//!
//! A [`program::Program`] is a mesh of ranks and functions of nodes; communication is an ordinary value of
//! it. It is read from text or built ([`builder::Builder`]) and checked ([`verify::verify`]). What an op gives is part of
//! its definition ([`ops::OpDef::eval`]), on tensors that are slow and plain ([`literal::Literal`]).
//!
//! ```
//! use consort_ir::{ops::OpTable, text, verify::verify};
//!
//! let source = "mesh (tp: 2)
//!
//! func @f(v0: f32[2]{tp}) -> f32[2] {
//!     v1 = all_reduce_start[reduce=sum, over=tp] v0    : pending<f32[2]>
//!     v2 = wait v1                                     : f32[2]
//!     return v2
//! }
//! ";
//! let program = text::parse(source, &OpTable::built_in())?.program;
//! assert!(verify(&program).is_empty());
//! assert_eq!(text::print(&program), source);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Nothing here reads a file, a clock or the environment, and nothing is `unsafe`.
#![forbid(unsafe_code)]

pub mod builder;
pub mod cost;
pub mod diagnostic;
pub mod entity;
pub mod index;
pub mod infer;
pub mod joint;
pub mod limits;
pub mod literal;
pub mod mesh;
pub mod ops;
pub mod plan;
pub mod program;
pub mod random;
pub mod storage;
pub mod symbols;
pub mod text;
pub mod tolerance;
pub mod types;
pub mod verify;

#[doc(hidden)] // For `op!`, in crates that declare ops of their own.
pub use consort_types::GroupName;
