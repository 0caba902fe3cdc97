//! Copies the forward function, and remembers each node that a gradient passes through.
//!
//! What the backward needs of a block's values, the block must return. Which ones it needs is known only later, so a
//! block returns all of its tensors, and `prune` takes out what nothing reads. What is computed again is not returned, as
//! `keep` says, nor is what costs nothing: results of ops without operands, and views that are not smaller than their
//! operand.

use std::collections::BTreeSet;

use consort_ir::entity::{Value, ValueMap};
use consort_ir::index::Sym;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Alias, Constant, Effects, Elements, Flow, Trips};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::{TensorType, Type};
use consort_types::Failure;

use super::active::Active;
use super::copy::{Copier, located};
use super::keep::Again;

/// A block of the forward function.
#[derive(Debug, Default)]
pub(super) struct Tape<'a> {
    pub(super) params: Vec<Value>,
    pub(super) results: Vec<Value>,
    /// Its nodes in order.
    pub(super) entries: Vec<Entry<'a>>,
    /// The values that the backward computes again, with the numbers of their entries.
    pub(super) again: ValueMap<usize>,
}

/// A node of the forward function.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    /// The node that was copied.
    pub(super) node: &'a Node,
    pub(super) args: Vec<Value>,
    pub(super) results: Vec<Value>,
    /// Its blocks, if a gradient passes through them.
    pub(super) blocks: Vec<Inside<'a>>,
    /// Its blocks as they were made, if it is computed again.
    pub(super) made: Vec<Block>,
}

/// A block of a node, and what it returns for the backward.
#[derive(Debug)]
pub(super) struct Inside<'a> {
    pub(super) tape: Tape<'a>,
    /// Values of the block, with the results of the node that hold them: stacked, if it is a loop.
    pub(super) saved: Vec<(Value, Value)>,
}

/// Copies a function; its results are not set yet.
pub(super) fn record<'a>(
    mesh: &'a Mesh,
    func: &'a Func,
    active: &Active,
    again: &Again,
) -> Result<(Copier<'a>, Tape<'a>), Box<Failure>> {
    let mut recorder = Recorder { active, again, copier: Copier::new(mesh, func) };
    let params = recorder.copier.values(&func.body.params)?;
    let tape = recorder.block(&func.body, params)?;
    Ok((recorder.copier, tape))
}

/// Whether results are made again because they cost nothing.
fn costs_nothing(entry: &Entry<'_>, ty: impl Fn(Value) -> Option<TensorType>) -> bool {
    let op = &entry.node.op;
    if op.effects() != Effects::Pure || op.flow() != Flow::Straight {
        return false;
    }
    let [of] = entry.args[..] else { return entry.args.is_empty() };
    let (Some(from), Some(to)) = (ty(of), entry.results.first().and_then(|result| ty(*result))) else {
        return false;
    };
    let (from, to) = (from.numel(), to.numel());
    let larger = from.as_const().zip(to.as_const()).is_some_and(|(from, to)| from <= to);
    op.alias() == Alias::View && entry.results.len() == 1 && (from == to || larger)
}

struct Recorder<'a, 'b> {
    active: &'b Active,
    again: &'b Again,
    copier: Copier<'a>,
}

impl<'a> Recorder<'a, '_> {
    fn block(&mut self, block: &'a Block, params: Vec<Value>) -> Result<Tape<'a>, Box<Failure>> {
        let (mut entries, site) = (Vec::new(), self.copier.builder.site());
        for node in &block.nodes {
            self.copier.builder.set_site(node.site);
            entries.push(self.node(node).map_err(|failure| located(failure, node))?);
        }
        self.copier.builder.set_site(site);
        let results = self.copier.values(&block.results)?;
        let mut again = ValueMap::default();
        let ty = |value| self.copier.builder.tensor_ty(value).ok();
        for (at, entry) in entries.iter().enumerate() {
            if self.again.has(entry.node) || self.copier.builder.depth() > 0 && costs_nothing(entry, ty) {
                let saved = entry.blocks.iter().flat_map(|inside| &inside.saved).map(|(_, outside)| *outside);
                for value in entry.results.iter().copied().chain(saved) {
                    again.insert(value, at);
                }
            }
        }
        Ok(Tape { params, results, entries, again })
    }

    fn types(&self, values: &[Value]) -> Vec<Type> {
        values.iter().filter_map(|value| self.copier.builder.ty(*value).ok().cloned()).collect()
    }

    fn node(&mut self, node: &'a Node) -> Result<Entry<'a>, Box<Failure>> {
        let args = self.copier.values(&node.args)?;
        // The backward of a `while` is refused, if it is asked for.
        let saves = !matches!(node.op.flow(), Flow::Loop { trips: Trips::While { .. }, .. });
        let passes = saves && self.active.passes(node);
        let (mut blocks, mut made) = (Vec::new(), Vec::new());
        for block in &node.blocks {
            let types = block.params.iter().filter_map(|param| self.copier.ty(*param).cloned()).collect();
            let params = self.copier.begin(block, types);
            let tape = self.block(block, params)?;
            let kept = if passes { self.kept(&tape, node.op.flow()) } else { Vec::new() };
            made.push(self.copier.end(&tape.results));
            blocks.push((tape, kept));
        }
        for (i, (_, kept)) in blocks.iter().enumerate() {
            for (other, block) in made.iter_mut().enumerate() {
                // The block that does not run returns zeros for what the other keeps.
                let values = if i == other { kept.clone() } else { self.zeros(block, kept)? };
                block.results.extend(values);
            }
        }
        let own = if self.again.has(node) { made.clone() } else { Vec::new() };
        self.copier.node(node, node.op.clone(), &args, made)?;
        let results = self.copier.values(&node.results)?;
        let mut extra = self.copier.extra_results(node.results.len()).into_iter();
        let inside = |(tape, kept): (Tape<'a>, Vec<Value>)| {
            let saved = kept.into_iter().zip(extra.by_ref()).collect();
            Inside { tape, saved }
        };
        let blocks = blocks.into_iter().map(inside).collect();
        Ok(Entry { node, args, results, blocks, made: own })
    }

    /// The tensors of a block that its backward may read and cannot have from elsewhere.
    fn kept(&self, tape: &Tape<'a>, flow: Flow<'_>) -> Vec<Value> {
        let builder = &self.copier.builder;
        let mut local: BTreeSet<Sym> = BTreeSet::new();
        for entry in &tape.entries {
            let defines = entry.node.op.defines(&self.types(&entry.args));
            local.extend(defines.into_iter().map(|(sym, _)| sym));
        }
        let carries = if let Flow::Loop { carries, .. } = flow { carries } else { 0 };
        let ty = |value| builder.tensor_ty(value).ok();
        let lasts = |value: &Value| {
            let Some(ty) = ty(*value) else { return false };
            let mut lasts = true;
            ty.shape.iter().for_each(|size| size.symbols(&mut |sym| lasts &= !local.contains(&sym)));
            lasts
        };
        let mut values = tape.params[..carries].to_vec();
        for entry in &tape.entries {
            values.extend(&entry.results);
            values.extend(entry.blocks.iter().flat_map(|inside| &inside.saved).map(|(_, outside)| *outside));
        }
        values.retain(|value| tape.again.get(*value).is_none() && lasts(value));
        values
    }

    fn zeros(&mut self, block: &mut Block, like: &[Value]) -> Result<Vec<Value>, Box<Failure>> {
        let builder = &mut self.copier.builder;
        let types = like.iter().map(|value| builder.tensor_ty(*value)).collect::<Result<Vec<_>, _>>()?;
        builder.begin_block(Vec::new());
        let mut zeros = Vec::new();
        for TensorType { dtype, shape, .. } in types {
            let value = if dtype.is_float() { Elements::Float(0.0) } else { Elements::Int(0) };
            zeros.push(builder.one(Constant { dtype, shape, value }, &[])?);
        }
        block.nodes.extend(builder.end_block(&[]).nodes);
        Ok(zeros)
    }
}
