//! Common subexpression elimination within a block: the same op with the same attributes, on the same values.
//!
//! A collective is shared like any other node, since all ranks run the same list and so drop the same start. Both
//! pendings must be waited for in the same block: the two waits become one, at the place of the earlier. Shared nodes
//! have exactly the same type.
//!
//! Does not: share messages, whose matching counts them; barriers, which exist for their effect; reads of sizes, which
//! define symbols; nodes with blocks; `again`, which separates what is equal; anything across blocks.

use std::collections::BTreeMap;

use consort_ir::entity::{Value, ValueMap};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Again, Effects};
use consort_ir::program::{Block, Node, Program};
use consort_ir::types::Type;
use consort_types::Digest;

use crate::pipeline::Fuel;

/// Runs the pass.
pub(crate) fn run(program: &mut Program, fuel: &mut Fuel) {
    let mesh = &program.mesh;
    for func in &mut program.funcs {
        let mut sharer = Sharer { mesh, types: &mut func.types, fuel, same: ValueMap::default() };
        sharer.block(&mut func.body);
    }
}

struct Sharer<'a> {
    mesh: &'a Mesh,
    types: &'a mut ValueMap<Type>,
    fuel: &'a mut Fuel,
    /// The replacement of each value.
    same: ValueMap<Value>,
}

impl Sharer<'_> {
    fn block(&mut self, block: &mut Block) {
        // The results of the wait for each pending, if it is in this block.
        let mut waits: ValueMap<Vec<Value>> = ValueMap::default();
        for node in block.nodes.iter().filter(|node| node.op.effects() == Effects::Wait) {
            node.args.iter().for_each(|arg| drop(waits.insert(*arg, node.results.clone())));
        }
        // The results of the waits so far.
        let mut gave: ValueMap<Vec<Value>> = ValueMap::default();
        // Candidates for equal nodes. The youngest operand grows along the block, so nodes that are close in the list
        // are close in the map.
        let mut seen: BTreeMap<(Option<Value>, u64), usize> = BTreeMap::new();
        let mut attrs = String::new();
        let mut kept = 0;
        for at in 0..block.nodes.len() {
            let (before, rest) = block.nodes.split_at_mut(at);
            let node = &mut rest[0];
            node.args.iter_mut().for_each(|arg| *arg = self.resolve(*arg));
            node.blocks.iter_mut().for_each(|inside| self.block(inside));
            if let (Effects::Wait, Some(pending)) = (node.op.effects(), node.args.first()) {
                if let Some(first) = gave.get(*pending) {
                    self.replace(node, first);
                    continue;
                }
                gave.insert(*pending, node.results.clone());
            } else if may_share(node, &waits) {
                attrs.clear();
                node.op.write_attrs(&mut attrs, self.mesh);
                let key = (node.args.iter().max().copied(), fingerprint(node, &attrs));
                let first = *seen.entry(key).or_insert(kept);
                if first < kept && self.are_equal(&before[first], node, &waits) && self.fuel.burn() {
                    self.replace(node, &before[first].results);
                    continue;
                }
            }
            block.nodes.swap(kept, at);
            kept += 1;
        }
        block.nodes.truncate(kept);
        block.results.iter_mut().for_each(|result| *result = self.resolve(*result));
    }

    /// Whether nodes are equal, and they and their waits have results of the same types, spelled alike.
    fn are_equal(&self, a: &Node, b: &Node, waits: &ValueMap<Vec<Value>>) -> bool {
        let same = |a: &[Value], b: &[Value]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.types.get(*a) == self.types.get(*b))
        };
        let results = |(a, b): (&Value, &Value)| match (waits.get(*a), waits.get(*b)) {
            (Some(a), Some(b)) => same(a, b),
            _ => true,
        };
        a.op == b.op
            && a.args == b.args
            && same(&a.results, &b.results)
            && a.results.iter().zip(&b.results).all(results)
    }

    fn resolve(&self, value: Value) -> Value {
        self.same.get(value).copied().unwrap_or(value)
    }

    /// Replaces a node's results by other values.
    fn replace(&mut self, node: &Node, by: &[Value]) {
        for (result, by) in node.results.iter().zip(by) {
            self.same.insert(*result, *by);
            self.types.remove(*result);
        }
    }
}

/// Whether an equal node may replace this one. A start needs a wait in its own block.
fn may_share(node: &Node, waits: &ValueMap<Vec<Value>>) -> bool {
    match node.op.effects() {
        Effects::Pure => {
            node.blocks.is_empty() && !node.results.is_empty() && node.op.as_op::<Again>().is_none()
        }
        Effects::Collective(_) => {
            !node.args.is_empty() && node.results.iter().all(|pending| waits.get(*pending).is_some())
        }
        Effects::Messages(_) | Effects::Wait | Effects::Host => false,
    }
}

/// A hash that equal nodes share.
fn fingerprint(node: &Node, attrs: &str) -> u64 {
    let mut digest = Digest::default();
    digest.add_all(node.args.iter().map(|arg| u64::from(arg.0)));
    digest.add_bytes(node.op.info().name.as_bytes());
    digest.add_bytes(attrs.as_bytes());
    digest.get()
}
