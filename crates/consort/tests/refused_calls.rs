//! Calls with arguments that cannot be meant are errors at the line of the caller: they neither panic nor give a result.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::kernels::View;
use consort::nn::{Adam, Config, Generator, Llama, Sgd, cross_entropy, share};
use consort::ops::{Cost, CostCx, Cotangents, EvalCx, EvalError, InferCx, OpDef, VjpCx};
use consort::{
    Backward, Dtype, Error, Init, Reduce, Result, Route, Tensor, apply, compile, custom_vjp, grad, scan,
    spawn,
};
use consort_ir::literal::Literal;
use consort_ir::op;
use consort_ir::types::Type;
use consort_types::Failure;

fn floats(list: &[f64]) -> Tensor {
    Tensor::from_slice(list, &[list.len()]).unwrap()
}

/// The first line of an error of this line of this file.
#[track_caller]
fn at(error: &Error, line: u32) -> String {
    assert_eq!((error.site().file(), error.site().line()), (file!(), line), "{error}");
    error.to_string().lines().next().unwrap().to_string()
}

/// The sum of the backward is over all rows at once, and the forward is not computed: its places are still checked.
#[test]
fn the_gradient_of_take_along_refuses_the_places_that_take_along_refuses() {
    let x = Tensor::from_slice(&[1.0f64, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]).unwrap();
    // Along dimension 0 of 2, and along dimension 1 of 3.
    for (dim, shape, size) in [(0, [1, 3], 2), (1, [2, 1], 3)] {
        for dtype in [Dtype::I32, Dtype::I64] {
            for place in [-3i64, -1, 0, 1, 2, 3, 5] {
                let list: Vec<i64> =
                    (0..shape[0] * shape[1]).map(|i| if i == 0 { place } else { 0 }).collect();
                let places = Tensor::from_slice(&list, &shape).unwrap().cast(dtype).unwrap();
                let slope = grad(move |x: Tensor| x.take_along(&places, dim)?.sum_all()).call(x.clone());
                let slope = slope.and_then(|slope| slope.to_vec::<f64>());
                if (0..size).contains(&place) {
                    let mut expected = [0.0; 6];
                    for (i, place) in list.iter().enumerate() {
                        let (row, column) = (i / shape[1], i % shape[1]);
                        let to = if dim == 0 { (*place as usize, column) } else { (row, *place as usize) };
                        expected[to.0 * 3 + to.1] += 1.0;
                    }
                    assert_eq!(slope.unwrap(), expected, "{dim} {place}");
                } else {
                    let error = slope.unwrap_err().to_string();
                    let wanted = format!("expected places in 0..{size}, got {place}");
                    assert!(error.contains(&wanted), "{error}");
                }
            }
        }
    }
}

#[test]
fn the_gradient_of_cross_entropy_refuses_a_target_that_is_no_class() {
    let logits = Tensor::from_slice(&[1.0f64, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    for wrong in [[2i64, 0], [0, -1], [0, 2], [-2, 1]] {
        let targets = Tensor::from_iter(wrong).unwrap().replicated().unwrap();
        let own = targets.clone();
        let slope = grad(move |logits: Tensor| cross_entropy(&logits, &own)).call(logits.clone());
        let slope = slope.and_then(|slope| slope.to_vec::<f64>());
        assert!(slope.is_err(), "{wrong:?}: {slope:?}");
    }
}

#[test]
fn sums_of_gradients_are_of_floats() {
    for dtype in [Dtype::I64, Dtype::I32, Dtype::U8, Dtype::Bool] {
        let how = Backward::new().sums_in(dtype);
        let wanted = format!(": expected `sums_in` with an element type of floats, got {dtype}");
        let square = |x: Tensor| x.mul(&x)?.sum_all();
        let slope = how.grad(square);
        let error = slope.call(floats(&[1.0])).map(drop).unwrap_err();
        assert_eq!(at(&error, line!() - 2), format!("grad{wanted}"));
        let both = how.value_and_grad(square);
        let error = both.call(floats(&[1.0])).map(drop).unwrap_err();
        assert_eq!(at(&error, line!() - 2), format!("value_and_grad{wanted}"));
        let pull = how.vjp(square);
        let error = pull.call((floats(&[1.0]), Tensor::scalar(1.0f64).unwrap())).map(drop).unwrap_err();
        assert_eq!(at(&error, line!() - 2), format!("vjp{wanted}"));
    }
}

#[test]
fn numbers_that_are_too_large_are_errors() {
    let results = Init::new().heap(usize::MAX).spawn(2, |_| Ok(()));
    let first = at(results[0].as_ref().unwrap_err(), line!() - 1);
    assert!(
        first.starts_with(&format!("spawn: a heap of {} bytes for each of 2 ranks: ", usize::MAX)),
        "{first}"
    );
    let results = spawn(usize::MAX, |_| Ok(()));
    let first = at(results[0].as_ref().unwrap_err(), line!() - 1);
    assert_eq!(first, format!("spawn: expected at most 1024 ranks, got {}", usize::MAX));
    assert_eq!(results.len(), 1);

    let lines = spawn(1, |mesh| {
        let model = Llama::random(&Config::tiny(), &mesh, 1)?;
        let mut lines = Vec::new();
        let error = model.generate(&[1], usize::MAX, None).unwrap_err();
        lines.push(at(&error, line!() - 1));
        let mut generator = Generator::new(model, 64)?;
        let error = generator.generate(&[1], usize::MAX, None).unwrap_err();
        lines.push(at(&error, line!() - 1));
        Ok(lines)
    });
    for line in lines.into_iter().next().unwrap().unwrap() {
        assert!(line.starts_with("generate: expected a prompt, and room for it and "), "{line}");
    }

    let errors = spawn(2, |mesh| {
        let group = mesh.clone();
        let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)).lockstep(usize::MAX);
        for n in [2, 2, 3] {
            f.call(Tensor::ones(Dtype::F32, &[n])?)?.wait()?;
        }
        Ok(())
    });
    for error in errors {
        let first = at(&error.unwrap_err(), line!() - 5);
        assert!(first.contains("expected a call for which it was compiled"), "{first}");
    }
}

#[test]
fn shares_of_large_lists_tile_them() {
    for members in [1, 2, 3, 7] {
        let mut end = 0;
        for member in 0..members {
            let own = share(usize::MAX, member, members);
            assert_eq!(own.start, end);
            assert!(own.len() - usize::MAX / members <= 1);
            end = own.end;
        }
        assert_eq!(end, usize::MAX);
    }
    assert_eq!([share(5, 0, 0), share(5, 7, 3), share(0, 0, 2)], [5..5, 5..5, 0..0]);
}

#[test]
fn elements_that_are_wider_than_those_of_a_view_are_an_error() {
    let bytes = [0u8; 8];
    let view = View { dtype: Dtype::F32, shape: &[2], strides: &[1], bytes: &bytes };
    assert_eq!(view.elements::<u8>().unwrap().len(), 2);
    let error = view.elements::<u64>().unwrap_err().to_string();
    assert!(error.contains("expected 2 elements of 8 bytes, got a tensor of f32 with 8 bytes"), "{error}");
    assert!(view.elements::<u128>().is_err());
}

#[test]
fn an_optimizer_refuses_what_does_not_fit_its_parameters() {
    let (one, two) = (floats(&[1.0]), floats(&[1.0, 2.0]));
    let params = vec![one.clone(), two.clone()];
    let (adam, sgd) = (Adam::default(), Sgd { momentum: 0.9 });
    let (moments, velocities) = (adam.state(&params).unwrap(), sgd.state(&params).unwrap());
    let fewer = "step: expected 2 gradients, one for each parameter, got 1";
    let more = "step: expected 2 gradients, one for each parameter, got 3";
    let shape = "step: expected gradients of the shapes of the parameters, number 0 of [1], got [2]";
    for (grads, wanted) in [
        (vec![one.clone()], fewer),
        (vec![one.clone(), two.clone(), one.clone()], more),
        (vec![two.clone(), two.clone()], shape),
    ] {
        let error = adam.step(&params, &grads, &moments, 0.1).map(drop).unwrap_err();
        assert_eq!(at(&error, line!() - 1), wanted);
        let error = sgd.step(&params, &grads, &velocities, 0.1).map(drop).unwrap_err();
        assert_eq!(at(&error, line!() - 1), wanted);
    }
    let other = vec![one.clone()];
    let error = adam.step(&params, &params, &adam.state(&other).unwrap(), 0.1).map(drop).unwrap_err();
    let wanted = "step: expected 2 first moments, one for each parameter, got 1";
    assert_eq!(at(&error, line!() - 2), wanted);
    let error = sgd.step(&params, &params, &sgd.state(&other).unwrap(), 0.1).map(drop).unwrap_err();
    let wanted = "step: expected 2 tensors of the state, one for each parameter, got 1";
    assert_eq!(at(&error, line!() - 2), wanted);
    // Also when it is traced, with sizes that are not known then.
    let step = compile(move |(w, slope): (Tensor, Tensor)| Ok(sgd.step(&w, &slope, &None, 0.1)?.0));
    let step = step.dynamic(0, 0).dynamic(1, 0);
    let w = step.call((two.clone(), two.clone())).unwrap().to_vec::<f64>().unwrap();
    assert_eq!(w, [1.0 - 0.1 * 1.0, 2.0 - 0.1 * 2.0]);
}

#[test]
fn a_gradient_past_the_limit_of_compilations_says_the_way_out() {
    let slope = grad(|x: Tensor| x.mul(&x)?.sum_all()).limit(1);
    let made = line!() - 1;
    assert_eq!(slope.call(floats(&[1.0])).unwrap().to_vec::<f64>().unwrap(), [2.0]);
    let error = slope.call(floats(&[1.0, 2.0])).map(drop).unwrap_err();
    assert_eq!(at(&error, made), "grad: a gradient needs a compiled function, and this one runs uncompiled");
    let error = error.to_string();
    assert!(error.contains("note: ") && error.contains("raise `limit`"), "{error}");
}

op! {
    /// The identity, with a gradient rule that returns a list of this length.
    pub struct Lists("lists_cotangents")(x) {
        /// The length.
        n: usize
    }
    example ""
}

impl OpDef for Lists {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![cx.tensor(0)?.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![args[0].clone()])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        Ok(vec![Some(cx.cotangent(0)); self.n])
    }
}

#[test]
fn a_rule_that_returns_another_number_of_cotangents_is_an_error() {
    for n in 0..3 {
        let slope = grad(move |x: Tensor| apply(&Lists { n }, [x])?[0].sum_all()).call(floats(&[1.0, 2.0]));
        if n == 1 {
            assert_eq!(slope.unwrap().to_vec::<f64>().unwrap(), [1.0, 1.0]);
        } else {
            let error = slope.map(drop).unwrap_err().to_string();
            let wanted =
                format!("expected a cotangent, or `None`, for each of the 1 operands, got a list of {n}");
            assert!(error.contains(&wanted) && error.contains("note: "), "{error}");
        }
    }
}

#[test]
fn the_wait_of_a_dropped_send_in_a_loss_is_an_error_at_the_line_of_the_send() {
    let outcomes = spawn(2, |mesh| {
        let group = mesh.clone();
        let slope = grad(move |x: Tensor| {
            drop(group.isend(&x, Route::Ring(1), 3)?);
            group.all_reduce(x.sum_all()?, Reduce::Avg)
        });
        slope.call(Tensor::ones(Dtype::F64, &[2])?).map(drop)
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err().to_string();
        assert!(!error.contains("blocks.rs") && error.contains("refused_calls.rs"), "{error}");
    }
}

/// A scan in a scan, n deep, of a function of x.
fn nested(n: usize, x: Tensor) -> Result<Tensor> {
    if n == 0 { x.sin() } else { Ok(scan(1, x, (), |x, ()| Ok((nested(n - 1, x)?, ())))?.0) }
}

/// A function with a rule of its own in another, n deep.
fn nested_rules(n: usize, x: Tensor) -> Result<Tensor> {
    let forward = move |x: Tensor| Ok((nested_rules(n - 1, x)?, ()));
    if n == 0 { x.sin() } else { custom_vjp(forward, |(), slope: Tensor| Ok(slope))(x) }
}

/// Gradients in gradients of x^2, n deep.
fn nested_gradients(n: usize, x: Tensor) -> Result<Tensor> {
    if n == 0 { x.mul(&x)?.sum_all() } else { grad(move |x| nested_gradients(n - 1, x)).call(x)?.sum_all() }
}

#[test]
fn functions_inside_one_another_have_a_limit() {
    // On a thread of a rank, and of a test. The gradient of the loss itself is one.
    let outcomes = spawn(1, |_| {
        let slope = grad(|x: Tensor| nested(63, x)?.sum_all()).call(floats(&[0.0]))?;
        assert_eq!(slope.to_vec::<f64>()?, [1.0]);
        let kinds: [fn(usize, Tensor) -> Result<Tensor>; 3] = [nested, nested_rules, nested_gradients];
        for nested in kinds {
            let error = grad(move |x: Tensor| nested(1000, x)?.sum_all()).call(floats(&[0.0]));
            let error = error.map(drop).unwrap_err();
            assert_eq!(error.site().file(), file!(), "{error}");
            let error = error.to_string();
            let wanted =
                "expected at most 64 loops, branches and gradients inside one another, got more than 64";
            assert!(error.contains(wanted) && error.contains("note: "), "{error}");
        }
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
