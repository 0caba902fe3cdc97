//! What is not kept for the backward, but computed again there: what lies between a `recompute` and its `keep`, and what a
//! `regather` marks.
//!
//! A value that depends on a `recompute` is computed again until a `keep` gives it on. Regions may lie in one another, so
//! their depth is counted. Inside the blocks of a node it is counted anew: a node is computed again with its blocks or
//! not at all.
//!
//! Does not: repeat messages, whose matching counts them, or what runs on the host. What they give is kept.

use consort_ir::entity::{Value, ValueMap};
use consort_ir::ops::{
    Alias, AllGatherStart, AllGatherVStart, Cast, Effects, Keep, Recompute, Regather, call_name,
};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::Type;
use consort_types::Failure;

use super::copy::located;

/// The values that the backward computes again.
#[derive(Debug, Default)]
pub(super) struct Again {
    values: ValueMap<()>,
}

impl Again {
    /// As the marks of a function say.
    pub(super) fn marked(func: &Func) -> Result<Again, Box<Failure>> {
        let mut again = Again::default();
        again.block(func, &func.body)?;
        Ok(again)
    }

    /// Whether the results of a node are computed again.
    pub(super) fn has(&self, node: &Node) -> bool {
        node.results.first().is_some_and(|result| self.values.get(*result).is_some())
    }

    /// Adds the results of a node.
    pub(super) fn add(&mut self, node: &Node) {
        node.results.iter().for_each(|result| {
            self.values.insert(*result, ());
        });
    }

    fn block(&mut self, func: &Func, block: &Block) -> Result<(), Box<Failure>> {
        let mut depths: ValueMap<u32> = ValueMap::default();
        // Gathered again, or a view or cast of what is.
        let mut gathered: ValueMap<()> = ValueMap::default();
        for (at, node) in block.nodes.iter().enumerate() {
            node.blocks.iter().try_for_each(|inside| self.block(func, inside))?;
            let before = node.args.iter().filter_map(|arg| depths.get(*arg)).max().copied().unwrap_or(0);
            let depth = match (node.op.as_op::<Recompute>(), node.op.as_op::<Keep>()) {
                (Some(_), _) => before + 1,
                (_, Some(_)) => before.saturating_sub(1),
                _ => before,
            };
            node.results.iter().for_each(|result| {
                depths.insert(*result, depth);
            });
            if node.op.as_op::<Regather>().is_some() {
                self.regather(&block.nodes[..at], node).map_err(|failure| located(failure, node))?;
            }
            let light = node.op.alias() == Alias::View || node.op.as_op::<Cast>().is_some();
            let of_gathered = light && matches!(node.args[..], [arg] if gathered.get(arg).is_some());
            if of_gathered || node.op.as_op::<Regather>().is_some() {
                node.results.iter().for_each(|result| {
                    gathered.insert(*result, ());
                });
                self.add(node);
            }
            if depth > 0 && self.can_repeat(func, node) {
                self.add(node);
            }
        }
        Ok(())
    }

    /// Marks the all_gather whose result a `regather` has, and its wait.
    fn regather(&mut self, before: &[Node], node: &Node) -> Result<(), Box<Failure>> {
        let defined = |value: Value| before.iter().find(|node| node.results.contains(&value));
        let wait = node.args.first().and_then(|arg| defined(*arg));
        let start = wait.and_then(|wait| defined(*wait.args.first()?));
        match (wait, start) {
            (Some(wait), Some(start))
                if wait.op.effects() == Effects::Wait
                    && (start.op.as_op::<AllGatherStart>().is_some()
                        || start.op.as_op::<AllGatherVStart>().is_some()) =>
            {
                self.add(wait);
                self.add(start);
                Ok(())
            }
            _ => {
                let got = wait.map_or("an argument", |wait| call_name(wait.op.info().name));
                let failure = Failure::new(("the result of an all_gather", format!("that of `{got}`")));
                Err(failure.note("`recompute` of a function computes anything again, communication included"))
            }
        }
    }

    /// Whether a node may run twice.
    fn can_repeat(&self, func: &Func, node: &Node) -> bool {
        if !node.blocks.is_empty() {
            let pending = |value: &Value| func.ty(*value).is_some_and(Type::is_pending);
            return !node.args.iter().chain(&node.results).any(pending) && node.blocks.iter().all(repeats);
        }
        match node.op.effects() {
            Effects::Pure | Effects::Collective(_) => true,
            // A wait repeats with its start.
            Effects::Wait => node.args.iter().all(|pending| self.values.get(*pending).is_some()),
            Effects::Messages(_) | Effects::Host => false,
        }
    }
}

/// Whether all of a block may run twice.
fn repeats(block: &Block) -> bool {
    block.nodes.iter().all(|node| {
        !matches!(node.op.effects(), Effects::Messages(_) | Effects::Host) && node.blocks.iter().all(repeats)
    })
}
