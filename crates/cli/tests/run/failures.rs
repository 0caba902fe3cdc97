//! A rank fails in every way a process can: what the other ranks and the user see.

use std::process::Command;
use std::time::{Duration, Instant};

use super::job::{Ended, OWN_ARGUMENTS, consort, own_program, ranks, run, shells};

/// The error of a rank, with its lines joined by `|`.
fn error(ended: &Ended, rank: usize) -> &str {
    ended.after(rank, "error ")
}

/// The time from rank 1's failure until the last of the others has its error.
fn latency(ended: &Ended, n: usize) -> Duration {
    let at = |rank| ended.after(rank, "at ").parse::<u64>().unwrap();
    let last = (0..n).filter(|rank| *rank != 1).map(at).max().unwrap();
    Duration::from_micros(last.saturating_sub(at(1)))
}

#[test]
fn a_job_of_well_behaved_ranks_ends_with_0_and_leaves_nothing() {
    let ended = run(ranks(4, "init"));
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    for rank in 0..4 {
        assert!(ended.of(rank).contains(&&*format!("rank {rank} of 4, local {rank}")), "{ended:?}");
    }
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(!sockets.contains(&format!("@consort-{}", ended.after(0, "job "))));
}

#[test]
fn a_killed_rank_is_named_to_all_at_once() {
    let ended = run(ranks(4, "killed"));
    assert_eq!(ended.code, 137);
    for rank in [0, 2, 3] {
        let error = error(&ended, rank);
        assert!(error.starts_with("barrier \"work\" at "), "{error}");
        let expected = ": rank 1 was killed by SIGKILL (signal 9), after barrier \"warm\"|  note: ";
        assert!(error.contains(expected), "{error}");
    }
    println!("a death is known after {:?}", latency(&ended, 4));
    assert!(latency(&ended, 4) < Duration::from_secs(2));
    let summary = "error: run: first failure: rank 1 (process ";
    let last = ended.err.lines().last().unwrap();
    assert!(last.starts_with(summary), "{}", ended.err);
    assert!(last.ends_with("): was killed by SIGKILL (signal 9), after barrier \"warm\""), "{}", ended.err);
}

#[test]
fn a_rank_that_exits_with_0_and_no_goodbye_is_named_too() {
    let ended = run(ranks(3, "exits"));
    assert_eq!(ended.code, 1, "the code of the first rank that failed over it");
    for rank in [0, 2] {
        let expected = ": rank 1 exited with code 0 without a goodbye, after barrier \"warm\"|";
        assert!(error(&ended, rank).contains(expected), "{ended:?}");
    }
    assert!(latency(&ended, 3) < Duration::from_secs(2));
    assert!(ended.err.contains("error: run: first failure: rank 1 (process "), "{}", ended.err);
    assert!(ended.err.contains("): exited with code 0 without a goodbye, after barrier \"warm\"\n"));
}

#[test]
fn a_panic_reaches_all_and_its_message_is_said_last() {
    let mut command = ranks(3, "panics");
    command.env_remove("RUST_BACKTRACE");
    let ended = run(command);
    assert_eq!(ended.code, 101);
    for rank in [0, 2] {
        assert!(error(&ended, rank).contains(": rank 1 aborted: it panicked|"), "{ended:?}");
    }
    let (_, summary) = ended.err.split_once("error: run: first failure: rank 1 (process ").unwrap();
    assert!(summary.contains(": aborted: it panicked; it exited with code 101\n"), "{summary}");
    assert!(summary.contains("  last lines of rank 1 on the standard error:\n"), "{summary}");
    assert!(summary.contains("the planned panic\n"), "{summary}");
}

#[test]
fn an_abort_reaches_all_with_its_reason() {
    let ended = run(ranks(3, "aborts"));
    assert_eq!(ended.code, 3);
    for rank in [0, 2] {
        assert!(error(&ended, rank).contains(": the planned abort|"), "{ended:?}");
    }
    assert!(ended.err.contains(": the planned abort; it exited with code 3\n"), "{}", ended.err);
}

#[test]
fn a_stopped_rank_ends_the_others_at_the_deadline_and_is_ended() {
    let start = Instant::now();
    let ended = run(ranks(3, "stopped"));
    assert_eq!(ended.code, 1);
    for rank in [0, 2] {
        let expected = "barrier \"work\": the deadline passed; missing: rank 1|";
        assert!(error(&ended, rank).starts_with(expected), "{ended:?}");
    }
    assert!(
        ended.err.contains("): barrier \"work\": the deadline passed; missing: rank 1\n"),
        "{}",
        ended.err
    );
    assert!(ended.err.ends_with("  note: did not end in time, and was ended: rank 1\n"), "{}", ended.err);
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_parity_mismatch_has_the_same_text_on_every_rank() {
    let ended = run(ranks(4, "parity"));
    assert_eq!(ended.code, 1);
    let expected = "parity: expected equal values on every rank|  attention_backend   ranks 0,2,3   flash|  \
        attention_backend   rank 1        math|  note: start every rank with the same program, options and environment";
    for rank in 0..4 {
        assert_eq!(error(&ended, rank), expected);
    }
}

#[test]
fn the_exit_code_is_that_of_the_rank_that_failed() {
    for (script, code, what) in [
        ("exit 0", 0, ""),
        ("[ $CONSORT_RANK != 2 ] || exit 7", 7, ": exited with code 7\n"),
        ("[ $CONSORT_RANK != 2 ] || kill -SEGV $$", 139, ": was killed by SIGSEGV (signal 11)\n"),
        ("[ $CONSORT_RANK != 2 ] || kill -TERM $$", 143, ": was killed by SIGTERM (signal 15)\n"),
    ] {
        let ended = run(shells(3, script));
        assert_eq!(ended.code, code, "{script}: {}", ended.err);
        assert!(ended.err.ends_with(what), "{script}: {}", ended.err);
        assert_eq!(ended.err.contains("first failure: rank 2 (process "), code != 0, "{}", ended.err);
    }
}

#[test]
fn a_rank_that_ends_while_others_are_started_is_not_missed() {
    let script = "[ $CONSORT_RANK = 1 ] || exit 5; exec sleep 600";
    for _ in 0..20 {
        // The first rank may have ended before the launcher hears that the second one has started.
        let ended = run(consort(&["-n", "2", "--grace", "0.05", "--", "sh", "-c", script]));
        assert_eq!(ended.code, 5, "{}", ended.err);
    }
}

#[test]
fn ranks_that_do_not_hear_are_ended_after_a_failure() {
    let script = "if [ $CONSORT_RANK = 0 ]; then exit 5; fi; trap '' TERM; while :; do sleep 600; done";
    let ended = run(shells(2, script));
    assert_eq!(ended.code, 5);
    assert!(ended.err.ends_with("  note: did not end in time, and was ended: rank 1\n"), "{}", ended.err);
}

#[test]
fn the_time_of_a_job_can_be_limited() {
    let ended = run(consort(&["-n", "2", "--timeout", "0.2", "--", "sleep", "600"]));
    assert_eq!(ended.code, 124);
    let expected =
        "error: run: the time of 200ms was up\n  note: did not end in time, and was ended: ranks 0,1\n";
    assert_eq!(ended.err, expected);
    let ended = run(consort(&["-n", "2", "--timeout", "-1", "--", "true"]));
    assert_eq!(
        (ended.code, ended.err.as_str()),
        (1, "error: run: --timeout: expected a number of seconds above 0, got -1\n")
    );
}

#[test]
fn what_cannot_be_started_is_one_error() {
    let data = std::env::temp_dir().join(format!("consort-run-{}.data", std::process::id()));
    std::fs::write(&data, "no program").unwrap();
    let data_text = data.to_str().unwrap();
    for (arguments, expected) in [
        (&["-n", "0", "--", "true"][..], "run: expected 1 to 1024 ranks, got 0\n".to_string()),
        (
            &["-n", "2", "--", "no-such-program"],
            "run: no-such-program: expected a program in PATH, got none\n".into(),
        ),
        (
            &["-n", "2", "--", "./no/such"],
            "run: ./no/such: expected a program, got No such file or directory".into(),
        ),
        (
            &["-n", "2", "--", data_text],
            format!("run: {data_text}: expected a program, got a file that may not be"),
        ),
        (&["-n", "2", "--", "/"], "run: /: expected a program, got a file that may not be executed\n".into()),
        (&["-n", "2"], "run: expected a program, got none\n".into()),
        (&["-n", "2", "--tee", data_text, "--", "true"], format!("run: --tee: {data_text}: ")),
    ] {
        let ended = run(consort(arguments));
        assert_eq!((ended.code, &ended.out), (1, &vec![]), "{arguments:?}: {}", ended.err);
        assert!(ended.err.starts_with(&format!("error: {expected}")), "{arguments:?}: {}", ended.err);
        assert_eq!(ended.err.matches("error: ").count(), 1, "{}", ended.err);
        assert!(ended.err.contains("\n  note: "), "{}", ended.err);
    }
    std::fs::remove_file(data).unwrap();
}

#[test]
fn ranks_of_another_launcher_meet_over_rank_0() {
    let (name, secret) = (format!("test-{}", std::process::id()), "0123456789abcdef0123456789abcdef");
    let start = |rank: &str, secret: Option<&str>| {
        let mut command = Command::new(own_program());
        command.args(OWN_ARGUMENTS).env("RANK_PROGRAM", "init").env("RANK", rank).env("WORLD_SIZE", "2");
        if let Some(secret) = secret {
            command.env("CONSORT_JOB", &name).env("CONSORT_SECRET", secret);
        }
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    // The second one waits until the first one runs the coordinator.
    let jobs = [start("1", Some(secret)), start("0", Some(secret))];
    for (rank, job) in [1, 0].into_iter().zip(jobs) {
        let output = job.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains(&format!("rank {rank} of 2")), "{text}");
    }
    let output = start("1", None).wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected =
        "error init: expected CONSORT_JOB and CONSORT_SECRET for rank 1 of 2, got neither|  note: ";
    assert!(output.status.code() == Some(1) && text.contains(expected), "{text}");
}
