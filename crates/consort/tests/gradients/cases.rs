//! Gradients on the ranks of a mesh, as threads, as processes, and over MPI. Each case compares with numbers that follow from the ranks.

use consort::{Batched, Mesh, Reduce, Result, Route, Tensor, compile, grad, value_and_grad, vjp};

/// A case by name.
pub(crate) type Case = (&'static str, fn(Mesh) -> Result<()>);

/// All cases.
pub(crate) const CASES: [Case; 4] =
    [("backwards", backwards), ("parts", parts), ("messages", messages), ("micro_batches", micro_batches)];

fn own(mesh: &Mesh) -> Result<f64> {
    Ok(mesh.my_rank()? as f64)
}

/// The sum of the ranks' numbers `f(r)`.
fn sum(mesh: &Mesh, f: impl Fn(f64) -> f64) -> f64 {
    (0..mesh.size()).map(|rank| f(rank as f64)).sum()
}

/// The gradient of an all_reduce, compiled in a function and alone, equals the one by hand.
fn backwards(mesh: Mesh) -> Result<()> {
    let rank = own(&mesh)?;
    let group = mesh.clone();
    let loss = move |(x, w): (Tensor, Tensor)| {
        let y = group.all_reduce(x.mul(&w)?, Reduce::Sum)?;
        y.mul(&y)?.sum_all()
    };
    let alone = grad(loss.clone());
    let whole = compile(move |args: (Tensor, Tensor)| grad(loss.clone()).call(args));
    let args = (Tensor::from_iter([rank + 1.0, 2.0])?, Tensor::from_iter([3.0, rank])?);
    let y = [sum(&mesh, |r| 3.0 * (r + 1.0)), sum(&mesh, |r| 2.0 * r)];
    for made in [alone.call(args.clone())?, whole.call(args)?] {
        assert_eq!(made.0.to_vec::<f64>()?, [2.0 * y[0] * 3.0, 2.0 * y[1] * rank]);
        assert_eq!(made.1.to_vec::<f64>()?, [2.0 * y[0] * (rank + 1.0), 2.0 * y[1] * 2.0]);
    }
    Ok(())
}

/// Weights of which each rank has a part: the gradient of the part is a reduce_scatter.
fn parts(mesh: Mesh) -> Result<()> {
    let rank = own(&mesh)?;
    let group = mesh.clone();
    let x = Tensor::from_iter((0..mesh.size()).map(|i| i as f64 * (rank + 1.0)))?;
    let slope = grad(move |w: Tensor| {
        let w = group.all_gather(&w, 0)?.regather()?;
        let y = w.mul(&x)?;
        group.all_reduce(y.mul(&y)?.sum_all()?, Reduce::Sum)
    });
    let made = slope.call(Tensor::from_iter([rank + 2.0])?)?;
    assert_eq!(made.to_vec::<f64>()?, [2.0 * (rank + 2.0) * sum(&mesh, |r| (rank * (r + 1.0)).powi(2))]);
    let program = slope.explain().graphs[0].program.clone();
    if mesh.size() > 1 {
        assert_eq!(program.matches("reduce_scatter_start").count(), 1, "{program}");
        // The backward reads the product, and not the whole weights.
        assert_eq!(program.matches("all_gather_start").count(), 1, "{program}");
    }
    Ok(())
}

/// What goes to the next rank has its cotangent from there.
fn messages(mesh: Mesh) -> Result<()> {
    let (rank, n) = (own(&mesh)?, mesh.size() as f64);
    let group = mesh.clone();
    let pull = vjp(move |x: Tensor| {
        let mut before = Tensor::zeros(consort::Dtype::F64, &[1])?;
        let batch =
            vec![Batched::send(&x, Route::Ring(1), 0), Batched::recv(&mut before, Route::Ring(-1), 0)];
        group.batch(batch)?.wait()?;
        x.mul(&before)
    });
    let (y, slope) = pull.call((Tensor::from_iter([rank + 1.0])?, Tensor::from_iter([10.0 + rank])?))?;
    let (before, next) = ((rank + n - 1.0) % n, (rank + 1.0) % n);
    assert_eq!(y.to_vec::<f64>()?, [(rank + 1.0) * (before + 1.0)]);
    assert_eq!(slope.to_vec::<f64>()?, [(10.0 + rank) * (before + 1.0) + (10.0 + next) * (next + 1.0)]);
    Ok(())
}

/// Micro-batches in a loop: the gradient of the weights is summed over ranks once, after the loop.
fn micro_batches(mesh: Mesh) -> Result<()> {
    let rank = own(&mesh)?;
    let group = mesh.clone();
    let xs = Tensor::from_iter([1.0, 2.0, rank])?;
    let step = value_and_grad(move |w: Tensor| {
        let (total, ()) = consort::scan(3, Tensor::scalar(0.0f64)?, xs.clone(), |total, x| {
            let y = w.mul(&x)?;
            Ok((total.add(&y.mul(&y)?)?, ()))
        })?;
        group.all_reduce(total, Reduce::Avg)
    });
    let (loss, slope) = step.call(Tensor::scalar(2.0f64)?.replicated()?)?;
    let squares = sum(&mesh, |r| 5.0 + r * r) / mesh.size() as f64;
    assert_eq!((loss.item::<f64>()?, slope.item::<f64>()?), (4.0 * squares, 4.0 * squares));
    let program = step.explain().graphs[0].program.clone();
    // One for the loss, and one for the gradient.
    assert_eq!(program.matches("all_reduce_start").count(), 2, "{program}");
    Ok(())
}
