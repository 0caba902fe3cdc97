//! What a progress thread gives: a large all_reduce beside a computation, with and without it.
//!
//! `cargo build --release -p consort-comm --example overlap`, then
//! `consort run -n 4 -- target/release/examples/overlap`, on a machine with two cores for each rank.

use std::error::Error;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, Group, init};
use consort_types::{Dtype, Reduce};

const BYTES: usize = 16 << 20;
const ROUNDS: usize = 15;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let world = init()?;
    let group = world.group(4 * BYTES, Duration::from_secs(10))?;
    let mut buffer = Some(group.heap().alloc(BYTES)?);
    let mut measure = |compute: bool, communicate: bool| round(&group, &mut buffer, compute, communicate);
    let (compute, communicate) = (measure(true, false)?, measure(false, true)?);
    let alone = measure(true, true)?;
    let has_thread = group.start_progress_thread();
    let helped = measure(true, true)?;
    if group.rank() == 0 {
        println!("compute {compute:.2} ms, all_reduce {communicate:.2} ms");
        println!(
            "both {alone:.2} ms, with a progress thread {helped:.2} ms (there is a core for it: {has_thread})"
        );
    }
    Ok(())
}

/// The median time of a round in milliseconds: writes the data, starts the operation, computes, waits.
fn round(
    group: &Group,
    buffer: &mut Option<Buffer>,
    compute: bool,
    communicate: bool,
) -> Result<f64, Box<dyn Error>> {
    let until = Instant::now() + Duration::from_secs(60);
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let mut mine = buffer.take().ok_or("the buffer is gone")?;
        mine.bytes_mut(until)?.fill(round as u8);
        group.barrier()?.wait(until)?;
        let start = Instant::now();
        let pending =
            if communicate { Ok(group.all_reduce(mine, Dtype::I32, Reduce::Sum)?) } else { Err(mine) };
        if compute {
            black_box((0..black_box(4_000_000u64)).fold(1.0, |x: f64, i| x * 0.999 + i as f64));
        }
        *buffer = Some(match pending {
            Ok(pending) => pending.wait(until)?.remove(0),
            Err(mine) => mine,
        });
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}
