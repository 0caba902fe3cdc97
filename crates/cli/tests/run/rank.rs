//! The parts of this test program as a rank.

use std::io::{Write, stderr, stdout};
use std::path::Path;
use std::process::{Command, exit};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use consort_comm::World;
use consort_comm::control::ControlError;

use super::job::LONG;

/// Microseconds, on a clock that all ranks share.
fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros()
}

/// Prints one whole line on the standard output, which the test harness also writes to.
pub(crate) fn say(line: &str) {
    let mut out = stdout().lock();
    // On a new line: the harness may have written half of one.
    write!(out, "\n{line}\n").unwrap();
    out.flush().unwrap();
}

/// Reports how a call ended, in one line, and exits as a program would.
fn give_up(error: &ControlError) -> ! {
    say(&format!("at {}", now()));
    say(&format!("error {}", error.to_string().replace('\n', "|")));
    exit(1)
}

/// Sends a signal to itself, and does nothing more: delivery may take a moment.
pub(crate) fn end_by(signal: &str) -> ! {
    let script = format!("kill -{signal} {}", std::process::id());
    assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    loop {
        std::thread::park();
    }
}

pub(crate) fn play(part: &str) {
    if part == "lines" {
        return lines();
    }
    let world = consort_comm::init().unwrap_or_else(|error| {
        say(&format!("error {}", error.to_string().replace('\n', "|")));
        exit(1)
    });
    match part {
        "init" => init(&world),
        "killed" | "exits" | "panics" | "aborts" | "stopped" => broken(world, part),
        "parity" => {
            let backend = if world.rank() == 1 { "math" } else { "flash" };
            world.parity("attention_backend", backend).unwrap_or_else(|error| give_up(&error));
        }
        "flooded" => flooded(&world),
        part if part.starts_with("deadline") => super::deadline::play(&world, part),
        part if part.starts_with("heap") => super::limits::play(&world, part),
        part if part.starts_with("host") => super::hosted::play(world, part),
        part if part.starts_with("data") => super::data::play(&world, part),
        part if part.starts_with("flight") => super::flight::play(&world, part),
        _ => panic!("no part {part:?}"),
    }
}

/// Lines in pieces, to both streams in turn.
fn lines() {
    let rank = std::env::var("CONSORT_RANK").unwrap();
    for i in 0..2000 {
        let piece = ["x", "yy", "zzz"][i % 3].repeat(1 + i % 40);
        let mut streams: [(&str, Box<dyn Write>); 2] =
            [("out", Box::new(stdout().lock())), ("err", Box::new(stderr().lock()))];
        for (name, stream) in &mut streams {
            write!(stream, "{name} {rank} {i} ").unwrap();
            stream.flush().unwrap();
        }
        for (_, stream) in &mut streams {
            write!(stream, "{piece}").unwrap();
            stream.flush().unwrap();
            writeln!(stream, " end").unwrap();
        }
    }
}

/// A run without failures.
fn init(world: &World) {
    world.parity("threads", "2").unwrap();
    world.barrier("all here", LONG).unwrap();
    say(&format!("rank {} of {}, local {}", world.rank(), world.size(), world.local_rank()));
    // The secret came in the environment; it must not be in what `ps` shows of the rank or of the watcher.
    if let Ok(secret) = std::env::var("CONSORT_SECRET") {
        for process in ["self".to_string(), std::os::unix::process::parent_id().to_string()] {
            let arguments = std::fs::read(format!("/proc/{process}/cmdline")).unwrap();
            assert!(!String::from_utf8_lossy(&arguments).contains(&secret));
        }
        say(&format!("job {}", std::env::var("CONSORT_JOB").unwrap()));
    }
}

/// Rank 1 ends in one of many ways while the others wait in a barrier.
fn broken(world: World, part: &str) {
    world.barrier("warm", LONG).unwrap();
    if world.rank() != 1 {
        let deadline = if part == "stopped" { Duration::from_millis(400) } else { LONG };
        let error = world.barrier("work", deadline).unwrap_err();
        // The data path sees the failure with one load, and every later call returns the same error.
        let control = world.control().unwrap();
        assert!(control.failed() && control.failure().is_some());
        assert_eq!(world.parity("later", "").unwrap_err().to_string(), error.to_string());
        give_up(&error);
    }
    say(&format!("at {}", now()));
    match part {
        "killed" => end_by("KILL"),
        "exits" => exit(0),
        "panics" => panic!("the planned panic"),
        "aborts" => world.control().unwrap().abort("the planned abort"),
        _ => end_by("STOP"),
    }
    // An abort does not end the process that gives up; its own error does.
    exit(3);
}

/// Endless barriers, until a file shows that the test has flooded the socket.
fn flooded(world: &World) {
    let control = world.control().unwrap();
    say(&format!("job {}", std::env::var("CONSORT_JOB").unwrap()));
    let done = std::env::var("FLOOD_DONE").unwrap();
    let mut rounds = 0;
    loop {
        let is_done = world.rank() == 0 && Path::new(&done).exists();
        let peers = control.rendezvous(&[u8::from(is_done)], None, LONG).unwrap();
        rounds += 1;
        if peers[0].blob == [1] {
            return say(&format!("rounds {rounds}"));
        }
    }
}
