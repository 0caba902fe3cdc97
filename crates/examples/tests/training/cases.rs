//! Each way to split training, for comparison with one rank: on threads (`tests/training.rs`), and on processes and over MPI
//! (`tests/training_on_processes.rs` of the crate `cli`).

use consort::{Dtype, Init, Mesh, Result};
use consort_examples::{
    data_parallel, pipeline_parallel, train_experts, train_mesh, train_pipeline, train_sequence, train_zero,
};

/// An example that trains.
pub(crate) struct Way {
    pub(crate) name: &'static str,
    /// The losses of this number of steps.
    pub(crate) train: fn(&Mesh, Dtype, usize) -> Result<Vec<f64>>,
    /// The axes of its mesh.
    pub(crate) axes: &'static [&'static str],
}

pub(crate) const DATA_PARALLEL: Way = Way {
    name: "data_parallel",
    train: |mesh, dtype, steps| {
        let data = data_parallel::data(mesh, 16 / mesh.size(), 4, dtype)?;
        Ok(data_parallel::train(mesh, data, steps)?.1)
    },
    axes: &["dp"],
};
pub(crate) const ZERO: Way = Way { name: "zero", train: train_zero::train, axes: &["dp"] };
pub(crate) const SEQUENCE: Way = Way { name: "sequence", train: train_sequence::train, axes: &["tp"] };
pub(crate) const EXPERTS: Way = Way { name: "experts", train: train_experts::train, axes: &["ep"] };
pub(crate) const PIPELINE: Way = Way { name: "pipeline", train: train_pipeline::train, axes: &["pp"] };
pub(crate) const ROLES: Way = Way {
    name: "roles",
    train: |mesh, dtype, steps| Ok(pipeline_parallel::train(mesh, dtype, steps)?.0),
    axes: &["pp", "tp"],
};
pub(crate) const TWO_WAYS: Way = Way { name: "two_ways", train: train_mesh::train, axes: &["dp", "tp"] };

/// Each element type, and by how much losses may differ, relative to them.
pub(crate) const ALLOWED: [(Dtype, f64); 2] = [(Dtype::F64, 1e-9), (Dtype::F32, 1e-4)];

impl Way {
    /// The losses of one rank.
    pub(crate) fn alone(&self, dtype: Dtype, steps: usize) -> Vec<f64> {
        self.on_threads(&vec![1; self.axes.len()], dtype, steps).remove(0)
    }

    /// The losses of each rank of a mesh with these sizes.
    pub(crate) fn on_threads(&self, sizes: &[usize], dtype: Dtype, steps: usize) -> Vec<Vec<f64>> {
        let axes: Vec<(&str, usize)> = self.axes.iter().copied().zip(sizes.iter().copied()).collect();
        let (n, train) = (sizes.iter().product(), self.train);
        let outcomes = Init::new().axes(&axes).spawn(n, |mesh| train(&mesh, dtype, steps));
        let losses = outcomes.into_iter().enumerate().map(|(rank, outcome)| {
            outcome.unwrap_or_else(|error| panic!("{}: rank {rank} of {n}: {error}", self.name))
        });
        losses.collect()
    }

    /// Compares losses with those of one rank.
    pub(crate) fn check(&self, one: &[f64], many: &[f64], allowed: f64) {
        assert_eq!(one.len(), many.len(), "{}", self.name);
        for (a, b) in one.iter().zip(many) {
            assert!((a - b).abs() <= allowed * a.abs(), "{}: {a} and {b}: {one:?} {many:?}", self.name);
        }
    }
}
