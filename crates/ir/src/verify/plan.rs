//! The structural rules of plans: V10 and P1 to P4. Hazards between buffers are in `hazards`.

use std::collections::{BTreeMap, BTreeSet};

use crate::diagnostic::{Code, Diagnostic, Position};
use crate::entity::{Value, ValueMap};
use crate::index::Sym;
use crate::mesh::Mesh;
use crate::ops::{Alias, Effects, EvalCx, Flow, Trips, count};
use crate::plan::{NodePlan, Place, PlanHeader};
use crate::program::{Block, Func, Node};
use crate::types::{TensorType, Type};
use consort_types::{Failure, Space};

/// Checks the annotations of one function.
pub(super) fn verify_plan(mesh: &Mesh, func: &Func, number: usize, errors: &mut Vec<Diagnostic>) {
    let mut checker = PlanChecker {
        mesh,
        func,
        number,
        defined: ValueMap::default(),
        places: ValueMap::default(),
        next_block: 0,
        queues: BTreeMap::new(),
        next: 0,
        errors,
    };
    if let Some(plan) = &func.plan {
        checker.head(plan);
    }
    checker.block(&func.body, Position::Func(number));
}

const NOT_A_PLAN: &str = "a plan says its rank and its regions: plan (rank 0, arena: 0x40)";

struct PlanChecker<'a, 'e> {
    mesh: &'a Mesh,
    func: &'a Func,
    number: usize,
    /// Values defined so far: their block, and whether they are starts.
    defined: ValueMap<(usize, bool)>,
    /// Their places.
    places: ValueMap<Vec<Place>>,
    next_block: usize,
    /// The next number on each queue.
    queues: BTreeMap<String, u32>,
    next: usize,
    errors: &'e mut Vec<Diagnostic>,
}

impl PlanChecker<'_, '_> {
    fn error(&mut self, at: Position, op: &str, failure: Box<Failure>) {
        let failure = failure.of(op.to_string());
        self.errors.push(Diagnostic { code: Code::Verify, at, failure });
    }

    /// Checks that the rank is in the mesh, regions are declared once, and donated values are parameters.
    fn head(&mut self, plan: &PlanHeader) {
        let at = Position::Func(self.number);
        if plan.rank.0 >= self.mesh.n_ranks() {
            let message = (format!("a rank below {}", self.mesh.n_ranks()), plan.rank.0.to_string());
            self.error(at, "plan", Failure::rule("P1", message));
        }
        let mut seen = BTreeSet::new();
        if !plan.regions.iter().all(|(region, _)| seen.insert(*region)) {
            self.error(at, "plan", Failure::rule("P2", "a region is declared twice"));
        }
        for value in &plan.donated {
            if !self.func.body.params.contains(value) {
                self.error(at, "plan", Failure::rule("P3", format!("donated: {value} is no parameter")));
            }
        }
    }

    fn block(&mut self, block: &Block, at: Position) {
        let id = self.next_block;
        self.next_block += 1;
        self.params(block, at);
        for param in &block.params {
            self.defined.insert(*param, (id, false));
        }
        for node in &block.nodes {
            let at = Position::Node(self.number, self.next);
            self.next += 1;
            match (&node.plan, self.func.plan.is_some()) {
                (Some(_), false) => {
                    let violation =
                        Failure::rule("P1", "has a place, queue or lease, but the function is no plan");
                    self.error(at, node.op.info().name, violation.note(NOT_A_PLAN));
                }
                (plan, true) => self.node(node, plan.as_deref().unwrap_or(&NodePlan::default()), id, at),
                (None, false) => {}
            }
            node.blocks.iter().for_each(|block| self.block(block, at));
            let starts = node.op.effects().starts().is_some();
            for result in &node.results {
                self.defined.insert(*result, (id, starts));
            }
        }
        self.next += 1;
    }

    /// Checks that block parameters have places in a plan, and only there.
    fn params(&mut self, block: &Block, at: Position) {
        if self.func.plan.is_none() {
            if !block.places.is_empty() {
                let violation = Failure::rule("P1", "a parameter has a place, but the function is no plan");
                self.error(at, "", violation.note(NOT_A_PLAN));
            }
            return;
        }
        let tensors = self.tensors(&block.params);
        if tensors.len() != block.places.len() {
            let message = (count(tensors.len(), "place"), block.places.len().to_string());
            self.error(at, "parameter", Failure::rule("P1", message));
        }
        for (tensor, place) in tensors.iter().zip(&block.places) {
            self.place(at, "parameter", tensor, *place);
        }
        self.places_of(&block.params, &block.places);
    }

    /// The tensors of some values, those inside pendings included.
    fn tensors(&self, values: &[Value]) -> Vec<TensorType> {
        values.iter().filter_map(|value| self.func.ty(*value)).flat_map(Type::tensors).cloned().collect()
    }

    /// Records the places of values.
    fn places_of(&mut self, values: &[Value], places: &[Place]) {
        let mut places = places.iter();
        for value in values {
            let n = self.func.ty(*value).map_or(0, |ty| ty.tensors().len());
            self.places.insert(*value, places.by_ref().take(n).copied().collect());
        }
    }

    fn node(&mut self, node: &Node, plan: &NodePlan, block: usize, at: Position) {
        let op = node.op.info().name;
        let tensors = self.tensors(&node.results);
        if tensors.len() != plan.places.len() {
            let message = (count(tensors.len(), "place"), plan.places.len().to_string());
            self.error(at, op, Failure::rule("P1", message));
        }
        if plan.view {
            self.view(node, plan, at);
        } else {
            for (tensor, place) in tensors.iter().zip(&plan.places) {
                self.place(at, op, tensor, *place);
            }
        }
        self.places_of(&node.results, &plan.places);
        self.spaces(node, plan, at);
        self.queue(node, plan, at);
        for value in &plan.reuse {
            let here = self.defined.get(*value).is_some_and(|(of, _)| *of == block);
            if !here || self.func.ty(*value).and_then(Type::as_tensor).is_none() {
                let message = format!("reuse: {value} is no tensor defined before in this block");
                self.error(at, op, Failure::rule("P3", message));
            }
        }
        let copied = plan.copies.iter().map(|(value, _)| ("copy", *value));
        let leased = plan.lease.iter().map(|value| ("lease", *value));
        for (word, value) in copied.chain(leased) {
            if !node.args.contains(&value) || node.op.effects().starts().is_none() {
                let message = format!("{word}: {value} is no operand of this start");
                self.error(at, op, Failure::rule("P3", message));
            }
        }
        for value in &plan.release {
            if self.defined.get(*value) != Some(&(block, true)) {
                let message = format!("release: {value} is no start before this line in this block");
                self.error(at, op, Failure::rule("P3", message));
            }
        }
    }

    /// Checks that the tensors of a line are in one space, and that of the host where the host reads them.
    fn spaces(&mut self, node: &Node, plan: &NodePlan, at: Position) {
        let places = |value: &Value| self.places.get(*value).into_iter().flatten().copied();
        let (mut places, of_host): (Vec<Place>, bool) = match node.op.flow() {
            Flow::Straight => {
                let copied = |value: &&Value| plan.copies.iter().any(|(copied, _)| copied == *value);
                let taken = node.args.iter().filter(|value| !copied(value)).flat_map(places);
                (taken.chain(plan.places.iter().copied()).collect(), node.op.effects() == Effects::Host)
            }
            // The other operands are those of the blocks.
            Flow::Cond | Flow::Loop { trips: Trips::While { .. }, .. } => {
                (node.args.first().into_iter().flat_map(places).collect(), true)
            }
            Flow::Loop { .. } => return,
        };
        let first = if of_host {
            Space::Host
        } else {
            places.first().map_or(Space::Host, |place| place.region.space)
        };
        places.retain(|place| place.region.space != first);
        if let Some(place) = places.first() {
            let headline = (format!("tensors in the memory of the {first}"), format!("{place}"));
            self.error(at, node.op.info().name, Failure::rule("P4", headline));
        }
    }

    /// Checks that a view is at its operand's place and that its op is a view op.
    fn view(&mut self, node: &Node, plan: &NodePlan, at: Position) {
        let of = node.args.first().and_then(|arg| self.places.get(*arg)).and_then(|places| places.first());
        let there = plan.places.iter().all(|place| Some(place) == of);
        if node.op.alias() != Alias::View || !there {
            let message = "expected the place of the operand, and an op that can be a view of it";
            self.error(at, node.op.info().name, Failure::rule("P3", format!("view: {message}")));
        }
    }

    fn queue(&mut self, node: &Node, plan: &NodePlan, at: Position) {
        let op = node.op.info().name;
        match (node.op.effects(), plan.queue) {
            (Effects::Collective(group) | Effects::Messages(group), Some((queue, number))) => {
                if queue != group {
                    let (expected, got) = (self.mesh.group_text(group), self.mesh.group_text(queue));
                    self.error(at, op, Failure::rule("V10", (format!("queue {expected}"), got.to_string())));
                    return;
                }
                let next = self.queues.entry(self.mesh.group_text(group)).or_default();
                let expected = *next;
                *next += 1;
                if number != expected {
                    let message = (
                        format!("start #{expected} on queue {}", self.mesh.group_text(group)),
                        format!("#{number}"),
                    );
                    self.error(at, op, Failure::rule("V10", message));
                }
            }
            (Effects::Collective(group) | Effects::Messages(group), None) => {
                let message = (format!("queue {}", self.mesh.group_text(group)), "none");
                self.error(at, op, Failure::rule("V10", message));
            }
            (_, Some(_)) => self.error(at, op, Failure::rule("V10", "is no start, but has a queue")),
            (_, None) => {}
        }
    }

    fn place(&mut self, at: Position, op: &str, tensor: &TensorType, place: Place) {
        let Some(plan) = &self.func.plan else { return };
        let mut unbacked = false;
        tensor
            .shape
            .iter()
            .for_each(|size| size.symbols(&mut |sym| unbacked |= matches!(sym, Sym::Unbacked(_))));
        let declared = plan.regions.iter().find(|(region, _)| *region == place.region);
        let message = if declared.is_none() {
            Some(format!("{place}: the plan has no region `{}`", place.region))
        } else if unbacked != place.region.is_dyn() {
            Some(format!("{place}: a value lies in dyn where its size is unbacked, and only there"))
        } else if !place.offset.is_multiple_of(tensor.dtype.size() as u64) {
            let (size, dtype) = (tensor.dtype.size(), tensor.dtype);
            Some(format!("{place}: expected a multiple of {size}, the size of {dtype}"))
        } else {
            let symbols = plan.symbols.iter().copied().collect();
            let sizes = EvalCx { mesh: self.mesh, rank: plan.rank, symbols: &symbols };
            let size = declared.map_or(0, |(_, size)| *size);
            match sizes.index(&tensor.bytes()).ok().and_then(|bytes| u64::try_from(bytes).ok()) {
                _ if unbacked => None,
                None => Some(format!("{place}: the plan does not say how large the value is")),
                Some(bytes) if place.offset.checked_add(bytes).is_some_and(|end| end <= size) => None,
                Some(bytes) => Some(format!("{place}: {bytes} bytes do not fit in a region of {size:#x}")),
            }
        };
        if let Some(message) = message {
            self.error(at, op, Failure::rule("P2", message));
        }
    }
}
