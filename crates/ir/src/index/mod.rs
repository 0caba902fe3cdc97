//! Symbolic integers: the sizes of tensors, and what is computed from them.
//!
//! An `Index` is always in normal form: a sum of terms, each an integer coefficient times a sorted product
//! of atoms, plus a constant. An atom is a symbol, or a quotient, remainder, minimum, maximum or table
//! look-up that does not simplify. Every operation returns a normal form, so the common identities of size
//! arithmetic hold by structural equality, without any search; `facts` decides what needs more than that.
//!
//! Division rounds down and the remainder has the sign of the divisor, so `a == a/b*b + a%b` always holds.
//! Simplification may assume that divisors are not zero, as the expression has no value otherwise.
//!
//! No operation panics. A result that does not fit becomes the invalid index, which absorbs everything. The
//! same happens to expressions beyond fixed limits of breadth, depth and size, because programs come from
//! outside: a malformed one must neither overflow the stack nor take exponential time.

mod divide;
mod facts;
mod guard;
mod print;
mod range;
#[cfg(test)]
mod tests;

pub use facts::{Assumed, Facts, SymbolFacts};
pub use guard::{Guard, Waiting};

use std::cmp::Ordering;
use std::fmt;
use std::ops::{Add, Mul, Neg, Sub};
use std::sync::Arc;

use consort_types::{Axis, GroupId};

/// The most terms of a sum, and the most arguments of a minimum or maximum.
const MAX_TERMS: usize = 256;
/// The most factors of a term.
const MAX_FACTORS: usize = 16;
/// How deep atoms may nest.
const MAX_DEPTH: u32 = 32;
/// The most nodes of an expression, shared ones counted each time they occur: walking costs that much.
const MAX_SIZE: u32 = 1 << 14;
/// The most products that a multiplication may form before equal ones are gathered.
const MAX_PRODUCTS: usize = 16 * MAX_TERMS;

/// A symbol in a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sym {
    /// A size known when the program starts: `s0`.
    Backed(u32),
    /// A size known only once data is: `u0`.
    Unbacked(u32),
    /// The coordinate of the executing rank along an axis: `rank(tp)`.
    Rank(Axis),
    /// The place of the executing rank in its list of a group: `rank(pairs)`.
    GroupRank(GroupId),
}

/// A symbolic integer in normal form.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Index(Form);

/// Constants are held inline, so that programs of constant sizes allocate nothing.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Form {
    Invalid,
    Constant(i64),
    Sum(Arc<Sum>),
}

/// At least one term, each with other factors, in the order of `order`. The measures come first because
/// they tell most unequal sums apart.
#[derive(PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Sum {
    depth: u32,
    size: u32,
    terms: Vec<Term>,
    constant: i64,
}

/// A coefficient other than zero times at least one factor; the factors are sorted.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Term {
    factors: Vec<Atom>,
    coefficient: i64,
}

/// A factor. Children are normal forms, and the atom itself is one only as the constructors of `Index` make
/// it: a divisor leads with a positive coefficient, and lists are flat, sorted and without duplicates.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Atom {
    Sym(Sym),
    Div(Index, Index),
    Mod(Index, Index),
    Min(Arc<[Index]>),
    Max(Arc<[Index]>),
    Pick(Index, Arc<[Index]>),
}

/// Sorted factors and a coefficient that may still overflow an i64.
type Piece = (Vec<Atom>, i128);

/// Why an index has no value under given values of its symbols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexError {
    /// The symbol has no value.
    Unbound(Sym),
    /// The value, or an intermediate one, overflows; also the value of every invalid index.
    Overflow,
    /// A divisor is zero.
    DivisionByZero,
    /// A table look-up outside its table.
    OutOfTable,
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IndexError::Unbound(sym) => write!(f, "{:?} has no value", Index::sym(*sym)),
            IndexError::Overflow => f.write_str("the value does not fit in 64 bits"),
            IndexError::DivisionByZero => f.write_str("division by zero"),
            IndexError::OutOfTable => f.write_str("look-up outside the table"),
        }
    }
}

impl std::error::Error for IndexError {}

/// Products in graded lexicographic order, the largest first: multiplying two products by a third keeps
/// their order, which polynomial division relies on.
fn order(a: &[Atom], b: &[Atom]) -> Ordering {
    b.len().cmp(&a.len()).then_with(|| a.cmp(b))
}

/// The greatest common divisor; that of `a` and zero is `a`.
fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The quotient, rounded down.
fn floor_div(a: i128, b: i128) -> i128 {
    a.div_euclid(b) - i128::from(b < 0 && a.rem_euclid(b) != 0)
}

/// The normal form of a sum of products of coefficients and sorted factors.
fn gather(mut pieces: Vec<Piece>) -> Index {
    pieces.sort_by(|a, b| order(&a.0, &b.0));
    let (mut terms, mut constant) = (Vec::new(), 0);
    let mut pieces = pieces.into_iter().peekable();
    while let Some((factors, first)) = pieces.next() {
        let mut total = Some(first);
        while let Some((_, more)) = pieces.next_if(|next| next.0 == factors) {
            total = total.and_then(|total| total.checked_add(more));
        }
        match total.map(i64::try_from) {
            Some(Ok(0)) => {}
            Some(Ok(total)) if factors.is_empty() => constant = total,
            Some(Ok(coefficient)) if factors.len() <= MAX_FACTORS => {
                terms.push(Term { factors, coefficient })
            }
            _ => return Index::INVALID,
        }
    }
    if terms.is_empty() {
        return Index::constant(constant);
    }
    let (mut depth, mut size) = (0, 0u32);
    for atom in terms.iter().flat_map(|term| &term.factors) {
        let (below, nodes) = atom.measure();
        depth = depth.max(below);
        size = size.saturating_add(nodes);
    }
    if terms.len() > MAX_TERMS || depth > MAX_DEPTH || size > MAX_SIZE {
        return Index::INVALID;
    }
    Index(Form::Sum(Arc::new(Sum { depth, size, terms, constant })))
}

impl Atom {
    /// The indices inside.
    fn children(&self) -> impl Iterator<Item = &Index> {
        let (first, second, list): (_, _, &[Index]) = match self {
            Atom::Sym(_) => (None, None, &[]),
            Atom::Div(a, b) | Atom::Mod(a, b) => (Some(a), Some(b), &[]),
            Atom::Min(list) | Atom::Max(list) => (None, None, list),
            Atom::Pick(at, table) => (Some(at), None, table),
        };
        first.into_iter().chain(second).chain(list)
    }

    /// How deep the atom nests, and how many nodes it has.
    fn measure(&self) -> (u32, u32) {
        let (mut depth, mut size) = (0, 1u32);
        for child in self.children() {
            let (below, nodes) = child.measure();
            depth = depth.max(below + 1);
            size = size.saturating_add(nodes);
        }
        (depth, size)
    }

    fn index(&self) -> Index {
        gather(vec![(vec![self.clone()], 1)])
    }
}

impl Index {
    const INVALID: Index = Index(Form::Invalid);

    /// The index of this value.
    pub fn constant(value: i64) -> Index {
        Index(Form::Constant(value))
    }

    /// The index that is this symbol.
    pub fn sym(sym: Sym) -> Index {
        Atom::Sym(sym).index()
    }

    /// The value of a constant.
    pub fn as_const(&self) -> Option<i64> {
        match self.0 {
            Form::Constant(value) => Some(value),
            _ => None,
        }
    }

    /// The symbol, if the index is a single symbol.
    pub fn as_sym(&self) -> Option<Sym> {
        match self.as_atom() {
            Some(Atom::Sym(sym)) => Some(*sym),
            _ => None,
        }
    }

    /// Whether the index has no value because it overflows 64 bits, divides by zero, looks outside a table, or is too
    /// large an expression.
    pub fn is_invalid(&self) -> bool {
        matches!(self.0, Form::Invalid)
    }

    /// The atom, if the index is a single atom.
    fn as_atom(&self) -> Option<&Atom> {
        match (self.terms(), self.offset()) {
            ([Term { factors, coefficient: 1 }], 0) if factors.len() == 1 => factors.first(),
            _ => None,
        }
    }

    fn terms(&self) -> &[Term] {
        match &self.0 {
            Form::Sum(sum) => &sum.terms,
            _ => &[],
        }
    }

    /// How deep atoms nest, and how many nodes there are.
    fn measure(&self) -> (u32, u32) {
        match &self.0 {
            Form::Sum(sum) => (sum.depth, sum.size),
            _ => (0, 1),
        }
    }

    /// The constant part.
    fn offset(&self) -> i64 {
        match &self.0 {
            Form::Sum(sum) => sum.constant,
            Form::Constant(value) => *value,
            Form::Invalid => 0,
        }
    }

    /// The factors and coefficients of the sum. A constant other than zero comes last, without factors.
    fn pieces(&self) -> impl Iterator<Item = (&[Atom], i64)> {
        let offset = Some(self.offset()).filter(|offset| *offset != 0);
        let terms = self.terms().iter().map(|term| (&term.factors[..], term.coefficient));
        terms.chain(offset.map(|offset| (&[][..], offset)))
    }

    /// The greatest common divisor of the coefficients of the terms, the constant not among them.
    fn content(&self) -> u64 {
        self.terms().iter().fold(0, |all, term| gcd(all, term.coefficient.unsigned_abs()))
    }

    /// The index with coefficients and constant divided by a positive number, rounding down.
    fn shrink(&self, by: i64) -> Index {
        gather(self.pieces().map(|(factors, c)| (factors.to_vec(), c.div_euclid(by).into())).collect())
    }

    /// This plus `scale` times the other.
    fn plus(&self, scale: i128, other: &Index) -> Index {
        if self.is_invalid() || other.is_invalid() {
            return Index::INVALID;
        }
        if let (Some(a), Some(b)) = (self.as_const(), other.as_const()) {
            let sum = scale.checked_mul(b.into()).and_then(|b| b.checked_add(a.into()));
            return sum.map_or(Index::INVALID, Index::narrow);
        }
        let mut pieces: Vec<_> = self.pieces().map(|(factors, c)| (factors.to_vec(), c.into())).collect();
        for (factors, c) in other.pieces() {
            let Some(c) = scale.checked_mul(c.into()) else { return Index::INVALID };
            pieces.push((factors.to_vec(), c));
        }
        gather(pieces)
    }

    fn times(&self, other: &Index) -> Index {
        if self.is_invalid() || other.is_invalid() {
            return Index::INVALID;
        }
        if let (Some(a), Some(b)) = (self.as_const(), other.as_const()) {
            return Index::narrow(i128::from(a) * i128::from(b));
        }
        self.products(1, other).map_or(Index::INVALID, gather)
    }

    /// The products of all pieces of this with all pieces of the other, times a sign; `None` if there are too
    /// many.
    fn products(&self, sign: i128, other: &Index) -> Option<Vec<Piece>> {
        if self.pieces().count() * other.pieces().count() > MAX_PRODUCTS {
            return None;
        }
        let mut pieces = Vec::new();
        for (left, a) in self.pieces() {
            for (right, b) in other.pieces() {
                let mut factors = [left, right].concat();
                factors.sort();
                pieces.push((factors, sign * i128::from(a) * i128::from(b)));
            }
        }
        Some(pieces)
    }

    /// The index of this value, if it fits.
    fn narrow(value: i128) -> Index {
        i64::try_from(value).map_or(Index::INVALID, Index::constant)
    }

    /// The smaller of two indices by value. `Ord::min` on owned indices means this too.
    pub fn min(&self, other: &Index) -> Index {
        Index::extreme(true, [self.clone(), other.clone()])
    }

    /// The larger of two indices by value. `Ord::max` on owned indices means this too.
    pub fn max(&self, other: &Index) -> Index {
        Index::extreme(false, [self.clone(), other.clone()])
    }

    /// The minimum or the maximum of at least one index.
    fn extreme(least: bool, list: impl IntoIterator<Item = Index>) -> Index {
        let mut flat = Vec::new();
        for index in list {
            match index.as_atom() {
                Some(Atom::Min(inner)) if least => flat.extend(inner.iter().cloned()),
                Some(Atom::Max(inner)) if !least => flat.extend(inner.iter().cloned()),
                _ => flat.push(index),
            }
        }
        // Of indices that differ by a constant only one matters: sorting puts it first among them.
        flat.sort_by(|a, b| {
            let offsets = a.offset().cmp(&b.offset());
            a.terms().cmp(b.terms()).then(if least { offsets } else { offsets.reverse() })
        });
        if flat.len() > MAX_TERMS || flat.iter().any(Index::is_invalid) {
            return Index::INVALID;
        }
        flat.dedup_by(|b, a| a.terms() == b.terms());
        match &flat[..] {
            [one] => one.clone(),
            _ if least => {
                // People write the constant bound of a minimum last.
                let constants = flat.iter().filter(|index| index.as_const().is_some()).count();
                flat.rotate_left(constants);
                Atom::Min(flat.into()).index()
            }
            _ => Atom::Max(flat.into()).index(),
        }
    }

    /// The entry of the table at a position, such as the size of the shard that a rank holds. Only that
    /// entry needs to have a value.
    pub fn pick(at: &Index, table: &[Index]) -> Index {
        let Some(first) = table.first() else { return Index::INVALID };
        if at.is_invalid() || table.iter().any(Index::is_invalid) {
            return Index::INVALID;
        }
        if let Some(at) = at.as_const() {
            return usize::try_from(at).ok().and_then(|at| table.get(at)).cloned().unwrap_or(Index::INVALID);
        }
        if table.iter().all(|entry| entry == first) {
            return first.clone();
        }
        Atom::Pick(at.clone(), table.into()).index()
    }

    /// The product of some indices.
    pub fn product<'a>(factors: impl IntoIterator<Item = &'a Index>) -> Index {
        factors.into_iter().fold(Index::constant(1), |all, factor| all.times(factor))
    }

    /// The sum of some indices.
    pub fn sum<'a>(terms: impl IntoIterator<Item = &'a Index>) -> Index {
        terms.into_iter().fold(Index::constant(0), |all, term| all.plus(1, term))
    }

    fn atoms(&self) -> impl Iterator<Item = &Atom> {
        self.terms().iter().flat_map(|term| &term.factors)
    }

    /// Calls `f` with every symbol, those inside atoms included, as often as it occurs.
    pub fn symbols(&self, f: &mut dyn FnMut(Sym)) {
        for atom in self.atoms() {
            match atom {
                Atom::Sym(sym) => f(*sym),
                _ => atom.children().for_each(|child| child.symbols(f)),
            }
        }
    }

    /// Whether an atom occurs, also inside other atoms.
    fn mentions(&self, atom: &Atom) -> bool {
        self.atoms().any(|inner| inner == atom || inner.children().any(|child| child.mentions(atom)))
    }

    /// The value under the values that `env` gives to symbols.
    pub fn eval(&self, env: &dyn Fn(Sym) -> Option<i64>) -> Result<i64, IndexError> {
        i64::try_from(self.eval_wide(env)?).map_err(|_| IndexError::Overflow)
    }

    /// The value in 128 bits: as part of a larger expression it may exceed 64 bits.
    fn eval_wide(&self, env: &dyn Fn(Sym) -> Option<i64>) -> Result<i128, IndexError> {
        if self.is_invalid() {
            return Err(IndexError::Overflow);
        }
        let mut sum = i128::from(self.offset());
        for term in self.terms() {
            let mut product = i128::from(term.coefficient);
            for atom in &term.factors {
                product = product.checked_mul(atom.eval(env)?).ok_or(IndexError::Overflow)?;
            }
            sum = sum.checked_add(product).ok_or(IndexError::Overflow)?;
        }
        Ok(sum)
    }

    /// The index with some of its symbols replaced.
    #[must_use]
    pub fn substitute(&self, f: &dyn Fn(Sym) -> Option<Index>) -> Index {
        self.rewrite(&|atom| match atom {
            Atom::Sym(sym) => f(*sym),
            _ => None,
        })
    }

    /// The index with some of its atoms replaced, the inner ones first. What replaces an atom is not
    /// rewritten again.
    fn rewrite(&self, f: &dyn Fn(&Atom) -> Option<Index>) -> Index {
        self.rewritten(f).unwrap_or_else(|| self.clone())
    }

    /// As `rewrite`; `None` if nothing changes, so that unchanged parts stay shared.
    fn rewritten(&self, f: &dyn Fn(&Atom) -> Option<Index>) -> Option<Index> {
        let changes: Vec<_> = self.atoms().map(|atom| atom.rewritten(f)).collect();
        if changes.iter().all(Option::is_none) {
            return None;
        }
        let mut changes = changes.into_iter();
        let mut sum = Index::constant(self.offset());
        for term in self.terms() {
            let mut product = Index::constant(term.coefficient);
            for (atom, change) in term.factors.iter().zip(changes.by_ref()) {
                product = product.times(&change.unwrap_or_else(|| atom.index()));
            }
            sum = sum.plus(1, &product);
        }
        Some(sum)
    }
}

impl Atom {
    fn eval(&self, env: &dyn Fn(Sym) -> Option<i64>) -> Result<i128, IndexError> {
        let values = |list: &[Index]| list.iter().map(|x| x.eval_wide(env)).collect::<Result<Vec<_>, _>>();
        match self {
            Atom::Sym(sym) => env(*sym).map(i128::from).ok_or(IndexError::Unbound(*sym)),
            Atom::Div(a, b) | Atom::Mod(a, b) => {
                let (a, b) = (a.eval_wide(env)?, b.eval_wide(env)?);
                match (a.checked_div_euclid(b), self) {
                    (_, _) if b == 0 => Err(IndexError::DivisionByZero),
                    (None, _) => Err(IndexError::Overflow),
                    (_, Atom::Div(..)) => Ok(floor_div(a, b)),
                    _ if b < 0 && a.rem_euclid(b) != 0 => Ok(a.rem_euclid(b) + b),
                    _ => Ok(a.rem_euclid(b)),
                }
            }
            Atom::Min(list) => values(list)?.into_iter().min().ok_or(IndexError::OutOfTable),
            Atom::Max(list) => values(list)?.into_iter().max().ok_or(IndexError::OutOfTable),
            Atom::Pick(at, table) => {
                let at = usize::try_from(at.eval_wide(env)?).map_err(|_| IndexError::OutOfTable)?;
                table.get(at).ok_or(IndexError::OutOfTable)?.eval_wide(env)
            }
        }
    }

    /// The atom as an index after rewriting; `None` if it does not change.
    fn rewritten(&self, f: &dyn Fn(&Atom) -> Option<Index>) -> Option<Index> {
        let children: Vec<_> = self.children().map(|child| child.rewritten(f)).collect();
        if children.iter().all(Option::is_none) {
            return f(self);
        }
        let pairs = self.children().zip(children);
        let new: Vec<Index> = pairs.map(|(old, new)| new.unwrap_or_else(|| old.clone())).collect();
        let rebuilt = match (self, &new[..]) {
            (Atom::Div(..), [a, b]) => a.div(b),
            (Atom::Mod(..), [a, b]) => a.rem(b),
            (Atom::Pick(..), [at, table @ ..]) => Index::pick(at, table),
            _ => Index::extreme(matches!(self, Atom::Min(_)), new),
        };
        // A remaining symbol has already been replaced.
        let atom = rebuilt.as_atom().filter(|atom| !matches!(atom, Atom::Sym(_)));
        Some(atom.and_then(f).unwrap_or(rebuilt))
    }
}

/// A fixed order of expressions, for sorted collections; it is not the order of their values.
impl Ord for Index {
    fn cmp(&self, other: &Index) -> Ordering {
        self.0.cmp(&other.0)
    }

    // A call on owned indices finds these methods before the inherent ones, and the order of expressions is
    // never what such a call means.
    fn min(self, other: Index) -> Index {
        Index::min(&self, &other)
    }

    fn max(self, other: Index) -> Index {
        Index::max(&self, &other)
    }
}

impl PartialOrd for Index {
    fn partial_cmp(&self, other: &Index) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl From<i64> for Index {
    fn from(value: i64) -> Index {
        Index::constant(value)
    }
}

impl From<i32> for Index {
    fn from(value: i32) -> Index {
        Index::constant(i64::from(value))
    }
}

impl From<usize> for Index {
    fn from(value: usize) -> Index {
        Index::narrow(value as i128)
    }
}

impl From<&Index> for Index {
    fn from(index: &Index) -> Index {
        index.clone()
    }
}

impl From<Sym> for Index {
    fn from(sym: Sym) -> Index {
        Index::sym(sym)
    }
}

macro_rules! operators {
    ($($left:ty, $right:ty);*) => {$(
        impl Add<$right> for $left {
            type Output = Index;
            fn add(self, other: $right) -> Index {
                self.plus(1, &Index::from(other))
            }
        }

        impl Sub<$right> for $left {
            type Output = Index;
            fn sub(self, other: $right) -> Index {
                self.plus(-1, &Index::from(other))
            }
        }

        impl Mul<$right> for $left {
            type Output = Index;
            fn mul(self, other: $right) -> Index {
                self.times(&Index::from(other))
            }
        }
    )*};
}

operators!(Index, Index; Index, &Index; &Index, Index; &Index, &Index; Index, i64; &Index, i64);

impl Neg for &Index {
    type Output = Index;
    fn neg(self) -> Index {
        Index::constant(0).plus(-1, self)
    }
}

impl Neg for Index {
    type Output = Index;
    fn neg(self) -> Index {
        -&self
    }
}
