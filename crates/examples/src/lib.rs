//! Programs to copy, each whole in one file. What demos, benchmarks and tests run of them is public here.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "each program has a main of its own")]

pub mod collectives;
pub mod conv;
pub mod halo;
pub mod moe;
pub mod ring_attention;
pub mod tp;
