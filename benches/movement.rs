//! Kernels that move, order and make elements: bytes and elements a second on one thread.
//!
//! `cargo bench -p consort-runtime --bench movement`. The bars: a transpose in cache at a quarter of memcpy, and 100
//! million uniform numbers a second.

use std::collections::BTreeMap;
use std::time::Instant;

use consort_ir::index::Index;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, Gather, Normal, OpDef, Sort, Topk, Uniform};
use consort_runtime::kernels::copy::copy;
use consort_runtime::kernels::{Arg, KernelCx, View, ViewMut, find};
use consort_runtime::threads::Threads;
use consort_types::layout::{Layout, row_major};
use consort_types::{Dtype, Rank};

/// Elements of a type, at an address that fits them.
struct Elements {
    dtype: Dtype,
    shape: Vec<usize>,
    words: Vec<u64>,
}

impl Elements {
    fn new(dtype: Dtype, shape: &[usize], word: impl Fn(u64) -> u64) -> Elements {
        let n = (shape.iter().product::<usize>() * dtype.size()).div_ceil(8);
        Elements { dtype, shape: shape.to_vec(), words: (0..n as u64).map(word).collect() }
    }
}

/// The best time of several.
fn best(mut work: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    };
    (0..9).map(time).fold(f64::INFINITY, f64::min)
}

/// Prints the bytes read and written a second of copies of an `n` by `n` matrix.
fn copies(dtype: Dtype, n: usize) {
    let (from, mut to) = (Elements::new(dtype, &[n, n], |i| i), Elements::new(dtype, &[n, n], |_| 0));
    let (from, to) = (bytemuck::cast_slice(&from.words), bytemuck::cast_slice_mut(&mut to.words));
    let base = Layout::contiguous(&[n, n]);
    let views = [
        ("transpose", base.permuted(&[1, 0])),
        ("rows of 64", Layout::contiguous(&[n, n / 64, 64]).permuted(&[1, 0, 2])),
        ("pairs", Layout::contiguous(&[n, n / 2, 2]).permuted(&[1, 0, 2])),
        ("repeat", base.narrowed(1, 0, 1).broadcast(&[n, n])),
    ];
    let rate = |seconds: f64| 2.0 * (n * n * dtype.size()) as f64 / seconds / 1e9;
    print!("{dtype} {n} x {n}: memcpy {:.1}", rate(best(|| to.copy_from_slice(from))));
    for (name, layout) in views {
        let view = View { dtype, shape: &layout.shape, strides: &layout.strides, bytes: from };
        let bytes = layout.numel() * dtype.size();
        let seconds = best(|| copy(&Threads::ONE, &view, &mut to[..bytes]).expect("it fits"));
        print!(", {name} {:.1}", rate(seconds));
    }
    println!(" GB/s");
}

/// Prints how many elements a second a kernel does.
fn op(name: &str, op: &dyn OpDef, args: &[&Elements], results: &mut [Elements], n: usize) {
    let mesh = Mesh::default();
    let sizes = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &BTreeMap::new() };
    let cx = KernelCx { sizes, threads: &Threads::ONE };
    let strides: Vec<_> = args.iter().map(|arg| row_major(&arg.shape)).collect();
    let mut operands: Vec<Arg<'_>> = Vec::new();
    for (Elements { dtype, shape, words }, strides) in args.iter().copied().zip(&strides) {
        operands.push(Arg::View(View { dtype: *dtype, shape, strides, bytes: bytemuck::cast_slice(words) }));
    }
    let kernel = find(op.info().name).expect("it has a kernel");
    let seconds = best(|| {
        let mut views: Vec<ViewMut<'_>> = Vec::new();
        for Elements { dtype, shape, words } in &mut *results {
            let bytes = shape.iter().product::<usize>() * dtype.size();
            views.push(ViewMut {
                dtype: *dtype,
                shape,
                bytes: &mut bytemuck::cast_slice_mut(words)[..bytes],
            });
        }
        (kernel.run)(&cx, op, &operands, &mut views).expect("it computes");
    });
    println!("{name}: {:.0} million elements/s", n as f64 / seconds / 1e6);
}

fn main() {
    for (dtype, n) in
        [(Dtype::F32, 256), (Dtype::F32, 4096), (Dtype::F64, 4096), (Dtype::Bf16, 4096), (Dtype::U8, 4096)]
    {
        copies(dtype, n);
    }
    let n = 1 << 20;
    let key = Elements::new(Dtype::I64, &[], |_| 42);
    let sizes = |list: &[usize]| list.iter().map(|size| Index::from(*size)).collect::<Vec<_>>();
    for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16] {
        let (shape, of, start) = (sizes(&[n]), sizes(&[n]), sizes(&[0]));
        let mut out = [Elements::new(dtype, &[n], |_| 0)];
        let uniform = Uniform { dtype, shape: shape.clone(), of: of.clone(), start: start.clone() };
        op(&format!("uniform {dtype}"), &uniform, &[&key], &mut out, n);
        op(&format!("normal {dtype}"), &Normal { dtype, shape, of, start }, &[&key], &mut out, n);
    }
    // Two floats between 1 and 2 in each word.
    let noise =
        |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) & 0x007f_ffff_007f_ffff | 0x3f80_0000_3f80_0000;
    for width in [n, n / 1024] {
        let (shape, k) = ([n / width, width], 50);
        let x = Elements::new(Dtype::F32, &shape, noise);
        let out =
            |size| [Dtype::F32, Dtype::I64].map(|dtype| Elements::new(dtype, &[n / width, size], |_| 0));
        op(
            &format!("sort f32 lines of {width}"),
            &Sort { dim: 1, descending: false },
            &[&x],
            &mut out(width),
            n,
        );
        op(
            &format!("topk {k} f32 lines of {width}"),
            &Topk { dim: 1, k: Index::from(k) },
            &[&x],
            &mut out(k),
            n,
        );
    }
    let table = Elements::new(Dtype::F32, &[1024, 1024], noise);
    let places = Elements::new(Dtype::I64, &[4096], |i| i * 37 % 1024);
    let mut out = [Elements::new(Dtype::F32, &[4096, 1024], |_| 0)];
    op("gather rows of 1024 f32", &Gather { dim: 0 }, &[&table, &places], &mut out, 4096 * 1024);
}
