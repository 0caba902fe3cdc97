//! Ops that return an operand, and pairs of ops that are equivalent to one. Each holds bit by bit on every element type
//! that it is applied to.

use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::literal::{Data, Literal};
use consort_ir::ops::{
    Broadcast, Cast, Concat, Constant, Flip, Neg, Not, Op, Pad, Permute, Reshape, Select, Split,
};
use consort_ir::program::Node;
use consort_types::Dtype;

use super::constants::{splat, truth};
use super::{Rewrite, View};

pub(super) fn rewrite(view: &View<'_>, node: &Node) -> Option<Rewrite> {
    let x = *node.args.first()?;
    let same = match node.op.info().name {
        "add" | "sub" | "mul" | "div" | "and" | "or" | "xor" => with_neutral(view, node)?,
        "neg" => view.def::<Neg>(x)?.1[0],
        "not" => view.def::<Not>(x)?.1[0],
        "select" => select(view, node)?,
        "cast" => return cast(view, node, x),
        "reshape" => return reshape(view, node, x),
        "permute" => return permute(view, node, x),
        "broadcast" => return broadcast(view, node, x),
        "flip" => flip(view, node, x)?,
        "pad" => {
            let op = node.op.as_op::<Pad>()?;
            op.low.iter().chain(&op.high).all(|size| size.as_const() == Some(0)).then_some(x)?
        }
        "concat" => (node.op.as_op::<Concat>().is_some() && node.args.len() == 1).then_some(x)?,
        "split" => (node.op.as_op::<Split>()?.sizes.len() == 1).then_some(x)?,
        _ => return None,
    };
    Some(Rewrite::Values(vec![same]))
}

/// The other operand, if one is neutral. For floats this is -0 in a sum: adding 0 would turn -0 into 0.
fn with_neutral(view: &View<'_>, node: &Node) -> Option<Value> {
    let [x, y] = node.args[..] else { return None };
    let (float, int, commutes) = match node.op.info().name {
        "add" => (Some(-0.0f64), 0, true),
        "sub" => (Some(0.0), 0, false),
        "mul" => (Some(1.0), 1, true),
        "div" => (Some(1.0), 1, false),
        "or" | "xor" => (None, 0, true),
        _ => (None, -1, true),
    };
    let is_neutral = |value| {
        let element = view.def::<Constant>(value).and_then(|(constant, _)| splat(constant));
        element.is_some_and(|element| match &element.data {
            Data::Float(data) => float.is_some_and(|float| data[0].to_bits() == float.to_bits()),
            Data::Int(data) => {
                data[0] == Literal::ints(element.dtype, vec![], vec![int]).as_size().unwrap_or(0)
            }
        })
    };
    if is_neutral(y) {
        return Some(x);
    }
    (commutes && is_neutral(x)).then_some(y)
}

fn select(view: &View<'_>, node: &Node) -> Option<Value> {
    node.op.as_op::<Select>()?;
    let [condition, x, y] = node.args[..] else { return None };
    if x == y {
        return Some(x);
    }
    let (condition, _) = view.node(condition)?;
    Some(if truth(condition)? { x } else { y })
}

fn cast(view: &View<'_>, node: &Node, x: Value) -> Option<Rewrite> {
    let to = node.op.as_op::<Cast>()?.to;
    if view.tensor(x)?.dtype == to {
        return Some(Rewrite::Values(vec![x]));
    }
    let (there, from) = view.def::<Cast>(x)?;
    let there_and_back = view.tensor(from[0])?.dtype == to && holds(there.to, to);
    there_and_back.then(|| Rewrite::Values(vec![from[0]]))
}

/// Whether one element type contains all values of another.
fn holds(wide: Dtype, narrow: Dtype) -> bool {
    match narrow {
        Dtype::F16 | Dtype::Bf16 => matches!(wide, Dtype::F32 | Dtype::F64),
        Dtype::F32 | Dtype::I32 => matches!((wide, narrow), (Dtype::F64, _) | (Dtype::I64, Dtype::I32)),
        Dtype::U8 => matches!(wide, Dtype::I32 | Dtype::I64 | Dtype::F32 | Dtype::F64),
        Dtype::Bool => wide != Dtype::Bool,
        Dtype::F64 | Dtype::I64 => false,
    }
}

fn reshape(view: &View<'_>, node: &Node, x: Value) -> Option<Rewrite> {
    let op = node.op.as_op::<Reshape>()?;
    if view.tensor(x)?.shape == op.shape {
        return Some(Rewrite::Values(vec![x]));
    }
    let (_, from) = view.def::<Reshape>(x)?;
    Some(Rewrite::Op(node.op.clone(), from.to_vec()))
}

fn permute(view: &View<'_>, node: &Node, x: Value) -> Option<Rewrite> {
    let op = node.op.as_op::<Permute>()?;
    if op.dims.iter().enumerate().all(|(i, dim)| i == *dim) {
        return Some(Rewrite::Values(vec![x]));
    }
    let (first, from) = view.def::<Permute>(x)?;
    let dims = op.dims.iter().map(|dim| first.dims.get(*dim).copied()).collect::<Option<_>>()?;
    Some(Rewrite::Op(Op::new(Permute { dims }), from.to_vec()))
}

fn broadcast(view: &View<'_>, node: &Node, x: Value) -> Option<Rewrite> {
    let op = node.op.as_op::<Broadcast>()?;
    if view.tensor(x)?.shape == op.shape {
        return Some(Rewrite::Values(vec![x]));
    }
    let (_, from) = view.def::<Broadcast>(x)?;
    Some(Rewrite::Op(node.op.clone(), from.to_vec()))
}

/// A flip along dimensions of size 1 or 0, or twice along the same, changes nothing.
fn flip(view: &View<'_>, node: &Node, x: Value) -> Option<Value> {
    let op = node.op.as_op::<Flip>()?;
    let shape = &view.tensor(x)?.shape;
    let short = |dim: &usize| shape.get(*dim).and_then(Index::as_const).is_some_and(|size| size <= 1);
    if op.dims.iter().all(short) {
        return Some(x);
    }
    let (first, from) = view.def::<Flip>(x)?;
    let again = first.dims.len() == op.dims.len() && first.dims.iter().all(|dim| op.dims.contains(dim));
    again.then_some(from[0])
}
