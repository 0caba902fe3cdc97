//! The cases of tensor-parallel layers on ranks that are threads.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "nn/cases.rs"]
mod cases;
#[path = "processes/sums.rs"]
mod sums;

use consort::{Init, Mesh, Result};

fn on(init: &Init, n: usize, case: fn(Mesh) -> Result<()>) {
    for (rank, outcome) in init.spawn(n, case).into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank} of {n}: {error}"));
    }
}

/// Runs the cases whose names begin with the prefix.
fn run(prefix: &str) {
    for (_, sizes, case) in cases::CASES.iter().filter(|(name, ..)| name.starts_with(prefix)) {
        sizes.iter().for_each(|n| on(&Init::new(), *n, *case));
    }
    for (_, case) in cases::PLACED.iter().filter(|(name, _)| name.starts_with(prefix)) {
        on(&Init::new().axes(&[("dp", 2), ("tp", 2)]), 4, *case);
    }
}

macro_rules! rows {
    ($($row:ident)*) => {
        /// The rows of the specification that have a test here.
        const ROWS: &[&str] = &[$(stringify!($row)),*];

        $(
            #[test]
            fn $row() {
                run(concat!(stringify!($row), "_"));
            }
        )*
    };
}

rows!(a14 e1 e2 e4);

/// A case whose row is not listed would silently not run.
#[test]
fn every_case_belongs_to_a_row() {
    let names =
        cases::CASES.iter().map(|(name, ..)| *name).chain(cases::PLACED.iter().map(|(name, _)| *name));
    let row = |name: &str| name.split('_').next().unwrap_or_default().to_string();
    let missing: Vec<&str> = names.filter(|name| !ROWS.contains(&&*row(name))).collect();
    assert!(missing.is_empty(), "no test runs {missing:?}");
}
