//! Operands as runs of consecutive elements, whatever their strides and their element type.
//!
//! Results are in row-major order, so a position in an operand is a row-major index. Contiguous elements that need no
//! conversion are borrowed; others are copied in blocks.

use smallvec::SmallVec;

use super::formats::Format;
use super::{Arg, KernelError, View};

/// Sizes and strides, outermost first, with adjacent dimensions coalesced.
pub(crate) type Steps = SmallVec<[(usize, usize); 6]>;

/// Rows of at least this length are borrowed one by one, shorter ones are copied several at a time.
const LONG_ROW: usize = 256;

/// An operand to be read in row-major order.
pub(crate) enum Source<'a, F: Format> {
    /// Contiguous elements in row-major order.
    Whole(&'a [F::Stored]),
    /// Any other layout.
    Strided(&'a [F::Stored], Steps),
    /// The operand aliases the result.
    Result,
}

/// The dimensions of a view, with adjacent ones coalesced. There is at least one.
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
        stored.map(Source::Whole).map_err(|error| KernelError::new(format!("storage: {error}")))
    }

    fn of_view(view: &View<'a>) -> Result<Self, KernelError> {
        let stored = view.elements()?;
        if view.is_contiguous() {
            return Ok(Source::Whole(stored));
        }
        Ok(Source::Strided(stored, coalesce(view.shape, view.strides)))
    }

    /// If runs may be borrowed, the row length, at multiples of which they end.
    pub(crate) fn row(&self) -> Option<usize> {
        match self {
            Source::Strided(stored, steps) if F::borrow(&stored[..0]).is_some() => {
                steps.last().filter(|(size, stride)| *stride == 1 && *size >= LONG_ROW).map(|(size, _)| *size)
            }
            _ => None,
        }
    }

    /// Whether one element is broadcast.
    fn is_constant(&self) -> bool {
        matches!(self, Source::Strided(_, steps) if steps[..].iter().all(|(_, stride)| *stride == 0))
    }

    /// `len` elements from index `at`, if they are contiguous and need no conversion.
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

    /// `len` elements from index `at`, borrowed or in the block. `result` is the part of the result that an aliasing
    /// operand occupies. A block that has been `used` before may still hold the elements.
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

    /// Copies elements from index `at` into `to`. `result` is the part of the result that an aliasing operand occupies.
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

/// The offset of the element at index `at`, and its coordinates.
pub(crate) fn place(steps: &[(usize, usize)], at: usize) -> (usize, SmallVec<[usize; 6]>) {
    let (mut rest, mut offset) = (at, 0);
    let mut coordinates = SmallVec::from_elem(0, steps.len());
    for (coordinate, (size, stride)) in coordinates.iter_mut().zip(steps).rev() {
        // Avoids a division by zero; an empty tensor has no valid index.
        let size = (*size).max(1);
        *coordinate = rest % size;
        offset += *coordinate * stride;
        rest /= size;
    }
    (offset, coordinates)
}

/// The offsets of successive elements in row-major order.
pub(crate) struct Offsets<'a> {
    steps: &'a [(usize, usize)],
    coordinates: SmallVec<[usize; 6]>,
    offset: usize,
}

impl<'a> Offsets<'a> {
    /// Starts at the element with index `at`.
    pub(crate) fn new(steps: &'a [(usize, usize)], at: usize) -> Offsets<'a> {
        let (offset, coordinates) = place(steps, at);
        Offsets { steps, coordinates, offset }
    }

    /// The offset of the next element. After the last it wraps around to the first.
    pub(crate) fn next_offset(&mut self) -> usize {
        let offset = self.offset;
        // Increments the innermost coordinate; at its end it wraps and carries into the next outer one.
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

/// `len` elements `stride` apart, from the first on, borrowed or in the block.
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

/// Loads elements `stride` apart.
fn load_run<F: Format>(stored: &[F::Stored], stride: usize, run: &mut [F::Compute]) {
    match stride {
        0 => run.fill(F::widen(stored[0])),
        1 => F::load(&stored[..run.len()], run),
        _ => run.iter_mut().zip(stored.iter().step_by(stride)).for_each(|(to, from)| *to = F::widen(*from)),
    }
}
