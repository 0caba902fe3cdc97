//! Functions of one element, as the definitions of elementwise ops say them: slow, plain, and written apart from the
//! kernels, which are tested against them.
//!
//! Nothing here is called by a kernel. A function that both take from the standard library (`exp`, `powf`, `sin` ..)
//! has known answers in `filetests/elementwise`, from arithmetic with 300 bits.

use std::f64::consts::{FRAC_1_SQRT_2, SQRT_2};

/// The larger of two, as IEEE 754 `maximum`.
pub(super) fn maximum(x: f64, y: f64) -> f64 {
    match x.partial_cmp(&y) {
        None => f64::NAN,
        Some(std::cmp::Ordering::Less) => y,
        Some(std::cmp::Ordering::Equal) if x.is_sign_negative() => y,
        Some(_) => x,
    }
}

/// The smaller of two, as IEEE 754 `minimum`.
pub(super) fn minimum(x: f64, y: f64) -> f64 {
    -maximum(-x, -y)
}

/// An integer power; it wraps in 64 bits, and so in any narrower type.
pub(super) fn power(base: i64, exponent: i64) -> i64 {
    match (base, exponent) {
        (_, 0) => 1,
        (1, ..0) => 1,
        (-1, ..0) => 1 - 2 * (exponent & 1),
        (_, ..0) => 0,
        (_, 1..) if exponent % 2 == 0 => {
            let half = power(base, exponent / 2);
            half.wrapping_mul(half)
        }
        (_, 1..) => power(base, exponent - 1).wrapping_mul(base),
    }
}

pub(super) fn sign(x: f64) -> f64 {
    if x == 0.0 || x.is_nan() { x } else { x.signum() }
}

/// 1 / (1 + exp(-x)); below 0 the fraction is expanded by exp(x), because exp(-x) overflows before the result is 0.
pub(super) fn sigmoid(x: f64) -> f64 {
    if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) }
}

pub(super) fn silu(x: f64) -> f64 {
    // Below -700 exp(x) is subnormal and has few bits, so x is multiplied before it is that small.
    let half = (0.5 * x).exp();
    match x {
        f64::NEG_INFINITY => -0.0,
        ..0.0 => x * half * (half / (1.0 + x.exp())),
        _ => x * sigmoid(x),
    }
}

/// The error function is the probability that a normal number is within sqrt(2) x of 0.
pub(super) fn erf(x: f64) -> f64 {
    let t = x.abs() * SQRT_2;
    (if t < 1.0 { 2.0 * normal_between(t) } else { 1.0 - 2.0 * normal_above(t) }).copysign(x)
}

/// x times the probability that a normal number is below x.
pub(super) fn gelu(x: f64) -> f64 {
    match x {
        // The product would be infinity times 0; the limit is -0.
        f64::NEG_INFINITY => -0.0,
        ..0.0 => x * normal_above(-x),
        _ => x * (1.0 - normal_above(x)),
    }
}

/// The probability that a normal number is between 0 and t, which is below 1.
fn normal_between(t: f64) -> f64 {
    // The integral of the density by parts, again and again: t (1 + t^2 / 3 (1 + t^2 / 5 (1 + ..))).
    let series = (1..=30).rev().fold(1.0, |rest, level| 1.0 + rest * t * t / f64::from(2 * level + 1));
    t * series * normal_density(t)
}

/// The probability that a normal number is above t, which is not negative.
fn normal_above(t: f64) -> f64 {
    if t < 1.0 {
        return 0.5 - normal_between(t);
    }
    // Laplace's continued fraction t + 1 / (t + 2 / (t + 3 / ..)): 400 levels give all bits from 1 on.
    let fraction = (1..=400).rev().fold(t, |below, level| t + f64::from(level) / below);
    normal_density(t) / fraction
}

/// exp(-t^2 / 2) / sqrt(2 pi).
fn normal_density(t: f64) -> f64 {
    // Beyond, it is less than the smallest f64, and the square of t may overflow.
    if t > 40.0 {
        return 0.0;
    }
    // What rounding takes from the square would be multiplied by the exponential's slope, here up to 800 times.
    let square = t * t;
    let rest = t.mul_add(t, -square);
    (-0.5 * square).exp() * (1.0 - 0.5 * rest) * (FRAC_1_SQRT_2 * std::f64::consts::FRAC_2_SQRT_PI * 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_repeated_products() {
        for base in [-7, -2, -1, 0, 1, 2, 3, 10, i64::MAX, i64::MIN] {
            let mut product = 1i64;
            for exponent in 0..200 {
                assert_eq!(power(base, exponent), product, "{base} to the {exponent}");
                product = product.wrapping_mul(base);
            }
        }
        // Odd numbers form a group of 2^63 elements under multiplication modulo 2^64.
        assert_eq!((power(3, i64::MAX).wrapping_mul(3), power(2, i64::MAX)), (1, 0));
        assert_eq!([-1, -2, i64::MIN].map(|exponent| power(-1, exponent)), [-1, 1, 1]);
        assert_eq!([0, 1, 2].map(|base| power(base, -5)), [0, 1, 0]);
    }

    /// Values of a function from arithmetic with 400 bits, and how many units in the last place it may be off.
    fn check(f: fn(f64) -> f64, known: &[(f64, f64)], ulps: f64) {
        for (x, expected) in known {
            let (got, unit) = (f(*x), expected.abs().next_up() - expected.abs());
            assert!((got - expected).abs() <= ulps * unit, "{x}: {got:e}, expected {expected:e}");
        }
    }

    #[test]
    fn the_error_function_and_gelu_have_the_known_values() {
        check(
            erf,
            &[
                (1e-3, 1.128_378_790_969_236_4e-3),
                (-0.3, -0.328_626_759_459_127_4),
                (0.9, 0.796_908_212_422_832),
                (2.0, 0.995_322_265_018_952_7),
                (5.0, 0.999_999_999_998_462_5),
            ],
            5.0,
        );
        check(
            gelu,
            &[
                (-30.0, -1.472_014_178_144_456e-196),
                (-8.0, -4.976_768_459_417_427e-15),
                (-2.0, -0.045_500_263_896_358_42),
                (-0.3, -0.114_626_573_343_314_2),
                (0.7, 0.530_625_443_443_848_8),
                (3.0, 2.995_950_305_905_11),
            ],
            5.0,
        );
        assert_eq!([f64::INFINITY, f64::NEG_INFINITY, 1e300].map(erf), [1.0, -1.0, 1.0]);
        assert!(erf(f64::NAN).is_nan() && gelu(f64::NAN).is_nan() && erf(-0.0).is_sign_negative());
        assert_eq!([f64::INFINITY, 1e300, -1e300].map(gelu), [f64::INFINITY, 1e300, -0.0]);
    }
}
