//! Chooses what is not kept for the backward, so that what is kept fits a budget.
//!
//! First the gradient is made with everything kept, which shows what the backward reads. Then values are given up one by
//! one, each time the one that frees the most bytes for the operations of computing it again, and with it what only it
//! needs. Only ops without communication, effects and blocks are repeated: a collective that a value is computed from is
//! kept instead. Sizes that are not known count as [`DEFAULT_SIZE`], and those that depend on the rank as on rank 0, so
//! that all ranks choose alike.

use std::collections::{BTreeMap, BTreeSet};

use consort_ir::cost::{DEFAULT_SIZE, estimates, number, total_of_node};
use consort_ir::entity::Value;
use consort_ir::index::Sym;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Alias, Effects, EvalCx, Flow, Trips};
use consort_ir::program::Func;
use consort_types::Rank;

use super::Made;
use super::keep::Again;
use super::tape::{Entry, Tape};

/// Adds to `again` until what is kept of a function fits the budget, or nothing more can be given up; returns the bytes
/// that are kept. `made` is its gradient with everything else kept.
pub(super) fn fit(mesh: &Mesh, func: &Func, made: &Made<'_>, again: &mut Again, budget: u64) -> u64 {
    let mut symbols: BTreeMap<Sym, i64> =
        func.bound_symbols().into_iter().map(|sym| (sym, DEFAULT_SIZE)).collect();
    let known = EvalCx { mesh, rank: Rank(0), symbols: &symbols };
    let from_data = estimates(&known, func, &BTreeMap::new());
    symbols.extend(from_data.iter().map(|one| (one.sym, one.value)));
    let sizes = EvalCx { mesh, rank: Rank(0), symbols: &symbols };

    let nodes = made.func.body.nodes.iter();
    let backward = nodes.filter(|node| node.results.first().is_some_and(|result| *result >= made.first));
    let read: BTreeSet<Value> =
        backward.flat_map(|node| &node.args).copied().filter(|value| *value < made.first).collect();
    let mut levels = Vec::new();
    add_levels(&sizes, func, (&made.tape, &func.body.params, 0, 1), &read, &mut levels);
    loop {
        let kept = levels.iter().fold(0u64, |all, level| all.saturating_add(level.kept()));
        let best = levels.iter().enumerate().flat_map(|(number, level)| {
            let offers = level.entries.keys().filter_map(|at| level.offer(*at));
            offers.map(move |offer| (number, offer))
        });
        // Of equal offers the first is taken.
        let best = best.reduce(|best, other| if other.1.is_better_than(&best.1) { other } else { best });
        match best {
            Some((number, offer)) if kept > budget => levels[number].take(&offer, again),
            _ => return kept,
        }
    }
}

/// A block of the forward: its entries that are kept.
struct Level<'a, 'b> {
    func: &'b Func,
    sizes: &'b EvalCx<'b>,
    tape: &'b Tape<'a>,
    /// Its parameters in the function before it was copied.
    params: &'b [Value],
    /// How often it runs.
    times: u64,
    /// Whether views share the storage of their operands: not where each is stacked.
    shares: bool,
    /// The entry and the number of the result that each value is.
    defs: BTreeMap<Value, (usize, usize)>,
    /// The kept entries, with their bytes.
    entries: BTreeMap<usize, u64>,
    /// The entries that are computed again.
    again: BTreeSet<usize>,
    /// How many of its parameters are carries, which are known to the backward only where they are kept.
    carries: usize,
    /// The carries that are kept, with their bytes.
    kept_carries: BTreeMap<Value, u64>,
}

/// An entry that may be given up.
struct Offer {
    at: usize,
    /// What is computed again, itself included.
    again: BTreeSet<usize>,
    /// What has to be kept instead, with its bytes.
    instead: BTreeMap<usize, u64>,
    /// The carries that have to be kept besides.
    carries: BTreeMap<Value, u64>,
    /// Bytes that it frees.
    frees: u64,
    /// Operations that it costs.
    costs: u64,
}

impl Offer {
    fn is_better_than(&self, other: &Offer) -> bool {
        let worth = |a: &Offer, b: &Offer| u128::from(a.frees) * u128::from(b.costs.max(1));
        worth(self, other) > worth(other, self)
    }
}

/// The levels of a block of which the backward reads these values, and of the blocks in it.
fn add_levels<'a, 'b>(
    sizes: &'b EvalCx<'b>,
    func: &'b Func,
    (tape, params, carries, times): (&'b Tape<'a>, &'b [Value], usize, u64),
    read: &BTreeSet<Value>,
    levels: &mut Vec<Level<'a, 'b>>,
) {
    let (defs, entries, again) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
    let shares = std::ptr::eq(params, &*func.body.params);
    let kept_carries = BTreeMap::new();
    let mut level =
        Level { func, sizes, tape, params, times, shares, defs, entries, again, carries, kept_carries };
    let mut stacked = BTreeSet::new();
    for (at, entry) in tape.entries.iter().enumerate() {
        level.defs.extend(entry.results.iter().enumerate().map(|(i, result)| (*result, (at, i))));
        if entry.results.first().is_some_and(|result| tape.again.get(*result).is_some()) {
            level.again.insert(at);
        }
        for (inside, block) in entry.blocks.iter().zip(&entry.node.blocks) {
            let kept = inside.saved.iter().filter(|(_, outside)| read.contains(outside));
            stacked.extend(inside.saved.iter().map(|(_, outside)| *outside));
            let inner: BTreeSet<Value> = kept.map(|(inner, _)| *inner).collect();
            let (trips, carries) = match entry.node.op.flow() {
                Flow::Loop { trips: Trips::Count(length), carries, .. } => (number(sizes, length), carries),
                _ => (1, 0),
            };
            add_levels(
                sizes,
                func,
                (&inside.tape, &block.params, carries, times.saturating_mul(trips)),
                &inner,
                levels,
            );
        }
    }
    let roots: BTreeSet<Value> = read
        .difference(&stacked)
        .map(|value| level.root(*value))
        .filter(|value| !level.is_free(*value))
        .collect();
    for root in roots {
        let bytes = level.bytes(root);
        match level.defs.get(&root) {
            Some((at, _)) => *level.entries.entry(*at).or_default() += bytes,
            None => {
                level.kept_carries.insert(root, bytes);
            }
        }
    }
    levels.push(level);
}

impl<'a, 'b> Level<'a, 'b> {
    fn entry(&self, at: usize) -> &'b Entry<'a> {
        &self.tape.entries[at]
    }

    fn kept(&self) -> u64 {
        let all = self.entries.values().chain(self.kept_carries.values());
        all.fold(0u64, |all, bytes| all.saturating_add(*bytes))
    }

    /// The value whose storage a view has.
    fn root(&self, mut value: Value) -> Value {
        while let Some((at, 0)) = self.defs.get(&value) {
            let entry = self.entry(*at);
            if !self.shares || entry.node.op.alias() != Alias::View || entry.args.is_empty() {
                break;
            }
            value = entry.args[0];
        }
        value
    }

    /// Whether a value is there in any case: an argument of the function, a constant, or one that is computed again.
    fn is_free(&self, value: Value) -> bool {
        match self.defs.get(&value) {
            None => self.shares,
            Some((at, _)) => self.entry(*at).args.is_empty() || self.again.contains(at),
        }
    }

    fn bytes(&self, value: Value) -> u64 {
        let old = match self.defs.get(&value) {
            Some((at, i)) => self.entry(*at).node.results.get(*i),
            None => {
                self.tape.params.iter().position(|param| *param == value).and_then(|i| self.params.get(i))
            }
        };
        let ty = old.and_then(|old| self.func.ty(*old));
        let bytes = ty.into_iter().flat_map(|ty| ty.tensors()).map(|ty| number(self.sizes, &ty.bytes()));
        bytes.fold(0u64, u64::saturating_add).saturating_mul(self.times)
    }

    /// What giving up a kept entry brings; `None` if that is nothing.
    fn offer(&self, at: usize) -> Option<Offer> {
        if !can_repeat(self.entry(at)) {
            return None;
        }
        let mut offer = Offer {
            at,
            again: BTreeSet::from([at]),
            instead: BTreeMap::new(),
            carries: BTreeMap::new(),
            frees: 0,
            costs: 0,
        };
        let mut open = vec![at];
        while let Some(at) = open.pop() {
            let entry = self.entry(at);
            let costs = total_of_node(self.sizes, self.func, entry.node).operations();
            offer.costs = offer.costs.saturating_add(costs.saturating_mul(self.times));
            for arg in &entry.args {
                let root = self.root(*arg);
                let Some((own, _)) = self.defs.get(arg) else {
                    let place = self.tape.params.iter().position(|param| param == arg);
                    if place.is_some_and(|place| place < self.carries) && !self.kept_carries.contains_key(arg)
                    {
                        offer.carries.insert(*arg, self.bytes(*arg));
                    }
                    continue;
                };
                let is_kept = |value| {
                    let at = self.defs.get(&value).map(|(at, _)| *at);
                    at.is_some_and(|at| self.entries.contains_key(&at) && at != offer.at)
                        || self.shares && at.is_none()
                };
                if self.is_free(*arg) || is_kept(root) || offer.again.contains(own) {
                    continue;
                }
                if can_repeat(self.entry(*own)) {
                    offer.again.insert(*own);
                    open.push(*own);
                } else {
                    offer.instead.insert(*own, self.bytes(*arg));
                }
            }
        }
        let more = offer.instead.values().chain(offer.carries.values());
        let more = more.fold(0u64, |all, bytes| all.saturating_add(*bytes));
        offer.frees = self.entries.get(&at)?.checked_sub(more).filter(|frees| *frees > 0)?;
        Some(offer)
    }

    /// Gives up an entry.
    fn take(&mut self, offer: &Offer, again: &mut Again) {
        self.entries.remove(&offer.at);
        self.entries.extend(&offer.instead);
        self.kept_carries.extend(&offer.carries);
        let views = (0..self.tape.entries.len()).filter(|at| {
            let root = self.entry(*at).results.first().map(|result| self.root(*result));
            let root = root.and_then(|root| self.defs.get(&root));
            root.is_some_and(|(root, _)| offer.again.contains(root))
        });
        let all: Vec<usize> = views.chain(offer.again.iter().copied()).collect();
        for at in all {
            self.again.insert(at);
            again.add(self.entry(at).node);
        }
    }
}

/// Whether an entry may run again without a mark.
fn can_repeat(entry: &Entry<'_>) -> bool {
    entry.node.op.effects() == Effects::Pure && entry.node.blocks.is_empty()
}
