//! Normal random numbers from words, vectorised, bit-identical to `consort_ir::random::normal`.
//!
//! The definition uses `log` and `cos` of `libm`. This file does the same operations in the same order, with selects
//! instead of branches, so that the compiler can vectorise them. Angles so close to a multiple of a right angle that
//! `libm` reduces them with more digits are left to the definition.

#![allow(clippy::excessive_precision, reason = "the digits are those of the definition")]

use consort_ir::random::normal;

use crate::kernels::random::{LANES, Words};

/// The elements of these words.
#[inline(always)]
pub(crate) fn normals(words: &Words) -> [f64; LANES] {
    let (mut out, mut close) = ([0.0; LANES], [false; LANES]);
    let [w0, w1, w2, w3] = words;
    for i in 0..LANES {
        let (u, v) = (fraction(w0[i], w1[i]), fraction(w2[i], w3[i]));
        let (cosine, near) = cos(std::f64::consts::TAU * v);
        out[i] = (-2.0 * log(1.0 - u)).sqrt() * cosine;
        close[i] = near;
    }
    if close.contains(&true) {
        for i in (0..LANES).filter(|i| close[*i]) {
            out[i] = normal([w0[i], w1[i], w2[i], w3[i]]);
        }
    }
    out
}

#[inline(always)]
fn fraction(first: u32, second: u32) -> f64 {
    let bits = (u64::from(first) << 32 | u64::from(second)) >> 11;
    bits as i64 as f64 * (1.0 / (1u64 << 53) as f64)
}

/// The logarithm of a number above 2^-54 and not above 1.
#[inline(always)]
fn log(x: f64) -> f64 {
    // Reduces x to a number between sqrt(1/2) and sqrt(2), and a power of two.
    let bits = x.to_bits().wrapping_add((0x3ff0_0000 - 0x3fe6_a09e) << 32);
    let power = f64::from((bits >> 52) as i32 - 0x3ff);
    let x = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) + (0x3fe6_a09e << 32));
    let f = x - 1.0;
    let half_square = 0.5 * f * f;
    let s = f / (2.0 + f);
    let z = s * s;
    let w = z * z;
    let even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    let odd = z
        * (6.666666666666735130e-01
            + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    let rest = odd + even;
    s * (half_square + rest) + power * 1.90821492927058770002e-10 - half_square
        + f
        + power * 6.93147180369123816490e-01
}

/// The cosine of an angle within one turn, and whether it is too close to a multiple of a right angle.
#[inline(always)]
fn cos(x: f64) -> (f64, bool) {
    let high = (x.to_bits() >> 32) as u32;
    let quarters = u32::from(high > 0x3fe9_21fb)
        + u32::from(high > 0x4002_d97c)
        + u32::from(high > 0x400f_6a7a)
        + u32::from(high > 0x4015_fdbc);
    let n = f64::from(quarters as i32);
    // A right angle as a sum of two parts, the first with 33 bits.
    let z = x - n * 1.57079632673412561417e+00;
    let tail = n * 6.07710050650619224932e-11;
    let y0 = z - tail;
    let y1 = (z - y0) - tail;
    let close = quarters != 0 && y0.abs() < x * (1.0 / 32768.0);
    let (sine, cosine) = (kernel_sin(y0, y1), kernel_cos(y0, y1));
    let value = if quarters & 1 == 1 { sine } else { cosine };
    (if quarters == 1 || quarters == 2 { -value } else { value }, close)
}

#[inline(always)]
fn kernel_cos(x: f64, y: f64) -> f64 {
    let z = x * x;
    let w = z * z;
    let r = z * (C[0] + z * (C[1] + z * C[2])) + w * w * (C[3] + z * (C[4] + z * C[5]));
    let half = 0.5 * z;
    let w = 1.0 - half;
    w + (((1.0 - w) - half) + (z * r - x * y))
}

#[inline(always)]
fn kernel_sin(x: f64, y: f64) -> f64 {
    let z = x * x;
    let w = z * z;
    let r = S[1] + z * (S[2] + z * S[3]) + z * w * (S[4] + z * S[5]);
    let v = z * x;
    x - ((z * (0.5 * y - v * r) - y) - v * S[0])
}

const C: [f64; 6] = [
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
];

const S: [f64; 6] = [
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
];

#[cfg(test)]
mod tests {
    use super::*;
    use consort_ir::random::element_words;

    #[test]
    fn every_number_has_the_bits_of_the_definition() {
        // The ends of both fractions, angles around multiples of an eighth of a turn, and many others.
        let ends = [0, 1, 0x7ff, 0x800, 0x8000_0000, u32::MAX - 0x7ff, u32::MAX];
        let mut list: Vec<[u32; 4]> = Vec::new();
        for eighth in 0..8u32 {
            for off in -70i32..70 {
                let v = (eighth << 29).wrapping_add_signed(off);
                list.extend(ends.map(|end| [end, v, v, end]));
                list.extend(ends.map(|end| [v, end, v.wrapping_add_signed(off << 12), end]));
            }
        }
        list.extend((0..200_000).map(|i| element_words(11, i)));
        list.resize(list.len().next_multiple_of(LANES), [0; 4]);
        for chunk in list.chunks_exact(LANES) {
            let mut words: Words = [[0; LANES]; 4];
            for (i, element) in chunk.iter().enumerate() {
                (0..4).for_each(|k| words[k][i] = element[k]);
            }
            for (got, element) in normals(&words).iter().zip(chunk) {
                assert_eq!(got.to_bits(), normal(*element).to_bits(), "{element:x?}");
            }
        }
    }
}
