//! The cases of compiled functions, gradients, roles, collectives, their forms and layers on ranks that are processes, which share memory
//! or use MPI. One job has all cases of a mesh, since starting ranks takes longer than most of them.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]
#![allow(dead_code, reason = "the tests on threads use more of the cases")]

#[path = "collectives/cases.rs"]
mod collectives;
#[path = "compile/cases.rs"]
mod compiled;
#[path = "forms/mod.rs"]
mod forms;
#[path = "gradients/cases.rs"]
mod gradients;
#[path = "nn/cases.rs"]
mod nn;
mod processes;
#[path = "roles/cases.rs"]
mod roles;
#[path = "processes/sums.rs"]
mod sums;

use consort::{Mesh, Result};
use processes::Job;

fn main() {
    let world = |name, ranks| Job { name, ranks, axes: &[], run: any_number };
    processes::run(&[
        world("two", 2),
        world("three", 3),
        world("four", 4),
        Job { name: "dp_tp", ranks: 4, axes: &[("dp", 2), ("tp", 2)], run: dp_tp },
        Job { name: "pp_tp", ranks: 4, axes: &[("pp", 2), ("tp", 2)], run: pp_tp },
        Job { name: "two_by_three", ranks: 6, axes: &[("dp", 2), ("tp", 3)], run: two_by_three },
    ]);
}

fn check(name: &str, case: fn(Mesh) -> Result<()>, mesh: &Mesh) {
    case(mesh.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
}

fn any_number(mesh: Mesh) {
    // Some cases divide the ranks by two, and averages over three are rounded.
    let fits = |sizes: &[usize]| mesh.size() != 3 || sizes.contains(&3);
    for (name, _, case) in compiled::CASES.iter().chain(nn::CASES).filter(|(_, sizes, _)| fits(sizes)) {
        check(name, *case, &mesh);
    }
    let of_any_number = collectives::CASES.iter().chain(forms::cases::CASES);
    of_any_number.for_each(|(name, case)| check(name, *case, &mesh));
    let halves = gradients::CASES.iter().filter(|_| mesh.size() != 3);
    halves.for_each(|(name, case)| check(name, *case, &mesh));
}

fn dp_tp(mesh: Mesh) {
    nn::PLACED.iter().for_each(|(name, case)| check(name, *case, &mesh));
}

fn pp_tp(mesh: Mesh) {
    roles::CASES.iter().for_each(|(name, case)| check(name, *case, &mesh));
}

fn two_by_three(mesh: Mesh) {
    check("a13", collectives::a13_groups_by_axis_lists_and_split_and_placements_follow, &mesh);
}
