//! The facts about symbols at a position of a function: the same that the verifier has there.

use consort_ir::index::{Facts, Guard, Sym, Waiting};
use consort_ir::mesh::Mesh;
use consort_ir::ops::OpDef;
use consort_ir::program::Func;
use consort_ir::types::Type;

/// Facts that grow when a symbol gets its value and shrink at the end of a block.
pub(crate) struct Scope {
    pub(crate) facts: Facts,
    guards: Vec<Guard>,
    waiting: Waiting,
}

impl Scope {
    /// At the entry of a function.
    pub(crate) fn new(mesh: &Mesh, func: &Func) -> Scope {
        let facts = func.entry_facts(mesh);
        let (waiting, ready) = Waiting::new(&func.guards, |sym| facts.get(sym).is_some());
        let mut scope = Scope { facts, guards: func.guards.clone(), waiting };
        scope.assume(&ready);
        scope
    }

    fn assume(&mut self, ready: &[usize]) {
        for number in ready {
            self.facts.assume(self.guards[*number].clone());
        }
    }

    /// After an op; returns the symbols that it defined.
    pub(crate) fn define(&mut self, op: &dyn OpDef, args: &[Type]) -> Vec<Sym> {
        let mut symbols = op.defines(args);
        symbols.retain(|(sym, facts)| self.facts.declare(*sym, facts.clone()));
        let symbols: Vec<Sym> = symbols.into_iter().map(|(sym, _)| sym).collect();
        let ready = self.waiting.define(&symbols);
        self.assume(&ready);
        symbols
    }

    /// After a block that defined these symbols.
    pub(crate) fn leave(&mut self, symbols: &[Sym]) {
        self.waiting.leave(symbols);
        self.facts.forget(symbols);
    }
}
