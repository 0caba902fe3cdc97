//! Sums as ops define them: of any length, rounded once.

/// A compensated sum in two f64: the rounded sum, and the accumulated rounding error.
#[derive(Clone, Copy)]
pub(super) struct Exact {
    rounded: f64,
    rest: f64,
}

impl Exact {
    pub(super) const ZERO: Self = Self { rounded: 0.0, rest: 0.0 };

    /// The empty sum, which preserves the sign of a zero added to it.
    pub(super) const NOTHING: Self = Self { rounded: -0.0, rest: 0.0 };

    pub(super) fn plus(self, x: f64) -> Self {
        let rounded = self.rounded + x;
        let added = rounded - self.rounded;
        let rest = (self.rounded - (rounded - added)) + (x - added);
        Self { rounded, rest: self.rest + rest }
    }

    pub(super) fn plus_product(self, a: f64, b: f64) -> Self {
        let product = a * b;
        let sum = self.plus(product);
        Self { rest: sum.rest + a.mul_add(b, -product), ..sum }
    }

    pub(super) fn value(self) -> f64 {
        // An infinity has no error term, and adding an error of zero would change the sign of a zero.
        if self.rest == 0.0 || !self.rounded.is_finite() { self.rounded } else { self.rounded + self.rest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(terms: &[f64]) -> f64 {
        terms.iter().fold(Exact::NOTHING, |sum, x| sum.plus(*x)).value()
    }

    #[test]
    fn what_cancels_leaves_what_was_small() {
        assert_eq!(sum(&[1e16, 1.0, -1e16]), 1.0);
        assert_eq!(sum(&[1.0; 10]), 10.0);
        // The f64 nearest to 0.1 is 5.6e-18 too large; a thousand times that is less than half an ulp of 100.
        assert_eq!(sum(&[0.1; 1000]), 100.0);
        let third = 1.0 / 3.0;
        let square = Exact::NOTHING.plus_product(third, third).plus(-(third * third));
        assert_eq!(square.value(), third.mul_add(third, -(third * third)));
    }

    #[test]
    fn infinities_and_the_signs_of_zeros_stay() {
        assert_eq!(sum(&[1.0, f64::INFINITY, 2.0]), f64::INFINITY);
        assert!(sum(&[f64::INFINITY, f64::NEG_INFINITY]).is_nan());
        assert!(sum(&[f64::NAN, 1.0]).is_nan());
        assert!(sum(&[-0.0, -0.0]).is_sign_negative());
        assert!(sum(&[-0.0, 0.0]).is_sign_positive());
        assert_eq!(sum(&[f64::MAX, f64::MAX]), f64::INFINITY);
    }
}
