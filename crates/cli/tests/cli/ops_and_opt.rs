//! `consort`, `consort ops` and `consort opt`.

use std::process::{Command, Stdio};

use serde_json::json;

use crate::scratch::{SUM, Scratch};

#[test]
fn consort_alone_prints_its_help() {
    let help = Scratch::new().run("");
    assert_eq!((help.code, help.stderr.as_str()), (0, ""));
    assert!(help.stdout.contains("Usage: consort [COMMAND]"), "{}", help.stdout);
    for command in ["ops", "opt", "explain", "exec"] {
        assert!(
            help.stdout.lines().any(|line| line.starts_with(&format!("  {command} "))),
            "{}",
            help.stdout
        );
    }
    let version = Scratch::new().run("--version");
    assert_eq!(version.parts(), (0, concat!("consort ", env!("CARGO_PKG_VERSION"), "\n"), ""));
}

#[test]
fn no_help_is_wider_than_the_page() {
    for command in
        ["--help", "ops --help", "opt --help", "check --help", "explain --help", "exec --help", "exec -h"]
    {
        let help = Scratch::new().run(command);
        assert_eq!(help.code, 0, "{command}");
        assert!(help.stdout.lines().all(|line| line.chars().count() <= 100), "{command}\n{}", help.stdout);
    }
}

#[test]
fn ops_lists_all_by_kind() {
    let list = Scratch::new().run("ops");
    assert_eq!((list.code, list.stderr.as_str()), (0, ""));
    let first = "Communication\n  \
        all_reduce_start[reduce, over] x, more..            -  Reduces tensors over the members; every\n";
    assert!(list.stdout.starts_with(first), "{}", list.stdout);
    for row in [
        "Arithmetic",
        "  add x, y      elementwise, in place  The sum.",
        "  slice[start, size, step] x   view                \
        A box of the operand: in each dimension `size`",
        "  wait pending                                        -  \
        Waits for a start and gives its tensors.",
    ] {
        assert!(list.stdout.lines().any(|line| line == row), "{row}\n{}", list.stdout);
    }
}

#[test]
fn ops_explains_one() {
    let page = Scratch::new().run("ops softmax");
    let expected = "\
softmax[dim=..] x

exp(x) over the sum of exp(x) along a dimension, computed from x less its maximum.

Constraints
  C1  The element type is a float type.
  C2  The dimension exists.
  C3  The dimension has at least one element.

Attributes
  dim  Along which dimension.
       takes number

Example
  mesh ()

  func @f(v0: f32[2,2]) -> f32[2,2] {
      v1 = softmax[dim=1] v0 : f32[2,2]
      return v1
  }
  ; run: @f([[0, 0], [0, -inf]]) == [[0.5, 0.5], [1, 0]]

Kind       Composites
Kernel     softmax, in place
Cost       20 flops, 32 bytes of memory, 0 bytes received, on each rank of the example
Gradient   ";
    assert_eq!((page.code, page.stderr.as_str()), (0, ""));
    assert_eq!(page.stdout.split_inclusive("\nGradient   ").next(), Some(expected));
    assert!(page.stdout.ends_with("\nExpansion  max, broadcast, sub, exp, sum, broadcast, div\n"));
}

#[test]
fn ops_as_json_has_every_op() {
    let scratch = Scratch::new();
    let all = scratch.run("ops --json").json();
    let names: Vec<&str> = all.as_array().unwrap().iter().map(|op| op["name"].as_str().unwrap()).collect();
    assert!(names.len() >= 60 && names.contains(&"exchange_start"), "{names:?}");
    let one = scratch.run("ops concat --json").json();
    let concat = &one[0];
    assert_eq!(one.as_array().unwrap().len(), 1);
    assert_eq!((&concat["kind"], &concat["args"]), (&json!("Shape"), &json!(["x", "more"])));
    assert_eq!((&concat["variadic"], &concat["attrs"][0]["name"]), (&json!(true), &json!("dim")));
    assert_eq!(concat["constraints"][0]["rule"], json!("C1"));
    assert!(concat["example"].as_str().unwrap().starts_with("mesh ("));
    assert_eq!(concat["kernel"], json!({ "family": "movement", "in_place": false, "view": false }));
    assert!(concat["gradient"].is_string() && concat["doc"].is_string());
}

#[test]
fn a_misspelled_op_is_answered_with_the_nearest() {
    let scratch = Scratch::new();
    let error = "error: no op `all_reduce`\n  note: there is an op `all_reduce_start`\n";
    scratch.refuses("ops all_reduce", error);
    scratch.refuses("ops softmaxx", "error: no op `softmaxx`\n  note: there is an op `softmax`\n");
    scratch.refuses("ops ?", "error: no op `?`\n  note: `consort ops` lists them\n");
}

#[test]
fn opt_prints_the_canonical_text_of_a_file_and_of_the_standard_input() {
    let scratch = Scratch::new();
    let untidy = SUM.replace("    v", "v").replace("f32[2] {", "f32[2]\n{ ; a comment");
    assert_ne!(untidy, SUM);
    scratch.write("sum.csr", &untidy);
    assert_eq!(scratch.run("opt sum.csr").parts(), (0, SUM, ""));
    assert_eq!(scratch.run_with_input("opt -", &untidy).parts(), (0, SUM, ""));
    let json = scratch.run("opt sum.csr --json");
    assert_eq!((json.code, json.json()), (0, json!({ "ok": true, "text": SUM, "errors": [] })));
}

#[test]
fn opt_as_json_has_the_errors_and_the_exit_code_too() {
    let scratch = Scratch::new();
    scratch.write("sum.csr", SUM.replace("pending<f32[2]>", "pending<f32[3]>"));
    let json = scratch.run("opt sum.csr --json");
    let error = json!({
        "code": "verify",
        "rule": "V3",
        "message": "all_reduce_start: expected v1 to have type pending<f32[2]>, got pending<f32[3]>",
        "line": 4,
        "column": null,
        "loc": "sum.rs:3",
        "note": null,
    });
    assert_eq!((json.code, json.stderr.as_str()), (1, ""));
    assert_eq!(json.json()["errors"][0], error);
    assert_eq!(json.json()["text"], json!(SUM.replace("pending<f32[2]>", "pending<f32[3]>")));
    let json = scratch.run_with_input("opt - --json", "mesh (tp 2)");
    let error = &json.json()["errors"][0];
    assert_eq!((json.code, &error["line"], &error["column"]), (1, &json!(1), &json!(10)));
    let json = scratch.run("opt missing.csr --json");
    assert_eq!((json.code, &json.json()["errors"][0]["code"]), (1, &json!("input")));
}

/// A sum over two ranks with something for each pass to do.
const ROUGH: &str = "mesh (tp: 2)

func @f(v0: f32[2]{tp}) -> (f32[2], f32[2]) {
    v1 = neg v0                                      : f32[2]{tp}
    v2 = neg v1                                      : f32[2]{tp}
    v3 = all_reduce_start[reduce=sum, over=tp] v0    : pending<f32[2]>
    v4 = all_reduce_start[reduce=sum, over=tp] v2    : pending<f32[2]>
    v5 = wait v3                                     : f32[2]
    v6 = wait v4                                     : f32[2]
    return v5, v6
}
";

fn simple(lines: &str, results: &str) -> String {
    format!(
        "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{{tp}}) -> (f32[2], f32[2]) {{\n{lines}    return {results}\n}}\n"
    )
}

const NEG: &str = "    v1 = neg v0                                      : f32[2]{tp}\n";
const ONCE: &str = "    v3 = all_reduce_start[reduce=sum, over=tp] v0    : pending<f32[2]>
    v5 = wait v3                                     : f32[2]\n";

#[test]
fn opt_runs_all_passes_or_one_or_some_rewrites() {
    let scratch = Scratch::new();
    scratch.write("rough.csr", ROUGH);
    assert_eq!(scratch.run("opt rough.csr").parts(), (0, ROUGH, ""));
    assert_eq!(scratch.run("opt rough.csr --passes").parts(), (0, simple(ONCE, "v5, v5").as_str(), ""));
    let folded = ROUGH.replace("    v2 = neg v1                                      : f32[2]{tp}\n", "");
    let folded = folded.replace("over=tp] v2 ", "over=tp] v0 ");
    assert_eq!(scratch.run("opt rough.csr --pass fold").parts(), (0, folded.as_str(), ""));
    assert_eq!(scratch.run("opt rough.csr --pass share").parts(), (0, ROUGH, ""));
    let shared = simple(&format!("{NEG}{ONCE}"), "v5, v5");
    assert_eq!(scratch.run("opt rough.csr --passes --fuel 2").parts(), (0, shared.as_str(), ""));
    let json = scratch.run("opt rough.csr --passes --json").json();
    let ran = |name: &str, rewrites: u64| json!({ "name": name, "rewrites": rewrites });
    let rounds = [("fold", 1), ("share", 1), ("remove", 1), ("fold", 0), ("share", 0), ("remove", 0)]
        .map(|(n, r)| ran(n, r));
    assert_eq!(json, json!({ "ok": true, "text": simple(ONCE, "v5, v5"), "errors": [], "passes": rounds }));
}

#[test]
fn opt_writes_what_each_pass_has_left() {
    let scratch = Scratch::new();
    scratch.write("rough.csr", ROUGH);
    assert_eq!(scratch.run("opt rough.csr --passes --dump out/stages").code, 0);
    let text = |name: &str| String::from_utf8(scratch.read(&format!("out/stages/{name}"))).unwrap();
    assert_eq!(text("00-input.csr"), ROUGH);
    assert!(!text("01-fold.csr").contains("v2"));
    assert_eq!(text("02-share.csr"), simple(&format!("{NEG}{ONCE}"), "v5, v5"));
    assert_eq!(text("03-remove.csr"), simple(ONCE, "v5, v5"));
    assert_eq!(std::fs::read_dir(scratch.path("out/stages")).unwrap().count(), 4);
    let error = "error: out/stages/00-input.csr exists\n  note: --force overwrites it\n";
    scratch.refuses("opt rough.csr --passes --dump out/stages", error);
    assert_eq!(scratch.run("opt rough.csr --passes --dump out/stages --force").code, 0);
}

#[test]
fn opt_lists_its_passes_and_refuses_others() {
    let scratch = Scratch::new();
    scratch.write("rough.csr", ROUGH);
    let list = "fold    computes what is constant, and drops ops that change nothing\n\
                share   computes and communicates equal things once\n\
                remove  removes what nothing uses\n";
    assert_eq!(scratch.run("opt --list").parts(), (0, list, ""));
    assert_eq!(scratch.run("opt --list --json").json()[2]["name"], json!("remove"));
    let error = "error: no pass `fuse`\n  note: `consort opt --list` lists them\n";
    scratch.refuses("opt rough.csr --pass fuse", error);
    let error =
        "error: --fuel: expected passes to run, got none\n  note: --passes runs all, --pass NAME runs one\n";
    scratch.refuses("opt rough.csr --fuel 3", error);
    scratch.refuses("opt rough.csr --dump out", &error.replace("--fuel", "--dump"));
    let plan = SUM
        .replace("f32[2]{tp})", "f32[2]{tp} @arg0+0x0)")
        .replace("f32[2] {", "f32[2]\nplan (rank 0, arg0: 0x8, heap: 0x8) {");
    let plan = plan.replace("pending<f32[2]> ;", "pending<f32[2]> @heap+0x0 queue tp #0 lease v0 ;");
    scratch.write("plan.csr", plan.replace(": f32[2]\n    return", ": f32[2] @heap+0x0\n    return"));
    let error = "error: @sum: expected a program, got a plan\n  \
                 note: passes change what is computed, and a plan has places for it already\n";
    scratch.refuses("opt plan.csr --passes", error);
    let json = scratch.run("opt plan.csr --passes --json");
    assert_eq!((json.code, &json.json()["errors"][0]["code"]), (1, &json!("input")));
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_consort"))
        .args(["ops", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap()), (Some(0), String::new()));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_the_machines_failure() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_consort")).arg("ops").stdout(full).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let expected = "error: cannot write to the standard output: No space left on device (os error 28)\n";
    assert_eq!((output.status.code(), stderr.as_str()), (Some(2), expected));
}
