//! What is known of the symbols at a place of a function: the same that the verifier knows there.

use consort_ir::index::{Facts, Guard, Sym};
use consort_ir::mesh::Mesh;
use consort_ir::ops::OpDef;
use consort_ir::program::Func;
use consort_ir::types::Type;

/// Facts that grow where a symbol gets its value, and shrink at the end of a block.
pub(crate) struct Scope {
    pub(crate) facts: Facts,
    guards: Vec<Guard>,
    /// The guards on symbols that have no value here, by number.
    waiting: Vec<usize>,
}

impl Scope {
    /// At the entry of a function.
    pub(crate) fn new(mesh: &Mesh, func: &Func) -> Scope {
        let (guards, waiting) = (func.guards.clone(), (0..func.guards.len()).collect());
        let mut scope = Scope { facts: func.entry_facts(mesh), guards, waiting };
        scope.assume();
        scope
    }

    fn assume(&mut self) {
        for number in std::mem::take(&mut self.waiting) {
            let guard = &self.guards[number];
            let mut unknown = false;
            guard.symbols(&mut |sym| unknown |= self.facts.get(sym).is_none());
            if unknown {
                self.waiting.push(number);
            } else {
                self.facts.assume(guard.clone());
            }
        }
    }

    /// After an op; returns the symbols that it gave values.
    pub(crate) fn define(&mut self, op: &dyn OpDef, args: &[Type]) -> Vec<Sym> {
        let defined = op.defines(args);
        let symbols = defined.iter().map(|(sym, _)| *sym).collect();
        for (sym, facts) in defined {
            self.facts.declare(sym, facts);
            self.assume();
        }
        symbols
    }

    /// After a block that gave these symbols their values.
    pub(crate) fn leave(&mut self, symbols: &[Sym]) {
        if symbols.is_empty() {
            return;
        }
        for (number, guard) in self.guards.iter().enumerate() {
            let mut mentions = false;
            guard.symbols(&mut |sym| mentions |= symbols.contains(&sym));
            if mentions && !self.waiting.contains(&number) {
                self.waiting.push(number);
            }
        }
        symbols.iter().for_each(|sym| self.facts.forget(*sym));
    }
}
