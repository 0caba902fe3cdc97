//! Chooses what is not kept for the backward, so that what is kept fits a budget.
//!
//! First the gradient is made with everything kept, which shows what the backward reads. What may be kept and what may run
//! again instead is then a [`Problem`], whose answer has the least cost. Only ops without communication, effects and blocks
//! are repeated: a collective that a value is computed from is kept instead. Sizes that are not known count as
//! [`DEFAULT_SIZE`], and those that depend on the rank as on rank 0, so that all ranks choose alike.

use std::collections::{BTreeMap, BTreeSet};

use consort_ir::cost::{DEFAULT_SIZE, estimates, number, total_of_node};
use consort_ir::entity::Value;
use consort_ir::index::Sym;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Alias, Effects, EvalCx, Flow, Trips};
use consort_ir::program::{Func, Node};
use consort_types::Rank;

use super::Made;
use super::choose::{Kept, Problem, Step};
use super::keep::Again;
use super::tape::{Entry, Tape};

/// Adds to `again` what is computed again so that what is kept of a function fits the budget, or is as little as possible.
/// `made` is its gradient with everything else kept.
pub(super) fn fit(mesh: &Mesh, func: &Func, made: &Made<'_>, again: &mut Again, budget: u64) {
    let (problem, marks) = problem(mesh, func, made);
    let choice = problem.choose(budget);
    let nodes = marks.iter().zip(&choice.again).filter(|(_, again)| **again).flat_map(|(nodes, _)| nodes);
    nodes.for_each(|node| again.add(node));
}

/// The bytes that are kept for the backward of a gradient besides arguments.
pub(super) fn kept(mesh: &Mesh, func: &Func, made: &Made<'_>) -> u64 {
    let (problem, _) = problem(mesh, func, made);
    problem.choice(&vec![false; problem.steps.len()]).bytes
}

/// What the backward reads and what may run again instead; for each step the nodes that are marked if it does.
fn problem<'a>(mesh: &Mesh, func: &Func, made: &Made<'a>) -> (Problem, Vec<Vec<&'a Node>>) {
    let symbols = symbols(mesh, func);
    let sizes = EvalCx { mesh, rank: Rank(0), symbols: &symbols };
    let nodes = made.func.body.nodes.iter();
    let backward = nodes.filter(|node| node.results.first().is_some_and(|result| *result >= made.first));
    let read: BTreeSet<Value> =
        backward.flat_map(|node| &node.args).copied().filter(|value| *value < made.first).collect();
    let mut finder = Finder { func, sizes: &sizes, problem: Problem::default(), marks: Vec::new() };
    // The arguments of the function are there in any case.
    let params = made.tape.params.iter().map(|param| (*param, Vec::new())).collect();
    finder.block(Level { tape: &made.tape, needs: params, times: 1, saved: None }, &read);
    (finder.problem, finder.marks)
}

/// A value for each symbol.
fn symbols(mesh: &Mesh, func: &Func) -> BTreeMap<Sym, i64> {
    let mut symbols: BTreeMap<Sym, i64> =
        func.bound_symbols().into_iter().map(|sym| (sym, DEFAULT_SIZE)).collect();
    let known = EvalCx { mesh, rank: Rank(0), symbols: &symbols };
    let from_data = estimates(&known, func, &BTreeMap::new());
    symbols.extend(from_data.iter().map(|one| (one.sym, one.value)));
    symbols
}

/// A block of the forward.
struct Level<'a, 'b> {
    tape: &'b Tape<'a>,
    /// The values of the problem that have to be there, so that the backward can have a value of the block; none if it never
    /// can. At first those of the parameters.
    needs: BTreeMap<Value, Vec<usize>>,
    /// How often it runs.
    times: u64,
    /// The values that it can return for the backward; none for the function, whose values are all there.
    saved: Option<BTreeSet<Value>>,
}

struct Finder<'a, 'b> {
    func: &'b Func,
    sizes: &'b EvalCx<'b>,
    problem: Problem,
    marks: Vec<Vec<&'a Node>>,
}

impl<'a> Finder<'a, '_> {
    /// Adds the values and steps of a block of which the backward reads these values, and those of the blocks in it.
    fn block(&mut self, mut level: Level<'a, '_>, read: &BTreeSet<Value>) {
        let mut stacked = BTreeSet::new();
        for entry in &level.tape.entries {
            self.entry(entry, &mut level);
            for (inside, block) in entry.blocks.iter().zip(&entry.node.blocks) {
                let kept = inside.saved.iter().filter(|(_, outside)| read.contains(outside));
                let inner: BTreeSet<Value> = kept.map(|(inner, _)| *inner).collect();
                stacked.extend(inside.saved.iter().map(|(_, outside)| *outside));
                let (trips, carries, skip) = match entry.node.op.flow() {
                    Flow::Loop { trips: Trips::Count(length), carries, .. } => {
                        (number(self.sizes, length), carries, 0)
                    }
                    Flow::Loop { carries, .. } => (1, carries, 0),
                    Flow::Cond => (1, 0, 1),
                    Flow::Straight => (1, 0, 0),
                };
                let times = level.times.saturating_mul(trips);
                let mut needs = BTreeMap::new();
                let saved: BTreeSet<Value> = inside.saved.iter().map(|(inner, _)| *inner).collect();
                for (i, (param, old)) in inside.tape.params.iter().zip(&block.params).enumerate() {
                    // A carry is known to the backward only where it is kept.
                    let own = if i >= carries {
                        entry.args.get(i + skip).and_then(|arg| level.needs.get(arg)).cloned()
                    } else {
                        saved.contains(param).then(|| vec![self.value(*old, None, times)])
                    };
                    needs.extend(own.map(|own| (*param, own)));
                }
                self.block(Level { tape: &inside.tape, needs, times, saved: Some(saved) }, &inner);
            }
        }
        let reads = read.difference(&stacked).filter_map(|value| level.needs.get(value));
        reads.flatten().for_each(|value| self.problem.values[*value].read = true);
    }

    /// Adds what a node gives.
    fn entry(&mut self, entry: &Entry<'a>, level: &mut Level<'a, '_>) {
        let operands: Option<Vec<&Vec<usize>>> = entry.args.iter().map(|arg| level.needs.get(arg)).collect();
        let operands = operands.map(|all| all.into_iter().flatten().copied().collect::<BTreeSet<usize>>());
        let operands = operands.map(|all| all.into_iter().collect::<Vec<usize>>());
        let again = entry.results.first().is_some_and(|result| level.tape.again.get(*result).is_some());
        // Views share the storage of their operands, but where each is stacked.
        let view = level.saved.is_none() && entry.node.op.alias() == Alias::View;
        let mut step = None;
        for (i, (result, old)) in entry.results.iter().zip(&entry.node.results).enumerate() {
            let needs = if again || entry.args.is_empty() {
                // A constant is there in any case.
                operands.clone()
            } else if view && i == 0 {
                let root = level.needs.get(&entry.args[0]).cloned();
                // It is computed again with what it is a view of.
                let of = root.iter().flatten().filter_map(|value| self.problem.values[*value].step);
                of.collect::<BTreeSet<usize>>()
                    .into_iter()
                    .for_each(|step| self.marks[step].push(entry.node));
                root
            } else if level.saved.as_ref().is_none_or(|saved| saved.contains(result)) {
                if let (true, Some(needs), None) = (can_repeat(entry), &operands, step) {
                    let costs = total_of_node(self.sizes, self.func, entry.node).operations();
                    let cost = costs.saturating_mul(level.times);
                    self.problem.steps.push(Step { cost, needs: needs.clone() });
                    self.marks.push(vec![entry.node]);
                    step = Some(self.problem.steps.len() - 1);
                }
                Some(vec![self.value(*old, step, level.times)])
            } else {
                None
            };
            level.needs.extend(needs.map(|needs| (*result, needs)));
        }
    }

    /// Adds a value that may be kept.
    fn value(&mut self, old: Value, step: Option<usize>, times: u64) -> usize {
        let tensors = self.func.ty(old).into_iter().flat_map(|ty| ty.tensors());
        let bytes = tensors.map(|ty| number(self.sizes, &ty.bytes())).fold(0u64, u64::saturating_add);
        self.problem.values.push(Kept { bytes: bytes.saturating_mul(times), step, read: false });
        self.problem.values.len() - 1
    }
}

/// Whether an entry may run again without a mark.
fn can_repeat(entry: &Entry<'_>) -> bool {
    entry.node.op.effects() == Effects::Pure && entry.node.blocks.is_empty()
}

#[cfg(test)]
#[allow(dead_code, reason = "only the programs are needed here")]
#[path = "../../tests/grown/mod.rs"]
mod grown;

#[cfg(test)]
mod tests {
    use consort_ir::builder::Builder;
    use consort_ir::index::Index;
    use consort_ir::ops::{Add, AllReduceStart, Broadcast, Exp, Matmul, Mul, Op, Sin, Softmax, Sum, Tanh};
    use consort_ir::program::Program;
    use consort_ir::text::print;
    use consort_ir::types::TensorType;
    use consort_types::{Dtype, GroupName, Reduce, Rng};

    use super::super::active::Active;
    use super::super::choose::brute;
    use super::super::{Wanted, arguments, derive, float_arguments, seeds, spread};
    use super::*;

    /// What became of a program.
    #[derive(Debug, Default)]
    struct Tried {
        budgets: usize,
        /// Of these, how many make something run again.
        again: usize,
    }

    fn operations(mesh: &Mesh, func: &Func, made: &Made<'_>) -> u64 {
        let symbols = symbols(mesh, func);
        let sizes = EvalCx { mesh, rank: Rank(0), symbols: &symbols };
        let costs = made.func.body.nodes.iter().map(|node| total_of_node(&sizes, &made.func, node));
        costs.map(|cost| cost.operations()).sum()
    }

    /// Chooses for some budgets and compares with all choices. What the choice says is kept and runs again is what the
    /// gradient keeps and runs.
    fn try_program(program: &Program, what: &str, tried: &mut Tried) {
        let (mesh, func) = (&program.mesh, &program.funcs[0]);
        let wanted = Wanted::by(float_arguments(func));
        let seeds = seeds(mesh, func, &wanted).unwrap();
        let active = Active::new(func, &arguments(mesh, func, &wanted).unwrap(), &func.body.results);
        let Ok(func) = spread::make_spreads_explicit(mesh, func, &active) else { return };
        let by = arguments(mesh, &func, &wanted).unwrap();
        let active = Active::new(&func, &by, &func.body.results);
        let Ok(made) = derive(mesh, (&func, &active, &Again::marked(&func).unwrap()), &seeds, &wanted) else {
            return;
        };
        let (problem, _) = problem(mesh, &func, &made);
        if problem.steps.len() > 13 {
            return;
        }
        let all = kept(mesh, &func, &made);
        for budget in [0, all / 4, all / 2, all * 3 / 4] {
            let mut again = Again::marked(&func).unwrap();
            fit(mesh, &func, &made, &mut again, budget);
            let choice = problem.choose(budget);
            let less = derive(mesh, (&func, &active, &again), &seeds, &wanted).unwrap();
            assert_eq!(kept(mesh, &func, &less), choice.bytes, "{what}: {budget} of {all} bytes");
            assert_eq!(
                operations(mesh, &func, &less) - operations(mesh, &func, &made),
                choice.cost,
                "{what}: {budget} of {all} bytes"
            );
            let (bytes, cost) = brute(&problem, budget);
            assert_eq!(choice.cost, cost, "{what}: {budget} of {all} bytes");
            assert!(choice.bytes <= budget.max(bytes), "{what}: {budget} of {all} bytes");
            tried.budgets += 1;
            tried.again += usize::from(cost > 0);
        }
    }

    /// A random program that keeps much: small functions, products, sums over ranks, of lists and of matrices.
    fn dense(seed: u64) -> Option<Program> {
        let (mut rng, mesh) = (Rng::new(seed), Mesh::new([("a", 2u32)]).ok()?);
        let sizes = |rank: usize| vec![Index::constant(4); rank];
        let mut b = Builder::new(&mesh, "f");
        let param =
            |b: &mut Builder<'_>, rank| b.param(TensorType::new(Dtype::F64, sizes(rank), mesh.all_axes()));
        let mut values: [Vec<Value>; 2] = [vec![param(&mut b, 1)], vec![param(&mut b, 2)]];
        let over = GroupName::Axes(mesh.all_axes());
        for _ in 0..6 + rng.below(6) {
            let rank = rng.below(2);
            let x = rng.pick(&values[rank]);
            let y = rng.pick(&values[rank]);
            let (to, op, args) = match rng.below(9) {
                0 => (rank, Op::new(Sin {}), vec![x]),
                1 => (rank, Op::new(Exp {}), vec![x]),
                2 => (rank, Op::new(Tanh {}), vec![x]),
                3 | 4 => (rank, Op::new(Mul {}), vec![x, y]),
                5 => (rank, Op::new(Softmax { dim: 0 }), vec![x]),
                6 if rank == 1 => (1, Op::new(Matmul {}), vec![x, y]),
                7 if rank == 1 => (0, Op::new(Sum { dims: vec![0], keep: false }), vec![x]),
                7 => (1, Op::new(Broadcast { shape: sizes(2) }), vec![x]),
                _ => {
                    let sum = AllReduceStart { reduce: Reduce::Avg, over };
                    let sum = b.start_wait(sum, &[x]).ok()?;
                    values[rank].extend(sum);
                    continue;
                }
            };
            let made = b.node(op, &args, Vec::new()).ok()?;
            values[to].extend(made);
        }
        let mut total = Vec::new();
        for (rank, values) in values.iter().enumerate() {
            let all = Sum { dims: (0..=rank).collect(), keep: false };
            total.push(b.one(all, &[*values.last()?]).ok()?);
        }
        let total = b.one(Add {}, &total).ok()?;
        let loss = b.start_wait(AllReduceStart { reduce: Reduce::Avg, over }, &[total]).ok()?;
        Some(Program { mesh: mesh.clone(), funcs: vec![b.finish(&loss)] })
    }

    #[test]
    fn what_runs_again_costs_least_of_all_choices() {
        let (mut tried, mut loops) = (Tried::default(), Tried::default());
        for seed in 0..200 {
            let program = dense(seed).unwrap();
            try_program(&program, &format!("seed {seed}\n{}", print(&program)), &mut tried);
            // Few of these have anything that may run again, but loops and conditions.
            if let Some(program) = grown::program(seed, 8) {
                try_program(&program, &format!("seed {seed}\n{}", print(&program)), &mut loops);
            }
        }
        assert!(tried.again > 300 && loops.again > 30, "{tried:?}, {loops:?}");
    }
}
