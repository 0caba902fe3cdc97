//! Ranks that have called a compiled function a different number of times: an error on all of them, and no compilation.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::time::Duration;

use consort::{Compiled, Group, Init, Mesh, Reduce, Result, Tensor, compile};

/// A step that communicates over the group.
fn step(group: &Group, every: usize) -> Compiled<Tensor, Tensor> {
    let group = group.clone();
    compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum)).name("step").lockstep(every)
}

fn one() -> Result<Tensor> {
    Tensor::from_iter([1.0f64])
}

fn call(f: &Compiled<Tensor, Tensor>, times: usize) -> Result<()> {
    (0..times).try_for_each(|_| f.call(one()?)?.wait())
}

/// Each rank's error, and how often it has compiled.
fn on_two(
    f: impl Fn(&Mesh, &Compiled<Tensor, Tensor>, bool) -> Result<()> + Sync,
    every: usize,
) -> Vec<(String, u64)> {
    let results = Init::new().timeout(Duration::from_secs(20)).spawn(2, |mesh| {
        let function = step(&mesh, every);
        let outcome = f(&mesh, &function, mesh.my_rank()? == 1);
        Ok((outcome.map_err(|error| error.to_string()).unwrap_err(), function.stats().graphs))
    });
    results.into_iter().map(Result::unwrap).collect()
}

/// That ranks call different things was found by comparison and not by the deadline; the errors name both.
fn is_found(error: &str) {
    let found = ["must be the same on all ranks\n", ": deadlock: no rank can go on"];
    assert!(found.iter().any(|found| error.contains(found)), "{error}");
    assert_eq!(error.matches("\n  rank ").count(), 2, "{error}");
    assert!(error.contains("call_counters.rs:"), "{error}");
}

#[test]
fn d3_a_call_too_many_is_an_error_on_all_ranks() {
    for every in [1, 4] {
        // Where the other rank runs something else.
        let results = on_two(
            |mesh, f, is_more| {
                call(f, 2 + usize::from(is_more))?;
                mesh.barrier()
            },
            every,
        );
        for (error, graphs) in results {
            is_found(&error);
            assert!(every > 1 || error.contains("rank 1   call 3 of `step` "), "{error}");
            assert_eq!(graphs, 1, "{error}");
        }
    }
}

#[test]
fn d3_a_call_that_meets_the_same_operation_elsewhere_is_found_at_the_next_call() {
    for every in [1, 4] {
        let results = on_two(
            |mesh, f, is_more| {
                call(f, 2)?;
                match is_more {
                    true => call(f, 1)?,
                    false => mesh.all_reduce(one()?, Reduce::Sum)?.wait()?,
                }
                call(f, 8)
            },
            every,
        );
        for (error, graphs) in results {
            is_found(&error);
            assert!(every > 1 || error.contains("rank 1   call 3 of `step` "), "{error}");
            assert_eq!(graphs, 1, "{error}");
        }
    }
}

#[test]
fn d3_a_warm_up_of_one_rank_alone_is_an_error_on_all_ranks() {
    for every in [1, 4] {
        let results = on_two(
            |mesh, f, warms_up| {
                // Of a warm-up the calls are not counted.
                match warms_up {
                    true => mesh.warm_up(|| call(f, 1))?,
                    false => call(f, 1).and_then(|()| mesh.barrier())?,
                }
                call(f, 8)
            },
            every,
        );
        for (error, graphs) in results {
            is_found(&error);
            assert!(
                every > 1
                    || error.contains("rank 0   call 2 of `step` ")
                        && error.contains("rank 1   call 1 of `step` ")
            );
            assert_eq!(graphs, 1, "{error}");
        }
    }
}

#[test]
fn d3_counters_that_differ_over_groups_are_an_error_and_no_hang() {
    // Its ranks meet as a whole and communicate in pairs: one rank is in a meeting, its neighbour in a pair.
    for every in [1, 4] {
        let results =
            Init::new().axes(&[("dp", 2), ("tp", 2)]).timeout(Duration::from_secs(20)).spawn(4, |mesh| {
                let tp = mesh.axis("tp")?;
                let f = step(&tp, every);
                let outcome = call(&f, 2).and_then(|()| {
                    match mesh.my_rank()? {
                        3 => call(&f, 1)?,
                        _ => tp.all_reduce(one()?, Reduce::Sum)?.wait()?,
                    }
                    call(&f, 8)
                });
                Ok((outcome.map_err(|error| error.to_string()).unwrap_err(), f.stats().graphs))
            });
        for (error, graphs) in results.into_iter().map(Result::unwrap) {
            is_found(&error);
            assert_eq!(graphs, 1, "{error}");
        }
    }
}

#[test]
fn d3_calls_of_a_function_that_does_not_communicate_are_not_counted_together() {
    let results = consort::spawn(2, |mesh| {
        let group = mesh.clone();
        let f = compile(move |list: Vec<Tensor>| match &list[..] {
            [x] => x.neg(),
            list => group.all_reduce(list[0].add(&list[1])?, Reduce::Sum),
        });
        // Each rank as often as it likes, as long as none communicates.
        for _ in 0..2 + mesh.my_rank()? {
            f.call(vec![one()?])?;
        }
        let mut sum = 0.0;
        for _ in 0..5 {
            sum += f.call(vec![one()?, one()?])?.to_vec::<f64>()?[0];
        }
        Ok((sum, f.stats().graphs))
    });
    for got in results {
        assert_eq!(got.unwrap(), (20.0, 2));
    }
}
