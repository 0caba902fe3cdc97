//! Wrong programs, each on two ranks that are threads, and the error that every rank gets.
//!
//! ```text
//! cargo run --release -p consort-examples --example wrong
//! ```

use std::process::ExitCode;

use consort::{Dtype, Init, Mesh, Reduce, Result, Tensor, compile};

type Program = fn(Mesh) -> Result<()>;

/// What is wrong, a program, and a part of its error.
pub const PROGRAMS: [(&str, Program, &str); 4] = [
    ("ranks reduce differently", reduce_differently, "must be the same on all ranks"),
    ("both send and wait before they receive", deadlock, "no rank can go on"),
    ("operands of two element types, on rank 0 only", mix_types, "expected operands of one element type"),
    ("a compiled function that branches on the rank", branch_on_rank, "depends on the rank"),
];

fn reduce_differently(mesh: Mesh) -> Result<()> {
    let reduce = if mesh.my_rank()? == 0 { Reduce::Sum } else { Reduce::Max };
    mesh.all_reduce(Tensor::ones(Dtype::F32, &[2])?, reduce)?.wait()
}

fn deadlock(mesh: Mesh) -> Result<()> {
    let other = 1 - mesh.my_rank()?;
    mesh.isend(Tensor::scalar(1.0f32)?, other, 0)?.wait()?;
    mesh.irecv(Dtype::F32, &(), other, 0)?.wait()
}

fn mix_types(mesh: Mesh) -> Result<()> {
    let bias = if mesh.my_rank()? == 0 { Tensor::scalar(1i32)? } else { Tensor::scalar(1.0f32)? };
    mesh.all_reduce(Tensor::ones(Dtype::F32, &[2])?.add(&bias)?, Reduce::Sum)?.wait()
}

fn branch_on_rank(mesh: Mesh) -> Result<()> {
    let f = compile(move |x: Tensor| if mesh.rank() == 0 { x.neg() } else { Ok(x) });
    f.call(Tensor::scalar(1.0f32)?).map(drop)
}

/// The errors of both ranks; an empty text for none.
pub fn errors(program: Program) -> Vec<String> {
    let outcomes = Init::new().strict(true).spawn(2, program).into_iter();
    outcomes.map(|outcome| outcome.err().map(|error| error.to_string()).unwrap_or_default()).collect()
}

fn main() -> ExitCode {
    let mut found = true;
    for (what, program, part) in PROGRAMS {
        let errors = errors(program);
        println!("{what}:");
        errors.iter().enumerate().for_each(|(rank, error)| println!("[{rank}] {error}"));
        found &= errors.iter().all(|error| error.contains(part));
    }
    ExitCode::from(u8::from(!found))
}
