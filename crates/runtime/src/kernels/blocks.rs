//! The machine of all elementwise ops: elements go through in blocks that stay in the nearest cache.
//!
//! A micro-kernel computes a run of elements of one type. What is not such a run (other strides, 16-bit floats, an
//! operand that lies where the result goes) is copied into a block first, and the result out of one afterwards.

use std::array::from_fn;

use bytemuck::{Zeroable, try_cast_slice};
use smallvec::SmallVec;

use super::formats::{Format, U8};
use super::isa::{Loop, vectorize};
use super::source::Source;
use super::{Arg, KernelCx, KernelError, View, ViewMut};

/// Computes one run: operands of one length, and the result.
pub(crate) type Micro<const N: usize, A, B> = fn([&[A]; N], &mut [B]);

/// What an op does to one element of each operand.
pub(crate) trait ElementOp<A, const N: usize> {
    /// The type of the result.
    type Out: Copy + Zeroable;

    /// Whether it is so long that the last elements, fewer than an instruction takes, should go together too.
    const LONG: bool;

    /// One element; `#[inline(always)]`, so that it becomes part of a loop.
    fn apply(x: [A; N]) -> Self::Out;

    /// Elements that go through an instruction together.
    #[inline(always)]
    fn lanes(x: [&[A; LANES]; N]) -> [Self::Out; LANES]
    where
        A: Copy,
    {
        let mut out = [Self::Out::zeroed(); LANES];
        for (i, out) in out.iter_mut().enumerate() {
            *out = Self::apply(from_fn(|j| x[j][i]));
        }
        out
    }
}

/// A multiple of what any instruction set takes of 32-bit elements.
pub(crate) const LANES: usize = 16;

/// The micro-kernel of an op.
pub(crate) fn micro<O: ElementOp<A, N>, A: Copy + Zeroable, const N: usize>(
    args: [&[A]; N],
    out: &mut [O::Out],
) {
    vectorize(Elements::<O, A, N> { args, out });
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
        if !O::LONG {
            let args = self.args.map(|arg| &arg[..n]);
            for (i, out) in self.out.iter_mut().enumerate() {
                *out = O::apply(from_fn(|j| args[j][i]));
            }
            return;
        }
        let (out, out_rest) = self.out.as_chunks_mut::<LANES>();
        let args = self.args.map(|arg| arg[..n].as_chunks::<LANES>());
        for (i, out) in out.iter_mut().enumerate() {
            *out = O::lanes(from_fn(|j| &args[j].0[i]));
        }
        if out_rest.is_empty() {
            return;
        }
        // The rest goes through the same instructions, beside elements that nobody looks at.
        let mut padded = [[A::zeroed(); LANES]; N];
        for (padded, (_, rest)) in padded.iter_mut().zip(&args) {
            padded.iter_mut().zip(*rest).for_each(|(to, from)| *to = *from);
        }
        let last = O::lanes(from_fn(|j| &padded[j]));
        out_rest.iter_mut().zip(last).for_each(|(to, from)| *to = from);
    }
}

/// Threads take turns of so many elements.
const PART: usize = 1 << 16;

/// Elements of a block, and of one for tensors of few elements: clearing a block takes as long as computing it.
const BLOCK: usize = 1024;
const SMALL_BLOCK: usize = 64;

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
    let sources =
        args.iter().take(N).map(Source::<F>::new).collect::<Result<SmallVec<[_; 3]>, KernelError>>()?;
    // An operand that lies where the result goes is of the result's type.
    if sources.iter().any(|source| matches!(source, Source::Result)) {
        try_cast_slice::<_, F::Stored>(out).map_err(|error| KernelError(format!("in place: {error}")))?;
    }
    if threads {
        let parts: Vec<(usize, &mut [G::Stored])> = out.chunks_mut(PART).enumerate().collect();
        cx.threads.for_each(parts, |(i, part)| map_part::<N, BLOCK, F, G>(&sources, i * PART, part, micro));
    } else if n <= SMALL_BLOCK {
        map_part::<N, SMALL_BLOCK, F, G>(&sources, 0, out, micro);
    } else {
        map_part::<N, BLOCK, F, G>(&sources, 0, out, micro);
    }
    Ok(())
}

/// The operands, where all can be borrowed whole.
#[inline]
fn all_whole<'a, const N: usize, F: Format>(args: &[Arg<'a>], n: usize) -> Option<[&'a [F::Compute]; N]> {
    let mut whole = [&[][..]; N];
    for (whole, arg) in whole.iter_mut().zip(args) {
        let Arg::View(view) = arg else { return None };
        *whole = F::borrow(whole_elements(view, n)?)?;
    }
    Some(whole)
}

/// The elements of a view that has no gaps.
#[inline]
fn whole_elements<'a, T: bytemuck::Pod>(view: &View<'a>, n: usize) -> Option<&'a [T]> {
    if !view.is_contiguous() {
        return None;
    }
    try_cast_slice(view.bytes.get(..n * size_of::<T>())?).ok()
}

/// The elements of a part of the result that begins at `start`.
fn map_part<const N: usize, const B: usize, F: Format, G: Format>(
    sources: &[Source<'_, F>],
    start: usize,
    out: &mut [G::Stored],
    micro: Micro<N, F::Compute, G::Compute>,
) {
    let mut blocks = [[F::Compute::zeroed(); B]; N];
    let mut block = [G::Compute::zeroed(); B];
    let row = sources.iter().find_map(Source::row);
    let (mut at, mut rest) = (start, out);
    while !rest.is_empty() {
        let to_row_end = row.map_or(B, |row| row - at % row);
        let len = rest.len().min(B).min(to_row_end);
        let (out, after) = rest.split_at_mut(len);
        let here = try_cast_slice(out).unwrap_or_default();
        let mut blocks = blocks.iter_mut();
        let args = from_fn(|j| {
            let block = blocks.next().map_or(&mut [][..], |block| &mut block[..]);
            sources[j].run(at, len, here, block, at > start)
        });
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
    let [condition, x, y] = args else { return Err(KernelError("expected three operands".into())) };
    let mut rest = result.elements::<F::Stored>()?;
    if rest.is_empty() {
        return Ok(());
    }
    let condition = Source::<U8>::new(condition)?;
    let (x, y) = (Source::<F>::new(x)?, Source::<F>::new(y)?);
    let mut truths = [0; BLOCK];
    let [mut xs, mut ys] = [[F::Compute::zeroed(); BLOCK]; 2];
    let mut at = 0;
    while !rest.is_empty() {
        let len = rest.len().min(BLOCK);
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
