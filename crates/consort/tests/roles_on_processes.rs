//! The cases of roles on four processes, under the launcher.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]
#![allow(dead_code, reason = "the tests on threads use more of the cases")]

#[path = "roles/cases.rs"]
mod cases;
mod processes;

fn main() {
    processes::run(&[4], || {
        let mesh = consort::Init::new().axes(&[("pp", 2), ("tp", 2)]).start().unwrap();
        for (name, case) in cases::CASES {
            if let Err(error) = case(mesh.clone()) {
                panic!("{name}: {error}");
            }
        }
    });
}
