//! Ops that need move nothing: their results are views of their operand, where its layout allows.

use smallvec::{SmallVec, smallvec};

use crate::layout::{Dims, Layout};
use crate::ops::{Broadcast, EvalCx, EvalError, OpDef, Permute, Reshape, Slice, Split};

/// Layouts of an op's results.
pub type Layouts = SmallVec<[Layout; 1]>;

/// The ops whose results are views.
pub const VIEWS: [&str; 5] = ["broadcast", "permute", "reshape", "slice", "split"];

/// The results of an op as views of its operand; none where elements must move.
pub fn view(op: &dyn OpDef, sizes: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
    let op = op.as_any();
    if let Some(Permute { dims }) = op.downcast_ref() {
        return Ok(Some(smallvec![x.permuted(dims)]));
    }
    if let Some(Reshape { shape }) = op.downcast_ref() {
        let shape = numbers(sizes, shape)?;
        return Ok(x.reshaped(&shape).map(|layout| smallvec![layout]));
    }
    if let Some(Broadcast { shape }) = op.downcast_ref() {
        return Ok(Some(smallvec![x.broadcast(&numbers(sizes, shape)?)]));
    }
    if let Some(Slice { start, size, step }) = op.downcast_ref() {
        let (start, size) = (numbers(sizes, start)?, numbers(sizes, size)?);
        let mut layout = x.clone();
        for dim in 0..size.len() {
            let last = start[dim].saturating_add(size[dim].saturating_sub(1).saturating_mul(step[dim]));
            if size[dim] > 0 && last >= x.shape[dim] {
                return Err(EvalError(format!(
                    "dimension {dim}: {} places from {} do not lie inside {}",
                    size[dim], start[dim], x.shape[dim]
                )));
            }
            layout = layout.narrowed(dim, start[dim], size[dim]);
            // A single place may have any step.
            layout.strides[dim] = layout.strides[dim].saturating_mul(step[dim]);
        }
        return Ok(Some(smallvec![layout]));
    }
    if let Some(Split { dim, sizes: parts }) = op.downcast_ref() {
        let mut start = 0;
        let part = |size: &usize| {
            let layout = x.narrowed(*dim, start, *size);
            start += size;
            layout
        };
        return Ok(Some(numbers(sizes, parts)?.iter().map(part).collect()));
    }
    Ok(None)
}

fn numbers(sizes: &EvalCx<'_>, list: &[crate::index::Index]) -> Result<Dims, EvalError> {
    list.iter().map(|size| sizes.size(size)).collect()
}

#[cfg(test)]
mod tests {
    use crate::index::Index;
    use crate::mesh::{Mesh, Rank};

    use super::*;

    #[test]
    fn a_slice_with_steps_is_a_view() {
        let mesh = Mesh::default();
        let sizes = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &Default::default() };
        let x = Layout::contiguous(&[6, 8]);
        let list = |numbers: [i64; 2]| numbers.map(Index::constant).to_vec();
        let op = Slice { start: list([1, 2]), size: list([2, 3]), step: vec![3, 2] };
        let views = view(&op, &sizes, &x).expect("it lies inside").expect("it is a view");
        assert_eq!((views[0].start, &views[0].strides[..]), (10, &[24, 2][..]));
        let op = Slice { start: list([1, 2]), size: list([2, 4]), step: vec![3, 2] };
        assert!(view(&op, &sizes, &x).is_err());
    }
}
