//! The speed of kernels, compared with memory and a plain loop: `cargo run --release -p consort-runtime --example
//! kernel_speed`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, Op, OpTable};
use consort_ir::text::Cursor;
use consort_runtime::kernels::isa::{Loop, isa, vectorize};
use consort_runtime::kernels::{Arg, Kernel, KernelCx, View, ViewMut, find};
use consort_runtime::threads::Threads;
use consort_types::{Dtype, Rank};

/// The time of some work in nanoseconds, and that of other work alternated with it: the first quartile of many runs,
/// because other programs disturb some of them.
struct Beside {
    ns: f64,
    other: f64,
}

/// Measures, each time with `times` calls.
fn alternate(times: usize, mut work: impl FnMut(), mut other: impl FnMut()) -> Beside {
    fn run(times: usize, work: &mut impl FnMut()) -> f64 {
        let start = Instant::now();
        (0..times).for_each(|_| work());
        start.elapsed().as_nanos() as f64 / times as f64
    }
    fn quarter(mut list: Vec<f64>) -> f64 {
        list.sort_by(f64::total_cmp);
        list[list.len() / 4]
    }
    let (others, own) = (0..60).map(|_| (run(times, &mut other), run(times, &mut work))).unzip();
    Beside { ns: quarter(own), other: quarter(others) }
}

fn find_op(text: &str) -> Option<(Op, &'static Kernel)> {
    let name = text.split('[').next()?;
    let mut cursor = Cursor::new(&text[name.len()..], Mesh::default()).ok()?;
    let op = (OpTable::built_in().get(name)?.read)(&mut cursor).ok()?;
    Some((op, find(name)?))
}

const F32: Dtype = Dtype::F32;

/// Numbers aligned to a cache line, as tensors are.
struct Aligned(Vec<f32>, usize);

impl Aligned {
    fn new(n: usize, value: impl Fn(usize) -> f32) -> Aligned {
        let mut storage = vec![0.0; n + 16];
        let start = storage.as_ptr().align_offset(64).min(16);
        storage[start..].iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
        Aligned(storage, start)
    }

    fn get(&self) -> &[f32] {
        &self.0[self.1..][..self.0.len() - 16]
    }

    fn get_mut(&mut self) -> &mut [f32] {
        let len = self.0.len() - 16;
        &mut self.0[self.1..][..len]
    }
}

/// The baseline of a kernel, on the same storage.
type Other = fn(&[Aligned], &mut [f32]);

/// Copies the first operand.
fn copy(operands: &[Aligned], out: &mut [f32]) {
    let x = operands[0].get();
    black_box(&mut out[..x.len()]).copy_from_slice(black_box(x));
}

/// An addition as a plain loop.
fn plain_add(operands: &[Aligned], out: &mut [f32]) {
    let (x, y) = (operands[0].get(), operands[1].get());
    for ((z, x), y) in black_box(out).iter_mut().zip(black_box(x)).zip(black_box(y)) {
        *z = x + y;
    }
}

/// Reads the second operand.
fn sweep(operands: &[Aligned], _: &mut [f32]) {
    struct Sweep<'a>(&'a [[f32; 64]]);
    impl Loop for Sweep<'_> {
        type Output = ();
        #[inline(always)]
        fn run(self) {
            let mut all = [0.0; 16];
            for x in self.0 {
                for i in 0..16 {
                    all[i] += (x[i] + x[i + 16]) + (x[i + 32] + x[i + 48]);
                }
            }
            black_box(all);
        }
    }
    vectorize(Sweep(black_box(operands[1].get().as_chunks().0)));
}

fn nothing(_: &[Aligned], _: &mut [f32]) {}

/// The time of one call on operands given as dtype, shape and strides.
fn time(
    text: &str,
    operands: &[(Dtype, &[usize], &[usize])],
    result: (Dtype, &[usize]),
    times: usize,
    other: Other,
) -> Option<Beside> {
    let (op, kernel) = find_op(text)?;
    let (mesh, symbols) = (Mesh::default(), BTreeMap::new());
    let sizes = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &symbols };
    let cx = KernelCx { sizes, threads: &Threads::ONE };
    let storage: Vec<Aligned> = operands
        .iter()
        .map(|(dtype, shape, _)| {
            let n = (shape.iter().product::<usize>().max(1) * dtype.size()).div_ceil(4);
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
    // As long as the first operand, because the baseline may copy that to it.
    let len = size.div_ceil(4).max(storage.first()?.get().len());
    let out = RefCell::new(Aligned::new(len, |_| 0.0));
    let work = || {
        let mut out = out.borrow_mut();
        let bytes = &mut bytemuck::cast_slice_mut::<f32, u8>(out.get_mut())[..size];
        let result = ViewMut { dtype: result.0, shape: result.1, bytes };
        let done = (kernel.run)(&cx, &*op, black_box(&args), &mut [result]);
        assert!(done.is_ok(), "{text}");
    };
    Some(alternate(times, work, || other(&storage, out.borrow_mut().get_mut())))
}

/// Prints the speed of an op on 4 Mi elements, relative to a copy of its first operand.
fn show(what: &str, text: &str, operands: &[(Dtype, &[usize], &[usize])], result: (Dtype, &[usize])) {
    let Some(time) = time(text, operands, result, 1, copy) else { return println!("{what}: not there") };
    // A broadcast operand, with a stride of 0, is moved once.
    let repeated = |(dtype, shape, strides): &(Dtype, &[usize], &[usize])| {
        let sizes = shape.iter().zip(*strides).filter(|(_, stride)| **stride != 0);
        sizes.map(|(size, _)| size).product::<usize>() * dtype.size()
    };
    let first = operands[0].1.iter().product::<usize>();
    let read: usize = operands.iter().map(repeated).sum();
    let moved = (read + result.1.iter().product::<usize>() * result.0.size()) as f64;
    let copied = (2 * first * operands[0].0.size()) as f64;
    println!(
        "{what}: {:.2} ms, {:.2} ns/element, {:.2} of copying's speed ({:.2} ms)",
        time.ns / 1e6,
        time.ns / first as f64,
        time.other / time.ns * moved / copied,
        time.other / 1e6
    );
}

/// Prints the time of a call on few elements.
fn show_few(what: &str, text: &str, operands: &[(Dtype, &[usize], &[usize])], result: (Dtype, &[usize])) {
    let ns = time(text, operands, result, 10_000, nothing).map_or(0.0, |time| time.ns);
    println!("{what}: {ns:.1} ns");
}

fn main() {
    println!("{:?}", isa());
    let n = 4 << 20;
    let (all, x): (&[usize], _) = (&[n], (F32, &[n][..], &[1][..]));
    if let Some(add) = time("add", &[x, x], (F32, all), 1, plain_add) {
        println!("add: {:.2} of a plain loop's speed ({:.2} ms)", add.other / add.ns, add.other / 1e6);
    }
    show("add", "add", &[x, x], (F32, all));
    let whole: &[usize] = &[4096, 1024];
    let x = (F32, whole, &[1024, 1][..]);
    for (what, strides) in
        [("row", &[0, 1]), ("column", &[1, 0]), ("scalar", &[0, 0]), ("transposed", &[1, 4096])]
    {
        show(&format!("add {what}"), "add", &[x, (F32, whole, strides)], (F32, whole));
    }
    for name in [
        "exp", "log", "tanh", "sigmoid", "silu", "erf", "gelu", "sqrt", "rsqrt", "neg", "sin", "cos", "log2",
        "log1p", "expm1", "exp2",
    ] {
        show(name, name, &[x], (F32, whole));
    }
    for name in ["exp", "gelu"] {
        for dtype in [Dtype::Bf16, Dtype::F64] {
            show(&format!("{name} {dtype}"), name, &[(dtype, whole, &[1024, 1])], (dtype, whole));
        }
    }
    show("cast f32 to bf16", "cast[to=bf16]", &[x], (Dtype::Bf16, whole));
    for size in [32, 64, 128, 1024, 4096, 65536] {
        let shape = [n / size, size];
        let x = (F32, &shape[..], &[size, 1][..]);
        show(&format!("softmax of rows of {size}"), "softmax[dim=1]", &[x], (F32, &shape));
    }
    show("softmax first", "softmax[dim=0]", &[x], (F32, whole));
    show("log_softmax last", "log_softmax[dim=1]", &[x], (F32, whole));
    for (what, dims, shape) in [("last", "[1]", &[4096][..]), ("first", "[0]", &[1024][..])] {
        let text = format!("logsumexp[dims={dims}, keep=false]");
        show(&format!("logsumexp {what}"), &text, &[x], (F32, shape));
    }
    let row = (F32, &[1024][..], &[1][..]);
    show("rms_norm", "rms_norm[eps=1e-5]", &[x, row], (F32, whole));
    show("layer_norm", "layer_norm[eps=1e-5]", &[x, row, row], (F32, whole));
    for name in ["sum", "mean", "max", "argmax"] {
        let dtype = if name == "argmax" { Dtype::I64 } else { F32 };
        for (what, dims, shape) in
            [("last", "[1]", &[4096][..]), ("first", "[0]", &[1024][..]), ("all", "[0, 1]", &[][..])]
        {
            let text = format!("{name}[dims={dims}, keep=false]");
            show(&format!("{name} {what}"), &text, &[x], (dtype, shape));
        }
    }
    let short = (F32, &[1 << 20, 4][..], &[4, 1][..]);
    show("sum of rows of 4", "sum[dims=[1], keep=false]", &[short], (F32, &[1 << 20]));
    show("cumsum last", "cumsum[dim=1]", &[x], (F32, whole));
    for dtype in [F32, Dtype::Bf16] {
        for (rows, what, strides) in [
            (1, "rows", &[1408, 1]),
            (1, "columns", &[1, 1024]),
            (4, "rows", &[1408, 1]),
            (4, "columns", &[1, 1024]),
        ] {
            let x: (Dtype, &[usize], &[usize]) = (dtype, &[rows, 1024], &[1024, 1]);
            let matrix: (Dtype, &[usize], &[usize]) = (dtype, &[1024, 1408], strides);
            let Some(time) = time("matmul", &[x, matrix], (dtype, &[rows, 1408]), 5, sweep) else {
                continue;
            };
            println!(
                "{dtype}, {rows} rows times a matrix of {what}: {:.1} us, {:.1} GB/s, {:.2} of the speed of reading it",
                time.ns / 1e3,
                (1024 * 1408 * dtype.size()) as f64 / time.ns,
                time.other / time.ns
            );
        }
    }
    for (name, arity) in [("add", 2), ("mul", 2), ("exp", 1), ("gelu", 1), ("relu", 1)] {
        for n in [1, 8, 64] {
            show_few(&format!("{name} of {n}"), name, &vec![(F32, &[n][..], &[1][..]); arity], (F32, &[n]));
        }
    }
    show_few("add of 8 and a scalar", "add", &[(F32, &[8], &[1]), (F32, &[8], &[0])], (F32, &[8]));
    show_few("softmax of 8", "softmax[dim=0]", &[(F32, &[8], &[1])], (F32, &[8]));
    show_few("sum of 8", "sum[dims=[0], keep=false]", &[(F32, &[8], &[1])], (F32, &[]));
}
