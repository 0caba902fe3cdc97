//! The limits of an oracle run: the last byte, step and operation allowed, and the first that is not.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort_ir::limits::Limits;
use consort_ir::literal::Literal;
use consort_ir::ops::OpTable;
use consort_ir::text::parse;
use consort_oracle::{OracleError, run_within};
use consort_types::Dtype;

const FREE: Limits = Limits { bytes: u64::MAX, steps: u64::MAX, operations: u64::MAX };

/// Asserts that a function of one rank runs within these limits but not within slightly smaller ones.
#[track_caller]
fn check(text: &str, inputs: &[Vec<Literal>], enough: Limits, too_little: Limits, error: &str) {
    let program = parse(text, &OpTable::built_in()).unwrap().program;
    let run = |limits| run_within(&program, &program.funcs[0].name, inputs, &limits);
    assert!(run(enough).is_ok(), "{:?}", run(enough).err().map(|error| error.to_string()));
    assert_eq!(run(too_little).unwrap_err().to_string(), error);
}

fn floats(n: usize) -> Literal {
    Literal::floats(Dtype::F32, vec![n], vec![1.0; n])
}

#[test]
fn bytes_of_all_values_count_and_what_is_overwritten_does_not() {
    let text = "mesh ()\n\nfunc @f(v0: f32[10]) -> f32[10] {\n    v1 = neg v0 : f32[10]\n    v2 = exp v1 : f32[10] ; m.rs:3\n    return v2\n}\n";
    // Three values of ten elements of 8 bytes.
    let bytes = |bytes| Limits { bytes, ..FREE };
    let error = "error[run]: exp: rank 0: expected at most 239 bytes of memory, got 240\n  at v2 = exp v1 : f32[10]  (m.rs:3)";
    check(text, &[vec![floats(10)]], bytes(240), bytes(239), error);
    let error =
        "error[run]: parameter: rank 0: expected at most 79 bytes of memory, got 80\n  at the start of @f";
    check(text, &[vec![floats(10)]], bytes(240), bytes(79), error);
    // Each iteration overwrites the values of the previous one: the operand, the carry, the next one, and the result.
    let text = "mesh ()\n\nfunc @f(v0: f32[10]) -> f32[10] {\n    v1 = scan[length=100, carries=1, slices=0] v0 : f32[10] {\n        body(v2: f32[10]) {\n            v3 = neg v2 : f32[10]\n            return v3\n        }\n    }\n    return v1\n}\n";
    let error =
        "error[run]: neg: rank 0: expected at most 239 bytes of memory, got 240\n  at v3 = neg v2 : f32[10]";
    check(text, &[vec![floats(10)]], bytes(320), bytes(239), error);
}

#[test]
fn what_is_in_flight_counts_until_it_is_waited_for() {
    let text = "mesh (tp: 2)\n\nfunc @f(v0: f32[10]{tp}) -> f32[10] {\n    v1 = scan[length=50, carries=1, slices=0] v0 : f32[10]{tp} {\n        body(v2: f32[10]{tp}) {\n            v3 = all_reduce_start[reduce=max, over=tp] v2 : pending<f32[10]>\n            v4 = wait v3 : f32[10]\n            return v4\n        }\n    }\n    v5 = all_reduce_start[reduce=max, over=tp] v1 : pending<f32[10]>\n    v6 = wait v5 : f32[10]\n    return v6\n}\n";
    let bytes = |bytes| Limits { bytes, ..FREE };
    // On each of two ranks: v0, v2, v4 and v1, and the operand and the result of the second start.
    let error = "error[run]: all_reduce_start: rank 1: expected at most 959 bytes of memory, got 960\n  at v5 = all_reduce_start[reduce=max, over=tp] v1 : pending<f32[10]>";
    check(text, &[vec![floats(10)], vec![floats(10)]], bytes(960), bytes(959), error);
}

#[test]
fn steps_are_nodes_and_iterations() {
    let text = "mesh ()\n\nfunc @f(v0: f32[10]) -> f32[10] {\n    v1 = neg v0 : f32[10]\n    v2 = scan[length=5, carries=1, slices=0] v1 : f32[10] { ; m.rs:3\n        body(v3: f32[10]) {\n            v4 = neg v3 : f32[10]\n            v5 = exp v4 : f32[10]\n            return v5\n        }\n    }\n    return v2\n}\n";
    let steps = |steps| Limits { steps, ..FREE };
    // The first op, the loop, and five iterations of two ops. The loop is refused as a whole.
    let error = "error[run]: scan: rank 0: expected at most 16 steps, got 17\n  at v2 = scan[length=5, carries=1, slices=0] v1 : f32[10]  (m.rs:3)";
    check(text, &[vec![floats(10)]], steps(17), steps(16), error);
}

#[test]
fn operations_are_arithmetic_and_bytes() {
    let text = "mesh ()\n\nfunc @f(v0: f32[3,4], v1: f32[4,5]) -> f32[3,5] {\n    v2 = matmul v0, v1 : f32[3,5]\n    return v2\n}\n";
    let inputs = vec![vec![
        Literal::floats(Dtype::F32, vec![3, 4], vec![1.0; 12]),
        Literal::floats(Dtype::F32, vec![4, 5], vec![1.0; 20]),
    ]];
    let operations = |operations| Limits { operations, ..FREE };
    // A multiplication and an addition for each of 3*4*5, and 12 + 20 + 15 elements of 4 bytes.
    let all = 2 * 3 * 4 * 5 + 4 * (12 + 20 + 15);
    let error = format!(
        "error[run]: matmul: rank 0: expected at most {} operations, got {all}\n  at v2 = matmul v0, v1 : f32[3,5]",
        all - 1
    );
    check(text, &inputs, operations(all), operations(all - 1), &error);
}

#[test]
fn inputs_that_do_not_fit_have_facts() {
    let text = "mesh ()\n\nfunc @f(v0: f32[2]) -> f32[2] {\n    v1 = neg v0 : f32[2]\n    return v1\n}\n";
    let program = parse(text, &OpTable::built_in()).unwrap().program;
    let failed = |inputs: &[Vec<Literal>]| match run_within(&program, "f", inputs, &FREE) {
        Err(OracleError::Input(failure)) => *failure,
        other => panic!("{other:?}"),
    };
    let failure = failed(&[vec![floats(3)]]);
    assert_eq!(failure.to_string(), "@f: rank 0: argument v0: expected f32[2], got f32[3]");
    assert_eq!((&failure.expected[..], &failure.got[..]), ("f32[2]", "f32[3]"));
    let failure = failed(&[vec![]]);
    assert_eq!((&failure.expected[..], &failure.got[..]), ("1 arguments", "0"));
}
