//! How fast kernels are, beside what memory and a plain loop allow: `cargo run --release -p consort-runtime --example
//! kernel_speed`.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use consort_ir::dtype::Dtype;
use consort_ir::mesh::{Mesh, Rank};
use consort_ir::ops::{EvalCx, Op, OpTable};
use consort_ir::text::Cursor;
use consort_runtime::kernels::isa::isa;
use consort_runtime::kernels::{Arg, Kernel, KernelCx, View, ViewMut, find};
use consort_runtime::threads::Threads;

/// The fastest of many runs, in nanoseconds, each of `times` calls.
fn best(times: usize, mut work: impl FnMut()) -> f64 {
    let run = |_| {
        let start = Instant::now();
        (0..times).for_each(|_| work());
        start.elapsed().as_nanos() as f64 / times as f64
    };
    (0..15).map(run).fold(f64::INFINITY, f64::min)
}

fn find_op(text: &str) -> Option<(Op, &'static Kernel)> {
    let name = text.split('[').next()?;
    let mut cursor = Cursor::new(&text[name.len()..], Mesh::default()).ok()?;
    let op = (OpTable::built_in().get(name)?.read)(&mut cursor).ok()?;
    Some((op, find(name)?))
}

const F32: Dtype = Dtype::F32;

/// Numbers that begin with a line of the cache, as tensors do.
struct Aligned(Vec<f32>, usize);

impl Aligned {
    fn new(n: usize, value: impl Fn(usize) -> f32) -> Aligned {
        let mut storage = vec![0.0; n + 16];
        let start = storage.as_ptr().align_offset(64).min(16);
        storage[start..].iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
        Aligned(storage, start)
    }

    fn get(&self) -> &[f32] {
        &self.0[self.1..]
    }

    fn get_mut(&mut self) -> &mut [f32] {
        &mut self.0[self.1..]
    }
}

/// The time of one call on operands given as dtype, shape and strides.
fn time(
    text: &str,
    operands: &[(Dtype, &[usize], &[usize])],
    result: (Dtype, &[usize]),
    times: usize,
) -> Option<f64> {
    let (op, kernel) = find_op(text)?;
    let (mesh, symbols) = (Mesh::default(), BTreeMap::new());
    let sizes = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &symbols };
    let cx = KernelCx { sizes, threads: &Threads::ONE };
    let storage: Vec<Aligned> = operands
        .iter()
        .map(|(dtype, shape, _)| {
            let n = shape.iter().product::<usize>().max(1) * dtype.size().div_ceil(4);
            let value = |i: usize| ((i * 7919) % 1000) as f32 * 0.004 - 2.0;
            // Two equal 16-bit floats, or one number.
            let twice = |x: f32| f32::from_bits(x.to_bits() >> 16 | x.to_bits() & 0xffff_0000);
            Aligned::new(n, |i| if *dtype == Dtype::Bf16 { twice(value(i)) } else { value(i) })
        })
        .collect();
    let args: Vec<Arg<'_>> = operands
        .iter()
        .zip(&storage)
        .map(|((dtype, shape, strides), storage)| {
            Arg::View(View { dtype: *dtype, shape, strides, bytes: bytemuck::cast_slice(storage.get()) })
        })
        .collect();
    let size = result.1.iter().product::<usize>() * result.0.size();
    let mut out = Aligned::new(size.div_ceil(4), |_| 0.0);
    let bytes = &mut bytemuck::cast_slice_mut::<f32, u8>(out.get_mut())[..size];
    let ns = best(times, || {
        let result = ViewMut { dtype: result.0, shape: result.1, bytes: &mut *bytes };
        let done = (kernel.run)(&cx, &*op, black_box(&args), &mut [result]);
        assert!(done.is_ok(), "{text}");
    });
    Some(ns)
}

fn main() {
    println!("{:?}", isa());
    let n = 4 << 20;
    let [x, y, mut z] = [0, 1, 2].map(|_| Aligned::new(n, |i| i as f32));
    let (x, y, z) = (&x.get()[..n], &y.get()[..n], &mut z.get_mut()[..n]);
    let plain = best(2, || {
        for ((z, x), y) in black_box(&mut *z).iter_mut().zip(black_box(x)).zip(black_box(y)) {
            *z = x + y;
        }
    });
    let copy = best(2, || black_box(&mut *z).copy_from_slice(black_box(x)));
    println!("plain add of 16 MiB {:.2} ms, copy of 16 MiB {:.2} ms", plain / 1e6, copy / 1e6);
    let (whole, flat): (&[usize], &[usize]) = (&[4096, 1024], &[1024, 1]);
    let show = |text: &str, ns: Option<f64>, moved: f64| {
        let Some(ns) = ns else { return println!("{text}: not there") };
        // A copy moves 32 MiB: half read, half written.
        let by_copy = copy * moved / 32.0;
        println!(
            "{text}: {:.2} ms, {:.2} ns/element, {:.2} of copying's speed",
            ns / 1e6,
            ns / n as f64,
            by_copy / ns
        );
    };
    let add = time("add", &[(F32, &[n], &[1]), (F32, &[n], &[1])], (F32, &[n]), 2);
    println!("add: {:.2} of the plain loop's speed", add.map_or(0.0, |ns| plain / ns));
    show("add", add, 48.0);
    show("add row", time("add", &[(F32, whole, flat), (F32, whole, &[0, 1])], (F32, whole), 2), 32.0);
    show("add column", time("add", &[(F32, whole, flat), (F32, whole, &[1, 0])], (F32, whole), 2), 32.0);
    show("add scalar", time("add", &[(F32, whole, flat), (F32, whole, &[0, 0])], (F32, whole), 2), 32.0);
    show(
        "add transposed",
        time("add", &[(F32, whole, flat), (F32, whole, &[1, 4096])], (F32, whole), 2),
        48.0,
    );
    for name in [
        "exp", "log", "tanh", "sigmoid", "silu", "erf", "gelu", "sqrt", "rsqrt", "neg", "sin", "cos", "log2",
        "log1p", "expm1", "exp2",
    ] {
        show(name, time(name, &[(F32, whole, flat)], (F32, whole), 2), 32.0);
    }
    for name in ["exp", "gelu"] {
        show(
            &format!("{name} bf16"),
            time(name, &[(Dtype::Bf16, whole, flat)], (Dtype::Bf16, whole), 2),
            16.0,
        );
        show(
            &format!("{name} f64, 8 MiB"),
            time(name, &[(Dtype::F64, &[1024, 1024], flat)], (Dtype::F64, &[1024, 1024]), 2)
                .map(|ns| ns * 4.0),
            64.0,
        );
    }
    show("cast f32 to bf16", time("cast[to=bf16]", &[(F32, whole, flat)], (Dtype::Bf16, whole), 2), 24.0);
    show("softmax last", time("softmax[dim=1]", &[(F32, whole, flat)], (F32, whole), 2), 32.0);
    show("softmax first", time("softmax[dim=0]", &[(F32, whole, flat)], (F32, whole), 2), 32.0);
    show("log_softmax last", time("log_softmax[dim=1]", &[(F32, whole, flat)], (F32, whole), 2), 32.0);
    for (what, dims, shape) in [("last", "[1]", &[4096][..]), ("first", "[0]", &[1024][..])] {
        let text = format!("logsumexp[dims={dims}, keep=false]");
        show(&format!("logsumexp {what}"), time(&text, &[(F32, whole, flat)], (F32, shape), 2), 16.0);
    }
    show(
        "rms_norm",
        time("rms_norm[eps=1e-5]", &[(F32, whole, flat), (F32, &[1024], &[1])], (F32, whole), 2),
        32.0,
    );
    let norm = time(
        "layer_norm[eps=1e-5]",
        &[(F32, whole, flat), (F32, &[1024], &[1]), (F32, &[1024], &[1])],
        (F32, whole),
        2,
    );
    show("layer_norm", norm, 32.0);
    for name in ["sum", "mean", "max", "argmax"] {
        let dtype = if name == "argmax" { Dtype::I64 } else { F32 };
        for (what, dims, shape) in
            [("last", "[1]", &[4096][..]), ("first", "[0]", &[1024][..]), ("all", "[0, 1]", &[][..])]
        {
            let text = format!("{name}[dims={dims}, keep=false]");
            show(&format!("{name} {what}"), time(&text, &[(F32, whole, flat)], (dtype, shape), 2), 16.0);
        }
    }
    show(
        "sum of rows of 4",
        time("sum[dims=[1], keep=false]", &[(F32, &[1 << 20, 4], &[4, 1])], (F32, &[1 << 20]), 2),
        16.0,
    );
    show("cumsum last", time("cumsum[dim=1]", &[(F32, whole, flat)], (F32, whole), 2), 32.0);
    for dtype in [F32, Dtype::Bf16] {
        let vector: (Dtype, &[usize], &[usize]) = (dtype, &[1, 1024], &[1024, 1]);
        for (what, strides) in [("rows", &[1408, 1]), ("columns", &[1, 1024])] {
            let matrix: (Dtype, &[usize], &[usize]) = (dtype, &[1024, 1408], strides);
            let ns = time("matmul", &[vector, matrix], (dtype, &[1, 1408]), 20);
            println!("{dtype} vector times matrix of {what}: {:.1} us", ns.unwrap_or(0.0) / 1e3);
        }
    }
    for (name, arity) in [("add", 2), ("mul", 2), ("exp", 1), ("gelu", 1), ("relu", 1)] {
        for n in [1, 8, 64] {
            let ns = time(name, &vec![(F32, &[n][..], &[1][..]); arity], (F32, &[n]), 100_000);
            println!("{name} of {n}: {:.1} ns", ns.unwrap_or(0.0));
        }
    }
    let small = time("add", &[(F32, &[8], &[1]), (F32, &[8], &[0])], (F32, &[8]), 100_000);
    println!("add of 8 and a scalar: {:.1} ns", small.unwrap_or(0.0));
    let small = time("softmax[dim=0]", &[(F32, &[8], &[1])], (F32, &[8]), 100_000);
    println!("softmax of 8: {:.1} ns", small.unwrap_or(0.0));
    let small = time("sum[dims=[0], keep=false]", &[(F32, &[8], &[1])], (F32, &[]), 100_000);
    println!("sum of 8: {:.1} ns", small.unwrap_or(0.0));
}
