//! What a rank does in each test. It prints what it got, and fails if that is an error.

use std::process::{self, Command, exit};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, Group, Message, World, init};
use consort_types::{Dtype, Reduce};
use half::{bf16, f16};

use super::checks;
use super::elements::IS_EXACT;

/// The first argument of a rank.
pub(crate) const RANK: &str = "__rank";

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(3)
}

fn group(world: &World) -> Group {
    world.group(checks::HEAP, Duration::from_secs(20)).unwrap()
}

fn fail(rank: usize, error: impl std::fmt::Display) -> ! {
    println!("rank {rank} got: {error}");
    // The other ranks print theirs before mpirun ends them.
    thread::sleep(Duration::from_millis(500));
    exit(3)
}

pub(crate) fn run(name: &str) {
    let world = match init() {
        Ok(world) => world,
        Err(error) => fail(0, error),
    };
    let rank = world.rank();
    match name {
        "every_operation" => {
            IS_EXACT.store(true, Relaxed);
            let group = group(&world);
            assert!(world.mpi().is_some());
            checks::check_all(&group);
            println!("all operations");
        }
        "large" => large(&world),
        "reductions" => reductions(&group(&world)),
        "transport" => {
            let group = group(&world);
            let sum =
                group.all_reduce(group.heap().alloc_from(&[1]).unwrap(), Dtype::U8, Reduce::Sum).unwrap();
            assert_eq!(sum.wait(soon()).unwrap()[0].bytes().unwrap()[0] as usize, world.size());
            println!("over {}", if world.mpi().is_some() { "MPI" } else { "shared memory" });
        }
        "differs" => {
            let group = group(&world);
            let reduce = if rank == 2 { Reduce::Max } else { Reduce::Sum };
            let operand = group.heap().alloc_from(&[1, 2, 3]).unwrap();
            let outcome =
                group.all_reduce(operand, Dtype::U8, reduce).and_then(|pending| pending.wait(soon()));
            fail(rank, outcome.err().unwrap());
        }
        "settings" => {
            let outcome = world.parity("attention", if rank == 0 { "flash" } else { "math" });
            fail(rank, outcome.err().unwrap());
        }
        "gives_up" => {
            let group = group(&world);
            if rank == 2 {
                world.abort("the reason of rank 2");
                fail(rank, "its own");
            }
            let outcome = group.barrier().and_then(|pending| pending.wait(soon() + Duration::from_secs(10)));
            fail(rank, outcome.err().unwrap());
        }
        "stops" => {
            let group = group(&world);
            group.barrier().unwrap().wait(soon()).unwrap();
            if rank == 1 {
                // Another process continues it, or else mpirun could not end it.
                let stop = "(sleep 6; kill -CONT $0) >&- 2>&- & kill -STOP $0";
                Command::new("sh").args(["-c", stop, &process::id().to_string()]).status().unwrap();
            }
            let outcome = group.barrier().and_then(|pending| pending.wait(soon()));
            fail(rank, outcome.err().unwrap());
        }
        "dies" => {
            let group = group(&world);
            println!("process {}", process::id());
            group.barrier().unwrap().wait(soon()).unwrap();
            if rank == 1 {
                Command::new("kill").args(["-KILL", &process::id().to_string()]).status().unwrap();
            }
            let outcome = group.barrier().and_then(|pending| pending.wait(soon()));
            assert!(outcome.is_err(), "has an outcome");
            fail(rank, outcome.err().unwrap());
        }
        "messages" => {
            let group = group(&world);
            let message = |len: usize| {
                let buffer = group.heap().alloc_from(&vec![7; len]).unwrap();
                Message::new(1 - rank, 5, buffer)
            };
            let pending = if rank == 0 { group.send(message(8)) } else { group.recv(message(4)) };
            let outcome = pending.and_then(|pending| pending.wait(soon()));
            // The send of a small message may be over before its receiver sees what differs.
            let outcome = outcome.map(drop).and_then(|()| group.barrier()?.wait(soon()).map(drop));
            fail(rank, outcome.err().unwrap());
        }
        "cut" => {
            let group = group(&world);
            group.barrier().unwrap().wait(soon()).unwrap();
            if rank == 1 {
                // In a session of its own, or else the launcher ends it with this rank.
                let cut = "setsid sh -c 'sleep 6; ip link set eth0 up' >&- 2>&- & ip link set eth0 down";
                Command::new("sh").args(["-c", cut]).status().unwrap();
            }
            // Until the network is cut.
            thread::sleep(Duration::from_millis(500));
            let start = Instant::now();
            let outcome = group.barrier().and_then(|pending| pending.wait(soon()));
            let late = start.elapsed().saturating_sub(Duration::from_secs(3));
            assert!(late < Duration::from_millis(100), "{late:?}");
            fail(rank, outcome.err().unwrap());
        }
        "late" => {
            let group = group(&world);
            group.barrier().unwrap().wait(soon()).unwrap();
            if rank == 2 {
                thread::sleep(Duration::from_secs(10));
            }
            let start = Instant::now();
            let outcome = group.barrier().and_then(|pending| pending.wait(soon()));
            let late = start.elapsed().saturating_sub(Duration::from_secs(3));
            assert!(late < Duration::from_millis(100), "{late:?}");
            fail(rank, outcome.err().unwrap());
        }
        other => panic!("no test {other}"),
    }
}

/// A reduction and a gather of more than 2^31 bytes, checked at their ends and around the edges of the pieces.
fn large(world: &World) {
    let (n, rank) = (world.size(), world.rank());
    let group = world.group(5 << 30, Duration::from_secs(250)).unwrap();
    let until = || Instant::now() + Duration::from_secs(250);
    let fill = |buffer: &mut Buffer, of: usize| {
        let mut bytes = buffer.bytes_mut(until()).unwrap();
        bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i >> 20) as u8 ^ i as u8 ^ of as u8);
    };
    let value = |i: usize, of: usize| (i >> 20) as u8 ^ i as u8 ^ of as u8;
    let len = (1 << 31) + 7;
    let places = || [0, 1, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, len - 1].into_iter();
    let mut operand = group.heap().alloc(len).unwrap();
    fill(&mut operand, rank);
    let got = group.all_reduce(operand, Dtype::U8, Reduce::Xor).unwrap().wait(until()).unwrap();
    for i in places() {
        assert_eq!(got[0].bytes().unwrap()[i], (0..n).fold(0, |all, of| all ^ value(i, of)), "{i}");
    }
    drop(got);
    let part = (1 << 30) + 9;
    let mut operand = group.heap().alloc(part).unwrap();
    fill(&mut operand, rank);
    let result = group.heap().alloc(part * n).unwrap();
    let got = group.all_gather(operand, result, 1).unwrap().wait(until()).unwrap();
    for (of, i) in (0..n).flat_map(|of| [0, part - 9, part - 1].map(|i| (of, i))) {
        assert_eq!(got[1].bytes().unwrap()[of * part + i], value(i, of), "{of} {i}");
    }
}

/// Averages, factors and 16-bit sums against sums in f64: each operation may round once.
fn reductions(group: &Group) {
    let n = group.size();
    let value = |member: usize, i: usize| ((member * 131 + i * 37) % 97) as f64 / 7.0 + 0.1;
    for (dtype, digits) in [(Dtype::F64, 53), (Dtype::F32, 24), (Dtype::F16, 11), (Dtype::Bf16, 8)] {
        let stored = |x: f64| match dtype {
            Dtype::F64 => x.to_le_bytes().to_vec(),
            Dtype::F32 => (x as f32).to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
            _ => bf16::from_f64(x).to_le_bytes().to_vec(),
        };
        let loaded = |bytes: &[u8]| match dtype {
            Dtype::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
            Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
            Dtype::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
            _ => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        };
        let count = 1000;
        for (reduce, factor) in
            [(Reduce::Sum, 1.0), (Reduce::Avg, 1.0 / n as f64), (Reduce::PremulSum(0.3), 0.3)]
        {
            let mine: Vec<u8> = (0..count).flat_map(|i| stored(value(group.rank(), i))).collect();
            let operand = group.heap().alloc_from(&mine).unwrap();
            let got = group.all_reduce(operand, dtype, reduce).unwrap().wait(soon()).unwrap();
            let bytes = got[0].bytes().unwrap();
            for (i, bytes) in bytes.chunks_exact(dtype.size()).enumerate() {
                let want = factor * (0..n).map(|member| loaded(&stored(value(member, i)))).sum::<f64>();
                // The factor, a rounding of each factor, and one of each of the n sums.
                let most = want * (n + 2) as f64 * 0.5f64.powi(digits);
                let got = loaded(bytes);
                assert!((got - want).abs() <= most, "{dtype} {reduce:?} {i}: {got} {want}");
            }
        }
    }
    // A NaN wins, and 0 is above -0, as over shared memory.
    let mine: Vec<u8> =
        [if group.rank() == 1 { f32::NAN } else { 1.0 }, if group.rank() == 0 { 0.0 } else { -0.0 }]
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
    let operand = group.heap().alloc_from(&mine).unwrap();
    let got = group.all_reduce(operand, Dtype::F32, Reduce::Max).unwrap().wait(soon()).unwrap();
    let bytes = got[0].bytes().unwrap();
    let [nan, zero] = [0, 4].map(|at| f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()));
    assert!(nan.is_nan() && zero.is_sign_positive(), "{nan} {zero}");
}
