//! Kernels of the ops that gather, scatter and add at indices given by a tensor.

use bytemuck::Pod;
use consort_ir::literal::Literal;
use consort_ir::ops::{Gather, OneHot, OpDef, Scatter, ScatterAdd, TakeAlong};
use consort_types::Dtype;
use consort_types::layout::{is_row_major, row_major};
use half::{bf16, f16};

use crate::kernels::copy::copy;
use crate::kernels::operand::{Storage, attributes, view};
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, View, ViewMut};
use crate::threads::Threads;

pub(crate) static KERNELS: &[Kernel] = &[
    Kernel { op: "gather", family: "lookup", in_place: false, strided: true, run: gather },
    Kernel { op: "take_along", family: "lookup", in_place: false, strided: true, run: take_along },
    Kernel { op: "scatter", family: "lookup", in_place: true, strided: true, run: scatter },
    Kernel { op: "scatter_add", family: "lookup", in_place: true, strided: true, run: scatter_add },
    Kernel { op: "one_hot", family: "lookup", in_place: false, strided: true, run: one_hot },
];

/// Bytes of the result per thread task.
const PART: usize = 1 << 18;

/// The elements of an integer tensor, in row-major order.
fn integers(threads: &Threads, view: &View<'_>) -> Result<Vec<i64>, KernelError> {
    let mut storage = Storage::new(view.dtype, view.numel());
    copy(threads, view, storage.bytes_mut())?;
    let bytes = storage.bytes();
    Ok(match view.dtype {
        Dtype::I64 => bytemuck::cast_slice(bytes).to_vec(),
        Dtype::I32 => bytemuck::cast_slice::<u8, i32>(bytes).iter().map(|x| i64::from(*x)).collect(),
        _ => bytes.iter().map(|x| i64::from(*x)).collect(),
    })
}

/// The indices in a tensor, each checked against `size`.
fn places(threads: &Threads, view: &View<'_>, size: usize) -> Result<Vec<usize>, KernelError> {
    let check = |place: &i64| match usize::try_from(*place) {
        Ok(at) if at < size => Ok(at),
        _ => Err(KernelError::new((format!("places in 0..{size}"), place.to_string()))),
    };
    integers(threads, view)?.iter().map(check).collect()
}

/// The offset of each element of a layout, in row-major order.
fn offsets(shape: &[usize], strides: &[usize]) -> Vec<usize> {
    let mut list = vec![0];
    for (size, stride) in shape.iter().zip(strides) {
        list = list.iter().flat_map(|at| (0..*size).map(move |i| at + i * stride)).collect();
    }
    list
}

fn gather(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let (dim, x) = (attributes::<Gather>(op)?.dim, view(args, 0)?);
    let places = places(cx.threads, &view(args, 1)?, x.shape[dim])?;
    if out[0].numel() == 0 {
        return Ok(());
    }
    match x.dtype.size() {
        1 => gather_elements(cx.threads, x.elements::<u8>()?, &x, dim, &places, out[0].elements()?),
        2 => gather_elements(cx.threads, x.elements::<u16>()?, &x, dim, &places, out[0].elements()?),
        4 => gather_elements(cx.threads, x.elements::<u32>()?, &x, dim, &places, out[0].elements()?),
        _ => gather_elements(cx.threads, x.elements::<u64>()?, &x, dim, &places, out[0].elements()?),
    }
    Ok(())
}

fn gather_elements<T: Pod + Send + Sync>(
    threads: &Threads,
    from: &[T],
    x: &View<'_>,
    dim: usize,
    places: &[usize],
    out: &mut [T],
) {
    let outer = offsets(&x.shape[..dim], &x.strides[..dim]);
    let (inner_shape, inner_strides) = (&x.shape[dim + 1..], &x.strides[dim + 1..]);
    let run: usize = inner_shape.iter().product();
    // A contiguous row is copied whole; for others the element offsets are computed once.
    let gaps = !is_row_major(inner_shape, inner_strides);
    let inner = if gaps { offsets(inner_shape, inner_strides) } else { Vec::new() };
    let rows = (PART / (run * size_of::<T>())).max(1);
    let parts = out.chunks_mut(rows * run).enumerate().collect();
    threads.for_each(parts, |(i, part)| {
        for (k, row) in part.chunks_exact_mut(run).enumerate() {
            let number = i * rows + k;
            let at = outer[number / places.len()] + places[number % places.len()] * x.strides[dim];
            if gaps {
                row.iter_mut().zip(&inner).for_each(|(to, inner)| *to = from[at + inner]);
            } else if run == 1 {
                row[0] = from[at];
            } else {
                row.copy_from_slice(&from[at..at + run]);
            }
        }
    });
}

fn take_along(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let (dim, x) = (attributes::<TakeAlong>(op)?.dim, view(args, 0)?);
    let places = places(cx.threads, &view(args, 1)?, x.shape[dim])?;
    if out[0].numel() == 0 {
        return Ok(());
    }
    match x.dtype.size() {
        1 => take_elements(x.elements::<u8>()?, &x, dim, &places, &mut out[0])?,
        2 => take_elements(x.elements::<u16>()?, &x, dim, &places, &mut out[0])?,
        4 => take_elements(x.elements::<u32>()?, &x, dim, &places, &mut out[0])?,
        _ => take_elements(x.elements::<u64>()?, &x, dim, &places, &mut out[0])?,
    }
    Ok(())
}

fn take_elements<T: Pod>(
    from: &[T],
    x: &View<'_>,
    dim: usize,
    places: &[usize],
    out: &mut ViewMut<'_>,
) -> Result<(), KernelError> {
    let (shape, own) = (out.shape, out.elements::<T>()?);
    let (last, leading) = (shape.len() - 1, &shape[..shape.len() - 1]);
    // Along the dimension itself the index says where to read, along the others the element's own position.
    let stride = |i: usize| if i == dim { 0 } else { x.strides[i] };
    let strides: Vec<usize> = (0..=last).map(stride).collect();
    let rows = offsets(leading, &strides);
    let lines = own.chunks_exact_mut(shape[last]).zip(places.chunks_exact(shape[last])).zip(rows);
    for ((line, places), row) in lines {
        for (j, (to, place)) in line.iter_mut().zip(places).enumerate() {
            *to = from[row + j * strides[last] + place * x.strides[dim]];
        }
    }
    Ok(())
}

fn scatter(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let dim = attributes::<Scatter>(op)?.dim;
    updated(cx, args, dim, &mut out[0], |threads, out, places, updates| match out.dtype.size() {
        1 => combine(threads, out, dim, places, updates, |_, new: u8| new),
        2 => combine(threads, out, dim, places, updates, |_, new: u16| new),
        4 => combine(threads, out, dim, places, updates, |_, new: u32| new),
        _ => combine(threads, out, dim, places, updates, |_, new: u64| new),
    })
}

fn scatter_add(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let dim = attributes::<ScatterAdd>(op)?.dim;
    updated(cx, args, dim, &mut out[0], |threads, out, places, updates| match out.dtype {
        Dtype::F32 => combine(threads, out, dim, places, updates, |a: f32, b| a + b),
        Dtype::F64 => combine(threads, out, dim, places, updates, |a: f64, b| a + b),
        // An f32 has more than twice the bits, so rounding its sum once more does not round twice in effect.
        Dtype::F16 => combine(threads, out, dim, places, updates, |a: u16, b| {
            f16::from_f32(f16::from_bits(a).to_f32() + f16::from_bits(b).to_f32()).to_bits()
        }),
        Dtype::Bf16 => combine(threads, out, dim, places, updates, |a: u16, b| {
            bf16::from_f32(bf16::from_bits(a).to_f32() + bf16::from_bits(b).to_f32()).to_bits()
        }),
        Dtype::I32 => combine(threads, out, dim, places, updates, i32::wrapping_add),
        Dtype::I64 => combine(threads, out, dim, places, updates, i64::wrapping_add),
        Dtype::U8 | Dtype::Bool => combine(threads, out, dim, places, updates, u8::wrapping_add),
    })
}

/// Copies x to the result and calls `write` with the indices and the contiguous updates.
fn updated(
    cx: &KernelCx<'_>,
    args: &[Arg<'_>],
    dim: usize,
    out: &mut ViewMut<'_>,
    write: impl Fn(&Threads, &mut ViewMut<'_>, &[usize], &[u8]) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let strides = row_major(out.shape);
    // Any operand may alias the result; those that are read after it is written are copied first.
    let held = args[1..].iter().any(|arg| matches!(arg, Arg::Result)).then(|| Storage::of(out.bytes));
    let held = held.as_ref().map_or(&[][..], Storage::bytes);
    let whole = View { dtype: out.dtype, shape: out.shape, strides: &strides, bytes: held };
    let read = |i: usize| if let Arg::View(view) = args[i] { view } else { whole };
    let (named, updates) = (read(1), read(2));
    let places = places(cx.threads, &named, out.shape[dim])?;
    if let Arg::View(x) = args[0] {
        copy(cx.threads, &x, out.bytes)?;
    }
    let (n, dense) = (updates.numel(), updates.is_contiguous());
    if n == 0 {
        return Ok(());
    }
    if dense {
        return write(cx.threads, out, &places, &updates.bytes[..n * updates.dtype.size()]);
    }
    let mut storage = Storage::new(updates.dtype, n);
    copy(cx.threads, &updates, storage.bytes_mut())?;
    write(cx.threads, out, &places, storage.bytes())
}

/// Combines the rows at the indices with rows of updates, in order.
fn combine<T: Pod + Send + Sync>(
    threads: &Threads,
    out: &mut ViewMut<'_>,
    dim: usize,
    places: &[usize],
    updates: &[u8],
    new: impl Fn(T, T) -> T + Sync,
) -> Result<(), KernelError> {
    let storage = |error| KernelError::new(format!("storage: {error}"));
    let updates = bytemuck::try_cast_slice::<u8, T>(updates).map_err(storage)?;
    let (size, run) = (out.shape[dim], out.shape[dim + 1..].iter().product::<usize>());
    // Each thread owns some rows and scans all indices, so the order of updates is deterministic.
    let n_rows = out.numel() / run;
    let rows = if threads.count() > 1 { n_rows.div_ceil(threads.count()).max(1) } else { n_rows };
    let parts = out.elements::<T>()?.chunks_mut(rows * run).enumerate().collect();
    threads.for_each(parts, |(i, part): (usize, &mut [T])| {
        let (first, end) = (i * rows, i * rows + part.len() / run);
        for outer in first / size..end.div_ceil(size) {
            for (k, place) in places.iter().enumerate() {
                let row = outer * size + place;
                if !(first..end).contains(&row) {
                    continue;
                }
                let (to, from) = ((row - first) * run, (outer * places.len() + k) * run);
                for (to, from) in part[to..to + run].iter_mut().zip(&updates[from..from + run]) {
                    *to = new(*to, *from);
                }
            }
        }
    });
    Ok(())
}

fn one_hot(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let dtype = attributes::<OneHot>(op)?.dtype;
    let x = view(args, 0)?;
    let classes = out[0].shape.last().copied().unwrap_or(1);
    let one = if dtype.is_float() {
        Literal::floats(dtype, vec![], vec![1.0])
    } else {
        Literal::ints(dtype, vec![], vec![1])
    };
    let (one, width) = (one.to_bytes(), dtype.size());
    out[0].bytes.fill(0);
    for (row, place) in integers(cx.threads, &x)?.into_iter().enumerate() {
        if let Ok(place) = usize::try_from(place)
            && place < classes
        {
            let at = (row * classes + place) * width;
            out[0].bytes[at..at + width].copy_from_slice(&one);
        }
    }
    Ok(())
}
