//! Many small all_reduces between two threads, to count what one call costs in instructions.
//!
//! ```text
//! cargo build --release -p consort-comm --example calls
//! taskset -c 0 valgrind --tool=callgrind --callgrind-out-file=calls.out target/release/examples/calls 20000
//! callgrind_annotate calls.out
//! ```
//!
//! `callgrind_annotate` lists instructions by function, of both ranks; divided by the calls that this program prints,
//! they are instructions per call. On one core, which `taskset` sees to, a rank that waits sleeps at once and does not
//! count its turns, so that two runs agree within half a percent. Runs with different numbers of calls, subtracted,
//! leave out what happens once.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use consort_comm::{CommError, Group, spawn};
use consort_types::{Dtype, Reduce};

const RANKS: usize = 2;

fn main() -> ExitCode {
    let count = std::env::args().nth(1).map_or(Ok(20_000), |text| text.parse::<u64>());
    let Ok(count) = count else {
        eprintln!("error: calls: expected a number of calls");
        return ExitCode::FAILURE;
    };
    for outcome in spawn(RANKS, |group| calls(&group, count)) {
        if let Err(error) = outcome {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    }
    println!("{} calls: {count} on each of {RANKS} ranks", count * RANKS as u64);
    ExitCode::SUCCESS
}

/// Takes the mean of ones so many times.
fn calls(group: &Group, count: u64) -> Result<(), CommError> {
    let until = Instant::now() + Duration::from_secs(600);
    let mut buffer = group.heap().alloc_from(&1f32.to_le_bytes())?;
    for _ in 0..count {
        buffer = group.all_reduce(buffer, Dtype::F32, Reduce::Avg)?.wait(until)?.remove(0);
    }
    assert_eq!(*buffer.bytes()?, 1f32.to_le_bytes());
    Ok(())
}
