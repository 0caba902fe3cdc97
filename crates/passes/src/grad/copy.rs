//! Builds a copy of a function node by node, with other operands, types and ops where a pass wants them.

use consort_ir::builder::Builder;
use consort_ir::entity::{Value, ValueMap};
use consort_ir::index::{Sym, Waiting};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Op, call_name};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::Type;
use consort_types::Failure;

/// A failure at a node. One inside a block of it has its own op, and its own line if there is one.
pub(super) fn located(failure: Box<Failure>, node: &Node) -> Box<Failure> {
    let failure = if failure.op.is_empty() { failure.of(call_name(node.op.info().name)) } else { failure };
    match node.site {
        Some(site) => failure.at(site),
        None => failure,
    }
}

/// A function being copied.
pub(super) struct Copier<'a> {
    pub(super) builder: Builder<'a>,
    func: &'a Func,
    /// The new value of each old one.
    values: ValueMap<Value>,
    /// Guards whose symbols have no value yet.
    waiting: Waiting,
    /// The symbols that each open block has defined.
    scopes: Vec<Vec<Sym>>,
    /// The results of the last node.
    last: Vec<Value>,
}

impl<'a> Copier<'a> {
    /// A copy with the parameters of the function.
    pub(super) fn new(mesh: &'a Mesh, func: &'a Func) -> Copier<'a> {
        let mut builder = Builder::new(mesh, &func.name);
        for (sym, facts) in &func.symbols {
            builder.declare(*sym, facts.clone());
        }
        let mut values = ValueMap::default();
        for param in &func.body.params {
            if let Some(ty) = func.ty(*param) {
                values.insert(*param, builder.param(ty.clone()));
            }
        }
        let (waiting, ready) = Waiting::new(&func.guards, |sym| builder.facts().get(sym).is_some());
        let mut copier = Copier { builder, func, values, waiting, scopes: Vec::new(), last: Vec::new() };
        copier.assume(&ready);
        copier
    }

    fn assume(&mut self, ready: &[usize]) {
        for number in ready {
            self.builder.assume(self.func.guards[*number].clone());
        }
    }

    /// The new value of an old one.
    pub(super) fn value(&self, old: Value) -> Result<Value, Box<Failure>> {
        let known = self.values.get(old).copied();
        known.ok_or_else(|| Failure::rule("V1", format!("{old} is not defined")))
    }

    /// The new values of old ones.
    pub(super) fn values(&self, old: &[Value]) -> Result<Vec<Value>, Box<Failure>> {
        old.iter().map(|value| self.value(*value)).collect()
    }

    /// Sets the new value of an old one.
    pub(super) fn know(&mut self, old: Value, new: Value) {
        self.values.insert(old, new);
    }

    /// Opens a copy of a block whose parameters have these types.
    pub(super) fn begin(&mut self, block: &Block, types: Vec<Type>) -> Vec<Value> {
        self.scopes.push(Vec::new());
        let params = self.builder.begin_block(types);
        for (old, new) in block.params.iter().zip(&params) {
            self.values.insert(*old, *new);
        }
        params
    }

    /// Closes the copy of a block. Its symbols lose their values: another block may define them again.
    pub(super) fn end(&mut self, results: &[Value]) -> Block {
        let defined = self.scopes.pop().unwrap_or_default();
        self.waiting.leave(&defined);
        self.builder.end_block(results)
    }

    /// Adds a node in place of an old one.
    pub(super) fn node(
        &mut self,
        old: &Node,
        op: Op,
        args: &[Value],
        blocks: Vec<Block>,
    ) -> Result<(), Box<Failure>> {
        let types = args.iter().map(|arg| self.builder.ty(*arg).cloned()).collect::<Result<Vec<_>, _>>()?;
        let defined: Vec<Sym> = op.defines(&types).into_iter().map(|(sym, _)| sym).collect();
        self.last = self.builder.node(op, args, blocks)?;
        for (old, new) in old.results.iter().zip(&self.last) {
            self.values.insert(*old, *new);
        }
        let ready = self.waiting.define(&defined);
        self.assume(&ready);
        if let Some(scope) = self.scopes.last_mut() {
            scope.extend(defined);
        }
        Ok(())
    }

    /// The results of the last node beyond the first `known`.
    pub(super) fn extra_results(&self, known: usize) -> Vec<Value> {
        self.last.get(known..).unwrap_or(&[]).to_vec()
    }

    /// The type of an old value.
    pub(super) fn ty(&self, old: Value) -> Option<&'a Type> {
        self.func.ty(old)
    }

    /// Ends the copy.
    pub(super) fn finish(self, results: &[Value]) -> Func {
        self.builder.finish(results)
    }
}
