//! Compiled functions that some ranks call without the others.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::sync::Barrier;
use std::time::Duration;

use consort::{Group, Init, Mesh, Reduce, Result, Steady, Tensor, compile};

/// Runs a function on a mesh of 2 x 2, with its two axes.
fn on_2_by_2<T: Send>(f: impl Fn(Mesh, Group, Group) -> Result<T> + Sync) -> Vec<Result<T>> {
    Init::new().axes(&[("pp", 2), ("tp", 2)]).timeout(Duration::from_secs(20)).spawn(4, |mesh| {
        let (pp, tp) = (mesh.axis("pp")?, mesh.axis("tp")?);
        f(mesh, pp, tp)
    })
}

fn place(group: &Group) -> Result<usize> {
    group.my_rank()
}

/// The errors of all ranks, as text.
fn errors<T: std::fmt::Debug>(results: Vec<Result<T>>) -> Vec<String> {
    results.into_iter().map(|result| result.unwrap_err().to_string()).collect()
}

fn sum_over(group: &Group) -> consort::Compiled<Tensor, Tensor> {
    let own = group.clone();
    compile(move |x: Tensor| own.all_reduce(x.neg()?, Reduce::Sum)).over(group)
}

/// That the order differs was found by comparison and not by the deadline; the errors name the calls of two ranks at least.
fn is_found(error: &str) {
    let found = ["must be the same on all ranks", ": deadlock: no rank can go on"];
    assert!(found.iter().any(|found| error.contains(found)), "{error}");
    let rows = error.lines().filter(|line| line.starts_with("  ") && line.trim_start().starts_with("rank "));
    assert!(rows.count() >= 2, "{error}");
    assert!(error.contains("sub_meshes.rs:"), "{error}");
}

#[test]
fn d2_calls_on_disjoint_sub_meshes_do_not_wait_for_each_other() {
    // The second stage begins when the first has done all its calls: if one waited for the other, neither would end.
    let first_is_done = Barrier::new(4);
    let results = on_2_by_2(|_, pp, tp| {
        let (f, stage) = (sum_over(&tp), place(&pp)?);
        if stage == 1 {
            first_is_done.wait();
        }
        let mut sum = 0.0;
        for i in 0..20 {
            sum += f.call(Tensor::from_iter([(i * (stage + 1)) as f64])?)?.to_vec::<f64>()?[0];
        }
        if stage == 0 {
            first_is_done.wait();
        }
        f.expect_steady(Steady::graphs(1))?;
        Ok(sum)
    });
    let sums: Vec<f64> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(sums, [-380.0, -380.0, -760.0, -760.0]);
}

#[test]
fn d2_each_sub_mesh_has_a_program_of_its_own() {
    let results = on_2_by_2(|_, pp, tp| {
        let (group, stage) = (tp.clone(), place(&pp)?);
        let f = compile(move |x: Tensor| match stage {
            0 => group.all_reduce(x, Reduce::Sum),
            _ => group.all_gather(x.neg()?, 0),
        });
        let f = f.over(&tp);
        // Sizes may differ between sub-meshes too.
        let x = Tensor::from_iter((0..2 + stage).map(|i| i as f32))?;
        let got = f.call(x)?.to_vec::<f32>()?;
        f.expect_steady(Steady::graphs(1))?;
        Ok(got)
    });
    let got: Vec<Vec<f32>> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(got[0], [0.0, 2.0]);
    assert_eq!(got[2], [0.0, -1.0, -2.0, 0.0, -1.0, -2.0]);
    assert_eq!((&got[0], &got[2]), (&got[1], &got[3]));
}

#[test]
fn d2_a_start_outside_the_sub_mesh_is_an_error_of_the_trace() {
    let results = on_2_by_2(|mesh, pp, tp| {
        let wide = mesh.clone();
        let f = compile(move |x: Tensor| wide.all_reduce(x, Reduce::Sum)).over(&tp).name("wide");
        let world = f.call(Tensor::from_iter([1.0f32])?).unwrap_err().to_string();
        let other = pp.clone();
        let g = compile(move |x: Tensor| other.all_reduce(x, Reduce::Sum)).over(&tp).name("other");
        Ok((world, g.call(Tensor::from_iter([1.0f32])?).unwrap_err().to_string()))
    });
    for (world, other) in results.into_iter().map(Result::unwrap) {
        for (error, name, over) in [(world, "wide", "(pp,tp)"), (other, "other", "pp")] {
            let wanted = format!(
                "expected communication among the ranks of `tp`, which call `{name}`, got some over `{over}`"
            );
            assert!(error.contains(&wanted) && error.contains("sub_meshes.rs:"), "{error}");
        }
    }
}

#[test]
fn d2_who_differs_is_named_among_the_ranks_of_the_sub_mesh() {
    // Rank 3 traces another program than rank 2; ranks 0 and 1 are not concerned.
    let results = on_2_by_2(|mesh, _, tp| {
        let (group, me) = (tp.clone(), place(&mesh)?);
        let f = compile(move |x: Tensor| {
            let x = if me == 3 { x.exp()? } else { x.neg()? };
            group.all_reduce(x, Reduce::Sum)
        });
        let outcome = f.over(&tp).name("step").call(Tensor::from_iter([1.0f64])?);
        Ok(outcome.and_then(|y| y.to_vec::<f64>()).map_err(|error| error.to_string()))
    });
    let outcomes: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(outcomes[..2], [Ok(vec![-2.0]), Ok(vec![-2.0])]);
    for error in outcomes[2..].iter().map(|outcome| outcome.clone().unwrap_err()) {
        let wanted = "compile: `step`: its program must be the same on all ranks of `tp`";
        assert!(error.starts_with(wanted), "{error}");
        assert!(error.contains("rank 2: ") && error.contains("rank 3: "), "{error}");
    }
}

#[test]
fn d2_overlapping_sub_meshes_follow_the_order_of_their_common_ranks() {
    let results = on_2_by_2(|_, pp, tp| {
        let (rows, columns) = (sum_over(&tp), sum_over(&pp));
        let mut x = Tensor::from_iter([1.0f64])?;
        for _ in 0..5 {
            x = columns.call(rows.call(x)?)?;
        }
        x.to_vec::<f64>()
    });
    for got in results {
        assert_eq!(got.unwrap(), [1024.0]);
    }
    // One rank calls them in the other order: every rank gets an error, and none waits for ever.
    let errors = errors(on_2_by_2(|mesh, pp, tp| {
        let (rows, columns) = (sum_over(&tp), sum_over(&pp));
        let x = Tensor::from_iter([1.0f64])?;
        if place(&mesh)? == 3 {
            rows.call(columns.call(x)?)?.to_vec::<f64>()
        } else {
            columns.call(rows.call(x)?)?.to_vec::<f64>()
        }
    }));
    errors.iter().for_each(|error| is_found(error));
}

#[test]
fn d2_only_members_may_call() {
    let results = consort::spawn(3, |mesh| {
        let pair = mesh.lists("pair", &[&[0, 2]])?;
        let outcome = sum_over(&pair).name("step").call(Tensor::from_iter([1.0f64])?);
        Ok(outcome.and_then(|y| y.to_vec::<f64>()).map_err(|error| error.to_string()))
    });
    let outcomes: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!((&outcomes[0], &outcomes[2]), (&Ok(vec![-2.0]), &Ok(vec![-2.0])));
    let error = outcomes[1].clone().unwrap_err();
    let wanted = "compile: expected a call of `step` by a rank of `pair` only, got one by rank 1\n  at ";
    assert!(error.starts_with(wanted), "{error}");
}

#[test]
fn d2_what_is_declared_equal_is_compared_within_the_sub_mesh() {
    // Equal within tp, and another tensor in each stage.
    let results = on_2_by_2(|_, pp, tp| {
        let weight = Tensor::full(consort::Dtype::F64, &[1], place(&pp)? as f64)?;
        let (f, x) = (sum_over(&tp), weight.equal_over(&["tp"])?);
        f.call(x)?.to_vec::<f64>()
    });
    let got: Vec<f64> = results.into_iter().map(|got| got.unwrap()[0]).collect();
    assert_eq!(got, [0.0, 0.0, -2.0, -2.0]);
}

#[test]
fn a14_a_loss_of_a_sub_mesh_is_equal_on_its_ranks() {
    // Each stage takes the gradient of its own loss: w x in the first, w w x in the last, averaged over its ranks.
    let results = on_2_by_2(|_, pp, tp| {
        let (stage, me, group) = (place(&pp)?, place(&tp)?, tp.clone());
        let f = consort::value_and_grad(move |(w, x): (Tensor, Tensor)| {
            let y = if stage == 0 { w.mul(&x)? } else { w.mul(&w)?.mul(&x)? };
            group.all_reduce(y.sum_all()?, Reduce::Avg)
        });
        let w = Tensor::from_iter([3.0f64])?.equal_over(&["tp"])?;
        let (loss, (of_w, of_x)) = f.over(&tp).call((w, Tensor::from_iter([1.0 + 4.0 * me as f64])?))?;
        Ok((loss.item::<f64>()?, of_w.to_vec::<f64>()?[0], of_x.to_vec::<f64>()?[0]))
    });
    let got: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    // The mean of the data is 3.
    assert_eq!(got, [(9.0, 3.0, 1.5), (9.0, 3.0, 1.5), (27.0, 18.0, 4.5), (27.0, 18.0, 4.5)]);
    // Not equal on the ranks of the sub-mesh: refused.
    let errors = errors(on_2_by_2(|_, _, tp| {
        let f = consort::grad(|x: Tensor| x.sum_all()).over(&tp);
        f.call(Tensor::from_iter([1.0f64])?)?.to_vec::<f64>()
    }));
    let wanted = "grad: expected a loss that is equal on all ranks, got one that differs over tp";
    assert!(errors.iter().all(|error| error.contains(wanted)), "{errors:?}");
}

#[test]
fn d3_ranks_may_meet_at_every_nth_call_only() {
    // The sizes of the ranks change at a call at which they meet, which compiles, and then at one at which they do not.
    let run = |sizes: &'static [usize]| {
        consort::spawn(2, move |mesh| {
            let group = mesh.clone();
            let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)).lockstep(4).name("step");
            let mut last = Vec::new();
            for (i, n) in sizes.iter().enumerate() {
                last = f.call(Tensor::from_iter((0..*n).map(|k| (i * k) as f64))?)?.to_vec::<f64>()?;
            }
            Ok(last)
        })
    };
    static EVEN: [usize; 8] = [2, 2, 2, 2, 3, 3, 3, 3];
    static ODD: [usize; 8] = [2, 2, 3, 2, 2, 2, 2, 2];
    for got in run(&EVEN) {
        assert_eq!(got.unwrap(), [0.0, 14.0, 28.0]);
    }
    for error in errors(run(&ODD)) {
        let wanted = "`step`: expected a call for which it was compiled, got another, call 3";
        assert!(error.contains(wanted) && error.contains("sub_meshes.rs:"), "{error}");
        let why = "dimension 0 of tensor 0 of the arguments: expected 2, got 3";
        let way_out =
            "note: with `lockstep(4)` its ranks meet at calls 1, 5, 9, .., and can compile only there";
        assert!(error.contains(why) && error.contains(way_out), "{error}");
    }
}

#[test]
fn d3_ranks_that_meet_differently_often_are_refused_with_both_numbers() {
    let results = consort::spawn(3, |mesh| {
        let (group, every) = (mesh.clone(), if mesh.my_rank()? == 1 { 3 } else { 4 });
        let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)).lockstep(every).name("step");
        f.call(Tensor::from_iter([1.0f64])?)?.to_vec::<f64>()
    });
    for error in errors(results) {
        let wanted = "compile: `step`: its ranks must compare their calls equally often\n  at ";
        assert!(error.starts_with(wanted) && error.contains("sub_meshes.rs:"), "{error}");
        assert!(error.contains("\n  ranks 0,2: `lockstep(4)`\n  rank 1: `lockstep(3)`\n  note: "), "{error}");
    }
}

#[test]
fn d3_what_was_captured_and_changed_is_named_between_meetings_too() {
    let results = consort::spawn(2, |mesh| {
        let (group, factor) = (mesh.clone(), std::rc::Rc::new(std::cell::Cell::new(1.0)));
        let own = std::rc::Rc::clone(&factor);
        let f = compile(move |x: Tensor| group.all_reduce(x.mul(own.get())?, Reduce::Sum)).lockstep(16);
        let mut outcome = Ok(());
        for call in 0..5 {
            factor.set(if call < 4 { 1.0 } else { 2.0 });
            outcome = f.call(Tensor::from_iter([1.0f64])?).and_then(|y| y.to_vec::<f64>()).map(drop);
        }
        outcome
    });
    // Call 5 is traced again: its number, counted from 0, is a power of two.
    for error in errors(results) {
        assert!(error.contains("its program must be the same at every call"), "{error}");
    }
}

/// Calls functions over some groups, made of lists: all `steps` times in turn, and then once in each rank's own order.
fn in_order(lists: &[(&str, &[usize])], orders: &[&[usize]], steps: usize) -> Vec<Result<Vec<f64>>> {
    let n = orders.len();
    Init::new().timeout(Duration::from_secs(20)).spawn(n, |mesh| {
        let groups: Vec<Group> =
            lists.iter().map(|(name, list)| mesh.lists(name, &[list])).collect::<Result<_>>()?;
        let functions: Vec<_> = groups.iter().map(sum_over).collect();
        // Sums of the same ones, so that each result is the number of members, negated.
        let call = |at: usize| {
            let sum = functions[at].call(Tensor::from_iter([1.0f64])?)?.to_vec::<f64>()?[0];
            Ok(sum / groups[at].size() as f64)
        };
        let mut all = Vec::new();
        for _ in 0..steps {
            for at in (0..groups.len()).filter(|at| groups[*at].has_me()) {
                all.push(call(at)?);
            }
        }
        for at in orders[place(&mesh)?] {
            all.push(call(*at)?);
        }
        Ok(all)
    })
}

#[test]
fn d2_overlapping_lists_follow_the_order_of_their_common_ranks() {
    type Lists = &'static [(&'static str, &'static [usize])];
    type Orders = &'static [&'static [usize]];
    // Two groups with two common ranks, and three in a circle, where no two ranks have both of two groups.
    const TWO: Lists = &[("first", &[0, 1, 2]), ("second", &[1, 2, 3])];
    const CIRCLE: Lists = &[("ab", &[0, 1]), ("bc", &[1, 2]), ("ca", &[2, 0])];
    let right: [(Lists, Orders); 2] =
        [(TWO, &[&[0], &[0, 1], &[0, 1], &[1]]), (CIRCLE, &[&[0, 2], &[0, 1], &[1, 2]])];
    let wrong: [(Lists, Orders); 2] =
        [(TWO, &[&[0], &[0, 1], &[1, 0], &[1]]), (CIRCLE, &[&[0, 2], &[1, 0], &[2, 1]])];
    // At the first call, where they agree on a program, and later, where they compare their calls.
    for steps in [0, 3] {
        for (lists, orders) in right {
            for got in in_order(lists, orders, steps) {
                assert!(got.unwrap().into_iter().all(|x| x == -1.0));
            }
        }
        for (lists, orders) in wrong {
            errors(in_order(lists, orders, steps)).iter().for_each(|error| is_found(error));
        }
    }
}
