//! Kernels of placements: digests of tensors, and their comparison.

use std::borrow::Cow;

use consort_ir::literal::Literal;
use consort_ir::ops::{EqualOver, OpDef};
use consort_types::{Digest, Failure, Headline};

use crate::kernels::operand::attributes;
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, View, ViewMut, copy};

pub(crate) static KERNELS: &[Kernel] = &[
    Kernel { op: "digest", family: "placement", in_place: false, strided: true, run: digest },
    Kernel { op: "equal_over", family: "placement", in_place: false, strided: true, run: equal_over },
];

/// The elements in row-major order; copied if there are gaps between them.
fn packed<'a>(cx: &KernelCx<'_>, x: &View<'a>) -> Result<Cow<'a, [u8]>, KernelError> {
    let length = x.numel() * x.dtype.size();
    if x.is_contiguous() {
        return Ok(Cow::Borrowed(&x.bytes[..length]));
    }
    let mut bytes = vec![0; length];
    copy::copy(cx.threads, x, &mut bytes)?;
    Ok(Cow::Owned(bytes))
}

fn view<'a>(args: &[Arg<'a>], number: usize) -> Result<View<'a>, KernelError> {
    match args.get(number) {
        Some(Arg::View(view)) => Ok(*view),
        _ => Err(KernelError::new("expected an operand that is no result")),
    }
}

/// The most elements that an error prints.
const SHOWN: usize = 8;

fn digest(
    cx: &KernelCx<'_>,
    _: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let digest = Digest::of_many(&packed(cx, &view(args, 0)?)?);
    out[0].bytes.copy_from_slice(&digest.to_le_bytes());
    Ok(())
}

/// Without a result if it runs as a view.
fn equal_over(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let over = attributes::<EqualOver>(op)?.over;
    let (x, all) = (view(args, 0)?, packed(cx, &view(args, 1)?)?);
    let bytes = packed(cx, &x)?;
    let own = Digest::of_many(&bytes).to_le_bytes();
    let (all, _) = all.as_chunks::<8>();
    if all.iter().any(|other| *other != own) {
        let members = cx.sizes.mesh.members(over, cx.sizes.rank).unwrap_or_default();
        let ranks: Vec<usize> = members.iter().map(|rank| rank.0 as usize).collect();
        let expected = format!("a tensor that is equal over {}", cx.sizes.mesh.group_text(over));
        let failure = Failure::new(Headline::unequal(expected, &ranks, all));
        let text = (x.numel() <= SHOWN).then(|| Literal::from_bytes(x.dtype, x.shape.to_vec(), &bytes));
        return Err(KernelError(match text.flatten() {
            Some(own) => failure.row(format!("rank {} has {}", cx.sizes.rank.0, own.text())),
            None => failure.note(
                "outside of a compiled function, `expect_equal_over` names the first element that differs",
            ),
        }));
    }
    if let [out] = out {
        out.bytes.copy_from_slice(&bytes);
    }
    Ok(())
}
