//! Every built-in op has a method, or is not needed outside of programs.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::collections::BTreeSet;

use consort::ops::OpTable;
use consort::{Batched, Dtype, Group, Missing, Reduce, Result, Route, Tensor};

/// Ops that occur in programs only: a tensor waits for itself, knows its sizes, and Rust has `if` and `for`.
const NONE: [&str; 5] = ["wait", "size_of", "to_size", "cond", "scan"];

/// Drops the result of a call, which may contain other calls.
fn outcome<T>(call: impl FnOnce() -> Result<T>) -> Result<()> {
    call().map(drop)
}

/// Calls each method, and gives the names of their ops.
macro_rules! call {
    ($($op:ident: $call:expr),* $(,)?) => {
        vec![$({
            if let Err(error) = outcome(|| $call) {
                panic!("{}: {error}", stringify!($op));
            }
            stringify!($op)
        }),*]
    };
}

fn elementwise() -> Vec<&'static str> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let i = x.cast(Dtype::I32).unwrap();
    let y = x.clone();
    call![
        add: x.add(&y), sub: x.sub(&y), mul: x.mul(&y), div: x.div(&y), rem: x.rem(&y), pow: x.pow(&y),
        maximum: x.maximum(&y), minimum: x.minimum(&y), atan2: x.atan2(&y), neg: x.neg(), abs: x.abs(),
        exp: x.exp(), log: x.log(), sqrt: x.sqrt(), rsqrt: x.rsqrt(), tanh: x.tanh(), sigmoid: x.sigmoid(),
        erf: x.erf(), gelu: x.gelu(), silu: x.silu(), relu: x.relu(), sign: x.sign(), recip: x.recip(),
        sin: x.sin(), cos: x.cos(), exp2: x.exp2(), expm1: x.expm1(), log2: x.log2(), log1p: x.log1p(),
        floor: x.floor(), ceil: x.ceil(), round: x.round(), eq: x.eq(&y), ne: x.ne(&y), lt: x.lt(&y),
        le: x.le(&y), gt: x.gt(&y), ge: x.ge(&y), is_nan: x.is_nan(), is_finite: x.is_finite(),
        and: i.and(&i), or: i.or(&i), xor: i.xor(&i), not: i.not(), select: x.eq(&y)?.select(&x, &y),
        cast: x.cast(Dtype::F64),
    ]
}

fn others() -> Vec<&'static str> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let b = x.eq(&x).unwrap();
    let row = Tensor::from_slice(&[1.0f32, 2.0], &[2]).unwrap();
    let places = Tensor::from_slice(&[1i64, 0], &[2]).unwrap();
    let x4 = x.reshape(&[1, 1, 2, 2]).unwrap();
    let x3 = x.reshape(&[1, 2, 2]).unwrap();
    call![
        sum: x.sum(&[0], false), prod: x.prod(&[0], false), mean: x.mean(&[0], false),
        max: x.max(&[0], false), min: x.min(&[0], false), any: b.any(&[0], false), all: b.all(&[0], false),
        argmax: x.argmax(&[0], false), argmin: x.argmin(&[0], false), matmul: x.matmul(&x),
        conv1d: x3.conv1d(&x3, 1, 0, 1, 1), conv2d: x4.conv2d(&x4, [1, 1], [0, 0], [1, 1], 1),
        reshape: x.reshape(&[4]), permute: x.permute(&[1, 0]), slice: x.slice(&[0, 0], &[1, 1], &[1, 1]),
        update_slice: row.update_slice(&row, &[0]), concat: Tensor::concat(&[&x, &x], 0),
        split: x.split(0, &[1, 1]), pad: row.pad(&[1], &[0], 0.0), broadcast: row.broadcast_to(&[2, 2]),
        flip: x.flip(&[0]), cumsum: x.cumsum(0), sort: x.sort(0, true), topk: x.topk(0, 1),
        gather: x.gather(&places, 0), take_along: x.take_along(&places.reshape(&[2, 1])?, 1),
        scatter: row.scatter(&places, &row, 0), scatter_add: row.scatter_add(&places, &row, 0),
        one_hot: places.one_hot(2, Dtype::F32), constant: Tensor::full(Dtype::F32, &[1], 2.0),
        iota: Tensor::iota(Dtype::I64, &[2], 0), index: Tensor::index(3usize),
        uniform: Tensor::uniform(Dtype::F32, &[2], 1), normal: Tensor::normal(Dtype::F32, &[2], 1),
        softmax: x.softmax(1), log_softmax: x.log_softmax(1), logsumexp: x.logsumexp(&[1], true),
        rms_norm: x.rms_norm(&row, 1e-5), layer_norm: x.layer_norm(&row, &row, 1e-5),
        attention: x4.attention(&x4, &x4, 1.0, None),
    ]
}

/// On a group of one, which needs no other ranks.
fn communication(group: &Group) -> Vec<&'static str> {
    let x = Tensor::from_slice(&[1.0f32, 2.0], &[2]).unwrap();
    let mut y = x.clone();
    call![
        all_reduce_start: group.all_reduce(&x, Reduce::Sum), all_gather_start: group.all_gather(&x, 0),
        reduce_scatter_start: group.reduce_scatter(&x, Reduce::Sum, 0),
        all_to_all_start: group.all_to_all(&x, None, None), broadcast_start: group.broadcast(&x, 0),
        reduce_start: group.reduce(&x, Reduce::Sum, 0), gather_start: group.gather(&x, 0, 0),
        scatter_start: group.scatter(&x, 0, 0), all_gather_v_start: group.all_gather_v(&x, 0, &[2]),
        reduce_scatter_v_start: group.reduce_scatter_v(&x, Reduce::Sum, 0, &[2]),
        permute_start: group.permute(&x, Route::Ring(1), Missing::Error),
        exchange_start: group.batch(vec![Batched::send(&x, 0, 0), Batched::recv(&mut y, 0, 0)])?.wait(),
        barrier_start: group.barrier(),
    ]
}

#[test]
fn every_op_has_a_method() {
    let mesh = consort::init().unwrap();
    let called = [elementwise(), others(), communication(&mesh)].concat();
    let expected: BTreeSet<&str> =
        OpTable::built_in().iter().map(|op| op.name).filter(|name| !NONE.contains(name)).collect();
    let missing: Vec<&&str> = expected.iter().filter(|name| !called.contains(name)).collect();
    assert!(missing.is_empty(), "no method is called for {missing:?}");
    let unknown: Vec<&&str> = called.iter().filter(|name| !expected.contains(**name)).collect();
    assert!(unknown.is_empty(), "there is no op {unknown:?}");
}

#[test]
fn sums_larger_than_a_cache_are_those_of_a_loop() {
    // 2 MiB each: more than the stream's limit together, and one place less than a multiple of any vector.
    let n = (1 << 19) - 1;
    let x: Vec<f32> = (0..n).map(|i| (i as f32).mul_add(0.37, -9.0e4)).collect();
    let y: Vec<f32> = (0..n).map(|i| 1.0 / (i as f32 + 0.5)).collect();
    let (a, b) = (Tensor::from_slice(&x, &[n]).unwrap(), Tensor::from_slice(&y, &[n]).unwrap());
    let pairs = || x.iter().zip(&y);
    let got = [a.add(&b), a.sub(&b), a.mul(&b)].map(|z| z.unwrap().to_vec::<f32>().unwrap());
    assert_eq!(got[0], pairs().map(|(x, y)| x + y).collect::<Vec<_>>());
    assert_eq!(got[1], pairs().map(|(x, y)| x - y).collect::<Vec<_>>());
    assert_eq!(got[2], pairs().map(|(x, y)| x * y).collect::<Vec<_>>());
}
