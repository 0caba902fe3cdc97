//! The driver of all elementwise ops: elements are processed in blocks that stay in the L1 cache.
//!
//! A micro-kernel computes a run of elements of one type. Any other operand (strided, 16-bit floats, aliasing the
//! result) is copied into a block first, and the result is copied out of one afterwards.

use std::array::from_fn;

use bytemuck::{Zeroable, try_cast_slice};
use smallvec::SmallVec;

use super::copy::copy;
use super::formats::{Format, U8};
use super::isa::{Loop, stream, vectorize};
use super::operand::Storage;
use super::source::{Source, coalesce};
use super::{Arg, KernelCx, KernelError, View, ViewMut};

/// Computes one run: operands of equal length, and the result.
pub(crate) type Micro<const N: usize, A, B> = fn([&[A]; N], &mut [B]);

/// How much an op computes per element.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// So little, with baseline instructions, that large inputs are limited by memory bandwidth.
    Light,
    Short,
    /// So much that the tail, shorter than a vector, should be vectorised too.
    Long,
}

/// The scalar function of an elementwise op.
pub(crate) trait ElementOp<A, const N: usize> {
    /// The type of the result.
    type Out: Copy + Zeroable;

    /// How much it computes.
    const WORK: Work;

    /// One element; `#[inline(always)]`, so that it is inlined into a loop.
    fn apply(x: [A; N]) -> Self::Out;

    /// Elements that are computed together as a vector.
    #[inline(always)]
    fn lanes<const L: usize>(x: [[A; L]; N]) -> [Self::Out; L]
    where
        A: Copy + Zeroable,
    {
        let mut out = [Self::Out::zeroed(); L];
        for (i, out) in out.iter_mut().enumerate() {
            *out = Self::apply(one_of_each(&x, i));
        }
        out
    }
}

/// One element of each operand. Shared by all ops, unlike a closure in each of them.
#[inline(always)]
fn one_of_each<R: AsRef<[A]>, A: Copy + Zeroable, const N: usize>(args: &[R; N], at: usize) -> [A; N] {
    let mut x = [A::zeroed(); N];
    for (x, arg) in x.iter_mut().zip(args) {
        *x = arg.as_ref()[at];
    }
    x
}

/// `L` elements of each operand.
#[inline(always)]
fn lanes_of_each<A: Copy + Zeroable, const N: usize, const L: usize>(
    args: &[&[A]; N],
    at: usize,
) -> [[A; L]; N] {
    let mut x = [[A::zeroed(); L]; N];
    for (x, arg) in x.iter_mut().zip(args) {
        x.copy_from_slice(&arg[at..at + L]);
    }
    x
}

/// The micro-kernel of an op.
pub(crate) fn micro<O: ElementOp<A, N>, A: Copy + Zeroable, const N: usize>(
    args: [&[A]; N],
    out: &mut [O::Out],
) {
    let bytes = size_of_val(out) + N * size_of_val(args[0]);
    let elements = Elements::<O, A, N> { args, out };
    if O::WORK == Work::Light { stream(elements, bytes) } else { vectorize(elements) }
}

struct Elements<'a, O: ElementOp<A, N>, A, const N: usize> {
    args: [&'a [A]; N],
    out: &'a mut [O::Out],
}

impl<O: ElementOp<A, N>, A: Copy + Zeroable, const N: usize> Loop for Elements<'_, O, A, N> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let n = self.out.len();
        if O::WORK != Work::Long {
            let args = self.args.map(|arg| &arg[..n]);
            for (i, out) in self.out.iter_mut().enumerate() {
                *out = O::apply(one_of_each(&args, i));
            }
            return;
        }
        match n {
            ..8 => {
                // Pads with elements that are ignored.
                let mut x = [[A::zeroed(); 8]; N];
                x.iter_mut().zip(self.args).for_each(|(x, arg)| x[..n].copy_from_slice(&arg[..n]));
                self.out.copy_from_slice(&O::lanes(x)[..n]);
            }
            8..16 => chunks::<O, A, N, 8>(self.args, self.out),
            _ => chunks::<O, A, N, 16>(self.args, self.out),
        }
    }
}

/// Computes `L` elements at a time. The last vector overlaps the one before it and recomputes some elements.
#[inline(always)]
fn chunks<O: ElementOp<A, N>, A: Copy + Zeroable, const N: usize, const L: usize>(
    args: [&[A]; N],
    out: &mut [O::Out],
) {
    let last = out.len() - L;
    let args = args.map(|arg| &arg[..out.len()]);
    let mut at = 0;
    loop {
        out[at..at + L].copy_from_slice(&O::lanes::<L>(lanes_of_each(&args, at)));
        if at == last {
            return;
        }
        at = last.min(at + L);
    }
}

/// Elements per thread task.
const PART: usize = 1 << 16;

/// Elements of a block.
const BLOCK: usize = 1024;

/// Up to this many elements are computed in one block on the stack: an allocation would take longer.
const FEW: usize = 64;

/// Runs a micro-kernel over all elements.
pub(crate) fn map<const N: usize, F: Format, G: Format>(
    cx: &KernelCx<'_>,
    args: &[Arg<'_>],
    result: &mut ViewMut<'_>,
    micro: Micro<N, F::Compute, G::Compute>,
) -> Result<(), KernelError> {
    let out = result.elements::<G::Stored>()?;
    let n = out.len();
    if n == 0 {
        return Ok(());
    }
    let threads = cx.threads.count() > 1 && n > PART;
    if !threads && let (Some(args), Some(out)) = (all_whole::<N, F>(args, n), G::borrow_mut(out)) {
        micro(args, out);
        return Ok(());
    }
    if n <= FEW && map_few::<N, F, G>(args, out, micro) {
        return Ok(());
    }
    let turned = args.iter().take(N).map(|arg| turn(cx, arg));
    let turned = turned.collect::<Result<SmallVec<[_; 3]>, KernelError>>()?;
    let sources = args.iter().zip(&turned).map(|(arg, turned)| match turned {
        Some(storage) => Source::<F>::of_bytes(storage.bytes()),
        None => Source::new(arg),
    });
    let sources = sources.collect::<Result<SmallVec<[_; 3]>, KernelError>>()?;
    // An operand that aliases the result has the result's type.
    if sources.iter().any(|source| matches!(source, Source::Result)) {
        try_cast_slice::<_, F::Stored>(out)
            .map_err(|error| KernelError::new(format!("in place: {error}")))?;
    }
    if threads {
        let parts: Vec<(usize, &mut [G::Stored])> = out.chunks_mut(PART).enumerate().collect();
        cx.threads.for_each(parts, |(i, part)| map_part::<N, F, G>(&sources, i * PART, part, micro));
    } else {
        map_part::<N, F, G>(&sources, 0, out, micro);
    }
    Ok(())
}

/// A row-major copy of a large operand whose contiguous dimension is not the last: blocks would read one element of
/// each cache line at a time, whereas a copy reads whole tiles.
fn turn(cx: &KernelCx<'_>, arg: &Arg<'_>) -> Result<Option<Storage>, KernelError> {
    let Arg::View(view) = arg else { return Ok(None) };
    let n = view.numel();
    let steps = coalesce(view.shape, view.strides);
    let turned = steps.last().is_some_and(|(_, stride)| *stride > 1) && steps.iter().any(|step| step.1 == 1);
    if !turned || n < 4 * BLOCK {
        return Ok(None);
    }
    let mut storage = Storage::new(view.dtype, n);
    copy(cx.threads, view, storage.bytes_mut())?;
    Ok(Some(storage))
}

/// The operands, if all can be borrowed whole.
#[inline]
fn all_whole<'a, const N: usize, F: Format>(args: &[Arg<'a>], n: usize) -> Option<[&'a [F::Compute]; N]> {
    let mut whole = [&[][..]; N];
    for (whole, arg) in whole.iter_mut().zip(args) {
        let Arg::View(view) = arg else { return None };
        *whole = F::borrow(whole_elements(view, n)?)?;
    }
    Some(whole)
}

/// The elements of a contiguous view.
#[inline]
fn whole_elements<'a, T: bytemuck::Pod>(view: &View<'a>, n: usize) -> Option<&'a [T]> {
    if !view.is_contiguous() {
        return None;
    }
    try_cast_slice(view.bytes.get(..n * size_of::<T>())?).ok()
}

/// Computes few elements, if each operand is whole, constant or aliases the result.
fn map_few<const N: usize, F: Format, G: Format>(
    args: &[Arg<'_>],
    out: &mut [G::Stored],
    micro: Micro<N, F::Compute, G::Compute>,
) -> bool {
    let n = out.len();
    let mut blocks = [[F::Compute::zeroed(); FEW]; N];
    for (block, arg) in blocks.iter_mut().zip(args) {
        let block = &mut block[..n];
        match arg {
            Arg::Result => match try_cast_slice(out) {
                Ok(stored) => F::load(stored, block),
                Err(_) => return false,
            },
            Arg::View(view) => match whole_elements(view, n) {
                Some(stored) => F::load(stored, block),
                None if view.strides.iter().all(|stride| *stride == 0) => match view.elements() {
                    Ok(stored) => block.fill(F::widen(stored[0])),
                    Err(_) => return false,
                },
                None => return false,
            },
        }
    }
    let args = from_fn(|j| &blocks[j][..n]);
    if let Some(out) = G::borrow_mut(out) {
        micro(args, out);
    } else {
        let mut block = [G::Compute::zeroed(); FEW];
        micro(args, &mut block[..n]);
        G::store(&block[..n], out);
    }
    true
}

/// Computes the part of the result that begins at `start`.
fn map_part<const N: usize, F: Format, G: Format>(
    sources: &[Source<'_, F>],
    start: usize,
    out: &mut [G::Stored],
    micro: Micro<N, F::Compute, G::Compute>,
) {
    let size = out.len().min(BLOCK);
    let mut blocks = vec![F::Compute::zeroed(); N * size];
    let mut block = vec![G::Compute::zeroed(); if G::borrow_mut(&mut []).is_some() { 0 } else { size }];
    let row = sources.iter().find_map(Source::row);
    let (mut at, mut rest) = (start, out);
    while !rest.is_empty() {
        let to_row_end = row.map_or(size, |row| row - at % row);
        let len = rest.len().min(size).min(to_row_end);
        let (out, after) = rest.split_at_mut(len);
        let here = try_cast_slice(out).unwrap_or_default();
        let mut blocks = blocks.chunks_mut(size);
        let args = from_fn(|j| sources[j].run(at, len, here, blocks.next().unwrap_or_default(), at > start));
        match G::borrow_mut(out) {
            Some(out) => micro(args, out),
            None => {
                micro(args, &mut block[..len]);
                G::store(&block[..len], out);
            }
        }
        (rest, at) = (after, at + len);
    }
}

/// x where the condition is true, y where it is false.
pub(crate) fn select<F: Format>(args: &[Arg<'_>], result: &mut ViewMut<'_>) -> Result<(), KernelError> {
    let [condition, x, y] = args else { return Err(KernelError::new("expected three operands")) };
    let mut rest = result.elements::<F::Stored>()?;
    if rest.is_empty() {
        return Ok(());
    }
    let condition = Source::<U8>::new(condition)?;
    let (x, y) = (Source::<F>::new(x)?, Source::<F>::new(y)?);
    let size = rest.len().min(BLOCK);
    let mut truths = vec![0; size];
    let (mut xs, mut ys) = (vec![F::Compute::zeroed(); size], vec![F::Compute::zeroed(); size]);
    let mut at = 0;
    while !rest.is_empty() {
        let len = rest.len().min(size);
        let (out, after) = rest.split_at_mut(len);
        let truths = condition.run(at, len, try_cast_slice(out).unwrap_or_default(), &mut truths, at > 0);
        let xs = x.run(at, len, out, &mut xs, at > 0);
        let ys = y.run(at, len, out, &mut ys, at > 0);
        if let Some(out) = F::borrow_mut(out) {
            vectorize(Choose(truths, xs, ys, out));
        }
        (rest, at) = (after, at + len);
    }
    Ok(())
}

struct Choose<'a, A>(&'a [u8], &'a [A], &'a [A], &'a mut [A]);

impl<A: Copy> Loop for Choose<'_, A> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        for (((to, truth), x), y) in self.3.iter_mut().zip(self.0).zip(self.1).zip(self.2) {
            *to = if *truth != 0 { *x } else { *y };
        }
    }
}
