//! Passes from program to plan: pure functions of the program, with no I/O, clock or threads.
//!
//! Today there is one, the last: [`plan`] gives every tensor a place. Simplification, bucketing, fusion and
//! scheduling are not built yet.
#![forbid(unsafe_code)]

mod plan;

pub use plan::{At, PlanError, PlanReport, plan, report};
