//! Copies of elements from one layout to another, by element width only.
//!
//! Adjacent dimensions are coalesced first. The rest is copied in runs if both sides are
//! contiguous along the same dimension, in tiles if along different ones, and one by one if
//! neither is.

use std::cmp::Reverse;
use std::ops::Range;

use bytemuck::Pod;
use consort_types::layout::{Layout, is_row_major, row_major, span};
use smallvec::SmallVec;

use crate::kernels::isa::{Loop, vectorize};
use crate::kernels::{KernelError, View};
use crate::threads::Threads;

/// A dimension of a copy: its size, and its stride on both sides. A source may have a negative stride.
#[derive(Clone, Copy, Debug)]
struct Dim {
    size: usize,
    from: isize,
    to: usize,
}

type Dims = SmallVec<[Dim; 6]>;

/// Smaller copies, in bytes, do not justify a second thread.
const PART: usize = 1 << 20;

/// Copies a view to contiguous storage, in row-major order.
pub fn copy(threads: &Threads, view: &View<'_>, out: &mut [u8]) -> Result<(), KernelError> {
    let shape = view.shape;
    // A small contiguous copy needs no plan.
    if out.len() == view.bytes.len() && out.len() < 2 * PART && is_row_major(shape, view.strides) {
        out.copy_from_slice(view.bytes);
        return Ok(());
    }
    copy_into(threads, view, out, &Layout { shape: shape.into(), strides: row_major(shape), start: 0 })
}

/// Copies a view to a layout of its shape without aliasing elements.
pub fn copy_into(
    threads: &Threads,
    view: &View<'_>,
    out: &mut [u8],
    layout: &Layout,
) -> Result<(), KernelError> {
    let all = view.shape.iter().zip(view.strides).zip(&layout.strides);
    let mut dims: Dims =
        all.map(|((size, from), to)| Dim { size: *size, from: *from as isize, to: *to }).collect();
    // In memory order of the destination, whatever the order of the dimensions.
    dims.sort_by_key(|dim| Reverse(dim.to));
    dispatch(threads, view, 0, out, layout, &dims)
}

/// Copies a view to contiguous storage, reversed along some dimensions.
pub fn copy_flipped(
    threads: &Threads,
    view: &View<'_>,
    flipped: &[usize],
    out: &mut [u8],
) -> Result<(), KernelError> {
    if view.numel() == 0 {
        return Ok(());
    }
    let layout = Layout::contiguous(view.shape);
    let mut first = 0;
    let dim = |i: usize| {
        let (size, from, to) = (view.shape[i], view.strides[i], layout.strides[i]);
        if flipped.contains(&i) {
            first += (size - 1) * from;
            Dim { size, from: -(from as isize), to }
        } else {
            Dim { size, from: from as isize, to }
        }
    };
    let dims: Dims = (0..view.shape.len()).map(dim).collect();
    dispatch(threads, view, first, out, &layout, &dims)
}

fn dispatch(
    threads: &Threads,
    view: &View<'_>,
    first: usize,
    out: &mut [u8],
    layout: &Layout,
    dims: &[Dim],
) -> Result<(), KernelError> {
    if view.numel() == 0 {
        return Ok(());
    }
    let mut width = view.dtype.size();
    let end = (layout.start + span(&layout.shape, &layout.strides)) * width;
    let own = out.len();
    let to = out.get_mut(layout.start * width..end);
    let to = to.ok_or_else(|| KernelError::new((format!("{end} bytes of storage"), own.to_string())))?;
    let from = &view.bytes[..span(view.shape, view.strides) * width];
    let (mut dims, mut first) = (coalesced(dims), first);
    if let Some(wide) = pairs(&dims, width, from, to) {
        dims.pop();
        dims.iter_mut().for_each(|dim| (dim.from, dim.to) = (dim.from / wide as isize, dim.to / wide));
        (first, width) = (first / wide, width * wide);
    }
    match width {
        1 => elements::<u8>(threads, &dims, from, first, to),
        2 => elements::<u16>(threads, &dims, from, first, to),
        4 => elements::<u32>(threads, &dims, from, first, to),
        _ => elements::<u64>(threads, &dims, from, first, to),
    }
}

/// The number of adjacent elements that can be moved as one element of a wider type.
fn pairs(dims: &[Dim], width: usize, from: &[u8], to: &[u8]) -> Option<usize> {
    let (inner, outer) = dims.split_last()?;
    let wide = inner.size;
    let fits = matches!(wide * width, 2 | 4 | 8) && (inner.from, inner.to) == (1, 1);
    let aligned = |bytes: &[u8]| bytes.as_ptr().addr().is_multiple_of(wide * width);
    let whole = |dim: &Dim| dim.from % wide as isize == 0 && dim.to.is_multiple_of(wide);
    (fits && aligned(from) && aligned(to) && outer.iter().all(whole)).then_some(wide)
}

fn elements<T: Pod + Send + Sync>(
    threads: &Threads,
    dims: &Dims,
    from: &[u8],
    first: usize,
    to: &mut [u8],
) -> Result<(), KernelError> {
    let storage = |error| KernelError::new(format!("storage: {error}"));
    let bytes = dims.iter().map(|dim| dim.size).product::<usize>() * size_of::<T>();
    let from = bytemuck::try_cast_slice::<u8, T>(from).map_err(storage)?;
    let to = bytemuck::try_cast_slice_mut::<u8, T>(to).map_err(storage)?;
    let Some(outer) = dims.first().filter(|_| threads.count() > 1 && bytes >= 2 * PART).copied() else {
        vectorize(Copy { dims, from, first, to });
        return Ok(());
    };
    // Rows of the outermost dimension do not overlap, so they can be distributed over threads.
    let rows = (PART * outer.size).div_ceil(bytes).max(1);
    let parts = to.chunks_mut(rows.saturating_mul(outer.to)).enumerate().collect();
    threads.for_each(parts, |(i, to)| {
        let mut dims = dims.clone();
        dims[0].size = rows.min(outer.size - i * rows);
        let first = first.wrapping_add_signed((i * rows) as isize * outer.from);
        vectorize(Copy { dims: &dims, from, first, to });
    });
    Ok(())
}

/// The dimensions larger than 1, coalesced where they are adjacent on both sides.
fn coalesced(dims: &[Dim]) -> Dims {
    let mut out: Dims = SmallVec::new();
    for dim in dims.iter().filter(|dim| dim.size != 1) {
        match out.last_mut() {
            Some(last)
                if last.from == dim.from * dim.size as isize
                    && last.to == dim.to.saturating_mul(dim.size) =>
            {
                *last = Dim { size: last.size * dim.size, ..*dim };
            }
            _ => out.push(*dim),
        }
    }
    out
}

struct Copy<'a, T> {
    dims: &'a [Dim],
    from: &'a [T],
    /// The offset of the first element in the source.
    first: usize,
    to: &'a mut [T],
}

impl<T: Pod> Loop for Copy<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Copy { dims, from, first, to } = self;
        let Some((inner, outer)) = dims.split_last() else {
            to[0] = from[first];
            return;
        };
        let size = inner.size;
        let parts = Parts::new(outer, first);
        match (inner.from, inner.to) {
            (1, 1) => {
                for (a, b) in parts {
                    to[b..b + size].copy_from_slice(&from[a..a + size]);
                }
            }
            (0, 1) => {
                for (a, b) in parts {
                    to[b..b + size].fill(from[a]);
                }
            }
            (-1, 1) => {
                for (a, b) in parts {
                    each(&mut to[b..b + size], from[a + 1 - size..=a].iter().rev());
                }
            }
            (stride, 1) if stride > 0 => {
                let rows = outer.iter().position(|dim| dim.from == 1 && dim.size.min(size) >= FEW);
                let Some(i) = rows else {
                    for (a, b) in parts {
                        each(&mut to[b..b + size], from[a..].iter().step_by(stride as usize));
                    }
                    return;
                };
                let mut rest: Dims = outer.into();
                let rows = rest.remove(i);
                for (a, b) in Parts::new(&rest, first) {
                    transpose(&from[a..], &mut to[b..], rows, *inner);
                }
            }
            (stride, step) => {
                for (a, b) in parts {
                    let mut at = a;
                    for to in to[b..].iter_mut().step_by(step).take(size) {
                        *to = from[at];
                        at = at.wrapping_add_signed(stride);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn each<'a, T: Pod>(to: &mut [T], from: impl Iterator<Item = &'a T>) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from;
    }
}

/// The offsets of each inner part, in the source and in the destination. An iterator, because a closure would be
/// compiled apart from the loop, without its instruction set.
struct Parts<'a> {
    dims: &'a [Dim],
    at: SmallVec<[usize; 6]>,
    next: Option<(usize, usize)>,
}

impl<'a> Parts<'a> {
    #[inline(always)]
    fn new(dims: &'a [Dim], first: usize) -> Parts<'a> {
        Parts { dims, at: SmallVec::from_elem(0, dims.len()), next: Some((first, 0)) }
    }
}

impl Iterator for Parts<'_> {
    type Item = (usize, usize);
    #[inline(always)]
    fn next(&mut self) -> Option<(usize, usize)> {
        let here = self.next?;
        let (mut from, mut to) = here;
        self.next = None;
        // Increments the innermost dimension; at its end it wraps and carries into the next outer one.
        for (at, dim) in self.at.iter_mut().zip(self.dims).rev() {
            *at += 1;
            if *at < dim.size {
                self.next = Some((from.wrapping_add_signed(dim.from), to + dim.to));
                break;
            }
            from = from.wrapping_add_signed(-dim.from * (dim.size as isize - 1));
            to -= dim.to * (dim.size - 1);
            *at = 0;
        }
        Some(here)
    }
}

/// A matrix with fewer rows or columns is copied element by element.
const FEW: usize = 4;

/// Rows and columns of a tile of a transpose.
const TILE: usize = 16;

/// Rows and columns per block: as many pages as the TLB holds.
const BLOCK: usize = 256;

/// Copies a matrix with row stride 1 in the source and column stride 1 in the destination.
#[inline(always)]
fn transpose<T: Pod>(from: &[T], to: &mut [T], rows: Dim, columns: Dim) {
    for j in (0..columns.size).step_by(BLOCK) {
        for i in (0..rows.size).step_by(BLOCK) {
            block(from, to, rows, columns, i..rows.size.min(i + BLOCK), j..columns.size.min(j + BLOCK));
        }
    }
}

#[inline(always)]
fn block<T: Pod>(from: &[T], to: &mut [T], rows: Dim, columns: Dim, is: Range<usize>, js: Range<usize>) {
    let stride = columns.from as usize;
    // Lines of a tile that are a power of two apart compete for one cache set. So a tile is transposed in a buffer, and
    // each line is read and written once, whole.
    let (mut tile, mut other) = (Tile([T::zeroed(); TILE * TILE]), Tile([T::zeroed(); TILE * TILE]));
    for j in js.clone().step_by(TILE) {
        for i in is.clone().step_by(TILE) {
            let (height, width) = (TILE.min(is.end - i), TILE.min(js.end - j));
            let (sources, places) =
                (Lines { first: j * stride + i, stride }, Lines { first: i * rows.to + j, stride: rows.to });
            // The lengths are constants if possible, so that most lines are moved by two instructions.
            if (height, width) == (TILE, TILE) {
                turn(from, to, (TILE, TILE), sources, places, &mut tile, &mut other);
            } else {
                turn(from, to, (height, width), sources, places, &mut tile, &mut other);
            }
        }
    }
}

/// A tile, or the buffer in which it is transposed. Aligned so that vectors do not cross cache lines.
#[repr(align(64))]
struct Tile<T>([T; TILE * TILE]);

/// The offsets of the lines of a tile.
struct Lines {
    first: usize,
    stride: usize,
}

#[inline(always)]
fn turn<T: Pod>(
    from: &[T],
    to: &mut [T],
    (height, width): (usize, usize),
    sources: Lines,
    places: Lines,
    Tile(tile): &mut Tile<T>,
    Tile(other): &mut Tile<T>,
) {
    for (k, line) in tile.chunks_exact_mut(TILE).enumerate().take(width) {
        let at = sources.first + k * sources.stride;
        line[..height].copy_from_slice(&from[at..at + height]);
    }
    // Four riffles exchange the four bits of the column number with those of the row number.
    riffle(tile, other);
    riffle(other, tile);
    riffle(tile, other);
    riffle(other, tile);
    for (k, line) in tile.chunks_exact(TILE).enumerate().take(height) {
        let at = places.first + k * places.stride;
        to[at..at + width].copy_from_slice(&line[..width]);
    }
}

/// Interleaves the two halves of a list.
#[inline(always)]
fn riffle<T: Pod>(from: &[T; TILE * TILE], to: &mut [T; TILE * TILE]) {
    let (low, high) = from.split_at(TILE * TILE / 2);
    for ((pair, low), high) in to.chunks_exact_mut(2).zip(low).zip(high) {
        pair[0] = *low;
        pair[1] = *high;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use consort_types::Dtype;

    /// The elements of a layout, one by one.
    fn plain(from: &[u16], layout: &Layout) -> Vec<u16> {
        (0..layout.numel())
            .map(|i| {
                let (mut rest, mut at) = (i, layout.start);
                for (size, stride) in layout.shape.iter().zip(&layout.strides).rev() {
                    at += rest % size * stride;
                    rest /= size;
                }
                from[at]
            })
            .collect()
    }

    fn view<'a>(from: &'a [u16], layout: &'a Layout) -> View<'a> {
        let bytes = bytemuck::cast_slice(&from[layout.start..]);
        View { dtype: Dtype::Bf16, shape: &layout.shape, strides: &layout.strides, bytes }
    }

    fn layouts() -> Vec<Layout> {
        let base = Layout::contiguous(&[5, 70, 40]);
        let mut list = vec![
            base.clone(),
            base.permuted(&[1, 0, 2]),
            base.permuted(&[2, 0, 1]),
            base.permuted(&[0, 2, 1]),
            base.permuted(&[2, 1, 0]),
            base.narrowed(2, 3, 33).permuted(&[0, 2, 1]),
            base.narrowed(1, 1, 64).narrowed(2, 4, 32).permuted(&[2, 1, 0]),
            Layout::contiguous(&[35, 100, 4]).permuted(&[1, 0, 2]),
            Layout::contiguous(&[700, 20]).permuted(&[1, 0]),
            base.narrowed(2, 7, 1),
            base.narrowed(1, 7, 1).permuted(&[2, 1, 0]),
            base.narrowed(1, 7, 0),
            Layout::contiguous(&[5, 1, 40]).broadcast(&[3, 5, 9, 40]),
            Layout::contiguous(&[5, 40, 1]).broadcast(&[5, 40, 7]),
            Layout::contiguous(&[]),
            Layout::contiguous(&[]).broadcast(&[2, 3]),
        ];
        let mut step = base.narrowed(2, 1, 13);
        step.strides[2] = 3;
        list.push(step);
        list
    }

    #[test]
    fn every_layout_is_copied_like_one_by_one() {
        let from: Vec<u16> = (0..5 * 70 * 40).map(|i| i as u16).collect();
        for layout in layouts() {
            let mut out = vec![0u16; layout.numel()];
            copy(&Threads::ONE, &view(&from, &layout), bytemuck::cast_slice_mut(&mut out)).unwrap();
            assert_eq!(out, plain(&from, &layout), "{layout:?}");
            // The same into a box of a larger tensor, whose other elements must not change.
            let shape: Vec<usize> = layout.shape.iter().map(|size| size + 2).collect();
            let mut box_ = Layout::contiguous(&shape);
            (0..shape.len()).for_each(|i| box_ = box_.narrowed(i, 1, layout.shape[i]));
            let mut out = vec![7u16; shape.iter().product()];
            copy_into(&Threads::ONE, &view(&from, &layout), bytemuck::cast_slice_mut(&mut out), &box_)
                .unwrap();
            assert_eq!(plain(&out, &box_), plain(&from, &layout), "{layout:?}");
            let inside = plain(&out, &box_).iter().filter(|x| **x == 7).count();
            let outside = out.len() - layout.numel();
            assert_eq!(out.iter().filter(|x| **x == 7).count(), outside + inside, "{layout:?}");
        }
    }

    #[test]
    fn threads_copy_the_same() {
        let from: Vec<u16> = (0..2048 * 1030).map(|i| (i % 65521) as u16).collect();
        let base = Layout::contiguous(&[2048, 1030]);
        for layout in [base.clone(), base.permuted(&[1, 0]), base.narrowed(1, 1, 1024)] {
            let (mut one, mut two) = (vec![0u16; layout.numel()], vec![0u16; layout.numel()]);
            copy(&Threads::ONE, &view(&from, &layout), bytemuck::cast_slice_mut(&mut one)).unwrap();
            copy(&Threads::new(2), &view(&from, &layout), bytemuck::cast_slice_mut(&mut two)).unwrap();
            assert_eq!(one, plain(&from, &layout));
            assert_eq!(one, two);
            // Into a transposed box.
            let [height, width] = [layout.shape[0], layout.shape[1]];
            let whole = Layout::contiguous(&[width + 1, height + 2]);
            let turned = whole.narrowed(0, 1, width).narrowed(1, 2, height).permuted(&[1, 0]);
            let mut out = vec![7u16; whole.numel()];
            let bytes = bytemuck::cast_slice_mut(&mut out);
            copy_into(&Threads::new(2), &view(&from, &layout), bytes, &turned).unwrap();
            assert_eq!(plain(&out, &turned), one);
        }
    }

    #[test]
    fn flips_of_every_layout() {
        let from: Vec<u16> = (0..5 * 70 * 40).map(|i| i as u16).collect();
        for layout in layouts() {
            for flipped in 0..1usize << layout.shape.len() {
                let dims: Vec<usize> = (0..layout.shape.len()).filter(|i| flipped >> i & 1 == 1).collect();
                let mut out = vec![0u16; layout.numel()];
                copy_flipped(&Threads::ONE, &view(&from, &layout), &dims, bytemuck::cast_slice_mut(&mut out))
                    .unwrap();
                // A flip of a flip is the tensor itself.
                let (there, mut back) = (Layout::contiguous(&layout.shape), vec![0u16; layout.numel()]);
                copy_flipped(&Threads::ONE, &view(&out, &there), &dims, bytemuck::cast_slice_mut(&mut back))
                    .unwrap();
                assert_eq!(back, plain(&from, &layout), "{layout:?} {dims:?}");
                if dims.len() == layout.shape.len() {
                    out.reverse();
                    assert_eq!(out, back, "{layout:?}");
                }
            }
        }
    }
}
