//! A program: functions of nodes in the order in which they run, rank-free.
//!
//! A function's body is a block; a node may hold blocks of its own (`cond`, `scan`). Blocks are closed:
//! they see their own parameters and nothing else, so whatever enters a region is an operand of its node,
//! and liveness, pending and placement are questions about one list at a time. The order of the list is
//! the schedule: a plan is the same list with places, queues and leases beside the nodes (`plan.rs`).

use std::collections::{BTreeMap, BTreeSet};

use crate::entity::{Value, ValueMap};
use crate::index::{Facts, Guard, Sym, SymbolFacts};
use crate::mesh::Mesh;
use crate::ops::Op;
use crate::plan::{NodePlan, Place, PlanHeader};
use crate::types::Type;
use consort_types::{GroupId, GroupName, Site};

/// A mesh and the functions that run on it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The ranks.
    pub mesh: Mesh,
    /// The functions, by position; names are unique.
    pub funcs: Vec<Func>,
}

impl Program {
    /// The function of this name.
    pub fn func(&self, name: &str) -> Option<&Func> {
        self.funcs.iter().find(|func| func.name == name)
    }
}

/// A function.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Func {
    /// Its name, without the `@`.
    pub name: String,
    /// The declared result types; a returned value may differ over fewer axes than declared, not more.
    pub results: Vec<Type>,
    /// Declarations of symbols beyond the defaults: ranges, multiples, axes.
    pub symbols: Vec<(Sym, SymbolFacts)>,
    /// Conditions on the symbols; checked when they are bound.
    pub guards: Vec<Guard>,
    /// The type of every value, including those in nested blocks.
    pub types: ValueMap<Type>,
    /// The body; its parameters are the function's.
    pub body: Block,
    /// The header of the plan, if the function is one.
    pub plan: Option<Box<PlanHeader>>,
}

impl Func {
    /// The type of a value, if it is defined.
    pub fn ty(&self, value: Value) -> Option<&Type> {
        self.types.get(value)
    }

    /// The backed symbols that parameters bind: those that stand alone as a size, or as a size parameter.
    pub fn bound_symbols(&self) -> Vec<Sym> {
        let (mut bound, mut seen) = (Vec::new(), BTreeSet::new());
        for param in &self.body.params {
            if let Some(ty) = self.ty(*param) {
                ty.indices(&mut |index| match index.as_sym() {
                    Some(sym @ Sym::Backed(_)) if seen.insert(sym) => bound.push(sym),
                    _ => {}
                });
            }
        }
        bound
    }

    /// The facts about symbols at the function's entry, before any guard.
    pub fn entry_facts(&self, mesh: &Mesh) -> Facts {
        let mut facts = Facts::new(mesh);
        let declared = self.declarations();
        for sym in self.bound_symbols() {
            facts
                .declare(sym, declared.get(&sym).map_or_else(SymbolFacts::default, |facts| (*facts).clone()));
        }
        facts
    }

    /// The list groups that its ops and sizes name.
    pub fn groups(&self) -> BTreeSet<GroupId> {
        let mut groups = BTreeSet::new();
        let mut add = |sym| {
            if let Sym::GroupRank(id) = sym {
                groups.insert(id);
            }
        };
        self.types.iter().for_each(|(_, ty)| ty.indices(&mut |index| index.symbols(&mut add)));
        self.guards.iter().for_each(|guard| guard.symbols(&mut add));
        self.body.add_groups(&mut groups);
        groups
    }

    /// The declarations of the function's symbols.
    pub fn declarations(&self) -> BTreeMap<Sym, &SymbolFacts> {
        // Of two declarations, which the verifier rejects, the first wins.
        self.symbols.iter().rev().map(|(sym, facts)| (*sym, facts)).collect()
    }

    /// The declaration of a symbol, or the default.
    pub fn declared(&self, sym: Sym) -> SymbolFacts {
        self.symbols
            .iter()
            .find(|(s, _)| *s == sym)
            .map_or_else(SymbolFacts::default, |(_, facts)| facts.clone())
    }
}

/// Nodes in the order in which they run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Block {
    /// The values that enter.
    pub params: Vec<Value>,
    /// One place for each tensor parameter, those inside a pending included, if the function is a plan.
    pub places: Vec<Place>,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The values that leave.
    pub results: Vec<Value>,
}

impl Block {
    fn add_groups(&self, groups: &mut BTreeSet<GroupId>) {
        for node in &self.nodes {
            if let Some(GroupName::List(id)) = node.op.effects().starts() {
                groups.insert(id);
            }
            node.op.indices(&mut |index| {
                index.symbols(&mut |sym| {
                    if let Sym::GroupRank(id) = sym {
                        groups.insert(id);
                    }
                });
            });
            node.blocks.iter().for_each(|block| block.add_groups(groups));
        }
    }
}

/// One application of an op.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The op with its attributes.
    pub op: Op,
    /// The operands.
    pub args: Vec<Value>,
    /// The values it defines.
    pub results: Vec<Value>,
    /// The blocks of a control-flow op.
    pub blocks: Vec<Block>,
    /// The user's source line.
    pub site: Option<Site>,
    /// Place, queue and leases, if the function is a plan.
    pub plan: Option<Box<NodePlan>>,
}
