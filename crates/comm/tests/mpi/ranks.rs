//! What a rank does in each test. If it gets an error, it tells the test which, and fails.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio, exit};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs};

use consort_comm::env::Launch;
use consort_comm::{CommError, Group, Message, Pending, World, init};
use consort_types::{Dtype, Reduce};
use half::{bf16, f16};

use super::checks;
use super::elements::IS_EXACT;

#[path = "large.rs"]
mod large;

/// The first argument of a rank.
pub(crate) const RANK: &str = "__rank";
/// The variable that names the program of `mpi_only`.
pub(crate) const PROGRAM: &str = "CONSORT_TEST_PROGRAM";
/// The deadline of calls that are late.
pub(crate) const DEADLINE: Duration = Duration::from_secs(2);

fn soon() -> Instant {
    Instant::now() + DEADLINE
}

/// The deadline of calls that must end long before it.
fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn group(world: &World) -> Group {
    world.group(checks::HEAP, Duration::from_secs(20)).unwrap()
}

/// The error of a call that must fail, how long it took, and for how much of the time after its deadline other processes
/// had this one's core.
type Failed = (String, Duration, Duration);

/// For how long this thread, the first of its process, was ready to run and did not.
fn starved() -> Duration {
    let text = fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let nanoseconds = text.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

/// Waits for a call that must fail.
fn failed(pending: Result<Pending, CommError>, until: Instant) -> Failed {
    outcome_of(until, || pending.and_then(|pending| pending.wait(until)).map(drop)).expect("an error")
}

/// The error of a call, if it fails.
fn outcome_of(until: Instant, call: impl FnOnce() -> Result<(), CommError>) -> Option<Failed> {
    let before = thread::spawn(move || {
        thread::sleep(until.saturating_duration_since(Instant::now()).min(2 * DEADLINE));
        starved()
    });
    let start = Instant::now();
    let error = call().err()?;
    let (took, after) = (start.elapsed(), starved());
    let before = if Instant::now() < until { after } else { before.join().unwrap() };
    Some((error.to_string(), took, after.saturating_sub(before)))
}

/// The files by which the ranks of a test wait for one another, where they cannot call one another any more.
struct Files(PathBuf);

impl Files {
    fn has(&self, name: &str) -> bool {
        self.0.join(name).exists()
    }

    /// Waits until this is so, and not forever: the test then fails by what it lacks.
    fn wait(&self, is_so: impl Fn(&Files) -> bool) {
        let start = Instant::now();
        while !is_so(self) && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn write(&self, name: &str, text: &str) {
        // At once for all readers.
        let part = self.0.join(format!("part-{name}"));
        fs::write(&part, text).unwrap();
        fs::rename(part, self.0.join(name)).unwrap();
    }

    /// Waits until these ranks have told their errors.
    fn wait_for(&self, ranks: &[usize]) {
        self.wait(|files| ranks.iter().all(|rank| files.has(&format!("rank-{rank}"))));
    }

    /// A command of the shell that waits for the same.
    fn shell_waits_for(&self, ranks: &[usize]) -> String {
        let folder = self.0.display();
        let there: Vec<String> = ranks.iter().map(|rank| format!("[ -e {folder}/rank-{rank} ]")).collect();
        format!("for i in $(seq 200); do if {}; then break; fi; sleep 0.1; done", there.join(" && "))
    }
}

pub(crate) fn run(name: &str, folder: &str) {
    let Launch { rank, size, .. } = Launch::from_env().unwrap();
    let files = Files(PathBuf::from(folder));
    let outcome = match name {
        "never" if rank == 1 => return files.wait(|files| files.has("over")),
        "mpi_only" => return mpi_only(rank, size, &files),
        // As if each rank had an environment of its own.
        "compares" if env::var_os("CONSORT_CHECK").is_none() => {
            let own = if rank == 1 { "1" } else { "0" };
            let error = Command::new(env::current_exe().unwrap())
                .args(env::args().skip(1))
                .env("CONSORT_CHECK", own)
                .exec();
            panic!("{error}");
        }
        "cuts" if env::var_os("CONSORT_MPI_MOST").is_none() && rank == 1 => {
            let error = Command::new(env::current_exe().unwrap())
                .args(env::args().skip(1))
                .env("CONSORT_MPI_MOST", "12")
                .exec();
            panic!("{error}");
        }
        _ => {
            let start = Instant::now();
            match init() {
                // The world ends before the rank tells of it: that takes part in the error.
                Ok(world) => act(name, &world, &files),
                Err(error) => Err((error.to_string(), start.elapsed(), Duration::ZERO)),
            }
        }
    };
    // The first to end may end all others.
    match (name, rank) {
        ("tests_until_it_leaves", 2) => files.wait_for(&[0, 1]),
        ("leaves", 1) => files.wait_for(&[0]),
        ("sends_another", 0) => files.wait_for(&[1]),
        _ => {}
    }
    if let Err((text, took, starved)) = outcome {
        println!("rank {rank} got: {text}");
        files
            .write(&format!("rank-{rank}"), &format!("{} {}\n{text}", took.as_micros(), starved.as_micros()));
        // The first to end may end all others.
        let alive = (0..size).filter(|rank| name != "dies" || *rank != 1);
        files.wait_for(&alive.collect::<Vec<_>>());
        exit(3);
    }
}

/// Runs a command of the shell that outlives this rank, and that no launcher ends with it.
fn leave_running(command: &str) {
    let command = format!("setsid sh -c '{command}' >&- 2>&- &");
    assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success());
}

fn act(name: &str, world: &World, files: &Files) -> Result<(), Failed> {
    let (rank, size) = (world.rank(), world.size());
    match name {
        "every_operation" => {
            IS_EXACT.store(true, Relaxed);
            let group = group(world);
            assert!(world.mpi().is_some());
            checks::check_all(&group);
            println!("all operations");
        }
        "large" => large::large(world),
        "reductions" => reductions(&group(world)),
        "advances" => advances(&group(world)),
        "transport" => {
            let group = group(world);
            let sum =
                group.all_reduce(group.heap().alloc_from(&[1]).unwrap(), Dtype::U8, Reduce::Sum).unwrap();
            assert_eq!(sum.wait(later()).unwrap()[0].bytes().unwrap()[0] as usize, size);
            println!("over {}", if world.mpi().is_some() { "MPI" } else { "shared memory" });
            files.write(&format!("listens-{rank}"), &listening(process::id()).join("\n"));
        }
        "compares" | "cuts" | "never" => unreachable!("init fails"),
        "differs" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            let reduce = if rank == 2 { Reduce::Max } else { Reduce::Sum };
            let operand = group.heap().alloc_from(&[1, 2, 3]).unwrap();
            let (text, took, starved) = failed(group.all_reduce(operand, Dtype::U8, reduce), later());
            let recorded = group.flight_record();
            let divergence = recorded.divergence().map(|found| found.to_string()).unwrap_or_default();
            return Err((format!("{text}\nrecorded: {divergence}"), took, starved));
        }
        "lists" => {
            let group = group(world);
            let list = if rank == 2 { vec![1, 0, 2] } else { vec![0, 1, 2] };
            let start = Instant::now();
            let error = group.subgroup(&[list], later()).map(drop).unwrap_err();
            return Err((error.to_string(), start.elapsed(), Duration::ZERO));
        }
        "settings" => {
            let start = Instant::now();
            let outcome = world.parity("attention", if rank == 0 { "flash" } else { "math" });
            return Err((outcome.unwrap_err().to_string(), start.elapsed(), Duration::ZERO));
        }
        "gives_up" => {
            let group = group(world);
            if rank == 2 {
                world.abort("the reason of rank 2");
                return Err(("its own".to_string(), Duration::ZERO, Duration::ZERO));
            }
            return Err(failed(group.barrier(), later()));
        }
        // The others only test, and each has an operation in flight when rank 2 gives up, or leaves.
        "tests_until_it_gives_up" | "tests_until_it_leaves" | "buffer_until_it_gives_up" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 2 {
                files.wait(|files| files.has("started-0") && files.has("started-1"));
                if name == "tests_until_it_leaves" {
                    return Ok(());
                }
                world.abort("the reason of rank 2");
                return Err(("its own".to_string(), Duration::ZERO, Duration::ZERO));
            }
            let operand = group.heap().alloc(1 << 16).unwrap();
            let mut view = operand.clone();
            let mut pending = match rank {
                0 => group.recv(Message::new(2, 9, operand)),
                _ => group.all_reduce(operand, Dtype::U8, Reduce::Sum),
            }
            .unwrap();
            files.write(&format!("started-{rank}"), "");
            let failed = outcome_of(later(), || match name {
                "buffer_until_it_gives_up" => view.bytes_mut(later()).map(drop),
                _ => tested(&mut pending),
            });
            return Err(failed.expect("an error"));
        }
        // It answers while it tests.
        "tests_elsewhere" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 2 {
                let room = group.heap().alloc(4).unwrap();
                let mut pending = group.recv(Message::new(0, 9, room)).unwrap();
                return Err(outcome_of(later(), || tested(&mut pending)).expect("an error"));
            }
            return Err(failed(group.barrier(), soon()));
        }
        "buffer_late" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 2 {
                files.wait_for(&[0, 1]);
                return Err(until_it_fails(&group));
            }
            let operand = group.heap().alloc(1 << 16).unwrap();
            let mut view = operand.clone();
            let pending = group.all_reduce(operand, Dtype::U8, Reduce::Sum).unwrap();
            let until = soon();
            let failed = outcome_of(until, || view.bytes_mut(until).map(drop)).expect("an error");
            drop(pending);
            return Err(failed);
        }
        "late" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 2 {
                files.wait_for(&[0, 1]);
            }
            return Err(until_it_fails(&group));
        }
        // It waits elsewhere, so it answers.
        "elsewhere" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 2 {
                let room = group.heap().alloc(4).unwrap();
                return Err(failed(group.recv(Message::new(0, 9, room)), later()));
            }
            let (text, took, starved) = failed(group.barrier(), soon());
            let divergence = group.flight_record().divergence().map(|found| found.to_string());
            return Err((format!("{text}\nrecorded: {}", divergence.unwrap_or_default()), took, starved));
        }
        "stops" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 1 {
                // Another process continues it, or else mpirun could not end it.
                let others: Vec<usize> = (0..size).filter(|other| *other != rank).collect();
                let waits = files.shell_waits_for(&others);
                leave_running(&format!("{waits}; kill -CONT {}", process::id()));
                Command::new("kill").args(["-STOP", &process::id().to_string()]).status().unwrap();
            }
            return Err(until_it_fails(&group));
        }
        "dies" => {
            let group = group(world);
            println!("process {}", process::id());
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 1 {
                Command::new("kill").args(["-KILL", &process::id().to_string()]).status().unwrap();
            }
            return Err(failed(group.barrier(), soon()));
        }
        "messages" => {
            let group = group(world);
            let message = |len: usize| {
                let buffer = group.heap().alloc_from(&vec![7; len]).unwrap();
                Message::new(1 - rank, 5, buffer)
            };
            let start = Instant::now();
            let pending = if rank == 0 { group.send(message(8)) } else { group.recv(message(4)) };
            let outcome = pending.and_then(|pending| pending.wait(later()));
            // The send of a small message may be over before its receiver sees what differs.
            let outcome = outcome.map(drop).and_then(|()| group.barrier()?.wait(later()).map(drop));
            return Err((outcome.unwrap_err().to_string(), start.elapsed(), Duration::ZERO));
        }
        "unreceived" => {
            let group = group(world);
            // Too long to be under way without its receiver.
            let operand = group.heap().alloc(4 << 20).unwrap();
            let pending = (rank == 0).then(|| group.send(Message::new(1, 5, operand)).unwrap());
            group.barrier().unwrap().wait(later()).unwrap();
            let start = Instant::now();
            drop(pending);
            drop(group);
            let unseen = consort_comm::take_unseen().into_iter().next().expect("an error");
            return Err((unseen.to_string(), start.elapsed(), Duration::ZERO));
        }
        "starts_again" => {
            let group = group(world);
            let second = || init().map(drop).unwrap_err().to_string();
            for error in [thread::spawn(second).join().unwrap(), second()] {
                assert!(
                    error.contains("init: mpi: expected the only `init` of this process, got a second"),
                    "{error}"
                );
            }
            group.barrier().unwrap().wait(later()).unwrap();
            println!("the first init stands");
        }
        "leaves" => {
            let group = group(world);
            if rank == 0 {
                return Err(failed(group.barrier(), later()));
            }
        }
        "sends_another" => {
            let group = group(world);
            let message =
                |len: usize| Message::new(1 - rank, 5, group.heap().alloc_from(&vec![7; len]).unwrap());
            if rank == 1 {
                return Err(failed(group.recv(message(4)), later()));
            }
            // It may be over before its receiver sees what differs.
            let _ = group.send(message(8)).unwrap().wait(later());
        }
        "works_alone" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 0 {
                thread::sleep(Duration::from_secs(7));
                println!("worked for 7 s");
            }
        }
        "exits" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 1 {
                exit(0);
            }
            return Err(failed(group.barrier(), soon()));
        }
        "leaks" => {
            let group = group(world);
            let operand = group.heap().alloc(8 + rank).unwrap();
            files.wait(|files| rank == 0 || files.has("started"));
            let pending = group.all_reduce(operand, Dtype::U8, Reduce::Sum);
            files.write(if rank == 0 { "started" } else { "differs" }, "");
            // Rank 1 may get the error, and stays until the end of rank 0 ends the job.
            files.wait(|files| files.has(if rank == 0 { "differs" } else { "over" }));
            std::mem::forget((pending, group));
        }
        "cut" => {
            let group = group(world);
            group.barrier().unwrap().wait(later()).unwrap();
            if rank == 1 {
                let waits = files.shell_waits_for(&(0..size).collect::<Vec<_>>());
                leave_running(&format!("{waits}; ip link set eth0 up"));
                Command::new("ip").args(["link", "set", "eth0", "down"]).status().unwrap();
                files.write("cut", "");
            }
            files.wait(|files| files.has("cut"));
            return Err(failed(group.barrier(), soon()));
        }
        other => panic!("no test {other}"),
    }
    Ok(())
}

/// Tests an operation until it is over.
fn tested(pending: &mut Pending) -> Result<(), CommError> {
    while pending.test()?.is_none() {}
    Ok(())
}

/// A rank that comes late may find the call of the others in flight, and complete it; the next one fails.
fn until_it_fails(group: &Group) -> Failed {
    for _ in 0..3 {
        let until = soon();
        let call = || group.barrier().and_then(|pending| pending.wait(until)).map(drop);
        if let Some(failed) = outcome_of(until, call) {
            return failed;
        }
    }
    panic!("three calls that others have not made");
}

/// A wait on one group advances another. With `CONSORT_CHECK=1` a call moves its data only when this rank has compared it,
/// which no call of MPI does by itself.
fn advances(all: &Group) {
    let (n, rank) = (all.size(), all.rank());
    let other = all.subgroup(&[(0..n).rev().collect()], later()).unwrap().unwrap();
    for round in 0..20u8 {
        let operand = other.heap().alloc_from(&[round + rank as u8]).unwrap();
        let pending = other.all_reduce(operand, Dtype::U8, Reduce::Max).unwrap();
        // Rank 0 waits on one group only, the others for the sum on the other first.
        let first = if rank == 0 { Some(all.barrier().unwrap().wait(later()).unwrap()) } else { None };
        let got = pending.wait(later()).unwrap();
        assert_eq!(got[0].bytes().unwrap()[0], round + n as u8 - 1);
        if first.is_none() {
            all.barrier().unwrap().wait(later()).unwrap();
        }
    }
    println!("both groups advance");
}

/// A program in C in place of this rank, which starts MPI and makes one call.
fn mpi_only(rank: usize, size: usize, files: &Files) {
    let program = env::var_os(PROGRAM).unwrap();
    let mut child =
        Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut sum = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut sum).unwrap();
    assert_eq!(sum.trim(), size.to_string());
    files.write(&format!("listens-{rank}"), &listening(child.id()).join("\n"));
    // It ends with its input.
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

/// The addresses on which a process listens, over any network.
fn listening(process: u32) -> Vec<String> {
    let sockets = fs::read_dir(format!("/proc/{process}/fd")).unwrap().filter_map(|file| {
        let name = fs::read_link(file.ok()?.path()).ok()?.to_string_lossy().into_owned();
        Some(name.strip_prefix("socket:[")?.strip_suffix(']')?.to_string())
    });
    let sockets: Vec<String> = sockets.collect();
    let mut found = Vec::new();
    // 0A is the state of a socket that listens; one of UDP receives in the state 07.
    for (table, state) in [("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")] {
        let lines = fs::read_to_string(Path::new("/proc/net").join(table)).unwrap_or_default();
        for line in lines.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words[3] == state && sockets.iter().any(|socket| socket == words[9]) {
                found.push(format!("{table} {}", words[1]));
            }
        }
    }
    found
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
            let got = group.all_reduce(operand, dtype, reduce).unwrap().wait(later()).unwrap();
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
    let got = group.all_reduce(operand, Dtype::F32, Reduce::Max).unwrap().wait(later()).unwrap();
    let bytes = got[0].bytes().unwrap();
    let [nan, zero] = [0, 4].map(|at| f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()));
    assert!(nan.is_nan() && zero.is_sign_positive(), "{nan} {zero}");
}
