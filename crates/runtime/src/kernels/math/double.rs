//! Functions of `f64`, without branches, so that loops over them become vector instructions.
//!
//! The errors in the docs are the largest that the tests measured against the standard library, rounded up.

/// Adding it rounds to an integer, which the low bits of the sum then hold.
const TO_INTEGER: f64 = 6_755_399_441_055_744.0;

const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// `x` clamped to `low..=high`; NaN stays NaN.
#[inline(always)]
fn clamp(x: f64, low: f64, high: f64) -> f64 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// 2 to the power of a number that was rounded by adding `TO_INTEGER`.
#[inline(always)]
fn power_of_two(sum: f64) -> f64 {
    f64::from_bits(sum.to_bits().wrapping_sub(TO_INTEGER.to_bits()).wrapping_add(1023) << 52)
}

/// 2 to the power of an integer as two factors, because the power itself may overflow or underflow an `f64`.
#[inline(always)]
fn factors(n: f64) -> (f64, f64) {
    let half = n.mul_add(0.5, TO_INTEGER);
    (power_of_two(half), power_of_two(n - (half - TO_INTEGER) + TO_INTEGER))
}

/// exp(r) - 1 for |r| up to log(2) / 2.
#[inline(always)]
fn near_zero(r: f64) -> f64 {
    let p = 2.091_475_532_589_320_2e-9f64
        .mul_add(r, 2.510_531_272_962_210_2e-8)
        .mul_add(r, 2.755_727_347_871_858e-7)
        .mul_add(r, 2.755_725_517_000_088_7e-6)
        .mul_add(r, 2.480_158_732_567_746_2e-5)
        .mul_add(r, 1.984_126_987_500_227_9e-4)
        .mul_add(r, 1.388_888_888_888_371_1e-3)
        .mul_add(r, 8.333_333_333_326_083e-3)
        .mul_add(r, 4.166_666_666_666_667e-2)
        .mul_add(r, 0.166_666_666_666_666_7)
        .mul_add(r, 0.5);
    p.mul_add(r * r, r)
}

/// x as n log(2) + r.
#[inline(always)]
fn reduce(x: f64) -> (f64, f64) {
    let n = x.mul_add(std::f64::consts::LOG2_E, TO_INTEGER) - TO_INTEGER;
    (n, n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x)))
}

/// e to the power of x, within 1 ulp.
#[inline(always)]
pub(crate) fn exp(x: f64) -> f64 {
    let (n, r) = reduce(clamp(x, -760.0, 720.0));
    let (a, b) = factors(n);
    (1.0 + near_zero(r)) * a * b
}

/// 2 to the power of x, within 1 ulp.
#[inline(always)]
pub(crate) fn exp2(x: f64) -> f64 {
    let x = clamp(x, -1100.0, 1030.0);
    let n = (x + TO_INTEGER) - TO_INTEGER;
    let (a, b) = factors(n);
    (1.0 + near_zero((x - n) * std::f64::consts::LN_2)) * a * b
}

/// exp(x) - 1, within 2 ulp.
#[inline(always)]
pub(crate) fn expm1(x: f64) -> f64 {
    let (n, r) = reduce(clamp(x, -60.0, 720.0));
    let (a, b) = factors(n);
    // (2^n - 1) is exact, or so large that the 1 is lost in rounding; halving it avoids overflow.
    let value = near_zero(r).mul_add(a, a - 1.0 / b) * b;
    // Rounding to an integer would lose the sign of a zero.
    if x == 0.0 { x } else { value }
}

/// The logarithm of `x + low`, with `low` below the last bit of x, as k and log(m), where x is 2^k m.
#[inline(always)]
fn split_log(x: f64, low: f64) -> (f64, f64) {
    const ONE: u64 = 1f64.to_bits();
    let tiny = x < f64::MIN_POSITIVE;
    let bits = (if tiny { x * 18_014_398_509_481_984.0 } else { x }).to_bits();
    // The exponent as a float: added as low bits to 2^52.
    let k = f64::from_bits((bits >> 52) | 0x4330_0000_0000_0000) - (4_503_599_627_370_496.0 + 1023.0);
    let k = if tiny { k - 54.0 } else { k };
    let m = f64::from_bits(bits & 0x000f_ffff_ffff_ffff | ONE);
    let high = m > std::f64::consts::SQRT_2;
    let (k, m) = (if high { k + 1.0 } else { k }, if high { 0.5 * m } else { m });
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let r = 0.147_981_986_051_165_86f64
        .mul_add(z, 0.153_138_376_992_093_73)
        .mul_add(z, 0.181_835_721_616_180_5)
        .mul_add(z, 0.222_221_984_321_497_84)
        .mul_add(z, 0.285_714_287_436_623_9)
        .mul_add(z, 0.399_999_999_994_094_2)
        .mul_add(z, 0.666_666_666_666_673_5)
        * z;
    let half = 0.5 * f * f;
    (k, s.mul_add(half + r, low / x) - half + f)
}

/// The value of a logarithm at 0, for negative numbers and at infinity.
#[inline(always)]
fn at_edges(x: f64, value: f64) -> f64 {
    let value = if x < f64::INFINITY { value } else { x };
    let value = if x == 0.0 { f64::NEG_INFINITY } else { value };
    if x < 0.0 { f64::NAN } else { value }
}

/// The natural logarithm, within 2 ulp.
#[inline(always)]
pub(crate) fn log(x: f64) -> f64 {
    let (k, log) = split_log(x, 0.0);
    at_edges(x, k.mul_add(LN2_HIGH, k.mul_add(LN2_LOW, log)))
}

/// The logarithm to the base 2, within 2 ulp.
#[inline(always)]
pub(crate) fn log2(x: f64) -> f64 {
    let (k, log) = split_log(x, 0.0);
    at_edges(x, log.mul_add(std::f64::consts::LOG2_E, k))
}

/// log(1 + x), within 2 ulp.
#[inline(always)]
pub(crate) fn log1p(x: f64) -> f64 {
    let sum = 1.0 + x;
    // The rounding error of the sum, all of which concerns the smaller summand.
    let low = if x > 1.0 { 1.0 - (sum - x) } else { x - (sum - 1.0) };
    let (k, log) = split_log(sum, low);
    let value = at_edges(sum, k.mul_add(LN2_HIGH, k.mul_add(LN2_LOW, log)));
    // So near 0, log(1 + x) is x.
    if x.abs() < 1e-17 { x } else { value }
}

/// The hyperbolic tangent, within 5 ulp.
#[inline(always)]
pub(crate) fn tanh(x: f64) -> f64 {
    let size = x.abs();
    let power = expm1(2.0 * if size > 30.0 { 30.0 } else { size });
    (power / (power + 2.0)).copysign(x)
}

/// 1 / (1 + exp(-x)), within 4 ulp.
#[inline(always)]
pub(crate) fn sigmoid(x: f64) -> f64 {
    // Below 0 the fraction is expanded by exp(x): exp(-x) would overflow before the result is 0.
    let power = exp(-x.abs());
    (if x < 0.0 { power } else { 1.0 }) / (1.0 + power)
}

/// x / (1 + exp(-x)), within 6 ulp.
#[inline(always)]
pub(crate) fn silu(x: f64) -> f64 {
    // Below -800 all results are -0; -inf itself would give NaN.
    let x = if x < -800.0 { -800.0 } else { x };
    // As `sigmoid`, with the root of the power: only the last product may be subnormal.
    let root = exp(-0.5 * x.abs());
    let factor = if x < 0.0 { root } else { 1.0 };
    x * factor * (factor / (1.0 + root * root))
}

/// x (1 + erf(x / sqrt 2)) / 2, within 6 ulp above -37.5, where results become subnormal.
pub(crate) fn gelu(x: f64) -> f64 {
    /// 1 / sqrt(2), less the constant of the standard library.
    const REST: f64 = -4.833_646_656_726_456_8e-17;
    // Below -40 all results are -0; -inf itself would give NaN.
    let y = -(if x < -40.0 { -40.0 } else { x });
    let t = y * std::f64::consts::FRAC_1_SQRT_2;
    // The slope of log(erfc(t)) is about -2 t: far out it makes thousands of ulps of the one that rounding t costs.
    let rest = y.mul_add(std::f64::consts::FRAC_1_SQRT_2, -t) + y * REST;
    let steep = if t > 0.0 { 2.0 * t * rest } else { 0.0 };
    -0.5 * y * (libm::erfc(t) * (1.0 - steep))
}
