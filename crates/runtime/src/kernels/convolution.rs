//! `conv1d` and `conv2d`: the patches that the kernel sees become a matrix (im2col), which `gemm` multiplies with the
//! weight. If a group has few output channels, as in depthwise convolutions, rows of x are accumulated directly. A 1-d
//! convolution is a 2-d one with a first dimension of size 1.
//!
//! Sums of 16-bit floats are accumulated in `f32` and rounded once. Padding becomes zeros in the matrix, which times an
//! infinite weight would give NaN; so weights that are not all finite are also accumulated directly.

use std::ops::Range;

use consort_ir::ops::{Conv1d, Conv2d, OpDef};
use consort_types::Dtype;
use half::{bf16, f16};

use crate::kernels::element::{Element, Wide};
use crate::kernels::gemm::{Gemm, Mat, MatMut, gemm};
use crate::kernels::isa::{Loop, vectorize};
use crate::kernels::operand::attributes;
use crate::kernels::scratch::with_scratch;
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, View, ViewMut};

pub(crate) static KERNELS: &[Kernel] = &[
    Kernel { op: "conv1d", family: "convolution", in_place: false, strided: true, run: run_1d },
    Kernel { op: "conv2d", family: "convolution", in_place: false, strided: true, run: run_2d },
];

/// Elements of a block of the patch matrix: a quarter of an L2 cache.
const BLOCK: usize = 1 << 16;

/// Groups with fewer output channels are computed directly.
const FEW_CHANNELS: usize = 4;

/// Sums of a row that are computed at a time.
const ROW: usize = 1024;

fn run_1d(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let op: &Conv1d = attributes(op)?;
    let moves = Moves {
        stride: [1, op.stride],
        padding: [0, op.padding],
        dilation: [1, op.dilation],
        groups: op.groups,
    };
    run(cx, moves, args, results)
}

fn run_2d(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let op: &Conv2d = attributes(op)?;
    let two =
        |list: &[usize]| <[usize; 2]>::try_from(list).map_err(|error| KernelError::new(error.to_string()));
    let moves = Moves {
        stride: two(&op.stride)?,
        padding: two(&op.padding)?,
        dilation: two(&op.dilation)?,
        groups: op.groups,
    };
    run(cx, moves, args, results)
}

/// Stride, padding and dilation, down and across.
struct Moves {
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
}

fn run(
    cx: &KernelCx<'_>,
    moves: Moves,
    args: &[Arg<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let ([Arg::View(x), Arg::View(weight)], [out]) = (args, results) else {
        return Err(KernelError::new("expected two operands that lie apart from the result"));
    };
    match x.dtype {
        Dtype::F32 => convolve::<f32>(cx, moves, x, weight, out),
        Dtype::F64 => convolve::<f64>(cx, moves, x, weight, out),
        Dtype::F16 => convolve::<f16>(cx, moves, x, weight, out),
        Dtype::Bf16 => convolve::<bf16>(cx, moves, x, weight, out),
        other => Err(KernelError::new(("a float type", other.to_string()))),
    }
}

/// Sizes or strides in four dimensions.
fn four(dims: &[usize], missing: usize) -> Result<[usize; 4], KernelError> {
    match *dims {
        [a, b, d] => Ok([a, b, missing, d]),
        [a, b, c, d] => Ok([a, b, c, d]),
        _ => Err(KernelError::new(("three or four dimensions", dims.len().to_string()))),
    }
}

fn convolve<E>(
    cx: &KernelCx<'_>,
    moves: Moves,
    x: &View<'_>,
    weight: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), KernelError>
where
    E: Element,
    E::Wide: Gemm,
{
    let [_, channels, down, across] = four(out.shape, 1)?;
    let weight_shape = four(weight.shape, 1)?;
    let x_shape = four(x.shape, 1)?;
    let (weight_strides, weights) = (four(weight.strides, 0)?, weight.elements::<E>()?);
    let data = x.elements::<E>()?;
    let out = out.elements::<E>()?;
    if out.is_empty() {
        return Ok(());
    }
    // The weight is read many times, so it is made contiguous and widened first.
    let [_, own, high, wide] = weight_shape;
    let mut ordered = Vec::with_capacity(weight_shape.iter().product());
    for at in 0..channels * own * high {
        let start = at / high / own * weight_strides[0]
            + at / high % own * weight_strides[1]
            + at % high * weight_strides[2];
        ordered.extend((0..wide).map(|i| weights[start + i * weight_strides[3]].wide()));
    }
    let finite =
        ordered.iter().all(|weight| weight.times_plus(E::Wide::ZERO, E::Wide::ZERO) == E::Wide::ZERO);
    let per_group = channels / moves.groups;
    let task = Task {
        moves: &moves,
        data,
        shape: x_shape,
        strides: four(x.strides, 0)?,
        kernel: [own, high, wide],
        weight: &ordered,
        places: [down, across],
        per_group,
        direct: per_group < FEW_CHANNELS || !finite,
    };
    let places = down * across;
    let mut parts = Vec::new();
    // A part is a group of an image, or some of its output positions.
    let step = task.block_places();
    for (i, out) in out.chunks_exact_mut(task.per_group * places).enumerate() {
        let mut rest = MatMut::new(out, [task.per_group, places], places);
        let mut start = 0;
        while start < places {
            let count = step.min(places - start);
            let (here, others) = rest.split_cols(count);
            parts.push((i, start..start + count, here));
            (rest, start) = (others, start + count);
        }
    }
    cx.threads.for_each(parts, |(i, places, out)| task.run(i, places, out));
    Ok(())
}

struct Task<'a, E: Element> {
    moves: &'a Moves,
    data: &'a [E],
    shape: [usize; 4],
    strides: [usize; 4],
    /// Channels, height and width.
    kernel: [usize; 3],
    weight: &'a [E::Wide],
    /// Output positions, down and across.
    places: [usize; 2],
    /// Output channels in a group.
    per_group: usize,
    /// Whether rows of x are accumulated directly, without a patch matrix.
    direct: bool,
}

impl<E> Task<'_, E>
where
    E: Element,
    E::Wide: Gemm,
{
    /// The number of kernel elements per output channel.
    fn depth(&self) -> usize {
        self.kernel.iter().product()
    }

    /// The number of output positions computed at a time: whole rows if computed directly.
    fn block_places(&self) -> usize {
        if self.direct {
            let rows = (BLOCK / self.places[1]).clamp(1, self.places[0]);
            return rows * self.places[1];
        }
        (BLOCK / self.depth().max(1)).next_multiple_of(64)
    }

    /// Computes some output positions of a group of an image.
    fn run(&self, part: usize, places: Range<usize>, mut out: MatMut<'_, E>) {
        let (batch, group) = (part / self.moves.groups, part % self.moves.groups);
        let depth = self.depth();
        let weight = &self.weight[group * self.per_group * depth..][..self.per_group * depth];
        if self.direct {
            return self.add_rows(batch, group, weight, places, out);
        }
        let count = places.len();
        with_scratch(depth * count + self.per_group * count, |scratch: &mut [E::Wide]| {
            let (seen, sums) = scratch.split_at_mut(depth * count);
            vectorize(See { task: self, batch, group, places, seen });
            let weight = Mat::new(weight, [self.per_group, depth], [depth, 1]);
            let seen = Mat::new(seen, [depth, count], [count, 1]);
            gemm(MatMut::new(sums, [self.per_group, count], count), false, weight, seen, E::Wide::ONE);
            for (row, sums) in sums.chunks_exact(count).enumerate() {
                out.put(row, 0, sums);
            }
        });
    }

    /// Accumulates rows of x, each times an element of the kernel.
    fn add_rows(
        &self,
        batch: usize,
        group: usize,
        weight: &[E::Wide],
        places: Range<usize>,
        mut out: MatMut<'_, E>,
    ) {
        let across = self.places[1];
        let mut sums = [E::Wide::ZERO; ROW];
        for channel in 0..self.per_group {
            let weight = &weight[channel * self.depth()..][..self.depth()];
            for row in places.start / across..places.end / across {
                for first in (0..across).step_by(ROW) {
                    let columns = first..across.min(first + ROW);
                    let sums = &mut sums[..columns.len()];
                    vectorize(AddRow { task: self, batch, group, weight, row, first, sums });
                    out.put(channel, row * across - places.start + first, sums);
                }
            }
        }
    }

    /// The offset of the row of x that the kernel's row `tap` reads for output row `row`; `None` outside x.
    #[inline(always)]
    fn row_start(&self, batch: usize, channel: usize, row: usize, tap: usize) -> Option<usize> {
        let place = place(row, self.moves.stride[0], tap, self.moves.dilation[0], self.moves.padding[0])?;
        let [x, y, z, _] = self.strides;
        (place < self.shape[2]).then(|| batch * x + channel * y + place * z)
    }

    /// The output columns for which the kernel's column `tap` reads inside x, and what it reads for the first of them.
    #[inline(always)]
    fn within(&self, columns: Range<usize>, tap: usize) -> (Range<usize>, usize) {
        let (stride, padding) = (self.moves.stride[1], self.moves.padding[1]);
        let ahead = tap.saturating_mul(self.moves.dilation[1]);
        let first = padding.saturating_sub(ahead).div_ceil(stride).clamp(columns.start, columns.end);
        let end = padding.saturating_add(self.shape[3]).saturating_sub(ahead).div_ceil(stride);
        let end = end.clamp(first, columns.end);
        let at = place(first, stride, tap, self.moves.dilation[1], padding).unwrap_or(0);
        (first..end, at)
    }
}

/// The index in x that kernel index `tap` reads for an output position; `None` before x. No product overflows if the
/// op's rule holds, but positions in the padding may be far outside.
#[inline(always)]
fn place(place: usize, stride: usize, tap: usize, dilation: usize, padding: usize) -> Option<usize> {
    place.saturating_mul(stride).saturating_add(tap.saturating_mul(dilation)).checked_sub(padding)
}

/// Writes the patch matrix: a row for each kernel element, a column for each output position.
struct See<'a, E: Element> {
    task: &'a Task<'a, E>,
    batch: usize,
    group: usize,
    places: Range<usize>,
    seen: &'a mut [E::Wide],
}

impl<E> Loop for See<'_, E>
where
    E: Element,
    E::Wide: Gemm,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let task = self.task;
        let ([own, high, wide], across) = (task.kernel, task.places[1]);
        let (step, count) = (task.moves.stride[1].saturating_mul(task.strides[3]), self.places.len());
        for (tap, to) in self.seen.chunks_exact_mut(count).enumerate() {
            let (channel, down, over) = (tap / wide / high, tap / wide % high, tap % wide);
            let channel = self.group * own + channel;
            let mut start = self.places.start;
            while start < self.places.end {
                let row = start / across;
                let end = self.places.end.min((row + 1) * across);
                let to = &mut to[start - self.places.start..end - self.places.start];
                let columns = start - row * across..end - row * across;
                start = end;
                let Some(from) = task.row_start(self.batch, channel, row, down) else {
                    to.fill(E::Wide::ZERO);
                    continue;
                };
                let (inside, at) = task.within(columns.clone(), over);
                let inside_to = inside.start - columns.start..inside.end - columns.start;
                to[..inside_to.start].fill(E::Wide::ZERO);
                to[inside_to.end..].fill(E::Wide::ZERO);
                let to = &mut to[inside_to];
                if to.is_empty() {
                    continue;
                }
                let from = &task.data[from + at * task.strides[3]..];
                match step {
                    1 => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.wide()),
                    0 => to.fill(from[0].wide()),
                    _ => {
                        to.iter_mut().zip(from.iter().step_by(step)).for_each(|(to, from)| *to = from.wide())
                    }
                }
            }
        }
    }
}

/// Accumulates part of a row of an output channel.
struct AddRow<'a, E: Element> {
    task: &'a Task<'a, E>,
    batch: usize,
    group: usize,
    weight: &'a [E::Wide],
    row: usize,
    first: usize,
    sums: &'a mut [E::Wide],
}

impl<E> Loop for AddRow<'_, E>
where
    E: Element,
    E::Wide: Gemm,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let task = self.task;
        let [own, high, wide] = task.kernel;
        let step = task.moves.stride[1].saturating_mul(task.strides[3]);
        let columns = self.first..self.first + self.sums.len();
        self.sums.fill(E::Wide::ZERO);
        for (tap, factor) in self.weight.iter().enumerate() {
            let (channel, down, over) = (tap / wide / high, tap / wide % high, tap % wide);
            let Some(from) = task.row_start(self.batch, self.group * own + channel, self.row, down) else {
                continue;
            };
            let (inside, at) = task.within(columns.clone(), over);
            let to = &mut self.sums[inside.start - columns.start..inside.end - columns.start];
            if to.is_empty() {
                continue;
            }
            let from = &task.data[from + at * task.strides[3]..];
            match step {
                1 => to.iter_mut().zip(from).for_each(|(to, x)| *to = x.wide().times_plus(*factor, *to)),
                0 => to.iter_mut().for_each(|to| *to = from[0].wide().times_plus(*factor, *to)),
                _ => {
                    let from = from.iter().step_by(step);
                    to.iter_mut().zip(from).for_each(|(to, x)| *to = x.wide().times_plus(*factor, *to));
                }
            }
        }
    }
}
