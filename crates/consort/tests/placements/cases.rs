//! Placements that users declare, on a mesh of 2 x 2 ranks: as threads, as processes, and over MPI.

use consort::{Flatten, Group, Mesh, Reduce, Result, Steady, Tensor, compile, compile_mut};

/// A case by name, on a mesh with the axes `dp` and `tp`, of size 2.
pub(crate) type Case = (&'static str, fn(Mesh) -> Result<()>);

/// Cases after which the ranks can be used for the next case.
pub(crate) const CASES: [Case; 1] = [(
    "a14_a_right_step_is_not_refused_and_weights_stay_equal",
    a14_a_right_step_is_not_refused_and_weights_stay_equal,
)];

/// Those that end in an error.
pub(crate) const REFUSED: [Case; 4] = [
    (
        "a14_a_weight_that_would_drift_is_an_error_of_the_trace",
        a14_a_weight_that_would_drift_is_an_error_of_the_trace,
    ),
    (
        "a14_equality_in_a_trace_follows_from_types_or_is_compared",
        a14_equality_in_a_trace_follows_from_types_or_is_compared,
    ),
    ("a14_declared_tensors_are_compared_axis_by_axis", a14_declared_tensors_are_compared_axis_by_axis),
    (
        "a14_state_that_drifts_between_calls_is_an_error_on_every_rank",
        a14_state_that_drifts_between_calls_is_an_error_on_every_rank,
    ),
];

pub(crate) fn place(group: &Group) -> Result<usize> {
    group.my_rank()
}

/// The line of this file with this text, as errors name it.
fn line(text: &str) -> String {
    let at = include_str!("cases.rs").lines().position(|line| line.contains(text)).unwrap();
    format!("crates/consort/tests/placements/cases.rs:{}", at + 1)
}

/// A linear model of which each rank has a shard along tp, and all along dp the same.
#[derive(Flatten)]
pub(crate) struct Model {
    #[flatten(equal_over = "dp")]
    pub(crate) weight: Tensor,
    #[flatten(equal_over = "dp, tp")]
    pub(crate) scale: Tensor,
}

pub(crate) fn model(tp: &Group) -> Result<Model> {
    let weight = Tensor::from_iter((0..3).map(|i| (10 * place(tp).unwrap() + i) as f64))?;
    Ok(Model { weight, scale: Tensor::from_slice(&[0.5], &[])? })
}

/// A step of gradient descent on rows that each rank along dp has for itself.
pub(crate) fn step(model: &mut Model, x: &Tensor, dp: Option<&Group>) -> Result<()> {
    let grad = x.mul(&model.scale)?;
    let grad = match dp {
        Some(dp) => dp.all_reduce(grad, Reduce::Avg)?,
        None => grad,
    };
    model.weight.sub_(&grad)
}

pub(crate) fn rows(dp: &Group, round: usize) -> Result<Tensor> {
    let first = place(dp)? * 7 + round;
    Tensor::from_iter((first..first + 3).map(|i| i as f64))
}

fn a14_a_weight_that_would_drift_is_an_error_of_the_trace(mesh: Mesh) -> Result<()> {
    let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
    let forgets = compile_mut(|model: &mut Model, x: Tensor| step(model, &x, None));
    let mut model = model(&tp)?;
    let before = model.weight.to_vec::<f64>()?;
    let error = forgets.call(&mut model, rows(&dp, 0)?).unwrap_err().to_string();
    // Nothing ran.
    assert_eq!(model.weight.to_vec::<f64>()?, before);
    let wanted = "expected field `weight` equal over dp, as it is declared, got one that may differ over dp";
    assert!(error.contains(wanted), "{error}");
    assert!(error.contains(&line("model.weight.sub_")), "{error}");
    assert!(error.contains("note: reduce what changes it over dp"), "{error}");
    Ok(())
}

fn a14_a_right_step_is_not_refused_and_weights_stay_equal(mesh: Mesh) -> Result<()> {
    let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
    let own = dp.clone();
    let sums = compile_mut(move |model: &mut Model, x: Tensor| step(model, &x, Some(&own)));
    let mut model = model(&tp)?;
    for round in 0..5 {
        sums.call(&mut model, rows(&dp, round)?)?;
    }
    assert_eq!((model.weight.varies(), model.scale.varies().len()), (vec!["tp".to_string()], 0));
    sums.expect_steady(Steady::graphs(1))?;
    let weight = model.weight.expect_equal_over(&["dp"])?.to_vec::<f64>()?;
    // In each round the rows of the two places along dp are 7 apart.
    let changes = |i: usize| (0..5).map(|round| (round + i) as f64 * 0.5 + 1.75).sum::<f64>();
    let me = place(&tp)?;
    assert_eq!(weight, (0..3).map(|i| (10 * me + i) as f64 - changes(i)).collect::<Vec<_>>());
    Ok(())
}

fn a14_equality_in_a_trace_follows_from_types_or_is_compared(mesh: Mesh) -> Result<()> {
    let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
    let own = dp.clone();
    let sum = compile(move |x: Tensor| own.all_reduce(x, Reduce::Sum)?.equal_over(&["dp"]));
    assert_eq!(sum.call(Tensor::from_iter([1.0])?)?.to_vec::<f64>()?, [2.0]);
    assert!(!sum.explain().graphs[0].program.contains("equal_over"));
    // The type does not say it, so the program compares.
    let claims = compile(|x: Tensor| x.neg()?.equal_over(&["dp"])?.exp()).name("claims");
    for round in 0..3 {
        let y = claims.call(Tensor::from_iter([(place(&tp)? + round) as f64])?)?;
        assert_eq!(y.varies(), ["tp"]);
        let expected = (-((place(&tp)? + round) as f64)).exp();
        assert!((y.item::<f64>()? - expected).abs() < 1e-12);
    }
    claims.expect_steady(Steady::graphs(1))?;
    assert_eq!((claims.stats().copied_bytes, claims.explain().graphs[0].starts), (0, 1));
    // At a later call the tensor differs over dp on the ranks with place 1 along tp.
    let rest = Tensor::from_iter([(place(&tp)? * (1 + place(&dp)?)) as f64])?;
    let outcome = claims.call(rest).and_then(|y| y.item::<f64>());
    if place(&tp)? == 0 {
        assert_eq!(outcome?, 1.0);
        return Ok(());
    }
    let error = outcome.unwrap_err().to_string();
    let wanted =
        "equal_over: expected a tensor that is equal over dp, got different ones on rank 1 and on rank 3\n";
    assert!(error.starts_with(wanted), "{error}");
    assert!(error.contains(&format!("\n  at {}", line("equal_over(&[\"dp\"])?.exp()"))), "{error}");
    Ok(())
}

fn a14_declared_tensors_are_compared_axis_by_axis(mesh: Mesh) -> Result<()> {
    let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
    let x = Tensor::from_iter([place(&tp)? as f32])?;
    let shard = x.clone().expect_equal_over(&["dp"])?;
    assert_eq!(shard.varies(), ["tp"]);
    let error = x.expect_equal_over(&["dp", "tp"]).unwrap_err().to_string();
    let (a, b) = (2 * place(&dp)?, 2 * place(&dp)? + 1);
    let wanted = format!(
        "equal over tp, got different ones on rank {a} and on rank {b}\n  at {}\n  rank {a} has [0]\n  rank {b} has [1]",
        line("let error = x.expect_equal_over")
    );
    assert!(error.contains(&wanted), "{error}");
    Ok(())
}

/// State that a compiled function must find and leave equal, though its fields do not declare it.
#[derive(Flatten)]
struct State {
    weight: Tensor,
}

fn a14_state_that_drifts_between_calls_is_an_error_on_every_rank(mesh: Mesh) -> Result<()> {
    let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
    let own = dp.clone();
    let step = compile_mut(move |model: &mut State, x: Tensor| {
        model.weight = model.weight.clone().expect_equal_over(&["dp"])?; // of the state
        model.weight.sub_(&own.all_reduce(x, Reduce::Sum)?)
    });
    let me = place(&tp)? as f64;
    let mut state = State { weight: Tensor::from_iter([me, 10.0])? };
    for call in 1..3 {
        step.call(&mut state, Tensor::from_iter([1.0, place(&dp)? as f64])?)?;
        let call = f64::from(call);
        assert_eq!(state.weight.to_vec::<f64>()?, [me - 2.0 * call, 10.0 - call]);
    }
    // The second rank along dp has another weight now, at either place along tp.
    let drift = place(&dp)? as f64;
    state.weight.update(|x: &mut [f64]| x[1] += drift)?;
    let outcome = step.call(&mut state, Tensor::from_iter([1.0, 1.0])?);
    let error = outcome.and_then(|()| state.weight.wait()).unwrap_err().to_string();
    let (a, b) = (place(&tp)?, 2 + place(&tp)?);
    let wanted = format!(
        "equal_over: expected a tensor that is equal over dp, got different ones on rank {a} and on rank {b}\n"
    );
    assert!(error.starts_with(&wanted), "{error}");
    assert!(error.contains(&format!("\n  at {}", line("// of the state"))), "{error}");
    Ok(())
}
