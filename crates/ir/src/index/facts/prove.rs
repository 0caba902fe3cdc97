//! A bounded search for a proof that an index is not negative.

use super::super::range::INFINITE;
use super::super::{Atom, Index, Term, gather};
use super::{Facts, MAX_STUDIED, fits};

/// How many steps one search for a proof may take, and how deep it may go.
const SEARCH_STEPS: u32 = 64;
const SEARCH_DEPTH: u32 = 4;

impl Facts {
    /// Whether an index is found not to be negative.
    pub(super) fn proves(&self, index: &Index) -> bool {
        self.search(index, SEARCH_DEPTH, &mut { SEARCH_STEPS })
    }

    fn search(&self, index: &Index, depth: u32, steps: &mut u32) -> bool {
        if index.is_invalid() {
            return false;
        }
        if self.range(index).low >= 0 {
            return true;
        }
        if depth == 0 || *steps == 0 || !fits(index, MAX_STUDIED) {
            return false;
        }
        *steps -= 1;
        let mut search = |index: &Index| self.search(index, depth - 1, steps);
        // A nonnegative index may be subtracted as often as one of its terms occurs.
        for positive in &self.positives {
            let times = positive.terms().iter().find_map(|term| {
                let same = index.terms().iter().find(|other| other.factors == term.factors)?;
                same.coefficient.checked_div(term.coefficient).filter(|times| *times > 0)
            });
            if let Some(times) = times
                && search(&index.plus(-i128::from(times), positive))
            {
                return true;
            }
        }
        for term in index.terms() {
            let [atom] = &term.factors[..] else {
                if self.bounded_factors(index, term).iter().any(&mut search) {
                    return true;
                }
                continue;
            };
            let times = i128::from(term.coefficient);
            let rest = index.plus(-times, &atom.index());
            let proved = match atom {
                // For positive `y`, `y*(x/y)` lies between `x-y+1` and `x`. As the index is an integer, it is
                // enough to show that `y` times it is above `-y`.
                Atom::Div(x, y) if self.range(y).low > 0 => {
                    let slack = y - 1;
                    let least = if times > 0 { x - &slack } else { x.clone() };
                    search(&(rest * y + slack).plus(times, &least))
                }
                // A maximum is at least any of its arguments, and equal to one of them.
                Atom::Max(list) if times > 0 => list.iter().any(|x| search(&rest.plus(times, x))),
                Atom::Min(list) if times < 0 => list.iter().any(|x| search(&rest.plus(times, x))),
                Atom::Max(list) | Atom::Min(list) => list.iter().all(|x| search(&rest.plus(times, x))),
                Atom::Pick(at, table) => match at.as_sym() {
                    Some(sym) => (0..table.len())
                        .all(|i| search(&index.substitute(&|s| (s == sym).then(|| Index::from(i))))),
                    None => table.iter().all(|x| search(&rest.plus(times, x))),
                },
                _ => false,
            };
            if proved {
                return true;
            }
        }
        false
    }

    /// The index with one factor of a product replaced by its bound, for each bounded factor: at most the index itself
    /// if the other factors are not negative.
    fn bounded_factors(&self, index: &Index, term: &Term) -> Vec<Index> {
        let whole = gather(vec![(term.factors.clone(), term.coefficient.into())]);
        let bounded = |at: usize| {
            let mut others = term.factors.clone();
            let range = self.range_of(&others.remove(at));
            let bound = if term.coefficient > 0 { range.low } else { range.high };
            let others = gather(vec![(others, 1)]);
            if bound.abs() == INFINITE || self.range(&others).low < 0 {
                return None;
            }
            let scale = i128::from(term.coefficient).checked_mul(bound)?;
            Some(index.plus(-1, &whole).plus(scale, &others))
        };
        (0..term.factors.len()).filter_map(bounded).collect()
    }
}
