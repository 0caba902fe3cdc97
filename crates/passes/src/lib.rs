//! Passes from program to plan: pure functions of the program, with no I/O, clock or threads.
//!
//! [`compile()`] names the stages in order and verifies after each; [`Decided::bind`] gives a rank its plan. [`simplify`]
//! and [`plan()`] are those stages alone, for tools that look at one. [`gradient`] makes a program of a program that also
//! computes derivatives. Bucketing, fusion and scheduling are not built yet.
#![forbid(unsafe_code)]

mod blame;
mod compile;
mod fold;
mod grad;
mod pipeline;
mod plan;
mod remove;
mod scope;
mod share;

pub use compile::{CompileError, Decided, PassCx, Stage, compile};
pub use grad::{Gradient, Summed, Wanted, float_arguments, gradient};
pub use pipeline::{PASSES, Pass, PassError, Ran, pass, simplify};
pub use plan::{Binding, Copy, PlanError, PlanReport, Why, alive, plan, report};
