//! The cases of collectives on ranks that are threads.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "collectives/cases.rs"]
mod cases;
#[path = "processes/sums.rs"]
mod sums;

use consort::{Init, Mesh, Result, Tensor};

/// Runs a case on each number of ranks.
fn run(name: &str) {
    let (_, case) = *cases::CASES.iter().find(|(own, _)| *own == name).unwrap();
    for n in 1..=5 {
        on(&Init::new(), n, case);
    }
}

fn on(init: &Init, n: usize, case: fn(Mesh) -> Result<()>) {
    for (rank, outcome) in init.spawn(n, case).into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank} of {n}: {error}"));
    }
}

macro_rules! tests {
    ($($name:ident)*) => {
        const TESTS: &[&str] = &[$(stringify!($name)),*];

        $(
            #[test]
            fn $name() {
                run(stringify!($name));
            }
        )*
    };
}

tests!(
    a1_a5_reductions_of_every_type
    a1_to_a10_every_layout
    a7_splits_of_every_rank
    a2_a4_a6_lists_are_each_as_alone
);

/// A case that is not listed would silently not run.
#[test]
fn every_case_has_a_test() {
    assert!(cases::CASES.iter().all(|(name, _)| TESTS.contains(name)));
}

#[test]
fn a13_groups_by_axis_lists_and_split_and_placements_follow() {
    let init = Init::new().axes(&[("dp", 2), ("tp", 3)]);
    on(&init, 6, cases::a13_groups_by_axis_lists_and_split_and_placements_follow);
}

#[test]
fn a10_sizes_that_differ_between_members_are_an_error_on_all_ranks() {
    let errors = consort::spawn(2, |mesh| {
        let x = Tensor::from_iter([1.0f32])?;
        mesh.all_gather_v(x, 0, &[mesh.rank() + 1, 1.into()])?.wait()
    });
    for error in errors {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("all_gather_v") && error.contains("collectives.rs:"), "{error}");
    }
}
