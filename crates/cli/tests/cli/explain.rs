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
  v0: 8 bytes (argument), for `all_reduce` at sum.rs:3
mesh (tp: 2)

func @sum(v0: f32[2]{tp} @arg0+0x0) -> f32[2]
";
    let text = scratch.run("explain sum.csr");
    assert_eq!((text.code, text.stderr.as_str()), (0, ""));
    assert!(text.stdout.starts_with(expected), "{}", text.stdout);
    assert!(text.stdout.contains("plan (rank 0, "), "{}", text.stdout);
    // A donated argument need not be copied.
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
    let error = "error: sized.csr: @f: --sizes: guard `s0 == s1` failed: 8 and 9\n";
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

/// Three sizes from data: one of any value, one with a range, one that a guard bounds; and a loop over the first.
const FROM_DATA: &str = "mesh ()

func @f(v0: i64[3], v1: f32[s0]) -> f32[]
where u2 <= s0 {
    v2, v3, v4 = to_size[symbols=[u0, u1, u2], min=0, max=none] v0 : size<u0>, size<u1>, size<u2>
    v5 = slice[start=[0], size=[1], step=[1]] v0     : i64[1]
    v6 = to_size[symbols=[u3], min=2, max=50] v5     : size<u3>
    v7 = iota[dtype=f32, shape=[u0], dim=0]          : f32[u0]
    v8 = sum[dims=[0], keep=false] v7                : f32[]
    v9 = iota[dtype=f32, shape=[u3], dim=0]          : f32[u3]
    v10 = sum[dims=[0], keep=false] v9               : f32[]
    v11 = iota[dtype=f32, shape=[u2], dim=0]         : f32[u2]
    v12 = sum[dims=[0], keep=false] v11              : f32[]
    v13 = scan[length=u1, carries=1, slices=0] v8    : f32[] {
        body(v14: f32[]) {
            v15 = neg v14                            : f32[]
            return v15
        }
    }
    v16 = add v13, v10                               : f32[]
    v17 = add v16, v12                               : f32[]
    return v17
}
";

#[test]
fn explain_says_what_it_takes_for_sizes_from_data() {
    let scratch = Scratch::new();
    scratch.write("data.csr", FROM_DATA);
    // A sum of n elements costs n operations, u0 and u1 may be anything, u2 at most s0, u3 at most 50. The loop of u1
    // iterations costs one operation each, the two additions one each.
    let flops = |u0: u64, u1: u64, u2: u64, u3: u64| u0 + u1 + u2 + u3 + 2;
    // Each `iota` is written and read again by its sum, 4 bytes an element, and each sum, addition and iteration reads
    // and writes numbers of 4 bytes.
    let bytes = |u0: u64, u1: u64, u2: u64, u3: u64| 8 * (u0 + u2 + u3) + 3 * 4 + 8 * u1 + 2 * 12;
    let text = scratch.run("explain data.csr --sizes s0=16");
    let expected = format!(
        "cost: {} operations, {} bytes moved, 0 bytes received\n  u0: 1024 (default)\n  u1: 1024 (default)\n  u2: 16 (range)\n  u3: 50 (range)\nmemory: ",
        flops(1024, 1024, 16, 50),
        bytes(1024, 1024, 16, 50)
    );
    assert_eq!((text.code, text.stderr.as_str()), (0, ""));
    assert!(text.stdout.contains(&expected), "expected\n{expected}in\n{}", text.stdout);
    // Three tensors of f32.
    let memory = format!(", and {} for sizes from data\n", 4 * (1024 + 16 + 50));
    assert!(text.stdout.contains(&memory), "{memory}{}", text.stdout);
    let json = scratch.run("explain data.csr --sizes s0=16,u1=3,u2=5,u3=2 --json").json();
    let func = &json["funcs"][0];
    assert_eq!(func["flops"], flops(1024, 3, 5, 2));
    assert_eq!(func["bytes"], bytes(1024, 3, 5, 2));
    assert_eq!(func["dynamic_bytes"], 4 * (1024 + 5 + 2));
    let estimate = |symbol: &str, value: i64, source: &str| json!({ "symbol": symbol, "value": value, "source": source });
    assert_eq!(
        func["estimates"],
        json!([
            estimate("u0", 1024, "default"),
            estimate("u1", 3, "hint"),
            estimate("u2", 5, "hint"),
            estimate("u3", 2, "hint")
        ])
    );
    let error = "error: data.csr: @f: --sizes: u3 is 1, but the function declares 2..=50\n";
    scratch.refuses("explain data.csr --sizes s0=16,u3=1", error);
    scratch.refuses(
        "explain data.csr --sizes s0=16,u4=1",
        "error: data.csr: --sizes: no function has a symbol u4\n",
    );
}
