//! Slices of a value that together are all of it, one after the other along a dimension, as with the layers of a stacked
//! weight. Where they are copied they become one split: its gradient is one concat, where each slice has a padded tensor as
//! large as the value, and all are added up.
//!
//! Before: `v1 = slice[start=[0], size=[1]] v0`, `v2 = slice[start=[1], size=[1]] v0` of `v0 : f32[2]`. After:
//! `v1, v2 = split[dim=0, sizes=[1, 1]] v0`.

use std::collections::BTreeMap;

use consort_ir::entity::{Value, ValueMap};
use consort_ir::index::Index;
use consort_ir::ops::{Slice, Split};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::Type;

use super::active::Active;

/// The slices that become parts of a split.
#[derive(Default)]
pub(super) struct Tiles {
    splits: Vec<Split>,
    /// The split and the part that the result of a slice becomes, by their numbers.
    parts: ValueMap<(usize, usize)>,
}

/// The slices of a value along a dimension: where each starts, its size and its results.
type Slices = BTreeMap<i64, (i64, Vec<Value>)>;

impl Tiles {
    /// Those that a gradient passes through.
    pub(super) fn of(func: &Func, active: &Active) -> Tiles {
        let mut tiles = Tiles::default();
        tiles.block(func, active, &func.body);
        tiles
    }

    /// The split and the part that a slice becomes: the number of the split, the split, and the number of the part.
    pub(super) fn get(&self, slice: &Node) -> Option<(usize, &Split, usize)> {
        let (split, part) = *self.parts.get(*slice.results.first()?)?;
        Some((split, &self.splits[split], part))
    }

    fn block(&mut self, func: &Func, active: &Active, block: &Block) {
        let mut found: BTreeMap<(Value, usize), Slices> = BTreeMap::new();
        for node in &block.nodes {
            node.blocks.iter().for_each(|inside| self.block(func, active, inside));
            let Some((key, start, size)) = cut(func, node).filter(|_| active.passes(node)) else { continue };
            let slices = found.entry(key).or_default();
            let (known, results) = slices.entry(start).or_insert((size, Vec::new()));
            if *known == size {
                results.extend(&node.results);
            } else {
                // Two sizes at one place do not add up.
                *known = 0;
            }
        }
        for ((of, dim), slices) in found {
            let whole = func.ty(of).and_then(Type::as_tensor).and_then(|ty| ty.shape.get(dim)?.as_const());
            let end = slices
                .iter()
                .try_fold(0, |end, (start, (size, _))| (*start == end && *size > 0).then(|| end + size));
            if slices.len() < 2 || end.is_none() || end != whole {
                continue;
            }
            let sizes = slices.values().map(|(size, _)| Index::constant(*size)).collect();
            for (part, (_, results)) in slices.into_values().enumerate() {
                results.into_iter().for_each(|result| {
                    self.parts.insert(result, (self.splits.len(), part));
                });
            }
            self.splits.push(Split { dim, sizes });
        }
    }
}

/// A slice without steps along one dimension, of sizes that are known: its operand and the dimension, its start and its
/// size.
fn cut(func: &Func, node: &Node) -> Option<((Value, usize), i64, i64)> {
    let slice = node.op.as_op::<Slice>()?;
    let of = *node.args.first()?;
    let shape = &func.ty(of)?.as_tensor()?.shape;
    let mut cut = (0..shape.len()).filter(|i| slice.size[*i] != shape[*i]);
    let (Some(dim), None) = (cut.next(), cut.next()) else { return None };
    if slice.step[dim] != 1 {
        return None;
    }
    Some(((of, dim), slice.start[dim].as_const()?, slice.size[dim].as_const()?))
}
