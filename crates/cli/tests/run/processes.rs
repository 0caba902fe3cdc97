//! Processes that ranks start: children, sessions, daemons. None of them outlives the job, however it ends.

use super::job::{Ended, Job, consort, eventually, is_running, kill, shells};
use super::signals::pids;

/// Starts a process in a session of its own, whose parent ends at once, with no stream of the rank: the usual way
/// to become a daemon. `$x` is its process.
const DAEMON: &str = "x=$(setsid sh -c 'sleep 600 </dev/null >/dev/null 2>&1 & echo $!')";

fn gone(pids: &[u32]) {
    eventually("all processes are gone", || !pids.iter().any(|pid| is_running(*pid)));
}

/// Kills the launcher, and waits until it is gone.
fn kill_launcher(mut job: Job) {
    job.child.kill().unwrap();
    job.child.wait().unwrap();
}

#[test]
fn children_of_wrapper_ranks_do_not_outlive_a_killed_launcher() {
    // The rank is the shell; what it started ignores every signal that can be ignored.
    let script = "trap '' INT TERM HUP QUIT; sleep 600 & echo pid $!; wait";
    let job = Job::start(shells(3, script));
    let pids = pids(&job, 3);
    assert!(pids.iter().all(|pid| is_running(*pid)));
    kill_launcher(job);
    gone(&pids);
}

#[test]
fn sessions_and_daemons_do_not_outlive_a_killed_launcher() {
    let script =
        format!("setsid sh -c 'echo pid $$; exec sleep 600' & {DAEMON}; echo pid $x; exec sleep 600");
    let job = Job::start(shells(2, &script));
    let pids = pids(&job, 4);
    assert!(pids.iter().all(|pid| is_running(*pid)));
    kill_launcher(job);
    gone(&pids);
}

#[test]
fn sessions_and_daemons_do_not_outlive_a_normal_end() {
    let job = Job::start(shells(2, &format!("{DAEMON}; echo pid $x")));
    let pids = pids(&job, 2);
    let ended = job.end();
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    assert!(!pids.iter().any(|pid| is_running(*pid)), "gone when the launcher is");
}

/// A rank that exits as soon as the process it leaves behind has set its traps. `$READY` is a file for that.
fn leaves(left: &str, grace: &str) -> Ended {
    let ready = std::env::temp_dir().join(format!("consort-run-{}.ready", left.len() + grace.len()));
    let ready = ready.with_extension(std::process::id().to_string());
    let script = format!("setsid sh -c '{left}' & until [ -e $READY ]; do :; done");
    let mut command = consort(&["-n", "1", "--grace", grace, "--", "sh", "-c", &script]);
    command.env("READY", &ready);
    let job = Job::start(command);
    let pids = pids(&job, 1);
    let ended = job.end();
    assert!(!is_running(pids[0]), "gone when the launcher is");
    std::fs::remove_file(ready).unwrap();
    ended
}

#[test]
fn what_is_left_is_asked_to_end_and_killed_after_the_grace_period() {
    // It starts no process: one that was just forked may lose a signal to the handler of its parent.
    let polite = "trap \"echo asked; exit 0\" TERM; echo pid $$; : > $READY; while :; do :; done";
    let ended = leaves(polite, "30");
    assert_eq!((ended.code, ended.err.as_str(), ended.of(0)), (0, "", vec!["asked"]));
    let deaf = "trap \"\" TERM; echo pid $$; : > $READY; while :; do sleep 600; done";
    let ended = leaves(deaf, "0.2");
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
}

#[test]
fn nothing_outlives_a_killed_watcher() {
    // A rank's parent is the watcher.
    let job = Job::start(shells(
        2,
        &format!("{DAEMON}; echo pid $x; echo pid $$; echo watcher $PPID; exec sleep 600"),
    ));
    let mut pids = pids(&job, 4);
    let watcher: u32 = job.line_with("watcher ").rsplit(' ').next().unwrap().parse().unwrap();
    assert_ne!(watcher, job.pid());
    pids.push(watcher);
    kill("KILL", watcher);
    let ended = job.end();
    assert_eq!(ended.code, 2, "{}", ended.err);
    let expected =
        format!("error: run: the watcher of the job, process {watcher}, was killed by SIGKILL (signal 9)\n");
    assert!(ended.err.starts_with(&expected), "{}", ended.err);
    gone(&pids);
}

#[test]
fn a_stopped_watcher_does_not_keep_the_job() {
    let script = "trap '' TERM; echo pid $$; echo watcher $PPID; while :; do sleep 600; done";
    let job = Job::start(consort(&["-n", "2", "--grace", "0.2", "--", "sh", "-c", script]));
    let pids = pids(&job, 2);
    let watcher = job.line_with("watcher ").rsplit(' ').next().unwrap().parse().unwrap();
    kill("STOP", watcher);
    kill("TERM", job.pid());
    let ended = job.end();
    assert_eq!(ended.code, 2, "{}", ended.err);
    gone(&pids);
}

#[test]
fn signals_that_reach_all_processes_of_consort_leave_the_launcher_in_charge() {
    // As `pkill consort` does.
    let script = "trap 'echo got it; exit 9' TERM; echo pid $$; echo watcher $PPID; while :; do sleep 600 & wait; done";
    let job = Job::start(shells(2, script));
    pids(&job, 2);
    let watcher = job.line_with("watcher ").rsplit(' ').next().unwrap().parse().unwrap();
    kill("TERM", watcher);
    kill("TERM", job.pid());
    let ended = job.end();
    assert_eq!(ended.code, 9, "{}", ended.err);
    (0..2).for_each(|rank| assert!(ended.of(rank).contains(&"got it"), "{ended:?}"));
}

#[test]
fn orphans_that_end_while_the_job_runs_are_waited_for() {
    let orphans =
        "i=0; while [ $i -lt 50 ]; do (true &); i=$((i + 1)); done; echo watcher $PPID; exec sleep 600";
    let job = Job::start(shells(1, orphans));
    let watcher: u32 = job.line_with("watcher ").rsplit(' ').next().unwrap().parse().unwrap();
    let children = || std::fs::read_to_string(format!("/proc/{watcher}/task/{watcher}/children")).unwrap();
    eventually("only the rank is left", || children().split_whitespace().count() == 1);
    kill("TERM", job.pid());
    assert_eq!(job.end().code, 143);
}
