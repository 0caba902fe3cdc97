//! Compiled functions that some ranks call without the others.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "sub_meshes/cases.rs"]
mod cases;

use std::sync::Barrier;
use std::time::Duration;

use cases::{is_found, place, sum_over};
use consort::{Group, Init, Mesh, Reduce, Result, Steady, Tensor, compile};

/// Runs a function on a mesh of 2 x 2, with its two axes.
fn on_2_by_2<T: Send>(f: impl Fn(Mesh, Group, Group) -> Result<T> + Sync) -> Vec<Result<T>> {
    Init::new().axes(&[("pp", 2), ("tp", 2)]).timeout(Duration::from_secs(20)).spawn(4, |mesh| {
        let (pp, tp) = (mesh.axis("pp")?, mesh.axis("tp")?);
        f(mesh, pp, tp)
    })
}

/// The errors of all ranks, as text.
fn errors<T: std::fmt::Debug>(results: Vec<Result<T>>) -> Vec<String> {
    results.into_iter().map(|result| result.unwrap_err().to_string()).collect()
}

/// A case on ranks that are threads.
fn on_threads(name: &str) {
    let (_, case) = cases::CASES.iter().chain(&cases::REFUSED).find(|(own, _)| *own == name).unwrap();
    for (rank, outcome) in on_2_by_2(|mesh, _, _| case(mesh)).into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("{name}, rank {rank}: {error}"));
    }
}

#[test]
fn d2_each_sub_mesh_has_a_program_of_its_own() {
    on_threads("d2_each_sub_mesh_has_a_program_of_its_own");
}

#[test]
fn d2_a_start_outside_the_sub_mesh_is_an_error_of_the_trace() {
    on_threads("d2_a_start_outside_the_sub_mesh_is_an_error_of_the_trace");
}

#[test]
fn d2_who_differs_is_named_among_the_ranks_of_the_sub_mesh() {
    on_threads("d2_who_differs_is_named_among_the_ranks_of_the_sub_mesh");
}

#[test]
fn d2_overlapping_sub_meshes_follow_the_order_of_their_common_ranks() {
    on_threads("d2_overlapping_sub_meshes_follow_the_order_of_their_common_ranks");
}

#[test]
fn d2_overlapping_sub_meshes_in_another_order_are_an_error_on_every_rank() {
    on_threads("d2_overlapping_sub_meshes_in_another_order_are_an_error_on_every_rank");
}

#[test]
fn d2_what_is_declared_equal_is_compared_within_the_sub_mesh() {
    on_threads("d2_what_is_declared_equal_is_compared_within_the_sub_mesh");
}

#[test]
fn a14_a_loss_of_a_sub_mesh_is_equal_on_its_ranks() {
    on_threads("a14_a_loss_of_a_sub_mesh_is_equal_on_its_ranks");
}

#[test]
fn a14_a_loss_that_differs_on_the_ranks_of_a_sub_mesh_is_refused() {
    on_threads("a14_a_loss_that_differs_on_the_ranks_of_a_sub_mesh_is_refused");
}

#[test]
fn d3_ranks_of_a_sub_mesh_may_meet_at_every_nth_call_only() {
    on_threads("d3_ranks_of_a_sub_mesh_may_meet_at_every_nth_call_only");
}

#[test]
fn d3_a_call_between_meetings_of_a_sub_mesh_that_needs_one_is_an_error() {
    on_threads("d3_a_call_between_meetings_of_a_sub_mesh_that_needs_one_is_an_error");
}

#[test]
fn d3_ranks_of_a_sub_mesh_that_meet_differently_often_are_refused_with_both_numbers() {
    on_threads("d3_ranks_of_a_sub_mesh_that_meet_differently_often_are_refused_with_both_numbers");
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
            let errors = errors(in_order(lists, orders, steps));
            errors.iter().for_each(|error| is_found(error, "tests/sub_meshes.rs:"));
        }
    }
}
