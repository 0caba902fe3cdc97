//! The cases of roles, and the calls that are refused, on four processes, under the launcher.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]
#![allow(dead_code, reason = "the tests on threads use more of the cases")]

#[path = "roles/cases.rs"]
mod cases;
mod processes;
#[path = "roles/refusals.rs"]
mod refusals;

fn main() {
    // A call that is refused may end its job's groups, so each has a job of its own.
    let refused = refusals::REFUSALS.iter().map(|(name, ..)| *name);
    let names: Vec<&str> = std::iter::once("cases").chain(refused).collect();
    processes::run_each(&[4], &names, |name| {
        let mesh = consort::Init::new().axes(&[("pp", 2), ("tp", 2)]).start().unwrap();
        for (name, case) in cases::CASES.iter().filter(|_| name == "cases") {
            if let Err(error) = case(mesh.clone()) {
                panic!("{name}: {error}");
            }
        }
        for refusal in refusals::REFUSALS.iter().filter(|(own, ..)| *own == name) {
            refusals::check(&mesh, *refusal).unwrap();
            // A rank that leaves before the others have their errors gives them another.
            mesh.barrier().unwrap_or(());
        }
    });
}
