//! The examples that train, on ranks that are processes, which share memory or use MPI: each has the losses of one rank.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "../../examples/tests/training/cases.rs"]
mod cases;
#[path = "../../consort/tests/processes/mod.rs"]
mod processes;

use cases::{ALLOWED, DATA_PARALLEL, EXPERTS, PIPELINE, ROLES, SEQUENCE, TWO_WAYS, Way, ZERO};
use consort::{Mesh, Tensor};
use processes::Job;

/// Few, since the tests on threads have many.
const STEPS: usize = 8;

type Axes = &'static [(&'static str, usize)];

/// The ways that split over all ranks, along whatever axes they lie.
const OVER_ALL: [Way; 5] = [DATA_PARALLEL, ZERO, SEQUENCE, EXPERTS, PIPELINE];

fn main() {
    let job = |name, axes: Axes, run| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        Job { name, ranks, axes, over_mpi: true, run }
    };
    processes::run(&[
        job("two", &[("all", 2)], over_all),
        job("two_by_two", &[("a", 2), ("b", 2)], over_all),
        job("roles_of_one", &[("pp", 2), ("tp", 1)], |mesh, _| equals_one_rank(&ROLES, &mesh)),
        job("roles_of_two", &[("pp", 2), ("tp", 2)], |mesh, _| equals_one_rank(&ROLES, &mesh)),
        job("two_ways_on_two", &[("dp", 2), ("tp", 1)], |mesh, _| equals_one_rank(&TWO_WAYS, &mesh)),
        job("two_ways_on_four", &[("dp", 2), ("tp", 2)], |mesh, _| equals_one_rank(&TWO_WAYS, &mesh)),
    ]);
}

fn over_all(mesh: Mesh, _: &str) {
    OVER_ALL.iter().for_each(|way| equals_one_rank(way, &mesh));
}

fn equals_one_rank(way: &Way, mesh: &Mesh) {
    for (dtype, allowed) in ALLOWED {
        let many = (way.train)(mesh, dtype, STEPS).unwrap_or_else(|error| panic!("{}: {error}", way.name));
        way.check(&way.alone(dtype, STEPS), &many, allowed);
        // All ranks have the same.
        let of_first = mesh.broadcast(Tensor::from_slice(&many, &[STEPS]).unwrap(), 0).unwrap();
        assert_eq!(of_first.to_vec::<f64>().unwrap(), many, "{}", way.name);
    }
}
