//! Kernels of products against the ops' own evaluations: random sizes, layouts and types. Integers are equal; floats
//! differ by no more than rounding allows.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::collections::BTreeMap;

use consort_ir::dtype::Dtype;
use consort_ir::generate::Rng;
use consort_ir::mesh::{Mesh, Rank};
use consort_ir::ops::{EvalCx, Matmul, OpDef};
use consort_ir::tensor::{Data, Tensor, unravel};
use consort_runtime::kernels::{Arg, KernelCx, View, ViewMut, find};
use consort_runtime::layout::{row_major, span};
use consort_runtime::threads::Threads;

/// The distance from 1 to the next number.
fn eps(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F64 => 2f64.powi(-52),
        Dtype::F32 => 2f64.powi(-23),
        Dtype::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    }
}

/// A tensor somewhere in storage.
struct Placed {
    dtype: Dtype,
    shape: Vec<usize>,
    strides: Vec<usize>,
    storage: Vec<u64>,
    start: usize,
}

/// How a tensor may lie.
#[derive(Clone, Copy, Debug)]
enum Lie {
    Contiguous,
    /// Dimensions in another order, parts of larger ones, repeated ones.
    Anyhow,
}

impl Placed {
    fn random(dtype: Dtype, shape: &[usize], lie: Lie, rng: &mut Rng) -> Placed {
        let mut order: Vec<usize> = (0..shape.len()).collect();
        let mut strides = row_major(shape).to_vec();
        let (mut start, mut count) = (0, shape.iter().product::<usize>());
        if matches!(lie, Lie::Anyhow) {
            for i in (1..order.len()).rev() {
                if rng.one_in(2) {
                    order.swap(i, rng.next_u64() as usize % (i + 1));
                }
            }
            let mut next = 1;
            for dim in order.iter().rev() {
                if rng.one_in(8) {
                    strides[*dim] = 0;
                    continue;
                }
                let gap = if rng.one_in(3) { 1 + rng.next_u64() as usize % 3 } else { 0 };
                let step = if rng.one_in(8) { 2 } else { 1 };
                strides[*dim] = next * step;
                next *= (shape[*dim] + gap).max(1) * step;
            }
            start = rng.next_u64() as usize % 5;
            count = span(shape, &strides);
        }
        let values = Self::values(dtype, start + count, rng);
        let mut bytes = values.to_bytes();
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let storage = bytes.chunks_exact(8).map(|b| u64::from_ne_bytes(b.try_into().unwrap())).collect();
        Placed { dtype, shape: shape.to_vec(), strides, storage, start }
    }

    fn values(dtype: Dtype, count: usize, rng: &mut Rng) -> Tensor {
        if dtype.is_float() {
            let mut float = || (rng.next_u64() as i64) as f64 / 2f64.powi(63);
            return Tensor::floats(dtype, vec![count], (0..count).map(|_| float()).collect());
        }
        Tensor::ints(dtype, vec![count], (0..count).map(|_| rng.next_u64() as i64).collect())
    }

    fn bytes(&self) -> &[u8] {
        let size = self.dtype.size();
        let bytes: &[u8] = bytemuck::cast_slice(&self.storage);
        &bytes[self.start * size..][..span(&self.shape, &self.strides) * size]
    }

    fn view(&self) -> View<'_> {
        View { dtype: self.dtype, shape: &self.shape, strides: &self.strides, bytes: self.bytes() }
    }

    fn tensor(&self) -> Tensor {
        let count = span(&self.shape, &self.strides);
        let all = Tensor::from_bytes(self.dtype, vec![count], self.bytes()).unwrap();
        let at = |i| unravel(i, &self.shape).iter().zip(&self.strides).map(|(at, stride)| at * stride).sum();
        all.pick(self.shape.clone(), at)
    }
}

/// What the op's evaluation and its kernel give. The kernel's result lies in NaNs, which it must not read.
fn both(op: &dyn OpDef, args: &[Placed], threads: &Threads) -> (Tensor, Tensor) {
    let (mesh, symbols) = (Mesh::default(), BTreeMap::new());
    let sizes = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &symbols };
    let tensors: Vec<Tensor> = args.iter().map(Placed::tensor).collect();
    let expected = op.eval(&sizes, &tensors.iter().collect::<Vec<_>>()).unwrap().remove(0);
    let len = expected.numel() * expected.dtype.size();
    let mut storage = vec![u64::MAX; len.div_ceil(8)];
    let bytes = &mut bytemuck::cast_slice_mut(&mut storage)[..len];
    let shape = expected.shape.clone();
    let views: Vec<Arg<'_>> = args.iter().map(|arg| Arg::View(arg.view())).collect();
    let result = ViewMut { dtype: expected.dtype, shape: &shape, bytes };
    let kernel = find(op.info().name).unwrap();
    (kernel.run)(&KernelCx { sizes, threads }, op, &views, &mut [result]).unwrap();
    let bytes: &[u8] = bytemuck::cast_slice(&storage);
    let got = Tensor::from_bytes(expected.dtype, shape, &bytes[..len]).unwrap();
    (expected, got)
}

/// Fails where two tensors differ by more than `tolerance`, relative to the larger of 1 and the value.
fn check(expected: &Tensor, got: &Tensor, tolerance: f64, what: &str) {
    match (&expected.data, &got.data) {
        (Data::Float(expected), Data::Float(got)) => {
            for (i, (e, g)) in expected.iter().zip(got).enumerate() {
                let near = (e - g).abs() <= tolerance * e.abs().max(1.0);
                assert!(near || e == g || e.is_nan() && g.is_nan(), "{what}: element {i}: {e} or {g}");
            }
        }
        (expected, got) => assert_eq!(expected, got, "{what}"),
    }
}

/// By how much sums of `terms` products of numbers up to 1 may differ: each of them is rounded in the type of sums,
/// and the result once in its own.
fn sum_tolerance(dtype: Dtype, terms: usize) -> f64 {
    // The sum of the products' sizes is at most `terms`; errors of both signs cancel to about its root.
    let rounding = (terms as f64).sqrt() * 8.0 * eps(dtype.accumulator());
    rounding + eps(dtype)
}

fn check_matmul(dtype: Dtype, x: &[usize], y: &[usize], lie: Lie, threads: &Threads, rng: &mut Rng) {
    let args = [Placed::random(dtype, x, lie, rng), Placed::random(dtype, y, lie, rng)];
    let (expected, got) = both(&Matmul {}, &args, threads);
    let what = format!("{dtype} {x:?} {:?} {y:?} {:?}", args[0].strides, args[1].strides);
    check(&expected, &got, sum_tolerance(dtype, x[x.len() - 1]), &what);
}

#[test]
fn products_of_matrices_of_all_types_and_layouts() {
    let mut rng = Rng::new(7);
    let sizes = [0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64, 70];
    for round in 0..3000 {
        let dtype =
            [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16, Dtype::I32, Dtype::I64, Dtype::U8][round % 7];
        let lie = if round / 7 % 4 == 0 { Lie::Contiguous } else { Lie::Anyhow };
        let [m, k, n] = std::array::from_fn(|_| rng.pick(&sizes));
        let leading: Vec<usize> = (0..rng.next_u64() % 3).map(|_| (rng.next_u64() % 4) as usize).collect();
        let x = [&leading[..], &[m, k]].concat();
        let y = if rng.one_in(2) { vec![k, n] } else { [&leading[..], &[k, n]].concat() };
        check_matmul(dtype, &x, &y, lie, &Threads::ONE, &mut rng);
    }
}

#[test]
fn products_of_matrices_larger_than_a_block() {
    let mut rng = Rng::new(8);
    let two = Threads::new(2);
    for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16, Dtype::I32, Dtype::U8] {
        for (m, k, n) in
            [(300, 270, 260), (1, 1500, 4500), (4500, 1100, 1), (3, 5000, 70), (70, 5000, 2), (2, 3, 9000)]
        {
            for lie in [Lie::Contiguous, Lie::Anyhow] {
                check_matmul(dtype, &[m, k], &[k, n], lie, &Threads::ONE, &mut rng);
                check_matmul(dtype, &[m, k], &[k, n], lie, &two, &mut rng);
            }
        }
        check_matmul(dtype, &[3, 5, 40, 64], &[3, 5, 64, 30], Lie::Anyhow, &two, &mut rng);
        check_matmul(dtype, &[3, 150, 140], &[3, 140, 160], Lie::Anyhow, &two, &mut rng);
    }
}

#[test]
fn a_product_is_the_same_on_any_number_of_threads() {
    let mut rng = Rng::new(9);
    for dtype in [Dtype::F32, Dtype::F64, Dtype::F16] {
        for (m, k, n) in [(400, 1030, 130), (130, 1030, 400), (2, 1500, 2500), (2500, 700, 1)] {
            let args = [[m, k], [k, n]].map(|shape| Placed::random(dtype, &shape, Lie::Contiguous, &mut rng));
            let (_, one) = both(&Matmul {}, &args, &Threads::ONE);
            let (_, two) = both(&Matmul {}, &args, &Threads::new(2));
            assert!(one.same(&two), "{dtype} {m} {k} {n}");
        }
    }
}
