//! A program of several ranks: every rank brings its number, and all check what comes of it.
//!
//! `cargo build --release -p consort-comm --example ranks`, then
//! `consort run -n 4 -- target/release/examples/ranks`. With an argument it stops at a step of its own: `die`, `exit`
//! or `differ` on the last rank, to see what the others say.

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, CommError, Group, Message, init};
use consort_types::{Dtype, Reduce};

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
    let group = world.group(64 << 20, Duration::from_secs(10))?;
    let (me, n) = (group.rank(), group.size());
    let until = Instant::now() + Duration::from_secs(20);
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let floats = |buffer: &Buffer| -> Result<Vec<f32>, CommError> {
        let bytes = buffer.bytes()?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    let new = |group: &Group, values: &[f32]| -> Result<Buffer, Box<dyn Error>> {
        Ok(group.heap().alloc_from(&bytes(values))?)
    };
    let last = me + 1 == n;
    let trouble = std::env::args().nth(1).unwrap_or_default();
    for round in 0..200 {
        for count in [1, 1000, 100_000] {
            let mine: Vec<f32> = (0..count).map(|i| ((me + i + round) % 8) as f32).collect();
            let sum = |i: usize| (0..n).map(|rank| ((rank + i + round) % 8) as f32).sum::<f32>();
            if last && round == 100 {
                match trouble.as_str() {
                    "die" => std::process::abort(),
                    "exit" => std::process::exit(0),
                    "differ" => {
                        drop(group.all_reduce(new(&group, &mine)?, Dtype::F32, Reduce::Max)?.wait(until)?)
                    }
                    _ => {}
                }
            }
            let got = group.all_reduce(new(&group, &mine)?, Dtype::F32, Reduce::Sum)?.wait(until)?;
            assert!(floats(&got[0])?.iter().enumerate().all(|(i, x)| *x == sum(i)), "all_reduce of {count}");
        }
        let mine = new(&group, &[me as f32, round as f32])?;
        let got = group.all_gather(mine, group.heap().alloc(8 * n)?, 1)?.wait(until)?;
        let want: Vec<f32> = (0..n).flat_map(|rank| [rank as f32, round as f32]).collect();
        assert_eq!(floats(&got[1])?, want);
        let (next, before) = ((me + 1) % n, (me + n - 1) % n);
        let send = Message::new(next, round as u64, new(&group, &[me as f32; 300])?);
        let recv = Message::new(before, round as u64, new(&group, &[-1.0; 300])?);
        let got = group.exchange(vec![send], vec![recv])?.wait(until)?;
        assert!(floats(&got[1])?.iter().all(|x| *x == before as f32));
    }
    group.barrier()?.wait(until)?;
    println!("rank {me} of {n}: all as expected");
    Ok(())
}
