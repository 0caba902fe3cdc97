//! The cases of forms of collectives on ranks that are processes.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "forms/cases.rs"]
mod cases;
mod processes;
#[path = "forms/table.rs"]
mod table;

fn main() {
    processes::run(&[2, 3], || {
        let mesh = consort::init().unwrap();
        for (name, case) in cases::CASES {
            if let Err(error) = case(&mesh) {
                panic!("{name}: {error}");
            }
        }
    });
}
