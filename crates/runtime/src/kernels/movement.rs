//! Kernels of the ops that move elements: views that are materialised, joins, boxes, padding, flips.

use consort_ir::literal::Literal;
use consort_ir::ops::{Concat, Flip, OpDef, Pad, UpdateSlice};
use consort_types::layout::Layout;

use crate::kernels::copy::{copy, copy_flipped, copy_into};
use crate::kernels::operand::{attributes, layout, part, view};
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, ViewMut};

pub(crate) static KERNELS: &[Kernel] = &[
    Kernel { op: "reshape", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "permute", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "spread", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "stop_gradient", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "recompute", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "keep", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "again", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "regather", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "slice", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "broadcast", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "split", family: "view", in_place: false, strided: true, run: write_out },
    Kernel { op: "update_slice", family: "movement", in_place: true, strided: true, run: update_slice },
    Kernel { op: "concat", family: "movement", in_place: false, strided: true, run: concat },
    Kernel { op: "pad", family: "movement", in_place: false, strided: true, run: pad },
    Kernel { op: "flip", family: "movement", in_place: false, strided: true, run: flip },
];

/// Materialises an op whose results are views of its operand.
fn write_out(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let x = view(args, 0)?;
    match op.view(&cx.sizes, &layout(&x))? {
        Some(layouts) => layouts
            .iter()
            .zip(out)
            .try_for_each(|(layout, out)| copy(cx.threads, &part(&x, layout), out.bytes)),
        // A reshape keeps the row-major order, so even if it is not a view it is a plain copy.
        None => copy(cx.threads, &x, out[0].bytes),
    }
}

fn outside(dim: usize, start: usize, size: usize, of: usize) -> KernelError {
    KernelError::new(format!("dimension {dim}: {size} places from {start} do not lie inside {of}"))
}

fn update_slice(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let op = attributes::<UpdateSlice>(op)?;
    // A part that aliases the result has the result's shape and replaces all of it.
    let Arg::View(small) = args[1] else { return Ok(()) };
    let mut to = Layout::contiguous(out[0].shape);
    for (i, start) in op.start.iter().enumerate() {
        let (start, size) = (cx.sizes.size(start)?, small.shape[i]);
        if start.saturating_add(size) > out[0].shape[i] {
            return Err(outside(i, start, size, out[0].shape[i]));
        }
        to = to.narrowed(i, start, size);
    }
    if let Arg::View(x) = args[0] {
        copy(cx.threads, &x, out[0].bytes)?;
    }
    copy_into(cx.threads, &small, out[0].bytes, &to)
}

fn concat(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let (op, whole) = (attributes::<Concat>(op)?, Layout::contiguous(out[0].shape));
    let mut start = 0;
    for i in 0..args.len() {
        let x = view(args, i)?;
        let size = x.shape[op.dim];
        copy_into(cx.threads, &x, out[0].bytes, &whole.narrowed(op.dim, start, size))?;
        start += size;
    }
    Ok(())
}

fn pad(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let (op, x) = (attributes::<Pad>(op)?, view(args, 0)?);
    let mut to = Layout::contiguous(out[0].shape);
    for (i, low) in op.low.iter().enumerate() {
        to = to.narrowed(i, cx.sizes.size(low)?, x.shape[i]);
    }
    if x.numel() < out[0].numel() {
        let one = if x.dtype.is_float() {
            Literal::floats(x.dtype, vec![], vec![op.value])
        } else {
            Literal::ints(x.dtype, vec![], vec![op.value as i64])
        };
        fill(&mut out[0], &one)?;
    }
    copy_into(cx.threads, &x, out[0].bytes, &to)
}

fn flip(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    copy_flipped(cx.threads, &view(args, 0)?, &attributes::<Flip>(op)?.dims, out[0].bytes)
}

/// Fills a tensor with the single element of another one of its type.
pub(crate) fn fill(out: &mut ViewMut<'_>, one: &Literal) -> Result<(), KernelError> {
    let bytes = one.to_bytes();
    match bytes[..] {
        [x] => out.bytes.fill(x),
        [a, b] => out.elements::<u16>()?.fill(u16::from_ne_bytes([a, b])),
        [a, b, c, d] => out.elements::<u32>()?.fill(u32::from_ne_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => {
            out.elements::<u64>()?.fill(u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
        }
        _ => return Err(KernelError::new(format!("an element of {} bytes", bytes.len()))),
    }
    Ok(())
}
