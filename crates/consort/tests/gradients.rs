//! Gradients through the API, on ranks: alone and inside compiled functions.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "gradients/cases.rs"]
mod cases;

use consort::{
    Backward, Dtype, Init, Mesh, Missing, Reduce, Result, Route, Steady, Tensor, compile, grad,
    value_and_grad, value_and_grad_first, vjp,
};

/// The results of two ranks along `tp`.
fn on_two<T: Send + 'static>(f: impl Fn(Mesh) -> Result<T> + Send + Sync + 'static) -> Vec<Result<T>> {
    Init::new().axes(&[("tp", 2)]).spawn(2, f)
}

/// Each collective once, in a loss whose gradient is known: x and w are those of both ranks.
#[test]
fn a14_gradients_of_collectives_follow_from_placements() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let rank = mesh.my_rank()? as f64;
        let factor = Tensor::from_iter([rank + 1.0])?;
        let loss = grad(move |x: Tensor| {
            let gathered = tp.all_gather(&x, 0)?; // [x0, x1]
            let part = tp.reduce_scatter(gathered.mul(&gathered)?, Reduce::Sum, 0)?; // 2 xr^2
            let moved = tp.permute(part, Route::Ring(1), Missing::Error)?; // 2 x(1-r)^2
            let sum = tp.all_reduce(moved.mul(&factor)?.sum_all()?, Reduce::Sum)?;
            tp.broadcast(sum, 0)
        });
        loss.call(Tensor::from_iter([rank + 1.0])?)?.item::<f64>()
    });
    // The loss is 1 * 2 x1^2 + 2 * 2 x0^2, at x0 = 1 and x1 = 2.
    assert_eq!(made.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [8.0, 8.0]);
}

#[test]
fn b13_the_gradient_in_a_compiled_function_equals_the_one_alone() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let square = move |w: Tensor| {
            let y = tp.all_reduce(w.mul(&w)?, Reduce::Sum)?;
            y.mul(&y)?.sum_all()
        };
        let inner = square.clone();
        let alone = value_and_grad(square);
        let whole = compile(move |w: Tensor| {
            let (loss, slope) = value_and_grad(inner.clone()).call(w.clone())?;
            Ok((loss, w.sub(&slope.mul(0.5)?)?))
        });
        let w = Tensor::from_iter([1.0 + mesh.my_rank()? as f64])?;
        let (loss, slope) = alone.call(w.clone())?;
        let (same, next) = whole.call(w.clone())?;
        let step = w.sub(&slope.mul(0.5)?)?;
        Ok([loss.item::<f64>()?, same.item()?, slope.item()?, next.item::<f64>()? - step.item::<f64>()?])
    });
    // y = 1 + 4, the loss y^2, the slope 2 y * 2 w.
    let made: Vec<[f64; 4]> = made.into_iter().map(Result::unwrap).collect();
    assert_eq!(made, [[25.0, 25.0, 20.0, 0.0], [25.0, 25.0, 40.0, 0.0]]);
}

#[test]
fn a_gradient_of_a_gradient() {
    let second = grad(|x: Tensor| {
        let first = grad(|x: Tensor| x.mul(&x)?.mul(&x)?.sum_all());
        first.call(x)?.sum_all()
    });
    let x = Tensor::from_iter([1.0f64, 2.0]).unwrap();
    assert_eq!(second.call(x).unwrap().to_vec::<f64>().unwrap(), [6.0, 12.0]);
}

#[test]
fn a_loss_that_differs_is_an_error_on_every_rank() {
    let made = on_two(|mesh| {
        let x = Tensor::from_iter([mesh.my_rank()? as f64])?;
        grad(|x: Tensor| x.mul(&x)?.sum_all()).call(x)?.item::<f64>()
    });
    for outcome in made {
        let text = outcome.unwrap_err().to_string();
        assert!(
            text.contains("expected a loss that is equal on all ranks, got one that differs over tp"),
            "{text}"
        );
        assert!(text.contains("note: average it over tp"), "{text}");
    }
}

#[test]
fn a_gradient_by_integers_is_refused() {
    let error = grad(|(x, i): (Tensor, Tensor)| x.gather(&i, 0)?.sum_all())
        .call((Tensor::from_iter([1.0f64, 2.0]).unwrap(), Tensor::from_iter([1i64]).unwrap()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("argument 1: expected a float tensor, got i64[1]"), "{error}");
    assert!(error.contains("note: data without a derivative must be captured"), "{error}");
}

/// The loss of data parallel training, with the batch as the second argument: no batch is a constant of the program.
#[test]
fn a_gradient_by_the_first_argument_takes_any_data() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let step = value_and_grad_first(move |table: Tensor, (at, scale): (Tensor, Tensor)| {
            tp.all_reduce(table.gather(&at, 0)?.mul(&scale)?.sum_all()?, Reduce::Avg)
        });
        let table = Tensor::from_iter([1.0f64, 2.0, 4.0])?.equal_over(&["tp"])?;
        let mut slopes = Vec::new();
        for batch in 0..3 {
            let at = Tensor::from_iter([mesh.my_rank()? as i64, batch])?;
            let (_, slope) = step.call((table.clone(), (at, Tensor::from_iter([1.0, 10.0])?)))?;
            slopes.push(slope.to_vec::<f64>()?);
        }
        step.expect_steady(Steady::graphs(1))?;
        Ok(slopes)
    });
    // Half of 1 at the rank's row, on each rank, and 10 at the batch's.
    let wanted = [vec![10.5, 0.5, 0.0], vec![0.5, 10.5, 0.0], vec![0.5, 0.5, 10.0]];
    assert!(made.into_iter().all(|slopes| slopes.unwrap() == wanted));
}

/// The layer y = all_reduce(x w) weighed by c: its gradient is that of the sum of c y.
#[test]
fn a14_a_cotangent_weighs_all_results() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let rank = mesh.my_rank()? as f64;
        let layer = move |(x, w): (Tensor, Tensor)| {
            let y = tp.all_reduce(x.mul(&w)?, Reduce::Sum)?;
            Ok((y, w.mul(&w)?, Tensor::from_iter([7i64])?))
        };
        let tp = mesh.axis("tp")?;
        let inner = layer.clone();
        let c = Tensor::from_iter([3.0, 4.0])?.equal_over(&["tp"])?;
        let weights = c.clone();
        let whole = grad(move |(x, w): (Tensor, Tensor)| {
            let (y, squares, _) = inner((x, w))?;
            let own = squares.mul(&Tensor::from_iter([5.0, 6.0])?)?.sum_all()?;
            let sum = y.mul(&weights)?.sum_all()?;
            sum.add(&tp.all_reduce(own, Reduce::Sum)?)
        });
        let pull = vjp(layer.clone());
        let inside = {
            let layer = layer.clone();
            compile(move |(args, c): ((Tensor, Tensor), (Tensor, Tensor, Tensor))| {
                Ok(vjp(layer.clone()).call((args, c))?.1)
            })
        };
        let x = Tensor::from_iter([1.0, 2.0])?.equal_over(&["tp"])?;
        let w = Tensor::from_iter([rank + 1.0, rank])?;
        let c = (c, Tensor::from_iter([5.0, 6.0])?, Tensor::from_iter([0i64])?);
        let ((y, _, _), (of_x, of_w)) = pull.call(((x.clone(), w.clone()), c.clone()))?;
        let (same_x, same_w) = whole.call((x.clone(), w.clone()))?;
        let (inside_x, inside_w) = inside.call(((x, w), c))?;
        let lists = [y, of_x, of_w, same_x, same_w, inside_x, inside_w];
        lists.iter().map(Tensor::to_vec::<f64>).collect::<Result<Vec<_>>>()
    });
    for (rank, made) in made.into_iter().enumerate() {
        let (made, rank) = (made.unwrap(), rank as f64);
        // y = [1 + 2, 2 (0 + 1)]; by x: c (w of both ranks); by w: c x + 2 w d.
        let by_x = vec![3.0 * 3.0, 4.0];
        let by_w = vec![3.0 + 10.0 * (rank + 1.0), 8.0 + 12.0 * rank];
        assert_eq!(made[0], [3.0, 2.0]);
        assert_eq!(made[1..], [by_x.clone(), by_w.clone(), by_x.clone(), by_w.clone(), by_x, by_w]);
    }
}

#[test]
fn a_cotangent_must_fit_its_result() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let pull = vjp(move |x: Tensor| tp.all_reduce(x, Reduce::Sum));
        let x = Tensor::from_iter([mesh.my_rank()? as f64])?;
        let differs = pull.call((x.clone(), Tensor::from_iter([1.0])?)).map(drop).unwrap_err().to_string();
        let small = Tensor::from_iter([1.0f32])?.equal_over(&["tp"])?;
        Ok((differs, pull.call((x, small)).map(drop).unwrap_err().to_string()))
    });
    for made in made {
        let (differs, small) = made.unwrap();
        assert!(
            differs.contains("vjp: expected a cotangent of result 0 of type f64[1], got f64[1]{tp}"),
            "{differs}"
        );
        assert!(small.contains("expected a cotangent of result 0 of type f64[1], got f32[1]"), "{small}");
        assert!(small.contains("gradients.rs"), "{small}");
    }
}

/// Two stages as functions of their own: the cotangent of the second enters the first.
#[test]
fn b13_stages_go_backward_by_vjp() {
    let first = |w: Tensor| w.mul(&w);
    let second = |y: Tensor| y.mul(&y)?.sum_all();
    let w = Tensor::from_iter([1.0f64, 2.0]).unwrap();
    let y = compile(first).call(w.clone()).unwrap();
    let (loss, of_y) = value_and_grad(second).call(y).unwrap();
    let (_, of_w) = vjp(first).call((w, of_y)).unwrap();
    // The sum of w^4.
    assert_eq!(loss.item::<f64>().unwrap(), 17.0);
    assert_eq!(of_w.to_vec::<f64>().unwrap(), [4.0, 32.0]);
}

#[test]
fn sums_of_gradients_have_the_element_type_that_is_asked_for() {
    for (how, ty) in [(Backward::new(), "bf16"), (Backward::new().sums_in(Dtype::F32), "f32")] {
        let made = on_two(move |mesh| {
            let tp = mesh.axis("tp")?;
            // The gradients are 1 and 2^-7, and have their sum as a bfloat16 number.
            let x = [1.0f32, 2f32.powi(-7)][mesh.my_rank()?];
            let x = Tensor::from_iter([x])?.cast(Dtype::Bf16)?;
            let slope = how
                .grad(move |w: Tensor| tp.all_reduce(w.mul(&x)?.cast(Dtype::F32)?.sum_all()?, Reduce::Sum));
            let w = Tensor::from_iter([1.0f32])?.cast(Dtype::Bf16)?.equal_over(&["tp"])?;
            let made = slope.call(w)?.cast(Dtype::F32)?.item::<f32>()?;
            Ok((made, slope.explain().graphs[0].program.clone()))
        });
        for made in made {
            let (slope, program) = made.unwrap();
            assert_eq!(slope, 1.0 + 2f32.powi(-7));
            let sum = program.lines().find(|line| line.contains("all_reduce_start")).unwrap();
            assert!(sum.contains(&format!("pending<{ty}[1]>")), "{sum}");
        }
    }
}

#[test]
fn explain_says_where_gradients_are_summed_and_warns_of_sums_of_equal_values() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let x = Tensor::from_iter([mesh.my_rank()? as f64])?;
        let slope = grad(move |(w, own): (Tensor, Tensor)| {
            let y = w.mul(&x)?.mul(&own)?.sum_all()?; // Line A.
            tp.all_reduce(tp.all_reduce(y, Reduce::Avg)?, Reduce::Sum) // Line B.
        });
        let w = Tensor::from_iter([1.0])?.equal_over(&["tp"])?;
        slope.call((w, Tensor::from_iter([2.0])?))?;
        Ok(slope.explain().to_string())
    });
    let source = include_str!("gradients.rs");
    let line = |mark: &str| 1 + source.lines().position(|line| line.ends_with(mark)).unwrap();
    let (a, b) = (line("// Line A."), line("// Line B."));
    for text in made {
        let text = text.unwrap();
        let site = |line: usize| format!("crates/consort/tests/gradients.rs:{line}");
        for part in [
            format!("argument 0: summed over tp for {}", site(a)),
            "argument 1: not summed over ranks".to_string(),
            "warning: all_reduce: sums what is already equal over tp: the result is 2 times the value"
                .to_string(),
            site(b),
        ] {
            assert!(text.contains(&part), "no `{part}` in\n{text}");
        }
    }
}

/// ZeRO: each rank keeps a part of the weights, gathers them where they are used, and gets its part of their gradient.
#[test]
fn a14_gathered_parts_have_scattered_gradients() {
    let made = Init::new().axes(&[("dp", 4)]).spawn(4, |mesh| {
        let dp = mesh.axis("dp")?;
        let rank = mesh.my_rank()?;
        let x = Tensor::from_iter((0..4).map(|i| (i * rank) as f64))?;
        let slope = grad(move |w: Tensor| {
            let y = dp.all_gather(&w, 0)?.mul(&x)?;
            dp.all_reduce(y.mul(&y)?.sum_all()?, Reduce::Sum)
        });
        let part = slope.call(Tensor::from_iter([rank as f64 + 1.0])?)?.item::<f64>()?;
        Ok((part, slope.explain().graphs[0].program.clone()))
    });
    for (rank, made) in made.into_iter().enumerate() {
        let (part, program) = made.unwrap();
        // The sum over ranks r of (w i r)^2, by w.
        let expected: usize = (0..4).map(|r| 2 * (rank + 1) * rank * rank * r * r).sum();
        assert_eq!(part, expected as f64);
        assert_eq!(program.matches("reduce_scatter_start").count(), 1, "{program}");
        assert_eq!(program.matches("all_reduce_start").count(), 0, "{program}");
    }
}

#[test]
fn backwards() {
    on_threads("backwards");
}

#[test]
fn a14_gradients_on_ranks() {
    cases::CASES.iter().for_each(|(name, _)| on_threads(name));
}

/// Runs a case on 1, 2 and 4 ranks.
fn on_threads(name: &str) {
    let (_, case) = *cases::CASES.iter().find(|(own, _)| *own == name).unwrap();
    for n in [1, 2, 4] {
        for (rank, made) in consort::spawn(n, case).into_iter().enumerate() {
            made.unwrap_or_else(|error| panic!("{name}, rank {rank} of {n}: {error}"));
        }
    }
}
