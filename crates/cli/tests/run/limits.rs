//! Limits that are too low: one error that names the limit and how to raise it, and nothing is left behind.

use std::process::{Command, exit};

use consort_comm::World;

use super::job::{Ended, LONG, consort, ranks, run, shells, through};
use super::rank::say;

/// Larger than the address space that some tests allow.
const LARGE: usize = 64 << 30;

/// The program of a rank in these tests: creates a group.
pub(crate) fn play(world: &World, part: &str) {
    let heap = if part == "heap large" { LARGE } else { 1 << 20 };
    let group = world.group(heap, LONG).map_err(|error| error.to_string());
    let done = group.and_then(|_| world.barrier("all have a group", LONG).map_err(|error| error.to_string()));
    if let Err(error) = done {
        say(&format!("error {}", error.replace('\n', "|")));
        exit(1);
    }
}

/// The command under a limit, as a shell sets it, on the ranks for which the condition holds.
fn limited(limit: &str, command: &Command) -> Command {
    through(&["sh", "-c", &format!("{limit}; exec \"$0\" \"$@\"")], command)
}

/// The job of `ranks`, each rank under a limit.
fn with_limited_ranks(n: usize, part: &str, limit: &str) -> Ended {
    let plain = ranks(n, part);
    let mut arguments: Vec<_> = plain.get_args().skip(1).collect();
    let program: Vec<_> = arguments.drain(3..).collect();
    let mut command = consort(&[]);
    command.args(arguments).args(["sh", "-c", &format!("{limit}; exec \"$0\" \"$@\"")]).args(program);
    run({
        command.env("RANK_PROGRAM", part);
        command
    })
}

/// Checks every rank's error about a group that exceeds a limit.
fn check_all(ended: &Ended, n: usize, what: &str, limit: &str) {
    assert_eq!(ended.code, 1, "{}", ended.err);
    for rank in 0..n {
        let error = ended.after(rank, "error ");
        assert!(error.starts_with(what) && error.contains(limit), "{error}");
        assert_eq!(error.matches("|  note: ").count(), 1, "{error}");
    }
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_not_a_death() {
    let ended = with_limited_ranks(2, "heap", "ulimit -f 100");
    check_all(
        &ended,
        2,
        "group: a heap of 1048576 bytes: File too large",
        "|  note: `ulimit -f` allows files of ",
    );
}

#[test]
fn a_limit_of_one_rank_is_told_to_all() {
    let ended = with_limited_ranks(3, "heap", "[ $CONSORT_RANK != 1 ] || ulimit -f 100");
    assert_eq!(ended.code, 1, "{}", ended.err);
    let own = ended.after(1, "error ");
    assert!(own.starts_with("group: a heap of 1048576 bytes: File too large"), "{own}");
    for rank in [0, 2] {
        let error = ended.after(rank, "error ");
        assert!(
            error.contains(": rank 1 aborted: group: a heap of 1048576 bytes: File too large"),
            "{error}"
        );
    }
}

#[test]
fn a_limit_of_addresses_is_an_error() {
    let ended = with_limited_ranks(2, "heap large", "ulimit -v 8388608");
    check_all(
        &ended,
        2,
        "group: a heap of 68719476736 bytes: Cannot allocate memory",
        "|  note: `ulimit -v` allows a process ",
    );
    // There is room for a rank's own heap, but not for those of all ranks.
    let ended = with_limited_ranks(3, "heap large", "ulimit -v 167772160");
    let what = "group: the heaps of 3 ranks, each of 68719476736 bytes: Cannot allocate memory";
    check_all(&ended, 3, what, "|  note: `ulimit -v` allows a process ");
}

#[test]
fn a_limit_of_file_sizes_ends_a_copy_of_the_output_and_not_the_job() {
    let folder = std::env::temp_dir().join(format!("consort-run-{}.full", std::process::id()));
    let arguments =
        ["-n", "1", "--tee", folder.to_str().unwrap(), "--", "sh", "-c", "seq 10000; echo last >&2"];
    // The shell counts blocks of 512 or 1024 bytes.
    let ended = run(limited("ulimit -f 4", &consort(&arguments)));
    let copied = std::fs::read_to_string(folder.join("rank-0.out")).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!((ended.code, ended.out.len()), (0, 10_000), "{}", ended.err);
    assert!((1024..=4096).contains(&copied.len()), "{}", copied.len());
    let error =
        format!("error: run: --tee: {}: File too large (os error 27); ", folder.join("rank-0.out").display());
    assert_eq!(ended.err.matches(&error).count(), 1, "{}", ended.err);
    assert!(ended.err.contains("[0] last\n"), "{}", ended.err);
}

#[test]
fn too_few_open_files_for_all_ranks_are_one_error_of_the_launcher() {
    let ended = run(limited("ulimit -n 64", &shells(40, "echo started")));
    assert_eq!((ended.code, ended.out.len()), (2, 0), "{}", ended.err);
    let expected = "error: run: cannot open the files of all ranks: Too many open files (os error 24)\n  \
        note: `ulimit -n` allows a process 64 open files; raise it, or start fewer ranks\n";
    assert_eq!(ended.err, expected);
}

#[test]
fn too_few_open_files_for_the_heaps_are_told_to_every_rank() {
    let mut errors = 0;
    // Enough for 40 ranks, but at first not for their heaps.
    for files in (156..180).step_by(6) {
        let ended = run(limited(&format!("ulimit -n {files}"), &ranks(40, "heap")));
        // The limit suffices, or is too low even for the ranks.
        if ended.code == 0 || ended.err.contains("cannot open the files of all ranks") {
            continue;
        }
        errors += 1;
        assert_eq!(ended.code, 1, "{}", ended.err);
        for rank in 0..40 {
            let error = ended.after(rank, "error ");
            let expected = "the launcher aborted: no room for the ranks' heaps: Too many open files (os error 24): `ulimit -n` allows";
            assert!(error.contains(expected), "{files}: {error}");
        }
    }
    assert!(errors > 0, "no limit was low enough");
}

#[test]
fn too_few_open_files_of_a_rank_are_an_error_that_names_the_limit() {
    let mut errors = 0;
    for files in 4..16 {
        let ended = with_limited_ranks(8, "heap", &format!("[ $CONSORT_RANK != 1 ] || ulimit -n {files}"));
        if ended.code == 0 {
            continue;
        }
        errors += 1;
        // The rank reports it, or its program did not even start.
        let named = ended.of(1).iter().any(|line| line.contains("`ulimit -n` allows a process "));
        assert!(named || ended.err.contains("[1] "), "{files}: {ended:?}");
        for rank in [0, 2, 7] {
            assert!(ended.after(rank, "error ").contains("rank 1 "), "{files}: {ended:?}");
        }
    }
    assert!(errors > 0, "no limit was low enough");
}

#[test]
fn too_few_processes_are_an_error_that_names_the_limit() {
    let (mut of_launcher, mut of_ranks) = (0, 0);
    // The launcher with its threads and the watcher are 4; each rank is 1, and more with its threads.
    for processes in 1..16 {
        let job = ranks(2, "heap");
        let mut command = Command::new("setpriv");
        // The limit does not apply to root.
        if rustix::process::geteuid().is_root() {
            command.args(["--reuid=65534", "--clear-groups"]);
        }
        command
            .args(["prlimit", &format!("--nproc={processes}")])
            .arg(job.get_program())
            .args(job.get_args());
        let ended = run({
            command.env("RANK_PROGRAM", "heap");
            command
        });
        if ended.code != 0 {
            let says = |text: &str| text.contains("`ulimit -u` allows a user ");
            let rank_says = ended.out.iter().any(|line| says(line));
            // The harness of the test program needs a thread itself.
            let harness_says = ended.err.contains("failed to spawn thread");
            assert!(rank_says || harness_says || says(&ended.err), "{processes}: {ended:?}");
            of_launcher += usize::from(says(&ended.err));
            of_ranks += usize::from(rank_says);
        }
    }
    println!("limits that were too low: {of_launcher} for the launcher, {of_ranks} for ranks");
    assert!(of_launcher > 0 && of_ranks > 0, "{of_launcher} {of_ranks}");
}
