//! The ranks' output arrives whole, in order, with their prefixes.

use super::job::{Job, consort, eventually, is_running, ranks, run, shells};

/// The lines that rank writes in the part `lines`.
fn expected(stream: &str, rank: usize) -> Vec<String> {
    let piece = |i: usize| ["x", "yy", "zzz"][i % 3].repeat(1 + i % 40);
    (0..2000).map(|i| format!("{stream} {rank} {i} {} end", piece(i))).collect()
}

#[test]
fn lines_in_pieces_of_four_ranks_are_never_mixed() {
    let ended = run(ranks(4, "lines"));
    assert_eq!(ended.code, 0);
    assert!(ended.out.iter().all(|line| line.starts_with('[')), "every line has its rank");
    for rank in 0..4 {
        // The test harness of the rank program writes lines of its own before and after.
        let of_rank: Vec<&str> = ended.of(rank).into_iter().filter(|line| line.starts_with("out ")).collect();
        assert!(of_rank == expected("out", rank), "rank {rank}");
        let prefix = format!("[{rank}] ");
        let err: Vec<&str> = ended.err.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        assert!(err == expected("err", rank), "rank {rank}");
    }
    assert_eq!(ended.err.lines().count(), 4 * 2000);
}

#[test]
fn a_line_of_a_megabyte_stays_one_line() {
    let ended = run(shells(2, "head -c 1048576 /dev/zero | tr '\\0' x; echo; printf last"));
    assert_eq!((ended.code, ended.out.len()), (0, 4));
    for rank in 0..2 {
        let lines = ended.of(rank);
        assert!(lines.len() == 2 && lines[0].len() == 1 << 20 && lines[0].bytes().all(|byte| byte == b'x'));
        assert_eq!(lines[1], "last", "the last line has no end, and is there");
    }
}

#[test]
fn without_a_terminal_there_is_no_colour() {
    let ended = run(shells(2, "echo out; echo err >&2; exit 1"));
    assert!(!ended.err.contains('\x1b') && ended.out.iter().all(|line| !line.contains('\x1b')));
    assert!(ended.err.contains("[0] err\n") || ended.err.contains("[1] err\n"));
}

#[test]
fn tee_writes_what_each_rank_wrote() {
    let folder = std::env::temp_dir().join(format!("consort-run-{}.tee", std::process::id()));
    let nested = folder.join("logs");
    let script = "echo out $CONSORT_RANK; printf part; echo err $CONSORT_RANK >&2";
    let ended = run(consort(&["-n", "2", "--tee", nested.to_str().unwrap(), "--", "sh", "-c", script]));
    assert_eq!(ended.code, 0);
    let read = |name: String| std::fs::read_to_string(nested.join(name)).unwrap();
    for rank in 0..2 {
        assert_eq!(read(format!("rank-{rank}.out")), format!("out {rank}\npart"));
        assert_eq!(read(format!("rank-{rank}.err")), format!("err {rank}\n"));
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn only_one_rank_prints_and_all_report_errors() {
    let script = "echo out $CONSORT_RANK; printf part; echo err $CONSORT_RANK >&2";
    let ended = run(consort(&["-n", "3", "--only", "1", "--", "sh", "-c", script]));
    assert_eq!((ended.code, &ended.out[..]), (0, &["[1] out 1".to_string(), "[1] part".to_string()][..]));
    let mut err: Vec<&str> = ended.err.lines().collect();
    err.sort_unstable();
    assert_eq!(err, ["[0] err 0", "[1] err 1", "[2] err 2"]);
    let ended = run(consort(&["-n", "2", "--only", "2", "--", "true"]));
    assert_eq!(ended.err, "error: run: --only: expected a rank below 2, got 2\n");
    assert_eq!(ended.code, 1);
}

#[test]
fn what_a_rank_leaves_behind_is_ended_with_it() {
    let job = Job::start(shells(1, "sleep 600 & echo pid $!"));
    let pid = job.line_with("pid ").split(' ').next_back().unwrap().parse().unwrap();
    assert_eq!(job.end().code, 0);
    eventually("what the rank started is gone", || !is_running(pid));
}

#[test]
fn a_reader_who_has_seen_enough_ends_the_job() {
    let mut job = consort(&["-n", "2", "--", "yes"]);
    let mut child =
        job.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(141), "{text}");
    assert!(text.contains("was killed by SIGPIPE (signal 13)\n"), "{text}");
}
