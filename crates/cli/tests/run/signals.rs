//! Signals to the launcher, its sudden death, and signals to subcommands that start launchers.

use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use super::job::{Job, LONG, consort, eventually, is_running, kill, shells, through};

/// The number after `pid` in the next line of each rank.
pub(crate) fn pids(job: &Job, n: usize) -> Vec<u32> {
    let pid = |line: String| line.rsplit(' ').next().unwrap().parse().unwrap();
    (0..n).map(|_| pid(job.line_with("pid "))).collect()
}

/// The job of a command that ignores no signal, though this test program may, as under `nohup` or in the background of
/// a script.
fn start(command: &Command) -> Job {
    Job::start(through(&["env", "--default-signal=HUP,INT,QUIT,TERM"], command))
}

#[test]
fn a_signal_is_forwarded_to_all_ranks() {
    for (signal, code) in [("TERM", 15), ("HUP", 1), ("INT", 2), ("QUIT", 3)] {
        let script = format!("trap 'echo got it; exit {code}' {signal}; echo pid $$; sleep 600 & wait");
        let job = start(&shells(3, &script));
        pids(&job, 3);
        kill(signal, job.pid());
        let ended = job.end();
        assert_eq!(ended.code, code, "{}", ended.err);
        (0..3).for_each(|rank| assert!(ended.of(rank).contains(&"got it"), "{ended:?}"));
    }
}

#[test]
fn a_second_interrupt_kills() {
    let job = start(&shells(2, "trap 'echo got it' INT; echo pid $$; while :; do sleep 600 & wait; done"));
    pids(&job, 2);
    kill("INT", job.pid());
    job.line_with("got it");
    job.line_with("got it");
    kill("INT", job.pid());
    let ended = job.end();
    assert_eq!(ended.code, 137, "{}", ended.err);
}

#[test]
fn a_signal_that_ranks_ignore_begins_the_grace_period() {
    for signal in ["INT", "TERM", "HUP", "QUIT"] {
        let script = "trap '' INT TERM HUP QUIT; echo pid $$; while :; do sleep 600; done";
        let job = start(&consort(&["-n", "2", "--grace", "0.2", "--", "sh", "-c", script]));
        let pids = pids(&job, 2);
        kill(signal, job.pid());
        let ended = job.end();
        assert_eq!(ended.code, 137, "{signal}: {}", ended.err);
        let note = "  note: did not end in time, and was ended: ranks 0,1\n";
        assert!(ended.err.ends_with(note), "{signal}: {}", ended.err);
        assert!(!pids.iter().any(|pid| is_running(*pid)));
    }
}

#[test]
fn ranks_that_end_within_the_grace_period_end_by_themselves() {
    let script = "trap 'echo saved; exit 3' TERM; echo pid $$; while :; do sleep 600 & wait; done";
    let job = Job::start(consort(&["-n", "2", "--grace", "30", "--", "sh", "-c", script]));
    pids(&job, 2);
    kill("TERM", job.pid());
    let ended = job.end();
    assert_eq!(ended.code, 3, "{}", ended.err);
    (0..2).for_each(|rank| assert!(ended.of(rank).contains(&"saved"), "{ended:?}"));
    assert!(!ended.err.contains("did not end in time"), "{}", ended.err);
}

#[test]
fn ranks_do_not_outlive_a_launcher_that_is_killed() {
    let mut job = Job::start(shells(3, "echo pid $$; exec sleep 600"));
    let pids = pids(&job, 3);
    assert!(pids.iter().all(|pid| is_running(*pid)));
    job.child.kill().unwrap();
    job.child.wait().unwrap();
    eventually("all ranks are gone", || !pids.iter().any(|pid| is_running(*pid)));
}

#[test]
fn a_rank_whose_launcher_is_already_gone_does_not_start() {
    // The parent of this process is not process 1, so the entry finds a different parent than it was told.
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    let output = command.args(["__rank", "rank", "1", "echo", "started"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{text}");
    assert!(text.starts_with("error: run: process 1, which started this one, is gone\n"), "{text}");
}

#[test]
fn a_reader_who_is_stuck_does_not_keep_the_job() {
    // This pipe stays open and is never read: the ranks and the forwarding of their output soon block.
    let (_stuck, full) = std::io::pipe().unwrap();
    let folder = std::env::temp_dir().join(format!("consort-run-{}.stuck", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut command = shells(2, "echo > \"$FOLDER/$CONSORT_RANK\"; exec yes");
    let mut child = command.env("FOLDER", &folder).stdout(full).stderr(Stdio::null()).spawn().unwrap();
    eventually("both ranks run", || ["0", "1"].iter().all(|rank| folder.join(rank).exists()));
    kill("TERM", child.id());
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() && start.elapsed() < LONG {
        thread::yield_now();
    }
    // Does nothing if it has exited.
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    std::fs::remove_dir_all(folder).unwrap();
}

/// A program that does not end in any time that a test takes.
const ENDLESS: &str = "mesh (dp: 2)

func @f(v0: f32[2]{dp}) -> f32[2]{dp} {
    v1 = scan[length=90000000, carries=1, slices=0] v0 : f32[2]{dp} {
        body(v2: f32[2]{dp}) {
            v3 = sin v2 : f32[2]{dp}
            return v3
        }
    }
    return v1
}

; run: @f([1, 2]) == [1, 2]
";

/// The children of a process, and theirs.
fn descendants(of: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let text: String = lists.collect();
    let children = text.split_whitespace().filter_map(|child| child.parse().ok());
    children.flat_map(|child| [vec![child], descendants(child)].concat()).collect()
}

/// Sends a signal to a subcommand that starts processes, once there are so many: all end, and nothing is left.
#[track_caller]
fn check_interrupt(arguments: &[&str], processes: usize, signal: &str, code: i32) {
    let name = format!("consort-signals-{}-{}-{signal}", std::process::id(), arguments.concat().len());
    let folder = std::env::temp_dir().join(name);
    fs::create_dir_all(&folder).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    let job = start(command.args(arguments).env("TMPDIR", &folder));
    let mut all = Vec::new();
    eventually("all processes run", || {
        all = descendants(job.pid());
        all.len() >= processes
    });
    kill(signal, job.pid());
    let ended = job.end();
    assert_eq!((ended.code, ended.out.len()), (code, 0), "{ended:?}");
    assert_eq!(ended.err, format!("error: {}: ended by SIG{signal}\n", arguments[0]));
    assert!(!all.iter().any(|pid| is_running(*pid)), "{all:?}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    fs::remove_dir(folder).unwrap();
}

#[test]
fn a_signal_ends_the_ranks_of_every_subcommand() {
    let program = std::env::temp_dir().join(format!("consort-signals-{}.csr", std::process::id()));
    fs::write(&program, ENDLESS).unwrap();
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        // A launcher, its watcher and two ranks.
        check_interrupt(&["bench", "train", "--small", "--seconds", "600"], 4, signal, code);
        check_interrupt(&["demo", "train"], 4, signal, code);
        check_interrupt(&["demo", "tp"], 4, signal, code);
        // This process is the launcher.
        let program = program.to_str().unwrap();
        check_interrupt(&["exec", program, "-n", "2", "--limit-steps", "1000000000"], 3, signal, code);
    }
    fs::remove_file(program).unwrap();
}

#[test]
fn a_signal_ends_a_peer() {
    let peer = ["bench", "launch", "--mpirun", "env", "--peer", "sleep 600"];
    check_interrupt(&peer, 1, "INT", 130);
}
