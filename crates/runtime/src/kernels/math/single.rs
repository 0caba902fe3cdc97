//! Functions of `f32`, without branches, so that loops over them become vector instructions.
//!
//! The errors in the docs are the largest that the tests measured against `f64`, rounded up. Functions that need
//! more than 24 bits on the way are computed in `f64`.

use super::double;

/// Adding it rounds to an integer, which the low bits of the sum then hold.
const TO_INTEGER: f32 = 12_582_912.0;

/// 2 to the power of -126 to 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `x` clamped to `low..=high`; NaN stays NaN.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// A number times a power of two between -252 and 254, which need not be representable as one `f32`. The first product
/// stays in range, so that only the last one rounds.
#[inline(always)]
fn scale(x: f32, exponent: i32) -> f32 {
    let half = exponent >> 1;
    x * power_of_two(half) * power_of_two(exponent.wrapping_sub(half))
}

/// e to the power of x, within 1.1 ulp.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Beyond these the result is 0 or infinite.
    let x = clamp(x, -110.0, 90.0);
    let sum = x.mul_add(std::f32::consts::LOG2_E, TO_INTEGER);
    let exponent = (sum.to_bits() as i32).wrapping_sub(TO_INTEGER.to_bits() as i32);
    let n = sum - TO_INTEGER;
    let r = n.mul_add(-1.428_606_8e-6, n.mul_add(-0.693_145_75, x));
    let p = 0.001_392_625_1f32
        .mul_add(r, 0.008_363_233)
        .mul_add(r, 0.041_666_555)
        .mul_add(r, 0.166_665_77)
        .mul_add(r, 0.5);
    scale(1.0 + p.mul_add(r * r, r), exponent)
}

/// e to the power of x for x <= 0, within 5 ulp, and within 3 for x above -20: less than the effect of rounding a
/// difference x. A subnormal result may be flushed to 0.
#[inline(always)]
pub(crate) fn exp_below_one(x: f32) -> f32 {
    // With the exponent's bias added, the low bits of the sum are the exponent field of 2^n, 0 for the lowest x.
    const TO_EXPONENT: f32 = TO_INTEGER + 127.0;
    let x = if x < -88.0 { -88.0 } else { x };
    let sum = x.mul_add(std::f32::consts::LOG2_E, TO_EXPONENT);
    let r = (sum - TO_EXPONENT).mul_add(-std::f32::consts::LN_2, x);
    let p = 0.008_289_36f32
        .mul_add(r, 0.041_898_176)
        .mul_add(r, 0.166_676_52)
        .mul_add(r, 0.499_991_48)
        .mul_add(r, 0.999_999_7)
        .mul_add(r, 1.0);
    p * f32::from_bits(sum.to_bits() << 23)
}

/// 2 to the power of x, within 1 ulp.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    let x = clamp(x, -160.0, 130.0);
    let sum = x + TO_INTEGER;
    let exponent = (sum.to_bits() as i32).wrapping_sub(TO_INTEGER.to_bits() as i32);
    let r = x - (sum - TO_INTEGER);
    let p = 0.000_154_532_63f32
        .mul_add(r, 0.001_339_097_9)
        .mul_add(r, 0.009_618_083)
        .mul_add(r, 0.055_503_57)
        .mul_add(r, 0.240_226_5)
        .mul_add(r, 0.693_147_2);
    scale(p.mul_add(r, 1.0), exponent)
}

/// The natural logarithm, within 1 ulp.
#[inline(always)]
pub(crate) fn log(x: f32) -> f32 {
    // The bits of sqrt(1/2): significands are centred around 1.
    const ROOT: i32 = 0x3f35_04f3;
    let tiny = x < f32::MIN_POSITIVE;
    let bits = (if tiny { x * 33_554_432.0 } else { x }).to_bits() as i32;
    let above = bits.wrapping_sub(ROOT);
    let k = ((above >> 23) - if tiny { 25 } else { 0 }) as f32;
    let f = f32::from_bits((above & 0x7f_ffff).wrapping_add(ROOT) as u32) - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let r = 0.242_790_79f32.mul_add(z, 0.284_987_87).mul_add(z, 0.400_009_72).mul_add(z, 0.666_666_6) * z;
    let half = 0.5 * f * f;
    let value = k.mul_add(0.693_138_1, (s.mul_add(half + r, k * 9.058_000_6e-6) - half) + f);
    let value = if x < f32::INFINITY { value } else { x };
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    if x < 0.0 { f32::NAN } else { value }
}

/// The logarithm to the base 2, within 1 ulp.
#[inline(always)]
pub(crate) fn log2(x: f32) -> f32 {
    double::log2(f64::from(x)) as f32
}

/// log(1 + x), within 1 ulp.
#[inline(always)]
pub(crate) fn log1p(x: f32) -> f32 {
    double::log1p(f64::from(x)) as f32
}

/// exp(x) - 1, within 1 ulp.
#[inline(always)]
pub(crate) fn expm1(x: f32) -> f32 {
    double::expm1(f64::from(x)) as f32
}

/// The hyperbolic tangent, within 1.1 ulp.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let (size, z) = (x.abs(), x * x);
    let p = 0.002_038_915_6f32
        .mul_add(z, -0.008_089_21)
        .mul_add(z, 0.021_679_992)
        .mul_add(z, -0.053_946_7)
        .mul_add(z, 0.133_332_42)
        .mul_add(z, -0.333_333_33);
    let near = (p * z).mul_add(size, size);
    let far = 1.0 - 2.0 / (exp(2.0 * size) + 1.0);
    (if size < 0.7 { near } else { far }).copysign(x)
}

/// The error function, within 1 ulp.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let (t, s) = (x.abs(), x * x);
    let r = 1.729_489_3e-5f32.mul_add(t, -3.832_086_8e-4);
    let u = 3.883_934_4e-3f32.mul_add(t, -2.425_456e-2);
    let r = r.mul_add(s, u).mul_add(t, 0.106_777_85).mul_add(t, 0.634_846_7).mul_add(t, 0.128_717_51);
    let far = 1.0 - exp(-r.mul_add(t, t));
    let p = (-5.967_617e-4f32)
        .mul_add(s, 4.991_194_2e-3)
        .mul_add(s, -2.676_813_5e-2)
        .mul_add(s, 0.112_819_925)
        .mul_add(s, -0.376_125_34)
        .mul_add(s, 0.128_379_17);
    let near = p.mul_add(x, x);
    if t > 0.921_875 { far.copysign(x) } else { near }
}

/// 1 / (1 + exp(-x)), within 1 ulp.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + short_exp(-f64::from(x)))) as f32
}

/// x / (1 + exp(-x)), within 1 ulp.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    // Below -200 all results are -0; -inf itself would give NaN.
    let x = f64::from(if x < -200.0 { -200.0 } else { x });
    (x / (1.0 + short_exp(-x))) as f32
}

/// x (1 + erf(x / sqrt 2)) / 2, within 1 ulp.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    // Below -15 all results are -0, and above 15 all are x.
    let y = x.abs();
    let y = f64::from(if y > 15.0 { 15.0 } else { y });
    // The factor that turns the exponential into the tail of the normal distribution.
    let u = 3.0 / (3.0 + y);
    let w = 2.0f64.mul_add(u, -1.0);
    let p = 1.846_219_178_943_430_4e-5f64
        .mul_add(w, -4.439_102_798_619_918_6e-5)
        .mul_add(w, -8.153_539_749_772_010_8e-5)
        .mul_add(w, 3.447_596_196_344_550_4e-4)
        .mul_add(w, 3.413_789_590_747_034_9e-4)
        .mul_add(w, -2.323_278_634_035_604_4e-3)
        .mul_add(w, -3.487_430_617_350_164_5e-3)
        .mul_add(w, 1.575_424_956_519_428_6e-2)
        .mul_add(w, 7.667_255_912_802_315e-2)
        .mul_add(w, 0.169_777_329_799_585_87)
        .mul_add(w, 0.243_027_896_900_278_05);
    let tail = short_exp(-0.5 * y * y) * u * p;
    let below = (-y * tail) as f32;
    if x < 0.0 { below } else { (f64::from(x) * (1.0 - tail)) as f32 }
}

/// e to the power of x with a third more bits than `f32`; x is clamped to -700..=700.
#[inline(always)]
fn short_exp(x: f64) -> f64 {
    const TO_INTEGER: f64 = 6_755_399_441_055_744.0;
    let x = if x < -700.0 { -700.0 } else { x };
    let x = if x > 700.0 { 700.0 } else { x };
    let sum = x.mul_add(std::f64::consts::LOG2_E, TO_INTEGER);
    let r = (sum - TO_INTEGER).mul_add(-std::f64::consts::LN_2, x);
    let p = 1.989_108_046_399_884_2e-4f64
        .mul_add(r, 1.393_373_071_579_208_2e-3)
        .mul_add(r, 8.333_310_844_647_863e-3)
        .mul_add(r, 4.166_646_419_740_569e-2)
        .mul_add(r, 0.166_666_666_817_042_15)
        .mul_add(r, 0.500_000_001_353_873);
    let power = f64::from_bits(sum.to_bits().wrapping_sub(TO_INTEGER.to_bits()).wrapping_add(1023) << 52);
    p.mul_add(r * r, r).mul_add(power, power)
}

/// Larger angles would lose their last bits here and use the standard library.
pub(crate) const MAX_ANGLE: f32 = 1e9;

/// The sine and cosine of the angle reduced to the nearest quarter turn, and the number of that quarter turn.
#[inline(always)]
fn quarter(x: f32) -> (f64, f64, i64) {
    const TO_INTEGER: f64 = 6_755_399_441_055_744.0;
    let x = f64::from(x);
    let sum = x.mul_add(std::f64::consts::FRAC_2_PI, TO_INTEGER);
    let n = sum - TO_INTEGER;
    let r = n.mul_add(-6.123_233_995_736_766e-17, n.mul_add(-std::f64::consts::FRAC_PI_2, x));
    let z = r * r;
    let p = 2.718_311_493_989_821_9e-6f64
        .mul_add(z, -1.983_933_483_609_663_2e-4)
        .mul_add(z, 8.333_329_385_889_463e-3)
        .mul_add(z, -0.166_666_666_416_265_24);
    let sine = (p * z).mul_add(r, r);
    let p = 2.439_044_879_627_741e-5f64
        .mul_add(z, -1.388_676_377_460_993e-3)
        .mul_add(z, 4.166_662_332_373_906e-2)
        .mul_add(z, -0.499_999_997_251_031);
    (sine, p.mul_add(z, 1.0), sum.to_bits() as i64)
}

/// The sine of an angle up to `MAX_ANGLE`, within 1 ulp.
#[inline(always)]
pub(crate) fn sin(x: f32) -> f32 {
    let (sine, cosine, n) = quarter(x);
    let value = (if n & 1 == 0 { sine } else { cosine }) as f32;
    // A zero keeps its sign.
    let value = if x == 0.0 { x } else { value };
    if n & 2 == 0 { value } else { -value }
}

/// The cosine of an angle up to `MAX_ANGLE`, within 1 ulp.
#[inline(always)]
pub(crate) fn cos(x: f32) -> f32 {
    let (sine, cosine, n) = quarter(x);
    let value = (if n & 1 == 0 { cosine } else { sine }) as f32;
    if n.wrapping_add(1) & 2 == 0 { value } else { -value }
}
