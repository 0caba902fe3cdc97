//! Operands as runs of consecutive elements, whatever their strides and their element type.
//!
//! Results lie in row-major order, so that a place in an operand is a number: how many elements come before it. An
//! operand whose elements lie together and are what is computed with is borrowed; others are copied in blocks.

use smallvec::SmallVec;

use super::formats::Format;
use super::{Arg, KernelError, View};

/// Sizes and strides, outermost first; dimensions that lie like one are one.
type Steps = SmallVec<[(usize, usize); 6]>;

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
    fn borrow(&self, at: usize, len: usize) -> Option<&'a [F::Compute]> {
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
        &block[..len]
    }
}

/// Where the element at `at` lies, and its coordinates.
fn place(steps: &[(usize, usize)], at: usize) -> (usize, SmallVec<[usize; 6]>) {
    let (mut rest, mut offset) = (at, 0);
    let mut coordinates = SmallVec::from_elem(0, steps.len());
    for (coordinate, (size, stride)) in coordinates.iter_mut().zip(steps).rev() {
        *coordinate = rest % size;
        offset += *coordinate * stride;
        rest /= size;
    }
    (offset, coordinates)
}

fn load_rows<F: Format>(stored: &[F::Stored], steps: &[(usize, usize)], at: usize, block: &mut [F::Compute]) {
    let Some((&(inner, stride), outer)) = steps.split_last() else { return };
    let (mut offset, mut coordinates) = place(outer, at / inner);
    let (mut column, mut rest) = (at % inner, block);
    loop {
        let (run, after) = rest.split_at_mut(rest.len().min(inner - column));
        load_run::<F>(&stored[offset + column * stride..], stride, run);
        if after.is_empty() {
            return;
        }
        (rest, column) = (after, 0);
        // The next row: the innermost coordinate that is not at its end goes on, those within begin again.
        for (coordinate, (size, step)) in coordinates.iter_mut().zip(outer).rev() {
            *coordinate += 1;
            offset += step;
            if *coordinate < *size {
                break;
            }
            offset -= size * step;
            *coordinate = 0;
        }
    }
}

/// Elements that lie `stride` apart.
pub(crate) fn load_run<F: Format>(stored: &[F::Stored], stride: usize, run: &mut [F::Compute]) {
    match stride {
        0 => run.fill(F::widen(stored[0])),
        1 => F::load(&stored[..run.len()], run),
        _ => run.iter_mut().zip(stored.iter().step_by(stride)).for_each(|(to, from)| *to = F::widen(*from)),
    }
}
