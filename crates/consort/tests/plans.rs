//! Compiled functions that write storage which took part in communication: their plans have no hazards (checked
//! when a plan is made), and results equal those of a plain loop.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Batched, Mesh, Reduce, Result, Route, Tensor, compile};

/// Runs `f` on `n` ranks.
fn on(n: usize, f: impl Fn(Mesh) -> Result<()> + Sync) {
    for (rank, outcome) in consort::spawn(n, f).into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank} of {n}: {error}"));
    }
}

/// Element `i` of a rank's argument.
fn element(rank: usize, i: usize) -> f32 {
    (i + 100 * rank) as f32
}

fn argument(rank: usize, shape: &[usize]) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    Tensor::from_slice(&(0..n).map(|i| element(rank, i)).collect::<Vec<_>>(), shape)
}

/// A collective: takes the group and an argument of `rows` rows; the result has twice as many.
type Doubles = fn(&Mesh, &Tensor) -> Result<Tensor>;

/// An element of a result: by rank, number of rows, and index.
type Element = fn(usize, usize, usize) -> f32;

/// Collectives whose result has twice the rows, and element `i` of the result by a plain loop.
const DOUBLES: [(&str, Doubles, Element); 5] = [
    ("all_gather", |mesh, x| mesh.all_gather(x, 0), |_, n, i| element(i / n, i % n)),
    (
        "all_reduce",
        |mesh, x| mesh.all_reduce(Tensor::concat(&[x, x], 0)?, Reduce::Sum),
        |_, n, i| element(0, i % n) + element(1, i % n),
    ),
    ("broadcast", |mesh, x| mesh.broadcast(Tensor::concat(&[x, x], 0)?, 1), |_, n, i| element(1, i % n)),
    (
        "permute",
        |mesh, x| mesh.permute(Tensor::concat(&[x, x], 0)?, Route::Ring(1), consort::Missing::Error),
        |me, n, i| element(1 - me, i % n),
    ),
    (
        "all_to_all",
        |mesh, x| mesh.all_to_all(Tensor::concat(&[x, x], 0)?, None, None),
        |_, n, i| element(i / n, i % n),
    ),
];

#[test]
fn a_slice_of_half_a_result_is_written_after_its_release() {
    for (name, doubled, plain) in DOUBLES {
        on(2, |mesh| {
            let me = mesh.my_rank()?;
            let group = mesh.clone();
            let f = compile(move |(x, row): (Tensor, Tensor)| {
                let half = x.dim(0)?;
                let whole = doubled(&group, &x)?;
                let mut z = whole.narrow(0, half.clone(), half)?;
                z.narrow_mut(0, 1, 1)?.copy_from(&row)?;
                Ok(z)
            });
            // The second size makes `half` a symbol, and the third reuses the program of the second.
            for rows in [2, 3, 5] {
                let row = Tensor::from_slice(&[-1.0f32, -2.0], &[1, 2])?;
                let got = f.call((argument(me, &[rows, 2])?, row))?.to_vec::<f32>()?;
                let n = 2 * rows;
                let mut expected: Vec<f32> = (n..2 * n).map(|i| plain(me, n, i)).collect();
                expected[2..4].copy_from_slice(&[-1.0, -2.0]);
                assert_eq!(got, expected, "{name}, {rows} rows");
            }
            Ok(())
        });
    }
}

#[test]
fn a_part_is_summed_in_place_while_a_broadcast_of_the_whole_is_in_flight() {
    // A column of one row is contiguous, one of three is not; rows are.
    for (shape, dim) in [([1, 4], 1), ([3, 2], 1), ([3, 2], 0)] {
        on(2, |mesh| {
            let me = mesh.my_rank()?;
            let group = mesh.clone();
            let f = compile(move |x: Tensor| {
                let mut y = x.clone();
                let batch =
                    vec![Batched::send(&x, Route::Ring(1), 0), Batched::recv(&mut y, Route::Ring(-1), 0)];
                let _ = group.batch(batch)?;
                let sent = group.broadcast(&y, 0)?;
                group.all_reduce_(y.narrow_mut(dim, 0, 1)?, Reduce::Sum)?;
                let negated = sent.neg()?;
                Ok((y, negated))
            });
            let n = shape[0] * shape[1];
            // After the ring, rank 0 holds what rank 1 had.
            let received = |rank: usize, i: usize| element(1 - rank, i);
            let inside = |i: usize| [i / shape[1], i % shape[1]][dim] == 0;
            let summed = |i: usize| if inside(i) { element(0, i) + element(1, i) } else { received(me, i) };
            for _ in 0..3 {
                let (y, negated) = f.call(argument(me, &shape)?)?;
                assert_eq!(y.to_vec::<f32>()?, (0..n).map(summed).collect::<Vec<_>>(), "{shape:?} {dim}");
                let expected: Vec<f32> = (0..n).map(|i| -received(0, i)).collect();
                assert_eq!(negated.to_vec::<f32>()?, expected, "{shape:?} {dim}");
            }
            Ok(())
        });
    }
}
