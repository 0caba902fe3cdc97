//! Wrong calls on real processes: each gives one clear error on every rank that needs it, and none hangs.
//!
//! The ranks are this test program itself: started with BAD_CALL in the environment, the test `rank_program` runs that
//! case and all other tests are filtered out.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "bad_calls/cases.rs"]
mod cases;

use std::process::{Command, exit};
use std::time::{Duration, Instant};

/// The program of the ranks, if this process is one.
#[test]
fn rank_program() {
    let Ok(case) = std::env::var("BAD_CALL") else { return };
    exit(match cases::play(&case) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{}", error.to_string().replace('\n', "|"));
            1
        }
    });
}

/// Both ranks' errors begin with this, as lines.
const BOTH: [(&str, &[&str]); 35] = [
    (
        "list_types",
        &[
            "all_reduce: call 0 on world: types, shapes, sizes, routes or factors must be the same on all ranks",
            "AT",
            "rank 0 all_reduce[reduce=sum, over=world] f32[4], bf16[4], i32[2] AT",
            "rank 1 all_reduce[reduce=sum, over=world] f32[4], f16[4], i32[2] AT",
        ],
    ),
    (
        "list_of_other_shapes",
        &["reduce_scatter_list: expected tensors of one shape and type, got f32[4] and f32[3]", "AT"],
    ),
    (
        "roots_differ",
        &[
            "broadcast: call 0 on world: the root must be the same on all ranks",
            "AT",
            "rank 0 broadcast[root=0, over=world] f32[4] AT",
            "rank 1 broadcast[root=1, over=world] f32[4] AT",
        ],
    ),
    (
        "shapes",
        &[
            "all_reduce: call 0 on world: the size must be the same on all ranks",
            "AT",
            "rank 0 all_reduce[reduce=sum, over=world] f32[4] AT",
            "rank 1 all_reduce[reduce=sum, over=world] f32[5] AT",
            "note: every member must make the same calls in the same order; look for a branch on the rank",
        ],
    ),
    (
        "turned",
        &[
            "all_reduce: call 0 on world: types, shapes, sizes, routes or factors must be the same on all ranks",
            "AT",
            "rank 0 all_reduce[reduce=sum, over=world] f32[2,3] AT",
            "rank 1 all_reduce[reduce=sum, over=world] f32[3,2] AT",
        ],
    ),
    (
        "gathered_types",
        &[
            "all_gather: call 0 on world: types, shapes, sizes, routes or factors must be the same on all ranks",
            "AT",
            "rank 0 all_gather[dims=[0], over=world] f32[4] AT",
            "rank 1 all_gather[dims=[0], over=world] i32[4] AT",
        ],
    ),
    (
        "dtypes",
        &[
            "all_reduce: call 0 on world: the element type must be the same on all ranks",
            "AT",
            "rank 0 all_reduce[reduce=sum, over=world] f32[4] AT",
            "rank 1 all_reduce[reduce=sum, over=world] i32[4] AT",
        ],
    ),
    (
        "reductions",
        &[
            "all_reduce: call 0 on world: the reduction must be the same on all ranks",
            "AT",
            "rank 0 all_reduce[reduce=sum, over=world] f32[4] AT",
            "rank 1 all_reduce[reduce=max, over=world] f32[4] AT",
        ],
    ),
    (
        "avg_of_integers",
        &[
            "all_reduce: `avg` is not defined for i32 (C1)",
            "AT",
            "note: `cast` to a float type first, or reduce with `sum` and divide",
        ],
    ),
    (
        "bits_of_floats",
        &["all_reduce: `xor` is not defined for f32 (C1)", "AT", "note: `cast` to an integer type first"],
    ),
    (
        "not_divisible",
        &["reduce_scatter: expected dimension 0 of size 3 to be divisible by 2 members (C3)", "AT"],
    ),
    ("no_dimension", &["all_gather: expected a dimension below 1, got 1 (C1)", "AT"]),
    ("splits_too_few", &["all_to_all: expected in_splits that add up to 4, got [1,1] (C2)", "AT"]),
    (
        "splits_one_way",
        &["all_to_all: expected both in_splits and out_splits or neither, got one (C1)", "AT"],
    ),
    ("splits_count", &["all_to_all: expected 2 splits each way, got 1 and 1 (C1)", "AT"]),
    (
        "splits_other_side",
        &[
            "all_to_all: call 0: splits must fit together",
            "AT",
            "rank 0 all_to_all[in_splits=[2, 2], out_splits=[1, 3], over=world] f32[4]: sends 8 bytes to rank 0 AT",
            "rank 0 all_to_all[in_splits=[2, 2], out_splits=[1, 3], over=world] f32[4]: expects 4 bytes of rank 0 AT",
        ],
    ),
    ("root_too_large", &["broadcast: expected a root below 2, the size of the group, got 7 (C1)", "AT"]),
    ("member_too_large", &["isend: expected a peer in 0..2, or -1 for none, got 7 (C2)", "AT"]),
    (
        "sizes_v_differ",
        &[
            "reduce_scatter_v: call 0 on world: types, shapes, sizes, routes or factors must be the same on all ranks",
            "AT",
        ],
    ),
    (
        "nobody_sends",
        &[
            "permute: expected every member to get something, but nobody sends to 0 (C3)",
            "AT",
            "note: `missing=zeros` gives such members zeros",
        ],
    ),
    (
        "list_lengths",
        &[
            "all_reduce: call 0 on world: the size must be the same on all ranks",
            "AT",
            "rank 0 all_reduce[reduce=sum, over=world] f32[4], f32[4] AT",
            "rank 1 all_reduce[reduce=sum, over=world] f32[4], f32[4], f32[4] AT",
        ],
    ),
    ("dims_of_list", &["reduce_scatter_coalesced: expected a dimension for each of 1 tensors, got 2", "AT"]),
    ("out_dtype", &["all_gather_into: expected f32[8] for the result, got i64[8]", "AT"]),
    ("out_shape", &["all_gather_into: expected f32[8] for the result, got f32[7]", "AT"]),
    (
        "mixed_dtypes",
        &[
            "add: expected operands of one element type, got f32 and i32 (C2)",
            "AT",
            "note: convert one with `cast`",
        ],
    ),
    ("unknown_axis", &["mesh: expected one of the axes world, got `tp`", "AT"]),
    (
        "unequal_lists",
        &["mesh: group `g`: lists must have equal sizes, but one has 2 ranks and another 0", "AT"],
    ),
    ("rank_in_two_lists", &["mesh: group `g`: rank 0 is listed twice", "AT"]),
    ("rank_of_no_list", &["mesh: group `g`: rank 9 is outside a mesh of 2 ranks", "AT"]),
    ("after_error", &["all_reduce: call 0 on world: the size must be the same on all ranks", "AT"]),
    ("mesh_is_gone", &["add: expected a tensor of this world, got one of a world that was dropped", "AT"]),
    ("other_world", &["all_reduce: expected tensors of the group's world, got one of another", "AT"]),
    (
        "axes_differ",
        &[
            "init: parity: expected equal values on every rank",
            "AT",
            "mesh rank 0 dp: 2",
            "mesh rank 1 tp: 2",
        ],
    ),
    ("second_init", &["init: the coordinator refuses this rank: rank "]),
    ("init_again", &["init: the coordinator refuses this rank: rank "]),
];

/// Where the ranks have different errors: those of rank 0, then those of rank 1.
const EACH: [(&str, [&[&str]; 2]); 4] = [
    (
        "message_length",
        [
            &[
                "exchange: rank 1 stopped: exchange: a message must have the type and shape that its receiver expects",
                "AT",
                "rank 0 send f32[4], tag 0 AT",
                "rank 1 receive f32[3], tag 0 AT",
            ],
            &[
                "exchange: a message must have the type and shape that its receiver expects",
                "AT",
                "rank 0 send f32[4], tag 0 AT",
                "rank 1 receive f32[3], tag 0 AT",
            ],
        ],
    ),
    (
        "sizes_v",
        [
            &[
                "all_gather_v[dim=0, sizes=[4, 5], over=world] f32[4]: call 0 on world: rank 1 has left the group || all_gather_v: rank 1 ",
                "AT",
            ],
            &["all_gather_v: expected dimension 0 to be 5, this member's entry of the sizes", "AT"],
        ],
    ),
    (
        "order",
        [
            &[
                "barrier: call 0 on world: the operation must be the same on all ranks",
                "AT",
                "rank 0 barrier[over=world] AT",
                "rank 1 all_reduce[reduce=sum, over=world] f32[4] AT",
            ],
            &[
                "all_reduce: call 0 on world: the operation must be the same on all ranks",
                "AT",
                "rank 0 barrier[over=world] AT",
                "rank 1 all_reduce[reduce=sum, over=world] f32[4] AT",
            ],
        ],
    ),
    (
        "rank_leaves",
        [
            &[
                "all_reduce[reduce=sum, over=world] f32[4]: call 0 on world: rank 1 has left the group || all_reduce: rank 1 ",
                "AT",
            ],
            &["mesh: expected one of the axes world, got `nothing`"],
        ],
    ),
];

/// Shorter than the deadline of operations: errors must be detected, not time out.
const SOON: Duration = Duration::from_secs(20);

/// The output of a case's ranks: the lines of one error, or none.
fn errors_of(case: &str) -> [Vec<String>; 2] {
    let start = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(["run", "-n", "2", "--timeout", "50", "--"]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", "rank_program", "--quiet", "--nocapture"]);
    // In every build: otherwise the sender of a small message that does not match learns of it only at the end.
    let output = command.env("BAD_CALL", case).env("CONSORT_STRICT", "1").output().unwrap();
    assert!(start.elapsed() < SOON, "{case}: {:?}", start.elapsed());
    assert_eq!(output.status.code(), Some(1), "{case}: {output:?}");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    [0, 1].map(|rank| {
        let prefix = format!("[{rank}] ");
        let mine: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        assert!(mine.len() < 2, "{case}: rank {rank} says more than one error: {mine:?}");
        // Columns are aligned, so runs of spaces are ignored.
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        mine.iter().flat_map(|line| line.split('|')).map(words).collect()
    })
}

/// Compares a rank's error with the expected one; `AT` is a line that the case's source marks.
fn check(case: &str, rank: usize, expected: &[&str], got: &[String]) {
    let source = include_str!("bad_calls/cases.rs").lines().enumerate();
    let marked = source.filter(|(_, line)| line.ends_with(&format!("// {case}")));
    let lines: Vec<String> =
        marked.map(|(i, _)| format!("crates/cli/tests/bad_calls/cases.rs:{}", i + 1)).collect();
    assert_eq!(expected.is_empty(), got.is_empty(), "{case}: rank {rank}: {got:?}");
    for (i, expected) in expected.iter().enumerate() {
        let line = got.get(i).unwrap_or_else(|| panic!("{case}: rank {rank}: no {expected:?} in {got:?}"));
        let fits = match expected.strip_suffix("AT") {
            Some(beginning) => lines.iter().any(|at| {
                *line == format!("{beginning}{at}") || (beginning.is_empty() && *line == format!("at {at}"))
            }),
            // A rank that fails leaves its group and then exits: a peer that waits for it may see either first.
            None => expected.split(" || ").any(|expected| line.starts_with(expected)),
        };
        assert!(fits, "{case}: rank {rank}: expected {expected:?} of {lines:?}, got {got:#?}");
    }
}

#[test]
fn every_wrong_call_is_an_error_where_it_is_needed() {
    if std::env::var_os("BAD_CALL").is_some() {
        return;
    }
    for (case, [zero, one]) in BOTH
        .iter()
        .map(|(case, both)| (case, [*both; 2]))
        .chain(EACH.iter().map(|(case, each)| (case, *each)))
    {
        let got = errors_of(case);
        check(case, 0, zero, &got[0]);
        check(case, 1, one, &got[1]);
    }
}
