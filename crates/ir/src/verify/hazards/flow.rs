//! Blocks: their parameters and results, and what a loop must keep for its next iteration.
//!
//! A block is checked with the state at its entry. After a `cond`, the state is the join of both branches. The block of
//! a loop is checked twice, the second time with the state that the first leaves, which finds values that an
//! iteration overwrites and the next one needs. Further iterations change nothing, since each writes the same bytes.
//! Bytes that may be leased since before the call are so again behind a block, which another branch or no iteration may
//! have passed by.

use std::rc::Rc;

use crate::entity::Value;
use crate::ops::Trips;
use crate::plan::NodePlan;
use crate::program::{Block, Node};
use crate::types::Type;

use super::{Checker, Pending, Started, Tracked, text};

/// A tensor that must move when a block begins or ends.
struct Move {
    from: (Value, Rc<Tracked>),
    to: (Value, Rc<Tracked>),
}

impl<'a> Checker<'a> {
    pub(super) fn cond(&mut self, node: &'a Node, plan: &NodePlan) {
        let line = self.line;
        for (value, tensor) in self.operands(node.args.get(..1).unwrap_or_default()) {
            self.read(value, &tensor);
        }
        let before = self.bytes.clone();
        let pendings: Vec<Value> =
            node.args.iter().copied().filter(|arg| self.pendings.get(*arg).is_some()).collect();
        let states: Vec<Option<Pending>> =
            pendings.iter().map(|arg| self.pendings.get(*arg).copied()).collect();
        let (mut joined, mut flying) = (None, Vec::new());
        self.lodge(&node.results, &plan.places);
        self.release_entry(plan, &node.results);
        let old = self.old.mark();
        for block in &node.blocks {
            self.line = line;
            self.old.restore(old);
            self.bytes = before.clone();
            for (arg, state) in pendings.iter().zip(&states) {
                state.and_then(|state| self.pendings.insert(*arg, state));
            }
            self.enter(block, 0, node.args.get(1..).unwrap_or_default());
            self.nodes(block);
            self.leave(block);
            let (mut inner, mut outer) = (Vec::new(), Vec::new());
            for (from, to) in block.results.iter().zip(&node.results) {
                if self.flies_on(*from, *to) {
                    flying.push(*to);
                } else {
                    self.arrive(*from);
                    inner.push(*from);
                    outer.push(*to);
                }
            }
            let moves = self.moves(&inner, &outer);
            self.carry(moves);
            joined = match joined {
                None => Some(self.bytes.clone()),
                Some(other) => Some(self.bytes.join(&other)),
            };
        }
        self.line = line;
        self.old.restore(old);
        self.bytes = joined.unwrap_or(before);
        self.arrived(&node.results);
        for pending in flying {
            self.pendings.insert(pending, Pending::Of(pending));
            self.starts.insert(pending, Started::default());
        }
    }

    /// Whether a block's result is in flight in its final place: it stays in flight, under the name `to`.
    fn flies_on(&mut self, from: Value, to: Value) -> bool {
        let Some(Pending::Of(start)) = self.pendings.get(from).copied() else { return false };
        let (inner, outer) = (self.tensors(from), self.tensors(to));
        if !inner.iter().zip(&outer).all(|(inner, outer)| inner.placement.same(&outer.placement)) {
            return false;
        }
        for tensor in inner {
            for range in tensor.bytes() {
                self.bytes.update(tensor.region(), range, |cell| {
                    if cell.flight == Some(start) {
                        cell.flight = Some(to);
                    }
                });
            }
        }
        true
    }

    pub(super) fn repeat(
        &mut self,
        node: &'a Node,
        plan: &NodePlan,
        trips: Trips<'_>,
        carries: usize,
        slices: usize,
    ) {
        let Some(block) = node.blocks.first() else { return };
        let line = self.line;
        self.lodge(&node.results, &plan.places);
        let cut = carries.min(node.args.len());
        let (carried, others) = node.args.split_at(cut);
        let (sliced, rest) = others.split_at(slices.min(others.len()));
        self.lodge(&block.params, &block.places);
        self.release_entry(plan, &node.results);
        self.release_entry(plan, block.params.get(..carries + slices).unwrap_or_default());
        carried.iter().for_each(|arg| self.arrive(*arg));
        let moves = self.moves(carried, &block.params);
        self.carry(moves);
        self.arrived(&block.params[..cut.min(block.params.len())]);
        self.enter(block, carries + slices, rest);
        let stacked = self.operands(node.results.get(carries..).unwrap_or_default());
        for (value, tensor) in &stacked {
            self.check_write(*value, tensor);
            self.write(*value, tensor);
        }
        let (first, old) = (self.next, self.old.mark());
        let again = self.again;
        let once = match trips {
            Trips::Count(length) => self.sizes.index(length).is_ok_and(|length| length <= 1),
            Trips::While { limit, .. } => limit <= 1,
        };
        for pass in 0..if again || once { 1 } else { 2 } {
            self.again = again || pass > 0;
            self.next = first;
            self.line = line;
            self.slices(sliced, block.params.get(carries..).unwrap_or_default());
            self.nodes(block);
            self.leave(block);
            block.results.iter().for_each(|result| self.arrive(*result));
            // Entries of earlier iterations must be intact.
            stacked.iter().for_each(|(value, tensor)| self.read(*value, tensor));
            let entries = block.results.get(carries..).unwrap_or_default();
            let entries = self.moves(entries, node.results.get(carries..).unwrap_or_default());
            let carried = self.moves(&block.results, &block.params[..cut.min(block.params.len())]);
            self.stack(&entries, &carried);
            self.carry(carried);
            self.arrived(&block.params[..cut.min(block.params.len())]);
        }
        self.again = again;
        self.line = line;
        // There may be no iteration.
        self.old.restore(old);
        for (result, param) in node.results.iter().zip(&block.params).take(carries) {
            for (tensor, there) in self.tensors(*result).iter().zip(self.tensors(*param)) {
                if tensor.placement.same(&there.placement) {
                    self.rename(there.region(), &there.bytes(), *param, *result);
                } else {
                    let (expected, got) = (there.placement.place, tensor.placement.place);
                    let expected = format!("{result} at {expected}, where it is carried");
                    self.error("H10", (expected, got.to_string()));
                    self.write(*result, tensor);
                }
            }
        }
        self.arrived(&node.results);
    }

    /// The parameters of a block from `first` on take the contents of the operands in place.
    fn enter(&mut self, block: &Block, first: usize, args: &[Value]) {
        if first == 0 {
            self.lodge(&block.params, &block.places);
        }
        for (param, arg) in block.params.iter().skip(first).zip(args) {
            let mut lodged = self.tensors(*param);
            for (tensor, there) in lodged.iter_mut().zip(self.tensors(*arg)) {
                if tensor.placement.place != there.placement.place && !tensor.placement.same(&there.placement)
                {
                    let (expected, got) = (tensor.placement.place, there.placement.place);
                    let expected = format!("operand {arg} at {expected}, where {param} lies");
                    self.error("H10", (expected, got.to_string()));
                }
                self.rename(there.region(), &there.bytes(), there.root, *param);
                *tensor = Tracked::new(*param, there.placement.clone(), there.whole.clone());
            }
            self.tensors.insert(*param, lodged);
            if let Some(pending) = self.pendings.get(*arg).copied() {
                self.pendings.insert(*param, pending);
            }
        }
    }

    /// A block has ended: the leases of its starts that no line of it could end are dropped.
    fn leave(&mut self, block: &Block) {
        for start in block.nodes.iter().filter(|node| node.op.effects().starts().is_some()) {
            if let Some(started) = start.results.first().and_then(|pending| self.starts.get_mut(*pending)) {
                started.released |= !started.waited_here;
            }
        }
    }

    /// Marks the pendings among these values as arrived.
    fn arrived(&mut self, values: &[Value]) {
        for value in values {
            if self.func.ty(*value).is_some_and(Type::is_pending) {
                self.pendings.insert(*value, Pending::There);
            }
        }
    }

    fn moves(&self, from: &[Value], to: &[Value]) -> Vec<Move> {
        let pairs = from.iter().zip(to);
        let moves = pairs.flat_map(|(from, to)| {
            let ends = self.tensors(*from).into_iter().zip(self.tensors(*to));
            ends.map(|(a, b)| Move { from: (*from, a), to: (*to, b) }).collect::<Vec<_>>()
        });
        moves.collect()
    }

    /// Stacked results are copied before the others: their destination is not a source of any copy.
    fn stack(&mut self, entries: &[Move], carried: &[Move]) {
        for each in entries {
            self.read(each.from.0, &each.from.1);
            for other in entries.iter().chain(carried) {
                self.overlaps(&each.to, "what is copied from", &other.from);
            }
            self.check_write(each.to.0, &each.to.1);
            self.write(each.to.0, &each.to.1);
        }
    }

    /// Copies tensors to their destinations as one parallel assignment.
    fn carry(&mut self, moves: Vec<Move>) {
        let (stay, go): (Vec<Move>, Vec<Move>) =
            moves.into_iter().partition(|each| each.from.1.placement.same(&each.to.1.placement));
        stay.iter().chain(&go).for_each(|each| self.read(each.from.0, &each.from.1));
        for (i, each) in go.iter().enumerate() {
            for other in go[..i].iter().chain(&stay) {
                self.overlaps(&each.to, "result", &other.to);
            }
            self.check_write(each.to.0, &each.to.1);
        }
        go.iter().for_each(|each| self.write(each.to.0, &each.to.1));
        // One value may be returned several times, so names are dropped only after all are given.
        for each in &stay {
            self.name_too(each.to.1.region(), &each.to.1.bytes(), each.from.1.root, each.to.0);
        }
        stay.iter().for_each(|each| self.forget_names(each.to.1.region(), &each.to.1.bytes()));
    }

    /// An iteration begins: its entries are copied to the parameters.
    fn slices(&mut self, args: &[Value], params: &[Value]) {
        for each in self.moves(args, params) {
            self.read(each.from.0, &each.from.1);
            if let Some(part) = each.from.1.shares(&each.to.1) {
                let at = text(each.to.1.region(), &part);
                self.error("H5", format!("{} shares {at} with what is sliced, {}", each.to.0, each.from.0));
            }
            self.check_write(each.to.0, &each.to.1);
            self.write(each.to.0, &each.to.1);
        }
    }
}
