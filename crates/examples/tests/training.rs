//! Each way to split training has the losses of one rank, over 50 steps.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "training/cases.rs"]
mod cases;

use cases::{ALLOWED, Way};

const STEPS: usize = 50;

/// Compares meshes with these sizes with one rank.
fn equals_one_rank(way: &Way, meshes: &[&[usize]]) {
    for (dtype, allowed) in ALLOWED {
        let one = way.alone(dtype, STEPS);
        assert!(one.len() == STEPS && one[STEPS - 1] < 0.5 * one[0], "{one:?}");
        for sizes in meshes {
            let all = way.on_threads(sizes, dtype, STEPS);
            assert!(all.iter().all(|other| *other == all[0]));
            way.check(&one, &all[0], allowed);
        }
    }
}

#[test]
fn data_parallel_is_one_rank() {
    equals_one_rank(&cases::DATA_PARALLEL, &[&[2], &[4]]);
}

#[test]
fn zero_is_one_rank() {
    equals_one_rank(&cases::ZERO, &[&[2], &[4]]);
}

#[test]
fn tensor_and_sequence_parallel_is_one_rank() {
    equals_one_rank(&cases::SEQUENCE, &[&[2], &[4]]);
}

#[test]
fn expert_parallel_is_one_rank() {
    equals_one_rank(&cases::EXPERTS, &[&[2], &[4]]);
}

#[test]
fn a_pipeline_is_one_rank() {
    equals_one_rank(&cases::PIPELINE, &[&[2], &[4]]);
}

#[test]
fn a_pipeline_of_roles_is_one_rank() {
    equals_one_rank(&cases::ROLES, &[&[2, 1], &[2, 2], &[4, 1], &[1, 2]]);
}

#[test]
fn two_ways_at_once_are_one_rank() {
    equals_one_rank(&cases::TWO_WAYS, &[&[2, 2], &[1, 4], &[4, 1]]);
}
