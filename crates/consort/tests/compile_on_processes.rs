//! The cases of compiled functions on ranks that are processes: 2 and 4 of them, under the launcher.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "compile/cases.rs"]
mod cases;
mod processes;

fn main() {
    processes::run(&[2, 4], || {
        let mesh = consort::init().unwrap();
        for (name, _, case) in cases::CASES {
            if let Err(error) = case(mesh.clone()) {
                panic!("{name}: {error}");
            }
        }
    });
}
