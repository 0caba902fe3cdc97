//! Equal nodes of a block become one: the same op with the same attributes, on the same values.
//!
//! A collective is shared like anything else, since all ranks run the same list and so leave out the same start.
//! Its pending must be waited for in the same block as that of its equal: both waits become one, at the place of
//! the earlier. What is shared has exactly the same type.
//!
//! Does not: share messages, whose matching counts them; barriers, which are there for their effect; reads of
//! sizes, which define symbols; nodes with blocks; anything across blocks.

use std::collections::BTreeMap;

use consort_ir::entity::{Value, ValueMap};
use consort_ir::mesh::Mesh;
use consort_ir::ops::Effects;
use consort_ir::program::{Block, Node, Program};
use consort_ir::types::Type;

use crate::pipeline::Fuel;

/// Runs the pass.
pub(crate) fn run(program: &mut Program, fuel: &mut Fuel) {
    let mesh = &program.mesh;
    for func in &mut program.funcs {
        let mut sharer = Sharer { mesh, types: &mut func.types, fuel, same: ValueMap::default() };
        sharer.block(&mut func.body);
    }
}

/// What makes nodes equal: name, attributes as written, and operands.
type Key = (&'static str, String, Vec<Value>);

struct Sharer<'a> {
    mesh: &'a Mesh,
    types: &'a mut ValueMap<Type>,
    fuel: &'a mut Fuel,
    /// The value that stands for another from here on.
    same: ValueMap<Value>,
}

impl Sharer<'_> {
    fn block(&mut self, block: &mut Block) {
        // What the wait for a pending gives, where it stands in this block.
        let mut waits: ValueMap<Vec<Value>> = ValueMap::default();
        for node in block.nodes.iter().filter(|node| node.op.effects() == Effects::Wait) {
            node.args.iter().for_each(|arg| drop(waits.insert(*arg, node.results.clone())));
        }
        let mut seen: BTreeMap<Key, Vec<Value>> = BTreeMap::new();
        // What waits have given so far.
        let mut gave: ValueMap<Vec<Value>> = ValueMap::default();
        block.nodes.retain_mut(|node| {
            node.args.iter_mut().for_each(|arg| *arg = self.resolve(*arg));
            node.blocks.iter_mut().for_each(|inside| self.block(inside));
            if node.op.effects() == Effects::Wait {
                let Some(pending) = node.args.first().copied() else { return true };
                if let Some(first) = gave.get(pending) {
                    let first = first.clone();
                    self.replace(node, &first);
                    return false;
                }
                gave.insert(pending, node.results.clone());
                return true;
            }
            if !may_share(node, &waits) {
                return true;
            }
            let mut attrs = String::new();
            node.op.write_attrs(&mut attrs, self.mesh);
            let key = (node.op.info().name, attrs, node.args.clone());
            let Some(first) = seen.get(&key) else {
                seen.insert(key, node.results.clone());
                return true;
            };
            let mut pairs = first.iter().zip(&node.results);
            let alike = pairs.all(|(a, b)| match (waits.get(*a), waits.get(*b)) {
                (Some(a), Some(b)) => self.same_types(a, b),
                _ => self.same_types(&[*a], &[*b]),
            });
            if !alike || !self.fuel.burn() {
                return true;
            }
            let first = first.clone();
            self.replace(node, &first);
            false
        });
        block.results.iter_mut().for_each(|result| *result = self.resolve(*result));
    }

    fn resolve(&self, value: Value) -> Value {
        self.same.get(value).copied().unwrap_or(value)
    }

    /// Whether values have the same types, spelled alike.
    fn same_types(&self, a: &[Value], b: &[Value]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.types.get(*a) == self.types.get(*b))
    }

    /// Puts other values in the place of a node's results.
    fn replace(&mut self, node: &Node, by: &[Value]) {
        for (result, by) in node.results.iter().zip(by) {
            self.same.insert(*result, *by);
            self.types.remove(*result);
        }
    }
}

/// Whether an equal node may stand for this one. A start needs a wait in its own block, which takes part.
fn may_share(node: &Node, waits: &ValueMap<Vec<Value>>) -> bool {
    match node.op.effects() {
        Effects::Pure => node.blocks.is_empty() && !node.results.is_empty(),
        Effects::Collective(_) => {
            !node.args.is_empty() && node.results.iter().all(|pending| waits.get(*pending).is_some())
        }
        Effects::Messages(_) | Effects::Wait | Effects::Host => false,
    }
}
