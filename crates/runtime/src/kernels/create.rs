//! Kernels of the ops that make tensors from their attributes alone.

use bytemuck::Pod;
use consort_ir::literal::Literal;
use consort_ir::ops::{Constant, Elements, IndexValue, Iota, OpDef};
use consort_types::Dtype;
use half::{bf16, f16};

use crate::kernels::movement::fill;
use crate::kernels::operand::attributes;
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, ViewMut};

pub(crate) static KERNELS: &[Kernel] = &[
    Kernel { op: "constant", family: "create", in_place: false, strided: true, run: constant },
    Kernel { op: "iota", family: "create", in_place: false, strided: true, run: iota },
    Kernel { op: "index", family: "create", in_place: false, strided: true, run: index },
];

fn constant(
    _cx: &KernelCx<'_>,
    op: &dyn OpDef,
    _args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let op = attributes::<Constant>(op)?;
    let n = out[0].numel();
    let list = match &op.value {
        _ if n == 0 => return Ok(()),
        Elements::Float(x) => return fill(&mut out[0], &Literal::floats(op.dtype, vec![], vec![*x])),
        Elements::Int(x) => return fill(&mut out[0], &Literal::ints(op.dtype, vec![], vec![*x])),
        Elements::Floats(list) => Literal::floats(op.dtype, vec![n], list.clone()),
        Elements::Ints(list) => Literal::ints(op.dtype, vec![n], list.clone()),
    };
    if list.numel() != n {
        return Err(KernelError::new((format!("{n} elements"), list.numel().to_string())));
    }
    out[0].bytes.copy_from_slice(&list.to_bytes());
    Ok(())
}

fn iota(
    _cx: &KernelCx<'_>,
    op: &dyn OpDef,
    _args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let dim = attributes::<Iota>(op)?.dim;
    let out = &mut out[0];
    match out.dtype {
        Dtype::F32 => count(out, dim, |i| i as f32),
        Dtype::F64 => count(out, dim, |i| i as f64),
        Dtype::F16 => count(out, dim, |i| f16::from_f32(i as f32).to_bits()),
        // Rounding to f32 first would round twice.
        Dtype::Bf16 => count(out, dim, |i| bf16::from_f64(Dtype::Bf16.round(i as f64)).to_bits()),
        Dtype::I32 => count(out, dim, |i| i as i32),
        Dtype::I64 => count(out, dim, |i| i as i64),
        Dtype::U8 | Dtype::Bool => count(out, dim, |i| i as u8),
    }
}

/// Writes to each element its index along a dimension.
fn count<T: Pod>(out: &mut ViewMut<'_>, dim: usize, number: impl Fn(usize) -> T) -> Result<(), KernelError> {
    let (size, run) = (out.shape[dim], out.shape[dim + 1..].iter().product::<usize>());
    let block = size * run;
    let elements = out.elements::<T>()?;
    if elements.is_empty() {
        return Ok(());
    }
    // The first block is computed, the others are copies of it.
    let (first, others) = elements.split_at_mut(block);
    if run == 1 {
        first.iter_mut().enumerate().for_each(|(i, x)| *x = number(i));
    } else {
        first.chunks_exact_mut(run).enumerate().for_each(|(i, row)| row.fill(number(i)));
    }
    others.chunks_exact_mut(block).for_each(|other| other.copy_from_slice(first));
    Ok(())
}

fn index(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    _args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let value = cx.sizes.index(&attributes::<IndexValue>(op)?.value)?;
    out[0].elements::<i64>()?.fill(value);
    Ok(())
}
