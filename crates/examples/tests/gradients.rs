//! Gradients through the examples on 2 and 4 ranks, beside those of the same computation on one rank.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Dtype, Explanation, Mesh, Reduce, Result, Tensor, grad, tolerance};
use consort_examples::{conv, halo, moe, ring_attention};

/// The flat gradients of each rank.
type Flat = Vec<Vec<f32>>;

fn flat(tensors: &[Tensor]) -> Result<Flat> {
    tensors.iter().map(Tensor::to_vec).collect()
}

/// What each of `n` ranks has of `f`.
fn on_ranks(n: usize, f: impl Fn(Mesh) -> Result<Flat> + Send + Sync + Copy + 'static) -> Vec<Flat> {
    consort::spawn(n, f).into_iter().map(|made| made.unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// Checks gradients of ranks against those of one rank, of which `part` takes what belongs to a rank.
fn compare(
    n: usize,
    ranks: impl Fn(Mesh) -> Result<Flat> + Send + Sync + Copy + 'static,
    part: impl Fn(&Mesh, usize) -> Result<Vec<Tensor>> + Send + Sync + Copy + 'static,
) {
    let all = move |mesh: Mesh| {
        let parts = (0..n).map(|rank| flat(&part(&mesh, rank)?)).collect::<Result<Vec<_>>>();
        Ok(parts?.concat())
    };
    let expected = on_ranks(1, all);
    let got = on_ranks(n, ranks).concat();
    assert_eq!(got.len(), expected[0].len());
    for (i, (got, expected)) in got.iter().zip(&expected[0]).enumerate() {
        let off = tolerance::difference(expected, got);
        assert!(got.iter().any(|slope| *slope != 0.0), "gradient {i} is zero");
        assert!(off <= tolerance::of_runs(Dtype::F32), "gradient {i} is off by {off:e}");
    }
}

const SHAPE: [usize; 3] = [2, 6, 8];

/// Checks that cotangents go back round a ring of `n` ranks while the attention to other keys goes backward, without copies.
fn overlaps_backward(explained: &Explanation, n: usize) {
    let graph = &explained.graphs[0];
    assert_eq!((graph.copied_bytes, graph.copies.len()), (0, 0), "{explained}");
    let plan = graph.plan.clone().unwrap();
    let lines: Vec<&str> = plan.lines().collect();
    let starts: Vec<usize> = (0..lines.len()).filter(|at| lines[*at].contains("= exchange_start[")).collect();
    assert_eq!(starts.len(), 2 * (n - 1), "{plan}");
    for (number, start) in starts.into_iter().enumerate() {
        let is_backward = number >= n - 1;
        let sent = if is_backward { "send=[ring(-1) " } else { "send=[ring(+1) " };
        assert!(lines[start].contains(sent), "{plan}");
        let pending = lines[start].split_whitespace().next().unwrap();
        let is_wait = |line: &&str| line.contains(&format!(" = wait {pending} "));
        let wait = start + lines[start..].iter().position(is_wait).unwrap();
        // Each of the two tiles has the products of its scores and values, two for each of them in the backward; one op for
        // the attention of a tile has them all.
        let each = if is_backward { 4 } else { 2 };
        let products = lines[start..wait].iter().map(|line| match line {
            line if line.contains(" = matmul ") => 1,
            line if line.contains(" = attention") => each,
            _ => 0,
        });
        assert!(products.sum::<usize>() >= 2 * each, "{plan}");
    }
}

#[test]
fn a14_ring_attention_goes_back_round_the_ring() {
    let [heads, length, width] = SHAPE;
    for n in [2, 4] {
        for causal in [false, true] {
            let ranks = move |mesh: Mesh| {
                let group = mesh.clone();
                let [q, k, v, c] =
                    [1, 2, 3, 4].map(|key| ring_attention::part(&mesh, heads, length, width, key));
                let c = c?;
                let slope = grad(move |(q, k, v): (Tensor, Tensor, Tensor)| {
                    let y = ring_attention::ring_attention(&group, &q, k, v, causal, 4)?;
                    group.all_reduce(y.mul(&c)?.sum_all()?, Reduce::Sum)
                });
                let (q, k, v) = slope.call((q?, k?, v?))?;
                overlaps_backward(&slope.explain(), n);
                // Keys, values and their cotangents are sent and received in place.
                assert_eq!(slope.stats().copied_bytes, 0, "{}", slope.explain());
                flat(&[q, k, v])
            };
            let part = move |_: &Mesh, rank: usize| {
                let whole = |key| Tensor::normal(Dtype::F32, &[1, heads, length * n, width], key);
                let c = whole(4)?;
                let slope = grad(move |(q, k, v): (Tensor, Tensor, Tensor)| {
                    let first = causal.then(|| consort::Index::from(0));
                    q.attention(&k, &v, (width as f64).powf(-0.5), first)?.mul(&c)?.sum_all()
                });
                let (q, k, v) = slope.call((whole(1)?, whole(2)?, whole(3)?))?;
                [q, k, v].iter().map(|slope| slope.narrow(2, rank * length, length)).collect()
            };
            compare(n, ranks, part);
        }
    }
}

#[test]
fn a14_a_halo_goes_back_to_its_owner() {
    const SIZE: usize = 4;
    let weights = |top: usize, left: usize, height: usize, width: usize| {
        let cells = (0..height * width).map(|i| {
            let (row, column) = (top + i / width, left + i % width);
            ((row * 5 + column * 3) % 11) as f32
        });
        Tensor::from_slice(&cells.collect::<Vec<f32>>(), &[height, width])
    };
    let loss = |x: &Tensor, weights: &Tensor| {
        let inside = x.slice(&[1, 1], weights.shape(), &[1, 1])?;
        inside.mul(&inside)?.mul(weights)?.sum_all()
    };
    for n in [2, 4] {
        let ranks = move |mesh: Mesh| {
            let grid = halo::Sharing::new(&mesh, 2, true)?;
            let (group, own) = (mesh.clone(), grid.clone());
            let weights = weights(grid.down.my_rank()? * SIZE, grid.along.my_rank()? * SIZE, SIZE, SIZE)?;
            let slope = grad(move |mut x: Tensor| {
                for _ in 0..3 {
                    x = halo::step(&own, x)?;
                }
                group.all_reduce(loss(&x, &weights)?, Reduce::Sum)
            });
            Ok(vec![halo::cells(&slope.call(halo::start(&grid, SIZE, SIZE)?)?)?])
        };
        let part = move |mesh: &Mesh, rank: usize| {
            let (height, width) = (SIZE * n / 2, SIZE * 2);
            let grid = halo::Sharing::new(mesh, 1, true)?;
            let own = grid.clone();
            let weights = weights(0, 0, height, width)?;
            let slope = grad(move |mut x: Tensor| {
                for _ in 0..3 {
                    x = halo::step(&own, x)?;
                }
                loss(&x, &weights)
            });
            let slope = slope.call(halo::start(&grid, height, width)?)?;
            Ok(vec![slope.slice(&[1 + rank / 2 * SIZE, 1 + rank % 2 * SIZE], &[SIZE, SIZE], &[1, 1])?])
        };
        compare(n, ranks, part);
    }
}

#[test]
fn a14_the_gradient_of_a_convolution_crosses_its_borders() {
    const OWN: [usize; 4] = [1, 2, 5, 6];
    for n in [2, 4] {
        let weight = || Tensor::normal(Dtype::F32, &[3, 2, 3, 3], 7);
        let ranks = move |mesh: Mesh| {
            let group = mesh.clone();
            let (x, _) = conv::input(&mesh, &OWN, 1)?;
            let (c, _) = conv::input(&mesh, &[1, 3, 5, 6], 2)?;
            let slope = grad(move |(x, weight): (Tensor, Tensor)| {
                group.all_reduce(conv::conv(&group, &x, &weight)?.mul(&c)?.sum_all()?, Reduce::Sum)
            });
            let (x, weight) = slope.call((x, weight()?.replicated()?))?;
            flat(&[x, weight])
        };
        let part = move |_: &Mesh, rank: usize| {
            let whole = |channels, key| Tensor::normal(Dtype::F32, &[1, channels, 5 * n, 6], key);
            let c = whole(3, 2)?;
            let slope = grad(move |(x, weight): (Tensor, Tensor)| {
                x.conv2d(&weight, [1, 1], [1, 1], [1, 1], 1)?.mul(&c)?.sum_all()
            });
            let (x, weight) = slope.call((whole(2, 1)?, weight()?))?;
            Ok(vec![x.narrow(2, rank * 5, 5)?, weight])
        };
        compare(n, ranks, part);
    }
}

/// Tokens go to experts and come back; so do their gradients. Beside it each expert sees all tokens, and a mask takes those
/// that are its own.
#[test]
fn a14_gradients_find_their_experts() {
    const TOKENS: usize = 12;
    const WIDTH: usize = 6;
    const HIDDEN: usize = 5;
    for n in [2, 4] {
        let normal = |rows: usize, columns: usize, key: i64| {
            Tensor::normal(Dtype::F32, &[rows, columns], key)? * (1.0 / rows as f64).sqrt()
        };
        let ranks = move |mesh: Mesh| {
            let group = mesh.clone();
            let own = moe::Expert::new(&mesh, WIDTH, HIDDEN)?;
            let x = moe::tokens(&mesh, TOKENS, WIDTH, 0)?;
            let c = moe::tokens(&mesh, TOKENS, WIDTH, 1)?;
            let slope = grad(move |(x, own): (Tensor, moe::Expert)| {
                group.all_reduce(moe::moe(&group, &x, &own)?.mul(&c)?.sum_all()?, Reduce::Sum)
            });
            let (x, own) = slope.call((x, own))?;
            flat(&[x, own.router, own.up, own.down])
        };
        let part = move |_: &Mesh, rank: usize| {
            let round = |round: usize| {
                let own = (0..n).map(|rank| {
                    Tensor::normal(Dtype::F32, &[TOKENS, WIDTH], 1000 + (round * n + rank) as i64)
                });
                let own = own.collect::<Result<Vec<_>>>()?;
                Tensor::concat(&own.iter().collect::<Vec<_>>(), 0)
            };
            let ups =
                (0..n).map(|rank| normal(WIDTH, HIDDEN, 1 + 2 * rank as i64)).collect::<Result<Vec<_>>>()?;
            let downs =
                (0..n).map(|rank| normal(HIDDEN, WIDTH, 2 + 2 * rank as i64)).collect::<Result<Vec<_>>>()?;
            let c = round(1)?;
            type Weights = (Tensor, Tensor, Vec<Tensor>, Vec<Tensor>);
            let slope = grad(move |(x, router, ups, downs): Weights| {
                let (chance, expert) = x.matmul(&router)?.softmax(1)?.topk(1, 1)?;
                let mut y = x.clone();
                for (number, (up, down)) in ups.iter().zip(&downs).enumerate() {
                    let made = x.matmul(up)?.silu()?.matmul(down)?;
                    let own = expert.eq(number as i64)?.cast(Dtype::F32)?.mul(&chance)?;
                    y = y.add(&made.mul(&own.broadcast_to(&[n * TOKENS, WIDTH])?)?)?;
                }
                y.mul(&c)?.sum_all()
            });
            let (x, router, ups, downs) = slope.call((round(0)?, normal(WIDTH, n, 0)?, ups, downs))?;
            Ok(vec![x.narrow(0, rank * TOKENS, TOKENS)?, router, ups[rank].clone(), downs[rank].clone()])
        };
        compare(n, ranks, part);
    }
}
