//! Dead code elimination: pure nodes, and collectives together with their waits.
//!
//! All ranks run the same list, so all drop the same collective. Blocks are removed with their node if everything in
//! them may be removed.
//!
//! Does not: remove messages, whose peers are other nodes; barriers; reads of sizes, which check a range and
//! define symbols; a collective of which one result is used; parameters and results of blocks.

use consort_ir::entity::{Value, ValueMap};
use consort_ir::ops::Effects;
use consort_ir::program::{Block, Func, Node, Program};
use consort_ir::types::Type;

use crate::pipeline::Fuel;

/// Runs the pass.
pub(crate) fn run(program: &mut Program, fuel: &mut Fuel) {
    program.funcs.iter_mut().for_each(|func| from(func, fuel));
}

/// Removes from one function.
pub(crate) fn from(func: &mut Func, fuel: &mut Fuel) {
    Remover { types: &mut func.types, fuel, used: ValueMap::default() }.block(&mut func.body);
}

struct Remover<'a> {
    types: &'a mut ValueMap<Type>,
    fuel: &'a mut Fuel,
    used: ValueMap<()>,
}

impl Remover<'_> {
    /// Walks a block backwards, so that uses are known before definitions.
    fn block(&mut self, block: &mut Block) {
        block.results.iter().for_each(|result| self.use_value(*result));
        let mut starts = ValueMap::default();
        for pending in block.nodes.iter().filter(|node| is_collective(node)).flat_map(|node| &node.results) {
            starts.insert(*pending, ());
        }
        // Starts whose wait was removed: they are removed, too.
        let mut orphans = ValueMap::default();
        let mut goes = vec![false; block.nodes.len()];
        for (node, goes) in block.nodes.iter_mut().zip(&mut goes).rev() {
            let orphan = node.results.first().is_some_and(|pending| orphans.get(*pending).is_some());
            *goes = orphan || self.may_go(node, &starts) && self.fuel.burn();
            if *goes {
                if let (Effects::Wait, Some(pending)) = (node.op.effects(), node.args.first()) {
                    orphans.insert(*pending, ());
                }
                forget(self.types, node);
                continue;
            }
            node.blocks.iter_mut().for_each(|inside| self.block(inside));
            node.args.iter().for_each(|arg| self.use_value(*arg));
        }
        let mut goes = goes.into_iter();
        block.nodes.retain(|_| !goes.next().unwrap_or(false));
    }

    fn use_value(&mut self, value: Value) {
        self.used.insert(value, ());
    }

    /// Whether a node is dead: its results are unused and it has no other effect.
    fn may_go(&self, node: &Node, starts: &ValueMap<()>) -> bool {
        let unused = node.results.iter().all(|result| self.used.get(*result).is_none());
        unused
            && match node.op.effects() {
                Effects::Pure => {
                    let pending = |arg: &Value| self.types.get(*arg).is_some_and(Type::is_pending);
                    node.blocks.iter().all(is_removable) && !node.args.iter().any(pending)
                }
                Effects::Wait => node.args.iter().all(|pending| starts.get(*pending).is_some()),
                Effects::Collective(_) | Effects::Messages(_) | Effects::Host => false,
            }
    }
}

/// Whether a node is a collective that moves data, not a barrier.
fn is_collective(node: &Node) -> bool {
    matches!(node.op.effects(), Effects::Collective(_)) && !node.args.is_empty()
}

/// Whether a block has no effect that must stay.
fn is_removable(block: &Block) -> bool {
    block.nodes.iter().all(|node| match node.op.effects() {
        Effects::Pure | Effects::Wait => node.blocks.iter().all(is_removable),
        Effects::Collective(_) => is_collective(node),
        Effects::Messages(_) | Effects::Host => false,
    })
}

/// Removes the types of everything that a node defines from the table.
pub(crate) fn forget(types: &mut ValueMap<Type>, node: &Node) {
    node.results.iter().for_each(|result| drop(types.remove(*result)));
    for block in &node.blocks {
        block.params.iter().for_each(|param| drop(types.remove(*param)));
        block.nodes.iter().for_each(|inside| forget(types, inside));
    }
}
