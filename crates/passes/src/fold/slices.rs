//! Boxes of tensors: slices are read from their source, and overwritten updates are dropped.

use consort_ir::entity::Value;
use consort_ir::index::{Facts, Index};
use consort_ir::ops::{Concat, Op, Slice, Split, UpdateSlice};
use consort_ir::program::Node;

use super::{Rewrite, View};

/// The most parts of a `concat` or `split` that are searched.
const MAX_PARTS: usize = 256;

pub(super) fn rewrite(view: &View<'_>, node: &Node) -> Option<Rewrite> {
    match node.op.info().name {
        "slice" => slice(view, node),
        "update_slice" => update_slice(view, node),
        "concat" => concat(view, node),
        _ => None,
    }
}

/// A value as a box of another: start and step in each dimension.
struct Part {
    of: Value,
    start: Vec<Index>,
    step: Vec<usize>,
}

impl Part {
    fn find(view: &View<'_>, value: Value) -> Option<Part> {
        let (node, result) = view.node(value)?;
        let of = *node.args.first()?;
        if let Some(op) = node.op.as_op::<Slice>() {
            return Some(Part { of, start: op.start.clone(), step: op.step.clone() });
        }
        let op = node.op.as_op::<Split>().filter(|_| result < MAX_PARTS)?;
        let mut start = vec![Index::constant(0); view.tensor(of)?.rank()];
        *start.get_mut(op.dim)? = Index::sum(op.sizes.get(..result)?);
        let step = vec![1; start.len()];
        Some(Part { of, start, step })
    }
}

/// One past the last index of a slice along a dimension.
fn end(start: &Index, size: &Index, step: usize) -> Index {
    &(start + &(&(size - &Index::constant(1)) * &Index::from(step))) + &Index::constant(1)
}

fn le(facts: &Facts, a: &Index, b: &Index) -> bool {
    facts.le(a, b) == Some(true)
}

fn slice(view: &View<'_>, node: &Node) -> Option<Rewrite> {
    let op = node.op.as_op::<Slice>()?;
    let x = *node.args.first()?;
    let whole = op.start.iter().all(|start| start.as_const() == Some(0));
    if whole && op.step.iter().all(|step| *step == 1) && op.size == view.tensor(x)?.shape {
        return Some(Rewrite::Values(vec![x]));
    }
    let (def, _) = view.node(x)?;
    match def.op.info().name {
        "slice" | "split" => slice_of_part(&Part::find(view, x)?, op),
        "concat" => slice_of_concat(view, def, op),
        "update_slice" => slice_of_update(view, def, op),
        _ => None,
    }
}

fn slice_of_part(part: &Part, op: &Slice) -> Option<Rewrite> {
    let (mut start, mut step) = (Vec::new(), Vec::new());
    for i in 0..op.start.len() {
        let by = *part.step.get(i)?;
        start.push(part.start.get(i)? + &(&op.start[i] * &Index::from(by)));
        step.push(op.step[i].checked_mul(by)?);
    }
    Some(Rewrite::Op(Op::new(Slice { start, size: op.size.clone(), step }), vec![part.of]))
}

/// A slice inside one part of a `concat` reads that part.
fn slice_of_concat(view: &View<'_>, def: &Node, op: &Slice) -> Option<Rewrite> {
    let dim = def.op.as_op::<Concat>()?.dim;
    let (from, to) = (op.start.get(dim)?, end(op.start.get(dim)?, op.size.get(dim)?, *op.step.get(dim)?));
    let mut low = Index::constant(0);
    for part in def.args.iter().take(MAX_PARTS) {
        let high = &low + view.tensor(*part)?.shape.get(dim)?;
        if le(view.facts, &low, from) && le(view.facts, &to, &high) {
            let mut start = op.start.clone();
            start[dim] = from - &low;
            let op = Slice { start, size: op.size.clone(), step: op.step.clone() };
            return Some(Rewrite::Op(Op::new(op), vec![*part]));
        }
        low = high;
    }
    None
}

/// A slice inside an updated box reads the update. Outside of it, it could read the base, but then the base would stay
/// live and the update could not be made in place.
fn slice_of_update(view: &View<'_>, def: &Node, op: &Slice) -> Option<Rewrite> {
    let update = def.op.as_op::<UpdateSlice>()?;
    let [_, part] = def.args[..] else { return None };
    let shape = &view.tensor(part)?.shape;
    let inside = shape.iter().enumerate().all(|(i, size)| {
        let (low, high) = (&update.start[i], &update.start[i] + size);
        let (from, to) = (&op.start[i], end(&op.start[i], &op.size[i], op.step[i]));
        le(view.facts, low, from) && le(view.facts, &to, &high)
    });
    let start = op.start.iter().zip(&update.start).map(|(from, low)| from - low).collect();
    let op = Slice { start, size: op.size.clone(), step: op.step.clone() };
    inside.then(|| Rewrite::Op(Op::new(op), vec![part]))
}

fn update_slice(view: &View<'_>, node: &Node) -> Option<Rewrite> {
    let op = node.op.as_op::<UpdateSlice>()?;
    let [x, part] = node.args[..] else { return None };
    let shape = &view.tensor(part)?.shape;
    if shape.iter().any(|size| size.as_const() == Some(0)) {
        return Some(Rewrite::Values(vec![x]));
    }
    if *shape == view.tensor(x)?.shape && op.start.iter().all(|start| start.as_const() == Some(0)) {
        return Some(Rewrite::Values(vec![part]));
    }
    // The part is already there.
    let own = Part::find(view, part).filter(|own| own.of == x && own.start == op.start);
    if own.is_some_and(|own| own.step.iter().all(|step| *step == 1)) {
        return Some(Rewrite::Values(vec![x]));
    }
    // An update that this one covers. If the part is computed from it, it stays live, and the base must not: each is
    // updated in place.
    let reads = |arg: &Value| Part::find(view, *arg).is_some_and(|own| own.of == x);
    if view.node(part).is_some_and(|(def, _)| def.args.iter().any(reads)) {
        return None;
    }
    let (before, args) = view.def::<UpdateSlice>(x)?;
    let [base, covered] = args[..] else { return None };
    let inner = &view.tensor(covered)?.shape;
    let covers = |i: usize| {
        le(view.facts, &op.start[i], &before.start[i])
            && le(view.facts, &(&before.start[i] + &inner[i]), &(&op.start[i] + &shape[i]))
    };
    (0..shape.len()).all(covers).then(|| Rewrite::Op(node.op.clone(), vec![base, part]))
}

/// Adjacent boxes of one value form one box.
fn concat(view: &View<'_>, node: &Node) -> Option<Rewrite> {
    let dim = node.op.as_op::<Concat>()?.dim;
    let first = Part::find(view, *node.args.first()?)?;
    let mut next = first.start.clone();
    let mut others: Option<&[Index]> = None;
    for arg in node.args.iter().take(MAX_PARTS + 1) {
        let part = Part::find(view, *arg)?;
        let shape = &view.tensor(*arg)?.shape;
        if part.of != first.of || part.start != next || part.step.iter().any(|step| *step != 1) {
            return None;
        }
        let same = |other: &[Index]| (0..shape.len()).all(|i| i == dim || other[i] == shape[i]);
        if !others.is_none_or(same) {
            return None;
        }
        others = Some(shape);
        *next.get_mut(dim)? = &next[dim] + shape.get(dim)?;
    }
    if node.args.len() > MAX_PARTS {
        return None;
    }
    let size = view.tensor(*node.results.first()?)?.shape.clone();
    let step = vec![1; size.len()];
    Some(Rewrite::Op(Op::new(Slice { start: first.start, size, step }), vec![first.of]))
}
