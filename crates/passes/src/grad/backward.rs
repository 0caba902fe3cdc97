//! Emits the backward of a recorded function: its nodes in reverse order, each by the rule of its op.
//!
//! The rule of a start is emitted where its wait stood, and its own wait where the start stood: what could run between
//! a start and its wait can run there in the backward too, and the order in which ranks wait for one another is
//! reversed exactly, so that a program that completes has a gradient that completes.

use std::collections::{BTreeMap, BTreeSet};

use consort_ir::builder::Builder;
use consort_ir::entity::Value;
use consort_ir::infer::fits;
use consort_ir::ops::{Constant, Effects, Elements, Flow, VjpCx, VjpNode};
use consort_ir::program::Node;
use consort_ir::types::{TensorType, Type};
use consort_types::{Dtype, Failure};

use super::accumulate::Parts;
use super::active::Active;
use super::copy::located;
use super::tape::{Entry, Tape};
use super::values::Values;

/// The cotangents of tensors: of a value, or of a tensor inside a pending.
pub(super) type Cotangents = BTreeMap<(Value, usize), Value>;

/// Operands with their cotangents.
type Made = Vec<(Value, Value)>;

/// The rest of a start's rule, from its first wait on, and the cotangents of the start's operands.
#[derive(Default)]
struct Rest {
    nodes: Vec<Node>,
    cotangents: Made,
}

/// A backward being emitted.
pub(super) struct Backward<'a, 'b> {
    pub(super) builder: Builder<'a>,
    pub(super) active: &'b Active,
    /// The element type of sums over ranks, where the summands have a smaller one.
    pub(super) sums: Option<Dtype>,
    /// What is known of the cotangents of slices.
    pub(super) parts: Parts,
}

impl Backward<'_, '_> {
    /// Emits the backward of a block: from the cotangents of its results to those of its parameters.
    pub(super) fn block(
        &mut self,
        tape: &Tape<'_>,
        values: &mut Values,
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
                self.wait(tape, entry, &starts, &mut rests, (&mut *values, &mut *cotangents))
            } else if is_start(entry) {
                let rest = rests.remove(&at).map_or_else(|| self.start(tape, entry, values, cotangents), Ok);
                rest.and_then(|rest| {
                    self.builder.put_nodes(rest.nodes);
                    self.add_all(rest.cotangents, cotangents)
                })
            } else {
                self.entry(tape, entry, values, cotangents)
            };
            emitted.map_err(|failure| located(failure, entry.node))?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        tape: &Tape<'_>,
        entry: &Entry<'_>,
        values: &mut Values,
        cotangents: &mut Cotangents,
    ) -> Result<(), Box<Failure>> {
        match entry.node.op.flow() {
            Flow::Straight => {
                let own = self.taken(entry, cotangents);
                let (made, _) = self.rule(tape, entry, values, own)?;
                self.add_all(made, cotangents)
            }
            Flow::Cond => self.cond(tape, entry, values, cotangents),
            Flow::Loop { .. } => self.looped(tape, entry, values, cotangents),
        }
    }

    /// The cotangents of what a wait gives are those of its pending; its start's rule begins here.
    fn wait(
        &mut self,
        tape: &Tape<'_>,
        entry: &Entry<'_>,
        starts: &BTreeMap<Value, usize>,
        rests: &mut BTreeMap<usize, Rest>,
        (values, cotangents): (&mut Values, &mut Cotangents),
    ) -> Result<(), Box<Failure>> {
        for (i, result) in entry.results.iter().enumerate() {
            if let Some(cotangent) = cotangents.remove(&(*result, 0)) {
                cotangents.insert((entry.args[0], i), cotangent);
            }
        }
        if let Some(at) = starts.get(&entry.args[0]) {
            let start = &tape.entries[*at];
            self.builder.set_site(start.node.site);
            let rest = self.start(tape, start, values, cotangents);
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

    fn add_all(&mut self, made: Made, cotangents: &mut Cotangents) -> Result<(), Box<Failure>> {
        made.into_iter().try_for_each(|(operand, value)| self.add(cotangents, (operand, 0), value))
    }

    /// Emits the rule of a start up to its first wait.
    fn start(
        &mut self,
        tape: &Tape<'_>,
        entry: &Entry<'_>,
        values: &mut Values,
        cotangents: &mut Cotangents,
    ) -> Result<Rest, Box<Failure>> {
        let own = self.taken(entry, cotangents);
        let (cotangents, from) = self.rule(tape, entry, values, own)?;
        let is_wait = |node: &Node| node.op.effects() == Effects::Wait;
        let wait = self.builder.nodes().iter().skip(from).position(is_wait);
        let nodes = wait.map(|wait| self.builder.take_nodes(from + wait)).unwrap_or_default();
        Ok(Rest { nodes, cotangents })
    }

    /// Emits the rule of an op: the operands with their cotangents, and the number of its first node. What it reads of the
    /// forward and was not kept is computed again before it.
    fn rule(
        &mut self,
        tape: &Tape<'_>,
        entry: &Entry<'_>,
        values: &mut Values,
        own: Vec<Option<Value>>,
    ) -> Result<(Made, usize), Box<Failure>> {
        let from = self.builder.nodes().len();
        let (op, node) = (&entry.node.op, entry.node);
        if op.stops_gradient() || own.iter().all(Option::is_none) && !self.active.has_messages_in(node) {
            return Ok((Vec::new(), from));
        }
        let wanted: Vec<bool> = node.args.iter().map(|arg| self.active.has(*arg)).collect();
        if !wanted.contains(&true) && !self.active.has_messages_in(node) {
            return Ok((Vec::new(), from));
        }
        let before = self.builder.mark();
        let mut made = self.emit(tape, entry, values, &own, &wanted)?;
        // What it reads is known only now. A value that is not there stood for itself.
        let here = |value: &Value| values.get(tape, *value).is_some();
        let missing: Vec<Value> =
            entry.args.iter().chain(&entry.results).copied().filter(|value| !here(value)).collect();
        let emitted = self.builder.nodes().iter().skip(before.0);
        let mut read: BTreeSet<Value> = emitted.flat_map(|node| &node.args).copied().collect();
        read.extend(made.iter().flatten());
        read.retain(|value| missing.contains(value));
        if !read.is_empty() {
            self.builder.undo(before);
            for value in read {
                if self.have(tape, values, value)?.is_none() {
                    return Err(not_kept());
                }
            }
            self.builder.set_site(entry.node.site);
            let from = self.builder.nodes().len();
            made = self.emit(tape, entry, values, &own, &wanted)?;
            self.note_parts(from)?;
            return Ok((self.checked(entry, made)?, from));
        }
        self.note_parts(from)?;
        Ok((self.checked(entry, made)?, from))
    }

    /// Emits the rule of an op: the cotangents of its operands. A value of the forward that is not there stands for itself.
    fn emit(
        &mut self,
        tape: &Tape<'_>,
        entry: &Entry<'_>,
        values: &Values,
        own: &[Option<Value>],
        wanted: &[bool],
    ) -> Result<Vec<Option<Value>>, Box<Failure>> {
        let here = |value: Value| values.get(tape, value).unwrap_or(value);
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
        let (cotangents, wanted) = (own.to_vec(), wanted.to_vec());
        let cx = VjpCx::new(builder, VjpNode { args, results, cotangents, wanted, sums: self.sums });
        let made = entry.node.op.vjp(&cx).map(|terms| {
            terms.into_iter().map(|term| term.map(|term| term.value())).collect::<Vec<Option<Value>>>()
        });
        let (builder, failure) = cx.finish();
        self.builder = builder;
        match (made, failure) {
            // A size of an iteration, which its backward does not have.
            (Err(failure), _) | (_, Some(failure)) if failure.rule == "V5" => Err(not_kept()),
            (Err(failure), _) | (_, Some(failure)) => Err(failure),
            (Ok(made), None) => Ok(made),
        }
    }

    /// The operands whose cotangents are needed, with these, which must fit them.
    fn checked(&self, entry: &Entry<'_>, made: Vec<Option<Value>>) -> Result<Made, Box<Failure>> {
        if made.len() != entry.args.len() {
            let expected = format!("a cotangent, or `None`, for each of the {} operands", entry.args.len());
            let got = format!("a list of {}", made.len());
            return Err(Failure::new((expected, got)).note("the gradient rule of the op must return them"));
        }
        let mut kept = Vec::new();
        for (i, (operand, made)) in entry.args.iter().zip(made).enumerate() {
            let Some(cotangent) = made.filter(|_| self.active.has(entry.node.args[i])) else { continue };
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
}

/// A value that the backward of an iteration reads and that cannot be kept.
pub(super) fn not_kept() -> Box<Failure> {
    Failure::new("the gradient reads a value whose size is read from data inside a loop or a condition, and which so cannot be kept")
        .note("read the size outside, with `to_sizes`, or pad to a size that is the same each time")
}
