//! Small work many times, for instruction counts: adds eight floats, reduces one over a group of one, or adds in a
//! compiled function, alone or among many arguments:
//! `valgrind --tool=callgrind target/dist/examples/small_ops 20000 add|all_reduce|compiled|many`.

use std::process::ExitCode;
use std::time::Instant;

use consort::{Reduce, Result, Tensor, compile};

fn main() -> ExitCode {
    let count = std::env::args().nth(1).and_then(|text| text.parse::<u32>().ok()).unwrap_or(1_000_000);
    let what = std::env::args().nth(2);
    let outcome = match what.as_deref() {
        None | Some("add") => add(count),
        Some("all_reduce") => reduce(count),
        Some("compiled") => compiled(count, 0),
        Some("many") => compiled(count, 56),
        Some(_) => {
            eprintln!("usage: small_ops [COUNT] [add|all_reduce|compiled|many]");
            return ExitCode::FAILURE;
        }
    };
    match outcome {
        Ok(nanos) => {
            println!("{nanos:.0} ns an op");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// How long an op takes, its allocation included.
fn add(count: u32) -> Result<f64> {
    let (x, y) = (Tensor::from_slice(&[1.0f32; 8], &[8])?, Tensor::from_slice(&[2.0f32; 8], &[8])?);
    let start = Instant::now();
    for _ in 0..count {
        let z = x.add(&y)?;
        std::hint::black_box(&z);
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(count))
}

/// How long the same takes in a compiled function with `more` more arguments.
fn compiled(count: u32, more: usize) -> Result<f64> {
    let (x, y) = (Tensor::from_slice(&[1.0f32; 8], &[8])?, Tensor::from_slice(&[2.0f32; 8], &[8])?);
    let more = vec![y.clone(); more];
    let f = compile(|(x, y, _more): (Tensor, Tensor, Vec<Tensor>)| x.add(&y));
    f.call((x.clone(), y.clone(), more.clone()))?;
    let start = Instant::now();
    for _ in 0..count {
        let z = f.call((x.clone(), y.clone(), more.clone()))?;
        std::hint::black_box(&z);
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(count))
}

/// How long a reduction of an owned tensor takes, until its result is read.
fn reduce(count: u32) -> Result<f64> {
    let mesh = consort::init()?;
    let mut x = Tensor::from_slice(&[1.0f32], &[1])?;
    let start = Instant::now();
    for _ in 0..count {
        x = mesh.all_reduce(x, Reduce::Avg)?;
        std::hint::black_box(x.read(|elements: &[f32]| elements[0])?);
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(count))
}
