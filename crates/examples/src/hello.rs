//! The first program of docs/getting-started.md: each rank has a part of a vector, and all want its length.

use consort::{Reduce, Result, Tensor, compile};

fn main() -> Result<()> {
    let mesh = consort::init()?; // A rank of `consort run`, or alone.
    let rank = mesh.my_rank()?;
    // What to do wrong, to see what is said then.
    let mistake = std::env::args().nth(1).unwrap_or_default();
    let reduce = if mistake == "differ" && rank == 1 { Reduce::Max } else { Reduce::Sum };

    let group = mesh.clone();
    let length = compile(move |part: Tensor| {
        let squares = part.mul(&part)?.sum(&[0], false)?;
        group.all_reduce(squares, reduce)?.sqrt()
    });
    for step in 0..3 {
        if mistake == "die" && rank == 1 && step == 2 {
            std::process::exit(3);
        }
        let part = Tensor::from_iter([step as f32; 8])?; // From outside: it may be another on each rank.
        println!("step {step}: {}", length.call(part)?);
    }
    if rank == 0 {
        print!("{}", length.explain());
    }
    Ok(())
}
