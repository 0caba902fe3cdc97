//! Loops: their conditions and bounds, and their end when another rank fails.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use consort::{Dtype, Init, Iterations, Reduce, Result, Tensor, compile, cond, scan, while_loop};

fn ones(n: usize) -> Result<Tensor> {
    Tensor::ones(Dtype::F32, &[n])
}

/// A loop without communication that would run for hours.
fn endless(kind: usize, x: Tensor) -> Result<Tensor> {
    match kind {
        0 => while_loop(usize::MAX, x, |x: &Tensor| x.sum_all()?.gt(0.0), |x: Tensor| x.mul(1.0)),
        _ => {
            let body = |x: Tensor, (): ()| Ok((x.mul(1.0)?, ()));
            scan(1usize << 40, x, (), body).map(|(x, ())| x)
        }
    }
}

#[test]
fn d8_a_loop_without_communication_ends_when_a_rank_that_waits_for_it_fails() {
    for (kind, traced) in [(0, false), (0, true), (1, false), (1, true)] {
        let errors = Init::new().timeout(Duration::from_millis(500)).spawn(3, |mesh| {
            if mesh.my_rank()? != 0 {
                return mesh.all_reduce(ones(4)?, Reduce::Sum)?.to_vec::<f32>();
            }
            let looped = match traced {
                true => compile(move |x: Tensor| endless(kind, x)).local().call(ones(4)?),
                false => endless(kind, ones(4)?),
            };
            looped?.to_vec::<f32>()
        });
        let errors: Vec<String> = errors.into_iter().map(|one| one.unwrap_err().to_string()).collect();
        let name = ["while_loop", "scan"][kind];
        assert!(errors[0].starts_with(&format!("{name}: rank ")), "{}", errors[0]);
        assert!(errors.iter().all(|error| error.contains("missing: rank 0")), "{errors:?}");
        assert!(errors[0].contains("tests/loops.rs:"), "{}", errors[0]);
    }
}

#[test]
fn d8_a_loop_of_slow_iterations_looks_more_often() {
    let iterations = AtomicUsize::new(0);
    let errors = Init::new().timeout(Duration::from_millis(500)).spawn(2, |mesh| {
        if mesh.my_rank()? == 1 {
            return mesh.all_reduce(ones(1)?, Reduce::Sum)?.wait();
        }
        let slow = |x: Tensor| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(100) {}
            iterations.fetch_add(1, Ordering::Relaxed);
            Ok(x)
        };
        while_loop(10_000usize, ones(1)?, |x| x.sum_all()?.gt(0.0), slow).map(drop)
    });
    let error = errors[0].as_ref().unwrap_err().to_string();
    assert!(error.contains("missing: rank 0"), "{error}");
    assert!(iterations.into_inner() < 32);
}

#[test]
fn d8_a_loop_ends_when_another_rank_panics() {
    let panicked = std::panic::catch_unwind(|| {
        consort::spawn(2, |mesh| {
            assert!(mesh.my_rank()? == 0, "rank 1 panics");
            let looped = compile(|x: Tensor| endless(0, x)).local().call(ones(4)?);
            assert!(looped.map(drop).unwrap_err().to_string().contains("rank 1 panicked"));
            Ok(())
        })
    });
    let text = panicked.map(drop).unwrap_err();
    assert!(text.downcast_ref::<&str>().is_some_and(|text| text.contains("rank 1 panics")));
}

#[test]
fn d8_a_rank_that_knows_of_a_failure_may_go_on_alone() {
    let sums = Init::new().timeout(Duration::from_millis(200)).spawn(2, |mesh| {
        if mesh.my_rank()? == 1 {
            return Ok(0.0);
        }
        let error = mesh.all_reduce(ones(1)?, Reduce::Sum)?.to_vec::<f32>().unwrap_err();
        assert!(error.comm_error().is_some());
        let f = compile(|x: Tensor| {
            scan(1000usize, x, (), |x: Tensor, (): ()| Ok((x.add(1.0)?, ()))).map(|(x, ())| x)
        });
        f.local().call(ones(1)?)?.item::<f32>()
    });
    assert_eq!(sums.into_iter().next().unwrap().unwrap(), 1001.0);
}

type Step = fn(Tensor) -> Result<Tensor>;

/// The error of a function of a tensor, eager or traced.
fn error_of(f: Step, traced: bool) -> String {
    let errors = consort::spawn(1, move |_| {
        let got = if traced { compile(f).call(ones(4)?) } else { f(ones(4)?) };
        Ok(got.map(drop).unwrap_err().to_string())
    });
    errors.into_iter().next().unwrap().unwrap()
}

#[test]
fn a_condition_that_is_no_bool_is_named_with_its_line() {
    let vector = |x: Tensor| while_loop(5, x, |x: &Tensor| x.gt(0.0), |x: Tensor| x.neg());
    let vector_line = line!() - 1;
    let number = |x: Tensor| while_loop(5, x, |x: &Tensor| x.sum_all(), |x: Tensor| x.neg());
    let number_line = line!() - 1;
    let branch = |x: Tensor| {
        let sum = x.sum_all()?;
        cond(&sum, x, |x: Tensor| x.exp(), |x: Tensor| x.neg())
    };
    let branch_line = line!() - 3;
    let cases: [(&str, &str, u32, Step); 3] = [
        ("while_loop", "bool[4]", vector_line, vector),
        ("while_loop", "f32[]", number_line, number),
        ("cond", "f32[]", branch_line, branch),
    ];
    for (name, got, line, f) in cases {
        let wanted = format!("{name}: expected a condition that is a 0-d bool, got {got}\n");
        let (eager, traced) = (error_of(f, false), error_of(f, true));
        for error in [&eager, &traced] {
            assert!(error.starts_with(&wanted) && error.contains("note: "), "{error}");
            assert!(error.contains("\n  at crates/consort/tests/loops.rs:"), "{error}");
        }
        assert!(traced.contains(&format!("\n  at crates/consort/tests/loops.rs:{line}\n")), "{traced}");
    }
}

#[test]
fn more_iterations_than_the_limit_cannot_be_expected() {
    let f = |x: Tensor| {
        let few = Iterations::at_most(5).expect(100);
        while_loop(few, x, |x: &Tensor| x.sum_all()?.lt(0.0), |x: Tensor| x.neg())
    };
    for traced in [false, true] {
        let error = error_of(f, traced);
        assert!(
            error.starts_with("while_loop: expected at most 5 iterations, got an expected number of 100\n"),
            "{error}"
        );
        assert!(error.contains("tests/loops.rs:"), "{error}");
    }
}

#[test]
fn a_loop_that_does_not_end_is_named_as_users_call_it() {
    let f = |x: Tensor| while_loop(5, x, |x: &Tensor| x.sum_all()?.gt(0.0), |x: Tensor| x.mul(1.0));
    for traced in [false, true] {
        let error = error_of(f, traced);
        let wanted = "while_loop: expected a condition that is false after at most 5 iterations, got true\n";
        assert!(error.starts_with(wanted), "{error}");
    }
}

#[test]
fn a_carry_of_another_shape_has_no_note_on_placements() {
    let halve =
        |x: Tensor| while_loop(5, x, |x: &Tensor| x.sum_all()?.lt(0.0), |x: Tensor| x.narrow(0, 0, 2));
    let error = error_of(halve, true);
    assert!(error.starts_with("while_loop: expected a carry of f32[4]"), "{error}");
    assert!(
        !error.contains("axes") && error.contains("note: a carry keeps its element type and shape"),
        "{error}"
    );
}

#[test]
fn slices_of_another_length_are_an_error_of_the_scan() {
    let f = |x: Tensor| {
        scan(5usize, x.clone(), x, |a: Tensor, b: Tensor| Ok((a.add(&b)?, ()))).map(|(a, ()): (Tensor, ())| a)
    };
    for traced in [false, true] {
        let error = error_of(f, traced);
        assert!(error.starts_with("scan: expected a first dimension of 5, got f32[4]"), "{error}");
        assert!(error.contains("tests/loops.rs:"), "{error}");
    }
}
