//! Programs to copy, each complete in one file. The parts that demos, benchmarks and tests run are public here.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "each program has a main of its own")]

pub mod collectives;
pub mod conv;
pub mod data_parallel;
pub mod halo;
pub mod heat;
pub mod moe;
pub mod pipeline;
pub mod pipeline_parallel;
pub mod ring_attention;
pub mod sequence_parallel;
pub mod tp;
pub mod train_experts;
pub mod train_mesh;
pub mod train_pipeline;
pub mod train_sequence;
pub mod train_zero;
pub mod wrong;
