//! Ranks of one set that run different compiled functions, each declared as a role.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "roles/cases.rs"]
mod cases;

use std::time::Duration;

use cases::{GPIPE, batches, first, last, weights};
use consort::{
    Dtype, Group, Init, Mesh, Reduce, Result, Steady, Tensor, compile, compile_mut, cond, while_loop,
};

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

/// The errors of a pipeline whose stages run these steps.
fn refused(orders: [&'static str; 2]) -> Vec<String> {
    errors(|_, pp, tp| {
        let (stage, groups) = (pp.my_rank()?, (pp.clone(), tp.clone()));
        let w = weights(stage, tp)?;
        match stage {
            0 => first(groups, orders[0]).role("first").call((w, batches(0)?)).map(drop),
            _ => last(groups, orders[1]).role("last").call(w).map(drop),
        }
    })
}

/// Checks that every rank has an error with all of these parts.
fn have(errors: &[String], parts: &[&str]) {
    for error in errors {
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}\n{error}");
    }
    assert_eq!(errors.len(), 4);
}

const HEAD: &str = "compile: role `first` on ranks 0,1, role `last` on ranks 2,3: ";
const LINE: &str = "tests/roles/cases.rs:";

#[test]
fn f1_pipelines_and_peers() {
    for (name, case) in cases::CASES {
        for (rank, outcome) in on_2_by_2(|mesh, _, _| case(mesh)).into_iter().enumerate() {
            outcome.unwrap_or_else(|error| panic!("{name}: rank {rank}: {error}"));
        }
    }
}

#[test]
fn f1_a_missing_receive_is_refused_on_all_ranks() {
    let errors = refused([GPIPE[0], "f0 f1 f2 b0 b1 b2"]);
    have(&errors, &[HEAD, "rank 0 at", LINE, "(J1)", "every message must be received"]);
    // Either of the two messages without another end may be named.
    let one = [
        "sends f64[2,3] to rank 2 with tag 3, but rank 2 does not receive it",
        "receives f64[2,3] from rank 2 with tag 103",
    ];
    assert!(errors.iter().all(|error| one.iter().any(|part| error.contains(part))), "{errors:?}");
    assert!(errors.iter().all(|error| *error.lines().next().unwrap() == *errors[0].lines().next().unwrap()));
}

#[test]
fn f1_swapped_tags_are_refused_on_all_ranks() {
    let errors = errors(|_, pp, _| {
        let (stage, group) = (pp.my_rank()?, pp.clone());
        let x = Tensor::from_iter([1.0f64])?;
        let send = {
            let group = group.clone();
            compile(move |x: Tensor| {
                group.isend(x.neg()?, 1, 7)?.wait()?;
                Ok(x)
            })
        };
        let recv = compile(move |x: Tensor| group.irecv(Dtype::F64, &[1], 0, 8)?.add(&x));
        if stage == 0 { send.role("first").call(x) } else { recv.role("last").call(x) }.map(drop)
    });
    have(&errors, &[HEAD, "tag 7", "tag 8", "instead", "tests/roles.rs:", "(J1)"]);
}

#[test]
fn f1_waits_in_a_circle_are_refused_on_all_ranks() {
    // Each stage waits for what the other sends only after it has received.
    let errors = refused(["b0 f0", "f0 b0"]);
    have(&errors, &[HEAD, "these ranks wait for one another, and none can go on (J3)", LINE]);
    have(&errors, &["waits for a message from rank 2 (tag 100)", "waits for a message from rank 0 (tag 0)"]);
}

#[test]
fn f1_a_role_on_some_ranks_only_is_refused_on_all_ranks() {
    let errors = errors(|_, pp, tp| {
        let (stage, group) = (pp.my_rank()?, tp.clone());
        let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)).name("step");
        let f = if stage == 0 { f.role("first") } else { f };
        f.call(Tensor::from_iter([1.0f64])?).map(drop)
    });
    have(&errors, &["call 1 of `step` as role `first`", "call 1 of `step`   ", "tests/roles.rs:"]);
    have(&errors, &["a function must have a role on all ranks that call it, or on none"]);
}

#[test]
fn f1_ranks_of_one_role_must_have_one_program() {
    let errors = errors(|mesh, pp, tp| {
        let (stage, me, group) = (pp.my_rank()?, mesh.my_rank()?, tp.clone());
        let f = compile(move |x: Tensor| {
            let x = if me == 3 { x.exp()? } else { x.neg()? };
            group.all_reduce(x, Reduce::Sum)
        });
        let f = f.role(if stage == 0 { "first" } else { "last" });
        f.call(Tensor::from_iter([1.0f64])?).map(drop)
    });
    have(
        &errors,
        &["its program must be the same on all ranks of role `last`", "rank 2: ", "rank 3: ", "exp"],
    );
    have(&errors, &["tests/roles.rs:"]);
}

#[test]
fn f1_ranks_of_one_role_must_have_one_kind_of_arguments() {
    let errors = errors(|mesh, pp, tp| {
        let (stage, me, group) = (pp.my_rank()?, mesh.my_rank()?, tp.clone());
        let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum));
        // The other role has other arguments, which is fine.
        let x = if stage == 0 { Tensor::from_iter([1i32])? } else { Tensor::from_iter([1.0f64])? };
        let x = if me == 3 { x.cast(Dtype::F32)? } else { x };
        f.role(if stage == 0 { "first" } else { "last" }).call(x).map(drop)
    });
    have(&errors, &["the kinds of its arguments must be the same on all ranks of role `last`"]);
    have(&errors, &["rank 2: f64", "rank 3: f32"]);
}

#[test]
fn f1_a_role_has_no_breaks() {
    let errors = errors(|_, pp, tp| {
        let (stage, group) = (pp.my_rank()?, tp.clone());
        let f = compile(move |x: Tensor| {
            let x = group.all_reduce(x, Reduce::Sum)?;
            if stage == 1 { x.mul(x.to_vec::<f64>()?[0]) } else { Ok(x) }
        });
        f.role(if stage == 0 { "first" } else { "last" }).call(Tensor::from_iter([1.0f64])?).map(drop)
    });
    have(&errors, &["to_vec: expected no host read of a traced tensor in role `last`", "tests/roles.rs:"]);
    assert!(errors[..2].iter().all(|error| error.contains("stopped: ")), "{errors:?}");
}

#[test]
fn f1_a_role_has_no_messages_inside_a_while() {
    let errors = errors(|_, pp, tp| {
        let (stage, group) = (pp.my_rank()?, tp.clone());
        let f = compile(move |x: Tensor| {
            let x = group.all_reduce(x, Reduce::Sum)?;
            if stage == 0 {
                return Ok(x);
            }
            while_loop(50, x, |x| x.sum_all()?.lt(100.0), |x| group.all_reduce(x, Reduce::Sum))
        });
        f.role(if stage == 0 { "first" } else { "last" }).call(Tensor::from_iter([1.0f64])?).map(drop)
    });
    have(
        &errors,
        &["while: expected no communication inside, got a loop that communicates", "tests/roles.rs:"],
    );
}

#[test]
fn f1_a_local_function_has_no_role() {
    let errors = errors(|_, _, _| {
        let f = compile(|x: Tensor| x.neg()).name("alone").local().role("first");
        f.call(Tensor::from_iter([1.0f64])?).map(drop)
    });
    have(&errors, &["compile: expected no role of `alone`, which was declared local, got role `first`"]);
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
fn f1_a_result_that_one_role_takes_to_be_equal_must_be_equal() {
    // The last stage sums what differs over tp; the first takes the sum to be equal over tp, since its own part is.
    let errors = errors(|_, pp, _| {
        let (stage, group) = (pp.my_rank()?, pp.clone());
        let f = compile(move |x: Tensor| {
            let x = if stage == 0 { Tensor::zeros(Dtype::F64, &[1])? } else { x };
            group.all_reduce(x, Reduce::Sum)
        });
        f.role(if stage == 0 { "first" } else { "last" }).call(Tensor::from_iter([1.0f64])?).map(drop)
    });
    have(&errors, &[HEAD, "call 0 on `pp` must be the same on all its ranks (J2)", "tests/roles.rs:"]);
    have(&errors, &["rank 0: all_reduce sum f64[1]  ", "rank 2: all_reduce sum f64[1] -> {tp}  "]);
}

#[test]
fn a14_a_comparison_in_one_role_only_names_the_users_call() {
    let errors = errors(|_, pp, _| {
        let (stage, x) = (pp.my_rank()?, Tensor::from_iter([1.0f64])?);
        let compares = compile(|x: Tensor| x.neg()?.equal_over(&["pp"]));
        let f = if stage == 0 { compares.role("first") } else { compile(|x: Tensor| x.neg()).role("last") };
        f.call(x).map(drop)
    });
    have(&errors, &[HEAD, "call 0 on `pp` must be the same on all its ranks (J2)", "tests/roles.rs:"]);
    have(&errors, &["rank 0: equal_over f64[1]  ", "rank 2: nothing more"]);
    // In one block of a choice.
    let errors = self::errors(|_, pp, _| {
        let stage = pp.my_rank()?;
        let chooses = compile(|(x, c): (Tensor, Tensor)| {
            cond(&c.gt(0.5)?, x, |x| x.neg()?.equal_over(&["tp"]), |x| x.exp())
        });
        let other = compile(|(x, _): (Tensor, Tensor)| x.neg());
        let f = if stage == 0 { chooses.role("first") } else { other.role("last") };
        f.call((Tensor::from_iter([1.0f64])?, Tensor::scalar(1.0f64)?.replicated()?)).map(drop)
    });
    have(
        &errors,
        &["cond: expected the same communication in both blocks", "first block: equal_over f64[1]  "],
    );
    have(&errors, &["second block: nothing more", "tests/roles.rs:"]);
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
fn c1_a_number_that_changes_is_named() {
    let errors = errors(|mesh, _, _| {
        let (me, n, group) = (mesh.my_rank()?, mesh.size(), mesh.clone());
        let step = std::rc::Rc::new(std::cell::Cell::new(1));
        let by = std::rc::Rc::clone(&step);
        let f = compile(move |x: Tensor| {
            let got = group.irecv(Dtype::F64, &[1], (me + n - by.get()) % n, 0)?;
            group.isend(&x, (me + by.get()) % n, 0)?.wait()?;
            Ok(got)
        });
        let x = Tensor::from_iter([me as f64])?;
        f.call(x.clone())?;
        step.set(2);
        f.call(x).map(drop)
    });
    have(
        &errors,
        &["its program must be the same at every call", "first: ", "table(", "now: ", "tests/roles.rs:"],
    );
}

#[test]
fn functions_of_different_names_are_not_called_together() {
    let errors = errors(|_, pp, _| {
        let x = Tensor::from_iter([1.0f32])?;
        match pp.my_rank()? {
            0 => compile(|x: Tensor| x.neg()).name("train").role("a").call(x).map(drop),
            _ => compile(|x: Tensor| x.exp()).name("eval").role("b").call(x).map(drop),
        }
    });
    let rows = ["ranks 0,1: `train`", "ranks 2,3: `eval`"];
    have(&errors, &["ranks must call the function of one name together", rows[0], rows[1]]);
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
