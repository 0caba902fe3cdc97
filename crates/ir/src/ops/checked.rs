//! Answers of facets, checked against the inferred types. Users' ops may be wrong; a wrong answer must be an error of the
//! op, not a read of other memory.

use consort_types::Dtype;
use consort_types::layout::{Layout, row_major};

use crate::literal::{Data, Literal};
use crate::ops::{EvalCx, EvalError, Joined, Layouts, OpDef};

/// The results of an op by its evaluation; `wanted` are their inferred types.
pub fn eval_of(
    op: &dyn OpDef,
    cx: &EvalCx<'_>,
    args: &[&Literal],
    wanted: &[(Dtype, &[usize])],
) -> Result<Vec<Literal>, EvalError> {
    let made = op.eval(cx, args)?;
    if made.len() != wanted.len() {
        return Err(EvalError::new(format!(
            "its evaluation gave {} results where {} were inferred",
            made.len(),
            wanted.len()
        )));
    }
    for (made, (dtype, shape)) in made.iter().zip(wanted) {
        if made.dtype != *dtype || made.shape[..] != **shape {
            return Err(EvalError::new(format!(
                "its evaluation gave {}{:?} where {dtype}{shape:?} was inferred",
                made.dtype, made.shape
            )));
        }
        let (n, is_float) = match &made.data {
            Data::Float(data) => (data.len(), true),
            Data::Int(data) => (data.len(), false),
        };
        if n != shape.iter().product::<usize>() || is_float != dtype.is_float() {
            return Err(EvalError::new(format!(
                "its evaluation gave {n} elements of the wrong kind or number for {dtype}{shape:?}"
            )));
        }
    }
    Ok(made)
}

/// The results of a view op as views of operand 0; `shapes` are the inferred ones.
pub fn view_of<'s>(
    op: &dyn OpDef,
    cx: &EvalCx<'_>,
    x: &Layout,
    shapes: impl ExactSizeIterator<Item = &'s [usize]>,
) -> Result<Option<Layouts>, EvalError> {
    let Some(layouts) = layouts_of(op, cx, x, shapes.len())? else { return Ok(None) };
    match layouts.iter().zip(shapes).all(|(layout, shape)| layout.shape[..] == *shape) {
        true => Ok(Some(layouts)),
        false => Err(wrong_view()),
    }
}

/// The same where the inferred shapes are not at hand: only their number, and that all lie inside the operand.
pub fn layouts_of(
    op: &dyn OpDef,
    cx: &EvalCx<'_>,
    x: &Layout,
    n: usize,
) -> Result<Option<Layouts>, EvalError> {
    let Some(layouts) = op.view(cx, x)? else { return Ok(None) };
    if layouts.len() != n || !layouts.iter().all(|layout| is_inside(layout, x)) {
        return Err(wrong_view());
    }
    let moves = |layout: &Layout| !layout.is_contiguous() || layout.start != x.start;
    if op.keeps_order() && x.is_contiguous() && layouts.iter().any(moves) {
        return Err(EvalError::new("its view does not keep the order of the elements, as it states"));
    }
    Ok(Some(layouts))
}

fn wrong_view() -> EvalError {
    EvalError::new("its view does not have the inferred shape, or reaches outside its operand")
}

/// The largest stride of a dimension that has no second entry: as a number of bytes it must not overflow.
const MAX_STRIDE: usize = usize::MAX >> 8;

/// Whether all elements of a view lie between the first and the last element of `x`.
fn is_inside(view: &Layout, x: &Layout) -> bool {
    let end = x.start.saturating_add(x.span());
    if view.strides.len() != view.shape.len() || view.start < x.start || view.start > end {
        return false;
    }
    // Contiguous strides of an empty tensor may be large, whatever the op.
    let strides = x.strides.iter().chain(&row_major(&view.shape)).fold(MAX_STRIDE, |most, s| most.max(*s));
    if view.strides.iter().any(|stride| *stride > strides) {
        return false;
    }
    if view.shape.contains(&0) {
        return true;
    }
    let mut steps = view.shape.iter().zip(&view.strides);
    let last =
        steps.try_fold(view.start, |at, (size, stride)| at.checked_add((size - 1).checked_mul(*stride)?));
    last.is_some_and(|last| last < end)
}

/// The boxes of a join; `result` is the inferred shape.
pub fn boxes_of(
    op: &dyn OpDef,
    cx: &EvalCx<'_>,
    shapes: &[&[usize]],
    result: &[usize],
) -> Result<Vec<Joined>, EvalError> {
    let boxes = op.boxes(cx, shapes)?;
    let fits = |start: &[usize], size: &[usize], shape: &[usize]| {
        [start.len(), size.len()] == [shape.len(); 2]
            && start
                .iter()
                .zip(size)
                .zip(shape)
                .all(|((start, size), whole)| start.checked_add(*size).is_some_and(|end| end <= *whole))
    };
    let inside = boxes.iter().all(|piece| {
        let operand = shapes.get(piece.operand);
        fits(&piece.to, &piece.size, result) && operand.is_some_and(|x| fits(&piece.from, &piece.size, x))
    });
    if !inside {
        return Err(EvalError::new("its boxes reach outside its operands or its result"));
    }
    // Inside and apart, they cover the result exactly if they have as many elements.
    let meet = |a: &Joined, b: &Joined| {
        (0..result.len()).all(|d| a.to[d] < b.to[d] + b.size[d] && b.to[d] < a.to[d] + a.size[d])
    };
    let numel = |piece: &Joined| piece.size.iter().product::<usize>();
    let full: Vec<&Joined> = boxes.iter().filter(|piece| numel(piece) > 0).collect();
    // Built-in joins have as many boxes as a user's `concat` has operands, so only few are compared with each other.
    let few = full.len() <= MAX_COMPARED;
    let apart = !few || full.iter().enumerate().all(|(i, a)| full[i + 1..].iter().all(|b| !meet(a, b)));
    if !apart || full.iter().map(|piece| numel(piece)).sum::<usize>() != result.iter().product::<usize>() {
        return Err(EvalError::new("its boxes do not cover its result exactly once"));
    }
    Ok(boxes)
}

/// The most boxes of a join that are compared with each other.
const MAX_COMPARED: usize = 64;
