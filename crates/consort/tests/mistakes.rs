//! Common mistakes, and what the error says: the function that was called, the line of the call, and the way out.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::nn::{Adam, Sgd, cross_entropy};
use consort::{Dtype, Flatten, Result, Tensor, compile, cond, scan, value_and_grad, vjp};

/// The error of a function on one rank.
fn error<T: Send>(f: impl Fn() -> Result<T> + Sync) -> String {
    let mut outcomes = consort::spawn(1, |_| f());
    outcomes.remove(0).map(drop).unwrap_err().to_string()
}

fn ones(shape: &[usize]) -> Result<Tensor> {
    Tensor::ones(Dtype::F32, shape)
}

#[test]
fn a_host_read_names_the_function_that_it_is_inside() {
    let read = |x: Tensor| {
        x.sum_all()?.item::<f32>()?;
        Ok(x)
    };
    let at = |name: &str| {
        format!("item: expected no host read inside {name}\n  at crates/consort/tests/mistakes.rs:")
    };
    let got = error(|| value_and_grad(move |x: Tensor| read(x)?.sum_all()).call(ones(&[2])?).map(drop));
    assert!(got.starts_with(&at("value_and_grad")), "{got}");
    let f =
        || compile(move |x: Tensor| cond(&x.sum_all()?.gt(0.0)?, x, read, Ok)).call(ones(&[2])?).map(drop);
    let got = error(f);
    assert!(got.starts_with(&at("cond")), "{got}");
    let f = || {
        let of = compile(move |x: Tensor| scan(2usize, x, (), move |x, ()| Ok((read(x)?, ()))));
        of.call(ones(&[2])?).map(drop)
    };
    let got = error(f);
    assert!(got.starts_with(&at("scan")), "{got}");
}

#[test]
fn targets_that_do_not_fit_are_an_error_of_the_loss() {
    let logits = || ones(&[3, 2]);
    let got = error(|| cross_entropy(&logits()?, &Tensor::from_iter([0f32, 1.0, 1.0])?).map(drop));
    assert!(got.starts_with("cross_entropy: expected targets of i32 or i64, got f32\n  at crates/"), "{got}");
    for shape in [&[3, 1][..], &[2], &[]] {
        let n = shape.iter().product();
        let got = error(|| cross_entropy(&logits()?, &Tensor::from_slice(&vec![0i64; n], shape)?).map(drop));
        let wanted = format!(
            "cross_entropy: expected targets of shape [3], one for each line of [3, 2], got {shape:?}\n  at \
             crates/consort/tests/mistakes.rs:"
        );
        assert!(got.starts_with(&wanted), "{got}");
    }
}

#[derive(Flatten, Clone)]
struct Counted {
    weight: Tensor,
    seen: Tensor,
}

#[test]
fn parameters_that_are_no_floats_are_an_error_of_the_step() {
    let params = || Ok(Counted { weight: ones(&[2])?, seen: Tensor::scalar(0i64)? });
    let wanted = "step: expected parameters of float types, got i64 in tensor 1\n  at crates/consort/tests/mistakes.rs:";
    let got = error(|| {
        let (params, adam): (Counted, _) = (params()?, Adam::default());
        adam.step(&params, &params, &adam.state(&params)?, 0.1).map(drop)
    });
    assert!(got.starts_with(wanted), "{got}");
    let got = error(|| {
        let params: Counted = params()?;
        Sgd::default().step(&params, &params, &None, 0.1).map(drop)
    });
    assert!(got.starts_with(wanted), "{got}");
    assert!(got.ends_with("\n  note: keep other tensors outside of the parameters"), "{got}");
}

#[test]
fn a_gradient_by_whole_numbers_says_where_they_belong() {
    let note = "  note: data without a derivative must be captured";
    let pair = || Ok((ones(&[2])?, Tensor::scalar(1i64)?));
    let got = error(|| vjp(|(x, _): (Tensor, Tensor)| Ok(x)).call((pair()?, ones(&[2])?)).map(drop));
    assert_eq!(got.lines().last(), Some(note), "{got}");
    let got = error(|| value_and_grad(|(x, _): (Tensor, Tensor)| x.sum_all()).call(pair()?).map(drop));
    let more = format!("{note}, or be the second argument of `value_and_grad_first`");
    assert_eq!(got.lines().last(), Some(&more[..]), "{got}");
}

#[test]
fn a_function_that_one_rank_alone_calls_may_be_declared_local() {
    let outcomes = consort::spawn(2, |mesh| {
        let f = compile(|x: Tensor| x.exp());
        let local = compile(|x: Tensor| x.exp()).local();
        let x = Tensor::scalar(0f32)?;
        if mesh.my_rank()? == 0 {
            for _ in 0..2 {
                assert_eq!(local.call(x.clone())?.item::<f32>()?, 1.0);
            }
            f.call(x)?;
        }
        mesh.barrier()
    });
    let got = outcomes.into_iter().next().unwrap().unwrap_err().to_string();
    let note =
        "note: a function without communication that not all ranks call must be declared with `.local()`";
    assert!(got.contains(note), "{got}");
}

#[test]
fn a_step_of_an_optimizer_is_at_the_line_that_calls_it() {
    let outcomes = consort::spawn(1, |_| {
        let adam = Adam { decay: 0.1, ..Adam::default() };
        let f = compile(move |(w, state)| adam.step(&w, &w, &state, 0.1));
        let w = ones(&[2])?;
        f.call((w.clone(), adam.state(&w)?))?;
        Ok(f.explain().to_string())
    });
    let text = outcomes.into_iter().next().unwrap().unwrap();
    assert!(text.contains("mistakes.rs:") && !text.contains("optimizers.rs"), "{text}");
}

#[test]
fn what_is_not_steady_is_said_first_and_without_the_programs() {
    let outcomes = consort::spawn(1, |_| {
        let f = compile(|x: Tensor| if x.sum_all()?.item::<f32>()? > 1.0 { x.neg() } else { x.exp() });
        f.call(ones(&[2])?)?;
        f.call(Tensor::ones(Dtype::F32, &[2, 2])?)?;
        Ok((f.expect_steady(consort::Steady::graphs(1)).unwrap_err().to_string(), f.stats()))
    });
    let (text, stats) = outcomes.into_iter().next().unwrap().unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((stats.breaks, stats.recompiles), (2, 1));
    let wanted = format!(
        "expect_steady: expected at most 1 graph, 0 breaks and 0 recompiles, got {} graphs, 2 breaks and 1 recompile",
        stats.graphs
    );
    assert_eq!(lines[0], wanted, "{text}");
    let count = |start: &str| lines.iter().filter(|line| line.trim_start().starts_with(start)).count();
    assert_eq!((count("break: item reads a traced tensor at "), count("recompile: ")), (2, 1), "{text}");
    assert!(lines.len() < 12 && !text.contains("func @"), "{text}");
    assert_eq!(*lines.last().unwrap(), "  note: `explain` shows the programs", "{text}");
}

#[test]
fn a_key_that_changes_is_no_other_program() {
    let outcomes = consort::spawn(1, |_| {
        let f = compile(|key: Tensor| {
            Ok((Tensor::uniform(Dtype::F32, &[4], &key)?, Tensor::normal(Dtype::F64, &[3], &key)?))
        });
        for key in 0..20i64 {
            let (even, normal) = f.call(Tensor::scalar(key)?)?;
            assert_eq!(even.to_vec::<f32>()?, Tensor::uniform(Dtype::F32, &[4], key)?.to_vec::<f32>()?);
            assert_eq!(normal.to_vec::<f64>()?, Tensor::normal(Dtype::F64, &[3], key)?.to_vec::<f64>()?);
        }
        f.expect_steady(consort::Steady::graphs(1))
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    let got = error(|| Tensor::uniform(Dtype::F32, &[4], 0.5).map(drop));
    assert!(got.starts_with("uniform: expected a whole number for i64, got 0.5\n  at crates/"), "{got}");
    let got = error(|| Tensor::normal(Dtype::F32, &[4], &Tensor::scalar(1f32)?).map(drop));
    assert!(got.starts_with("normal: expected ") && got.contains("mistakes.rs:"), "{got}");
}
