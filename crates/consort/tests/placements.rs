//! What users declare about the placements of tensors: where they are equal, and what must come back equal.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "placements/cases.rs"]
mod cases;

use cases::{Model, model, place, rows, step};
use consort::{
    Dtype, Flatten, Group, Init, Mesh, Reduce, Result, Steady, Tensor, compile, compile_mut, value_and_grad,
};

fn on_2_by_2<T: Send>(f: impl Fn(Mesh, Group, Group) -> Result<T> + Sync) -> Vec<Result<T>> {
    Init::new().axes(&[("dp", 2), ("tp", 2)]).spawn(4, |mesh| {
        let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
        f(mesh, dp, tp)
    })
}

/// A case on ranks that are threads.
fn on_threads(name: &str) {
    let (_, case) = cases::CASES.iter().chain(&cases::REFUSED).find(|(own, _)| *own == name).unwrap();
    for (rank, outcome) in on_2_by_2(|mesh, _, _| case(mesh)).into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("{name}, rank {rank}: {error}"));
    }
}

#[test]
fn a14_a_weight_that_would_drift_is_an_error_of_the_trace() {
    on_threads("a14_a_weight_that_would_drift_is_an_error_of_the_trace");
}

#[test]
fn a14_a_right_step_is_not_refused_and_weights_stay_equal() {
    on_threads("a14_a_right_step_is_not_refused_and_weights_stay_equal");
}

#[test]
fn a14_equality_in_a_trace_follows_from_types_or_is_compared() {
    on_threads("a14_equality_in_a_trace_follows_from_types_or_is_compared");
}

#[test]
fn a14_declared_tensors_are_compared_axis_by_axis() {
    on_threads("a14_declared_tensors_are_compared_axis_by_axis");
}

#[test]
fn a14_state_that_drifts_between_calls_is_an_error_on_every_rank() {
    on_threads("a14_state_that_drifts_between_calls_is_an_error_on_every_rank");
}

#[test]
fn a14_fields_that_are_not_as_declared_are_an_error_of_the_first_call() {
    let results = on_2_by_2(|mesh, dp, tp| {
        let own = dp.clone();
        let sums = compile_mut(move |model: &mut Model, x: Tensor| step(model, &x, Some(&own)));
        let mut model = model(&tp)?;
        model.scale = Tensor::from_slice(&[place(&mesh)? as f64], &[])?;
        Ok(sums.call(&mut model, rows(&dp, 0)?).unwrap_err().to_string())
    });
    for error in results.into_iter().map(Result::unwrap) {
        assert!(error.contains("expected field `scale` equal over dp,tp, as it is declared, got different ones on rank 0, on rank 1, on rank 2 and on rank 3"), "{error}");
    }
}

#[derive(Flatten)]
struct Declared {
    #[flatten(equal_over = "dp, tp")]
    weight: Tensor,
}

#[test]
fn a14_fields_of_a_function_without_communication_are_compared() {
    let results = on_2_by_2(|mesh, _, _| {
        let doubled = || compile(|own: Declared| own.weight.mul(2.0));
        let own = |x: usize| Ok(Declared { weight: Tensor::from_iter([x as f64])? });
        let error = doubled().call(own(place(&mesh)?)?).unwrap_err().to_string();
        let f = doubled();
        let first = f.call(own(3)?)?;
        // Later calls are compared in debug builds.
        let later = f.call(own(place(&mesh)?)?).and_then(|y| y.wait()).is_err();
        Ok((error, first.varies(), first.item::<f64>()?, later))
    });
    for (error, varies, first, later) in results.into_iter().map(Result::unwrap) {
        assert!(
            error.contains("expected field `weight` equal over dp,tp, as it is declared, got"),
            "{error}"
        );
        assert_eq!((varies, first, later), (Vec::<String>::new(), 6.0, cfg!(debug_assertions)));
    }
}

#[test]
fn a14_axes_that_the_mesh_does_not_have_are_an_error() {
    let results = consort::spawn(2, |mesh| {
        let f = compile(|model: Model| model.weight.neg());
        let error = f.call(model(&mesh)?).unwrap_err().to_string();
        let declared = Tensor::ones(Dtype::F32, &[2])?.equal_over(&["dp"]).unwrap_err().to_string();
        Ok((error, declared))
    });
    for (error, declared) in results.into_iter().map(Result::unwrap) {
        assert!(error.contains("field `weight`: expected one of the axes world, got `dp`"), "{error}");
        assert!(declared.starts_with("equal_over: expected one of the axes world, got `dp`"), "{declared}");
    }
    // A program that runs alone needs no axes.
    let f = compile(|model: Model| model.weight.neg());
    let alone = Model { weight: Tensor::from_iter([1.0]).unwrap(), scale: Tensor::from_iter([1.0]).unwrap() };
    assert_eq!(f.call(alone).unwrap().to_vec::<f64>().unwrap(), [-1.0]);
}

/// The line with this text, as errors name it.
fn line(text: &str) -> String {
    let at = include_str!("placements.rs").lines().position(|line| line.contains(text)).unwrap();
    format!("crates/consort/tests/placements.rs:{}", at + 1)
}

#[test]
fn a14_a_whole_value_in_a_trace_is_compared_along_each_axis() {
    let results = on_2_by_2(|_, dp, tp| {
        let f = compile(|x: Tensor| x.neg()?.expect_equal_over(&["dp", "tp"]));
        assert!(f.call(Tensor::from_iter([1.0])?)?.varies().is_empty());
        assert_eq!(f.explain().graphs[0].starts, 2);
        let x = Tensor::from_iter([place(&tp)? as f64])?;
        Ok((place(&dp)?, f.call(x).unwrap_err().to_string()))
    });
    for (dp, error) in results.into_iter().map(Result::unwrap) {
        let (a, b) = (2 * dp, 2 * dp + 1);
        let wanted = format!(
            "expected a tensor that is equal over tp, got different ones on rank {a} and on rank {b}\n"
        );
        assert!(error.contains(&wanted), "{error}");
    }
}

#[test]
fn a14_a_function_without_communication_compares_too_unless_it_is_local() {
    let results = on_2_by_2(|_, dp, tp| {
        let f = compile(|x: Tensor| x.neg()?.equal_over(&["dp"]));
        f.call(Tensor::from_iter([1.0])?)?;
        let of_dp = compile(|x: Tensor| x.neg()?.equal_over(&["dp"])).over(&dp);
        assert_eq!(of_dp.call(Tensor::from_iter([place(&tp)? as f64])?)?.varies(), ["tp"]);
        let of_tp = compile(|x: Tensor| x.neg()?.equal_over(&["dp"])).over(&tp).name("of_tp");
        let local = compile(|x: Tensor| x.neg()?.equal_over(&["dp"])).local().name("own");
        let x = || Tensor::from_iter([1.0]);
        Ok([of_tp.call(x()?).unwrap_err().to_string(), local.call(x()?).unwrap_err().to_string()])
    });
    for [of_tp, local] in results.into_iter().map(Result::unwrap) {
        let wanted = "equal_over: expected communication among the ranks of `tp`, which call `of_tp`, got some over `dp`";
        assert!(of_tp.starts_with(wanted), "{of_tp}");
        assert!(local.starts_with("equal_over: expected no communication in `own`"), "{local}");
    }
}

#[test]
fn a14_a_forgotten_reduction_of_what_is_replicated_is_an_error_of_the_trace() {
    let results = on_2_by_2(|_, _, _| {
        let f = compile(|x: Tensor| x.neg()?.sum_all()?.replicated()); // forgets
        Ok(f.call(Tensor::from_iter([1.0])?).unwrap_err().to_string())
    });
    for error in results.into_iter().map(Result::unwrap) {
        let wanted = "replicated: expected a tensor whose type says that it is equal over dp,tp, got one that may differ";
        assert!(error.starts_with(wanted) && error.contains(&line("// forgets")), "{error}");
        assert!(
            error.contains("note: `equal_over` compares at each call what the type does not say"),
            "{error}"
        );
    }
}

#[test]
fn a14_numbers_inside_loops_are_compared_in_each_iteration() {
    let results = on_2_by_2(|_, dp, _| {
        let f = compile(|x: Tensor| {
            let body = |x: Tensor, (): ()| Ok((x.add(1.0)?.equal_over(&["dp", "tp"])?.mul(2.0)?, ()));
            Ok(consort::scan(3usize, x, (), body)?.0)
        });
        let y = f.call(Tensor::from_iter([1.0])?)?.to_vec::<f64>()?;
        Ok((y, f.call(Tensor::from_iter([place(&dp)? as f64])?).and_then(|y| y.wait()).is_err()))
    });
    for (y, failed) in results.into_iter().map(Result::unwrap) {
        assert_eq!((y, failed), (vec![22.0], true));
    }
}

#[test]
fn a14_expect_equal_over_compares_at_each_call_what_is_only_declared() {
    let results = on_2_by_2(|_, dp, _| {
        let f = compile(|x: Tensor| x.neg()?.expect_equal_over(&["dp"])); // each call
        let me = place(&dp)? as f64;
        let mut outcomes = Vec::new();
        for drift in [0.0, 0.0, me] {
            // In a debug build the declaration compares too, before the call.
            let x = Tensor::from_iter([drift])?.equal_over(&["dp"]);
            outcomes.push(x.and_then(|x| f.call(x)).and_then(|y| y.to_vec::<f64>()));
        }
        Ok((outcomes, f.explain().graphs[0].program.clone()))
    });
    for result in results {
        let (outcomes, program) = result.unwrap();
        let [Ok(first), Ok(second), Err(error)] = &outcomes[..] else { panic!("{outcomes:?}") };
        assert_eq!((&first[..], &second[..]), (&[0.0][..], &[0.0][..]));
        let error = error.to_string();
        assert!(
            error.contains("expected a tensor that is equal over dp, got different ones on rank"),
            "{error}"
        );
        assert!(cfg!(debug_assertions) || error.contains(&line("// each call")), "{error}");
        assert!(program.contains("= equal_over[over=dp] "), "{program}");
    }
}

#[test]
fn a14_of_a_large_tensor_the_first_element_that_differs_is_shown() {
    let results = on_2_by_2(|mesh, dp, _| {
        let mut elements = vec![1.0f32; 5000];
        if place(&mesh)? == 3 {
            elements[4321] = 2.0;
            elements[4999] = 3.0;
        }
        let x = || Tensor::from_slice(&elements, &[50, 100]);
        let eager = x()?.expect_equal_over(&["dp"]).map(drop);
        let f = compile(|(_, x): (Tensor, Tensor)| x.equal_over(&["dp"])?.expect_equal_over(&["dp"])); // the argument
        let traced = f.call((Tensor::from_iter([1.0])?, x()?)).and_then(|y| y.wait());
        let shapes = Tensor::ones(Dtype::F32, &[1 + place(&dp)?])?.expect_equal_over(&["dp"]).map(drop);
        let text = |outcome: Result<()>| outcome.err().map(|error| error.to_string());
        Ok([text(eager), text(traced), text(shapes)])
    });
    for (rank, result) in results.into_iter().enumerate() {
        let [eager, traced, shapes] = result.unwrap();
        assert!(shapes.unwrap().contains(" has f32[1]\n"));
        if rank % 2 == 0 {
            assert_eq!((eager, traced), (None, None));
            continue;
        }
        let (eager, traced) = (eager.unwrap(), traced.unwrap());
        assert!(eager.ends_with("\n  rank 1 has 1 at [43, 21]\n  rank 3 has 2 at [43, 21]"), "{eager}");
        let parts = [
            "equal_over: expected a tensor that is equal over dp, got different ones on rank 1 and on rank 3",
            &line("// the argument"),
            "it is tensor 1 of the arguments",
            "note: outside of a compiled function, `expect_equal_over` names the first element that differs",
        ];
        assert!(parts.iter().all(|part| traced.contains(part)), "{traced}");
    }
}

#[test]
fn a14_a_comparison_under_a_condition_that_may_differ_names_the_users_call() {
    let results = on_2_by_2(|_, _, _| {
        let f = compile(|x: Tensor| {
            let is_large = x.sum_all()?.gt(0.5)?;
            consort::cond(&is_large, x, |x| x.neg()?.equal_over(&["dp"]), |x| x.exp()) // one branch
        });
        Ok(f.call(Tensor::from_iter([1.0])?).unwrap_err().to_string())
    });
    for error in results.into_iter().map(Result::unwrap) {
        assert!(error.starts_with("equal_over: stands under a condition that may differ over dp"), "{error}");
        assert!(error.contains(&line("// one branch")), "{error}");
    }
}

/// What `f` is compiled to on a mesh of 2 x 2, where its argument is made by `make`.
fn argument_type(make: impl Fn(&Group, &Group) -> Result<Tensor> + Sync) -> Vec<String> {
    let results = on_2_by_2(|_, dp, tp| {
        let own = dp.clone();
        let f = compile(move |x: Tensor| own.all_reduce(x, Reduce::Max));
        let x = make(&dp, &tp)?;
        let expected = dp.all_reduce(&x, Reduce::Max)?.to_vec::<f64>()?;
        for _ in 0..3 {
            assert_eq!(f.call(make(&dp, &tp)?)?.to_vec::<f64>()?, expected);
        }
        f.expect_steady(Steady::graphs(1))?;
        let program = f.explain().graphs[0].program.clone();
        let head = program.lines().find(|line| line.starts_with("func ")).unwrap_or_default();
        Ok(head.split("v0: ").nth(1).and_then(|rest| rest.split(')').next()).unwrap_or_default().to_string())
    });
    let mut types: Vec<String> = results.into_iter().map(Result::unwrap).collect();
    types.dedup();
    types
}

#[test]
fn a14_what_is_made_of_equal_numbers_is_typed_as_equal() {
    assert_eq!(argument_type(|_, _| Tensor::ones(Dtype::F64, &[2])), ["f64[2]"]);
    assert_eq!(argument_type(|_, _| Tensor::normal(Dtype::F64, &[2], 7)? * 0.5), ["f64[2]"]);
    // Numbers that are made of a rank: nothing refuses them, and nothing takes them to be equal.
    let of_rank = |group: &Group| Tensor::full(Dtype::F64, &[2], place(group)? as f64);
    assert_eq!(argument_type(|dp, _| of_rank(dp)), ["f64[2]{dp,tp}"]);
    assert_eq!(argument_type(|_, tp| Tensor::ones(Dtype::F64, &[2])? * place(tp)? as f64), ["f64[2]{dp,tp}"]);
    // The part depends on the place along tp, so it differs over tp and is equal over dp.
    let part = |_: &Group, tp: &Group| {
        let start = tp.rank() * 2usize;
        Tensor::uniform_part(Dtype::F64, &[2], &[4], &[start], 3)
    };
    assert_eq!(argument_type(part), ["f64[2]{tp}"]);
    // Data from outside may differ everywhere, also where numbers were added to them.
    assert_eq!(argument_type(|_, _| Tensor::from_iter([1.0, 2.0])? * 2.0), ["f64[2]{dp,tp}"]);
}

#[test]
fn a14_numbers_that_begin_to_differ_are_noticed() {
    let results = consort::spawn(2, |mesh| {
        let group = mesh.clone();
        let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum));
        let mut got = Vec::new();
        for round in 0..6 {
            let value = if round < 3 { 1.0 } else { (place(&mesh)? + round) as f64 };
            got.push(f.call(Tensor::full(Dtype::F64, &[1], value)?)?.to_vec::<f64>()?[0]);
        }
        assert_eq!(f.stats().graphs, 2, "{}", f.explain());
        let reason = f.explain().recompiles[0].to_string();
        let row = "tensor 0 of the arguments: expected one made of the same numbers on all ranks";
        assert!(reason.ends_with(row), "{reason}");
        Ok(got)
    });
    for got in results.into_iter().map(Result::unwrap) {
        assert_eq!(got, [2.0, 2.0, 2.0, 7.0, 9.0, 11.0]);
    }
}

#[test]
fn a14_what_is_written_later_has_no_origin() {
    let results = consort::spawn(2, |mesh| {
        let group = mesh.clone();
        let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum));
        let (me, ones) = (place(&mesh)? as f64, || Tensor::ones(Dtype::F64, &[2]));
        let mut updated = ones()?;
        updated.update(|x: &mut [f64]| x[0] = me)?;
        let mut copied = ones()?;
        copied.slice_mut(&[0], &[1])?.copy_from(&Tensor::from_iter([me])?)?;
        let mut whole = ones()?;
        whole.slice_mut(&[0], &[2])?.copy_from(&Tensor::from_iter([me, 1.0])?)?;
        let mut reduced = Tensor::full(Dtype::F64, &[2], me)?;
        mesh.all_reduce_(&mut reduced, Reduce::Sum)?;
        assert!(reduced.varies().is_empty());
        for x in [updated, copied, whole] {
            assert_eq!(f.call(x)?.to_vec::<f64>()?, [1.0, 2.0]);
        }
        assert_eq!(f.call(reduced)?.to_vec::<f64>()?, [2.0, 2.0]);
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn a14_sizes_of_a_tensor_that_is_equal_over_an_axis_are_equal_over_it() {
    let sums = on_2_by_2(|_, dp, tp| {
        let me = place(&tp)?;
        let group = tp.clone();
        let x = Tensor::from_slice(&vec![1.0f32; 3 + me], &[3 + me])?.equal_over(&["dp"])?;
        let f = compile(move |x: Tensor| group.all_reduce(x.neg()?.sum_all()?, Reduce::Sum)?.replicated());
        let first = f.call(x)?.item::<f32>()?;
        // Sizes that differ over dp now: no longer those of a tensor that is equal over it.
        let other = 3 + 2 * me + place(&dp)?;
        let x = Tensor::from_slice(&vec![1.0f32; other], &[other])?;
        Ok((first, f.call(x).unwrap_err().to_string()))
    });
    for sum in sums {
        let (first, error) = sum.unwrap();
        assert_eq!(first, -7.0);
        assert!(error.contains("replicated"), "{error}");
    }
}

#[test]
fn a14_numbers_that_begin_to_differ_in_a_function_of_one_rank_are_not_taken_as_equal() {
    let results = on_2_by_2(|mesh, _, _| {
        let f = compile(|x: Tensor| x.exp());
        let full = |x: usize| Tensor::full(Dtype::F64, &[1], x as f64);
        let first = f.call(full(1)?)?.varies();
        Ok([first, f.call(full(place(&mesh)?)?)?.varies()])
    });
    for [first, later] in results.into_iter().map(Result::unwrap) {
        // The ranks do not meet at later calls, so what the first call compared does not hold for them.
        assert_eq!(
            (first, later),
            (vec!["dp".to_string(), "tp".into()], vec!["dp".to_string(), "tp".into()])
        );
    }
}

#[test]
fn a14_a_loss_without_communication_is_equal_for_numbers_that_all_ranks_compared() {
    let results = on_2_by_2(|mesh, _, _| {
        let f = compile(|x: Tensor| value_and_grad(|x: Tensor| x.mul(&x)?.sum_all()).call(x));
        let full = |x: usize| Tensor::full(Dtype::F64, &[2], x as f64);
        let (loss, slope) = f.call(full(2)?)?;
        let first = (loss.varies(), loss.item::<f64>()?, slope.to_vec::<f64>()?);
        let again = f.call(full(2)?)?.0.item::<f64>()?;
        let later = f.call(full(place(&mesh)?)?).map(drop).map_err(|error| error.to_string());
        Ok((first, again, later))
    });
    for (rank, result) in results.into_iter().enumerate() {
        let (first, again, later) = result.unwrap();
        assert_eq!((first, again), ((Vec::new(), 8.0, vec![4.0, 4.0]), 8.0));
        // Nobody compares the numbers of a later call, and those of rank 2 are the ones that all had.
        match later {
            Ok(()) => assert_eq!(rank, 2),
            Err(error) => assert!(
                error.contains("expected a loss that is equal on all ranks, got one that differs over dp,tp"),
                "{error}"
            ),
        }
    }
}

#[test]
fn a14_ranks_of_a_sub_mesh_take_nothing_as_equal_on_others() {
    let results = on_2_by_2(|mesh, _, tp| {
        let group = tp.clone();
        let sum = |own: Declared, group: &Group| group.all_reduce(own.weight, Reduce::Sum);
        let f = compile(move |own: Declared| sum(own, &group)).over(&tp);
        let alone = compile(|own: Declared| own.weight.neg()).local();
        let made = compile(|x: Tensor| x.neg()).over(&tp);
        let own = |x: usize| Ok(Declared { weight: Tensor::from_iter([x as f64])? });
        // Equal over tp, and not over dp, as its field says.
        let row = place(&mesh)? / 2;
        let sums = (0..3).map(|_| f.call(own(row)?)).collect::<Result<Vec<_>>>()?;
        let varies = [
            sums[2].varies(),
            alone.call(own(row)?)?.varies(),
            made.call(Tensor::full(Dtype::F64, &[1], row as f64)?)?.varies(),
        ];
        f.expect_steady(Steady::graphs(1))?;
        Ok((sums[2].item::<f64>()?, varies))
    });
    for (rank, result) in results.into_iter().enumerate() {
        let (sum, varies) = result.unwrap();
        assert_eq!(sum, 2.0 * (rank / 2) as f64);
        let [sum, alone, made] = varies.each_ref().map(|axes| axes.join(","));
        assert_eq!((&sum[..], &alone[..], &made[..]), ("dp", "dp,tp", "dp,tp"));
    }
}

#[test]
fn a14_a_local_function_takes_nothing_as_equal() {
    let errors = on_2_by_2(|mesh, _, _| {
        let me = mesh.my_rank()? as f64;
        let f = compile(|x: Tensor| x.exp()?.replicated()).local();
        Ok(f.call(Tensor::full(Dtype::F32, &[1], me)?).unwrap_err().to_string())
    });
    for error in errors {
        assert!(error.unwrap().contains("replicated"));
    }
}
