//! Compiled functions with roles: cases that run, and calls that are refused.

pub(crate) mod cases;
pub(crate) mod refusals;
