//! The cases of `tests/compile` on ranks that are processes: `consort run -n 2 -- compiled [CASE..]`.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "../tests/compile/cases.rs"]
mod cases;

fn main() -> consort::Result<()> {
    let mesh = consort::init()?;
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    for (name, _, case) in cases::CASES {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            case(mesh.clone())?;
            if mesh.number(&mesh.rank())? == 0 {
                println!("{name}: ok");
            }
        }
    }
    Ok(())
}
