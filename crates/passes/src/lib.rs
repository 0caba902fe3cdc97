//! Passes from program to plan: pure functions of the program, with no I/O, clock or threads.
//!
//! [`simplify`] runs the passes of [`PASSES`], program to program; [`plan`] gives every value a place. Bucketing,
//! fusion and scheduling are not built yet.
#![forbid(unsafe_code)]

mod fold;
mod pipeline;
mod plan;
mod remove;
mod scope;
mod share;

pub use pipeline::{Options, PASSES, Pass, PassError, Stage, pass, simplify};
pub use plan::{At, PlanError, PlanReport, plan, report};
