//! Kernels of sort and topk.
//!
//! An element becomes an unsigned key with the same order, packed above the element's index in one wider integer. So
//! only integers are compared, all of them differ, and equal elements keep their order.

use bytemuck::Pod;
use consort_ir::ops::{OpDef, Sort, Topk};
use consort_types::Dtype;
use consort_types::layout::Layout;

use crate::kernels::copy::copy;
use crate::kernels::operand::{Storage, attributes, layout, part, view};
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, View, ViewMut};
use crate::threads::Threads;

pub(crate) static KERNELS: &[Kernel] = &[
    Kernel { op: "sort", family: "order", in_place: false, strided: true, run: sort },
    Kernel { op: "topk", family: "order", in_place: false, strided: true, run: topk },
];

fn sort(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let op = attributes::<Sort>(op)?;
    along(cx.threads, &view(args, 0)?, op.dim, op.descending, out)
}

fn topk(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    along(cx.threads, &view(args, 0)?, attributes::<Topk>(op)?.dim, true, out)
}

/// Sorts along a dimension: non-contiguous lines are gathered first, and the results scattered
/// back.
fn along(
    threads: &Threads,
    x: &View<'_>,
    dim: usize,
    descending: bool,
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let [values, places] = out else { return Err(KernelError::new("expected two results")) };
    if values.numel() == 0 {
        return Ok(());
    }
    let (n, k) = (x.shape[dim], values.shape[dim]);
    if dim + 1 == x.shape.len() && x.is_contiguous() {
        return lines(threads, x.dtype, x.bytes, [n, k], descending, values.bytes, places.bytes);
    }
    let dims: Vec<usize> = (0..x.shape.len()).filter(|i| *i != dim).chain([dim]).collect();
    let mut from = Storage::new(x.dtype, x.numel());
    copy(threads, &part(x, &layout(x).permuted(&dims)), from.bytes_mut())?;
    let (mut best, mut best_places) =
        (Storage::new(x.dtype, values.numel()), Storage::new(Dtype::I64, values.numel()));
    let (own, own_places) = (best.bytes_mut(), best_places.bytes_mut());
    lines(threads, x.dtype, from.bytes(), [n, k], descending, own, own_places)?;
    // The sorted lines have the dimension last; the results have it in its original position.
    let mut back = vec![0; dims.len()];
    dims.iter().enumerate().for_each(|(i, dim)| back[*dim] = i);
    let shape: Vec<usize> = dims.iter().map(|dim| values.shape[*dim]).collect();
    let sorted = Layout::contiguous(&shape).permuted(&back);
    let sorted = |dtype, bytes| View { dtype, shape: &sorted.shape, strides: &sorted.strides, bytes };
    copy(threads, &sorted(x.dtype, best.bytes()), values.bytes)?;
    copy(threads, &sorted(Dtype::I64, best_places.bytes()), places.bytes)
}

/// Sorts contiguous lines of `n` elements and keeps the first `k` of each.
fn lines(
    threads: &Threads,
    dtype: Dtype,
    from: &[u8],
    [n, k]: [usize; 2],
    descending: bool,
    values: &mut [u8],
    places: &mut [u8],
) -> Result<(), KernelError> {
    let long = u32::try_from(n).is_err();
    let job = Job { threads, from, n, k, descending, values, places };
    match dtype {
        Dtype::F64 => job.run::<u64, u128>(64, |x| float(x, 64, f64::INFINITY.to_bits())),
        Dtype::I64 => job.run::<u64, u128>(64, |x| x ^ 1 << 63),
        Dtype::F32 if long => {
            job.run::<u32, u128>(32, |x| float(x.into(), 32, f32::INFINITY.to_bits().into()))
        }
        Dtype::F32 => job.run::<u32, u64>(32, |x| float(x.into(), 32, f32::INFINITY.to_bits().into())),
        Dtype::I32 if long => job.run::<u32, u128>(32, |x| (x ^ 1 << 31).into()),
        Dtype::I32 => job.run::<u32, u64>(32, |x| (x ^ 1 << 31).into()),
        Dtype::F16 if long => job.run::<u16, u128>(16, |x| float(x.into(), 16, 0x7c00)),
        Dtype::F16 => job.run::<u16, u64>(16, |x| float(x.into(), 16, 0x7c00)),
        Dtype::Bf16 if long => job.run::<u16, u128>(16, |x| float(x.into(), 16, 0x7f80)),
        Dtype::Bf16 => job.run::<u16, u64>(16, |x| float(x.into(), 16, 0x7f80)),
        Dtype::U8 | Dtype::Bool if long => job.run::<u8, u128>(8, u64::from),
        Dtype::U8 | Dtype::Bool => job.run::<u8, u64>(8, u64::from),
    }
}

/// The key of a float: NaN above everything, 0 and -0 equal.
#[inline(always)]
fn float(bits: u64, width: u32, infinity: u64) -> u64 {
    let sign = 1 << (width - 1);
    let all = sign | (sign - 1);
    match bits & (sign - 1) {
        0 => sign,
        size if size > infinity => all,
        _ if bits & sign != 0 => !bits & all,
        _ => bits | sign,
    }
}

/// A key above an index, in one integer.
trait Packed: Copy + Ord {
    fn pack(key: u64, place: usize) -> Self;
    fn place(self) -> usize;
}

/// For keys of at most 32 bits and fewer than 2^32 elements.
impl Packed for u64 {
    #[inline(always)]
    fn pack(key: u64, place: usize) -> u64 {
        key << 32 | place as u64
    }
    #[inline(always)]
    fn place(self) -> usize {
        (self & u64::from(u32::MAX)) as usize
    }
}

impl Packed for u128 {
    #[inline(always)]
    fn pack(key: u64, place: usize) -> u128 {
        u128::from(key) << 64 | place as u128
    }
    #[inline(always)]
    fn place(self) -> usize {
        self as usize
    }
}

struct Job<'a> {
    threads: &'a Threads,
    from: &'a [u8],
    n: usize,
    k: usize,
    descending: bool,
    values: &'a mut [u8],
    places: &'a mut [u8],
}

impl Job<'_> {
    fn run<T: Pod + Send + Sync, P: Packed>(
        self,
        width: u32,
        key: impl Fn(T) -> u64 + Sync,
    ) -> Result<(), KernelError> {
        let storage = |error| KernelError::new(format!("storage: {error}"));
        let Job { n, k, .. } = self;
        let from = bytemuck::try_cast_slice::<u8, T>(self.from).map_err(storage)?;
        let values = bytemuck::try_cast_slice_mut::<u8, T>(self.values).map_err(storage)?;
        let places = bytemuck::try_cast_slice_mut::<u8, i64>(self.places).map_err(storage)?;
        // The smallest integer comes first, so a descending order inverts the keys but not the indices.
        let turn = if self.descending { u64::MAX >> (64 - width) } else { 0 };
        let rows = (LINES / n).max(1);
        let out = values.chunks_mut(rows * k).zip(places.chunks_mut(rows * k));
        let parts = from.chunks(rows * n).zip(out).collect();
        self.threads.for_each(parts, |(from, (values, places)): (&[T], (&mut [T], &mut [i64]))| {
            let mut packed: Vec<P> = Vec::new();
            let out = values.chunks_exact_mut(k).zip(places.chunks_exact_mut(k));
            for (line, (values, places)) in from.chunks_exact(n).zip(out) {
                packed.clear();
                let all = line.iter().enumerate().map(|(i, x)| P::pack(key(*x) ^ turn, i));
                if k <= n / 4 {
                    smallest(&mut packed, k, all);
                } else {
                    packed.extend(all);
                }
                packed.sort_unstable();
                for ((packed, value), place) in packed.iter().zip(values).zip(places) {
                    *value = line[packed.place()];
                    *place = packed.place() as i64;
                }
            }
        });
        Ok(())
    }
}

/// Elements per thread task.
const LINES: usize = 1 << 16;

/// Keeps the `k` smallest, unordered. Elements not below the largest of `k` earlier ones are skipped.
fn smallest<P: Packed>(kept: &mut Vec<P>, k: usize, all: impl Iterator<Item = P>) {
    let room = (2 * k).max(64);
    let mut limit: Option<P> = None;
    for next in all {
        if limit.is_some_and(|limit| next >= limit) {
            continue;
        }
        kept.push(next);
        if kept.len() == room {
            let (_, largest, _) = kept.select_nth_unstable(k - 1);
            limit = Some(*largest);
            kept.truncate(k);
        }
    }
    if kept.len() > k {
        kept.select_nth_unstable(k - 1);
        kept.truncate(k);
    }
}
