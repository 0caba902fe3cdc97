//! Programs that are wrong, and programs that do not terminate.

use crate::scratch::{SUM, Scratch, npy};

/// Checks a program that `opt` and `exec` must refuse with the same text.
#[track_caller]
fn refused(text: &str, error: &str) {
    let scratch = Scratch::new();
    scratch.write("sum.csr", text);
    scratch.refuses("opt sum.csr", error);
    scratch.refuses("exec sum.csr -n 2", error);
}

#[test]
fn an_unknown_axis() {
    let error = "\
error[parse]: unknown axis or group `dp`
  --> sum.csr:4:44
     1 | mesh (tp: 2)
     2 | 
     3 | func @sum(v0: f32[2]{tp}) -> f32[2] {
>    4 |     v1 = all_reduce_start[reduce=sum, over=dp] v0    : pending<f32[2]> ; sum.rs:3
       |                                            ^
     5 |     v2 = wait v1                                     : f32[2]
     6 |     return v2
  note: the mesh has axes [tp] and groups []

1 error
";
    refused(&SUM.replace("over=tp", "over=dp"), error);
}

#[test]
fn an_axis_twice() {
    let error = "\
error[parse]: mesh: duplicate name `tp`
  --> sum.csr:1:6
>    1 | mesh (tp: 2, tp: 3)
       |      ^
     2 | 
     3 | func @sum(v0: f32[2]{tp}) -> f32[2] {

1 error
";
    refused(&SUM.replace("tp: 2", "tp: 2, tp: 3"), error);
}

#[test]
fn a_function_twice() {
    let (_, func) = SUM.split_once("\n\n").unwrap();
    let error = "\
error[verify]: expected distinct names of functions, got @sum twice (V11)
  --> sum.csr:8
     5 |     v2 = wait v1                                     : f32[2]
     6 |     return v2
     7 | }
>    8 | func @sum(v0: f32[2]{tp}) -> f32[2] {
     9 |     v1 = all_reduce_start[reduce=sum, over=tp] v0    : pending<f32[2]> ; sum.rs:3
    10 |     v2 = wait v1                                     : f32[2]

1 error
";
    refused(&format!("{SUM}{func}"), error);
}

#[test]
fn several_errors_at_once() {
    let text = SUM.replace("reduce=sum", "reduce=and").replace("wait v1 ", "neg v0  ");
    let scratch = Scratch::new();
    scratch.write("sum.csr", text);
    let outcome = scratch.run("opt sum.csr");
    let heads: Vec<&str> = outcome.stderr.lines().filter(|line| line.starts_with("error")).collect();
    assert!(heads.len() > 1, "{}", outcome.stderr);
    assert!(outcome.stderr.ends_with(&format!("\n\n{} errors\n", heads.len())), "{}", outcome.stderr);
}

#[test]
fn a_text_that_is_not_utf8() {
    let scratch = Scratch::new();
    scratch.write("sum.csr", b"mesh ()\n; caf\xe9\n");
    let error = "error: sum.csr:2: expected UTF-8 text, got byte 0xe9\n";
    scratch.refuses("opt sum.csr", error);
    scratch.refuses("exec sum.csr -n 1", error);
}

/// Only the ranks on which the condition holds take part.
const MAYBE: &str = "mesh (tp: 2)

func @maybe(v0: bool[]{tp}) -> i32[]{tp} {
    v1 = constant[dtype=i32, shape=[], value=1] : i32[]
    v2 = cond v0, v1 : i32[]{tp} {
        then(v3: i32[]) {
            v4 = all_reduce_start[reduce=sum, over=tp] v3 : pending<i32[]>
            v5 = wait v4 : i32[]
            return v5
        }
        else(v6: i32[]) {
            return v6
        }
    }
    return v2
}
";

#[test]
fn a_deadlock_names_who_waits_for_what() {
    let scratch = Scratch::new();
    scratch.write("maybe.csr", MAYBE);
    scratch.write("x0.npy", npy("|b1", "()", &[1]));
    scratch.write("x1.npy", npy("|b1", "()", &[0]));
    let deadlock = "\
error[deadlock]: no rank can go on
  rank 0 at v5 = wait v4 : i32[]  (maybe.csr:8)
    waits for all_reduce_start (maybe.csr:7), call 0 on tp: not started by rank 1
";
    scratch.refuses("exec maybe.csr -n 2 --input x{rank}.npy", deadlock);
    let json = scratch.run("exec maybe.csr -n 2 --func maybe --input x{rank}.npy --json").json();
    assert_eq!((&json["func"], json["error"].as_str()), (&"maybe".into(), Some(deadlock.trim_end())));
    // With equal conditions it completes, with the verifier's warning beside the results.
    let outcome = scratch.run("exec maybe.csr -n 2 --input x0.npy");
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "@maybe: ok\n  ranks 0,1: 2\n"));
    assert!(outcome.stderr.starts_with("warning[verify]: all_reduce_start: "), "{}", outcome.stderr);
}
