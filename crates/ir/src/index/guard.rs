//! Guards, and which of them wait for a symbol that has no value yet.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Index, IndexError, Sym};
use crate::mesh::Mesh;

/// A relation between two indices that holds, or that must be checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Guard {
    /// Both are equal.
    Eq(Index, Index),
    /// The first is at most the second.
    Le(Index, Index),
}

impl Guard {
    fn sides(&self) -> (&Index, &Index) {
        match self {
            Guard::Eq(a, b) | Guard::Le(a, b) => (a, b),
        }
    }

    /// Whether the guard holds under the values that `env` gives to symbols.
    pub fn holds(&self, env: &dyn Fn(Sym) -> Option<i64>) -> Result<bool, IndexError> {
        let (a, b) = self.sides();
        let (a, b) = (a.eval(env)?, b.eval(env)?);
        Ok(if matches!(self, Guard::Eq(..)) { a == b } else { a <= b })
    }

    /// The guard with some of its symbols replaced.
    #[must_use]
    pub fn substitute(&self, f: &dyn Fn(Sym) -> Option<Index>) -> Guard {
        match self {
            Guard::Eq(a, b) => Guard::Eq(a.substitute(f), b.substitute(f)),
            Guard::Le(a, b) => Guard::Le(a.substitute(f), b.substitute(f)),
        }
    }

    /// Calls `f` with every symbol of both sides, as often as it occurs.
    pub fn symbols(&self, f: &mut dyn FnMut(Sym)) {
        let (a, b) = self.sides();
        a.symbols(f);
        b.symbols(f);
    }

    /// The guard as programs write it.
    pub fn display<'a>(&'a self, mesh: &'a Mesh) -> impl fmt::Display + 'a {
        let sign = if matches!(self, Guard::Eq(..)) { "==" } else { "<=" };
        let (a, b) = self.sides();
        fmt::from_fn(move |f| write!(f, "{} {sign} {}", a.display(mesh), b.display(mesh)))
    }

    /// For each symbol that guards mention, which of them do, by number.
    pub fn by_symbol(guards: &[Guard]) -> BTreeMap<Sym, Vec<usize>> {
        let mut by_symbol: BTreeMap<Sym, Vec<usize>> = BTreeMap::new();
        for (number, guard) in guards.iter().enumerate() {
            guard.distinct().into_iter().for_each(|sym| by_symbol.entry(sym).or_default().push(number));
        }
        by_symbol
    }

    /// The symbols of both sides, each once.
    pub(super) fn distinct(&self) -> BTreeSet<Sym> {
        let mut all = BTreeSet::new();
        self.symbols(&mut |sym| {
            all.insert(sym);
        });
        all
    }
}

/// Guards in the order in which they were recorded, with lookup by content and by symbol: a program may have any number
/// of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorded {
    list: Vec<Guard>,
    set: BTreeSet<Guard>,
    /// The number of guards that mention a symbol.
    mentions: BTreeMap<Sym, usize>,
}

impl Recorded {
    pub(super) fn list(&self) -> &[Guard] {
        &self.list
    }

    pub(super) fn contains(&self, guard: &Guard) -> bool {
        self.set.contains(guard)
    }

    /// Whether one of them mentions a symbol.
    pub(super) fn mention(&self, sym: Sym) -> bool {
        self.mentions.contains_key(&sym)
    }

    /// Adds a guard that is not in the list.
    pub(super) fn push(&mut self, guard: Guard) {
        guard.distinct().into_iter().for_each(|sym| *self.mentions.entry(sym).or_default() += 1);
        self.set.insert(guard.clone());
        self.list.push(guard);
    }

    /// Removes the guards that mention one of these symbols; returns the position of the first of them.
    pub(super) fn forget(&mut self, symbols: &[Sym]) -> Option<usize> {
        let symbols: BTreeSet<Sym> = symbols.iter().copied().filter(|sym| self.mention(*sym)).collect();
        let mut left: usize = symbols.iter().filter_map(|sym| self.mentions.get(sym)).sum();
        // A symbol ends with its block, and guards that mention it are recent: search from the end.
        let (mut first, mut kept) = (None, Vec::new());
        while left > 0 {
            let guard = self.list.pop()?;
            let own = guard.distinct();
            let hits = own.intersection(&symbols).count();
            if hits == 0 {
                kept.push(guard);
                continue;
            }
            left -= hits;
            first = Some(self.list.len());
            self.set.remove(&guard);
            for sym in own {
                let n = self.mentions.remove(&sym).unwrap_or(0);
                if n > 1 {
                    self.mentions.insert(sym, n - 1);
                }
            }
        }
        self.list.extend(kept.into_iter().rev());
        first
    }
}

/// The guards of a function at one position: each is assumed as soon as all of its symbols have a value, and waits
/// again when one of them ends with its block.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// The number of symbols without a value, per guard.
    missing: Vec<usize>,
    /// The guards that mention a symbol, by number.
    of: BTreeMap<Sym, Vec<usize>>,
}

impl Waiting {
    /// The state at the entry of a function with these known symbols, and the numbers of the guards that do not wait.
    pub fn new(guards: &[Guard], known: impl Fn(Sym) -> bool) -> (Waiting, Vec<usize>) {
        let mut of = Guard::by_symbol(guards);
        of.retain(|sym, _| !known(*sym));
        let mut missing = vec![0; guards.len()];
        of.values().flatten().for_each(|number| missing[*number] += 1);
        let ready = (0..guards.len()).filter(|number| missing[*number] == 0).collect();
        (Waiting { missing, of }, ready)
    }

    /// After symbols got values: the guards that are now complete, in order.
    pub fn define(&mut self, symbols: &[Sym]) -> Vec<usize> {
        let mut ready = Vec::new();
        for number in symbols.iter().filter_map(|sym| self.of.get(sym)).flatten() {
            self.missing[*number] -= 1;
            if self.missing[*number] == 0 {
                ready.push(*number);
            }
        }
        ready.sort_unstable();
        ready
    }

    /// After symbols lost their values at the end of their block.
    pub fn leave(&mut self, symbols: &[Sym]) {
        for number in symbols.iter().filter_map(|sym| self.of.get(sym)).flatten() {
            self.missing[*number] += 1;
        }
    }

    /// The guards that wait, in their order.
    pub fn numbers(&self) -> impl Iterator<Item = usize> {
        self.missing.iter().enumerate().filter(|(_, missing)| **missing > 0).map(|(number, _)| number)
    }
}
