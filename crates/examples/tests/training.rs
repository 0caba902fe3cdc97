//! Each way to split training has the losses of one rank, over 50 steps.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Dtype, Init, Mesh, Result};
use consort_examples::{
    data_parallel, pipeline_parallel, train_experts, train_mesh, train_pipeline, train_sequence, train_zero,
};

type Train = fn(&Mesh, Dtype, usize) -> Result<Vec<f64>>;

const STEPS: usize = 50;

/// The losses of all ranks, which are equal.
fn losses(init: &Init, n: usize, train: Train, dtype: Dtype) -> Vec<f64> {
    let outcomes = init.spawn(n, |mesh| train(&mesh, dtype, STEPS)).into_iter().enumerate();
    let mut all: Vec<Vec<f64>> = outcomes
        .map(|(rank, outcome)| outcome.unwrap_or_else(|error| panic!("rank {rank} of {n}: {error}")))
        .collect();
    let first = all.remove(0);
    assert!(all.iter().all(|other| *other == first));
    first
}

/// Compares meshes with these sizes, along axes of these names or one of all ranks, with one rank.
fn equals_one_rank(train: Train, axes: &[&str], meshes: &[&[usize]]) {
    let init = |sizes: &[usize]| {
        Init::new().axes(&axes.iter().copied().zip(sizes.iter().copied()).collect::<Vec<_>>())
    };
    for (dtype, allowed) in [(Dtype::F64, 1e-9), (Dtype::F32, 1e-4)] {
        let one = losses(&init(&vec![1; axes.len()]), 1, train, dtype);
        assert!(one.len() == STEPS && one[STEPS - 1] < 0.5 * one[0], "{one:?}");
        for sizes in meshes {
            let n = sizes.iter().product();
            let many = losses(&init(sizes), n, train, dtype);
            for (a, b) in one.iter().zip(&many) {
                assert!((a - b).abs() <= allowed * a.abs(), "{dtype} {sizes:?}: {a} and {b}");
            }
        }
    }
}

#[test]
fn data_parallel_is_one_rank() {
    let train: Train = |mesh, dtype, steps| {
        let data = data_parallel::data(mesh, 16 / mesh.size(), 4, dtype)?;
        Ok(data_parallel::train(mesh, data, steps)?.1)
    };
    equals_one_rank(train, &["dp"], &[&[2], &[4]]);
}

#[test]
fn zero_is_one_rank() {
    equals_one_rank(train_zero::train, &["dp"], &[&[2], &[4]]);
}

#[test]
fn tensor_and_sequence_parallel_is_one_rank() {
    equals_one_rank(train_sequence::train, &["tp"], &[&[2], &[4]]);
}

#[test]
fn expert_parallel_is_one_rank() {
    equals_one_rank(train_experts::train, &["ep"], &[&[2], &[4]]);
}

#[test]
fn a_pipeline_is_one_rank() {
    equals_one_rank(train_pipeline::train, &["pp"], &[&[2], &[4]]);
}

#[test]
fn a_pipeline_of_roles_is_one_rank() {
    let train: Train = |mesh, dtype, steps| Ok(pipeline_parallel::train(mesh, dtype, steps)?.0);
    equals_one_rank(train, &["pp", "tp"], &[&[2, 1], &[2, 2], &[4, 1], &[1, 2]]);
}

#[test]
fn two_ways_at_once_are_one_rank() {
    equals_one_rank(train_mesh::train, &["dp", "tp"], &[&[2, 2], &[1, 4], &[4, 1]]);
}
