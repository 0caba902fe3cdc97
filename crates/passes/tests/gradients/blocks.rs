//! Cases of conditions and loops: their operands have all placements, and what stands in their blocks follows from these.

use consort_ir::builder::Builder;
use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::mesh::Mesh;
use consort_ir::ops::*;
use consort_ir::program::Block;
use consort_ir::types::{TensorType, Type};
use consort_types::{Axes, Axis, Dtype, Failure, GroupName, Reduce};

use super::{Case, x};

/// Makes the blocks of an op with operands of these types.
pub(crate) type Blocks = fn(&mut Builder<'_>, &[TensorType]) -> Result<Vec<Block>, Box<Failure>>;

type Made = Result<Vec<Value>, Box<Failure>>;

/// The blocks of an op without blocks.
pub(crate) fn none(_: &mut Builder<'_>, _: &[TensorType]) -> Result<Vec<Block>, Box<Failure>> {
    Ok(Vec::new())
}

/// The cases on a mesh.
pub(crate) fn cases(mesh: &Mesh) -> Vec<Case> {
    let condition = TensorType::new(Dtype::Bool, Vec::new(), Axes::NONE);
    let conditional =
        |blocks| Case { op: Op::new(Cond {}), types: vec![condition.clone(), x(&[2]), x(&[2])], blocks };
    let scan = |length: Index, carries, slices, reverse| {
        Op::new(Scan { length, carries, slices, reverse: Flag(reverse) })
    };
    let three = Index::constant(3);
    let mut list = vec![
        conditional(smooth_branches),
        conditional(branches_that_communicate),
        Case {
            op: scan(three.clone(), 1, 1, false),
            types: vec![x(&[2]), x(&[3, 2]), x(&[2])],
            blocks: body,
        },
        Case { op: scan(three.clone(), 1, 1, true), types: vec![x(&[2]), x(&[3, 2]), x(&[2])], blocks: body },
        Case {
            op: scan(three.clone(), 1, 1, false),
            types: vec![x(&[]), x(&[3]), x(&[])],
            blocks: body_that_communicates,
        },
        Case {
            op: scan(three, 2, 1, false),
            types: vec![x(&[2]), x(&[2]), x(&[3, 2]), x(&[2])],
            blocks: body_with_two_carries,
        },
    ];
    // One iteration more on each next rank along axis 0, and so that many entries.
    let lengths: Vec<Index> = (0..mesh.axis_size(Axis(0))).map(|i| Index::from(i64::from(i) + 1)).collect();
    let length = Index::pick(&group_rank(mesh, GroupName::Axes(Axes::one(Axis(0)))), &lengths);
    let entries = TensorType::new(Dtype::F64, vec![length.clone(), Index::constant(2)], Axes::NONE);
    list.push(Case { op: scan(length, 1, 1, false), types: vec![x(&[2]), entries, x(&[2])], blocks: body });
    list
}

fn block(
    b: &mut Builder<'_>,
    params: &[TensorType],
    build: impl FnOnce(&mut Builder<'_>, &[Value]) -> Made,
) -> Result<Block, Box<Failure>> {
    let params = b.begin_block(params.iter().cloned().map(Type::Tensor).collect());
    let results = build(b, &params)?;
    Ok(b.end_block(&results))
}

fn sum_over_axis_0(b: &mut Builder<'_>, value: Value) -> Result<Value, Box<Failure>> {
    let over = GroupName::Axes(Axes::one(Axis(0)));
    let sums = b.start_wait(AllReduceStart { reduce: Reduce::Sum, over }, &[value])?;
    sums.first().copied().ok_or_else(|| Failure::new("no sum"))
}

/// (x y, sin x), else (y, x - y^2).
fn smooth_branches(b: &mut Builder<'_>, types: &[TensorType]) -> Result<Vec<Block>, Box<Failure>> {
    let then =
        block(b, &types[1..], |b, params| Ok(vec![b.one(Mul {}, params)?, b.one(Sin {}, &params[..1])?]))?;
    let other = block(b, &types[1..], |b, params| {
        let square = b.one(Mul {}, &[params[1], params[1]])?;
        Ok(vec![params[1], b.one(Sub {}, &[params[0], square])?])
    })?;
    Ok(vec![then, other])
}

/// The sum of x^2 over axis 0 times y, else x y: only where the condition is equal over axis 0.
fn branches_that_communicate(b: &mut Builder<'_>, types: &[TensorType]) -> Result<Vec<Block>, Box<Failure>> {
    let then = block(b, &types[1..], |b, params| {
        let square = b.one(Mul {}, &[params[0], params[0]])?;
        let sum = sum_over_axis_0(b, square)?;
        Ok(vec![b.one(Mul {}, &[sum, params[1]])?])
    })?;
    let other = block(b, &types[1..], |b, params| Ok(vec![b.one(Mul {}, params)?]))?;
    Ok(vec![then, other])
}

/// The parameters of a loop's block: the first carry may differ over all axes of the operands, slices lose a dimension.
fn params(types: &[TensorType], carries: usize) -> Vec<TensorType> {
    let all = types.iter().fold(Axes::NONE, |axes, ty| axes.union(ty.varies));
    let mut params = types.to_vec();
    params[0] = params[0].with_varies(all);
    params[carries] = types[carries].with_shape(types[carries].shape[1..].to_vec());
    params
}

/// c' = c w^2 + sin x, and c' x stacked: w^2 is the same in every iteration.
fn body(b: &mut Builder<'_>, types: &[TensorType]) -> Result<Vec<Block>, Box<Failure>> {
    let body = block(b, &params(types, 1), |b, params| {
        let [carry, entry, w] = params else { return Ok(Vec::new()) };
        let square = b.one(Mul {}, &[*w, *w])?;
        let product = b.one(Mul {}, &[*carry, square])?;
        let sine = b.one(Sin {}, &[*entry])?;
        let next = b.one(Add {}, &[product, sine])?;
        Ok(vec![next, b.one(Mul {}, &[next, *entry])?])
    })?;
    Ok(vec![body])
}

/// c' = w times the sum of c x over axis 0, and that sum stacked.
fn body_that_communicates(b: &mut Builder<'_>, types: &[TensorType]) -> Result<Vec<Block>, Box<Failure>> {
    let body = block(b, &params(types, 1), |b, params| {
        let [carry, entry, w] = params else { return Ok(Vec::new()) };
        let product = b.one(Mul {}, &[*carry, *entry])?;
        let sum = sum_over_axis_0(b, product)?;
        Ok(vec![b.one(Mul {}, &[sum, *w])?, sum])
    })?;
    Ok(vec![body])
}

/// c' = c x + d and d' = d w: the second carry may be equal where the first differs.
fn body_with_two_carries(b: &mut Builder<'_>, types: &[TensorType]) -> Result<Vec<Block>, Box<Failure>> {
    let mut params = params(types, 2);
    params[1] = params[1].with_varies(types[1].varies.union(types[3].varies));
    let body = block(b, &params, |b, params| {
        let [c, d, entry, w] = params else { return Ok(Vec::new()) };
        let product = b.one(Mul {}, &[*c, *entry])?;
        Ok(vec![b.one(Add {}, &[product, *d])?, b.one(Mul {}, &[*d, *w])?])
    })?;
    Ok(vec![body])
}
