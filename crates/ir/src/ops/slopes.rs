//! Derivatives of elementwise ops that need more than a line.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::ops::{Eq, Erf, Exp, Gt, Log, Pow, Sigmoid, Term};

/// The share of the cotangent that goes to `x` where it is the larger: half of it where both are equal.
pub(super) fn chosen<'c, 'm>(x: Term<'c, 'm>, y: Term<'c, 'm>, g: Term<'c, 'm>) -> Term<'c, 'm> {
    let tied = x.compare(Eq {}, y).select(g * 0.5, g.fill(0.0));
    x.compare(Gt {}, y).select(g, tied)
}

/// y x^(y - 1), and 0 where y is 0, whatever x is.
pub(super) fn base_slope<'c, 'm>(x: Term<'c, 'm>, y: Term<'c, 'm>, g: Term<'c, 'm>) -> Term<'c, 'm> {
    let slope = g * y * x.compare(Pow {}, y - 1.0);
    y.compare(Eq {}, y.fill(0.0)).select(g.fill(0.0), slope)
}

/// x^y log x, and 0 where that power is 0: at x = 0 the logarithm is infinite.
pub(super) fn exponent_slope<'c, 'm>(x: Term<'c, 'm>, z: Term<'c, 'm>, g: Term<'c, 'm>) -> Term<'c, 'm> {
    z.compare(Eq {}, z.fill(0.0)).select(g.fill(0.0), g * z * x.then(Log {}))
}

/// The distribution function of the normal distribution, and x times its density.
pub(super) fn gelu_slope<'c, 'm>(x: Term<'c, 'm>) -> Term<'c, 'm> {
    let below = ((x * FRAC_1_SQRT_2).then(Erf {}) + 1.0) * 0.5;
    let density = (x * x * -0.5).then(Exp {}) * (1.0 / (2.0 * PI).sqrt());
    below + x * density
}

/// s (1 + x (1 - s)), with s = sigmoid(x).
pub(super) fn silu_slope<'c, 'm>(x: Term<'c, 'm>) -> Term<'c, 'm> {
    let s = x.then(Sigmoid {});
    s * (x * (1.0 - s) + 1.0)
}
