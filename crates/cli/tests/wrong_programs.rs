//! Wrong programs on real processes: every rank that is affected gets an error with the user's line, the launcher names
//! the rank that is to blame, and the exit code is not 0.
//!
//! The ranks are this test program itself: started with WRONG_PROGRAM in the environment, the test `rank_program` runs
//! that case and all other tests are filtered out.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "wrong_programs/cases.rs"]
mod cases;

use std::process::{Command, exit};
use std::time::{Duration, Instant};

/// The program of the ranks, if this process is one.
#[test]
fn rank_program() {
    let Ok(case) = std::env::var("WRONG_PROGRAM") else { return };
    exit(match cases::play(&case) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("Error: {error}");
            1
        }
    });
}

/// Shorter than the deadline of operations: errors must be detected, not time out.
const SOON: Duration = Duration::from_secs(20);

/// The output of a job.
struct Job {
    case: String,
    code: i32,
    out: String,
    err: String,
}

fn job(case: &str, ranks: usize) -> Job {
    job_with(case, ranks, "")
}

/// The same with a variable, `NAME=VALUE`, that the last rank alone has in its environment.
fn job_with(case: &str, ranks: usize, variable: &str) -> Job {
    let start = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(["run", "-n", &ranks.to_string(), "--timeout", "50", "--"]);
    let last = ranks - 1;
    let script = format!("if [ $CONSORT_RANK = {last} ]; then export {variable}; fi; exec \"$0\" \"$@\"");
    if !variable.is_empty() {
        command.args(["sh", "-c", &script]);
    }
    command.arg(std::env::current_exe().unwrap()).args(["--exact", "rank_program", "--quiet", "--nocapture"]);
    let output = command.env("WRONG_PROGRAM", case).env_remove("RUST_BACKTRACE").output().unwrap();
    assert!(start.elapsed() < SOON, "{case}: {:?}", start.elapsed());
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    Job { case: format!("{case} on {ranks} ranks"), code: output.status.code().unwrap_or(-1), out, err }
}

impl Job {
    /// The standard error of a rank.
    fn said(&self, rank: usize) -> String {
        let prefix = format!("[{rank}] ");
        self.err.lines().filter_map(|line| line.strip_prefix(&prefix)).collect::<Vec<_>>().join("\n")
    }

    /// Checks that a rank's error contains all parts, in order; `AT` is a source line that is marked with the case.
    fn expect(&self, rank: usize, parts: &[&str]) {
        let (said, name) = (self.said(rank), self.case.split(' ').next().unwrap());
        let source = include_str!("wrong_programs/cases.rs").lines().enumerate();
        let marked = source.filter(|(_, line)| line.contains(&format!("// {name}")));
        let lines: Vec<String> = marked.map(|(i, _)| format!("wrong_programs/cases.rs:{}", i + 1)).collect();
        let mut rest = &said[..];
        for part in parts {
            let found = match *part {
                "AT" => lines.iter().filter_map(|line| rest.find(line).map(|at| at + line.len())).min(),
                part => rest.find(part).map(|at| at + part.len()),
            };
            let Some(at) = found else {
                panic!(
                    "{}: rank {rank}: no {part:?} of {lines:?} in\n{said}\n\nall:\n{}",
                    self.case, self.err
                )
            };
            rest = &rest[at..];
        }
    }

    /// Checks that a rank's error says that another left without a call. The one that leaves reports the calls that it
    /// sees; a rank that finds it gone before it has the report says so itself.
    fn expect_left(&self, rank: usize, gone: usize, made: &str) {
        let own = format!(" on world: rank {gone} left the group without making this call");
        let seen = format!(" on world: rank {gone} left the group before it had done its part of this call");
        if self.said(gone).contains(&own) {
            self.expect(gone, &["error: call ", &own, made, "AT"]);
        }
        if self.said(rank).contains(&own) {
            self.expect(rank, &[&format!("rank {gone} stopped: "), &own, "AT", made, "AT"]);
        } else {
            self.expect(rank, &[made, &seen, "AT"]);
        }
    }

    /// Checks that all ranks report the same, and that the job fails.
    fn expect_all(&self, ranks: usize, parts: &[&str]) {
        (0..ranks).for_each(|rank| self.expect(rank, parts));
        assert_eq!(self.code, 1, "{}\n{}", self.case, self.err);
        assert!(!self.out.contains("got "), "{}: a rank got a result: {}", self.case, self.out);
    }

    /// Checks that the launcher's first line on the failure contains all parts.
    fn expect_launcher(&self, parts: &[&str]) {
        let first = self.err.lines().find(|line| line.starts_with("error: run: first failure: "));
        let first = first.unwrap_or_else(|| panic!("{}: no first failure in\n{}", self.case, self.err));
        for part in parts {
            assert!(first.contains(part), "{}: no {part:?} in\n{first}\n\nall:\n{}", self.case, self.err);
        }
    }
}

#[test]
fn what_differs_is_refused_by_every_member() {
    let alike = "note: every member must make the same calls in the same order";
    for ranks in [2, 3, 4] {
        for op in ["broadcast", "scatter", "reduce", "gather"] {
            let parts = [
                &format!("{op}: call 0 on world: the root must be the same on all ranks"),
                "AT",
                "root=0",
                "AT",
                "root=1",
                "AT",
                alike,
            ];
            job(&format!("{op}_root"), ranks).expect_all(ranks, &parts);
        }
        let shapes = "types, shapes, sizes, routes or factors must be the same on all ranks";
        let parts = [shapes, "AT", "permute[route=shift(+1)", "AT", "permute[route=shift(-1)", "AT", alike];
        job("route", ranks).expect_all(ranks, &parts);
        let parts = [shapes, "AT", "broadcast[root=0, over=world] f32[4]", "AT", "i32[4]", "AT", alike];
        job("broadcast_dtype", ranks).expect_all(ranks, &parts);
        let parts = [
            "the call must be the same",
            "AT",
            "make the group `g` of the lists [[0, 1",
            "AT",
            "[[1, 0",
            "AT",
            alike,
        ];
        job("list_order", ranks).expect_all(ranks, &parts);
        let parts = [
            "all_to_all: call 0: splits must fit together",
            "AT",
            "rank 0",
            "sends 4 bytes to rank 1",
            "AT",
            "rank 1",
            "expects 8 bytes of rank 0",
            "AT",
        ];
        job("splits", ranks).expect_all(ranks, &parts);
        // Also for empty tensors.
        job("empty", ranks).expect_all(ranks, &["the operation must be the same", "f32[0]", "AT", "f32[3]"]);
    }
}

#[test]
fn a_rank_that_cannot_start_tells_the_others_why_at_their_line() {
    let product = "expected axes whose sizes multiply to 2, the number of ranks, got (dp: 3)";
    let name = "`d p` is not a name (letters, digits and _, not a digit first, at most 64)";
    for (case, why) in
        [("axes_product", product), ("axes_name", name), ("heap_size", "the heap is too large")]
    {
        let job = job(case, 2);
        job.expect(1, &["init: ", why, "AT"]);
        job.expect(0, &["init: ", "AT", ": rank 1 aborted at ", "AT", why, "AT"]);
        job.expect_launcher(&["rank 1 ", "aborted at ", why]);
        assert_eq!(job.code, 1, "{}", job.err);
        assert!(!job.err.contains("crates/consort/src"), "a line of the library:\n{}", job.err);
    }
}

#[test]
fn a_rank_that_exits_with_0_is_named_with_a_way_out() {
    for case in ["exit_early", "exit_later"] {
        let job = job(case, 2);
        let gone = "rank 1 exited with code 0 without a goodbye";
        job.expect(0, &[gone, "AT", "note: ", "return from `main` in place of `exit`"]);
        assert_eq!(job.code, 1, "{}", job.err);
        assert!(!job.err.contains("crates/consort/src"), "a line of the library:\n{}", job.err);
    }
}

#[test]
fn messages_that_do_not_fit_are_seen_on_both_ends_and_elsewhere() {
    for (case, sent, received) in [
        ("message_dtype", "f32[4]", "i32[4]"),
        ("message_shape", "f32[4,1]", "f32[2,2]"),
        ("message_length", "f32[4]", "f32[3]"),
        ("message_large", "f32[4000,2]", "f32[2,4000]"),
    ] {
        let said = "exchange: a message must have the type and shape that its receiver expects";
        let parts = [
            said,
            "rank 0",
            &format!("send {sent}, tag 3"),
            "AT",
            "rank 1",
            &format!("receive {received}, tag 3"),
            "AT",
        ];
        job(case, 3).expect_all(3, &parts);
    }
    // The rank that leaves last has the error: the sender finds its receiver gone, or the receiver the message.
    let job = job("unreceived", 2);
    let rank = usize::from(job.said(0).is_empty());
    let parts = [
        "exchange: a message of rank 0 to rank 1 was never received",
        "rank 0",
        "send f32[4], tag 3",
        "AT",
        "note: every send needs a receive with its tag",
    ];
    job.expect(rank, &parts);
    job.expect_launcher(&["was never received"]);
    assert_eq!(job.code, 1, "{}", job.err);
}

#[test]
fn an_error_that_nobody_looked_at_ends_the_process_with_code_1() {
    for (case, out, note) in [
        ("unseen", "done", "note: nobody looked at this error"),
        ("printed", "checksum <", "note: it was printed in the place of a tensor"),
        // Leaked values, and a mesh that still exists when the process exits.
        ("leaked_handle", "done", "note: nobody looked at this error"),
        ("leaked_mesh", "done", "note: nobody looked at this error"),
        ("exit_0", "done", "note: nobody looked at this error"),
    ] {
        let job = job(case, 2);
        for rank in 0..2 {
            assert!(job.out.contains(&format!("[{rank}] {out}")), "{}", job.out);
        }
        let parts =
            ["call 0 on world: the size must be the same on all ranks", "f32[8]", "AT", "f32[7]", "AT", note];
        job.expect_all(2, &parts);
        job.expect_launcher(&["must be the same on all ranks"]);
    }
    // A rank that exits without a call that the others make.
    let job = job("skip_end", 3);
    let made = "all_reduce[reduce=max, over=world] f32[4]";
    (0..2).for_each(|rank| job.expect_left(rank, 2, made));
    job.expect_launcher(&["first failure: rank 2 ", "call 1 on world: rank 2 "]);
    assert_eq!(job.code, 1, "{}", job.err);
}

#[test]
fn agreement_comes_first_and_names_the_function() {
    let note = "note: captured values, and all that it reads from outside, must be equal on all ranks";
    // The program of one rank does not communicate.
    let parts = [
        "compile: `step`: its program must be the same on all ranks",
        "AT",
        "rank 0: ",
        "all_reduce_start",
        "rank 1: ",
        note,
    ];
    job("captured_flag", 2).expect_all(2, &parts);
    // One rank reads a tensor in the middle of the function.
    for case in ["one_breaks", "one_breaks_late"] {
        let parts = [
            "rank 0   call 1 of `step`: its graph ",
            "`to_vec` at ",
            "AT",
            "rank 1   call 1 of `step`: its program ",
        ];
        job(case, 2).expect_all(2, &parts);
    }
    // One rank makes one call less, and then another call or none.
    let parts = [
        "the operation must be the same on all ranks",
        "AT",
        "rank 0",
        "call 4 of `step`",
        "AT",
        "rank 1",
        "all_reduce[reduce=max",
        "AT",
    ];
    job("uneven_other", 2).expect_all(2, &parts);
    let job_ = job("uneven_end", 2);
    job_.expect_left(0, 1, "call 4 of `step`");
    job_.expect_launcher(&["first failure: rank 1 ", " on world: rank 1 "]);
    assert_eq!(job_.code, 1, "{}", job_.err);
    // Functions that are compiled on one line are distinct.
    let parts =
        ["the call must be the same", "call 1 of `cases.rs:", "AT", "call 1 of `cases.rs:", " #2`", "AT"];
    job("layers", 2).expect_all(2, &parts);
    // The trace fails on one rank: every rank quotes the error and blames that rank, before and after a break.
    for ranks in [2, 3] {
        let fails = job("one_fails", ranks);
        fails.expect_all(ranks, &["matmul: expected operands of at least 2 dimensions"]);
        fails.expect_launcher(&["first failure: rank 1 "]);
    }
    let fails = job("one_fails_late", 3);
    (0..3).for_each(|rank| fails.expect(rank, &["matmul: expected operands of at least 2 dimensions"]));
    fails.expect_launcher(&["first failure: rank 1 "]);
    // A function that only one rank calls must be declared local.
    let parts = [
        "the operation must be the same on all ranks",
        "AT",
        "rank 0",
        "call 1 of `metrics`",
        "rank 1",
        "barrier",
    ];
    job("not_local", 2).expect_all(2, &parts);
    // Sizes that must not differ.
    let parts = ["s0", "note: s0 is dimension 0 of tensor 0 of the arguments: 8 on rank 0, 7 on rank 1"];
    job("sizes", 2).expect_all(2, &parts);
    // Settings and arguments.
    let parts = [
        "the kinds of its arguments must be the same on all ranks; the first difference is in part 1",
        "AT",
        "rank 0: 1",
        "rank 1: 0",
    ];
    job("settings", 2).expect_all(2, &parts);
    let parts = [
        "parity: the setting `attention` must be the same on all ranks",
        "AT",
        "rank 0: \"flash\"",
        "rank 1: \"plain\"",
    ];
    job("parity", 2).expect_all(2, &parts);
}

#[test]
fn traced_programs_are_verified_in_every_build() {
    let parts = [
        "all_reduce: stands under a condition that may differ over world, within its group world (V9)",
        "AT",
        "note: make the condition equal over world",
    ];
    job("condition", 2).expect_all(2, &parts);
}

#[test]
fn what_a_compiled_function_captured_must_not_change() {
    let parts = [
        "compile: `f`: expected the captured tensor of",
        "AT",
        "to stay, but it was replaced",
        "note: pass what changes as an argument",
    ];
    job("captured_tensor", 2).expect_all(2, &parts);
    // Also if it changed on one rank only, and if it is a number.
    job("captured_on_one", 2).expect_all(2, &["captured tensor of", "AT"]);
    let parts = [
        "compile: `f`: its program must be the same at every call",
        "first:",
        "now:",
        "note: it depends on something that is no argument",
    ];
    job("captured_number", 2).expect_all(2, &parts);
    job("captured_list", 2)
        .expect_all(2, &["expected the tensor of", "AT", "to have the same elements at every call"]);
}

#[test]
fn everybody_names_the_rank_that_keeps_them() {
    for case in ["late", "leave"] {
        for _ in 0..3 {
            let job = job(case, 3);
            job.expect(0, &["rank 2"]);
            job.expect(1, &["rank 2"]);
            for rank in 0..2 {
                let said = job.said(rank);
                let blamed = said.contains("missing: rank 1")
                    || said.contains("rank 1 has left")
                    || said.contains("rank 1 exited");
                assert!(!blamed, "{}: rank {rank}: {said}", job.case);
            }
            job.expect_launcher(&["first failure: rank 2 "]);
            assert_ne!(job.code, 0);
        }
    }
}

#[test]
fn a_deadlock_is_found_at_once_whatever_the_size() {
    for (case, tensor) in [("send_first_small", "f32[4]"), ("send_first_large", "f32[40000]")] {
        let job = job(case, 2);
        let parts = [
            "deadlock: no rank can go on: each of these waits for the next",
            "rank 0",
            tensor,
            "tag 0: waits for rank 1 to receive it",
            "AT",
            "rank 1",
            "waits for rank 0 to receive it",
            "AT",
        ];
        job.expect_all(2, &parts);
    }
    job("receive_first", 3).expect_all(3, &["deadlock: no rank can go on", "to send it", "AT"]);
}

#[test]
fn who_is_missing_is_said_after_ten_seconds() {
    let job = job("very_slow", 2);
    assert_eq!(job.code, 0, "{}", job.err);
    job.expect(0, &["consort: rank 0: ", "call 0 on world: waiting for 10 s; missing: rank 1"]);
    assert!(job.said(1).is_empty(), "{}", job.err);
}

#[test]
fn a_traced_tensor_cannot_be_printed() {
    // A break with the user's line, and an error if breaks are errors.
    let broken = job("prints_in_a_trace", 2);
    assert_eq!(broken.code, 0, "{}", broken.err);
    for rank in 0..2 {
        assert!(
            broken.out.contains(&format!("[{rank}] got 2 at wrong_programs/cases.rs:")),
            "{}",
            broken.out
        );
    }
    job("prints_in_a_fullgraph", 2)
        .expect_all(2, &["print: expected no host read of a traced tensor under fullgraph", "AT"]);
}

#[test]
fn handles_may_be_dropped_in_functions_that_several_lines_call() {
    let job = job("dropped_by_two", 2);
    assert_eq!(job.code, 0, "{}", job.err);
}

/// Correct programs that must not be refused.
#[test]
fn right_programs_are_not_refused() {
    for (case, ranks) in [
        ("write_after_send", 2),
        ("write_after_gather", 2),
        ("local", 2),
        ("slow_but_right", 3),
        ("kept_and_dropped", 2),
        ("thread_local", 2),
        ("dropped_messages", 2),
        ("longest_timeout", 2),
    ] {
        let job = job(case, ranks);
        assert_eq!(job.code, 0, "{case}: {}", job.err);
        for rank in 0..ranks {
            assert!(job.out.contains(&format!("[{rank}] got ")), "{case}: {}", job.out);
        }
    }
}

#[test]
fn d1_ranks_whose_environment_changes_results_or_behaviour_do_not_start() {
    let strict = if cfg!(debug_assertions) { ("0", "on", "off") } else { ("1", "off", "on") };
    for (variable, key, values) in [
        ("CONSORT_ISA=baseline".to_string(), "instruction set (CONSORT_ISA)", ["", "baseline"]),
        (format!("CONSORT_STRICT={}", strict.0), "strict messages (CONSORT_STRICT)", [strict.1, strict.2]),
        ("CONSORT_RETRACE=0".to_string(), "retraces (CONSORT_RETRACE)", ["on", "off"]),
    ] {
        let job = job_with("environment", 3, &variable);
        let parts = [
            "init: parity: expected equal values on every rank",
            "AT",
            key,
            "ranks 0,1",
            values[0],
            key,
            "rank 2",
            values[1],
            "note: start every rank with the same program, options and environment",
        ];
        job.expect_all(3, &parts);
        if variable.contains("ISA") {
            job.expect_all(3, &["note: CONSORT_ISA=avx2 or CONSORT_ISA=baseline on every rank"]);
        }
    }
    // What does not exist is refused, and the others are told.
    let job = job_with("environment", 2, "CONSORT_ISA=sse9");
    job.expect(
        1,
        &["init: CONSORT_ISA: expected an instruction set that this machine has: ", "got \"sse9\"", "AT"],
    );
    job.expect(0, &["CONSORT_ISA: expected an instruction set that this machine has: "]);
    let job = job_with("environment", 2, "CONSORT_LOG=foo");
    job.expect(1, &["init: CONSORT_LOG: expected topics out of ", "got \"foo\"", "AT"]);
    job.expect(0, &["CONSORT_LOG: expected topics out of "]);
}
