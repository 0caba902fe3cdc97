//! The structural rules of plans: V10 and P1 to P3. Hazards between buffers are the plan oracle's.

use std::collections::BTreeMap;

use crate::diagnostic::{At, Code, Diagnostic};
use crate::entity::ValueMap;
use crate::index::Sym;
use crate::mesh::Mesh;
use crate::ops::{Effects, Violation, count};
use crate::plan::{NodePlan, Place, Region};
use crate::program::{Block, Func, Node};
use crate::types::{TensorType, Type};

/// Checks the annotations of one function.
pub(super) fn verify_plan(mesh: &Mesh, func: &Func, number: usize, errors: &mut Vec<Diagnostic>) {
    let mut checker = PlanChecker {
        mesh,
        func,
        number,
        defined: ValueMap::default(),
        next_block: 0,
        queues: BTreeMap::new(),
        next: 0,
        errors,
    };
    let places = func.param_places.iter().flatten().count();
    let at = At::Func(number);
    if func.regions.is_none() {
        if places > 0 {
            checker.error(
                at,
                "",
                Violation::new("P1", "a parameter has a place, but the function is no plan").note(NOT_A_PLAN),
            );
        }
    } else if let Some(regions) = &func.regions {
        if regions
            .iter()
            .enumerate()
            .any(|(i, (region, _))| regions[..i].iter().any(|(other, _)| other == region))
        {
            checker.error(at, "plan", Violation::new("P2", "a region is declared twice"));
        }
        for (i, param) in func.body.params.iter().enumerate() {
            match (func.ty(*param), func.param_places.get(i).copied().flatten()) {
                (Some(Type::Tensor(tensor)), Some(place)) => checker.place(at, "parameter", tensor, place),
                (Some(Type::Tensor(_)), None) => {
                    checker.error(at, "parameter", Violation::new("P1", format!("{param} has no place")));
                }
                (_, Some(_)) => checker.error(
                    at,
                    "parameter",
                    Violation::new("P1", format!("{param} is no tensor, but has a place")),
                ),
                _ => {}
            }
        }
    }
    checker.block(&func.body);
}

const NOT_A_PLAN: &str = "a plan declares its regions: plan (arena: 0x40)";

struct PlanChecker<'a, 'e> {
    mesh: &'a Mesh,
    func: &'a Func,
    number: usize,
    /// Values defined so far: their block, and whether they are starts.
    defined: ValueMap<(usize, bool)>,
    next_block: usize,
    /// The next number on each queue.
    queues: BTreeMap<String, u32>,
    next: usize,
    errors: &'e mut Vec<Diagnostic>,
}

impl PlanChecker<'_, '_> {
    fn error(&mut self, at: At, op: &str, violation: Violation) {
        let message = if op.is_empty() { violation.message } else { format!("{op}: {}", violation.message) };
        let rule = violation.rule.to_string();
        self.errors.push(Diagnostic {
            code: Code::Verify,
            rule,
            message,
            at,
            loc: None,
            note: violation.note,
        });
    }

    fn block(&mut self, block: &Block) {
        let id = self.next_block;
        self.next_block += 1;
        for param in &block.params {
            self.defined.insert(*param, (id, false));
        }
        for node in &block.nodes {
            let at = At::Node(self.number, self.next);
            self.next += 1;
            match (&node.plan, self.func.regions.is_some()) {
                (Some(_), false) => {
                    let violation =
                        Violation::new("P1", "has a place, queue or lease, but the function is no plan");
                    self.error(at, node.op.info().name, violation.note(NOT_A_PLAN));
                }
                (plan, true) => self.node(node, plan.as_deref().unwrap_or(&NodePlan::default()), id, at),
                (None, false) => {}
            }
            node.blocks.iter().for_each(|block| self.block(block));
            let starts = node.op.effects().starts().is_some();
            for result in &node.results {
                self.defined.insert(*result, (id, starts));
            }
        }
        self.next += 1;
    }

    fn node(&mut self, node: &Node, plan: &NodePlan, block: usize, at: At) {
        let op = node.op.info().name;
        let tensors: Vec<TensorType> = node
            .results
            .iter()
            .filter_map(|result| self.func.ty(*result))
            .flat_map(|ty| match ty {
                Type::Tensor(tensor) => vec![tensor.clone()],
                Type::Pending(tensors) => tensors.clone(),
                Type::Size(..) => vec![],
            })
            .collect();
        if tensors.len() != plan.places.len() {
            let message = format!("expected {}, got {}", count(tensors.len(), "place"), plan.places.len());
            self.error(at, op, Violation::new("P1", message));
        }
        for (tensor, place) in tensors.iter().zip(&plan.places) {
            self.place(at, op, tensor, *place);
        }
        self.queue(node, plan, at);
        for value in &plan.reuse {
            let here = self.defined.get(*value).is_some_and(|(of, _)| *of == block);
            if !here || self.func.ty(*value).and_then(Type::as_tensor).is_none() {
                self.error(
                    at,
                    op,
                    Violation::new("P3", format!("reuse: {value} is no tensor defined before in this block")),
                );
            }
        }
        for value in &plan.lease {
            if !node.args.contains(value) || node.op.effects().starts().is_none() {
                self.error(
                    at,
                    op,
                    Violation::new("P3", format!("lease: {value} is no operand of this start")),
                );
            }
        }
        for value in &plan.release {
            if self.defined.get(*value) != Some(&(block, true)) {
                self.error(
                    at,
                    op,
                    Violation::new(
                        "P3",
                        format!("release: {value} is no start before this line in this block"),
                    ),
                );
            }
        }
    }

    fn queue(&mut self, node: &Node, plan: &NodePlan, at: At) {
        let op = node.op.info().name;
        match (node.op.effects(), plan.queue) {
            (Effects::Collective(group) | Effects::Messages(group), Some((queue, number))) => {
                if queue != group {
                    let (expected, got) = (self.mesh.group_text(group), self.mesh.group_text(queue));
                    self.error(
                        at,
                        op,
                        Violation::new("V10", format!("expected queue {expected}, got {got}")),
                    );
                    return;
                }
                let next = self.queues.entry(self.mesh.group_text(group)).or_default();
                let expected = *next;
                *next += 1;
                if number != expected {
                    let message = format!(
                        "expected start #{expected} on queue {}, got #{number}",
                        self.mesh.group_text(group)
                    );
                    self.error(at, op, Violation::new("V10", message));
                }
            }
            (Effects::Collective(group) | Effects::Messages(group), None) => {
                let message = format!("expected queue {}, got none", self.mesh.group_text(group));
                self.error(at, op, Violation::new("V10", message));
            }
            (_, Some(_)) => self.error(at, op, Violation::new("V10", "is no start, but has a queue")),
            (_, None) => {}
        }
    }

    fn place(&mut self, at: At, op: &str, tensor: &TensorType, place: Place) {
        let mut unbacked = false;
        tensor
            .shape
            .iter()
            .for_each(|size| size.symbols(&mut |sym| unbacked |= matches!(sym, Sym::Unbacked(_))));
        let declared = self.func.regions.iter().flatten().find(|(region, _)| *region == place.region);
        let Some((_, size)) = declared else {
            self.error(
                at,
                op,
                Violation::new("P2", format!("{place}: the plan has no region `{}`", place.region.name())),
            );
            return;
        };
        if unbacked != (place.region == Region::Dyn) {
            let message = format!("{place}: a value lies in dyn where its size is unbacked, and only there");
            self.error(at, op, Violation::new("P2", message));
            return;
        }
        if !place.offset.is_multiple_of(tensor.dtype.size() as u64) {
            let message = format!(
                "{place}: expected a multiple of {}, the size of {}",
                tensor.dtype.size(),
                tensor.dtype
            );
            self.error(at, op, Violation::new("P2", message));
            return;
        }
        let bytes = tensor.bytes().as_const().and_then(|bytes| u64::try_from(bytes).ok());
        if let Some(bytes) = bytes
            && place.offset.checked_add(bytes).is_none_or(|end| end > *size)
        {
            let message = format!("{place}: {bytes} bytes do not fit in a region of {size:#x}");
            self.error(at, op, Violation::new("P2", message));
        }
    }
}
