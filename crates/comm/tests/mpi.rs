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

use launched::{Launcher, Ran, SLOW, Told, launchers, run, run_on_hosts, run_without_cleanup};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, name, folder] = &arguments[..]
        && first == ranks::RANK
    {
        return ranks::run(name, folder);
    }
    let (found, skipped) = launchers();
    if arguments == ["long"] {
        return found.iter().for_each(more_than_a_count_takes);
    }
    let is_asked = |name: &str| arguments.is_empty() || arguments.iter().any(|part| name.contains(part));
    if is_asked("without_mpi_nothing_listens") {
        without_mpi_nothing_listens();
    }
    let with_hosts = launched::can_make_hosts();
    let mut without = 0;
    for launcher in &found {
        ON_ONE_HOST.iter().filter(|(name, _)| is_asked(name)).for_each(|(_, test)| test(launcher));
        for (_, test) in ON_HOSTS.iter().filter(|(name, _)| is_asked(name)) {
            if with_hosts { test(launcher) } else { without += 1 }
        }
    }
    println!("tests on several hosts: {without} skipped");
    println!("{} launchers, {} skipped: {}", found.len(), skipped.len(), skipped.join(", "));
}

/// A test by its name: those are run whose name has one of the arguments in it.
type Test = (&'static str, fn(&Launcher));

macro_rules! tests {
    ($($name:ident)*) => { &[$((stringify!($name), $name)),*] };
}

const ON_ONE_HOST: &[Test] = tests! {
    every_operation
    every_operation_in_pieces
    reductions_round_a_little
    a_wait_advances_other_groups
    one_host_is_shared_memory
    differing_calls_are_named
    differing_lists_of_groups_are_named
    differing_settings_are_named
    settings_of_the_engine_are_compared
    a_rank_that_fails_ends_the_others
    a_test_fails_when_a_rank_fails_or_leaves
    a_rank_that_tests_answers
    a_wait_for_a_buffer_fails_with_its_operation
    a_late_rank_is_named
    a_rank_that_waits_elsewhere_is_named
    a_stopped_rank_is_named
    a_killed_rank_ends_the_job
    a_killed_rank_is_named
    a_rank_that_never_comes_ends_the_job
    differing_messages_are_named
    an_unreceived_message_is_named
    a_second_init_is_an_error
    no_rank_ends_well_in_a_job_that_failed
    a_rank_that_works_alone_at_the_end_is_waited_for
    a_process_that_ends_as_a_rank_fails
    an_error_of_a_leaked_group_is_printed
    the_wrong_library_is_seen
};

const ON_HOSTS: &[Test] = tests! {
    two_hosts_use_mpi
    three_hosts_over_a_slow_network
    shared_memory_is_for_one_host
    a_stopped_rank_leaves_nothing_on_any_host
    a_killed_rank_leaves_nothing_on_any_host
    a_cut_network_ends_the_job
};

const MPI: (&str, &str) = ("CONSORT_ENGINE", "mpi");
const CHECKED: (&str, &str) = ("CONSORT_CHECK", "1");
const UNCHECKED: (&str, &str) = ("CONSORT_CHECK", "0");
/// A deadline is kept up to this, and an error that needs no deadline comes within a moment.
const LATE: Duration = Duration::from_millis(100);
const MOMENT: Duration = Duration::from_secs(5);

fn every_operation(launcher: &Launcher) {
    for (n, check) in checks::RANKS[1..3].iter().copied().zip([CHECKED, UNCHECKED]) {
        says(run(launcher, n, "every_operation", &[MPI, check]), "all operations", n);
    }
}

/// As if each call of MPI took at most 4000 bytes.
fn every_operation_in_pieces(launcher: &Launcher) {
    let pieces = ("CONSORT_MPI_MOST", "4000");
    says(run(launcher, 3, "every_operation", &[MPI, UNCHECKED, pieces]), "all operations", 3);
}

/// More bytes than a count of MPI has bits for. It needs 14 GiB, and so runs only if asked for: `-- long`.
fn more_than_a_count_takes(launcher: &Launcher) {
    says(run(launcher, 2, "large", &[MPI, ("CONSORT_DEADLINE", "250")]), "all large operations", 2);
}

fn reductions_round_a_little(launcher: &Launcher) {
    run(launcher, 3, "reductions", &[MPI]).is_fine();
}

fn a_wait_advances_other_groups(launcher: &Launcher) {
    says(run(launcher, 3, "advances", &[MPI, CHECKED]), "both groups advance", 3);
}

/// Nothing but MPI listens on a network. Some MPIs still do after they have ended.
fn one_host_is_shared_memory(launcher: &Launcher) {
    let shared = run(launcher, 2, "transport", &[]);
    let over_mpi = run(launcher, 2, "transport", &[MPI]);
    match launched::run_mpi_only(launcher, 2) {
        Some(only) => {
            only.is_fine();
            for ran in [&shared, &over_mpi] {
                assert!(ran.listened <= only.listened, "{} {} {}", only.listened, ran.listened, ran.text());
            }
        }
        None => println!("1 skipped: no mpicc to compare with a job that only starts MPI"),
    }
    says(shared, "over shared memory", 2);
    says(over_mpi, "over MPI", 2);
}

/// A job without MPI, as `consort run` starts it: here of one rank, which also serves it.
fn without_mpi_nothing_listens() {
    let job = format!("mpi-test-{}", std::process::id());
    let variables = [
        ("CONSORT_RANK", "0"),
        ("CONSORT_SIZE", "1"),
        ("CONSORT_JOB", &job[..]),
        ("CONSORT_SECRET", "00112233445566778899aabbccddeeff"),
    ];
    let ran = launched::run_alone("transport", &variables);
    assert_eq!(ran.listened, 0, "{}", ran.text());
    says(ran, "over shared memory", 1);
}

/// All ranks of a job end well, and say this.
fn says(ran: Ran, text: &str, ranks: usize) {
    ran.is_fine();
    assert_eq!(ran.out.matches(text).count(), ranks, "{}", ran.text());
}

/// What ranks tell: each one, the texts in what it got, and the most time that its call takes.
type Expected<'a> = &'a [(usize, &'a [&'a str], Duration)];

/// A job fails, and exactly these ranks tell this.
fn fails(ran: &Ran, expected: Expected<'_>) {
    assert!(ran.code != Some(0), "{}", ran.text());
    tell(ran, expected).unwrap_or_else(|error| panic!("{error}: {}", ran.text()));
}

fn tell(ran: &Ran, expected: Expected<'_>) -> Result<(), String> {
    let told: Vec<usize> = ran.told.keys().copied().collect();
    if !told.iter().eq(expected.iter().map(|(rank, ..)| rank)) {
        return Err(format!("only ranks {told:?} tell what they got"));
    }
    for (rank, texts, most) in expected {
        let Told { text, took, .. } = &ran.told[rank];
        if let Some(missing) = texts.iter().find(|expected| !text.contains(**expected)) {
            return Err(format!("expected {missing:?} of rank {rank}"));
        }
        if took > most {
            return Err(format!("rank {rank} took {took:?}, which is more than {most:?}"));
        }
    }
    if ran.time > Duration::from_secs(30) { Err("it took too long".to_string()) } else { Ok(()) }
}

/// A test in which ranks keep their deadline and answer in time. Where one of them waited for a core for most of the
/// time after its deadline, since the machine was busy, a run that fails says nothing of that, and is repeated.
fn timed(run: impl Fn() -> Ran, expected: Expected<'_>) -> Ran {
    for _ in 0..5 {
        let ran = run();
        let starved = ran.told.values().map(|told| told.starved).max().unwrap_or_default();
        match tell(&ran, expected) {
            Err(error) if starved > LATE / 2 => {
                println!("repeated, since a rank waited {starved:?} for a core after its deadline: {error}");
            }
            Err(error) => panic!("{error}: {}", ran.text()),
            Ok(()) => return ran,
        }
    }
    let ran = run();
    tell(&ran, expected).unwrap_or_else(|error| panic!("{error}: {}", ran.text()));
    ran
}

/// What the flight recorders hold is printed once (SPEC D10).
fn records(ran: &Ran, text: &str) {
    assert_eq!(ran.out.matches("last operation of each rank:").count(), 1, "{}", ran.text());
    assert!(ran.out.contains(text), "expected {text:?}: {}", ran.text());
}

/// Every rank compares what all have called, and none waits for a deadline.
fn differing_calls_are_named(launcher: &Launcher) {
    let ran = run(launcher, 3, "differs", &[MPI, CHECKED]);
    let texts: &[&str] = &[
        "call 1 on world: the reduction must be the same on all ranks",
        "ranks 0,1   all_reduce sum",
        "rank 2      all_reduce max",
        "recorded: world call 1: ranks 0,1 all_reduce sum u8, 3 bytes at ",
        "; rank 2 all_reduce max u8, 3 bytes at ",
    ];
    fails(&ran, &[0, 1, 2].map(|rank| (rank, texts, MOMENT)));
    records(&ran, "first divergence: world call 1: ranks 0,1 all_reduce sum u8, 3 bytes at ");
}

/// What members agree on is compared in every build, so that no group is made of lists that differ.
fn differing_lists_of_groups_are_named(launcher: &Launcher) {
    let texts: &[&str] = &[
        "call 0 on world: the call must be the same on all ranks",
        "ranks 0,1   make groups of the lists [[0, 1, 2]]",
        "rank 2      make groups of the lists [[1, 0, 2]]",
    ];
    for check in [CHECKED, UNCHECKED] {
        let ran = run(launcher, 3, "lists", &[MPI, check]);
        fails(&ran, &[0, 1, 2].map(|rank| (rank, texts, MOMENT)));
    }
}

fn differing_settings_are_named(launcher: &Launcher) {
    let ran = run(launcher, 2, "settings", &[MPI]);
    let texts: &[&str] = &["parity: expected equal values on every rank", "rank 0   flash", "rank 1   math"];
    fails(&ran, &[0, 1].map(|rank| (rank, texts, MOMENT)));
}

/// A call that only some ranks compare, or cut in another way, would never end.
fn settings_of_the_engine_are_compared(launcher: &Launcher) {
    let texts: &[&str] = &[
        "parity: expected equal values on every rank",
        "compared calls (CONSORT_CHECK)   ranks 0,2   off",
        "compared calls (CONSORT_CHECK)   rank 1      on",
    ];
    let ran = run(launcher, 3, "compares", &[MPI, ("CONSORT_DEADLINE", "20")]);
    fails(&ran, &[0, 1, 2].map(|rank| (rank, texts, MOMENT)));
    let texts: &[&str] = &["CONSORT_MPI_MOST: expected a multiple of 8 from 8 to 1073741824, got \"12\""];
    let ran = run(launcher, 3, "cuts", &[MPI, ("CONSORT_DEADLINE", "20")]);
    fails(&ran, &[0, 1, 2].map(|rank| (rank, texts, MOMENT)));
    let ran = run(launcher, 2, "transport", &[MPI, ("CONSORT_CHECK", "x")]);
    let texts: &[&str] = &["CONSORT_CHECK: expected 0 or 1, got \"x\""];
    fails(&ran, &[0, 1].map(|rank| (rank, texts, MOMENT)));
}

fn a_rank_that_fails_ends_the_others(launcher: &Launcher) {
    let ran = run(launcher, 3, "gives_up", &[MPI, CHECKED]);
    let reason: &[&str] = &["rank 2", "the reason of rank 2"];
    fails(&ran, &[(0, reason, MOMENT), (1, reason, MOMENT), (2, &["its own"], MOMENT)]);
}

/// A program that tests and never waits is told what one that waits is told.
fn a_test_fails_when_a_rank_fails_or_leaves(launcher: &Launcher) {
    let ran = run(launcher, 3, "tests_until_it_gives_up", &[MPI, UNCHECKED]);
    let reason: &[&str] = &["rank 2", "the reason of rank 2"];
    fails(&ran, &[(0, reason, MOMENT), (1, reason, MOMENT), (2, &["its own"], MOMENT)]);
    let ran = run(launcher, 3, "tests_until_it_leaves", &[MPI, UNCHECKED]);
    let left: &[&str] = &["rank 2 left the group"];
    fails(&ran, &[0, 1].map(|rank| (rank, left, MOMENT)));
}

fn a_rank_that_tests_answers(launcher: &Launcher) {
    let text: &[&str] = &["missing: rank 2", "rank 2   in flight: world batch 0, exchange"];
    let most = ranks::DEADLINE + LATE;
    let expected: Expected<'_> =
        &[(0, text, most), (1, text, most), (2, &["missing: rank 2"], most + MOMENT)];
    timed(|| run(launcher, 3, "tests_elsewhere", &[MPI, UNCHECKED]), expected);
}

/// What waits for the release of a buffer that an operation uses waits for that operation.
fn a_wait_for_a_buffer_fails_with_its_operation(launcher: &Launcher) {
    let ran = run(launcher, 3, "buffer_until_it_gives_up", &[MPI, UNCHECKED]);
    let reason: &[&str] = &["rank 2", "the reason of rank 2"];
    fails(&ran, &[(0, reason, MOMENT), (1, reason, MOMENT), (2, &["its own"], MOMENT)]);
    let text: &[&str] =
        &["all_reduce sum u8: call 1 on world", "missing: rank 2", "rank 2   does not answer"];
    let most = ranks::DEADLINE + LATE;
    let expected: Expected<'_> = &[(0, text, most), (1, text, most), (2, &["missing: rank 2"], most)];
    timed(|| run(launcher, 3, "buffer_late", &[MPI, UNCHECKED]), expected);
}

fn a_late_rank_is_named(launcher: &Launcher) {
    let (text, most): (&[&str], _) =
        (&["missing: rank 2", "rank 2   does not answer"], ranks::DEADLINE + LATE);
    // It comes when the others have failed, and hears of that.
    let expected: Expected<'_> = &[(0, text, most), (1, text, most), (2, &["missing: rank 2"], most)];
    let ran = timed(|| run(launcher, 3, "late", &[MPI, CHECKED]), expected);
    records(&ran, "  rank 2      recorder not read");
}

/// It answers, so that it is known what it does, and what it has not called.
fn a_rank_that_waits_elsewhere_is_named(launcher: &Launcher) {
    let text: &[&str] =
        &["missing: rank 2", "waiting: world batch 0, exchange", "recorded: world call 1: ranks 0,1 barrier"];
    let most = ranks::DEADLINE + LATE;
    let expected: Expected<'_> =
        &[(0, text, most), (1, text, most), (2, &["missing: rank 2"], most + MOMENT)];
    let ran = timed(|| run(launcher, 3, "elsewhere", &[MPI, UNCHECKED]), expected);
    records(&ran, "; rank 2 has not started it");
}

fn a_stopped_rank_is_named(launcher: &Launcher) {
    stopped(|| run(launcher, 3, "stops", &[MPI, CHECKED]));
}

fn stopped(run: impl Fn() -> Ran) {
    let (text, most): (&[&str], _) =
        (&["missing: rank 1", "rank 1   does not answer"], ranks::DEADLINE + LATE);
    let ran = timed(run, &[(0, text, most), (1, &["missing: rank 1"], most), (2, text, most)]);
    assert!(ran.code != Some(0), "{}", ran.text());
}

/// Most launchers end the others before they can say anything.
fn a_killed_rank_ends_the_job(launcher: &Launcher) {
    let ran = run(launcher, 3, "dies", &[MPI]);
    assert!(ran.code != Some(0) && ran.time < Duration::from_secs(20), "{}", ran.text());
    assert!(
        ran.out.contains("KILLED") || ran.out.contains("ignal 9") || ran.out.contains("EXIT CODE: 9"),
        "{}",
        ran.text()
    );
    leaves_no_process(&ran);
}

/// Where the launcher lets the others go on, they name it.
fn a_killed_rank_is_named(launcher: &Launcher) {
    let (text, most): (&[&str], _) =
        (&["missing: rank 1", "rank 1   does not answer"], ranks::DEADLINE + LATE);
    // Open MPI 4.1 then ends with 0.
    let run = || run_without_cleanup(launcher, 3, "dies", &[MPI]);
    leaves_no_process(&timed(run, &[(0, text, most), (2, text, most)]));
}

fn leaves_no_process(ran: &Ran) {
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

/// MPI waits for all ranks, and nothing can interrupt it: the process ends at the deadline.
fn a_rank_that_never_comes_ends_the_job(launcher: &Launcher) {
    let ran = run(launcher, 2, "never", &[MPI, ("CONSORT_DEADLINE", "3")]);
    assert!(ran.code != Some(0) && ran.time < Duration::from_secs(20), "{}", ran.text());
    assert!(
        ran.out.contains("did not return within ") && ran.out.contains("has not started"),
        "{}",
        ran.text()
    );
}

fn differing_messages_are_named(launcher: &Launcher) {
    let ran = run(launcher, 2, "messages", &[MPI, CHECKED]);
    let texts: &[&str] = &["a message must have the type and shape", "send 8 bytes", "receive 4 bytes"];
    fails(&ran, &[0, 1].map(|rank| (rank, texts, MOMENT)));
    // Without headers, by its length; also where it is a whole number of pieces.
    for most in ["1073741824", "8"] {
        let ran = run(launcher, 2, "messages", &[MPI, UNCHECKED, ("CONSORT_MPI_MOST", most)]);
        let texts: &[&str] =
            &["a message must have the type and shape", "more than 4 bytes", "receive 4 bytes"];
        fails(&ran, &[0, 1].map(|rank| (rank, texts, MOMENT)));
    }
}

fn an_unreceived_message_is_named(launcher: &Launcher) {
    let ran = run(launcher, 2, "unreceived", &[MPI]);
    let text: &[&str] = &["a message of rank 0 to rank 1 was never received"];
    fails(&ran, &[(0, text, MOMENT), (1, text, MOMENT)]);
}

/// Also where MPI only connects the ranks, and has ended since.
fn a_second_init_is_an_error(launcher: &Launcher) {
    says(run(launcher, 2, "starts_again", &[MPI]), "the first init stands", 2);
    says(run(launcher, 2, "starts_again", &[]), "the first init stands", 2);
}

/// A rank whose own calls are all over says why it fails. It ends first, so the code is its own.
fn no_rank_ends_well_in_a_job_that_failed(launcher: &Launcher) {
    for (name, failing, text) in [
        ("leaves", 0, "rank 1 left the group before it had done its part of this call"),
        ("sends_another", 1, "a message must have the type and shape that its receiver expects"),
    ] {
        let ran = run(launcher, 2, name, &[MPI, CHECKED]);
        fails(&ran, &[(failing, &[text], MOMENT)]);
        for expected in [format!("rank {failing} stopped: "), "this process ends with code 1".to_string()] {
            assert!(ran.out.contains(&expected), "expected {expected:?}: {}", ran.text());
        }
    }
}

/// A rank that computes is not late, since no other waits for a call of it.
fn a_rank_that_works_alone_at_the_end_is_waited_for(launcher: &Launcher) {
    let ran = run(launcher, 3, "works_alone", &[MPI, ("CONSORT_DEADLINE", "3")]);
    says(ran, "worked for 7 s", 1);
}

fn a_process_that_ends_as_a_rank_fails(launcher: &Launcher) {
    let ran = run(launcher, 2, "exits", &[MPI]);
    assert!(ran.code != Some(0) && ran.time < Duration::from_secs(20), "{}", ran.text());
    assert!(ran.out.contains("error: mpi: the process ended while it was a rank"), "{}", ran.text());
}

fn an_error_of_a_leaked_group_is_printed(launcher: &Launcher) {
    let ran = run(launcher, 2, "leaks", &[MPI, CHECKED]);
    assert!(ran.code != Some(0) && ran.time < Duration::from_secs(20), "{}", ran.text());
    for expected in ["call 0 on world: the size must be the same on all ranks", "nobody looked at this error"]
    {
        assert!(ran.out.contains(expected), "expected {expected:?}: {}", ran.text());
    }
}

fn two_hosts_use_mpi(launcher: &Launcher) {
    says(run_on_hosts(launcher, &[1, 2], "-", "transport", &[]), "over MPI", 3);
    run_on_hosts(launcher, &[2, 1], "-", "reductions", &[]).is_fine();
}

fn three_hosts_over_a_slow_network(launcher: &Launcher) {
    says(run_on_hosts(launcher, &[1, 2, 1], SLOW, "every_operation", &[UNCHECKED]), "all operations", 4);
}

fn shared_memory_is_for_one_host(launcher: &Launcher) {
    let ran = run_on_hosts(launcher, &[1, 1, 1], "-", "transport", &[("CONSORT_ENGINE", "shm")]);
    let text: &[&str] = &[
        "expected all ranks on one host, as CONSORT_ENGINE=shm asks for, got several hosts",
        "unset CONSORT_ENGINE",
    ];
    fails(&ran, &[0, 1, 2].map(|rank| (rank, text, MOMENT)));
}

fn a_stopped_rank_leaves_nothing_on_any_host(launcher: &Launcher) {
    stopped(|| run_on_hosts(launcher, &[1, 1, 1], SLOW, "stops", &[NETWORK]));
}

fn a_killed_rank_leaves_nothing_on_any_host(launcher: &Launcher) {
    let ran = run_on_hosts(launcher, &[1, 1, 1], SLOW, "dies", &[NETWORK]);
    assert!(ran.code != Some(0) && ran.time < Duration::from_secs(30), "{}", ran.text());
    leaves_no_process(&ran);
}

/// Makes MPICH use the network, although all hosts are one machine. (Only where nobody reaches `MPI_Finalize`: over TCP,
/// MPICH 4.0 sometimes never returns from it, also in C.)
const NETWORK: (&str, &str) = ("UCX_TLS", "tcp,self");

/// Each side names those that it cannot reach. The network comes back when all have, so that mpirun can end.
fn a_cut_network_ends_the_job(launcher: &Launcher) {
    // Rank 1 has cut the network of its host, which it shares with rank 2.
    let most = ranks::DEADLINE + LATE;
    let (here, there): (&[&str], &[&str]) = (&["missing: ranks 0,3"], &["missing: ranks 1,2"]);
    let expected: Expected<'_> = &[(0, there, most), (1, here, most), (2, here, most), (3, there, most)];
    let ran = timed(|| run_on_hosts(launcher, &[1, 2, 1], SLOW, "cut", &[NETWORK]), expected);
    assert!(ran.code != Some(0), "{}", ran.text());
}

fn the_wrong_library_is_seen(launcher: &Launcher) {
    let Some(other) = launcher.other_library else { return };
    let ran = run(launcher, 2, "transport", &[("CONSORT_MPI", other)]);
    let expected: &[&str] = &[
        "expected 2 ranks, as many as the launcher started, got 1",
        "under Slurm, start with `srun --mpi=pmix`",
    ];
    fails(&ran, &[0, 1].map(|rank| (rank, expected, MOMENT)));
}
