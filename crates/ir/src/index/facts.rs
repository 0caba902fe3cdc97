//! Facts about symbols, and what follows from them about sizes.
//!
//! A symbol is declared with a range and a multiple, and guards add equalities and inequalities between
//! indices. A question is answered `Some` only where the answer holds for all values of the symbols that
//! satisfy every fact and give the question a value; `None` means undecided, never "no".
//!
//! Questions and guards are brought into one form. A symbol `s` known to be a multiple of `m` is replaced by
//! `m*s`, so that within this module it stands for `s/m`: the normal form then sees the divisibility without
//! further rules. Equalities become rewrite rules from one atom to the rest of the equation, or, where no
//! atom can be isolated, polynomials that are zero. Inequalities become ranges of symbols, or indices that
//! are not negative. What is left of a question is decided by interval arithmetic and a bounded search.

mod prove;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use consort_types::{Axes, GroupId, GroupName};

use super::guard::{Guard, Recorded};
use super::range::{INFINITE, Range};
use super::{Atom, Index, Sym, Term, gcd};
use crate::mesh::Mesh;

/// How many guards are used for deciding. Later ones are recorded only, which bounds the work.
const MAX_USED: usize = 128;
/// How many equations may be learnt from one new one, as it makes others stale.
const MAX_LEARNT: usize = 4 * MAX_USED;
/// Limit of rewriting rounds, against cycles.
const MAX_ROUNDS: usize = 8;
/// The most nodes of an index that is analysed. Of larger ones only the range is known.
const MAX_STUDIED: u32 = 256;
/// The most nodes of an index that may replace an atom.
const MAX_VALUE: u32 = 32;

/// The declaration of a symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymbolFacts {
    /// The least value.
    pub min: i64,
    /// The greatest value, if there is one.
    pub max: Option<i64>,
    /// A number of at least 1 that divides every value.
    pub multiple_of: i64,
    /// The axes over which the value may differ.
    pub varies: Axes,
}

impl Default for SymbolFacts {
    fn default() -> SymbolFacts {
        SymbolFacts { min: 0, max: None, multiple_of: 1, varies: Axes::NONE }
    }
}

impl SymbolFacts {
    /// Whether a value is in the range and a multiple of `multiple_of`.
    pub fn allow(&self, value: i64) -> bool {
        value >= self.min && self.max.is_none_or(|max| value <= max) && value % self.multiple_of == 0
    }
}

/// The range as programs write it: `0..=64 by 8`.
impl fmt::Display for SymbolFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..", self.min)?;
        self.max.iter().try_for_each(|max| write!(f, "={max}"))?;
        if self.multiple_of == 1 { Ok(()) } else { write!(f, " by {}", self.multiple_of) }
    }
}

/// The outcome of assuming a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assumed {
    /// It was recorded and is used from now on.
    New,
    /// It follows from what is known, and was not recorded.
    Known,
    /// It cannot hold, and was not recorded.
    Contradiction,
}

/// The facts of a declared symbol: its declaration, and what guards add.
#[derive(Clone, Debug)]
struct Known {
    declared: SymbolFacts,
    /// A number that divides every value.
    multiple: i64,
    /// The range of the value divided by `multiple`.
    range: Range,
}

impl Known {
    fn new(declared: SymbolFacts) -> Known {
        let multiple = declared.multiple_of.max(1);
        let mut known = Known { declared, multiple, range: Range::ALL };
        known.reset_range();
        known
    }

    fn reset_range(&mut self) {
        let multiple = i128::from(self.multiple);
        let high = self.declared.max.map_or(INFINITE, |max| i128::from(max).div_euclid(multiple));
        self.range = Range::new(-(-i128::from(self.declared.min)).div_euclid(multiple), high);
    }
}

/// The facts about the symbols in scope.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    symbols: BTreeMap<Sym, Known>,
    guards: Recorded,
    /// The symbols of the guards that are used: of all others only the declaration is known.
    used: BTreeSet<Sym>,
    // The rest follows from the symbols and the guards, and is scaled: multiples of symbols are visible in
    // it, as the header says.
    /// Atoms and what they are equal to.
    rules: BTreeMap<Atom, Index>,
    /// Sums that are zero and have a positive leading coefficient.
    zeros: Vec<Index>,
    /// Indices that are not negative.
    positives: Vec<Index>,
}

impl Facts {
    /// The facts about the ranks of a mesh.
    pub fn new(mesh: &Mesh) -> Facts {
        let mut facts = Facts::default();
        for axis in mesh.all_axes().iter() {
            facts.declare_rank(Sym::Rank(axis), GroupName::Axes(Axes::one(axis)), mesh);
        }
        facts.add_groups(mesh);
        facts
    }

    /// Adds the facts about the ranks of groups that were declared since.
    pub fn add_groups(&mut self, mesh: &Mesh) {
        // Groups are never removed, so the new ones are the last ones.
        for id in (0..mesh.groups().len()).rev().map(|id| GroupId(id as u16)) {
            if self.symbols.contains_key(&Sym::GroupRank(id)) {
                break;
            }
            self.declare_rank(Sym::GroupRank(id), GroupName::List(id), mesh);
        }
    }

    fn declare_rank(&mut self, sym: Sym, group: GroupName, mesh: &Mesh) {
        let max = Some(i64::from(mesh.group_size(group)) - 1);
        let varies = mesh.group_axes(group);
        self.declare(sym, SymbolFacts { max, varies, ..SymbolFacts::default() });
    }

    /// Declares a symbol; returns false, and changes nothing, if it is declared already.
    pub fn declare(&mut self, sym: Sym, facts: SymbolFacts) -> bool {
        if self.symbols.contains_key(&sym) {
            return false;
        }
        self.symbols.insert(sym, Known::new(facts));
        if self.guards.mention(sym) {
            self.derive();
        }
        true
    }

    /// Takes symbols out of scope, together with the guards that mention them and what followed from those.
    pub fn forget(&mut self, symbols: &[Sym]) {
        for sym in symbols {
            self.symbols.remove(sym);
        }
        // Nothing was derived from guards that are not used.
        if self.guards.forget(symbols).is_some_and(|first| first < MAX_USED) {
            for sym in &self.used {
                if let Some(known) = self.symbols.get_mut(sym) {
                    *known = Known::new(known.declared.clone());
                }
            }
            self.used.clear();
            for guard in self.guards.list().iter().take(MAX_USED) {
                self.used.extend(guard.distinct());
            }
            self.derive();
        }
    }

    /// The declaration of a symbol.
    pub fn get(&self, sym: Sym) -> Option<&SymbolFacts> {
        self.symbols.get(&sym).map(|known| &known.declared)
    }

    /// The declared symbols, in order.
    pub fn symbols(&self) -> impl Iterator<Item = (Sym, &SymbolFacts)> {
        self.symbols.iter().map(|(sym, known)| (*sym, &known.declared))
    }

    /// The guards that were recorded, in order.
    pub fn guards(&self) -> &[Guard] {
        self.guards.list()
    }

    /// Assumes that a guard holds, and says whether that is new.
    pub fn assume(&mut self, guard: Guard) -> Assumed {
        match self.holds(&guard) {
            Some(true) => return Assumed::Known,
            Some(false) => return Assumed::Contradiction,
            None => {}
        }
        if self.guards.list().len() < MAX_USED {
            self.used.extend(guard.distinct());
            let (zeros, positives) = self.translate(std::slice::from_ref(&guard));
            self.guards.push(guard);
            if self.learn(zeros, positives) {
                self.derive();
            }
        } else {
            self.guards.push(guard);
        }
        Assumed::New
    }

    /// Derives all other facts from the symbols and the guards.
    fn derive(&mut self) {
        for _ in 0..MAX_ROUNDS {
            self.clear();
            let list = self.guards.list();
            let (zeros, positives) = self.translate(&list[..list.len().min(MAX_USED)]);
            if !self.learn(zeros, positives) {
                return;
            }
        }
        // Multiples keep growing, which no sensible guards cause: give up and know less.
        self.clear();
    }

    /// Forgets everything derived but multiples.
    fn clear(&mut self) {
        self.rules.clear();
        self.zeros.clear();
        self.positives.clear();
        for sym in &self.used {
            self.symbols.get_mut(sym).into_iter().for_each(Known::reset_range);
        }
    }

    /// The indices that guards state to be zero, the last guard first, and those stated to be nonnegative.
    fn translate(&self, guards: &[Guard]) -> (Vec<Index>, Vec<Index>) {
        let (mut zeros, mut positives) = (Vec::new(), Vec::new());
        for guard in guards.iter().rev() {
            match guard {
                Guard::Eq(a, b) => zeros.push(self.scale(&(a - b))),
                Guard::Le(a, b) => positives.push(self.scale(&(b - a))),
            }
        }
        (zeros, positives)
    }

    /// Learns that some scaled indices are zero, the last one first, and that others are not negative. True if
    /// the multiple of a symbol grew: this changes the meaning of the symbol, so everything must be derived
    /// again.
    fn learn(&mut self, mut zeros: Vec<Index>, mut positives: Vec<Index>) -> bool {
        let mut multiples = BTreeMap::new();
        for _ in 0..MAX_LEARNT {
            let Some(zero) = zeros.pop() else { break };
            self.learn_zero(&self.reduce(&zero), &mut zeros, &mut positives, &mut multiples);
        }
        for positive in positives {
            self.learn_positive(&self.reduce(&positive));
        }
        let mut grown = false;
        for (sym, factor) in multiples {
            if let Some(known) = self.symbols.get_mut(&sym)
                && let Some(multiple) = known.multiple.checked_mul(factor)
            {
                known.multiple = multiple;
                grown = true;
            }
        }
        grown
    }

    /// Learns from a reduced index that is zero. What this makes stale goes back to `zeros` and `positives`,
    /// to be learnt again, and what follows from it joins them.
    fn learn_zero(
        &mut self,
        zero: &Index,
        zeros: &mut Vec<Index>,
        positives: &mut Vec<Index>,
        multiples: &mut BTreeMap<Sym, i64>,
    ) {
        let Some(zero) = monic(zero).filter(|zero| fits(zero, MAX_STUDIED)) else { return };
        let Some((atom, value)) = isolate(&zero) else { return self.zeros.push(zero) };
        // The atom is about to disappear, so what its range says must be said of its value.
        let Range { low, high } = self.range_of(&atom);
        positives.push(value.plus(-1, &Index::narrow(low)));
        positives.push(Index::narrow(high).plus(-1, &value));
        let stale = |index: &mut Index| index.mentions(&atom);
        zeros.extend(self.zeros.extract_if(.., stale));
        positives.extend(self.positives.extract_if(.., stale));
        let nested = |key: &Atom| key.children().any(|child| child.mentions(&atom));
        zeros.extend(self.rules.extract_if(.., |key, _| nested(key)).map(|(key, value)| key.index() - value));
        for other in self.rules.values_mut() {
            let new = other.rewrite(&|inner| (*inner == atom).then(|| value.clone()));
            if fits(&new, MAX_VALUE) {
                *other = new;
            }
        }
        match &atom {
            Atom::Mod(x, y) => {
                if let (Some(0), Some((sym, factor))) = (value.as_const(), multiple(x, y)) {
                    let known = multiples.entry(sym).or_insert(1);
                    *known = lcm(*known, factor).unwrap_or(*known);
                }
                self.zeros.extend(monic(&(x - y * x.div(y) - &value)));
            }
            Atom::Div(x, y) if self.range(y).low > 0 => {
                positives.push(x - y * &value);
                positives.push(y * &value + y - 1 - x);
            }
            _ => {}
        }
        self.rules.insert(atom, value);
    }

    /// Learns from a reduced index that is not negative.
    fn learn_positive(&mut self, positive: &Index) {
        let Ok(content @ 1..) = i64::try_from(positive.content()) else { return };
        let positive = positive.shrink(content);
        let offset = i128::from(positive.offset());
        if let [term] = positive.terms()
            && let [Atom::Sym(sym)] = term.factors[..]
            && let Some(known) = self.symbols.get_mut(&sym)
        {
            match term.coefficient {
                1.. => known.range.low = known.range.low.max(-offset),
                _ => known.range.high = known.range.high.min(offset),
            }
        } else if fits(&positive, MAX_STUDIED) && !self.positives.contains(&positive) {
            self.positives.push(positive);
        }
    }

    /// The index with the multiples of its symbols made visible.
    fn scale(&self, index: &Index) -> Index {
        index.substitute(&|sym| match self.symbols.get(&sym)?.multiple {
            1 => None,
            multiple => Some(Index::sym(sym) * multiple),
        })
    }

    /// The scaled index after all that is known to be equal was replaced.
    fn reduce(&self, index: &Index) -> Index {
        let mut index = index.clone();
        for _ in 0..MAX_ROUNDS {
            if !fits(&index, MAX_STUDIED) {
                break;
            }
            let next = self.cancel(&index.rewrite(&|atom| self.rewrite(atom)));
            if next == index || !fits(&next, MAX_STUDIED) {
                break;
            }
            index = next;
        }
        index
    }

    /// The value of an atom, by a rule or because of its range.
    fn rewrite(&self, atom: &Atom) -> Option<Index> {
        if let Some(value) = self.rules.get(atom) {
            return Some(value.clone());
        }
        let range = self.range_of(atom);
        if range.low == range.high {
            return Some(Index::narrow(range.low)).filter(|value| !value.is_invalid());
        }
        let whole = |x, y| Some(self.range(x).div(self.range(y))).filter(|whole| whole.low == whole.high);
        let value = match atom {
            Atom::Div(x, y) => self.cancel(x).div(y),
            Atom::Mod(x, y) => match whole(x, y) {
                Some(whole) => x - y * Index::narrow(whole.low),
                None => self.cancel(x).rem(y),
            },
            _ => return None,
        };
        // A sum that is zero may contain the atom itself, so only a value that does not grow guarantees progress.
        Some(value).filter(|value| fits(value, atom.measure().1))
    }

    /// The index reduced by the sums that are known to be zero.
    fn cancel(&self, index: &Index) -> Index {
        let rest = |left: Index, zero| left.split(zero).map_or(left, |(_, rest)| rest);
        self.zeros.iter().fold(index.clone(), rest)
    }

    /// The range of the values of a scaled index.
    fn range(&self, index: &Index) -> Range {
        if index.is_invalid() {
            return Range::ALL;
        }
        let one = |value: i64| Range::new(value.into(), value.into());
        index.terms().iter().fold(one(index.offset()), |sum, term| {
            let product = |product: Range, atom| product.times(self.range_of(atom));
            sum.plus(term.factors.iter().fold(one(term.coefficient), product))
        })
    }

    /// The range of the values of an atom of a scaled index.
    fn range_of(&self, atom: &Atom) -> Range {
        match atom {
            Atom::Sym(sym) => self.symbols.get(sym).map_or(Range::ALL, |known| known.range),
            Atom::Div(x, y) => self.range(x).div(self.range(y)),
            Atom::Mod(x, y) => self.range(x).rem(self.range(y)),
            Atom::Min(list) | Atom::Max(list) => {
                let join = |a: Range, b: Range| match atom {
                    Atom::Min(_) => Range { low: a.low.min(b.low), high: a.high.min(b.high) },
                    _ => Range { low: a.low.max(b.low), high: a.high.max(b.high) },
                };
                list.iter().map(|x| self.range(x)).reduce(join).unwrap_or(Range::ALL)
            }
            Atom::Pick(at, table) => {
                let at = self.range(at);
                let entries = (0..).zip(table.iter()).filter(|(i, _)| (at.low..=at.high).contains(i));
                Range::around(entries.map(|(_, entry)| self.range(entry)))
            }
        }
    }

    /// Forms of an index that are equal under the facts and expose different properties.
    fn forms(&self, index: &Index) -> Vec<Index> {
        let scaled = self.scale(index);
        let reduced = self.reduce(&scaled);
        let quotients = self.reduce(&reduced.rewrite(&|atom| match atom {
            Atom::Mod(x, y) => Some(x - y * x.div(y)),
            _ => None,
        }));
        let mut forms = vec![quotients, reduced, scaled];
        forms.dedup();
        forms.retain(|form| !form.is_invalid());
        forms
    }

    /// Whether two indices are equal.
    pub fn eq(&self, a: &Index, b: &Index) -> Option<bool> {
        if let (Some(a), Some(b)) = (a.as_const(), b.as_const()) {
            return Some(a == b);
        }
        if a == b && !a.is_invalid() {
            return Some(true);
        }
        let forms = self.forms(&(a - b));
        for form in &forms {
            match (form.as_const(), i64::try_from(form.content())) {
                (Some(value), _) => return Some(value == 0),
                // The terms are a multiple of their content, so the constant has to be one, too.
                (None, Ok(content @ 1..)) if form.offset() % content != 0 => return Some(false),
                _ => {}
            }
        }
        let proves = |f: &dyn Fn(&Index) -> Index| forms.iter().any(|form| self.proves(&f(form)));
        if proves(&|form| form - 1) || proves(&|form| -form - 1) {
            return Some(false);
        }
        (proves(&Index::clone) && proves(&|form| -form)).then_some(true)
    }

    /// Whether an index is at most another.
    pub fn le(&self, a: &Index, b: &Index) -> Option<bool> {
        if let (Some(a), Some(b)) = (a.as_const(), b.as_const()) {
            return Some(a <= b);
        }
        if a == b && !a.is_invalid() {
            return Some(true);
        }
        let forms = self.forms(&(b - a));
        if forms.iter().any(|form| self.proves(form)) {
            return Some(true);
        }
        forms.iter().any(|form| self.proves(&(-form - 1))).then_some(false)
    }

    /// Whether a divisor divides an index, assuming it is not zero.
    pub fn divides(&self, divisor: &Index, dividend: &Index) -> Option<bool> {
        self.eq(&dividend.rem(divisor), &Index::constant(0))
    }

    /// Whether a guard holds. One that was assumed does, whatever could be derived from it.
    pub fn holds(&self, guard: &Guard) -> Option<bool> {
        let decided = match guard {
            Guard::Eq(a, b) => self.eq(a, b),
            Guard::Le(a, b) => self.le(a, b),
        };
        decided.or_else(|| self.guards.contains(guard).then_some(true))
    }

    /// The least and the greatest value that an index may have, as far as they are known. A least value
    /// above 64 bits is given as the greatest that fits, and likewise below.
    pub fn bounds(&self, index: &Index) -> (Option<i64>, Option<i64>) {
        let ranges = self.forms(index).into_iter().map(|form| self.range(&form));
        let all = ranges.fold(Range::ALL, |a, b| Range { low: a.low.max(b.low), high: a.high.min(b.high) });
        let (least, most) = (i128::from(i64::MIN), i128::from(i64::MAX));
        let low = (all.low >= least).then(|| all.low.min(most) as i64);
        let high = (all.high <= most).then(|| all.high.max(least) as i64);
        (low, high)
    }

    /// The axes over which an index may differ: those of its symbols.
    pub fn varies(&self, index: &Index) -> Axes {
        let mut axes = Axes::NONE;
        index.symbols(&mut |sym| axes = axes.union(self.get(sym).map_or(Axes::NONE, |facts| facts.varies)));
        axes
    }

    /// The first undeclared symbol of an index.
    pub fn unknown_symbol(&self, index: &Index) -> Option<Sym> {
        let mut unknown = None;
        index.symbols(&mut |sym| {
            if unknown.is_none() && !self.symbols.contains_key(&sym) {
                unknown = Some(sym);
            }
        });
        unknown
    }
}

/// The symbol that must be a multiple, and of what, if `x%y` is zero.
fn multiple(x: &Index, y: &Index) -> Option<(Sym, i64)> {
    match (x.terms(), x.offset(), y.as_const()) {
        ([Term { factors, coefficient }], 0, Some(y @ 1..)) => match factors[..] {
            [Atom::Sym(sym)] => Some((sym, y / gcd(coefficient.unsigned_abs(), y as u64) as i64)),
            _ => None,
        },
        _ => None,
    }
}

/// The least common multiple of two positive numbers, if it fits.
fn lcm(a: i64, b: i64) -> Option<i64> {
    (a / gcd(a as u64, b as u64) as i64).checked_mul(b)
}

/// Whether an index is valid and has at most `most` nodes.
fn fits(index: &Index, most: u32) -> bool {
    !index.is_invalid() && index.measure().1 <= most
}

/// An equation with coprime coefficients, the leading one positive; `None` if it yields nothing.
fn monic(zero: &Index) -> Option<Index> {
    let content = i64::try_from(zero.content()).ok().filter(|content| *content > 0)?;
    if zero.offset() % content != 0 {
        return None;
    }
    let zero = zero.shrink(content);
    let zero = if zero.terms().first()?.coefficient < 0 { -zero } else { zero };
    Some(zero).filter(|zero| !zero.is_invalid())
}

/// An atom and its value, solved from an equation in which the atom occurs once and without a factor. The youngest
/// symbols are preferred, as they are defined by older ones, and ranks come last.
fn isolate(zero: &Index) -> Option<(Atom, Index)> {
    let rank = |atom: &Atom| match atom {
        Atom::Sym(Sym::Unbacked(id)) => (0, !id),
        Atom::Sym(Sym::Backed(id)) => (1, !id),
        Atom::Sym(_) => (3, 0),
        _ => (2, 0),
    };
    let alone = |term: &Term| match (&term.factors[..], term.coefficient) {
        ([atom], 1 | -1) => {
            let rest = zero.plus((-term.coefficient).into(), &atom.index());
            let value = Index::constant(0).plus((-term.coefficient).into(), &rest);
            (fits(&value, MAX_VALUE) && !value.mentions(atom)).then(|| (atom.clone(), value))
        }
        _ => None,
    };
    zero.terms().iter().filter_map(alone).min_by_key(|(atom, _)| rank(atom))
}
