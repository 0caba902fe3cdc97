//! Gradients on the ranks of a mesh, as threads, as processes, and over MPI. Each case compares with numbers that follow from the ranks.

use consort::nn::{Checkpoint, Parts, Sgd, Shards};
use consort::{
    Backward, Batched, Budget, Index, Mesh, Reduce, Result, Route, Tensor, compile, grad, recompute,
    value_and_grad, vjp,
};

/// A case by name.
pub(crate) type Case = (&'static str, fn(Mesh) -> Result<()>);

/// All cases.
pub(crate) const CASES: [Case; 10] = [
    ("backwards", backwards),
    ("parts", parts),
    ("second_derivatives", second_derivatives),
    ("messages", messages),
    ("messages_of_some", messages_of_some),
    ("micro_batches", micro_batches),
    ("recomputed", recomputed),
    ("within_a_budget", within_a_budget),
    ("zero", zero),
    ("resumed", resumed),
];

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

/// Gradients of gradients: through an average over ranks, and through an all_gather, whose gradient is a reduce_scatter.
fn second_derivatives(mesh: Mesh) -> Result<()> {
    let (rank, n) = (own(&mesh)?, mesh.size() as f64);
    let (group, x) = (mesh.clone(), Tensor::from_iter([rank + 1.0])?);
    let curve = grad(move |w: Tensor| {
        let (group, x) = (group.clone(), x.clone());
        let slope = grad(move |w: Tensor| {
            let y = w.mul(&x)?;
            group.all_reduce(y.mul(&y)?.mul(&y)?.sum_all()?, Reduce::Avg)
        });
        slope.call(w)?.sum_all()
    });
    let made = curve.call(Tensor::from_iter([2.0])?.replicated()?)?.item::<f64>()?;
    // The average of (x w)^3 has the second derivative 6 w times that of x^3: on two ranks 12 (1 + 8) / 2.
    assert_eq!(made, 12.0 * sum(&mesh, |r| (r + 1.0).powi(3)) / n);
    assert!(mesh.size() != 2 || made == 54.0);

    // d_s is the product of all parts w and the row x_s of rank s, the loss the average of d_s^3. Of its gradient, the sum
    // weighed by c is the average of 3 d_s^2 e_s, with e_s the product of c and x_s.
    let x = |s: f64, i: f64| s * i + 1.0;
    let d = |s: f64| sum(&mesh, |i| (i + 1.0) * x(s, i));
    let row = Tensor::from_iter((0..mesh.size()).map(|i| x(rank, i as f64)))?;
    let (group, outer, c) = (mesh.clone(), mesh.clone(), Tensor::from_iter([rank + 1.0])?);
    let product = value_and_grad(move |part: Tensor| {
        let (group, row) = (group.clone(), row.clone());
        let slope = grad(move |part: Tensor| {
            let d = group.all_gather(&part, 0)?.mul(&row)?.sum_all()?;
            group.all_reduce(d.mul(&d)?.mul(&d)?, Reduce::Avg)
        });
        outer.all_reduce(slope.call(part)?.mul(&c)?.sum_all()?, Reduce::Sum)
    });
    let (weighed, made) = product.call(Tensor::from_iter([rank + 1.0])?)?;
    // Here w and c are equal, and so d and e: on two ranks 3 and 5.
    assert_eq!(weighed.item::<f64>()?, 3.0 * sum(&mesh, |s| d(s).powi(3)) / n);
    let made = made.item::<f64>()?;
    assert_eq!(made, 6.0 * sum(&mesh, |s| d(s).powi(2) * x(s, rank)) / n);
    assert!(mesh.size() != 2 || made == [102.0, 177.0][mesh.my_rank()?]);
    let program = product.explain().graphs[0].program.clone();
    if mesh.size() > 1 {
        // The gradient, and the gradient of that.
        assert_eq!(program.matches("reduce_scatter_start").count(), 2, "{program}");
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

/// The first and the last rank exchange: the others keep what stands for the message, and so its cotangent.
fn messages_of_some(mesh: Mesh) -> Result<()> {
    let (rank, last) = (own(&mesh)?, mesh.size() - 1);
    let ends: &[usize] = if last == 0 { &[0] } else { &[last, 0] };
    let ends = mesh.lists("ends", &[ends])?;
    let pull = vjp(move |x: Tensor| {
        // The other is a number of the group, which has none on ranks outside of it.
        let other = Index::from(ends.size() - 1) - ends.rank();
        let mut got = x.mul(3.0)?;
        ends.batch(vec![Batched::send(&x, other.clone(), 0), Batched::recv(&mut got, other, 0)])?.wait()?;
        x.mul(&got)
    });
    let (y, slope) = pull.call((Tensor::from_iter([rank + 1.0])?, Tensor::from_iter([10.0 + rank])?))?;
    let other = last as f64 - rank;
    let (value, expected) = if rank == 0.0 || other == 0.0 {
        // y is the product of both, of which each has a cotangent from both.
        ((rank + 1.0) * (other + 1.0), (10.0 + rank + 10.0 + other) * (other + 1.0))
    } else {
        (3.0 * (rank + 1.0).powi(2), 6.0 * (10.0 + rank) * (rank + 1.0))
    };
    assert_eq!((y.to_vec::<f64>()?, slope.to_vec::<f64>()?), (vec![value], vec![expected]));
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

/// What a function under `recompute` communicates is communicated again, and gives the same.
fn recomputed(mesh: Mesh) -> Result<()> {
    let rank = own(&mesh)?;
    let of = |again: bool| {
        let (group, outer) = (mesh.clone(), mesh.clone());
        let layer = move |x: Tensor| {
            let y = group.all_reduce(x.mul(&x)?, Reduce::Sum)?;
            y.mul(&y)?.mul(&x)
        };
        // With the loss, so that what it needs is communicated besides.
        let slope = value_and_grad(move |x: Tensor| {
            let y = if again { recompute(layer.clone())(x)? } else { layer(x)? };
            outer.all_reduce(y.sum_all()?, Reduce::Sum)
        });
        let made = slope.call(Tensor::from_iter([rank + 1.0])?)?.1.item::<f64>()?;
        Ok::<_, consort::Error>((made, slope.explain().graphs[0].program.matches("all_reduce_start").count()))
    };
    let ((plain, once), (made, twice)) = (of(false)?, of(true)?);
    // The loss is q^2 s with q the sum of squares and s the sum of all x.
    let (q, s) = (sum(&mesh, |r| (r + 1.0).powi(2)), sum(&mesh, |r| r + 1.0));
    let expected = q * q + 4.0 * q * (rank + 1.0) * s;
    assert_eq!((plain, made), (expected, expected));
    if mesh.size() > 1 {
        assert_eq!(twice, once + 1);
    }
    Ok(())
}

/// A budget of nothing keeps only what was communicated; all ranks make the same program.
fn within_a_budget(mesh: Mesh) -> Result<()> {
    let rank = own(&mesh)?;
    let group = mesh.clone();
    let none = Backward::new().within(Budget::bytes(0));
    let slope = none.grad(move |x: Tensor| {
        let y = group.all_reduce(x.sin()?, Reduce::Sum)?;
        group.all_reduce(y.exp()?.mul(&x.cos()?)?.sum_all()?, Reduce::Sum)
    });
    let made = slope.call(Tensor::from_iter([rank + 0.5])?)?.item::<f64>()?;
    // The loss is e^s c, with the sums s of all sin x and c of all cos x.
    let (s, c) = (sum(&mesh, |r| (r + 0.5).sin()), sum(&mesh, |r| (r + 0.5).cos()));
    let expected = s.exp() * (c * (rank + 0.5).cos() - (rank + 0.5).sin());
    assert!((made - expected).abs() <= 1e-12 * expected.abs().max(1.0), "{made} and {expected}");
    if mesh.size() > 1 {
        assert_eq!(slope.explain().gradients[0].kept, Some(8));
    }
    Ok(())
}

/// ZeRO: rows of the weights, gathered where they are used, and the steps of whole weights on one rank.
fn zero(mesh: Mesh) -> Result<()> {
    let (rank, n) = (own(&mesh)?, mesh.size() as f64);
    let start = [1.0, -2.0, 0.5, 3.0, 0.25];
    let shards = Shards::of(&Tensor::from_iter(start)?.replicated()?, &mesh)?;
    let x = Tensor::from_iter((0..5).map(|i| f64::from(i) + rank))?;
    let group = mesh.clone();
    let step = compile(move |shards: Shards<Tensor>| {
        let (group, x) = (group.clone(), x.clone());
        let slope = grad(move |shards: Shards<Tensor>| {
            let y = shards.whole()?.mul(&x)?;
            group.all_reduce(y.mul(&y)?.sum_all()?, Reduce::Avg)
        });
        let slope = slope.call(shards.clone())?;
        Ok(Sgd::default().step(&shards, &slope, &None, 1.0 / 64.0)?.0)
    });
    let mut shards = step.call(shards)?;
    shards = step.call(shards)?;
    let made = shards.whole()?.to_vec::<f64>()?;
    for (i, (start, made)) in start.iter().zip(made).enumerate() {
        let slope = 2.0 * sum(&mesh, |r| (i as f64 + r).powi(2)) / n;
        let expected = start * (1.0 - slope / 64.0).powi(2);
        assert!((made - expected).abs() <= 1e-12 * expected.abs().max(1.0), "{made} and {expected}");
    }
    Ok(())
}

/// Training that is saved and loaded in the middle ends with the bits of training that is not.
fn resumed(mesh: Mesh) -> Result<()> {
    let rank = own(&mesh)?;
    let group = mesh.clone();
    let x = Tensor::from_iter([0.1 + rank, 0.7])?;
    // Each rank has a part of the weights of its own, and all have one in common.
    let step = compile(move |(part, common): (Tensor, Tensor)| {
        let (group, x) = (group.clone(), x.clone());
        let slope = grad(move |(part, common): (Tensor, Tensor)| {
            let y = part.mul(&x)?.add(&common)?.sin()?;
            group.all_reduce(y.sum_all()?, Reduce::Avg)
        });
        let slope = slope.call((part.clone(), common.clone()))?;
        Ok(Sgd::default().step(&(part, common), &slope, &None, 0.125)?.0)
    });
    let start = || {
        Ok::<_, consort::Error>((
            Tensor::from_iter([rank, 1.0])?,
            Tensor::from_iter([0.5, 0.25])?.replicated()?,
        ))
    };
    let bits = |state: &(Tensor, Tensor)| {
        Ok::<_, consort::Error>((state.0.to_vec::<f64>()?, state.1.to_vec::<f64>()?))
    };
    let mut whole = start()?;
    for _ in 0..4 {
        whole = step.call(whole)?;
    }
    let mut state = start()?;
    let parts = Parts::whole(&state).split(&mesh, |name, _| (name == "0").then_some(0))?;
    // One name for all ranks, which may be processes.
    let job = Tensor::scalar(i64::from(std::process::id()))?;
    let job = mesh.broadcast(job, 0)?.item::<i64>()?;
    let path = std::env::temp_dir().join(format!("consort-resumed-{job}-{}", mesh.size()));
    for time in 0..4 {
        if time == 2 {
            Checkpoint::folder(&path, &mesh).save(&state, &parts, time)?;
            let (loaded, at) = Checkpoint::folder(&path, &mesh).load(&start()?, &parts)?;
            assert_eq!((bits(&loaded)?, at), (bits(&state)?, 2));
            state = loaded;
        }
        state = step.call(state)?;
    }
    mesh.barrier()?;
    if mesh.my_rank()? == 0 {
        std::fs::remove_dir_all(&path).unwrap();
    }
    assert_eq!(bits(&state)?, bits(&whole)?);
    Ok(())
}
