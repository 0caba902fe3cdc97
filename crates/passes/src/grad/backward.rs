//! Emits the backward of a recorded function: its nodes in reverse order, each by the rule of its op.
//!
//! The rule of a start is emitted where its wait stood, and its own wait where the start stood: what could run between
//! a start and its wait can run there in the backward too, and the order in which ranks wait for one another is
//! reversed exactly, so that a program that completes has a gradient that completes.

use std::collections::BTreeMap;

use consort_ir::builder::Builder;
use consort_ir::entity::{Value, ValueMap};
use consort_ir::infer::fits;
use consort_ir::ops::{Add, Constant, Effects, Elements, Flow, Op, VjpCx, VjpNode};
use consort_ir::program::Node;
use consort_ir::types::{TensorType, Type};
use consort_types::Failure;

use super::active::Active;
use super::copy::located;
use super::tape::{Entry, Tape, is_made_again};

/// The cotangents of tensors: of a value, or of a tensor inside a pending.
pub(super) type Cotangents = BTreeMap<(Value, usize), Value>;

/// Where values of the forward are in the block of the backward.
pub(super) enum Values {
    /// In the same block.
    Same,
    /// Parameters, and values that were made again.
    Known(ValueMap<Value>),
}

impl Values {
    pub(super) fn get(&self, value: Value) -> Option<Value> {
        match self {
            Values::Same => Some(value),
            Values::Known(known) => known.get(value).copied(),
        }
    }
}

/// A value that the block of the backward cannot have.
const NOWHERE: Value = Value(u32::MAX);

/// The rest of a start's rule, from its first wait on, and the cotangents of the start's operands.
#[derive(Default)]
struct Rest {
    nodes: Vec<Node>,
    cotangents: Vec<(Value, Value)>,
}

/// A backward being emitted.
pub(super) struct Backward<'a, 'b> {
    pub(super) builder: Builder<'a>,
    pub(super) active: &'b Active,
}

impl Backward<'_, '_> {
    /// Emits the backward of a block: from the cotangents of its results to those of its parameters.
    pub(super) fn block(
        &mut self,
        tape: &Tape<'_>,
        values: &Values,
        cotangents: &mut Cotangents,
    ) -> Result<(), Box<Failure>> {
        let is_start = |entry: &Entry<'_>| entry.node.op.effects().starts().is_some();
        let starts = tape.entries.iter().enumerate().filter(|(_, entry)| is_start(entry));
        let starts: BTreeMap<Value, usize> =
            starts.filter_map(|(at, entry)| Some((*entry.results.first()?, at))).collect();
        let mut rests: BTreeMap<usize, Rest> = BTreeMap::new();
        for (at, entry) in tape.entries.iter().enumerate().rev() {
            self.builder.set_site(entry.node.site);
            let emitted = if entry.node.op.effects() == Effects::Wait {
                self.wait(tape, entry, &starts, &mut rests, (values, &mut *cotangents))
            } else if is_start(entry) {
                let rest = rests.remove(&at).map_or_else(|| self.start(entry, values, cotangents), Ok);
                rest.and_then(|rest| {
                    self.builder.put_nodes(rest.nodes);
                    self.add_all(rest.cotangents, cotangents)
                })
            } else {
                self.entry(entry, values, cotangents)
            };
            emitted.map_err(|failure| located(failure, entry.node))?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        entry: &Entry<'_>,
        values: &Values,
        cotangents: &mut Cotangents,
    ) -> Result<(), Box<Failure>> {
        match entry.node.op.flow() {
            Flow::Straight => {
                let own = self.taken(entry, cotangents);
                let made = self.rule(entry, values, own)?;
                self.add_all(made, cotangents)
            }
            Flow::Cond => self.cond(entry, values, cotangents),
            Flow::Loop { .. } => self.looped(entry, values, cotangents),
        }
    }

    /// The cotangents of what a wait gives are those of its pending; its start's rule begins here.
    fn wait(
        &mut self,
        tape: &Tape<'_>,
        entry: &Entry<'_>,
        starts: &BTreeMap<Value, usize>,
        rests: &mut BTreeMap<usize, Rest>,
        (values, cotangents): (&Values, &mut Cotangents),
    ) -> Result<(), Box<Failure>> {
        for (i, result) in entry.results.iter().enumerate() {
            if let Some(cotangent) = cotangents.remove(&(*result, 0)) {
                cotangents.insert((entry.args[0], i), cotangent);
            }
        }
        if let Some(at) = starts.get(&entry.args[0]) {
            let start = &tape.entries[*at];
            self.builder.set_site(start.node.site);
            let rest = self.start(start, values, cotangents);
            rests.insert(*at, rest.map_err(|failure| located(failure, start.node))?);
        }
        Ok(())
    }

    /// Takes the cotangents of a node's results: one for each of their tensors.
    pub(super) fn taken(&self, entry: &Entry<'_>, cotangents: &mut Cotangents) -> Vec<Option<Value>> {
        let mut own = Vec::new();
        for result in &entry.results {
            let n =
                self.builder.ty(*result).map_or(0, |ty| if ty.is_pending() { ty.tensors().len() } else { 1 });
            own.extend((0..n).map(|i| cotangents.remove(&(*result, i))));
        }
        own
    }

    pub(super) fn add(
        &mut self,
        cotangents: &mut Cotangents,
        key: (Value, usize),
        value: Value,
    ) -> Result<(), Box<Failure>> {
        let sum = match cotangents.get(&key) {
            Some(before) => self.builder.one(Add {}, &[*before, value])?,
            None => value,
        };
        cotangents.insert(key, sum);
        Ok(())
    }

    fn add_all(
        &mut self,
        made: Vec<(Value, Value)>,
        cotangents: &mut Cotangents,
    ) -> Result<(), Box<Failure>> {
        made.into_iter().try_for_each(|(operand, value)| self.add(cotangents, (operand, 0), value))
    }

    /// Emits the rule of a start up to its first wait.
    fn start(
        &mut self,
        entry: &Entry<'_>,
        values: &Values,
        cotangents: &mut Cotangents,
    ) -> Result<Rest, Box<Failure>> {
        let own = self.taken(entry, cotangents);
        let from = self.builder.nodes().len();
        let cotangents = self.rule(entry, values, own)?;
        let is_wait = |node: &Node| node.op.effects() == Effects::Wait;
        let wait = self.builder.nodes().iter().skip(from).position(is_wait);
        let nodes = wait.map(|wait| self.builder.take_nodes(from + wait)).unwrap_or_default();
        Ok(Rest { nodes, cotangents })
    }

    /// Emits the rule of an op: the operands with their cotangents.
    fn rule(
        &mut self,
        entry: &Entry<'_>,
        values: &Values,
        own: Vec<Option<Value>>,
    ) -> Result<Vec<(Value, Value)>, Box<Failure>> {
        let (op, node) = (&entry.node.op, entry.node);
        if op.stops_gradient() || own.iter().all(Option::is_none) && !self.active.has_messages_in(node) {
            return Ok(Vec::new());
        }
        let wanted: Vec<bool> = node.args.iter().map(|arg| self.active.has(*arg)).collect();
        if !wanted.contains(&true) && !self.active.has_messages_in(node) {
            return Ok(Vec::new());
        }
        let here = |value: Value| values.get(value).unwrap_or(NOWHERE);
        let mut results = Vec::new();
        for result in &entry.results {
            match self.builder.ty(*result)? {
                Type::Tensor(ty) => results.push((ty.clone(), Some(here(*result)))),
                Type::Pending(tensors) => results.extend(tensors.iter().map(|ty| (ty.clone(), None))),
                Type::Size(..) => {}
            }
        }
        let args: Vec<Value> = entry.args.iter().map(|arg| here(*arg)).collect();
        let emptied = Builder::new(self.builder.mesh(), "");
        let builder = std::mem::replace(&mut self.builder, emptied);
        let asked = VjpNode { args, results, cotangents: own, wanted: wanted.clone() };
        let cx = VjpCx::new(builder, asked);
        let made = op.vjp(&cx).map(|terms| {
            terms.into_iter().map(|term| term.map(|term| term.value())).collect::<Vec<Option<Value>>>()
        });
        let (builder, failure) = cx.finish();
        self.builder = builder;
        let made = match (made, failure) {
            (Err(failure), _) | (_, Some(failure)) => return Err(failure),
            (Ok(made), None) => made,
        };
        let mut kept = Vec::new();
        for (i, (operand, made)) in entry.args.iter().zip(made).enumerate() {
            let Some(cotangent) = made.filter(|_| wanted[i]) else { continue };
            self.check(*operand, cotangent, i)?;
            kept.push((*operand, cotangent));
        }
        Ok(kept)
    }

    /// Checks that a cotangent has the type of its operand, and differs over no more axes.
    fn check(&self, operand: Value, cotangent: Value, i: usize) -> Result<(), Box<Failure>> {
        let (expected, got) = (self.builder.ty(operand)?, self.builder.ty(cotangent)?);
        if fits(got, expected, self.builder.facts()) {
            return Ok(());
        }
        let mesh = self.builder.mesh();
        let (expected, got) = (expected.display(mesh).to_string(), got.display(mesh).to_string());
        Err(Failure::new((format!("a cotangent of operand {i} of type {expected}"), got)).note(
            "the gradient rule of the op must give the operand's element type and shape, and no more axes",
        ))
    }

    /// Zeros of a type.
    pub(super) fn zeros(&mut self, ty: &TensorType) -> Result<Value, Box<Failure>> {
        let (dtype, shape) = (ty.dtype, ty.shape.clone());
        self.builder.one(Constant { dtype, shape, value: Elements::Float(0.0) }, &[])
    }

    /// The places of a value's tensors that have a cotangent, with their types.
    pub(super) fn slots(&self, value: Value) -> Result<Vec<(usize, TensorType)>, Box<Failure>> {
        let tensors = self.builder.ty(value)?.tensors().iter().cloned().enumerate();
        Ok(tensors.filter(|(_, ty)| ty.dtype.is_float()).collect())
    }

    /// The same for an operand that becomes a parameter, if a gradient passes through it.
    pub(super) fn slots_of(
        &self,
        old: Value,
        value: Value,
    ) -> Result<Vec<(usize, TensorType)>, Box<Failure>> {
        if self.active.has(old) { self.slots(value) } else { Ok(Vec::new()) }
    }

    /// Makes values of a block again that cost nothing.
    pub(super) fn make_again(
        &mut self,
        tape: &Tape<'_>,
        known: &mut ValueMap<Value>,
    ) -> Result<(), Box<Failure>> {
        for entry in &tape.entries {
            let args: Option<Vec<Value>> = entry.args.iter().map(|arg| known.get(*arg).copied()).collect();
            let Some(args) = args else { continue };
            if !is_made_again(entry, |value| self.builder.tensor_ty(value).ok()) {
                continue;
            }
            self.builder.set_site(entry.node.site);
            // An op that reads a size of its own iteration is left out; its result cannot be had.
            let Ok(made) = self.builder.node(Op::clone(&entry.node.op), &args, Vec::new()) else { continue };
            for (old, new) in entry.results.iter().zip(made) {
                known.insert(*old, new);
            }
        }
        Ok(())
    }
}
