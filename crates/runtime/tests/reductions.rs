//! Reductions over groups are bit-identical to the program's definition, on random data with all special float
//! values.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::time::{Duration, Instant};

use consort_comm::spawn_with_heap;
use consort_ir::literal::{Data, Literal};
use consort_ir::ops::fold;
use consort_types::{Dtype, Reduce, Rng};

fn random(dtype: Dtype, count: usize, seed: u64) -> Literal {
    let mut rng = Rng::new(seed);
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1e-45, 6e-8, 65504.0, 3e38];
    let mut float =
        || if rng.one_in(16) { rng.pick(&odd) } else { rng.next_u64() as i64 as f64 / 2f64.powi(58) };
    if dtype.is_float() {
        return Literal::floats(dtype, vec![count], (0..count).map(|_| float()).collect());
    }
    Literal::ints(dtype, vec![count], (0..count).map(|_| rng.next_u64() as i64).collect())
}

/// Equal bits, or both NaN: which of several NaNs results is unspecified.
fn same(a: &Literal, b: &Literal) -> bool {
    match (&a.data, &b.data) {
        (Data::Float(x), Data::Float(y)) => {
            x.iter().zip(y).all(|(x, y)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan())
        }
        (x, y) => x == y,
    }
}

#[test]
fn groups_reduce_as_the_program_defines() {
    for n in [1, 2, 3, 5] {
        spawn_with_heap(n, 8 << 20, |group| {
            for dtype in Dtype::ALL {
                for reduce in Reduce::ALL.into_iter().filter(|reduce| reduce.takes(dtype)) {
                    // In one piece, and in parts.
                    for count in [101, 9001] {
                        let all: Vec<Literal> = (0..n)
                            .map(|rank| random(dtype, count, rank as u64 * 77 + count as u64))
                            .collect();
                        let want = fold(reduce, &all.iter().collect::<Vec<_>>()).unwrap();
                        let until = Instant::now() + Duration::from_secs(20);
                        let bytes = all[group.rank()].to_bytes();
                        let mut buffer = group.heap().alloc(bytes.len()).unwrap();
                        buffer.bytes_mut(until).unwrap().copy_from_slice(&bytes);
                        let pending = group.all_reduce(buffer, dtype, reduce).unwrap();
                        let got = pending.wait(until).unwrap();
                        let got = Literal::from_bytes(dtype, vec![count], &got[0].bytes().unwrap()).unwrap();
                        assert!(same(&want, &got), "{n} ranks, {dtype} {reduce:?}");
                    }
                }
            }
        });
    }
}
