//! `consort exec` on programs that no machine could run: one quick error that names the op, its line and the option.

use std::time::{Duration, Instant};

use crate::scratch::{Outcome, Scratch, npy_f32};

/// Each function asks for something absurd.
const ABSURD: &str = "mesh (tp: 2)

func @constant() -> f32[] {
    v0 = constant[dtype=f32, shape=[1099511627776], value=1.0] : f32[1099511627776] ; big.rs:2
    v1 = exp v0                                      : f32[1099511627776]
    v2 = sum[dims=[0], keep=false] v1                : f32[]
    return v2
}

func @iota() -> f32[] {
    v0 = iota[dtype=f32, shape=[1099511627776], dim=0] : f32[1099511627776]
    v1 = sum[dims=[0], keep=false] v0                : f32[]
    return v1
}

func @square() -> f32[] {
    v0 = iota[dtype=f32, shape=[1000000000000, 1000000000000], dim=0] : f32[1000000000000,1000000000000]
    v1 = sum[dims=[0, 1], keep=false] v0             : f32[]
    return v1
}

func @returned(v0: f32[1]) -> f32[1000000000000] {
    v1 = broadcast[shape=[1000000000000]] v0         : f32[1000000000000]
    return v1
}

func @folded(v0: f32[1]) -> f32[] {
    v1 = broadcast[shape=[1000000000000]] v0         : f32[1000000000000]
    v2 = sum[dims=[0], keep=false] v1                : f32[]
    return v2
}

func @loops(v0: i64[]) -> i64[] {
    v1 = scan[length=1000000000, carries=1, slices=0] v0 : i64[] {
        body(v2: i64[]) {
            v3 = scan[length=1000000000, carries=1, slices=0] v2 : i64[] {
                body(v4: i64[]) {
                    v5 = neg v4                      : i64[]
                    return v5
                }
            }
            return v3
        }
    }
    return v1
}

func @matmul(v0: f32[1,1]) -> f32[] {
    v1 = broadcast[shape=[30000, 30000]] v0          : f32[30000,30000]
    v2 = matmul v1, v1                               : f32[30000,30000]
    v3 = sum[dims=[0, 1], keep=false] v2             : f32[]
    return v3
}

func @argument(v0: f32[1099511627776]) -> f32[1] {
    v1 = slice[start=[0], size=[1], step=[1]] v0     : f32[1]
    return v1
}

func @size(v0: i64[]) -> f32[] {
    v1 = to_size[symbols=[u0], min=0, max=none] v0   : size<u0>
    v2 = iota[dtype=f32, shape=[u0], dim=0]          : f32[u0]
    v3 = sum[dims=[0], keep=false] v2                : f32[]
    return v3
}

func @view(v0: i64[], v1: f32[1]) -> f32[u0] {
    v2 = to_size[symbols=[u0], min=0, max=none] v0   : size<u0>
    v3 = broadcast[shape=[u0]] v1                    : f32[u0]
    return v3
}

func @rounds(v0: i64[]{tp}) -> i64[]{tp} {
    v1 = to_size[symbols=[u0], min=0, max=none] v0   : size<u0>{tp}
    v2 = scan[length=u0, carries=1, slices=0] v0     : i64[]{tp} {
        body(v3: i64[]{tp}) {
            v4 = neg v3                              : i64[]{tp}
            return v4
        }
    }
    return v2
}

func @rounds_then_all(v0: i64[]{tp}) -> i64[] {
    v1 = to_size[symbols=[u0], min=0, max=none] v0   : size<u0>{tp}
    v2 = scan[length=u0, carries=1, slices=0] v0     : i64[]{tp} {
        body(v3: i64[]{tp}) {
            return v3
        }
    }
    v4 = all_reduce_start[reduce=sum, over=tp] v2    : pending<i64[]>
    v5 = wait v4                                     : i64[]
    return v5
}
";

/// The line of `ABSURD` on which a function has this text.
fn line(func: &str, text: &str) -> usize {
    let start = ABSURD.find(&format!("func @{func}(")).expect("a function");
    let at = start + ABSURD[start..].find(text).expect("a part of it");
    1 + ABSURD[..at].matches('\n').count()
}

/// Bytes of the plan of a function, as `consort explain` says.
fn plan_bytes(func: &str) -> u64 {
    let scratch = Scratch::new();
    let start = ABSURD.find(&format!("func @{func}(")).expect("a function");
    let end = start + ABSURD[start..].find("\n}\n").expect("its end") + 3;
    scratch.write("one.csr", format!("mesh (tp: 2)\n\n{}", &ABSURD[start..end]));
    scratch.run("explain one.csr --json").json()["funcs"][0]["peak_bytes"].as_u64().expect("a number")
}

/// Runs one line of `ABSURD`, which must be refused on every rank.
#[track_caller]
fn refused(call: &str, options: &str) -> String {
    let scratch = Scratch::new();
    scratch.write("absurd.csr", format!("{ABSURD}\n; run: {call}\n"));
    let begin = Instant::now();
    let Outcome { code, stdout, stderr } = scratch.run(&format!("exec absurd.csr -n 2{options}"));
    assert_eq!((code, stderr.as_str()), (1, "error: 1 of 1 run line failed\n"), "{stdout}");
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    assert!(stdout.matches("error[").count() <= 1, "{stdout}");
    let (head, error) = stdout.split_once('\n').expect("a line before the error");
    assert!(head.ends_with(": failed"), "{head}");
    // The limit depends on the machine, so it is masked.
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    let mut words: Vec<String> = error.split_inclusive([' ', '\n']).map(str::to_string).collect();
    if let Some(at) = words.iter().position(|word| word == "bytes ")
        && digits(words[at - 1].trim())
        && options.is_empty()
    {
        words[at - 1] = "N ".to_string();
    }
    words.concat()
}

const BYTES: &str = "    note: --limit-bytes raises the limit\n";
const STEPS: &str = "    note: --limit-steps raises the limit\n";
const OPERATIONS: &str = "    note: --limit-work raises the limit\n";

#[test]
fn more_memory_than_there_is() {
    // Elements of 4 bytes: `exp` is computed in place of the constant. The sum takes 12 bytes in transit.
    let each = 4 * (1u64 << 40);
    let all = plan_bytes("constant") + 12;
    assert!((each..each + 1024).contains(&all), "{all}");
    let expected = format!(
        "  error[run]: constant: rank 0: expected at most N bytes of memory, got {all}, {each} of them for v0\n    at big.rs:2\n{BYTES}"
    );
    assert_eq!(refused("@constant()", ""), expected);
    // A node without a source line gets its line in the program.
    let expected = format!(
        "  error[run]: iota: rank 0: expected at most N bytes of memory, got {all}, {each} of them for v0\n    at absurd.csr:{}\n{BYTES}",
        line("iota", "= iota")
    );
    assert_eq!(refused("@iota()", ""), expected);
    // The number of bytes overflows, so no plan is made, and the oracle reports the error.
    let shape = "[1000000000000, 1000000000000]";
    let expected = format!(
        "  error[run]: iota: rank 0: a tensor of shape {shape} has more than 134217728 elements\n    at v0 = iota[dtype=f32, shape={shape}, dim=0] : f32[1000000000000,1000000000000]  (absurd.csr:{})\n",
        line("square", "= iota")
    );
    assert_eq!(refused("@square()", ""), expected);
    let too_many = |got: &str| {
        format!(
            "  error[run]: return: rank 0: {got}: expected at most 134217728 elements, got 1000000000000\n    note: return a part of it, or a reduction of it\n"
        )
    };
    assert_eq!(refused("@returned(1)", ""), too_many("v1"));
    // A view of a data-dependent size is not planned: it is materialised.
    let expected = format!(
        "  error[run]: broadcast: rank 0: expected at most N bytes of memory, got 4000000000000\n    at absurd.csr:{}\n{BYTES}",
        line("view", "= broadcast")
    );
    assert_eq!(refused("@view(1000000000000, 1)", ""), expected);
}

#[test]
fn sizes_from_data_for_which_there_is_no_memory() {
    let expected = format!(
        "  error[run]: iota: rank 0: expected at most N bytes of memory, got 4000000000000\n    at absurd.csr:{}\n{BYTES}",
        line("size", "= iota")
    );
    assert_eq!(refused("@size(1000000000000)", ""), expected);
}

#[test]
fn more_work_than_anybody_waits_for() {
    // A sum reads 10^12 elements of 4 bytes, adds each, and writes one.
    let expected = format!(
        "  error[run]: sum: rank 0: expected at most 4000000000000 operations, got {}\n    at absurd.csr:{}\n{OPERATIONS}",
        5_000_000_000_000u64 + 4,
        line("folded", "= sum")
    );
    assert_eq!(refused("@folded(1)", ""), expected);
    // The outer loop, and 10^9 times an iteration with the inner loop, and 10^9 times an iteration with one op.
    let steps = 1 + 1_000_000_000u128 * (2 + 1_000_000_000 * 2);
    let expected = format!(
        "  error[run]: scan: rank 0: expected at most 100000000 steps, got {steps}\n    at absurd.csr:{}\n{STEPS}",
        line("loops", "= scan")
    );
    assert_eq!(refused("@loops(1)", ""), expected);
    // An addition and a multiplication for each of 30000^3, and one more for each element of the sum; the matrices of 4
    // bytes an element are read and written by the product, and read by the sum.
    let (n, side) = (900_000_000u64, 30_000);
    let expected = format!(
        "  error[run]: matmul: rank 0: expected at most 4000000000000 operations, got {}\n    at absurd.csr:{}\n{OPERATIONS}",
        2 * n * side + n + 4 * n * 4 + 4,
        line("matmul", "= matmul")
    );
    assert_eq!(refused("@matmul(1)", " --limit-bytes 100000000000"), expected);
    let expected = format!(
        "  error[run]: scan: rank 0: expected at most 100000000 steps, got {}\n    at absurd.csr:{}\n{STEPS}",
        2 + 2_000_000_000_000u64,
        line("rounds", "= scan")
    );
    assert_eq!(refused("@rounds(1000000000000)", ""), expected);
}

/// One rank exceeds its limit while the others wait for it: the error is that rank's.
#[test]
fn one_rank_that_is_refused_ends_all() {
    let expected = format!(
        "  error[run]: scan: rank 1: expected at most 100000000 steps, got {}\n    at absurd.csr:{}\n{STEPS}",
        2 + 1_000_000_000_000u64,
        line("rounds_then_all", "= scan")
    );
    assert_eq!(refused("@rounds_then_all(1 | 1000000000000)", ""), expected);
}

#[test]
fn the_oracle_refuses_the_same() {
    for (call, expected) in [
        (
            "@iota()",
            "  error[run]: iota: rank 0: a tensor of shape [1099511627776] has more than 134217728 elements\n    at v0 = iota",
        ),
        (
            "@loops(1)",
            "  error[run]: scan: rank 0: expected at most 10000000 steps, got 2000000002000000001\n    at v1 = scan",
        ),
        (
            "@rounds(1000000000000)",
            "  error[run]: scan: rank 0: expected at most 10000000 steps, got 2000000000002\n    at v2 = scan",
        ),
    ] {
        let error = refused(call, " --oracle");
        assert!(error.starts_with(expected), "{error}");
        assert!(!expected.contains("steps") || error.ends_with(STEPS), "{error}");
        assert!(error.contains("(absurd.csr:"), "{error}");
    }
}

#[test]
fn arguments_that_are_too_large() {
    for options in ["", " --oracle"] {
        let error = refused("@argument(1)", options);
        assert_eq!(error, "  v0: a tensor of shape [1099511627776] has more than 134217728 elements\n");
    }
    let scratch = Scratch::new();
    scratch.write(
        "neg.csr",
        "mesh ()\n\nfunc @neg(v0: f32[s0]) -> f32[s0] {\n    v1 = neg v0 : f32[s0]\n    return v1\n}\n",
    );
    scratch.write("x.npy", npy_f32(&[1.0; 1000]));
    // The result is computed in place of the argument, which is donated: 4 bytes an element. In transit the
    // argument and the result take 4 and 8 bytes an element each.
    let all = 1000 * (4 + 2 * (4 + 8));
    let run = |limit: u64| scratch.run(&format!("exec neg.csr -n 1 --input x.npy --limit-bytes {limit}"));
    let fits = run(all);
    assert_eq!((fits.code, fits.stderr.as_str()), (0, ""));
    let error = format!(
        "error[run]: parameter: rank 0: expected at most {} bytes of memory, got {all}, 4000 of them for v0\n  note: --limit-bytes raises the limit\n",
        all - 1
    );
    assert_eq!(run(all - 1).parts(), (1, "", error.as_str()));
    // Nothing is read of a file that is too large: 128 bytes before 4000 of data.
    let error = "error: @neg: v0: x.npy: expected at most 4127 bytes of memory, got 4128\n  note: --limit-bytes raises the limit\n";
    assert_eq!(run(4127).parts(), (1, "", error));
}

#[test]
fn limits_are_what_the_options_say() {
    let scratch = Scratch::new();
    let program = "mesh ()\n\nfunc @f(v0: f32[10]) -> f32[10] {\n    v1 = scan[length=20, carries=1, slices=0] v0 : f32[10] {\n        body(v2: f32[10]) {\n            v3 = exp v2 : f32[10]\n            return v3\n        }\n    }\n    return v1\n}\n\n; run: @f(0)\n";
    scratch.write("f.csr", program);
    // The loop, and 20 iterations of one op, which reads and writes 10 elements of 4 bytes.
    let (steps, operations) = (1 + 20 * 2, 20 * (10 + 80));
    for (option, noun, enough) in
        [("--limit-steps", "steps", steps), ("--limit-work", "operations", operations)]
    {
        for oracle in ["", " --oracle"] {
            let run = |limit: u64| scratch.run(&format!("exec f.csr -n 1 {option} {limit}{oracle}"));
            let fits = run(enough);
            assert_eq!(
                (fits.code, fits.stderr.as_str()),
                (0, ""),
                "{option} {enough}{oracle}: {}",
                fits.stdout
            );
            let refused = run(enough - 1);
            let error =
                format!("error[run]: scan: rank 0: expected at most {} {noun}, got {enough}\n", enough - 1);
            assert_eq!(refused.code, 1);
            assert!(refused.stdout.contains(&error), "{option}{oracle}: {}", refused.stdout);
            assert!(
                refused.stdout.ends_with(&format!("  note: {option} raises the limit\n")),
                "{}",
                refused.stdout
            );
        }
    }
}
