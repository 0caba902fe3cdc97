//! The ops that programs are grown from without a recipe of their own: what the table of ops says of each is enough.

use consort_ir::ops::{BUILT_IN, Effects, Flow, Op, OpInfo, OpTable, Takes, elementwise_ops};
use consort_ir::text::parse;
use consort_ir::types::{TensorType, Type};

/// Ops of the table, listed once for each program.
pub(super) struct Known {
    /// The elementwise ops of one or two operands.
    pub(super) elementwise: Vec<Op>,
    /// Ops that compute tensors from tensors, with the attributes and operands of their examples.
    pub(super) examples: Vec<(Op, Vec<TensorType>)>,
}

impl Known {
    pub(super) fn new() -> Known {
        let infos = BUILT_IN.iter().flat_map(|(_, rows)| rows.iter());
        Known {
            elementwise: elementwise_ops().filter(|op| op.info().args.len() <= 2).collect(),
            examples: infos.filter_map(example).collect(),
        }
    }
}

/// The op of an example on one rank without symbols, and the types of its operands.
fn example(info: &OpInfo) -> Option<(Op, Vec<TensorType>)> {
    let program = parse(info.example, &OpTable::built_in()).ok()?.program;
    let func = program.funcs.first()?;
    // An example may also contain other ops.
    let node = func.body.nodes.iter().find(|node| node.op.info().name == info.name)?;
    let tensors = |values: &[_]| -> Option<Vec<TensorType>> {
        values.iter().map(|value| func.ty(*value).and_then(Type::as_tensor).cloned()).collect()
    };
    let (operands, results) = (tensors(&node.args)?, tensors(&node.results)?);
    let mut is_known = program.mesh.axes().is_empty();
    node.op.indices(&mut |index| is_known &= index.as_const().is_some());
    let sizes = operands.iter().chain(&results).flat_map(|ty| &ty.shape);
    is_known &= sizes.into_iter().all(|size| size.as_const().is_some());
    let computes = node.op.effects() == Effects::Pure
        && node.op.flow() == Flow::Straight
        && node.op.takes() == Takes::Tensors;
    (is_known && computes).then(|| (node.op.clone(), operands))
}
