//! The cost of a function on one rank, from its ops' own estimates: over all blocks, loops multiplied by their length, and those of a
//! `while` by the expected number of iterations.
//!
//! A size that comes from data has no value before the program runs. Its cost uses an estimate, by one rule: a hint if
//! there is one; else the largest value that its range and the function's guards allow; else [`DEFAULT_SIZE`]. Reports
//! must show the estimates beside the cost.

use std::collections::BTreeMap;
use std::fmt;

use crate::entity::Value;
use crate::index::{Facts, Index, Sym, SymbolFacts};
use crate::mesh::Mesh;
use crate::ops::{Cost, CostCx, EvalCx, Flow, Trips};
use crate::plan::{Place, RegionKind};
use crate::program::{Block, Func, Node};
use crate::types::Type;

/// The estimate for a size from data of which nothing is known.
pub const DEFAULT_SIZE: i64 = 1024;

/// The source of an estimate of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The user.
    Hint,
    /// The largest value that the declared range and the guards allow.
    Range,
    /// [`DEFAULT_SIZE`], or the minimum if that is larger.
    Default,
}

impl Source {
    /// The word for it in reports.
    pub fn name(self) -> &'static str {
        match self {
            Source::Hint => "hint",
            Source::Range => "range",
            Source::Default => "default",
        }
    }
}

/// A size from data, and its estimate. Prints as `u0: 1024 (default)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// The symbol.
    pub sym: Sym,
    /// The value.
    pub value: i64,
    /// The source of the estimate.
    pub source: Source,
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A size from data mentions no axis or group, so any mesh will do.
        let sym = Index::sym(self.sym);
        write!(f, "{}: {} ({})", sym.display(&Mesh::default()), self.value, self.source.name())
    }
}

/// The cost of a part of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    /// Arithmetic operations.
    pub flops: u64,
    /// Bytes of memory read and written.
    pub bytes: u64,
    /// Bytes received from other ranks.
    pub wire: u64,
    /// Nodes run, plus iterations of loops.
    pub steps: u64,
}

impl Total {
    /// Arithmetic operations and bytes of memory together.
    pub fn operations(&self) -> u64 {
        self.flops.saturating_add(self.bytes)
    }

    fn join(self, other: Total, f: impl Fn(u64, u64) -> u64) -> Total {
        Total {
            flops: f(self.flops, other.flops),
            bytes: f(self.bytes, other.bytes),
            wire: f(self.wire, other.wire),
            steps: f(self.steps, other.steps),
        }
    }

    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: Total) -> Total {
        self.join(other, u64::saturating_add)
    }

    /// The same `n` times.
    #[must_use]
    pub fn times(self, n: u64) -> Total {
        self.join(self, |one, _| one.saturating_mul(n))
    }
}

/// The value of an index, at least 0; 0 if a symbol has no value, `u64::MAX` on overflow.
pub fn number(sizes: &EvalCx<'_>, index: &Index) -> u64 {
    if let Ok(n) = sizes.index(index) {
        return u64::try_from(n).unwrap_or(0);
    }
    let mut unbound = false;
    index.symbols(&mut |sym| unbound |= sizes.index(&Index::sym(sym)).is_err());
    if unbound { 0 } else { u64::MAX }
}

/// The cost of a node without its blocks, as an expression in the symbols.
pub fn of_node(mesh: &Mesh, func: &Func, node: &Node) -> Cost {
    let types =
        |values: &[Value]| values.iter().filter_map(|value| func.ty(*value).cloned()).collect::<Vec<Type>>();
    node.op.cost(&CostCx { mesh, args: &types(&node.args), results: &types(&node.results) })
}

/// The cost of a node with its blocks; terms with unbound symbols count as 0. Of the branches of a `cond`, the more
/// expensive one counts.
pub fn total_of_node(sizes: &EvalCx<'_>, func: &Func, node: &Node) -> Total {
    let number = |index: &Index| number(sizes, index);
    let Cost { flops, bytes, wire } = of_node(sizes.mesh, func, node);
    let own = Total { flops: number(&flops), bytes: number(&bytes), wire: number(&wire), steps: 1 };
    let blocks = node.blocks.iter().map(|block| total(sizes, func, block));
    match node.op.flow() {
        Flow::Straight => own,
        Flow::Cond => own.plus(blocks.fold(Total::default(), |a, b| a.join(b, u64::max))),
        Flow::Loop { trips, .. } => {
            let iteration = Total { steps: 1, ..Total::default() };
            let trips = match trips {
                Trips::Count(length) => number(length),
                Trips::While { expected, .. } => expected as u64,
            };
            blocks.fold(own, |all, block| all.plus(iteration.plus(block).times(trips)))
        }
    }
}

/// The cost of a block; terms with unbound symbols count as 0.
pub fn total(sizes: &EvalCx<'_>, func: &Func, block: &Block) -> Total {
    block.nodes.iter().fold(Total::default(), |all, node| all.plus(total_of_node(sizes, func, node)))
}

/// Bytes of the regions of a plan whose sizes come from data.
pub fn dynamic_bytes(sizes: &EvalCx<'_>, func: &Func) -> u64 {
    let mut ends = BTreeMap::new();
    region_ends(sizes, func, &func.body, &mut ends);
    ends.values().fold(0, |all, end| all.saturating_add(*end))
}

/// The end offset of the tensors in each `dyn` region.
fn region_ends(sizes: &EvalCx<'_>, func: &Func, block: &Block, ends: &mut BTreeMap<u32, u64>) {
    let mut note = |values: &[Value], places: &[Place]| {
        let tensors = values.iter().filter_map(|value| func.ty(*value)).flat_map(Type::tensors);
        for (tensor, place) in tensors.zip(places) {
            if let RegionKind::Dyn(region) = place.region.kind {
                let bytes = number(sizes, &tensor.bytes());
                let end = ends.entry(region).or_insert(0);
                *end = (*end).max(place.offset.saturating_add(bytes));
            }
        }
    };
    note(&block.params, &block.places);
    for node in &block.nodes {
        // A view has no storage of its own, and a broadcast has more elements than its storage.
        if let Some(plan) = node.plan.as_ref().filter(|plan| !plan.view) {
            note(&node.results, &plan.places);
        }
    }
    block
        .nodes
        .iter()
        .flat_map(|node| &node.blocks)
        .for_each(|inside| region_ends(sizes, func, inside, ends));
}

/// The estimates of the sizes from data, in order, given values of the other symbols on a rank.
pub fn estimates(sizes: &EvalCx<'_>, func: &Func, hints: &BTreeMap<Sym, i64>) -> Vec<Estimate> {
    let declared = sizes_from_data(func);
    let mut facts = Facts::default();
    for (sym, known) in &declared {
        facts.declare(*sym, known.clone());
    }
    let value = |sym: Sym| sizes.index(&Index::sym(sym)).ok().map(Index::constant);
    for guard in &func.guards {
        facts.assume(guard.substitute(&|sym| value(sym).filter(|_| !declared.contains_key(&sym))));
    }
    let estimate = |sym: Sym| {
        let (least, most) = facts.bounds(&Index::sym(sym));
        let (value, source) = match (hints.get(&sym), most) {
            (Some(hint), _) => (*hint, Source::Hint),
            (None, Some(most)) => (most.max(0), Source::Range),
            (None, None) => (DEFAULT_SIZE.max(least.unwrap_or(0)), Source::Default),
        };
        Estimate { sym, value, source }
    };
    declared.keys().map(|sym| estimate(*sym)).collect()
}

/// The sizes from data, with the declarations of the ops that define them. If several blocks define one, its range is
/// the union.
pub fn sizes_from_data(func: &Func) -> BTreeMap<Sym, SymbolFacts> {
    let mut all = BTreeMap::new();
    declarations(func, &func.body, &mut all);
    all
}

fn declarations(func: &Func, block: &Block, all: &mut BTreeMap<Sym, SymbolFacts>) {
    for node in &block.nodes {
        let args: Vec<Type> = node.args.iter().filter_map(|arg| func.ty(*arg).cloned()).collect();
        for (sym, facts) in node.op.defines(&args) {
            let known = all.entry(sym).or_insert_with(|| facts.clone());
            known.min = known.min.min(facts.min);
            known.max = known.max.zip(facts.max).map(|(a, b)| a.max(b));
        }
        node.blocks.iter().for_each(|inside| declarations(func, inside, all));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::OpTable;
    use crate::text::parse;
    use consort_types::Rank;

    fn func(text: &str) -> Func {
        parse(text, &OpTable::built_in()).unwrap().program.funcs.remove(0)
    }

    /// The estimates, and the flops and steps of a function on rank 0, with a value for s0.
    fn cost(text: &str, s0: i64, hints: &[(u32, i64)]) -> (Vec<String>, u64, u64) {
        let (func, mesh) = (func(text), Mesh::default());
        let mut symbols = BTreeMap::from([(Sym::Backed(0), s0)]);
        let hints = hints.iter().map(|(id, value)| (Sym::Unbacked(*id), *value)).collect();
        let sizes = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &symbols };
        let estimates = estimates(&sizes, &func, &hints);
        let shown = estimates.iter().map(ToString::to_string).collect();
        symbols.extend(estimates.iter().map(|one| (one.sym, one.value)));
        let all = total(&EvalCx { mesh: &mesh, rank: Rank(0), symbols: &symbols }, &func, &func.body);
        (shown, all.flops, all.steps)
    }

    /// An op on a size from data, which costs one operation for each element.
    fn of_size(range: &str, guard: &str) -> String {
        format!(
            "mesh ()\n\nfunc @f(v0: i64[], v1: f32[s0]) -> f32[u0] {guard} {{\n    v2 = to_size[symbols=[u0], {range}] v0 : size<u0>\n    v3 = iota[dtype=f32, shape=[u0], dim=0] : f32[u0]\n    v4 = neg v3 : f32[u0]\n    return v4\n}}\n"
        )
    }

    #[test]
    fn a_size_from_data_has_a_hint_a_range_or_the_default() {
        let free = of_size("min=0, max=none", "");
        let per_element = |n: u64| cost(&free, 8, &[(0, n as i64)]).1;
        // An operation for each element of `neg`; `iota` only writes.
        assert_eq!((per_element(0), per_element(1), per_element(100)), (0, 1, 100));
        assert_eq!(cost(&free, 8, &[]), (vec!["u0: 1024 (default)".into()], 1024, 3));
        assert_eq!(cost(&free, 8, &[(0, 7)]), (vec!["u0: 7 (hint)".into()], 7, 3));
        let ranged = of_size("min=2, max=50", "");
        assert_eq!(cost(&ranged, 8, &[]), (vec!["u0: 50 (range)".into()], 50, 3));
        assert_eq!(cost(&ranged, 8, &[(0, 3)]), (vec!["u0: 3 (hint)".into()], 3, 3));
        // At most what a guard allows, which depends on another size.
        let guarded = of_size("min=0, max=none", "where 2*u0 <= s0");
        assert_eq!(cost(&guarded, 60, &[]), (vec!["u0: 30 (range)".into()], 30, 3));
        // At least the minimum of the range.
        let large = of_size("min=5000, max=none", "");
        assert_eq!(cost(&large, 8, &[]), (vec!["u0: 5000 (default)".into()], 5000, 3));
    }

    #[test]
    fn a_loop_costs_what_its_iterations_cost_and_a_choice_its_dearer_block() {
        let scan = "mesh ()\n\nfunc @f(v0: f32[s0]) -> f32[s0] {\n    v1 = scan[length=5, carries=1, slices=0] v0 : f32[s0] {\n        body(v2: f32[s0]) {\n            v3 = scan[length=3, carries=1, slices=0] v2 : f32[s0] {\n                body(v4: f32[s0]) {\n                    v5 = neg v4 : f32[s0]\n                    return v5\n                }\n            }\n            return v3\n        }\n    }\n    return v1\n}\n";
        // The outer loop is one node of 5 iterations, each with the inner loop as one node of 3 iterations of one node.
        assert_eq!(cost(scan, 10, &[]), (vec![], 5 * 3 * 10, 1 + 5 * (1 + 1 + 3 * (1 + 1))));
        let cond = "mesh ()\n\nfunc @f(v0: bool[], v1: f32[s0]) -> f32[s0] {\n    v2 = cond v0, v1 : f32[s0] {\n        then(v3: f32[s0]) {\n            v4 = neg v3 : f32[s0]\n            v5 = neg v4 : f32[s0]\n            return v5\n        }\n        else(v6: f32[s0]) {\n            v7 = neg v6 : f32[s0]\n            return v7\n        }\n    }\n    return v2\n}\n";
        assert_eq!(cost(cond, 10, &[]), (vec![], 20, 3));
    }
}
