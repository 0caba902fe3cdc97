//! Parts of training: losses, optimizers, norms over shards and schedules equal closed forms and plain loops, on any number of
//! ranks.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::nn::{
    Adam, Config, Cosine, Embedding, Linear, Llama, Moments, Sgd, Shards, cast, clip, cross_entropy, mean_of,
    mean_squared_error, norm, share,
};
use consort::{
    Dtype, Flatten, Init, Mesh, Reduce, Result, Steady, Tensor, compile, grad, recompute, value_and_grad,
};

/// What each rank returns.
fn on<T: Send>(n: usize, f: impl Fn(Mesh) -> Result<T> + Sync) -> Vec<T> {
    let init = Init::new().axes(&[("tp", n)]);
    init.spawn(n, f).into_iter().map(|outcome| outcome.unwrap()).collect()
}

fn close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (a, b) in got.iter().zip(expected) {
        assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "{got:?} and {expected:?}");
    }
}

/// The loss and its gradient by the logits, by plain loops.
fn plain_cross_entropy(logits: &[f64], targets: &[i64], classes: usize) -> (f64, Vec<f64>) {
    let rows = targets.len() as f64;
    let (mut loss, mut grad) = (0.0, Vec::new());
    for (row, target) in logits.chunks(classes).zip(targets) {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        loss -= (row[*target as usize].exp() / sum).ln() / rows;
        let hit = |class: usize| f64::from(u8::from(class as i64 == *target));
        grad.extend(row.iter().enumerate().map(|(class, x)| (x.exp() / sum - hit(class)) / rows));
    }
    (loss, grad)
}

#[test]
fn cross_entropy_and_its_gradient_are_those_of_plain_loops() {
    let (logits, targets) = ([0.3, -1.0, 2.0, 0.5, 0.5, 0.1, 4.0, -3.0], [2i64, 3]);
    let (expected, slope) = plain_cross_entropy(&logits, &targets, 4);
    let targets = Tensor::from_iter(targets).unwrap();
    let f = value_and_grad(move |logits: Tensor| cross_entropy(&logits, &targets));
    let (loss, got) = f.call(Tensor::from_slice(&logits, &[2, 4]).unwrap()).unwrap();
    close(&[loss.item::<f64>().unwrap()], &[expected]);
    close(&got.to_vec::<f64>().unwrap(), &slope);
}

#[test]
fn cross_entropy_over_a_sharded_vocabulary_is_that_of_one_rank() {
    // Logits of some hundreds: exp overflows unless the largest of all members is subtracted first.
    let table = || Tensor::normal(Dtype::F64, &[7, 3], 1);
    let x = || Tensor::normal(Dtype::F64, &[5, 3], 2)?.mul(400.0);
    let targets = [6i64, 0, 3, 2, 5];
    let run = |mesh: Mesh| {
        let own = share(7, mesh.my_rank()?, mesh.size());
        let sizes = (0..mesh.size()).map(|member| share(7, member, mesh.size()).len()).collect();
        let table = table()?.narrow(0, own.start, own.len())?;
        let head = Embedding { table, sizes, group: mesh.axis("tp")? };
        let targets = Tensor::from_iter(targets)?.replicated()?;
        let f = value_and_grad(move |(head, x): (Embedding, Tensor)| head.cross_entropy(&x, &targets));
        let (loss, (head, x)) = f.call((head, x()?.replicated()?))?;
        let plan = f.explain().graphs[0].plan.clone().unwrap_or_default();
        assert!(!plan.contains("all_gather"), "{plan}");
        Ok((loss.item::<f64>()?, head.table.to_vec::<f64>()?, x.to_vec::<f64>()?))
    };
    let logits = x().unwrap().matmul(&table().unwrap().t().unwrap()).unwrap();
    let shifted = logits.sub(&logits.max(&[1], true).unwrap()).unwrap().to_vec::<f64>().unwrap();
    let (loss, slope) = plain_cross_entropy(&shifted, &targets, 7);
    let slope = Tensor::from_slice(&slope, &[5, 7]).unwrap();
    let of_table = slope.t().unwrap().matmul(&x().unwrap()).unwrap().to_vec::<f64>().unwrap();
    let of_x = slope.matmul(&table().unwrap()).unwrap().to_vec::<f64>().unwrap();
    for n in [1, 2, 4] {
        let all = on(n, run);
        for (got, _, slope) in &all {
            close(&[*got], &[loss]);
            close(slope, &of_x);
        }
        close(&all.into_iter().flat_map(|(_, table, _)| table).collect::<Vec<_>>(), &of_table);
    }
}

/// Gradients of a few steps, for two parameters.
const SLOPES: [[f64; 3]; 4] = [[0.5, -1.0, 2.0], [0.1, 0.0, -3.0], [-0.2, 1e-9, 0.0], [4.0, -0.5, 1.0]];
const START: [f64; 3] = [1.0, -2.0, 0.5];

/// What `step` makes of the start, on some ranks of which each has its own shard of three entries, the entries plus the rank.
fn steps<S: Flatten + Clone + 'static>(
    n: usize,
    state: impl Fn(&(Tensor, Tensor)) -> Result<S> + Sync,
    step: impl Fn(&(Tensor, Tensor), &(Tensor, Tensor), &S, &Tensor) -> Result<((Tensor, Tensor), S)>
    + Copy
    + Sync
    + 'static,
) -> Vec<(Vec<f64>, Vec<f64>)> {
    on(n, |mesh| {
        let equal = Tensor::from_slice(&START, &[3])?.replicated()?;
        let shard = equal.add(&Tensor::index(mesh.rank())?.cast(Dtype::F64)?)?;
        let mut params = (equal, shard);
        assert_eq!(params.1.varies(), ["tp"]);
        let mut state = state(&params)?;
        let f = compile(move |(params, grads, state, time)| step(&params, &grads, &state, &time));
        for (time, slope) in SLOPES.iter().enumerate() {
            let equal = Tensor::from_slice(slope, &[3])?.replicated()?;
            let shard = equal.mul(&Tensor::index(mesh.rank())?.cast(Dtype::F64)?.add(1.0)?)?;
            let time = Tensor::scalar(time as i64)?.replicated()?;
            (params, state) = f.call((params, (equal, shard), state, time))?;
            // A state is placed as its parameters are.
            assert!(params.0.varies().is_empty());
            for (place, tensor) in state.flatten().iter().rev().enumerate() {
                assert_eq!(tensor.varies().is_empty(), place % 2 == 1 || tensor.rank() == 0);
            }
        }
        f.expect_steady(Steady::graphs(1))?;
        Ok((params.0.to_vec()?, params.1.to_vec()?))
    })
}

/// The same for one parameter by a plain loop, of which `update` makes the next from parameter, gradient and time.
fn plain(rank: usize, mut update: impl FnMut(usize, f64, f64, usize) -> f64) -> (Vec<f64>, Vec<f64>) {
    let (mut equal, mut shard) = (START.to_vec(), START.map(|x| x + rank as f64).to_vec());
    for (time, slope) in SLOPES.iter().enumerate() {
        for i in 0..3 {
            equal[i] = update(i, equal[i], slope[i], time);
            shard[i] = update(3 + i, shard[i], slope[i] * (rank as f64 + 1.0), time);
        }
    }
    (equal, shard)
}

#[test]
fn sgd_is_a_plain_loop() {
    let rate = |time: usize| 0.1 * (1.0 - time as f64 / 4.0);
    let schedule = Linear { first: 0.1, last: 0.0, steps: 4 };
    for (n, momentum) in [(1, 0.0), (2, 0.0), (1, 0.9), (2, 0.9), (4, 0.9)] {
        let sgd = Sgd { momentum };
        let got = steps(
            n,
            |params| sgd.state(params),
            move |params, grads, state, time| sgd.step(params, grads, state, &schedule.at(time)?),
        );
        for (rank, got) in got.into_iter().enumerate() {
            let mut velocity = [0.0; 6];
            let expected = plain(rank, |i, w, slope, time| {
                velocity[i] = momentum * velocity[i] + slope;
                w - rate(time) * velocity[i]
            });
            close(&got.0, &expected.0);
            close(&got.1, &expected.1);
        }
    }
}

#[test]
fn adam_and_adamw_are_plain_loops() {
    let schedule = Cosine { peak: 0.1, least: 0.01, warmup: 1, total: 3 };
    let rates = [0.1, 0.1, 0.055, 0.01];
    for (n, decay) in [(1, 0.0), (2, 0.0), (1, 0.1), (2, 0.1), (4, 0.1)] {
        let adam = Adam { beta1: 0.8, beta2: 0.9, eps: 1e-6, decay };
        let got = steps(
            n,
            |params| adam.state(params),
            move |params, grads, state: &Moments<_>, time| {
                adam.step(params, grads, state, &schedule.at(time)?)
            },
        );
        for (rank, got) in got.into_iter().enumerate() {
            let (mut first, mut second) = ([0.0; 6], [0.0; 6]);
            let expected = plain(rank, |i, w, slope, time| {
                let (t, rate) = (time as i32 + 1, rates[time]);
                first[i] = 0.8 * first[i] + 0.2 * slope;
                second[i] = 0.9 * second[i] + 0.1 * slope * slope;
                let (mean, square) = (first[i] / (1.0 - 0.8f64.powi(t)), second[i] / (1.0 - 0.9f64.powi(t)));
                w * (1.0 - rate * decay) - rate * mean / (square.sqrt() + 1e-6)
            });
            close(&got.0, &expected.0);
            close(&got.1, &expected.1);
        }
    }
}

#[test]
fn a_norm_counts_every_element_once() {
    // Over (dp, tp): equal everywhere, split over tp, split over both, split over dp.
    let parts = |dp: f64, tp: f64| [1.5, 2.0 + tp, 3.0 + 2.0 * dp + tp, 7.0 + dp];
    let mut squares = parts(0.0, 0.0)[0].powi(2);
    for i in [0.0, 1.0] {
        squares += parts(0.0, i)[1].powi(2) + parts(i, 0.0)[3].powi(2);
        squares += [0.0, 1.0].iter().map(|tp| parts(i, *tp)[2].powi(2)).sum::<f64>();
    }
    let expected = squares.sqrt();
    let all = Init::new().axes(&[("dp", 2), ("tp", 2)]).spawn(4, |mesh| {
        let place = |axis: &str| Tensor::index(mesh.axis(axis)?.rank())?.cast(Dtype::F64);
        let (dp, tp) = (place("dp")?, place("tp")?);
        let one = Tensor::from_iter([1.5f64])?.replicated()?;
        let tensors = vec![
            one.clone(),
            tp.add(2.0)?.reshape(&[1])?,
            dp.mul(2.0)?.add(&tp)?.add(3.0)?.reshape(&[1])?,
            dp.add(7.0)?.reshape(&[1])?,
        ];
        let f =
            compile(|tensors: Vec<Tensor>| Ok((norm(&tensors)?, clip(&tensors, 2.0)?, clip(&tensors, 1e3)?)));
        let (norm, (small, before), (same, _)) = f.call(tensors.clone())?;
        assert_eq!(norm.item::<f64>()?, before.item::<f64>()?);
        let of = |tensors: &[Tensor]| tensors.iter().map(Tensor::item::<f64>).collect::<Result<Vec<_>>>();
        assert_eq!(of(&same)?, of(&tensors)?);
        let whole = of(&tensors)?.into_iter().map(|x| x * 2.0 / expected).collect::<Vec<_>>();
        close(&of(&small)?, &whole);
        norm.item::<f64>()
    });
    for got in all {
        close(&[got.unwrap()], &[expected]);
    }
    let error = norm(&Tensor::from_iter([1.0f64]).unwrap()).unwrap_err().to_string();
    assert!(error.contains("needs a compiled function") && error.contains("note: "), "{error}");
}

/// On (pp, tp), what is split over tp and what is equal there: 3, 4 and 12 have the norm 13; 8, 15 and 144 have 145.
const PARTS: [([f64; 2], f64, f64); 2] = [([3.0, 4.0], 12.0, 13.0), ([8.0, 15.0], 144.0, 145.0)];

#[test]
fn a_norm_in_a_function_of_some_ranks_is_theirs() {
    let axes = Init::new().axes(&[("pp", 2), ("tp", 2)]);
    let outcomes = axes.spawn(4, |mesh| {
        let tp = mesh.axis("tp")?;
        let (split, equal, whole) = PARTS[mesh.axis("pp")?.my_rank()?];
        let split = split[tp.my_rank()?];
        let args = || -> Result<(Tensor, Tensor)> {
            Ok((Tensor::from_iter([split])?, Tensor::from_iter([equal])?.equal_over(&["tp"])?))
        };
        // Nobody but the ranks of this tp is asked: the others may be at another call.
        let f = compile(|args: (Tensor, Tensor)| clip(&args, 6.5)).over(&tp);
        let ((a, b), norm) = f.call(args()?)?;
        close(&[norm.item()?, a.item()?, b.item()?], &[whole, split * 6.5 / whole, equal * 6.5 / whole]);
        f.expect_steady(Steady::graphs(1))?;
        let plan = f.explain().graphs[0].plan.clone().unwrap_or_default();
        assert_eq!(plan.matches("all_reduce_start[reduce=sum, over=tp]").count(), 1, "{plan}");
        // Nor anybody at all.
        let own = compile(|args: (Tensor, Tensor)| consort::nn::norm(&args)).local().call(args()?)?;
        close(&[own.item()?], &[split.hypot(equal)]);
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn an_accumulation_is_one_batch_and_has_one_sum() {
    let (rows, width) = (8, 3);
    for n in [1, 2, 4] {
        let all = on(n, |mesh| {
            let x = Tensor::normal_part(
                Dtype::F64,
                &[rows, width],
                &[rows * n, width],
                &[rows * mesh.my_rank()?, 0],
                1,
            )?;
            let y = x.sum(&[1], false)?;
            let tp = mesh.axis("tp")?;
            let batch = (x.reshape(&[4, 2, width])?, y.reshape(&[4, 2])?);
            let group = tp.clone();
            let step = value_and_grad(move |w: Tensor| {
                let loss = mean_of(batch.clone(), |(x, y): (Tensor, Tensor)| {
                    mean_squared_error(&x.matmul(&w)?.squeeze(1)?, &y)
                })?;
                group.all_reduce(loss, Reduce::Avg)
            });
            let whole = value_and_grad(move |w: Tensor| {
                tp.all_reduce(mean_squared_error(&x.matmul(&w)?.squeeze(1)?, &y)?, Reduce::Avg)
            });
            let w = Tensor::from_slice(&[0.5, 0.25, -1.0], &[3, 1])?.replicated()?;
            let (a, b) = (step.call(w.clone())?, whole.call(w)?);
            close(&[a.0.item::<f64>()?], &[b.0.item::<f64>()?]);
            close(&a.1.to_vec::<f64>()?, &b.1.to_vec::<f64>()?);
            // The loss and the gradient.
            let plan = step.explain().graphs[0].plan.clone().unwrap_or_default();
            assert_eq!(plan.matches("all_reduce_start").count(), 2, "{plan}");
            a.0.item::<f64>()
        });
        assert!(all.iter().all(|loss| *loss == all[0]));
    }
}

/// The layers of a model transpose their weights in the loss, so in the loop over micro-batches; `recompute` marks them there.
#[test]
fn a_model_over_micro_batches_has_one_sum_for_each_weight() {
    let config = Config { vocabulary: 11, hidden: 8, feed_forward: 12, dtype: Dtype::F64, ..Config::tiny() };
    let (batches, rows, length) = (3, 4, 5);
    let all: Vec<i64> = (0..batches * rows * (length + 1)).map(|i| (i * i % 11) as i64).collect();
    let run = |n: usize, again: bool| {
        let init = Init::new().axes(&[("dp", n), ("tp", 1)]);
        let outcomes = init.spawn(n, |mesh| {
            let model = Llama::random(&config, &mesh.axis("tp")?, 3)?;
            let (dp, own) = (mesh.axis("dp")?, rows / n);
            let text = Tensor::from_slice(&all, &[batches, rows, length + 1])?;
            let text = text.narrow(1, dp.my_rank()? * own, own)?;
            let batch = (text.narrow(2, 0, length)?, text.narrow(2, 1, length)?);
            let f = value_and_grad(move |model: Llama| {
                let loss = |(tokens, targets): (Tensor, Tensor)| model.loss(&tokens, &targets);
                let batch = batch.clone();
                let mean = if again { mean_of(batch, recompute(loss)) } else { mean_of(batch, loss) };
                dp.all_reduce(mean?, Reduce::Avg)
            });
            let (loss, slope) = f.call(model.clone())?;
            let program = f.explain().graphs[0].program.clone();
            let sums: Vec<&str> = program
                .lines()
                .filter(|line| line.contains("all_reduce_start") && line.contains("over=dp"))
                .collect();
            // One for each weight and one for the loss, none of them in a loop.
            assert_eq!(sums.len(), model.flatten().len() + 1, "{program}");
            assert!(sums.iter().all(|line| line.starts_with("    v")), "{program}");
            let mut slopes = vec![loss.item::<f64>()?];
            for slope in slope.flatten() {
                assert!(slope.varies().iter().all(|axis| *axis != "dp"));
                slopes.extend(slope.to_vec::<f64>()?);
            }
            Ok(slopes)
        });
        outcomes.into_iter().map(|outcome| outcome.unwrap()).collect::<Vec<_>>()
    };
    for again in [false, true] {
        let one = run(1, again).remove(0);
        for n in [2, 4] {
            run(n, again).iter().for_each(|many| close(many, &one));
        }
    }
}

/// 2^-9 is less than bf16 has beside 1: of sums in bf16 nothing but the ones would remain.
#[test]
fn gradients_of_masters_are_summed_in_their_element_type() {
    let ends = on(4, |mesh| {
        let (tp, mine) = (mesh.axis("tp")?, if mesh.my_rank()? == 0 { 1.0 } else { 2f64.powi(-9) });
        let x = Tensor::full(Dtype::Bf16, &[4, 1], mine)?; // Four micro-batches: a quarter is exact.
        let f = grad(move |w: Tensor| {
            let loss = mean_of(x.clone(), |x: Tensor| cast(&w, Dtype::Bf16)?.mul(&x)?.sum_all())?;
            tp.all_reduce(loss.cast(Dtype::F32)?, Reduce::Sum)
        });
        f.call(Tensor::ones(Dtype::F32, &[1])?.replicated()?)?.item::<f32>()
    });
    assert!(ends.iter().all(|slope| *slope == 1.0 + 3.0 * 2f32.powi(-9)), "{ends:?}");
}

/// With the loss computed again, one micro-batch's intermediate values are kept instead of those of all.
#[test]
fn an_accumulation_needs_the_memory_of_one_micro_batch() {
    let peak = |batches: usize, again: bool| {
        let f = grad(move |(w, _): (Tensor, Tensor)| {
            let x = Tensor::ones(Dtype::F32, &[batches, 64, 32])?;
            let loss = |x: Tensor| x.matmul(&w)?.tanh()?.matmul(&w)?.tanh()?.matmul(&w)?.exp()?.mean_all();
            if again { mean_of(x, recompute(loss)) } else { mean_of(x, loss) }
        });
        let w = Tensor::normal(Dtype::F32, &[32, 32], 1).unwrap().mul(0.1).unwrap();
        let slope = f.call((w, Tensor::scalar(0.0f32).unwrap())).unwrap().0.to_vec::<f32>().unwrap();
        // What is in the batch itself does not count.
        (slope, f.explain().graphs[0].peak_bytes - (batches * 64 * 32 * 4) as u64)
    };
    let ((plain, kept), (slope, again)) = (peak(16, false), peak(16, true));
    assert_eq!(plain, slope);
    assert!(again < 2 * peak(2, true).1 && 3 * again < kept, "{again} {kept} {}", peak(2, true).1);
}

#[test]
fn masters_keep_what_bf16_would_lose() {
    // Each step is 2^-12, of which bf16 sees nothing at 1; the masters add up 64 of them.
    let step = compile(|w: Tensor| {
        let slope = grad(|w: Tensor| cast(&w, Dtype::Bf16)?.sum_all()?.cast(Dtype::F32)).call(w.clone())?;
        Ok(Sgd::default().step(&w, &slope, &None, 2f64.powi(-12))?.0)
    });
    let mut w = Tensor::from_iter([1.0f32]).unwrap();
    let mut narrow = Tensor::from_iter([1.0f32]).unwrap().cast(Dtype::Bf16).unwrap();
    for _ in 0..64 {
        w = step.call(w).unwrap();
        narrow = narrow.sub(2f64.powi(-12)).unwrap();
    }
    assert_eq!(w.item::<f32>().unwrap(), 1.0 - 2f32.powi(-6));
    assert_eq!(narrow.cast(Dtype::F32).unwrap().item::<f32>().unwrap(), 1.0);
}

/// Data parallel training whose layers compute in bf16, with f32 masters: on two ranks with half of the rows each, its losses
/// are those of one rank that computes in f32, to 2^-7 of the first one. bf16 has 8 bits: an element is off by 2^-9 of itself,
/// and there are two products, a tanh and a difference between the weights and the loss.
#[test]
fn data_parallel_training_in_bf16_follows_f32_on_one_rank() {
    let (rows, width, steps) = (16, 8, 40);
    let run = move |dtype: Dtype| {
        move |mesh: Mesh| -> Result<(Vec<f64>, Vec<f32>, Vec<f32>)> {
            let own = share(rows, mesh.my_rank()?, mesh.size());
            let part = |shape: usize, key| {
                Tensor::normal_part(Dtype::F32, &[own.len(), shape], &[rows, shape], &[own.start, 0], key)
            };
            let (x, y, group) = (part(width, 1)?, part(1, 2)?, mesh.axis("tp")?);
            let step = compile(move |w: (Tensor, Tensor)| {
                let (x, y, group) = (x.cast(dtype)?, y.clone(), group.clone());
                let f = value_and_grad(move |w: (Tensor, Tensor)| {
                    let (a, b) = cast(&w, dtype)?;
                    let out = x.matmul(&a)?.tanh()?.matmul(&b)?.cast(Dtype::F32)?;
                    group.all_reduce(mean_squared_error(&out, &y)?, Reduce::Avg)
                });
                let (loss, slope) = f.call(w.clone())?;
                Ok((loss, Sgd::default().step(&w, &slope, &None, 0.25)?.0))
            });
            let weight =
                |shape: &[usize], key| Tensor::normal(Dtype::F32, shape, key)?.mul(0.3)?.replicated();
            let mut w = (weight(&[width, width], 3)?, weight(&[width, 1], 4)?);
            let mut losses = Vec::new();
            for _ in 0..steps {
                let (loss, next) = step.call(w)?;
                w = next;
                losses.push(f64::from(loss.item::<f32>()?));
            }
            assert_eq!((w.0.dtype(), w.0.varies().len()), (Dtype::F32, 0));
            step.expect_steady(Steady::graphs(1))?;
            Ok((losses, w.0.to_vec::<f32>()?, w.1.to_vec::<f32>()?))
        }
    };
    let exact = on(1, run(Dtype::F32)).remove(0).0;
    let narrow = on(2, run(Dtype::Bf16));
    // The masters are equal on both ranks, bit by bit.
    assert_eq!(narrow[0], narrow[1]);
    let narrow = &narrow[0].0;
    assert!(exact[steps - 1] < exact[0] / 4.0, "{exact:?}");
    let most = exact.iter().zip(narrow).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("at most {:.5} of the first loss apart", most / exact[0]);
    assert!(most <= exact[0] / 128.0, "{exact:?}\n{narrow:?}");
    assert_ne!(&exact, narrow);
}

#[test]
fn shards_of_any_size_are_gathered_and_have_gradients() {
    for n in [1, 2, 4] {
        let all = on(n, |mesh| {
            let tp = mesh.axis("tp")?;
            let params = (
                Tensor::normal(Dtype::F64, &[5, 2], 1)?.replicated()?,
                Tensor::normal(Dtype::F64, &[4], 2)?.replicated()?,
                Tensor::scalar(3.0f64)?.replicated()?,
            );
            let shards = Shards::of(&params, &tp)?;
            assert_eq!(shards.whole()?.0.varies().len(), 0);
            let (whole, x) = (shards.whole()?, Tensor::index(tp.rank())?.cast(Dtype::F64)?.add(1.0)?);
            assert_eq!(whole.0.to_vec::<f64>()?, params.0.to_vec::<f64>()?);
            let group = tp.clone();
            let slope = grad(move |shards: Shards<(Tensor, Tensor, Tensor)>| {
                let (a, b, c) = shards.whole()?;
                let loss = a.mul(&a)?.sum_all()?.add(&b.mul(&b)?.sum_all()?)?.mul(&x)?.add(&c.mul(&x)?)?;
                group.all_reduce(loss, Reduce::Avg)
            });
            let slope = slope.call(shards)?.whole()?;
            // The mean of x over the ranks, times two of each element.
            let mean = (n as f64 + 1.0) / 2.0;
            for (slope, param) in [(&slope.0, &params.0), (&slope.1, &params.1)] {
                let expected: Vec<f64> = param.to_vec::<f64>()?.iter().map(|x| 2.0 * mean * x).collect();
                close(&slope.to_vec::<f64>()?, &expected);
            }
            slope.2.item::<f64>()
        });
        assert!(all.iter().all(|slope| *slope == (n as f64 + 1.0) / 2.0), "{all:?}");
    }
}

/// Neither 3 nor 7 rows are equal parts of 2 or 4 ranks; one of 4 has none of 3.
#[test]
fn gradients_of_uneven_shards_are_scattered() {
    let run = |n: usize| {
        let all = on(n, |mesh| {
            let tp = mesh.axis("tp")?;
            let params = (Tensor::normal(Dtype::F64, &[3, 4], 1)?, Tensor::normal(Dtype::F64, &[7], 2)?);
            let shards = Shards::of(&params, &tp)?;
            let own = 12 / n;
            let x = Tensor::normal_part(Dtype::F64, &[own, 4], &[12, 4], &[own * mesh.my_rank()?, 0], 3)?;
            let y = Tensor::normal_part(Dtype::F64, &[own, 7], &[12, 7], &[own * mesh.my_rank()?, 0], 4)?;
            let group = tp.clone();
            let f = grad(move |shards: Shards<(Tensor, Tensor)>| {
                let (weight, bias) = shards.whole()?;
                let hidden = x.matmul(&weight.t()?)?.tanh()?.sum(&[1], true)?;
                let off = y.add(&bias)?.mul(&hidden)?;
                group.all_reduce(off.mul(&off)?.mean_all()?, Reduce::Avg)
            });
            let slope = f.call(shards)?;
            let program = f.explain().graphs[0].program.clone();
            if n > 1 {
                // Nothing is summed whole; the loss is not asked for.
                assert_eq!(program.matches("all_reduce_start").count(), 0, "{program}");
                assert_eq!(program.matches("reduce_scatter_v_start").count(), 2, "{program}");
            }
            Ok((slope.rows.0.to_vec::<f64>()?, slope.rows.1.to_vec::<f64>()?))
        });
        let weight: Vec<f64> = all.iter().flat_map(|(weight, _)| weight).copied().collect();
        let bias: Vec<f64> = all.iter().flat_map(|(_, bias)| bias).copied().collect();
        [weight, bias].concat()
    };
    let one = run(1);
    for n in [2, 4] {
        close(&run(n), &one);
    }
}

#[test]
fn a_model_has_one_loss_and_gradient_on_any_number_of_ranks() {
    let config = Config { vocabulary: 11, hidden: 8, feed_forward: 12, dtype: Dtype::F64, ..Config::tiny() };
    let run = |mesh: Mesh| {
        let model = Llama::random(&config, &mesh.axis("tp")?, 3)?;
        let text = Tensor::from_slice(&[1i64, 5, 10, 0, 3, 3, 2, 7], &[2, 4])?.replicated()?;
        let targets = text.add(1)?.rem(11)?;
        // What training computes is what generation computes.
        let mut caches = model.caches(4)?;
        let first = text.narrow(0, 0, 1)?.squeeze(0)?;
        let logits = model.forward(&first, &mut caches, &0.into())?;
        let one = cross_entropy(&logits, &targets.narrow(0, 0, 1)?.squeeze(0)?)?;
        let alone = model.loss(&text.narrow(0, 0, 1)?, &targets.narrow(0, 0, 1)?)?;
        assert!((one.item::<f64>()? - alone.item::<f64>()?).abs() < 1e-12);
        let f = value_and_grad(move |model: Llama| model.loss(&text, &targets));
        let size = compile(|slope: Llama| norm(&slope));
        let (loss, slope) = f.call(model)?;
        Ok([loss.item::<f64>()?, size.call(slope)?.item::<f64>()?])
    };
    let one = on(1, run).remove(0);
    for n in [2, 4] {
        on(n, run).iter().for_each(|many| close(many, &one));
    }
}
