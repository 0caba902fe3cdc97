//! Reading, checking, simplifying and printing take time linear in the text, whatever it consists of.
//!
//! Each case is run at one size and at eight times that size. Linear time gives a ratio of 8, quadratic time 64, so
//! the bound between them is far from both. Time is the processor time of the thread, which other load on the machine
//! hardly changes, and the best of several runs counts.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::fmt::Write;
use std::time::Duration;

use consort_ir::ops::OpTable;
use consort_ir::text::{parse, print};
use consort_ir::verify::verify;
use consort_passes::{PASSES, PassCx, simplify};
use rustix::time::{ClockId, clock_gettime};

const TIMES: usize = 8;
const BOUND: u32 = 24;

/// The processor time of this thread.
fn now() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// From text to text.
fn run(text: &str) -> Duration {
    let begin = now();
    let parsed = parse(text, &OpTable::built_in()).unwrap();
    let errors = verify(&parsed.program);
    if errors.is_empty() {
        let simplified = simplify(&parsed.program, PASSES, &mut PassCx::default()).unwrap();
        assert!(!print(&simplified).is_empty());
    }
    let lines: Vec<&str> = text.lines().collect();
    let rendered: usize = errors.iter().map(|error| error.render("t", &lines, &parsed.lines).len()).sum();
    assert_eq!(rendered > 0, !errors.is_empty());
    now() - begin
}

/// Asserts that eight times as much takes less than `BOUND` times as long.
#[track_caller]
fn check(what: &str, n: usize, text: impl Fn(usize) -> String) {
    let (small, large) = (text(n), text(TIMES * n));
    let (mut few, mut many) = (Duration::MAX, Duration::MAX);
    // More runs only if the first ones are too slow.
    for round in 0..12 {
        few = few.min(run(&small));
        many = many.min(run(&large));
        if round >= 1 && many < few * BOUND {
            return;
        }
    }
    panic!("{what}: {n} take {few:?}, {} take {many:?}", TIMES * n);
}

fn list(n: usize, one: impl Fn(usize) -> String) -> String {
    (0..n).map(one).collect::<Vec<_>>().join(", ")
}

#[test]
fn functions() {
    check("functions", 1500, |n| {
        let mut text = "mesh ()\n".to_string();
        for i in 0..n {
            write!(text, "\nfunc @f{i}(v0: f32[4]) -> f32[4] {{\n    return v0\n}}\n").unwrap();
        }
        text
    });
}

/// All names are equal, so every function but the first is an error, which is shown with its lines.
#[test]
fn errors() {
    check("errors", 800, |n| {
        let func = "\nfunc @f(v0: f32[4]) -> f32[4] {\n    return v0\n}\n";
        format!("mesh ()\n{}", func.repeat(n))
    });
}

#[test]
fn ops() {
    check("ops", 1000, |n| {
        let mut text = "mesh ()\n\nfunc @f(v0: f32[s0,4]) -> f32[s0,4] {\n".to_string();
        for i in 0..n {
            let op = ["tanh", "neg", "exp", "neg"][i % 4];
            writeln!(text, "    v{} = {op} v{i} : f32[s0,4] ; m.rs:{i}", i + 1).unwrap();
        }
        write!(text, "    return v{n}\n}}\n").unwrap();
        text
    });
}

#[test]
fn symbols() {
    check("symbols", 800, |n| {
        let params = list(n, |i| format!("v{i}: f32[s{i}]"));
        format!(
            "mesh ()\n\nfunc @f({params}) where {} {{\n    return\n}}\n",
            list(n, |i| format!("s{i} in 1..=64"))
        )
    });
}

#[test]
fn guards() {
    check("guards", 800, |n| {
        let params = list(n + 1, |i| format!("v{i}: f32[s{i}]"));
        let guards = list(n, |i| format!("s{i} <= s{}", i + 1));
        format!("mesh ()\n\nfunc @f({params}) where {guards} {{\n    return\n}}\n")
    });
}

#[test]
fn guards_on_sizes_from_data() {
    check("guards on sizes from data", 500, |n| {
        let guards = list(n, |i| format!("u{i} <= 64"));
        let mut text = format!("mesh ()\n\nfunc @f(v0: i64[]) -> i64[] where {guards} {{\n");
        for i in 0..n {
            writeln!(text, "    v{} = to_size[symbols=[u{i}], min=0, max=none] v0 : size<u{i}>", i + 1)
                .unwrap();
        }
        text + "    return v0\n}\n"
    });
}

/// Symbols that end with a block, among many that do not.
#[test]
fn sizes_in_blocks() {
    check("sizes in blocks", 250, |n| {
        let params = list(n, |i| format!("v{i}: f32[s{i}]"));
        let guards = list(n, |i| format!("u{i} <= s{i}"));
        let mut text =
            format!("mesh ()\n\nfunc @f({params}, v{n}: bool[], v{}: i64[]) where {guards} {{\n", n + 1);
        for i in 0..n {
            let v = n + 2 + 3 * i;
            write!(
                text,
                "    cond v{n}, v{0} {{\n then(v{v}: i64[]) {{\n v{1} = to_size[symbols=[u{i}], min=0, max=none] v{v} : size<u{i}>\n return\n }}\n else(v{2}: i64[]) {{\n return\n }}\n }}\n",
                n + 1,
                v + 1,
                v + 2
            )
            .unwrap();
        }
        text + "    return\n}\n"
    });
}

#[test]
fn groups() {
    check("groups", 800, |n| {
        let mut text = format!("mesh (tp: {})\n", 8 * 800);
        for i in 0..n {
            writeln!(text, "group g{i} = [[{i}]]").unwrap();
        }
        text + "\nfunc @f(v0: f32[4]) -> f32[4] {\n    return v0\n}\n"
    });
}
