//! How sums of floats are compared: MPI adds them in an order of its own.

use consort::{Dtype, tolerance};

/// Whether MPI moves the data.
pub(crate) fn are_over_mpi() -> bool {
    std::env::var("CONSORT_ENGINE").is_ok_and(|engine| engine == "mpi")
}

/// How far equal sums may be from each other, by `tolerance::difference`.
pub(crate) fn allowed(dtype: Dtype) -> f64 {
    if are_over_mpi() { tolerance::of_runs(dtype) } else { 0.0 }
}
