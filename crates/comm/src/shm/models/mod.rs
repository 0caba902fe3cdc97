//! Models of the protocol: the code of this crate on the threads and atomics of a checker.
//!
//! - `exhaustive.rs`: two members under loom, which tries every order of steps up to a number of preemptions, and every
//!   value that a load may give in the memory model.
//! - `random.rs`: four members under shuttle, which tries thousands of random orders of longer programs.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release --target-dir target/loom -p consort-comm --lib models -- --nocapture
//! RUSTFLAGS="--cfg shuttle" cargo test --release --target-dir target/shuttle -p consort-comm --lib models
//! ```
//!
//! Rings, stages and chunks are smaller here (see `row.rs` and `two_phase.rs`), so that a few calls use them up. That
//! each model can fail is shown by `.ci/mutants`.

pub(crate) mod futex;

#[cfg(all(test, loom))]
mod exhaustive;
#[cfg(all(test, shuttle))]
mod random;
#[cfg(test)]
mod ranks;
