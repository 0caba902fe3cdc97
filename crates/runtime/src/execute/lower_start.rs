//! Lowers starts: which places take part, what is copied to them first, and which calls of a group they are.

use consort_ir::dtype::Dtype;
use consort_ir::mesh;
use consort_ir::ops::{
    AllReduceStart, BroadcastStart, ExchangeStart, GatherStart, Message, Op, Peer, PermuteStart,
    ReduceScatterStart, ReduceStart, ScatterStart,
};
use consort_ir::plan::NodePlan;
use consort_ir::program::Node;

use crate::start::{Results, results_of};

use super::RunError;
use super::lower::{Lowerer, is};
use super::memory::SlotId;
use super::step::{Call, Slots, Start, Step};

impl Lowerer<'_> {
    pub(super) fn start(
        &mut self,
        node: &Node,
        plan: &NodePlan,
        group: mesh::Group,
    ) -> Result<Step, RunError> {
        let (mut operands, results) = (self.all_slots(&node.args), self.all_slots(&node.results));
        let flight = self.flight(node.results[0])?;
        let mut start = Start {
            group: None,
            copies: Vec::new(),
            zeros: Slots::new(),
            zeros_after: Slots::new(),
            written: Slots::new(),
            calls: Vec::new(),
            flight,
        };
        let copied = |arg: usize| plan.copies.iter().any(|(value, _)| *value == node.args[arg]);
        let Some(me) = self.mesh.group_rank(group, self.rank) else {
            // A rank outside the group passes its operands through.
            let sent = node.op.messages().0.len();
            for (i, (from, to)) in operands.iter().skip(sent).zip(&results).enumerate() {
                start.copies.push((*from, *to, copied(sent + i)));
            }
            return Ok(Step::Start(Box::new(start)));
        };
        start.group = Some(match self.groups.iter().position(|other| *other == group) {
            Some(number) => number,
            None => {
                self.groups.push(group);
                self.groups.len() - 1
            }
        });
        let how = results_of(&*node.op, me as usize);
        for (i, result) in results.iter().enumerate() {
            let Some(at) = node.op.overwrites(i) else { continue };
            let operand = operands[at];
            let slot = &self.slots[operand];
            // Of a tensor without elements nothing is anywhere.
            let stays = slot.lies_at(&self.slots[*result]) || slot.fixed && slot.layout.numel() == 0;
            let matters = self.matters(&node.op, me, i);
            if copied(at) && matters {
                start.copies.push((operand, *result, true));
            } else if !stays && matters && how != Results::Zeros {
                let value = node.args[at];
                let message =
                    format!("{value} lies elsewhere than the result, and the line has no `copy {value}`");
                return Err(RunError::new(message));
            }
            if how == Results::Zeros && !copied(at) && !self.slots[operand].overlaps(&self.slots[*result]) {
                start.zeros.push(*result);
                continue;
            }
            operands[at] = *result;
            match how {
                Results::Zeros => start.zeros_after.push(*result),
                // A message that comes from nowhere writes nothing.
                Results::InPlace if self.comes(&node.op, me, i) == Some(false) => {}
                Results::InPlace => start.written.push(*result),
                Results::Same | Results::New | Results::None => {}
            }
        }
        let overwrites = (0..results.len()).any(|i| node.op.overwrites(i).is_some());
        if let (false, Some((value, _))) = (overwrites, plan.copies.first()) {
            return Err(RunError::new(format!("copy {value}: the operation does not work in place")));
        }
        match how {
            Results::New => start.written.extend(results.iter().copied()),
            Results::Zeros if !overwrites => start.zeros.extend(results.iter().copied()),
            _ => {}
        }
        let outs = if how == Results::New { &results[..] } else { &[] };
        start.calls = match node.op.as_op() {
            Some(exchange) => self.exchange(exchange, me, &operands).into_iter().collect(),
            None => self.calls(&node.op, &operands, outs),
        };
        Ok(Step::Start(Box::new(start)))
    }

    /// Whether a result depends on what the operand under it holds here.
    fn matters(&self, op: &Op, me: u32, result: usize) -> bool {
        if let Some(BroadcastStart { root, .. }) = op.as_op() {
            return *root == me as usize;
        }
        !is::<ExchangeStart>(op) || self.comes(op, me, result) != Some(true)
    }

    /// Whether a message comes into a result of an exchange, where that is known already.
    fn comes(&self, op: &Op, me: u32, result: usize) -> Option<bool> {
        let exchange: &ExchangeStart = op.as_op()?;
        self.goes(&exchange.recv[result], me, exchange.over)
    }

    /// Whether a message has another end, where that is known already.
    fn goes(&self, message: &Message, me: u32, over: mesh::Group) -> Option<bool> {
        match &message.peer {
            Peer::Route(route) => Some(route.to(me, self.mesh.group_size(over)).is_some()),
            Peer::At(index) => self.sizes().index(index).ok().map(|peer| peer != -1),
        }
    }

    /// An exchange without the messages that are known to go nowhere; none, where all do.
    fn exchange(&self, op: &ExchangeStart, me: u32, operands: &[SlotId]) -> Option<Call> {
        let stays = |message: &Message| self.goes(message, me, op.over) != Some(false);
        let messages = op.send.iter().chain(&op.recv).zip(operands);
        let operands: Slots = messages.filter(|(message, _)| stays(message)).map(|(_, slot)| *slot).collect();
        let left = |list: &[Message]| list.iter().filter(|message| stays(message)).cloned().collect();
        let op = ExchangeStart { send: left(&op.send), recv: left(&op.recv), over: op.over };
        (!operands.is_empty()).then(|| Call { op: Op::new(op), operands, results: Slots::new() })
    }

    /// The operations of the group that a start is: one, unless a group takes one tensor of a kind at a time.
    fn calls(&self, op: &Op, operands: &[SlotId], results: &[SlotId]) -> Vec<Call> {
        let dtype = |slot: &SlotId| self.slots[*slot].dtype;
        let first: Option<Dtype> = operands.first().map(dtype);
        let mixed = operands.iter().any(|slot| Some(dtype(slot)) != first);
        let reduces = is::<AllReduceStart>(op) || is::<ReduceStart>(op) || is::<ReduceScatterStart>(op);
        let single = is::<GatherStart>(op) || is::<ScatterStart>(op) || is::<PermuteStart>(op);
        if operands.len() < 2 || !(single || (reduces && mixed)) {
            let (operands, results) = (Slots::from_slice(operands), Slots::from_slice(results));
            return vec![Call { op: op.clone(), operands, results }];
        }
        let one = |(i, operand): (usize, &SlotId)| Call {
            op: alone(op, i),
            operands: Slots::from_slice(&[*operand]),
            results: results.get(i).into_iter().copied().collect(),
        };
        operands.iter().enumerate().map(one).collect()
    }
}

/// The op for one of its operands.
fn alone(op: &Op, i: usize) -> Op {
    let one = |dims: &[usize]| dims.get(i).copied().into_iter().collect();
    if let Some(GatherStart { dims, root, over }) = op.as_op() {
        return Op::new(GatherStart { dims: one(dims), root: *root, over: *over });
    }
    if let Some(ScatterStart { dims, root, over }) = op.as_op() {
        return Op::new(ScatterStart { dims: one(dims), root: *root, over: *over });
    }
    if let Some(ReduceScatterStart { reduce, dims, over }) = op.as_op() {
        return Op::new(ReduceScatterStart { reduce: *reduce, dims: one(dims), over: *over });
    }
    op.clone()
}
