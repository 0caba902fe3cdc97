//! Copies of elements from one layout to another, by their width alone.
//!
//! Dimensions that lie alike on both sides are taken together first. What is left is copied in runs where both sides
//! have neighbours next to each other, in tiles where the sides disagree about which dimension that is, and one by one
//! where neither has it.

use bytemuck::Pod;
use smallvec::SmallVec;

use crate::kernels::isa::{Loop, vectorize};
use crate::kernels::{KernelError, View};
use crate::layout::{Layout, row_major, span};
use crate::threads::Threads;

/// A dimension of a copy: how many, and how far apart on both sides. A source may be walked backwards.
#[derive(Clone, Copy, Debug)]
struct Dim {
    size: usize,
    from: isize,
    to: usize,
}

type Dims = SmallVec<[Dim; 6]>;

/// Copies of fewer bytes are not worth a second thread.
const PART: usize = 1 << 20;

/// Copies a view to storage without gaps, in row-major order.
pub fn copy(threads: &Threads, view: &View<'_>, out: &mut [u8]) -> Result<(), KernelError> {
    let shape = view.shape;
    copy_into(threads, view, out, &Layout { shape: shape.into(), strides: row_major(shape), start: 0 })
}

/// Copies a view to the places of a layout of its shape. The layout is a box of a row-major one.
pub fn copy_into(
    threads: &Threads,
    view: &View<'_>,
    out: &mut [u8],
    layout: &Layout,
) -> Result<(), KernelError> {
    let all = view.shape.iter().zip(view.strides).zip(&layout.strides);
    let dims = all.map(|((size, from), to)| Dim { size: *size, from: *from as isize, to: *to }).collect();
    dispatch(threads, view, 0, out, layout, dims)
}

/// Copies a view to storage without gaps, in the opposite order along some dimensions.
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
    let dims = (0..view.shape.len()).map(dim).collect();
    dispatch(threads, view, first, out, &layout, dims)
}

fn dispatch(
    threads: &Threads,
    view: &View<'_>,
    first: usize,
    out: &mut [u8],
    layout: &Layout,
    dims: Dims,
) -> Result<(), KernelError> {
    if view.numel() == 0 {
        return Ok(());
    }
    match view.dtype.size() {
        1 => elements::<u8>(threads, view, first, out, layout, &dims),
        2 => elements::<u16>(threads, view, first, out, layout, &dims),
        4 => elements::<u32>(threads, view, first, out, layout, &dims),
        _ => elements::<u64>(threads, view, first, out, layout, &dims),
    }
}

fn elements<T: Pod + Send + Sync>(
    threads: &Threads,
    view: &View<'_>,
    first: usize,
    out: &mut [u8],
    layout: &Layout,
    dims: &Dims,
) -> Result<(), KernelError> {
    let storage = |error| KernelError(format!("storage: {error}"));
    let from = view.elements::<T>()?;
    let out = bytemuck::try_cast_slice_mut::<u8, T>(out).map_err(storage)?;
    let end = layout.start + span(&layout.shape, &layout.strides);
    let Some(to) = out.get_mut(layout.start..end) else {
        return Err(KernelError(format!("storage: expected {end} elements, got {}", out.len())));
    };
    let dims = coalesced(dims);
    let bytes = view.numel() * size_of::<T>();
    let Some(outer) = dims.first().filter(|_| threads.count() > 1 && bytes >= 2 * PART).copied() else {
        vectorize(Copy { dims: &dims, from, first, to });
        return Ok(());
    };
    // A row of the outermost dimension ends before the next begins, so rows can be given to threads.
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

/// The dimensions that count, with those taken together that lie like one on both sides.
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
    /// Where the first element lies in the source.
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
        match (inner.from, inner.to) {
            (1, 1) => {
                walk(outer, first, 0, &mut |a, b| to[b..b + size].copy_from_slice(&from[a..a + size]));
            }
            (0, 1) => walk(outer, first, 0, &mut |a, b| to[b..b + size].fill(from[a])),
            (-1, 1) => walk(outer, first, 0, &mut |a, b| {
                let line = from[a + 1 - size..=a].iter().rev();
                to[b..b + size].iter_mut().zip(line).for_each(|(to, from)| *to = *from);
            }),
            (stride, 1) if stride > 0 => {
                let Some(i) = outer.iter().position(|dim| dim.from == 1) else {
                    walk(outer, first, 0, &mut |a, b| {
                        let line = from[a..].iter().step_by(stride as usize);
                        to[b..b + size].iter_mut().zip(line).for_each(|(to, from)| *to = *from);
                    });
                    return;
                };
                let mut rest: Dims = outer.into();
                let rows = rest.remove(i);
                walk(&rest, first, 0, &mut |a, b| {
                    transpose(&from[a..], &mut to[b..], rows, *inner);
                });
            }
            (stride, step) => walk(outer, first, 0, &mut |a, b| {
                let mut at = a;
                for to in to[b..].iter_mut().step_by(step).take(size) {
                    *to = from[at];
                    at = at.wrapping_add_signed(stride);
                }
            }),
        }
    }
}

/// Calls `f` with where each inner part begins, in the source and in the destination.
#[inline(always)]
fn walk(dims: &[Dim], from: usize, to: usize, f: &mut impl FnMut(usize, usize)) {
    let (mut from, mut to) = (from, to);
    let mut at: SmallVec<[usize; 6]> = SmallVec::from_elem(0, dims.len());
    'parts: loop {
        f(from, to);
        // The innermost dimension goes on; one that is at its end starts again and the next one out goes on.
        for (at, dim) in at.iter_mut().zip(dims).rev() {
            *at += 1;
            if *at < dim.size {
                from = from.wrapping_add_signed(dim.from);
                to += dim.to;
                continue 'parts;
            }
            from = from.wrapping_add_signed(-dim.from * (dim.size as isize - 1));
            to -= dim.to * (dim.size - 1);
            *at = 0;
        }
        return;
    }
}

/// How many rows and columns a tile of a transpose has: a few cache lines wide on both sides.
const TILE: usize = 32;

/// Copies a matrix whose rows lie next to each other in the source, and whose columns do in the destination.
#[inline(always)]
fn transpose<T: Pod>(from: &[T], to: &mut [T], rows: Dim, columns: Dim) {
    let stride = columns.from as usize;
    // Lines of a tile that lie a power of two apart share a place in the cache. So a tile is turned in a buffer, and
    // each line is read and written once and whole.
    let mut tile = [[T::zeroed(); TILE]; TILE];
    for j in (0..columns.size).step_by(TILE) {
        let width = TILE.min(columns.size - j);
        for i in (0..rows.size).step_by(TILE) {
            let height = TILE.min(rows.size - i);
            if (width, height) == (TILE, TILE) {
                for (k, line) in tile.iter_mut().enumerate() {
                    let at = (j + k) * stride + i;
                    line.copy_from_slice(&from[at..at + TILE]);
                }
                for k in 0..TILE {
                    let at = (i + k) * rows.to + j;
                    let line: &mut [T] = &mut to[at..at + TILE];
                    for (to, column) in line.iter_mut().zip(&tile) {
                        *to = column[k];
                    }
                }
                continue;
            }
            for k in 0..height {
                let (a, b) = (j * stride + i + k, (i + k) * rows.to + j);
                let line = from[a..].iter().step_by(stride);
                to[b..b + width].iter_mut().zip(line).for_each(|(to, from)| *to = *from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use consort_ir::dtype::Dtype;

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
            // The same into a box of a larger tensor, whose other elements stay.
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
