//! Operands of kernels in many layouts, and how near a kernel's result must be to the op's own evaluation.
#![allow(
    clippy::unwrap_used,
    dead_code,
    reason = "in a test, what cannot be had is a failure; each file uses a part"
)]

use std::collections::BTreeMap;

use consort_ir::dtype::Dtype;
use consort_ir::generate::Rng;
use consort_ir::mesh::{Mesh, Rank};
use consort_ir::ops::{EvalCx, Op, OpTable};
use consort_ir::tensor::{Data, Tensor};
use consort_ir::text::Cursor;
use consort_runtime::kernels::{Arg, KernelCx, View, ViewMut, find};
use consort_runtime::layout::Layout;
use consort_runtime::threads::Threads;

/// Storage that is aligned for every element type.
struct Storage {
    words: Vec<u64>,
    len: usize,
}

impl Storage {
    fn new(len: usize) -> Storage {
        Storage { words: vec![0xaaaa_aaaa_aaaa_aaaa; len.div_ceil(8)], len }
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

/// How an operand lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Without gaps.
    Whole,
    /// Dimensions in the opposite order.
    Transposed,
    /// A part of something larger in every dimension.
    Sliced,
    /// Repeated along the first dimension.
    RowRepeated,
    /// Repeated along the last dimension.
    ColumnRepeated,
    /// One element, repeated.
    Constant,
}

pub(crate) const PLACES: [Place; 6] = [
    Place::Whole,
    Place::Transposed,
    Place::Sliced,
    Place::RowRepeated,
    Place::ColumnRepeated,
    Place::Constant,
];

/// A tensor, and the same elements somewhere in storage.
pub(crate) struct Operand {
    pub(crate) tensor: Tensor,
    layout: Layout,
    storage: Storage,
}

impl Operand {
    /// An operand of this shape with random elements, large ones too.
    pub(crate) fn random(dtype: Dtype, shape: &[usize], place: Place, rng: &mut Rng) -> Operand {
        Operand::new(dtype, shape, place, rng, f64::MAX)
    }

    /// One without finite elements so large that their sum leaves the range on the way to a result within it.
    pub(crate) fn moderate(dtype: Dtype, shape: &[usize], place: Place, rng: &mut Rng) -> Operand {
        Operand::new(dtype, shape, place, rng, 1e3)
    }

    fn new(dtype: Dtype, shape: &[usize], place: Place, rng: &mut Rng, most: f64) -> Operand {
        let rank = shape.len();
        let opposite: Vec<usize> = (0..rank).rev().collect();
        let (stored, layout) = match place {
            Place::Transposed => {
                let stored: Vec<usize> = shape.iter().rev().copied().collect();
                let layout = Layout::contiguous(&stored).permuted(&opposite);
                (stored, layout)
            }
            Place::Sliced => {
                let stored: Vec<usize> = shape.iter().map(|size| size + 3).collect();
                let layout = (0..rank).fold(Layout::contiguous(&stored), |layout, dim| {
                    layout.narrowed(dim, 1 + dim % 2, shape[dim])
                });
                (stored, layout)
            }
            Place::Whole => (shape.to_vec(), Layout::contiguous(shape)),
            Place::RowRepeated | Place::ColumnRepeated | Place::Constant => {
                let repeated = |dim| match place {
                    Place::RowRepeated => dim == 0,
                    Place::ColumnRepeated => dim + 1 == rank,
                    _ => true,
                };
                let stored: Vec<usize> =
                    (0..rank).map(|dim| if repeated(dim) { 1 } else { shape[dim] }).collect();
                let layout = Layout::contiguous(&stored).broadcast(shape);
                (stored, layout)
            }
        };
        let mut elements = random(dtype, &stored, rng);
        if let Data::Float(data) = &mut elements.data {
            data.iter_mut().filter(|x| x.is_finite() && x.abs() > most).for_each(|x| *x = 1.0);
        }
        let mut storage = Storage::new(elements.numel() * dtype.size());
        storage.bytes_mut().copy_from_slice(&elements.to_bytes());
        let tensor = elements.pick(shape.to_vec(), |i| {
            let (mut rest, mut at) = (i, layout.start);
            for (size, stride) in layout.shape.iter().zip(&layout.strides).rev() {
                at += rest % size * stride;
                rest /= size;
            }
            at
        });
        Operand { tensor, layout, storage }
    }

    /// Makes all elements of a tensor without gaps this one.
    pub(crate) fn fill(&mut self, value: f64) {
        let n = self.tensor.numel();
        self.tensor = Tensor::floats(self.tensor.dtype, self.tensor.shape.clone(), vec![value; n]);
        self.storage.bytes_mut().copy_from_slice(&self.tensor.to_bytes());
    }

    fn view(&self) -> View<'_> {
        let size = self.tensor.dtype.size();
        let start = self.layout.start.min(self.storage.len / size) * size;
        View {
            dtype: self.tensor.dtype,
            shape: &self.layout.shape,
            strides: &self.layout.strides,
            bytes: &self.storage.bytes()[start..start + self.layout.span() * size],
        }
    }
}

/// A tensor of random elements with all that floats can be.
pub(crate) fn random(dtype: Dtype, shape: &[usize], rng: &mut Rng) -> Tensor {
    let n: usize = shape.iter().product();
    let odd = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        0.0,
        -0.0,
        1e-45,
        -6e-8,
        65504.0,
        3e38,
        1.0,
        -1.0,
        0.5,
        -2.5,
    ];
    // Tensors with odd elements everywhere would leave reductions nothing to compute.
    let odd_ones = rng.one_in(2);
    let mut float = || {
        if odd_ones && rng.one_in(16) { rng.pick(&odd) } else { rng.next_u64() as i64 as f64 / 2f64.powi(60) }
    };
    if dtype.is_float() {
        return Tensor::floats(dtype, shape.to_vec(), (0..n).map(|_| float()).collect());
    }
    // Small ones too, so that there are equals and zeros.
    let mut int = || if rng.one_in(2) { rng.next_u64() as i64 } else { rng.below(7) as i64 - 3 };
    Tensor::ints(dtype, shape.to_vec(), (0..n).map(|_| int()).collect())
}

/// An op from its name and attributes as programs write them.
pub(crate) fn op(text: &str) -> Op {
    let name = text.split('[').next().unwrap();
    let mut cursor = Cursor::new(&text[name.len()..], Mesh::default()).unwrap();
    (OpTable::built_in().get(name).unwrap().read)(&mut cursor).unwrap()
}

/// Runs a kernel, and says where its result differs from the op's own evaluation.
pub(crate) fn check(
    op: &Op,
    operands: &[&Operand],
    in_place: Option<usize>,
    threads: &Threads,
    near: Near,
) -> Result<(), String> {
    compare(&run(op, operands, in_place, threads)?, &evaluate(op, operands)?, near)
}

fn evaluate(op: &Op, operands: &[&Operand]) -> Result<Tensor, String> {
    let (mesh, symbols) = (Mesh::default(), BTreeMap::new());
    let cx = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &symbols };
    let tensors: Vec<&Tensor> = operands.iter().map(|operand| &operand.tensor).collect();
    Ok(op.eval(&cx, &tensors).map_err(|error| error.to_string())?.remove(0))
}

/// What a kernel gives. One operand may lie where the result goes.
pub(crate) fn run(
    op: &Op,
    operands: &[&Operand],
    in_place: Option<usize>,
    threads: &Threads,
) -> Result<Tensor, String> {
    let (mesh, symbols) = (Mesh::default(), BTreeMap::new());
    let sizes = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &symbols };
    // The types that the op's rule gives are those of its evaluation.
    let Tensor { dtype, shape, .. } = evaluate(op, operands)?;
    let mut storage = Storage::new(shape.iter().product::<usize>() * dtype.size());
    if let Some(i) = in_place {
        storage.bytes_mut().copy_from_slice(&operands[i].tensor.to_bytes());
    }
    let args: Vec<Arg<'_>> = operands
        .iter()
        .enumerate()
        .map(|(i, operand)| if in_place == Some(i) { Arg::Result } else { Arg::View(operand.view()) })
        .collect();
    let kernel = find(op.info().name).ok_or("no kernel")?;
    let result = ViewMut { dtype, shape: &shape, bytes: storage.bytes_mut() };
    (kernel.run)(&KernelCx { sizes, threads }, &**op, &args, &mut [result])
        .map_err(|error| error.to_string())?;
    Tensor::from_bytes(dtype, shape, storage.bytes()).ok_or("size".into())
}

/// How near a result must be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Near {
    /// The same bits, or both NaN.
    Same,
    /// So many units in the last place.
    Ulps(f64),
    /// So much, absolutely, of numbers about 1.
    Within(f64),
    /// Such a part of the number.
    Relative(f64),
}

fn compare(got: &Tensor, want: &Tensor, near: Near) -> Result<(), String> {
    let (Data::Float(got_data), Data::Float(want_data)) = (&got.data, &want.data) else {
        return if got.same(want) {
            Ok(())
        } else {
            Err(format!("got {}, expected {}", got.text(), want.text()))
        };
    };
    for (i, (a, b)) in got_data.iter().zip(want_data).enumerate() {
        let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let most = match near {
            Near::Same => 0.0,
            Near::Ulps(n) => n * unit(want.dtype, *b),
            Near::Within(most) => most * b.abs().max(1.0),
            Near::Relative(most) => most * b.abs(),
        };
        // Written so that a NaN is no small difference.
        let close = (a - b).abs() <= most && !matches!(near, Near::Same);
        if !same && !close {
            return Err(format!("element {i}: got {a:e}, expected {b:e}, {near:?}"));
        }
    }
    Ok(())
}

/// One unit in the last place of a number.
fn unit(dtype: Dtype, x: f64) -> f64 {
    let (digits, smallest) = match dtype {
        Dtype::F16 => (11, -14),
        Dtype::Bf16 => (8, -126),
        Dtype::F32 => (24, -126),
        _ => (53, -1022),
    };
    let exponent =
        if x == 0.0 || !x.is_finite() { smallest } else { (x.abs().log2().floor() as i32).max(smallest) };
    2f64.powi((exponent - digits + 1).max(-1074))
}
