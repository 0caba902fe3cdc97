//! Ranges of bytes, and whether they overlap.

use std::ops::Range;

/// Whether two ranges overlap. An empty range overlaps one that it lies inside.
#[inline(always)]
pub fn overlaps<T: PartialOrd>(a: &Range<T>, b: &Range<T>) -> bool {
    a.start < b.end && b.start < a.end
}

#[cfg(test)]
mod tests {
    use super::overlaps;

    #[test]
    fn neighbours_do_not_overlap() {
        for (a, b, expected) in [
            (0..4, 4..8, false),
            (0..5, 4..8, true),
            (0..9, 3..4, true),
            (0..4, 6..8, false),
            (2..2, 2..2, false),
            (0..4, 2..2, true),
            (0..4, 4..4, false),
        ] {
            assert_eq!((overlaps(&a, &b), overlaps(&b, &a)), (expected, expected), "{a:?} {b:?}");
        }
    }
}
