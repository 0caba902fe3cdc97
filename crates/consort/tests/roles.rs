//! Ranks of one set that run different compiled functions, each declared as a role.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "roles/mod.rs"]
mod of;

use std::sync::Barrier;
use std::time::Duration;

use consort::{Dtype, Group, Init, Mesh, Reduce, Result, Steady, Tensor, compile, compile_mut};
use of::cases;
use of::refusals::{self, HEAD};

fn on_2_by_2<T: Send>(f: impl Fn(Mesh, Group, Group) -> Result<T> + Sync) -> Vec<Result<T>> {
    Init::new().axes(&[("pp", 2), ("tp", 2)]).timeout(Duration::from_secs(20)).spawn(4, |mesh| {
        let (pp, tp) = (mesh.axis("pp")?, mesh.axis("tp")?);
        f(mesh, pp, tp)
    })
}

/// The errors of all ranks. A rank returns its error as text, so that none leaves before the others have theirs.
fn errors(f: impl Fn(&Mesh, &Group, &Group) -> Result<()> + Sync) -> Vec<String> {
    let texts = on_2_by_2(|mesh, pp, tp| Ok(f(&mesh, &pp, &tp).unwrap_err().to_string()));
    texts.into_iter().map(Result::unwrap).collect()
}

/// Checks that every rank has an error with all of these parts.
fn have(errors: &[String], parts: &[&str]) {
    for error in errors {
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}\n{error}");
    }
    assert_eq!(errors.len(), 4);
}

#[test]
fn f1_pipelines_and_peers() {
    for (name, case) in cases::CASES {
        for (rank, outcome) in on_2_by_2(|mesh, _, _| case(mesh)).into_iter().enumerate() {
            outcome.unwrap_or_else(|error| panic!("{name}: rank {rank}: {error}"));
        }
    }
}

#[test]
fn f1_what_does_not_fit_is_refused_on_all_ranks() {
    for refusal in refusals::REFUSALS {
        for (rank, outcome) in
            on_2_by_2(|mesh, _, _| refusals::check(&mesh, *refusal)).into_iter().enumerate()
        {
            outcome.unwrap_or_else(|error| panic!("{}: rank {rank}: {error}", refusal.0));
        }
    }
}

#[test]
fn f1_a_missing_receive_is_the_same_error_on_all_ranks() {
    let outcomes = on_2_by_2(|mesh, _, _| refusals::check(&mesh, refusals::REFUSALS[0]));
    let errors: Vec<String> = outcomes.into_iter().map(Result::unwrap).collect();
    // Either of the two messages without another end may be named.
    let one = [
        "sends f64[2,3] to rank 2 with tag 3, but rank 2 does not receive it",
        "receives f64[2,3] from rank 2 with tag 103",
    ];
    assert!(errors.iter().all(|error| one.iter().any(|part| error.contains(part))), "{errors:?}");
    assert!(errors.iter().all(|error| *error.lines().next().unwrap() == *errors[0].lines().next().unwrap()));
}

#[test]
fn d2_results_of_roles_differ_over_the_axes_of_the_roles() {
    let results = on_2_by_2(|_, pp, tp| {
        let (stage, group) = (pp.my_rank()?, tp.clone());
        let value = [3.0, 4.0][stage];
        let f = compile(move |x: Tensor| group.all_reduce(x.mul(0.0)?.add(value)?, Reduce::Sum));
        let x = Tensor::from_iter([1.0f64])?.replicated()?;
        let y = f.role(if stage == 0 { "first" } else { "last" }).call(x)?;
        Ok((y.varies(), y.to_vec::<f64>()?))
    });
    for (rank, result) in results.into_iter().enumerate() {
        assert_eq!(result.unwrap(), (vec!["pp".to_string()], vec![[6.0, 8.0][rank / 2]]));
    }
}

#[test]
fn f1_a_message_of_another_size_names_both_ends() {
    let errors = errors(|_, pp, _| {
        let (stage, group) = (pp.my_rank()?, pp.clone());
        let send = {
            let group = group.clone();
            compile(move |x: Tensor| {
                group.isend(x.neg()?, 1, 7)?.wait()?; // sends one
                Ok(x)
            })
        };
        let recv = compile(move |_: Tensor| group.irecv(Dtype::F32, &[3], 0, 7)?.neg()); // receives three
        let x = Tensor::from_iter([1.0f64])?;
        if stage == 0 { send.role("first").call(x) } else { recv.role("last").call(x) }.map(drop)
    });
    let line =
        |mark: &str| 1 + include_str!("roles.rs").lines().position(|line| line.ends_with(mark)).unwrap();
    let rows = [
        format!("rank 0 at crates/consort/tests/roles.rs:{} sends f64[1]", line("// sends one")),
        format!("rank 2 at crates/consort/tests/roles.rs:{} receives f32[3]", line("// receives three")),
    ];
    have(
        &errors,
        &[HEAD, "must have one element type and shape (J1)", &rows[0], &rows[1], "note: a receive must"],
    );
}

#[test]
fn d5_a_state_that_a_role_gives_back_is_the_one_that_it_takes() {
    let outcomes = on_2_by_2(|_, pp, tp| {
        let (stage, group) = (pp.my_rank()?, tp.clone());
        let role = if stage == 0 { "first" } else { "last" };
        let step = compile_mut(move |state: &mut Tensor, x: Tensor| {
            let sum = group.all_reduce(x, Reduce::Sum)?;
            if stage == 0 { state.add_(&sum) } else { state.sub_(&sum) }
        });
        let step = step.role(role);
        let mut state = Tensor::ones(Dtype::F64, &[2])?;
        for _ in 0..3 {
            step.call(&mut state, Tensor::from_slice(&[1.0, 2.0], &[2])?)?;
        }
        step.expect_steady(Steady::graphs(1))?;
        Ok((stage, state.to_vec::<f64>()?))
    });
    for (stage, state) in outcomes.into_iter().map(Result::unwrap) {
        let sign = if stage == 0 { 1.0 } else { -1.0 };
        assert_eq!(state, [1.0 + sign * 6.0, 1.0 + sign * 12.0]);
    }
}

#[test]
fn d2_roles_of_a_sub_mesh_do_not_wait_for_other_ranks() {
    // The ranks of the second stage begin when those of the first have done all their calls: if one waited for the other,
    // neither would end.
    let first_is_done = Barrier::new(4);
    let outcomes = on_2_by_2(|_, pp, tp| {
        let stage = pp.my_rank()?;
        if stage == 1 {
            first_is_done.wait();
        }
        let outcome = cases::roles_of_a_sub_mesh(&tp, stage, 12);
        if stage == 0 {
            first_is_done.wait();
        }
        outcome
    });
    outcomes.into_iter().for_each(Result::unwrap);
}

#[test]
fn d3_a_miss_between_meetings_is_an_error_in_all_roles() {
    // The sizes change at the third call, at which the ranks do not meet: in both roles, and in the last alone.
    for in_both in [true, false] {
        let outcomes = on_2_by_2(|_, pp, _| {
            let f = cases::one_of_relay(&pp)?.lockstep(4).name("step");
            for call in 0..8 {
                let changes = call == 2 && (in_both || pp.my_rank()? == 1);
                let n = if changes { 3 } else { 2 };
                f.call(Tensor::from_iter((0..n).map(f64::from))?)?.wait()?;
            }
            Ok(())
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let error = outcome.unwrap_err().to_string();
            // A rank that has no miss learns of it from the others.
            let parts = [
                "`step`: expected a call for which it was compiled, got another, call 3",
                "dimension 0 of tensor 0 of the arguments: expected 2, got 3",
                "note: with `lockstep(4)` its ranks meet at calls 1, 5, 9, .., and can compile only there",
                "tests/roles.rs:",
            ];
            assert!(parts.iter().all(|part| error.contains(part)), "{in_both}, rank {rank}: {error}");
        }
    }
}
