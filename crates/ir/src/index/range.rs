//! Interval arithmetic over integers: the ranges that `facts` knows.

use super::floor_div;

/// A range of integers, both ends included. `-INFINITE` as the low end and `INFINITE` as the high end mean
/// that there is no bound; no other end is ever infinite, so ends that are too large only lose precision.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) low: i128,
    pub(super) high: i128,
}

pub(super) const INFINITE: i128 = 1 << 126;

impl Range {
    pub(super) const ALL: Range = Range { low: -INFINITE, high: INFINITE };

    pub(super) fn new(low: i128, high: i128) -> Range {
        Range { low: low.clamp(-INFINITE, INFINITE - 1), high: high.clamp(1 - INFINITE, INFINITE) }
    }

    /// The smallest range that contains all of these; all integers if there are none.
    pub(super) fn around(ranges: impl Iterator<Item = Range>) -> Range {
        let join = |a: Range, b: Range| Range { low: a.low.min(b.low), high: a.high.max(b.high) };
        ranges.reduce(join).unwrap_or(Range::ALL)
    }

    /// The range of a function that takes its extremes at the corners of two ranges.
    pub(super) fn corners(self, other: Range, f: impl Fn(i128, i128) -> i128) -> Range {
        let Range { low, high } = self;
        let ends = [(low, other.low), (low, other.high), (high, other.low), (high, other.high)];
        Range::around(ends.into_iter().map(|(a, b)| Range::new(f(a, b), f(a, b))))
    }

    pub(super) fn plus(self, other: Range) -> Range {
        let end = |a: i128, b: i128, none: i128| if a == none || b == none { none } else { a + b };
        Range::new(end(self.low, other.low, -INFINITE), end(self.high, other.high, INFINITE))
    }

    pub(super) fn times(self, other: Range) -> Range {
        self.corners(other, i128::saturating_mul)
    }

    /// The parts of the range below and above zero, if not empty.
    pub(super) fn signed(self) -> impl Iterator<Item = Range> {
        let parts = [Range { high: self.high.min(-1), ..self }, Range { low: self.low.max(1), ..self }];
        parts.into_iter().filter(|part| part.low <= part.high)
    }

    pub(super) fn div(self, by: Range) -> Range {
        let quotient = |a: i128, b: i128| match (a.abs() == INFINITE, b.abs() == INFINITE) {
            (true, false) => a * b.signum(),
            _ => floor_div(a, b),
        };
        Range::around(by.signed().map(|by| self.corners(by, quotient)))
    }

    pub(super) fn rem(self, by: Range) -> Range {
        let part = |by: Range| {
            let whole = self.div(by);
            if by.low == by.high && whole.low == whole.high {
                return self.plus(Range::new(-whole.low * by.low, -whole.low * by.low));
            }
            // The remainder lies between zero and the divisor, and between zero and a dividend of one sign.
            let one = |end: i128| if end.abs() == INFINITE { 0 } else { 1 };
            let (low, high) = (by.low + one(by.low), by.high - one(by.high));
            match (by.low > 0, self.low >= 0, self.high <= 0) {
                (true, true, _) => Range::new(0, high.min(self.high)),
                (true, ..) => Range::new(0, high),
                (false, _, true) => Range::new(low.max(self.low), 0),
                (false, ..) => Range::new(low, 0),
            }
        };
        Range::around(by.signed().map(part))
    }
}
