//! Lowers starts: which slots take part, which operands are copied first, and which calls of a group result.

use consort_ir::index::Index;
use consort_ir::ops::{ExchangeStart, Op, no_communication};
use consort_ir::plan::NodePlan;
use consort_ir::program::Node;
use consort_types::{Collective, Kind, Message, Written};

use super::lower::Lowerer;
use super::memory::SlotId;
use super::step::{BlockId, Call, Slots, Start, Step, Work};
use crate::RunError;

impl Lowerer<'_> {
    /// What prepares the operands is lines of their own, since it must be over before the operation starts.
    pub(super) fn start(&mut self, to: BlockId, node: &Node, plan: &NodePlan) -> Result<Step, RunError> {
        let collective = node.op.collective().ok_or_else(no_communication)?;
        let (mut operands, results) = (self.all_slots(&node.args), self.all_slots(&node.results));
        let flight = self.flight(node.results[0])?;
        let mut start = Start {
            group: None,
            zeros_after: Slots::new(),
            written: Slots::new(),
            leaves: self.leaves(node.results[0]),
            call: None,
            flight,
        };
        let copied = |arg: usize| plan.copies.iter().any(|(value, _)| *value == node.args[arg]);
        let Some(me) = self.mesh.group_rank(collective.over, self.rank) else {
            // A rank outside the group passes its operands through.
            let sent = collective.sends.len();
            for (i, (from, result)) in operands.iter().skip(sent).zip(&results).enumerate() {
                let step = Step::Copy { from: *from, to: *result, counted: copied(sent + i) };
                self.line(to, node, step, Work::default());
            }
            return Ok(Step::Start(Box::new(start)));
        };
        start.group = Some(self.queue(plan)?);
        let (mut copies, mut zeros) = (Vec::new(), Slots::new());
        let written = collective.role(me as usize).written;
        for (arg, slot) in operands.iter().enumerate() {
            let elsewhere = (0..results.len()).any(|result| {
                collective.overwrites(result) == Some(arg)
                    && !self.slots[*slot].lies_at(&self.slots[results[result]])
            });
            let value = node.args[arg];
            if !elsewhere && !plan.lease.contains(&value) && !self.slots[*slot].bytes.is_empty() {
                return Err(RunError::new(format!(
                    "peers may read {value}, and the line has no `lease {value}`"
                )));
            }
        }
        for (i, result) in results.iter().enumerate() {
            let Some(at) = collective.overwrites(i) else { continue };
            let operand = operands[at];
            let slot = &self.slots[operand];
            // A tensor without elements has no location, so it counts as in place.
            let stays = slot.lies_at(&self.slots[*result]) || slot.fixed && slot.layout.numel() == 0;
            let comes = |message: &Message<Index>| self.has_peer(message, me, &collective);
            let matters = collective.needs(at, me as usize, comes);
            if copied(at) && matters {
                copies.push(Step::Copy { from: operand, to: *result, counted: true });
            } else if !stays && matters && written != Written::Zeros {
                let value = node.args[at];
                let message =
                    format!("{value} lies elsewhere than the result, and the line has no `copy {value}`");
                return Err(RunError::new(message));
            }
            if written == Written::Zeros && !copied(at) && !self.slots[operand].overlaps(&self.slots[*result])
            {
                zeros.push(*result);
                continue;
            }
            operands[at] = *result;
            match written {
                Written::Zeros => start.zeros_after.push(*result),
                // A receive without a peer writes nothing.
                Written::InPlace if collective.receives.get(i).map(comes) == Some(Some(false)) => {}
                Written::InPlace => start.written.push(*result),
                Written::Same | Written::New | Written::Nothing => {}
            }
        }
        let overwrites = (0..results.len()).any(|i| collective.overwrites(i).is_some());
        if let (false, Some((value, _))) = (overwrites, plan.copies.first()) {
            return Err(RunError::new(format!("copy {value}: the operation does not work in place")));
        }
        match written {
            Written::New => start.written.extend(results.iter().copied()),
            Written::Zeros if !overwrites => zeros.extend(results.iter().copied()),
            _ => {}
        }
        for copy in copies {
            self.line(to, node, copy, Work::default());
        }
        if !zeros.is_empty() {
            self.line(to, node, Step::Zeros(zeros), Work::default());
        }
        let outs = if written == Written::New { &results[..] } else { &[] };
        start.call = match collective.kind {
            Kind::Exchange => self.exchange(&collective, me, &operands),
            _ => {
                let (operands, results) = (Slots::from_slice(&operands), Slots::from_slice(outs));
                Some(Call { op: node.op.clone(), operands, results })
            }
        };
        Ok(Step::Start(Box::new(start)))
    }

    /// The number of the group on whose queue a start runs, which must be the next one there.
    fn queue(&mut self, plan: &NodePlan) -> Result<usize, RunError> {
        let (group, number) = plan.queue.ok_or_else(|| RunError::new("the line has no `queue`"))?;
        let queue = match self.queues.iter().position(|(other, _)| *other == group) {
            Some(queue) => queue,
            None => {
                self.queues.push((group, 0));
                self.queues.len() - 1
            }
        };
        let next = &mut self.queues[queue].1;
        if number != *next {
            return Err(RunError::new((format!("start #{next} on its queue"), format!("#{number}"))));
        }
        *next += 1;
        Ok(queue)
    }

    /// Whether a message has a peer; `None` if that is known only at run time.
    fn has_peer(&self, message: &Message<Index>, me: u32, of: &Collective<'_, Index>) -> Option<bool> {
        let peer = message.peer(me, self.mesh.group_size(of.over), |index| self.sizes().index(index));
        peer.ok().map(|peer| peer != -1)
    }

    /// An exchange without the messages known to have no peer; `None` if no message is left.
    fn exchange(&self, whole: &Collective<'_, Index>, me: u32, operands: &[SlotId]) -> Option<Call> {
        let stays = |message: &Message<Index>| self.has_peer(message, me, whole) != Some(false);
        let messages = whole.sends.iter().chain(whole.receives).zip(operands);
        let operands: Slots = messages.filter(|(message, _)| stays(message)).map(|(_, slot)| *slot).collect();
        let left = |list: &[Message<Index>]| list.iter().filter(|message| stays(message)).cloned().collect();
        let op = ExchangeStart { send: left(whole.sends), recv: left(whole.receives), over: whole.over };
        (!operands.is_empty()).then(|| Call { op: Op::new(op), operands, results: Slots::new() })
    }
}
