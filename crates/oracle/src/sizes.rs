//! Sizes that a program reads from data: their symbols have values from there to the end of their block.

use std::collections::{BTreeMap, BTreeSet};

use consort_ir::index::{Guard, Sym};
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::program::{Block, Func, Node};
use consort_ir::symbols::check_guards;
use consort_ir::types::Type;
use consort_types::Rank;

use crate::inputs::Symbols;

/// What a function says about sizes that it reads.
pub(crate) struct Sizes<'a> {
    func: &'a Func,
    /// The guards that mention a symbol, by number.
    guards: BTreeMap<Sym, Vec<usize>>,
}

impl<'a> Sizes<'a> {
    pub(crate) fn new(func: &'a Func) -> Sizes<'a> {
        Sizes { func, guards: Guard::by_symbol(&func.guards) }
    }

    /// The symbols that a node reads from data.
    fn symbols(&self, node: &Node) -> Vec<Sym> {
        let types: Vec<Type> = node.args.iter().filter_map(|arg| self.func.ty(*arg).cloned()).collect();
        node.op.defines(&types).into_iter().map(|(sym, _)| sym).collect()
    }

    /// Binds the symbols that a node reads to its results, and checks the guards that mention them and no symbol without a
    /// value.
    pub(crate) fn define(
        &self,
        (mesh, rank): (&Mesh, Rank),
        node: &Node,
        values: &[Literal],
        symbols: &mut Symbols,
    ) -> Result<(), String> {
        let defined = self.symbols(node);
        for (sym, value) in defined.iter().zip(values) {
            symbols.insert(*sym, value.as_size().unwrap_or(0));
        }
        let numbers: BTreeSet<usize> =
            defined.iter().filter_map(|sym| self.guards.get(sym)).flatten().copied().collect();
        let guards = numbers.into_iter().map(|number| &self.func.guards[number]);
        check_guards(mesh, rank, guards, symbols)
    }

    /// A block ends: what it read has no value until it is read again.
    pub(crate) fn leave(&self, block: &Block, symbols: &mut Symbols) {
        for sym in block.nodes.iter().flat_map(|node| self.symbols(node)) {
            symbols.remove(&sym);
        }
    }
}
