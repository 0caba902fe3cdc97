//! Adds eight floats, or reduces one over a group of one, many times, for instruction counts:
//! `valgrind --tool=callgrind target/release/examples/small_ops 20000 all_reduce`.

use std::process::ExitCode;
use std::time::Instant;

use consort::{Reduce, Result, Tensor};

fn main() -> ExitCode {
    let count = std::env::args().nth(1).and_then(|text| text.parse::<u32>().ok()).unwrap_or(1_000_000);
    let reduces = std::env::args().nth(2).is_some_and(|what| what == "all_reduce");
    match if reduces { reduce(count) } else { add(count) } {
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
