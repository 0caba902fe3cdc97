//! Lowers ops with blocks. What moves values into and out of a block is lines too, so that the line of the op itself only
//! decides which block runs next.

use std::ops::Range;

use consort_ir::cost::{self, Total};
use consort_ir::entity::Value;
use consort_ir::ops;
use consort_ir::plan::NodePlan;
use consort_ir::program::{Block, Node};
use consort_ir::types::Type;

use super::lower::{Lowerer, first};
use super::memory::SlotId;
use super::step::{BlockId, Cond, Loop, Move, Moves, Step, Trips, Work};
use crate::RunError;

impl Lowerer<'_> {
    pub(super) fn cond(&mut self, to: BlockId, node: &Node) -> Result<(), RunError> {
        let [then, other] = &node.blocks[..] else { return Err(RunError::new("expected two blocks")) };
        let condition = first(self.slots_of(node.args[0]))?;
        // Slots that depend on sizes are resolved once, before the line itself.
        let mut found = std::mem::take(&mut self.found);
        let mut branch = |lowerer: &mut Self, block: &Block| {
            lowerer.define(&block.params, &block.places)?;
            found.append(&mut lowerer.found);
            let id = lowerer.open();
            lowerer.moves(id, node, (&node.args[1..], &block.params), false)?;
            lowerer.fill(id, block)?;
            lowerer.moves(id, node, (&block.results, &node.results), false)?;
            Ok::<BlockId, RunError>(id)
        };
        let branches = [branch(self, then)?, branch(self, other)?];
        self.found = found;
        self.line(to, node, Step::Cond(Cond { condition, branches }), self.work(node));
        Ok(())
    }

    /// Lowers a loop; `sliced` are the operands that are sliced.
    pub(super) fn repeat(
        &mut self,
        to: BlockId,
        node: &Node,
        plan: &NodePlan,
        trips: ops::Trips<'_>,
        sliced: Range<usize>,
    ) -> Result<(), RunError> {
        let [block] = &node.blocks[..] else { return Err(RunError::new("expected one block")) };
        let carries = sliced.start;
        self.define(&block.params, &block.places)?;
        let written = [&node.results[..], &block.params[..sliced.end]].concat();
        self.release(to, node, plan, &written)?;
        let whole = |values: &[Value]| -> Vec<Value> {
            let others = values.iter().enumerate().filter(|(i, _)| !sliced.contains(i));
            others.map(|(_, value)| *value).collect()
        };
        self.moves(to, node, (&whole(&node.args), &whole(&block.params)), true)?;
        let iteration =
            Total { steps: 1, ..Total::default() }.plus(cost::total(&self.sizes(), self.func, block));
        let trips = match trips {
            ops::Trips::Count(length) => Trips::Count(length.clone()),
            ops::Trips::While { limit, .. } => {
                Trips::While { condition: first(self.slots_of(block.params[0]))?, limit }
            }
        };
        let body = self.open();
        self.line(to, node, Step::Loop(Box::new(Loop { trips, iteration, body })), self.work(node));
        self.entries(body, node, (&node.args[sliced.clone()], &block.params[sliced.clone()]), false)?;
        self.fill(body, block)?;
        self.entries(body, node, (&node.results[carries..], &block.results[carries..]), true)?;
        self.moves(body, node, (&block.results[..carries], &block.params[..carries]), true)?;
        self.moves(to, node, (&block.params[..carries], &node.results[..carries]), true)
    }

    /// Appends the copies between entries of whole tensors and single ones.
    fn entries(
        &mut self,
        to: BlockId,
        node: &Node,
        (whole, single): (&[Value], &[Value]),
        into: bool,
    ) -> Result<(), RunError> {
        let slot = |value: &Value| first(self.slots_of(*value));
        let pairs = whole.iter().zip(single).map(|(whole, single)| Ok((slot(whole)?, slot(single)?)));
        let pairs: Vec<(SlotId, SlotId)> = pairs.collect::<Result<_, RunError>>()?;
        if !pairs.is_empty() {
            let reverse = matches!(node.op.flow(), ops::Flow::Loop { reverse: true, .. });
            self.line(to, node, Step::Entries { pairs, into, reverse }, Work::default());
        }
        Ok(())
    }

    /// Appends what brings values to the places of others. A pending that cannot stay in flight, because it must move
    /// or because a loop carries it, is waited for.
    fn moves(
        &mut self,
        to: BlockId,
        node: &Node,
        (from, into): (&[Value], &[Value]),
        land: bool,
    ) -> Result<(), RunError> {
        let mut moves = Moves { flights: Vec::new(), tensors: Vec::new() };
        let mut waits = Vec::new();
        for (from, into) in from.iter().zip(into) {
            let (a, b) = (self.slots_of(*from), self.slots_of(*into));
            let stays = a.iter().zip(b).all(|(a, b)| self.slots[*a].lies_at(&self.slots[*b]));
            if self.ty(*from).is_some_and(Type::is_pending) {
                match land || !stays {
                    true => waits.push(self.flight(*from)?),
                    false => moves.flights.push((self.flight(*from)?, self.flight(*into)?)),
                }
            }
            for (from, into) in a.iter().zip(b) {
                let (x, y) = (&self.slots[*from], &self.slots[*into]);
                if x.fixed && y.fixed && x.lies_at(y) {
                    continue;
                }
                // Of a slot not yet resolved only the region is known.
                let over = |before: &Move| {
                    let y = &self.slots[before.to];
                    x.overlaps(y) || (x.region == y.region && !(x.fixed && y.fixed))
                };
                let staged = moves.tensors.iter().any(over);
                moves.tensors.push(Move { from: *from, to: *into, staged });
            }
        }
        for flight in waits {
            self.line(to, node, Step::Wait(flight), Work::default());
        }
        if !(moves.flights.is_empty() && moves.tensors.is_empty()) {
            self.line(to, node, Step::Move(moves), Work::default());
        }
        Ok(())
    }
}
