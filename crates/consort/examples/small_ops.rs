//! Adds eight floats many times, for instruction counts: `valgrind --tool=callgrind target/release/examples/small_ops`.

use std::process::ExitCode;
use std::time::Instant;

use consort::{Result, Tensor};

fn main() -> ExitCode {
    let count = std::env::args().nth(1).and_then(|text| text.parse::<u32>().ok()).unwrap_or(1_000_000);
    match run(count) {
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
fn run(count: u32) -> Result<f64> {
    let (x, y) = (Tensor::from_slice(&[1.0f32; 8], &[8])?, Tensor::from_slice(&[2.0f32; 8], &[8])?);
    let start = Instant::now();
    for _ in 0..count {
        let z = x.add(&y)?;
        std::hint::black_box(&z);
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(count))
}
