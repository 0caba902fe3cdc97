//! Passes from program to plan: pure functions of the program, with no I/O, clock or threads.
//!
//! Today there is one, and it is the simplest that gives a plan: [`plan`]. The pipeline of simplification,
//! bucketing, fusion, scheduling and memory planning is not built yet.
#![forbid(unsafe_code)]

mod plan;

pub use plan::{At, PlanError, plan};
