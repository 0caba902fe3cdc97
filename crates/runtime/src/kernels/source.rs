//! Operands as runs of consecutive elements, whatever their strides and their element type.
//!
//! Results lie in row-major order, so that a place in an operand is a number: how many elements come before it. An
//! operand whose elements lie together and are what is computed with is borrowed; others are copied in blocks.

use smallvec::SmallVec;

use super::formats::Format;
use super::{Arg, KernelError, View};

/// Sizes and strides, outermost first; dimensions that lie like one are one.
pub(crate) type Steps = SmallVec<[(usize, usize); 6]>;

/// Rows at least so long are borrowed one by one, shorter ones are copied several at a time.
const LONG_ROW: usize = 256;

/// An operand to be read in row-major order.
pub(crate) enum Source<'a, F: Format> {
    /// The elements lie in row-major order without gaps.
    Whole(&'a [F::Stored]),
    /// They lie otherwise.
    Strided(&'a [F::Stored], Steps),
    /// They lie where the result goes.
    Result,
}

/// The dimensions of a view with those taken together that lie like one. There is at least one.
pub(crate) fn coalesce(shape: &[usize], strides: &[usize]) -> Steps {
    let mut steps = Steps::new();
    for (&size, &stride) in shape.iter().zip(strides) {
        match steps.last_mut() {
            _ if size == 1 => {}
            Some((outer, step)) if *step == size * stride => (*outer, *step) = (*outer * size, stride),
            _ => steps.push((size, stride)),
        }
    }
    if steps.is_empty() {
        steps.push((1, 1));
    }
    steps
}

impl<'a, F: Format> Source<'a, F> {
    pub(crate) fn new(arg: &Arg<'a>) -> Result<Self, KernelError> {
        match arg {
            Arg::Result => Ok(Source::Result),
            Arg::View(view) => Self::of_view(view),
        }
    }

    /// Elements in row-major order without gaps.
    pub(crate) fn of_bytes(bytes: &'a [u8]) -> Result<Self, KernelError> {
        let stored = bytemuck::try_cast_slice(bytes);
        stored.map(Source::Whole).map_err(|error| KernelError(format!("storage: {error}")))
    }

    fn of_view(view: &View<'a>) -> Result<Self, KernelError> {
        let stored = view.elements()?;
        if view.is_contiguous() {
            return Ok(Source::Whole(stored));
        }
        Ok(Source::Strided(stored, coalesce(view.shape, view.strides)))
    }

    /// Where a run of elements may be borrowed, it ends at a multiple of this.
    pub(crate) fn row(&self) -> Option<usize> {
        match self {
            Source::Strided(stored, steps) if F::borrow(&stored[..0]).is_some() => {
                steps.last().filter(|(size, stride)| *stride == 1 && *size >= LONG_ROW).map(|(size, _)| *size)
            }
            _ => None,
        }
    }

    /// Whether all elements are one.
    fn is_constant(&self) -> bool {
        matches!(self, Source::Strided(_, steps) if steps[..].iter().all(|(_, stride)| *stride == 0))
    }

    /// `len` elements from the one at `at` on, where they lie together and are what is computed with.
    pub(crate) fn borrow(&self, at: usize, len: usize) -> Option<&'a [F::Compute]> {
        match self {
            Source::Whole(stored) => F::borrow(&stored[at..at + len]),
            Source::Strided(stored, steps) => {
                let &(inner, stride) = steps.last()?;
                let (row, column) = (at / inner, at % inner);
                if stride != 1 || column + len > inner {
                    return None;
                }
                let (offset, _) = place(&steps[..steps.len() - 1], row);
                F::borrow(&stored[offset + column..offset + column + len])
            }
            Source::Result => None,
        }
    }

    /// `len` elements from the one at `at` on, borrowed or in the block. `result` is what lies where they would go. A
    /// block that has been `used` before may still hold what is asked for.
    pub(crate) fn run<'b>(
        &self,
        at: usize,
        len: usize,
        result: &[F::Stored],
        block: &'b mut [F::Compute],
        used: bool,
    ) -> &'b [F::Compute]
    where
        'a: 'b,
    {
        if let Some(run) = self.borrow(at, len) {
            return run;
        }
        self.load(at, len, result, block, used);
        &block[..len]
    }

    /// Copies elements from the one at `at` on to where `to` begins. `result` is what lies where they would go.
    pub(crate) fn copy(&self, at: usize, result: &[F::Stored], to: &mut [F::Compute]) {
        let len = to.len();
        match self.borrow(at, len) {
            Some(run) => to.copy_from_slice(run),
            None => self.load(at, len, result, to, false),
        }
    }

    fn load(&self, at: usize, len: usize, result: &[F::Stored], block: &mut [F::Compute], used: bool) {
        match self {
            Source::Whole(stored) => F::load(&stored[at..at + len], &mut block[..len]),
            Source::Strided(stored, _) if self.is_constant() => {
                if !used {
                    block.fill(F::widen(stored[0]));
                }
            }
            Source::Strided(stored, steps) => load_rows::<F>(stored, steps, at, &mut block[..len]),
            Source::Result => F::load(result, &mut block[..len]),
        }
    }
}

/// Where the element at `at` lies, and its coordinates.
pub(crate) fn place(steps: &[(usize, usize)], at: usize) -> (usize, SmallVec<[usize; 6]>) {
    let (mut rest, mut offset) = (at, 0);
    let mut coordinates = SmallVec::from_elem(0, steps.len());
    for (coordinate, (size, stride)) in coordinates.iter_mut().zip(steps).rev() {
        // Of nothing there is no place to be asked for.
        let size = (*size).max(1);
        *coordinate = rest % size;
        offset += *coordinate * stride;
        rest /= size;
    }
    (offset, coordinates)
}

/// Where elements lie, one after the other in row-major order.
pub(crate) struct Offsets<'a> {
    steps: &'a [(usize, usize)],
    coordinates: SmallVec<[usize; 6]>,
    offset: usize,
}

impl<'a> Offsets<'a> {
    /// From the element at `at` on.
    pub(crate) fn new(steps: &'a [(usize, usize)], at: usize) -> Offsets<'a> {
        let (offset, coordinates) = place(steps, at);
        Offsets { steps, coordinates, offset }
    }

    /// Where the next one lies. After the last comes the first again.
    pub(crate) fn next_offset(&mut self) -> usize {
        let offset = self.offset;
        // The innermost coordinate that is not at its end goes on, those within begin again.
        for (coordinate, (size, step)) in self.coordinates.iter_mut().zip(self.steps).rev() {
            *coordinate += 1;
            self.offset += step;
            if *coordinate < *size {
                break;
            }
            self.offset -= size * step;
            *coordinate = 0;
        }
        offset
    }
}

fn load_rows<F: Format>(stored: &[F::Stored], steps: &[(usize, usize)], at: usize, block: &mut [F::Compute]) {
    let Some((&(inner, stride), outer)) = steps.split_last() else { return };
    let mut rows = Offsets::new(outer, at / inner);
    let (mut column, mut rest) = (at % inner, block);
    while !rest.is_empty() {
        let (run, after) = rest.split_at_mut(rest.len().min(inner - column));
        load_run::<F>(&stored[rows.next_offset() + column * stride..], stride, run);
        (rest, column) = (after, 0);
    }
}

/// `len` elements that lie `stride` apart, the first one first, borrowed or in the block.
#[inline]
pub(crate) fn strided<'b, F: Format>(
    stored: &'b [F::Stored],
    stride: usize,
    len: usize,
    block: &'b mut [F::Compute],
) -> &'b [F::Compute] {
    if stride == 1
        && let Some(run) = F::borrow(&stored[..len])
    {
        return run;
    }
    load_run::<F>(stored, stride, &mut block[..len]);
    &block[..len]
}

/// Elements that lie `stride` apart.
fn load_run<F: Format>(stored: &[F::Stored], stride: usize, run: &mut [F::Compute]) {
    match stride {
        0 => run.fill(F::widen(stored[0])),
        1 => F::load(&stored[..run.len()], run),
        _ => run.iter_mut().zip(stored.iter().step_by(stride)).for_each(|(to, from)| *to = F::widen(*from)),
    }
}
