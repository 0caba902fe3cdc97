//! `consort explain`.

use serde_json::json;

use crate::scratch::{SUM, Scratch};

/// A sum over two ranks of something with two sizes, one of them bound by a guard.
const SIZED: &str = "mesh (tp: 2)

func @f(v0: f32[s0]{tp}, v1: f32[s1]{tp}) -> f32[s0]
where s0 == s1 {
    v2 = add v0, v1                                  : f32[s0]{tp}
    v3 = all_reduce_start[reduce=sum, over=tp] v2    : pending<f32[s0]>
    v4 = wait v3                                     : f32[s0]
    return v4
}
";

#[test]
fn explain_shows_memory_copies_cost_and_plan() {
    let scratch = Scratch::new();
    scratch.write("sum.csr", SUM);
    let expected = "\
@sum: 2 ops, 1 start
cost: 1 operations, 16 bytes moved, 8 bytes received
memory: 8 bytes, 8 alive at once
copied for communication: 8 bytes
  v0: 8 bytes (argument)
mesh (tp: 2)

func @sum(v0: f32[2]{tp} @arg0+0x0) -> f32[2]
";
    let text = scratch.run("explain sum.csr");
    assert_eq!((text.code, text.stderr.as_str()), (0, ""));
    assert!(text.stdout.starts_with(expected), "{}", text.stdout);
    assert!(text.stdout.contains("plan (rank 0, "), "{}", text.stdout);
    // Nothing need be copied of what is given away.
    let given = scratch.run("explain sum.csr --rank 1 --donate v0 --json").json();
    let func = &given["funcs"][0];
    assert_eq!((&given["ok"], &given["error"]), (&json!(true), &json!(null)));
    assert_eq!((&func["func"], &func["ops"], &func["starts"]), (&json!("sum"), &json!(2), &json!(1)));
    assert_eq!((&func["copied_bytes"], &func["copies"]), (&json!(0), &json!([])));
    assert!(func["plan"].as_str().unwrap().contains("plan (rank 1, "), "{func}");
    assert_eq!(func["program"], SUM);
    assert_eq!(scratch.run_with_input("explain -", SUM).parts(), text.parts());
}

#[test]
fn explain_takes_sizes_and_asks_for_them() {
    let scratch = Scratch::new();
    scratch.write("sized.csr", SIZED);
    let text = scratch.run("explain sized.csr --sizes s0=8,s1=8");
    assert_eq!((text.code, text.stderr.as_str()), (0, ""));
    assert!(text.stdout.starts_with("@f: 3 ops, 1 start\nguard: s0 == s1\n"), "{}", text.stdout);
    let error = "error: sized.csr: @f: expected a value for s1, got none\n  note: give --sizes s1=8\n";
    scratch.refuses("explain sized.csr --sizes s0=8", error);
    let error = "error: sized.csr: @f: --sizes: guard `s0 == s1` does not hold: 8 and 9\n";
    scratch.refuses("explain sized.csr --sizes s0=8,s1=9", error);
    for wrong in ["s0", "v0=8", "s0=-1", "s0=x"] {
        let error = format!("error: --sizes: expected items such as s0=8, got `{wrong}`\n");
        scratch.refuses(&format!("explain sized.csr --sizes {wrong}"), &error);
    }
    scratch.refuses(
        "explain sized.csr --sizes s0=8,s1=8,s2=8",
        "error: sized.csr: --sizes: no function has a symbol s2\n",
    );
}

#[test]
fn explain_refuses_what_is_wrong() {
    let scratch = Scratch::new();
    scratch.write("sum.csr", SUM);
    scratch.refuses("explain sum.csr --rank 2", "error: sum.csr: --rank: expected a rank below 2, got 2\n");
    let error = "error: sum.csr: --donate: expected parameters such as v0, got `v1`\n";
    scratch.refuses("explain sum.csr --donate v0,v1", error);
    scratch.write("wrong.csr", SUM.replace("pending<f32[2]>", "pending<f32[3]>"));
    let wrong = scratch.run("explain wrong.csr");
    assert_eq!((wrong.code, wrong.stdout.as_str()), (1, ""));
    assert!(wrong.stderr.contains("expected v1 to have type pending<f32[2]>"), "{}", wrong.stderr);
    let json = scratch.run("explain wrong.csr --json");
    assert_eq!((json.code, json.stderr.as_str()), (1, ""));
    assert_eq!((&json.json()["ok"], &json.json()["funcs"]), (&json!(false), &json!([])));
    assert!(json.json()["error"].as_str().unwrap().contains("expected v1 to have type"), "{}", json.stdout);
    assert_eq!(scratch.run("explain missing.csr").code, 1);
}
