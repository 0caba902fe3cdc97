//! Functions with gradients of their own, and those whose values are computed again for the backward.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{
    Backward, Budget, Group, Init, Mesh, Reduce, Result, Tensor, compile, custom_vjp, grad, recompute,
    value_and_grad,
};

fn on_two<T: Send + 'static>(f: impl Fn(Mesh) -> Result<T> + Send + Sync + 'static) -> Vec<T> {
    Init::new().axes(&[("tp", 2)]).spawn(2, f).into_iter().map(|made| made.unwrap()).collect()
}

/// x^3 for each x, with three times the slope that it has: so one sees that the own rule is taken.
fn cube() -> impl Fn(Tensor) -> Result<Tensor> {
    custom_vjp(
        |x: Tensor| Ok((x.mul(&x)?.mul(&x)?, x)),
        |x: Tensor, slope: Tensor| slope.mul(&x.mul(&x)?)?.mul(9.0),
    )
}

#[test]
fn a14_a_function_has_its_own_gradient() {
    let x = || Tensor::from_iter([1.0f64, 2.0]).unwrap();
    let slope = value_and_grad(|x: Tensor| cube()(x)?.mul(2.0)?.sum_all());
    let (loss, slope) = slope.call(x()).unwrap();
    assert_eq!(loss.item::<f64>().unwrap(), 18.0);
    assert_eq!(slope.to_vec::<f64>().unwrap(), [18.0, 72.0]);
    // Without a gradient it is the function, eager and compiled.
    assert_eq!(cube()(x()).unwrap().to_vec::<f64>().unwrap(), [1.0, 8.0]);
    assert_eq!(compile(cube()).call(x()).unwrap().to_vec::<f64>().unwrap(), [1.0, 8.0]);
}

#[test]
fn the_own_gradient_is_that_in_loops_and_of_gradients() {
    let in_loop = grad(|x: Tensor| {
        let cube = cube();
        let xs = Tensor::from_iter([1.0f64, 2.0])?;
        let (sum, ()) = consort::scan(2, Tensor::scalar(0.0f64)?, xs, |sum, factor| {
            Ok((sum.add(&cube(x.clone())?.mul(&factor)?)?, ()))
        })?;
        Ok(sum)
    });
    assert_eq!(in_loop.call(Tensor::scalar(2.0f64).unwrap()).unwrap().item::<f64>().unwrap(), 3.0 * 36.0);
    // The second derivative is that of 9 x^2, where the rule itself is an ordinary function; and x^2 c(x), of which the
    // first is 2 x c(x) + 9 x^4 = 11 x^4, has 2 c(x) + 18 x^3 + 36 x^3 = 56 x^3.
    let second = grad(|x: Tensor| grad(|x: Tensor| cube()(x)?.sum_all()).call(x)?.sum_all());
    assert_eq!(second.call(Tensor::from_iter([2.0f64]).unwrap()).unwrap().item::<f64>().unwrap(), 36.0);
    let mixed = grad(|x: Tensor| {
        let first = grad(|x: Tensor| cube()(x.clone())?.mul(&x)?.mul(&x)?.sum_all());
        first.call(x)?.sum_all()
    });
    assert_eq!(mixed.call(Tensor::from_iter([2.0f64]).unwrap()).unwrap().item::<f64>().unwrap(), 56.0 * 8.0);
}

/// The conjugate pair of tensor parallelism, by hand: the identity, whose backward sums over the ranks.
#[test]
fn a14_own_gradients_communicate_and_their_placements_are_checked() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let x = Tensor::from_iter([1.0 + mesh.my_rank()? as f64])?;
        let scaled = |group: Option<Group>, x: Tensor| {
            custom_vjp(
                move |w: Tensor| Ok((w.mul(&x)?, x.clone())),
                move |x: Tensor, slope: Tensor| match &group {
                    Some(group) => group.all_reduce(slope.mul(&x)?, Reduce::Sum),
                    None => slope.mul(&x),
                },
            )
        };
        let loss = |f: Box<dyn Fn(Tensor) -> Result<Tensor>>| {
            let tp = tp.clone();
            grad(move |w: Tensor| tp.all_reduce(f(w)?.sum_all()?, Reduce::Sum))
        };
        let w = Tensor::from_iter([5.0])?.equal_over(&["tp"])?;
        let sums = loss(Box::new(scaled(Some(tp.clone()), x.clone()))).call(w.clone())?.item::<f64>()?;
        let forgets = loss(Box::new(scaled(None, x))).call(w).map(drop).unwrap_err().to_string();
        Ok((sums, forgets))
    });
    for (sums, forgets) in made {
        assert_eq!(sums, 3.0);
        let expected = "custom_vjp: expected a gradient by argument 0 of type f64[1], got f64[1]{tp}";
        assert!(forgets.contains(expected), "{forgets}");
        assert!(forgets.contains("note: sum it over tp in the backward"), "{forgets}");
        assert!(forgets.contains("gradients_own.rs"), "{forgets}");
    }
}

#[test]
fn an_own_gradient_of_the_wrong_type_or_by_what_is_captured_is_refused() {
    let x = || Tensor::from_iter([1.0f64, 2.0]).unwrap();
    let wrong = custom_vjp(|x: Tensor| Ok((x.sum_all()?, ())), |(), slope: Tensor| Ok(slope));
    let error = grad(wrong).call(x()).map(drop).unwrap_err().to_string();
    assert!(error.contains("expected a gradient by argument 0 of type f64[2], got f64[]"), "{error}");
    let captures = grad(|w: Tensor| {
        let own = w.clone();
        let times = custom_vjp(move |x: Tensor| Ok((x.mul(&own)?, ())), |(), slope: Tensor| Ok(slope));
        times(w)?.sum_all()
    });
    let error = captures.call(x()).map(drop).unwrap_err().to_string();
    assert!(error.contains("needed by a tensor that it captured"), "{error}");
    assert!(error.contains("note: make the tensor a part of the argument"), "{error}");
}

/// A deep function: each layer keeps several values, or none.
fn deep(again: bool, n: usize, group: Group) -> impl Fn(Tensor) -> Result<Tensor> + Clone {
    let layer = move |x: Tensor| {
        let sum = group.all_reduce(x.sin()?, Reduce::Avg)?;
        sum.exp()?.cos()?.mul(&x)?.tanh()?.mul(&x)
    };
    move |mut x: Tensor| {
        for _ in 0..n {
            x = if again { recompute(layer.clone())(x)? } else { layer.clone()(x)? };
        }
        x.mul(&x)?.sum_all()
    }
}

#[test]
fn b13_recompute_keeps_less_and_gives_the_same() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let x = Tensor::from_iter((0..1024).map(|i| 0.5 + (i + mesh.my_rank().unwrap()) as f64 / 1024.0))?;
        let of = |again: bool| {
            let f = deep(again, 8, tp.clone());
            let tp = tp.clone();
            let both = value_and_grad(move |x: Tensor| tp.all_reduce(f(x)?, Reduce::Sum));
            let (loss, slope) = both.call(x.clone())?;
            let graph = both.explain().graphs[0].clone();
            let gathers = graph.program.matches("all_reduce_start").count();
            Ok::<_, consort::Error>((loss.item::<f64>()?, slope.to_vec::<f64>()?, graph.peak_bytes, gathers))
        };
        Ok((of(false)?, of(true)?))
    });
    for ((loss, slope, peak, sums), (same, slopes, less, more)) in made {
        assert_eq!((loss, slope), (same, slopes));
        assert!(less * 10 <= peak * 4, "{less} of {peak} bytes");
        // The sum of each layer, twice, the loss, and the gradients that need no other.
        assert_eq!(more - sums, 8);
    }
}

#[test]
fn b13_recompute_in_a_loop_keeps_the_carry_alone() {
    let of = |again: bool| {
        let f = grad(move |(x, w): (Tensor, Tensor)| {
            let layer = |(x, w): (Tensor, Tensor)| x.mul(&w)?.sin()?.exp()?.cos()?.tanh()?.mul(&x);
            let again = again.then(|| recompute(layer));
            let (x, ()) = consort::scan(16, x, w, |x, w| {
                let made = match &again {
                    Some(again) => again((x, w))?,
                    None => layer((x, w))?,
                };
                Ok((made, ()))
            })?;
            x.sum_all()
        });
        let x = Tensor::full(consort::Dtype::F64, &[64], 0.5).unwrap();
        let w = Tensor::full(consort::Dtype::F64, &[16, 64], 1.5).unwrap();
        let (x, w) = f.call((x, w)).unwrap();
        let peak = f.explain().graphs[0].peak_bytes;
        (x.to_vec::<f64>().unwrap(), w.to_vec::<f64>().unwrap(), peak)
    };
    let ((x, w, peak), (same_x, same_w, less)) = (of(false), of(true));
    assert_eq!((x, w), (same_x, same_w));
    // Of the carry, its product, its exponential and its hyperbolic tangent, the carry is kept. At its largest, the plain
    // one has at least two more of them for all iterations.
    assert!(less + 2 * 16 * 64 * 8 <= peak, "{less} of {peak} bytes");
}

#[test]
fn b13_what_is_regathered_is_not_kept() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let x = Tensor::full(consort::Dtype::F64, &[4, 256], 1.0 + mesh.my_rank()? as f64)?;
        let parts: Vec<Tensor> = (0..6)
            .map(|i| Tensor::full(consort::Dtype::F64, &[128, 256], 0.001 * (i + 1) as f64))
            .collect::<Result<_>>()?;
        let of = |again: bool| {
            let (tp, x) = (tp.clone(), x.clone());
            let slope = grad(move |parts: Vec<Tensor>| {
                let mut y = x.clone();
                for part in &parts {
                    let w = tp.all_gather(part, 0)?;
                    y = y.matmul(&if again { w.regather()? } else { w })?.sin()?;
                }
                tp.all_reduce(y.mul(&y)?.sum_all()?, Reduce::Avg)
            });
            let slopes = slope.call(parts.clone())?;
            let slopes: Vec<Vec<f64>> = slopes.iter().map(Tensor::to_vec).collect::<Result<_>>()?;
            let graph = slope.explain().graphs[0].clone();
            Ok::<_, consort::Error>((
                slopes,
                graph.peak_bytes,
                graph.program.matches("all_gather_start").count(),
            ))
        };
        Ok((of(false)?, of(true)?))
    });
    let whole = 256 * 256 * 8;
    for ((slopes, peak, once), (same, less, twice)) in made {
        assert_eq!(slopes, same);
        // The first operand of a layer has a gradient only from the second on, which needs the weight again.
        assert_eq!((once, twice), (6, 11));
        assert!(less + 3 * whole <= peak, "{less} of {peak} bytes");
    }
}

/// A budget of nothing gives up all that is computed, but what an all_to_all brought is kept. Only `recompute` repeats it.
#[test]
fn all_to_all_recompute_is_always_banned() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let rank = mesh.my_rank()? as f64;
        let x = Tensor::from_iter((0..4).map(|i| 0.1 * f64::from(i) + rank))?;
        let exchanged = {
            let tp = tp.clone();
            move |x: Tensor| tp.all_to_all(x.sin()?, None, None)?.exp()?.sin()?.mul(&x)
        };
        let of = |how: Backward, again: bool| {
            let (tp, f) = (tp.clone(), exchanged.clone());
            let both = how.value_and_grad(move |x: Tensor| {
                let y = if again { recompute(f.clone())(x)? } else { f(x)? };
                tp.all_reduce(y.mul(&y)?.sum_all()?, Reduce::Sum)
            });
            let (loss, slope) = both.call(x.clone())?;
            let explained = both.explain();
            let moves = explained.graphs[0].program.matches("all_to_all_start").count();
            let kept = explained.gradients[0].kept;
            Ok::<_, consort::Error>(((loss.item::<f64>()?, slope.to_vec::<f64>()?), moves, kept))
        };
        let budget = Backward::new().within(Budget::bytes(0));
        Ok([of(Backward::new(), false)?, of(budget, false)?, of(Backward::new(), true)?])
    });
    for [plain, budget, again] in made {
        assert_eq!((&plain.0, &plain.0), (&budget.0, &again.0));
        // There and back; and, in a region, there once more.
        assert_eq!((plain.1, budget.1, again.1), (2, 2, 3));
        assert_eq!((plain.2, budget.2), (None, Some(4 * 8)));
    }
}

#[test]
fn b14_a_budget_bounds_what_is_kept_and_the_peak() {
    let made = on_two(|mesh| {
        let tp = mesh.axis("tp")?;
        let x = Tensor::from_iter((0..1024).map(|i| 0.5 + (i + mesh.my_rank().unwrap()) as f64 / 1024.0))?;
        let of = |budget: Option<u64>| {
            let (f, tp) = (deep(false, 8, tp.clone()), tp.clone());
            let how = Backward::new();
            let how = budget.map_or(how, |bytes| how.within(Budget::bytes(bytes)));
            let both = how.value_and_grad(move |x: Tensor| tp.all_reduce(f(x)?, Reduce::Sum));
            let (loss, slope) = both.call(x.clone())?;
            let (graph, gradient) = (both.explain().graphs[0].clone(), both.explain().gradients[0].clone());
            let sums = graph.program.matches("all_reduce_start").count();
            Ok::<_, consort::Error>((
                loss.item::<f64>()?,
                slope.to_vec::<f64>()?,
                graph.peak_bytes,
                sums,
                gradient.kept,
            ))
        };
        let all = of(Some(u64::MAX))?;
        let half = all.4.map(|kept| kept / 2);
        Ok([of(None)?, all, of(half)?, of(Some(0))?])
    });
    for [plain, all, half, least] in made {
        for other in [&all, &half, &least] {
            assert_eq!((plain.0, &plain.1, plain.3), (other.0, &other.1, other.3));
        }
        let (kept, half_kept, least_kept) = (all.4.unwrap(), half.4.unwrap(), least.4.unwrap());
        assert!(half_kept <= kept / 2, "{half_kept} of {kept} bytes");
        assert!(least_kept <= half_kept, "{least_kept} of {half_kept} bytes");
        // What each layer communicates is kept, and nothing else has to be.
        assert_eq!(least_kept, 8 * 1024 * 8);
        // What is computed again takes memory in its turn: with the least kept, all of it at once.
        assert!(half.2 < plain.2, "{} of {} bytes", half.2, plain.2);
    }
}

/// Of layers on two arguments, one of which is much smaller than the other on the first rank and much larger on the second.
fn of_two_sizes(how: Backward, mesh: &Mesh) -> Result<([Vec<f64>; 2], String, Option<u64>)> {
    let (tp, rank) = (mesh.axis("tp")?, mesh.my_rank()?);
    let slope = how.grad(move |(x, y): (Tensor, Tensor)| {
        let layer = |x: Tensor| x.sin()?.exp()?.cos()?.mul(&x)?.tanh();
        let (x, y) = (layer(layer(x)?)?, layer(layer(y)?)?);
        tp.all_reduce(x.sum_all()?.add(&y.sum_all()?)?, Reduce::Sum)
    });
    let list = |n: usize| Tensor::from_iter((0..n).map(|i| 0.5 + i as f64 / n as f64));
    let (x, y) = slope.call((list([3, 300][rank])?, list([200, 5][rank])?))?;
    let explained = slope.explain();
    let program = explained.graphs[0].program.clone();
    Ok(([x.to_vec()?, y.to_vec()?], program, explained.gradients[0].kept))
}

#[test]
fn b14_ranks_with_other_sizes_choose_alike() {
    let made = on_two(|mesh| {
        let all = of_two_sizes(Backward::new().within(Budget::bytes(u64::MAX)), &mesh)?;
        let half = all.2.map(|kept| kept / 2).unwrap_or(0);
        Ok([
            of_two_sizes(Backward::new(), &mesh)?,
            all,
            of_two_sizes(Backward::new().within(Budget::bytes(half)), &mesh)?,
            of_two_sizes(Backward::new().within(Budget::bytes(0)), &mesh)?,
        ])
    });
    for (one, other) in made[0].iter().zip(&made[1]) {
        // One program for all sizes, and one number of bytes, for which unknown sizes count as they do everywhere.
        assert_eq!((&one.1, one.2), (&other.1, other.2));
    }
    for [plain, all, half, least] in &made {
        for other in [all, half, least] {
            assert_eq!(plain.0, other.0);
        }
        assert!(half.2 <= all.2.map(|kept| kept / 2) && half.2 > Some(0), "{:?} of {:?}", half.2, all.2);
        assert_eq!(least.2, Some(0));
        // What is kept of the half is neither all nor nothing.
        assert!(half.1 != all.1 && half.1 != least.1, "{}", half.1);
    }
}

/// Budgets that differ make other programs of one function: an error on all ranks, before anything runs.
#[test]
fn b14_budgets_that_differ_are_an_error_on_every_rank() {
    let made = on_two(|mesh| {
        let budget = Budget::bytes([0, u64::MAX][mesh.my_rank()?]);
        Ok(of_two_sizes(Backward::new().within(budget), &mesh).map(drop).unwrap_err().to_string())
    });
    for error in made {
        let said = [
            "its program must be the same on all ranks",
            "rank 0: ",
            "rank 1: ",
            "gradients_own.rs",
            "note: ",
        ];
        said.iter().for_each(|said| assert!(error.contains(said), "{error}"));
    }
}
