//! Gradients through the API, on ranks: alone and inside compiled functions.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Init, Mesh, Missing, Reduce, Result, Route, Tensor, compile, grad, value_and_grad};

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
}
