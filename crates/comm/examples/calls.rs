//! Many small all_reduces, or steps of a ring, between threads or over MPI, to count what one costs in instructions.
//!
//! ```text
//! cargo build --profile dist -p consort-comm --example calls
//! taskset -c 0 valgrind --tool=callgrind --callgrind-out-file=calls.out target/dist/examples/calls 20000 all_reduce 2
//! callgrind_annotate calls.out
//! ```
//!
//! `callgrind_annotate` lists instructions by function, of both ranks; divided by the calls that this program prints,
//! they are instructions per call. On one core, which `taskset` sees to, a rank that waits sleeps at once and does not
//! count its turns, so that two runs agree within half a percent. Runs with different numbers of calls, subtracted,
//! leave out what happens once. With one rank nothing waits, and two runs are equal.
//!
//! Over MPI a rank that waits counts its turns; what starting a call costs is the inclusive count of the engine's `start`:
//!
//! ```text
//! CONSORT_ENGINE=mpi CONSORT_CHECK=0 mpirun -n 2 \
//!     valgrind --tool=callgrind --callgrind-out-file=calls.%p target/dist/examples/calls 20000 all_reduce mpi
//! callgrind_annotate --inclusive=yes calls.PID
//! ```

use std::process::ExitCode;
use std::time::{Duration, Instant};

use consort_comm::{CommError, Group, Message, init, spawn};
use consort_types::{Dtype, Reduce};

fn main() -> ExitCode {
    let count = std::env::args().nth(1).map_or(Ok(20_000), |text| text.parse::<u64>());
    let calls = match std::env::args().nth(2).as_deref() {
        None | Some("all_reduce") => all_reduces,
        Some("ring") => ring_steps,
        Some(_) => {
            eprintln!("usage: calls [COUNT] [all_reduce|ring] [RANKS|mpi]");
            return ExitCode::FAILURE;
        }
    };
    if let (Ok(count), Some("mpi")) = (&count, std::env::args().nth(3).as_deref()) {
        return over_mpi(|group| calls(group, *count));
    }
    let ranks = std::env::args().nth(3).map_or(Ok(2), |text| text.parse::<usize>());
    let (Ok(count), Ok(ranks)) = (count, ranks) else {
        eprintln!("error: calls: expected a number of calls, and of ranks");
        return ExitCode::FAILURE;
    };
    for outcome in spawn(ranks, |group| calls(&group, count)) {
        if let Err(error) = outcome {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    }
    println!("{} calls: {count} on each of {ranks} ranks", count * ranks as u64);
    ExitCode::SUCCESS
}

/// This process is one of the ranks that mpirun started.
fn over_mpi(calls: impl Fn(&Group) -> Result<(), CommError>) -> ExitCode {
    let world = match init() {
        Ok(world) => world,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = world.group(1 << 20, Duration::from_secs(600)).and_then(|group| calls(&group));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Takes the mean of ones, `count` times.
fn all_reduces(group: &Group, count: u64) -> Result<(), CommError> {
    let until = Instant::now() + Duration::from_secs(600);
    let mut buffer = group.heap().alloc_from(&1f32.to_le_bytes())?;
    for _ in 0..count {
        buffer = group.all_reduce(buffer, Dtype::F32, Reduce::Avg)?.wait(until)?.remove(0);
    }
    assert_eq!(*buffer.bytes()?, 1f32.to_le_bytes());
    Ok(())
}

/// Sends four bytes to the next member and receives four bytes from the previous one, `count` times.
fn ring_steps(group: &Group, count: u64) -> Result<(), CommError> {
    let until = Instant::now() + Duration::from_secs(600);
    let (next, before) =
        ((group.rank() + 1) % group.size(), (group.rank() + group.size() - 1) % group.size());
    let mut out = group.heap().alloc_from(&1f32.to_le_bytes())?;
    let mut into = group.heap().alloc(4)?;
    for _ in 0..count {
        let mut buffers =
            group.exchange([Message::new(next, 0, out)], [Message::new(before, 0, into)])?.wait(until)?;
        (out, into) = (buffers.remove(1), buffers.remove(0));
    }
    assert_eq!(*out.bytes()?, 1f32.to_le_bytes());
    Ok(())
}
