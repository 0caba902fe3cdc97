//! Shared code of kernel tests: operands in many layouts; calls of a kernel and of the op's own evaluation.
#![allow(
    clippy::unwrap_used,
    dead_code,
    reason = "in a test, what cannot be had is a failure; each file uses a part"
)]

use std::collections::BTreeMap;

use consort_ir::index::{Facts, Index, Sym};
use consort_ir::infer::infer;
use consort_ir::literal::{Data, Literal};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, Op, OpDef, OpTable, Undecided};
use consort_ir::text::Cursor;
use consort_ir::tolerance;
use consort_ir::types::{TensorType, Type};
use consort_runtime::kernels::{Arg, KernelCx, View, ViewMut, find};
use consort_runtime::threads::Threads;
use consort_types::layout::Layout;
use consort_types::{Axes, Dtype, Rank, Rng};

/// Storage that is aligned for every element type. It is filled with bytes that are NaN as floats, so that a kernel
/// that reads outside its operand is detected.
struct Storage {
    words: Vec<u64>,
    len: usize,
}

impl Storage {
    fn new(len: usize) -> Storage {
        Storage { words: vec![u64::MAX; len.div_ceil(8)], len }
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

/// A tensor, and the same elements in a layout.
pub(crate) struct Placed {
    pub(crate) tensor: Literal,
    pub(crate) layout: Layout,
    storage: Storage,
}

impl Placed {
    /// The elements of a tensor in a layout of its shape. If the layout broadcasts elements, so does the tensor.
    pub(crate) fn new(tensor: &Literal, layout: Layout) -> Placed {
        let (dtype, size) = (tensor.dtype, tensor.dtype.size());
        let mut storage = Storage::new((layout.start + layout.span()) * size);
        let places = offsets(&layout);
        for (element, at) in tensor.to_bytes().chunks_exact(size).zip(&places) {
            storage.bytes_mut()[at * size..][..size].copy_from_slice(element);
        }
        let bytes: Vec<u8> =
            places.iter().flat_map(|at| storage.bytes()[at * size..][..size].to_vec()).collect();
        let tensor = Literal::from_bytes(dtype, tensor.shape.clone(), &bytes).unwrap();
        Placed { tensor, layout, storage }
    }

    /// A contiguous tensor.
    pub(crate) fn whole(tensor: &Literal) -> Placed {
        Placed::new(tensor, Layout::contiguous(&tensor.shape))
    }

    /// Random elements, large ones too.
    pub(crate) fn random(dtype: Dtype, shape: &[usize], place: Place, rng: &mut Rng) -> Placed {
        Placed::new(&random(dtype, shape, rng), place.layout(shape))
    }

    /// Random elements whose finite values are too small for a sum to overflow on the way to a finite
    /// result.
    pub(crate) fn moderate(dtype: Dtype, shape: &[usize], place: Place, rng: &mut Rng) -> Placed {
        let mut tensor = random(dtype, shape, rng);
        if let Data::Float(data) = &mut tensor.data {
            data.iter_mut().filter(|x| x.is_finite() && x.abs() > 1e3).for_each(|x| *x = 1.0);
        }
        Placed::new(&tensor, place.layout(shape))
    }

    pub(crate) fn view(&self) -> View<'_> {
        let size = self.tensor.dtype.size();
        View {
            dtype: self.tensor.dtype,
            shape: &self.layout.shape,
            strides: &self.layout.strides,
            bytes: &self.storage.bytes()[self.layout.start * size..][..self.layout.span() * size],
        }
    }
}

/// The offsets of the elements of a layout, in row-major order.
fn offsets(layout: &Layout) -> Vec<usize> {
    let mut list = vec![layout.start];
    for (size, stride) in layout.shape.iter().zip(&layout.strides) {
        list = list.iter().flat_map(|at| (0..*size).map(move |i| at + i * stride)).collect();
    }
    list
}

/// The layout of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Contiguous.
    Whole,
    /// Dimensions in the opposite order.
    Transposed,
    /// A part of something larger in every dimension.
    Sliced,
    /// Every second element of something larger in every dimension.
    Stepped,
    /// Broadcast along the first dimension.
    RowRepeated,
    /// Broadcast along the last dimension.
    ColumnRepeated,
    /// One element, broadcast.
    Constant,
}

pub(crate) const PLACES: [Place; 7] = [
    Place::Whole,
    Place::Transposed,
    Place::Sliced,
    Place::Stepped,
    Place::RowRepeated,
    Place::ColumnRepeated,
    Place::Constant,
];

impl Place {
    /// The layout of a tensor of a shape.
    pub(crate) fn layout(self, shape: &[usize]) -> Layout {
        let rank = shape.len();
        match self {
            Place::Whole => Layout::contiguous(shape),
            Place::Transposed => {
                let stored: Vec<usize> = shape.iter().rev().copied().collect();
                Layout::contiguous(&stored).permuted(&(0..rank).rev().collect::<Vec<_>>())
            }
            Place::Sliced => {
                let stored: Vec<usize> = shape.iter().map(|size| size + 3).collect();
                let narrow = |layout: Layout, dim| layout.narrowed(dim, 1 + dim % 2, shape[dim]);
                (0..rank).fold(Layout::contiguous(&stored), narrow)
            }
            Place::Stepped => {
                let stored: Vec<usize> = shape.iter().map(|size| size * 2).collect();
                let strides = Layout::contiguous(&stored).strides.iter().map(|stride| stride * 2).collect();
                Layout { shape: shape.into(), strides, start: 0 }
            }
            Place::RowRepeated => repeated(shape, |dim| dim == 0),
            Place::ColumnRepeated => repeated(shape, |dim| dim + 1 == rank),
            Place::Constant => repeated(shape, |_| true),
        }
    }
}

/// A layout that broadcasts along some dimensions.
pub(crate) fn repeated(shape: &[usize], along: impl Fn(usize) -> bool) -> Layout {
    let one = |dim: usize| if along(dim) { shape[dim].min(1) } else { shape[dim] };
    let stored: Vec<usize> = (0..shape.len()).map(one).collect();
    Layout::contiguous(&stored).broadcast(shape)
}

/// A tensor of random elements, including special float values.
pub(crate) fn random(dtype: Dtype, shape: &[usize], rng: &mut Rng) -> Literal {
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
    // With special values in all tensors, reductions would be trivial.
    let odd_ones = rng.one_in(2);
    let mut float = || {
        if odd_ones && rng.one_in(16) { rng.pick(&odd) } else { rng.next_u64() as i64 as f64 / 2f64.powi(60) }
    };
    if dtype.is_float() {
        return Literal::floats(dtype, shape.to_vec(), (0..n).map(|_| float()).collect());
    }
    // Small ones too, for equal elements and zeros.
    let mut int = || if rng.one_in(2) { rng.next_u64() as i64 } else { rng.below(7) as i64 - 3 };
    Literal::ints(dtype, shape.to_vec(), (0..n).map(|_| int()).collect())
}

/// An op from its name and attributes as programs write them.
pub(crate) fn op(text: &str) -> Op {
    let name = text.split('[').next().unwrap();
    let mut cursor = Cursor::new(&text[name.len()..], Mesh::default()).unwrap();
    (OpTable::built_in().get(name).unwrap().read)(&mut cursor).unwrap()
}

/// The context of evaluations: no mesh, no symbols.
pub(crate) fn eval_cx() -> EvalCx<'static> {
    static CX: std::sync::LazyLock<(Mesh, BTreeMap<Sym, i64>)> = std::sync::LazyLock::new(Default::default);
    EvalCx { mesh: &CX.0, rank: Rank(0), symbols: &CX.1 }
}

/// The types and shapes of the results of an op, if its rule accepts operands of these types.
pub(crate) fn results(op: &dyn OpDef, operands: &[(Dtype, Vec<usize>)]) -> Option<Vec<(Dtype, Vec<usize>)>> {
    let ty = |(dtype, shape): &(Dtype, Vec<usize>)| {
        let shape = shape.iter().map(|size| Index::from(*size)).collect();
        Type::from(TensorType::new(*dtype, shape, Axes::NONE))
    };
    let (mesh, args) = (Mesh::default(), operands.iter().map(ty).collect::<Vec<_>>());
    let types = infer(op, &mesh, &args, &[], &mut Facts::new(&mesh), Undecided::Refuse).ok()?;
    let size = |size: &Index| usize::try_from(size.as_const()?).ok();
    let result = |ty: &Type| {
        let ty = ty.as_tensor()?;
        Some((ty.dtype, ty.shape.iter().map(size).collect::<Option<_>>()?))
    };
    types.iter().map(result).collect()
}

/// The results of a kernel, with these types and shapes. Operands that are `None` alias the first result, which
/// initially holds `first`.
pub(crate) fn call(
    op: &dyn OpDef,
    args: &[Option<&Placed>],
    first: Option<&Literal>,
    results: &[(Dtype, Vec<usize>)],
    threads: &Threads,
) -> Result<Vec<Literal>, String> {
    let bytes = |(dtype, shape): &(Dtype, Vec<usize>)| shape.iter().product::<usize>() * dtype.size();
    let mut storage: Vec<Storage> = results.iter().map(|result| Storage::new(bytes(result))).collect();
    if let (Some(first), Some(storage)) = (first, storage.first_mut()) {
        storage.bytes_mut().copy_from_slice(&first.to_bytes());
    }
    let out = results.iter().zip(&mut storage);
    let mut out: Vec<ViewMut<'_>> = out
        .map(|((dtype, shape), storage)| ViewMut { dtype: *dtype, shape, bytes: storage.bytes_mut() })
        .collect();
    let args: Vec<Arg<'_>> = args.iter().map(|x| x.map_or(Arg::Result, |x| Arg::View(x.view()))).collect();
    let kernel = find(op.info().name).ok_or("no kernel")?;
    (kernel.run)(&KernelCx { sizes: eval_cx(), threads }, op, &args, &mut out)
        .map_err(|error| error.to_string())?;
    let tensor = |((dtype, shape), storage): (&(Dtype, Vec<usize>), &Storage)| {
        Literal::from_bytes(*dtype, shape.clone(), storage.bytes()).unwrap()
    };
    Ok(results.iter().zip(&storage).map(tensor).collect())
}

/// The only result of a kernel. One operand may alias it.
pub(crate) fn computed(
    op: &dyn OpDef,
    args: &[&Placed],
    in_place: Option<usize>,
    threads: &Threads,
) -> Result<Literal, String> {
    Ok(all_computed(op, args, in_place, threads)?.remove(0))
}

/// The results of a kernel. One operand may alias the first.
pub(crate) fn all_computed(
    op: &dyn OpDef,
    args: &[&Placed],
    in_place: Option<usize>,
    threads: &Threads,
) -> Result<Vec<Literal>, String> {
    let types: Vec<_> = args.iter().map(|arg| (arg.tensor.dtype, arg.tensor.shape.clone())).collect();
    let results = results(op, &types).ok_or("its rule refuses the operands")?;
    let others: Vec<Option<&Placed>> =
        args.iter().enumerate().map(|(i, arg)| (in_place != Some(i)).then_some(*arg)).collect();
    call(op, &others, in_place.map(|i| &args[i].tensor), &results, threads)
}

/// Runs a kernel, and reports where its results are further from the op's own evaluation than the op allows. One operand
/// may alias the first result.
pub(crate) fn check(
    op: &dyn OpDef,
    args: &[&Placed],
    in_place: Option<usize>,
    threads: &Threads,
) -> Result<(), String> {
    let got = all_computed(op, args, in_place, threads)?;
    let tensors: Vec<&Literal> = args.iter().map(|arg| &arg.tensor).collect();
    tolerance::check(op, &eval_cx(), &tensors, &got)
}

/// Fails if the results on one thread and on two are not bit-identical.
pub(crate) fn check_threads(op: &dyn OpDef, args: &[&Placed], what: &str) {
    let [one, two] = [1, 2].map(|n| all_computed(op, args, None, &Threads::new(n)).unwrap());
    assert!(one.iter().zip(&two).all(|(one, two)| one.same(two)), "{what}");
}

/// Fails if there are failures, and shows the first of them.
pub(crate) fn assert_none(failures: &[String]) {
    let first = failures[..failures.len().min(40)].join("\n");
    assert!(failures.is_empty(), "{} failures:\n{first}", failures.len());
}
