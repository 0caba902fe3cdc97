//! Methods of ops run; those of elementwise ops have examples that are tests.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::slice::from_ref;

use consort::{Batched, Chain, Dtype, Group, HostTensor, Missing, Reduce, Result, Route, Tensor, compile};

/// Drops the result of a call, which may contain other calls.
fn outcome<T>(call: impl FnOnce() -> Result<T>) -> Result<()> {
    call().map(drop)
}

/// The name and the outcome of each call.
macro_rules! call {
    ($($op:ident: $call:expr),* $(,)?) => {
        vec![$((stringify!($op), outcome(|| $call))),*]
    };
}

fn others() -> Vec<(&'static str, Result<()>)> {
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
fn communication(group: &Group) -> Vec<(&'static str, Result<()>)> {
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
fn methods_run() {
    let mesh = consort::init().unwrap();
    for (op, outcome) in others().into_iter().chain(communication(&mesh)) {
        outcome.unwrap_or_else(|error| panic!("{op}: {error}"));
    }
}

fn no_elements() -> Result<Tensor> {
    Tensor::zeros(Dtype::F32, &[0])
}

/// Wrong calls of methods that run ops of other names, or take numbers.
fn wrong(group: &Group) -> Vec<(&'static str, Result<()>)> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let row = Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3]).unwrap();
    let b = Tensor::from_slice(&[true, false], &[2]).unwrap();
    let no_data = Tensor::of_shape(Dtype::F32, &[2]);
    let (mut y, mut z) = (x.clone(), b.clone());
    let huge = &[usize::MAX / 8];
    let mut whole = Tensor::from_iter([1i32]).unwrap();
    call![
        add: whole.add(0.5), gt: whole.gt(0.5), add_: whole.add_(0.5), mul: whole.mul(i64::MAX), clamp: whole.clamp(0.5, 1),
        select: b.select(1, 0.0), t: row.t(), max_all: no_elements()?.max_all(), mean_all: whole.mean_all(),
        add_: y.add_(&row), not_: y.not_(), neg_: z.neg_(), narrow: x.narrow(0, 1, 2), at: x.at(0, 2),
        narrow_mut: y.narrow_mut(0, 1usize, 2usize).map(drop), slice_mut: y.slice_mut(&[1, 0], &[2, 2]).map(drop),
        broadcast_to: row.broadcast_to(&[2]), stack: Tensor::stack(&[&x, &row], 0), sum_all: b.sum_all(),
        clamp: b.clamp(0.0, 1.0), item: x.item::<i32>(), to_vec: x.to_vec::<i32>(),
        item: no_data.item::<f32>(), to_sizes: no_data.cast(Dtype::I64)?.to_sizes(),
        full: Tensor::full(Dtype::F32, huge, 1.0), zeros: Tensor::zeros(Dtype::F32, huge),
        uniform: Tensor::uniform(Dtype::I32, &[1], 1), normal: Tensor::normal(Dtype::I32, &[1], 1),
        all_gather_into: group.all_gather_into(&mut y, &row, 0),
        all_gather_into: group.all_gather_into(y.narrow_mut(0, 0, 1)?, &row, 0),
        all_reduce_: group.all_reduce_(&mut z, Reduce::Avg), broadcast_: group.broadcast_(&mut y, 7),
        all_reduce: group.pending(|| group.all_reduce(&b, Reduce::Avg)).map(drop),
        all_gather_: group.all_gather_(&mut y, 2), isend: group.isend(&x, 7, 0).map(drop),
        irecv: group.irecv(Dtype::F32, &[1], 7, 0), recv_into: group.recv_into(&mut y, 7, 0),
        all_reduce_coalesced: group.all_reduce_coalesced(vec![b.clone()], Reduce::Avg),
        reduce_scatter_coalesced: group.reduce_scatter_coalesced(from_ref(&x), Reduce::Sum, &[]),
        reduce_scatter_coalesced_: group.reduce_scatter_coalesced_(&mut [x.clone()], Reduce::Sum, &[2]),
        all_gather_coalesced_: group.all_gather_coalesced_(&mut [x.sum_all()?]),
        gather_: group.gather_(&mut y, 0, 7), scatter_: group.scatter_(&mut y, 2, 0),
        gather_into: group.gather_into(&mut y, &row, 0, 0), scatter_into: group.scatter_into(&mut y, &x, 0, 7),
        gather_list: group.gather_list(&x, 7), scatter_list: group.scatter_list(from_ref(&x), 7),
        reduce_scatter_list: group.reduce_scatter_list(&[], Reduce::Sum),
        reduce_scatter_list: group.reduce_scatter_list(from_ref(&b), Reduce::Avg),
        gather_list_into: group.gather_list_into([&mut y], &row, 0),
        scatter_list_into: group.scatter_list_into(&mut z, from_ref(&x), 0),
        reduce_scatter_list_into: group.reduce_scatter_list_into(&mut y, &[], Reduce::Sum),
        all_to_all_list: group.all_to_all_list(&[x.clone(), x.clone()]),
        all_gather_list_into: group.all_gather_list_into([&mut y], &row),
        all_gather_list_into: group.all_gather_list_into(Vec::<&mut Tensor>::new(), &row),
        all_to_all_list_into: group.all_to_all_list_into([&mut y], from_ref(&b)),
    ]
}

#[test]
fn errors_name_the_method_that_was_called() {
    let mesh = consort::init().unwrap();
    for (method, outcome) in wrong(&mesh) {
        let error = outcome.expect_err(method);
        assert_eq!(error.op(), method, "{error}");
        let text = error.to_string();
        assert!(text.starts_with(&format!("{method}: ")), "{text}");
        assert_eq!(text.matches(&format!("{method}: ")).count(), 1, "{text}");
        assert_eq!(error.site().file(), file!(), "{text}");
    }
}

#[test]
fn numbers_are_operands_of_the_tensors_type() {
    for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16, Dtype::I32, Dtype::I64, Dtype::U8] {
        let x = Tensor::from_iter([1i32, 5]).unwrap().cast(dtype).unwrap();
        let sums = [x.add(2), x.add(2.0), x.add(2i64), x.add(2f32), &x + 2.0];
        for sum in sums {
            let sum = sum.unwrap();
            assert_eq!((sum.dtype(), sum.cast(Dtype::I64).to_vec::<i64>().unwrap()), (dtype, vec![3, 7]));
        }
        assert_eq!(x.gt(3).unwrap().to_vec::<bool>().unwrap(), [false, true]);
        assert_eq!(x.ge(3).select(&x, 3).cast(Dtype::I64).to_vec::<i64>().unwrap(), [3, 5]);
        let mut y = x.clone();
        y.sub_(1).unwrap();
        assert_eq!(y.cast(Dtype::I64).to_vec::<i64>().unwrap(), [0, 4]);
        assert_eq!(x.cast(Dtype::I64).to_vec::<i64>().unwrap(), [1, 5], "its own value");
    }
}

#[test]
fn scalars_have_the_type_of_their_number() {
    let scalars = [Tensor::scalar(1.5f32), Tensor::scalar(1i64), Tensor::scalar(7u8), Tensor::scalar(true)];
    let types = scalars.map(|x| x.map(|x| (x.dtype(), x.rank(), x.to_string())).unwrap());
    let expected = [(Dtype::F32, "1.5"), (Dtype::I64, "1"), (Dtype::U8, "7"), (Dtype::Bool, "True")];
    assert_eq!(types, expected.map(|(dtype, text)| (dtype, 0, text.to_string())));
}

#[test]
fn a_scalar_in_a_compiled_function_is_no_captured_tensor() {
    let f = compile(|x: Tensor| x.mul(&Tensor::scalar(2.0f32)?).add(1.0).max_all()).fullgraph(true);
    assert_eq!(f.call(Tensor::from_iter([1.0f32, 3.0]).unwrap()).item::<f32>().unwrap(), 7.0);
}

#[test]
fn a_chain_ends_at_the_first_step_that_fails() {
    let x = Tensor::from_iter([1.0f32, 2.0]).unwrap();
    let (first, last) = (x.reshape(&[3]).neg().matmul(&x), x.neg().exp().reshape(&[3]));
    for (result, op) in [(first, "reshape"), (last, "reshape")] {
        let error = result.map(drop).unwrap_err();
        assert_eq!((error.op(), error.site().file()), (op, file!()));
    }
    assert_eq!(x.max_all().sub(&x.min_all().unwrap()).mul(4).item::<f32>().unwrap(), 4.0);
}

#[test]
fn host_tensors_keep_type_shape_and_elements() {
    let error = HostTensor::from_vec(vec![1i64, 2, 3], &[2, 2]).map(drop).unwrap_err().to_string();
    assert!(error.starts_with("from_vec: expected as many elements as [2, 2] has, got 3\n  at "), "{error}");
    // A view with gaps is packed.
    let x = Tensor::from_iter(0..6i32).unwrap().reshape(&[2, 3]).t().unwrap();
    let host = x.to_host().unwrap();
    let there = std::thread::spawn(move || {
        let x = Tensor::from_host(&host).unwrap();
        (x.dtype(), x.shape().to_vec(), x.to_vec::<i32>().unwrap())
    });
    assert_eq!(there.join().unwrap(), (Dtype::I32, vec![3, 2], vec![0, 3, 1, 4, 2, 5]));
    let flags = HostTensor::from_vec(vec![true, false], &[2]).unwrap();
    assert_eq!(Tensor::from_host(&flags).unwrap().to_vec::<bool>().unwrap(), [true, false]);
}

#[test]
fn the_rule_of_an_op_that_a_method_runs_is_named_with_its_op() {
    let x = Tensor::from_iter([1i32, 2, 3]).unwrap();
    let text = x.narrow(0, 2, 2).map(drop).unwrap_err().to_string();
    assert!(text.starts_with("narrow: dimension 0: expected to end by 3, got 4 (C3)\n  at "), "{text}");
    assert!(text.ends_with("\n  note: C3 is a rule of `slice`"), "{text}");
    let error = x.slice(&[2], &[2], &[1]).map(drop).unwrap_err();
    let failure = error.failure();
    assert_eq!((&failure.expected[..], &failure.got[..], failure.notes.len()), ("to end by 3", "4", 0));
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
