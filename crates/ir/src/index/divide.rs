//! Quotients and remainders in normal form.
//!
//! Terms that divide exactly are divided out, as polynomials; in the rest, coefficients are reduced by the divisor and
//! common factors cancelled. A division atom remains only if none of this applies.

use super::{Atom, Index, Term, gather, gcd};

/// How many rounds a polynomial division may take.
const MAX_ROUNDS: usize = 32;

/// The factors without those of the divisor; `None` if the divisor has a factor that they lack.
fn without(factors: &[Atom], divisor: &[Atom]) -> Option<Vec<Atom>> {
    let mut wanted = divisor.iter().peekable();
    let rest =
        factors.iter().filter(|factor| wanted.next_if(|want| want == factor).is_none()).cloned().collect();
    wanted.peek().is_none().then_some(rest)
}

impl Index {
    /// Quotient and remainder as polynomials: `self == quotient * by + remainder`, where no term of the
    /// remainder can be reduced further by the leading term of `by`, whose coefficient must be positive. The
    /// remainder depends only on the residue of `self`, which is what makes quotients normal forms. None
    /// where the division does not fit or does not end soon.
    pub(super) fn split(&self, by: &Index) -> Option<(Index, Index)> {
        let (head, lead) = by.pieces().next()?;
        let (mut quotient, mut rest) = (Index::constant(0), self.clone());
        for _ in 0..MAX_ROUNDS {
            let mut part = Vec::new();
            for (factors, c) in rest.pieces() {
                let times = c.div_euclid(lead);
                if let (true, Some(factors)) = (times != 0, without(factors, head)) {
                    part.push((factors, times.into()));
                }
            }
            if part.is_empty() {
                return Some((quotient, rest));
            }
            let part = gather(part);
            let mut pieces = part.products(-1, by)?;
            pieces.extend(rest.pieces().map(|(factors, c)| (factors.to_vec(), c.into())));
            rest = gather(pieces);
            quotient = quotient.plus(1, &part);
            if rest.is_invalid() || quotient.is_invalid() {
                return None;
            }
        }
        None
    }

    /// Divides by `by`: returns the quotient, a factor common to the remaining dividend and divisor, and both without
    /// it. A divisor of several terms is divided only if nothing remains, because a partial quotient is larger than
    /// what it replaces. The leading coefficient of `by` must be positive.
    fn divide_out(&self, by: &Index) -> (Index, Index, Index, Index) {
        let whole = |(_, left): &(Index, Index)| by.pieces().count() == 1 || left.as_const() == Some(0);
        let zero = Index::constant(0);
        let (quotient, left) = self.split(by).filter(whole).unwrap_or_else(|| (zero, self.clone()));
        let sides = || left.pieces().chain(by.pieces());
        let scale = sides().fold(0, |all, (_, c)| gcd(all, c.unsigned_abs()));
        let scale = i64::try_from(scale).map_or(1, |scale| scale.max(1));
        // Factors of all pieces are found one by one, so that powers come out whole.
        let mut common: Vec<Atom> = Vec::new();
        for factor in by.pieces().next().map_or(&[][..], |(factors, _)| factors) {
            common.push(factor.clone());
            if !sides().all(|(factors, _)| without(factors, &common).is_some()) {
                common.pop();
            }
        }
        let reduce = |side: &Index| {
            let reduced = |(factors, c)| Some((without(factors, &common)?, i128::from(c / scale)));
            gather(side.pieces().filter_map(reduced).collect())
        };
        let (left, by) = (reduce(&left), reduce(by));
        (quotient, gather(vec![(common, scale.into())]), left, by)
    }

    /// The quotient, rounded down.
    pub fn div(&self, by: &Index) -> Index {
        let Some((_, lead)) = by.pieces().next().filter(|_| !self.is_invalid()) else {
            return Index::INVALID;
        };
        if lead < 0 {
            return (-self).div(&-by);
        }
        let (whole, _, left, by) = self.divide_out(by);
        let rest = match (left.as_const(), by.as_const()) {
            (Some(0), _) => left,
            (_, Some(1)) => left,
            (Some(left), Some(by)) => Index::constant(left.div_euclid(by)),
            (_, Some(by)) => left.div_constant(by),
            _ => Atom::Div(left, by).index(),
        };
        whole.plus(1, &rest)
    }

    /// The quotient of a sum, reduced by `by` already, and a constant above one.
    fn div_constant(&self, by: i64) -> Index {
        // With `g` dividing `by` and all coefficients, `(g*x+k)/by` is `(x+k/g)/(by/g)`.
        let g = gcd(self.content(), by.unsigned_abs()) as i64;
        let (left, by) = (self.shrink(g), by / g);
        if by == 1 {
            return left;
        }
        // `(x/a+y)/b` is `(x+a*y)/(a*b)`. With several such quotients there would be a choice, so only a
        // single one is merged.
        let inner = |term: &Term| match (&term.factors[..], term.coefficient) {
            ([atom @ Atom::Div(x, a)], 1) => Some((atom.index(), x.clone(), i128::from(a.as_const()?))),
            _ => None,
        };
        let mut inners = left.terms().iter().filter_map(inner);
        if let (Some((quotient, x, a)), None) = (inners.next(), inners.next()) {
            let y = left.plus(-1, &quotient);
            let (above, below) = (x.plus(a, &y), Index::narrow(a * i128::from(by)));
            if !above.is_invalid() && !below.is_invalid() {
                return above.div(&below);
            }
        }
        Atom::Div(left, Index::constant(by)).index()
    }

    /// The remainder of the quotient rounded down; it has the sign of the divisor.
    pub fn rem(&self, by: &Index) -> Index {
        let Some((_, lead)) = by.pieces().next().filter(|_| !self.is_invalid()) else {
            return Index::INVALID;
        };
        if lead < 0 {
            return -(-self).rem(&-by);
        }
        let (_, common, left, by) = self.divide_out(by);
        let rest = match (left.as_const(), by.as_const()) {
            (Some(0), _) => left,
            (_, Some(1)) => Index::constant(0),
            (Some(left), Some(by)) => Index::constant(left.rem_euclid(by)),
            (_, Some(by)) => left.rem_constant(by),
            _ => Atom::Mod(left, by).index(),
        };
        common.times(&rest)
    }

    /// The remainder of a sum, reduced by `by` already, and a constant above one.
    fn rem_constant(&self, by: i64) -> Index {
        // `c*(x%a)` is congruent to `c*x` where `by` divides `c*a`.
        let mut flat = self.clone();
        for term in self.terms() {
            if let [atom @ Atom::Mod(x, a)] = &term.factors[..]
                && let Some(a) = a.as_const()
                && i128::from(term.coefficient) * i128::from(a) % i128::from(by) == 0
            {
                flat = flat.plus(term.coefficient.into(), &x.plus(-1, &atom.index()));
            }
        }
        if flat != *self && !flat.is_invalid() {
            return flat.rem(&Index::constant(by));
        }
        // With `g` dividing `by` and all coefficients, `(g*x+k)%by` is `g*((x+k/g)%(by/g))+k%g`.
        let g = gcd(self.content(), by.unsigned_abs()) as i64;
        let rest = match by / g {
            1 => Index::constant(0),
            by => Atom::Mod(self.shrink(g), Index::constant(by)).index(),
        };
        Index::constant(self.offset().rem_euclid(g)).plus(g.into(), &rest)
    }
}
