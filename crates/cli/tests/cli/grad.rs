//! `consort opt --grad`: the program of a gradient, and what is said of it.

use serde_json::json;

use crate::scratch::Scratch;

/// The sum over two ranks of (x w)^2.
const LOSS: &str = "mesh (tp: 2)

func @loss(v0: f32[2]{tp}, v1: i32[2], v2: f32[2]) -> f32[] {
    v3 = mul v0, v2                                  : f32[2]{tp} ; loss.rs:3
    v4 = mul v3, v3                                  : f32[2]{tp} ; loss.rs:4
    v5 = sum[dims=[0], keep=false] v4                : f32[]{tp} ; loss.rs:4
    v6 = all_reduce_start[reduce=sum, over=tp] v5    : pending<f32[]> ; loss.rs:5
    v7 = wait v6                                     : f32[] ; loss.rs:5
    return v7
}
";

/// Arguments for it.
const CALL: &str = "; run: @loss([1, 2] | [3, 4], [0, 0], [5, 6]) ==";

/// By x 2 x w^2 on each rank, by w 2 x^2 w of both.
const BY_X: &str = "[50, 144] | [150, 288]";
const BY_W: &str = "[100, 240]";

/// The program that is printed, run on two ranks, gives these results.
#[track_caller]
fn gives(scratch: &Scratch, args: &str, results: &str) -> String {
    let made = scratch.run(args);
    assert_eq!((made.code, made.stderr.as_str()), (0, ""), "{args}");
    scratch.write("made.csr", format!("{}{CALL} {results}\n", made.stdout));
    let ran = scratch.run("exec made.csr -n 2");
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{args}: {}\n{}", ran.stdout, made.stdout);
    assert!(ran.stdout.contains(": @loss: ok\n"), "{}", ran.stdout);
    made.stdout
}

#[test]
fn opt_prints_a_gradient_that_runs() {
    let scratch = Scratch::new();
    scratch.write("loss.csr", LOSS);
    let text = gives(&scratch, "opt loss.csr --grad", &format!("970, {BY_X}, {BY_W}"));
    // Lines of the backward have the lines of the forward that they come from; comments say where sums are.
    assert!(text.lines().filter(|line| line.ends_with("; loss.rs:3")).count() > 2, "{text}");
    let said: Vec<&str> = text.lines().filter(|line| line.starts_with("; ")).collect();
    let by_x = "; gradient by argument 0: not summed over ranks";
    let by_w = "; gradient by argument 2: summed over tp for loss.rs:3";
    assert_eq!(said, [by_x, by_w]);
    let json = scratch.run("opt loss.csr --grad --json");
    assert_eq!((json.code, json.json()), (0, json!({ "ok": true, "text": text, "errors": [] })));
    let simple = gives(&scratch, "opt loss.csr --grad --passes", &format!("970, {BY_X}, {BY_W}"));
    assert!(simple.lines().count() < text.lines().count(), "{simple}");
    assert!(simple.ends_with(&format!("{by_x}\n{by_w}\n")), "{simple}");
    let json = scratch.run("opt loss.csr --grad --passes --json").json();
    assert_eq!(json["text"], json!(simple));
    assert_eq!(json["passes"][0]["name"], json!("fold"));
}

#[test]
fn opt_takes_the_gradient_by_some_arguments() {
    let scratch = Scratch::new();
    scratch.write("loss.csr", LOSS);
    let both = gives(&scratch, "opt loss.csr --grad=0,2", &format!("970, {BY_X}, {BY_W}"));
    assert_eq!(both, scratch.run("opt loss.csr --grad").stdout);
    gives(&scratch, "opt loss.csr --grad=2,0", &format!("970, {BY_W}, {BY_X}"));
    let one = gives(&scratch, "opt loss.csr --grad=0", &format!("970, {BY_X}"));
    // Nothing is summed but the loss.
    assert_eq!(one.matches("all_reduce_start").count(), 1, "{one}");
    assert_eq!(both.matches("all_reduce_start").count(), 2, "{both}");
}

#[test]
fn opt_refuses_a_gradient_that_there_is_not() {
    let scratch = Scratch::new();
    scratch.write("loss.csr", LOSS);
    let check = |args: &str, expected: &str| {
        let outcome = scratch.run(args);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (1, ""), "{args}");
        assert!(outcome.stderr.starts_with(&format!("error: {expected}")), "{}", outcome.stderr);
        let json = scratch.run(&format!("{args} --json"));
        let message = json.json()["errors"][0]["message"].as_str().expect("a message").to_string();
        assert_eq!((json.code, format!("error: {message}\n")), (1, outcome.stderr));
    };
    check("opt loss.csr --grad=1", "grad: argument 1: expected a float tensor, got i32[2]\n  note: ");
    check("opt loss.csr --grad=3", "grad: expected an argument below 3, got 3\n");
    check("opt loss.csr --grad --sums i32", "--sums: expected an element type of floats, got `i32`\n");
    scratch.write("loss.csr", LOSS.replace("-> f32[] ", "-> f32[]{tp} ").replace("return v7", "return v5"));
    check(
        "opt loss.csr --grad",
        "grad: expected a loss that is equal on all ranks, got one that differs over tp\n",
    );
    let alone = scratch.run("opt loss.csr --sums f32");
    assert!(alone.code != 0 && alone.stderr.contains("--grad"), "{}", alone.stderr);
}

#[test]
fn opt_sums_gradients_in_another_element_type() {
    let scratch = Scratch::new();
    let narrow = LOSS
        .replace("f32[2]", "bf16[2]")
        .replace("sum[dims=[0], keep=false] v4", "sum[dims=[0], keep=false] v8");
    let narrow = narrow.replace(
        "    v5 = ",
        "    v8 = cast[to=f32] v4                             : f32[2]{tp} ; loss.rs:4\n    v5 = ",
    );
    scratch.write("loss.csr", narrow);
    for (more, ty) in [("", "bf16"), (" --sums f32", "f32")] {
        let text = gives(&scratch, &format!("opt loss.csr --grad{more}"), &format!("970, {BY_X}, {BY_W}"));
        let sums: Vec<&str> = text.lines().filter(|line| line.contains("all_reduce_start")).collect();
        assert_eq!(sums.len(), 2, "{text}");
        assert!(sums[1].contains(&format!(": pending<{ty}[2]>")), "{text}");
    }
}

#[test]
fn opt_keeps_what_fits_a_budget() {
    let scratch = Scratch::new();
    scratch.write("loss.csr", LOSS);
    // The backward reads x w: two floats of 4 bytes.
    for (budget, kept) in [(1000, 8), (8, 8), (7, 0), (0, 0)] {
        let text = gives(
            &scratch,
            &format!("opt loss.csr --grad --budget {budget}"),
            &format!("970, {BY_X}, {BY_W}"),
        );
        assert!(text.contains(&format!("\n; {kept} bytes are kept for the backward\n")), "{text}");
        assert_eq!(text.matches(" = again ").count(), usize::from(kept == 0), "{text}");
    }
    assert!(!scratch.run("opt loss.csr --grad").stdout.contains("bytes"));
    let alone = scratch.run("opt loss.csr --budget 8");
    assert!(alone.code != 0 && alone.stderr.contains("--grad"), "{}", alone.stderr);
    let word = scratch.run("opt loss.csr --grad --budget much");
    assert!(
        word.code != 0 && word.stderr.contains("invalid value 'much' for '--budget <BYTES>'"),
        "{}",
        word.stderr
    );
}
