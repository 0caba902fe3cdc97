//! The cases of compiled functions, sub-meshes, gradients, placements, roles, collectives, their forms and layers on ranks that are
//! processes, which share memory or use MPI. One job has all cases of a mesh, since starting ranks takes longer than most of them.
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
#[path = "placements/cases.rs"]
mod placements;
mod processes;
#[path = "roles/mod.rs"]
mod roles;
#[path = "sub_meshes/cases.rs"]
mod sub_meshes;
#[path = "processes/sums.rs"]
mod sums;

use consort::{Mesh, Result};
use processes::Job;
use roles::refusals;

fn main() {
    let world = |name, ranks| Job { name, ranks, axes: &[], over_mpi: true, run: any_number };
    let mesh = |name, axes: &'static [(&str, usize)], run| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        Job { name, ranks, axes, over_mpi: true, run }
    };
    let mut jobs = vec![
        world("two", 2),
        world("three", 3),
        world("four", 4),
        mesh("dp_tp", DP_TP, dp_tp),
        mesh("pp_tp", PP_TP, pp_tp),
        mesh("two_by_three", &[("dp", 2), ("tp", 3)], two_by_three),
    ];
    // A call that is refused may end its job's groups, so each has a job of its own.
    let refused = |(name, ..): &refusals::Refusal| Job { over_mpi: false, ..mesh(name, PP_TP, refused) };
    jobs.extend(refusals::REFUSALS.iter().map(refused));
    jobs.extend(placements::REFUSED.iter().map(|(name, _)| mesh(name, DP_TP, ended)));
    // Over MPI a deadlock ends at the deadline only.
    let of_sub_mesh = |(name, _): &sub_meshes::Case| Job {
        over_mpi: *name != sub_meshes::IN_ANOTHER_ORDER,
        ..mesh(name, PP_TP, ended)
    };
    jobs.extend(sub_meshes::REFUSED.iter().map(of_sub_mesh));
    processes::run(&jobs);
}

const DP_TP: &[(&str, usize)] = &[("dp", 2), ("tp", 2)];
const PP_TP: &[(&str, usize)] = &[("pp", 2), ("tp", 2)];

fn check(name: &str, case: fn(Mesh) -> Result<()>, mesh: &Mesh) {
    case(mesh.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
}

fn any_number(mesh: Mesh, _: &str) {
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

fn dp_tp(mesh: Mesh, _: &str) {
    nn::PLACED.iter().chain(&placements::CASES).for_each(|(name, case)| check(name, *case, &mesh));
}

fn pp_tp(mesh: Mesh, _: &str) {
    let cases = roles::cases::CASES.iter().chain(&sub_meshes::CASES);
    cases.for_each(|(name, case)| check(name, *case, &mesh));
}

fn two_by_three(mesh: Mesh, _: &str) {
    check("a13", collectives::a13_groups_by_axis_lists_and_split_and_placements_follow, &mesh);
}

fn refused(mesh: Mesh, name: &str) {
    let refusal = refusals::REFUSALS.iter().find(|(own, ..)| *own == name).unwrap();
    refusals::check(&mesh, *refusal).unwrap();
    // A rank that leaves before the others have their errors gives them another.
    mesh.barrier().unwrap_or(());
}

fn ended(mesh: Mesh, name: &str) {
    let mut cases = placements::REFUSED.iter().chain(&sub_meshes::REFUSED);
    check(name, cases.find(|(own, _)| *own == name).unwrap().1, &mesh);
    mesh.barrier().unwrap_or(());
}
