//! Ranks that mpirun starts, with every MPI that this machine has: the checks of `ops/checks.rs` over MPI, what its own
//! reductions may round, how a job starts, and how one ends that fails. A missing MPI is a counted skip.
//!
//! The ranks are this program itself. It has no test harness, since MPI is started once in a process.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "ops/checks.rs"]
mod checks;
#[path = "ops/elements.rs"]
mod elements;
#[path = "mpi/launched.rs"]
mod launched;
#[path = "mpi/ranks.rs"]
mod ranks;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use launched::{Launcher, launchers, run, run_on_hosts};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, name] = &arguments[..]
        && first == ranks::RANK
    {
        return ranks::run(name);
    }
    let (found, skipped) = launchers();
    if arguments == ["long"] {
        return found.iter().for_each(more_than_a_count_takes);
    }
    for launcher in &found {
        every_operation(launcher);
        reductions_round_a_little(launcher);
        one_host_is_shared_memory(launcher);
        differing_calls_are_named(launcher);
        differing_settings_are_named(launcher);
        a_rank_that_fails_ends_the_others(launcher);
        a_late_rank_is_named(launcher);
        a_stopped_rank_is_named(launcher);
        a_killed_rank_ends_the_job(launcher);
        differing_messages_are_named(launcher);
        the_wrong_library_is_seen(launcher);
    }
    let with_hosts = launched::can_make_hosts();
    for launcher in found.iter().filter(|_| with_hosts) {
        two_hosts_use_mpi(launcher);
        a_cut_network_ends_the_job(launcher);
    }
    println!("tests on several hosts: {} skipped", if with_hosts { 0 } else { 2 * found.len() });
    println!("{} launchers, {} skipped: {}", found.len(), skipped.len(), skipped.join(", "));
}

fn every_operation(launcher: &Launcher) {
    for (n, check) in checks::RANKS[1..3].iter().copied().zip(["1", "0"]) {
        let ran = run(launcher, n, "every_operation", &[("CONSORT_ENGINE", "mpi"), ("CONSORT_CHECK", check)]);
        ran.is_fine();
        assert_eq!(ran.out.matches("all operations").count(), n, "{}", ran.text());
    }
}

/// More bytes than a count of MPI has bits for. It needs 10 GiB, and so runs only if asked for: `-- long`.
fn more_than_a_count_takes(launcher: &Launcher) {
    run(launcher, 2, "large", &[("CONSORT_ENGINE", "mpi"), ("CONSORT_DEADLINE", "250")]).is_fine();
}

fn reductions_round_a_little(launcher: &Launcher) {
    run(launcher, 3, "reductions", &[("CONSORT_ENGINE", "mpi")]).is_fine();
}

fn one_host_is_shared_memory(launcher: &Launcher) {
    let ran = run(launcher, 2, "transport", &[]);
    ran.is_fine();
    assert_eq!(ran.out.matches("over shared memory").count(), 2, "{}", ran.text());
    let ran = run(launcher, 2, "transport", &[("CONSORT_ENGINE", "mpi")]);
    ran.is_fine();
    assert_eq!(ran.out.matches("over MPI").count(), 2, "{}", ran.text());
}

/// Each rank prints what it got; under mpirun the first to end may end the others before they do.
fn fails(launcher: &Launcher, n: usize, name: &str, expected: &[&str]) {
    let ran = run(launcher, n, name, &[("CONSORT_ENGINE", "mpi"), ("CONSORT_CHECK", "1")]);
    assert!(ran.code != Some(0), "{}", ran.text());
    for text in expected {
        assert!(ran.out.contains(text), "expected {text:?}: {}", ran.text());
    }
    assert!(ran.time < Duration::from_secs(20), "{:?}: {}", ran.time, ran.text());
}

/// A rank finds it itself, or hears of it from another that was earlier.
fn differing_calls_are_named(launcher: &Launcher) {
    let what = "call 0 on world: the reduction must be the same on all ranks";
    fails(
        launcher,
        3,
        "differs",
        &[what, "rank 1 got", "ranks 0,1   all_reduce sum", "rank 2      all_reduce max"],
    );
}

fn differing_settings_are_named(launcher: &Launcher) {
    fails(launcher, 2, "settings", &["parity: expected equal values on every rank", "flash", "math"]);
}

fn a_rank_that_fails_ends_the_others(launcher: &Launcher) {
    fails(launcher, 3, "gives_up", &["rank 0 got", "rank 1 got", "the reason of rank 2"]);
}

fn a_late_rank_is_named(launcher: &Launcher) {
    fails(launcher, 3, "late", &["missing: rank 2", "does not answer"]);
}

fn a_stopped_rank_is_named(launcher: &Launcher) {
    fails(launcher, 3, "stops", &["missing: rank 1", "does not answer"]);
}

/// Most launchers end the others before they can say anything; otherwise they name the rank.
fn a_killed_rank_ends_the_job(launcher: &Launcher) {
    let ran = run(launcher, 3, "dies", &[("CONSORT_ENGINE", "mpi")]);
    assert!(ran.code != Some(0) && ran.time < Duration::from_secs(20), "{}", ran.text());
    assert!(!ran.out.contains("has an outcome"), "{}", ran.text());
    assert!(
        ran.out.contains("KILLED") || ran.out.contains("ignal 9") || ran.out.contains("EXIT CODE: 9"),
        "{}",
        ran.text()
    );
    let left = |line: &str| {
        let pid = line.strip_prefix("process ").map(str::trim);
        pid.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists())
    };
    let start = Instant::now();
    while ran.out.lines().any(left) {
        assert!(start.elapsed() < Duration::from_secs(10), "left behind: {}", ran.text());
        thread::sleep(Duration::from_millis(10));
    }
}

fn differing_messages_are_named(launcher: &Launcher) {
    fails(
        launcher,
        2,
        "messages",
        &["a message must have the type and shape", "send 8 bytes", "receive 4 bytes"],
    );
}

fn two_hosts_use_mpi(launcher: &Launcher) {
    for (name, said) in [("transport", "over MPI"), ("every_operation", "all operations")] {
        let ran = run_on_hosts(launcher, name, &[]);
        ran.is_fine();
        assert_eq!(ran.out.matches(said).count(), 3, "{}", ran.text());
    }
}

/// Each side names those that it cannot reach. The network comes back later, so that mpirun can end. The variable makes
/// MPICH use the network, although both hosts are one machine. (It does only here, where nobody reaches `MPI_Finalize`: over
/// TCP, MPICH 4.0 sometimes never returns from it, also in C.)
fn a_cut_network_ends_the_job(launcher: &Launcher) {
    let ran = run_on_hosts(launcher, "cut", &[("UCX_TLS", "tcp,self")]);
    assert!(ran.code != Some(0) && ran.time < Duration::from_secs(60), "{}", ran.text());
    assert!(ran.out.contains("missing: ranks 1,2") && ran.out.contains("does not answer"), "{}", ran.text());
}

fn the_wrong_library_is_seen(launcher: &Launcher) {
    let Some(other) = launcher.other_library else { return };
    let ran = run(launcher, 2, "transport", &[("CONSORT_MPI", other)]);
    let expected = "expected 2 ranks, as many as the launcher started, got 1";
    assert!(ran.code != Some(0) && ran.out.contains(expected), "{}", ran.text());
}
