//! The storage of the results of starts and waits.

use consort_ir::program::Node;
use consort_ir::storage::is_needed;
use consort_ir::types::Type;
use consort_types::{Destination, Held};

use super::PlanError;
use super::decide::{Copied, Line, Planner};
use super::storage::{Located, Span};
use super::uses::{END, overwritten};

impl<'a> Planner<'a> {
    pub(super) fn wait(&mut self, node: &'a Node) -> Line {
        for (part, result) in self.parts_of(node.args[0]).zip(&node.results) {
            self.same(*result, part..part + 1);
            self.touch(*result);
        }
        if let Some(start) = self.uses.start_of(node.args[0]) {
            for (arg, _) in
                start.args.iter().zip(overwritten(self.func, start)).filter(|(_, over)| over.is_none())
            {
                self.touch(*arg);
            }
        }
        Line::default()
    }

    pub(super) fn start(&mut self, node: &'a Node) -> Result<Line, PlanError> {
        let mut line = Line::default();
        let tensors = self.func.ty(node.results[0]).map_or(&[][..], Type::tensors);
        let overwritten = overwritten(self.func, node);
        let rivals = self.rivals(node, &overwritten);
        let is_needed = |result| {
            node.op.overwrites(result).is_some_and(|operand| is_needed(&*node.op, operand, &self.sizes))
        };
        let matters: Vec<bool> = (0..tensors.len()).map(is_needed).collect();
        // Results that need the contents of their operand choose first.
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|result| !matters[*result]);
        let (mut parts, mut in_place): (Vec<Option<Located>>, _) =
            (vec![None; tensors.len()], vec![false; node.args.len()]);
        for result in order {
            let Some(operand) = node.op.overwrites(result) else {
                parts[result] = Some(self.new_buf(&tensors[result], self.now)?);
                continue;
            };
            let (value, from) = (node.args[operand], self.part(node.args[operand]));
            let free = rivals[operand].iter().all(|rival| overwritten[*rival].is_some() && !in_place[*rival]);
            let held = self.held(from).or((!free).then_some(Held::Needed));
            let destination = Destination::of(held, matters[result]);
            if destination == Destination::Operand {
                line.reuse.push(value);
                in_place[operand] = true;
                parts[result] = Some(self.storage.parts[from as usize].located.without_gaps());
                continue;
            }
            let own = self.new_buf(&tensors[result], self.now)?;
            if let Destination::Copy(why) = destination {
                line.copies.push(Copied { value, why, from, to: result as u32 });
                let span = self.storage.span(from);
                self.storage.touch_over(span, self.now, own.buf);
            }
            parts[result] = Some(own);
        }
        self.define(node.results[0], parts.into_iter().flatten());
        let first = self.part(node.results[0]);
        line.copies.iter_mut().for_each(|copied| copied.to += first);
        // An operand in place becomes the result; all other operands are held until the wait.
        let holds = self.uses.get(node.results[0]).holds;
        for (operand, arg) in node.args.iter().enumerate().filter(|(operand, _)| !in_place[*operand]) {
            if overwritten[operand].is_none() {
                self.touch(*arg);
            }
            let part = self.part(*arg);
            self.storage.prolong(part, holds, holds);
            let buf = self.storage.parts[part as usize].located.buf;
            self.storage.buf_mut(buf).outlives |= holds == END;
        }
        self.touch(node.results[0]);
        for value in node.args.iter().chain(&node.results) {
            for part in self.parts_of(*value) {
                let buf = self.storage.parts[part as usize].located.buf;
                self.storage.buf_mut(buf).shared = true;
            }
        }
        Ok(line)
    }

    /// For each operand of a start that works in place, the other operands that overlap it.
    fn rivals(&mut self, node: &Node, overwritten: &[Option<usize>]) -> Vec<Vec<usize>> {
        let mut rivals = vec![Vec::new(); node.args.len()];
        if node.args.len() < 2 || overwritten.iter().all(Option::is_none) {
            return rivals;
        }
        let mut spans: Vec<(Span, usize)> =
            node.args.iter().enumerate().map(|(i, arg)| (self.storage.span(self.part(*arg)), i)).collect();
        spans.sort();
        for (i, (span, operand)) in spans.iter().enumerate() {
            for (_, other) in spans[i + 1..].iter().take_while(|(other, _)| other.meets(span)) {
                rivals[*operand].push(*other);
                rivals[*other].push(*operand);
            }
        }
        rivals
    }
}
