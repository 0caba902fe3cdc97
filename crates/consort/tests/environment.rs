//! Variables of the environment that `init` refuses.
//!
//! The ranks are this program itself: the test `a_rank`, which does nothing unless the environment says so.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::process::{Command, Output, Stdio};

use consort::{Dtype, Tensor};

const CHILD: &str = "ENVIRONMENT_TEST";

/// In a child, becomes a rank as the environment says, prints the errors, and exits with 7 if there are any.
#[test]
fn a_rank() {
    let Ok(how) = std::env::var(CHILD) else { return };
    let outcomes = match &how[..] {
        "init" => vec![consort::init().map(drop)],
        _ => consort::spawn(2, |_| Ok(())),
    };
    let failed = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
    let failed = failed.map(|error| eprintln!("{error}")).count();
    std::process::exit(if failed > 0 { 7 } else { 0 });
}

fn start(how: &str, variables: &[(&str, &str)]) -> std::process::Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_rank", "--nocapture"]).env(CHILD, how).envs(variables.iter().copied());
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn end(child: std::process::Child) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

const TOPICS: &str =
    "CONSORT_LOG: expected topics out of program, guards, breaks, recompiles, plan, all, got \"foo\"";

#[test]
fn a_log_that_does_not_exist_is_an_error_of_init() {
    let (code, text) = end(start("init", &[("CONSORT_LOG", "plan,foo")]));
    assert!(code == Some(7) && text.starts_with(&format!("init: {TOPICS}\n  at ")), "{text}");
    let (code, text) = end(start("spawn", &[("CONSORT_LOG", "plan,foo")]));
    assert!(code == Some(7) && text.matches(&format!("spawn: {TOPICS}")).count() == 2, "{text}");
    let (code, text) = end(start("init", &[("CONSORT_LOG_RANK", "first")]));
    let rank = "init: CONSORT_LOG_RANK: expected a rank, or `all`, got \"first\"";
    assert!(code == Some(7) && text.starts_with(rank), "{text}");
    for right in ["plan,breaks", "all", ""] {
        assert_eq!(end(start("init", &[("CONSORT_LOG", right)])).0, Some(0), "{right}");
    }
}

#[test]
fn d1_an_instruction_set_that_the_machine_lacks_is_an_error_and_a_smaller_one_is_used() {
    let wanted = "CONSORT_ISA: expected an instruction set that this machine has: ";
    for (how, op) in [("init", "init"), ("spawn", "spawn")] {
        let (code, text) = end(start(how, &[("CONSORT_ISA", "sse9")]));
        assert!(code == Some(7) && text.starts_with(&format!("{op}: {wanted}")), "{text}");
        assert!(text.contains("baseline, got \"sse9\"\n  at "), "{text}");
        assert_eq!(end(start(how, &[("CONSORT_ISA", "baseline")])).0, Some(0));
    }
}

/// Ops whose kernels share out their work, on operands that are large enough for it.
fn shared_out() -> consort::Result<Vec<Vec<f32>>> {
    let normal = |shape: &[usize], key| Tensor::normal(Dtype::F32, shape, key);
    let (x, y) = (normal(&[311, 517], 1)?, normal(&[517, 203], 2)?);
    let heads = normal(&[1, 4, 129, 32], 3)?;
    let results = [
        x.matmul(&y)?,
        normal(&[8, 4096], 6)?.matmul(&normal(&[4096, 64], 7)?)?,
        x.sum(&[0], false)?,
        x.sum_all()?,
        normal(&[1 << 20], 8)?.sum_all()?,
        x.softmax(1)?,
        heads.attention(&heads, &heads, 0.2, None)?,
        normal(&[2, 8, 64, 64], 4)?.conv2d(&normal(&[8, 8, 3, 3], 5)?, [1, 1], [1, 1], [1, 1], 1)?,
        normal(&[1 << 20], 9)?.exp()?,
    ];
    results.iter().map(Tensor::to_vec::<f32>).collect()
}

#[test]
fn d1_results_do_not_depend_on_the_number_of_threads() {
    let mesh = consort::init().unwrap();
    let one = shared_out().unwrap();
    for threads in [2, 3, 8] {
        mesh.set_threads(threads);
        for (i, (one, many)) in one.iter().zip(shared_out().unwrap()).enumerate() {
            assert!(
                one.iter().zip(&many).all(|(a, b)| a.to_bits() == b.to_bits()),
                "result {i}, {threads} threads"
            );
        }
    }
}
