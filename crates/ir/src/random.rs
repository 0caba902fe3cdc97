//! Random numbers as a pure function of a key and a position: the bit-exact meaning of the ops `uniform` and `normal`.
//!
//! Element number `n` of a stream with key `k` has the four words `element_words(k, n)` and no others, so any
//! rank can make any part of a stream, in any order, and all parts fit together. The bits are the definition, so a
//! kernel may share these functions: their tests compare them with published answers, not with a kernel.

use consort_types::Dtype;

/// The generator Philox4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as
/// 1, 2, 3): a bijection of counters for each key.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let (a, b) = (u64::from(c0) * 0xd251_1f53, u64::from(c2) * 0xcd9e_8d57);
        (c0, c1, c2, c3) = (high(b) ^ c1 ^ k0, low(b), high(a) ^ c3 ^ k1, low(a));
        (k0, k1) = (k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85));
    }
    [c0, c1, c2, c3]
}

fn low(x: u64) -> u32 {
    x as u32
}

fn high(x: u64) -> u32 {
    (x >> 32) as u32
}

/// The words of one element: the key is Philox's key and the element's number the lower half of its counter,
/// each with its lower word first. The upper half is 0.
pub fn element_words(key: u64, number: u64) -> [u32; 4] {
    philox([low(number), high(number), 0, 0], [low(key), high(key)])
}

/// The number of the element at `start + at` in a whole of sizes `of`, row-major and modulo 2^64.
pub fn element_number(start: &[u64], at: &[u64], of: &[u64]) -> u64 {
    let places = start.iter().zip(at).map(|(start, at)| start.wrapping_add(*at));
    places.zip(of).fold(0, |number, (place, size)| number.wrapping_mul(*size).wrapping_add(place))
}

/// A fraction in [0, 1) of 53 bits, those of `first` above those of `second`.
fn fraction(first: u32, second: u32) -> f64 {
    let bits = (u64::from(first) << 32 | u64::from(second)) >> 11;
    bits as f64 * (1.0 / (1u64 << 53) as f64)
}

/// An element of `uniform`: in [0, 1), always a value of the element type. For `f64` these are the upper 53 bits of
/// the words 0 and 1, word 0 above, and for `f32` the upper 24 bits of word 0. For `f16` and `bf16` it is
/// the element for `f32` rounded towards zero, which clears the lower 13 or 16 bits of it: rounding to
/// nearest would reach 1.
pub fn uniform(dtype: Dtype, words: [u32; 4]) -> f64 {
    let single = (words[0] >> 8) as f32 * (1.0 / (1u32 << 24) as f32);
    let cleared = |bits: u32| f64::from(f32::from_bits(single.to_bits() >> bits << bits));
    match dtype {
        Dtype::F32 => f64::from(single),
        Dtype::F16 => cleared(13),
        Dtype::Bf16 => cleared(16),
        _ => fraction(words[0], words[1]),
    }
}

/// An element of `normal` before it is rounded to its type: sqrt(-2 log(1 - u)) cos(2 pi v), with u of 53 bits
/// from the words 0 and 1 as `uniform` has it, and v from the words 2 and 3 alike (Box and Muller). Its absolute
/// value is below 8.6.
pub fn normal(words: [u32; 4]) -> f64 {
    let (u, v) = (fraction(words[0], words[1]), fraction(words[2], words[3]));
    // `libm` implements these functions in software, so the numbers are the same on every machine.
    (-2.0 * libm::log(1.0 - u)).sqrt() * libm::cos(std::f64::consts::TAU * v)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_answers() {
        // From `kat_vectors` of the authors' library Random123.
        let known = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in known {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn words_of_an_element_are_those_of_its_counter() {
        assert_eq!(element_words(0, 0), philox([0; 4], [0; 2]));
        assert_eq!(element_words(u64::MAX - 1, 5 << 32 | 7), philox([7, 5, 0, 0], [u32::MAX - 1, u32::MAX]));
    }

    #[test]
    fn parts_of_a_whole_have_the_numbers_of_the_whole() {
        assert_eq!(element_number(&[], &[], &[]), 0);
        assert_eq!(element_number(&[2, 1], &[1, 3], &[10, 7]), 25);
    }

    #[test]
    fn uniform_stays_below_one_and_in_its_type() {
        for words in [[0; 4], [u32::MAX; 4], [0x0000_0100; 4], [0x00ff_ffff; 4], [0x8765_4321; 4]] {
            for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16] {
                let x = uniform(dtype, words);
                assert!((0.0..1.0).contains(&x), "{dtype}: {x}");
                assert_eq!(dtype.round(x), x, "{dtype}");
            }
        }
        assert_eq!(uniform(Dtype::F32, [u32::MAX; 4]), 1.0 - 2f64.powi(-24));
        assert_eq!(uniform(Dtype::F16, [u32::MAX; 4]), 1.0 - 2f64.powi(-11));
        assert_eq!(uniform(Dtype::Bf16, [u32::MAX; 4]), 1.0 - 2f64.powi(-8));
        assert_eq!(uniform(Dtype::F64, [u32::MAX; 4]), 1.0 - 2f64.powi(-53));
        assert_eq!(uniform(Dtype::F16, [0x0000_0100; 4]), 2f64.powi(-24));
    }

    #[test]
    fn normal_is_finite_at_both_ends() {
        assert_eq!(normal([0; 4]), 0.0);
        assert!((normal([u32::MAX, u32::MAX, 0, 0]) - 8.571_674).abs() < 1e-5);
        assert!((normal([0x8000_0000, 0, 0x8000_0000, 0]) + (2.0 * 2f64.ln()).sqrt()).abs() < 1e-15);
        // The f64 nearest to a right angle is 6.123233995736766e-17 less than one.
        let near = (2.0 * 2f64.ln()).sqrt() * 6.123_233_995_736_766e-17;
        assert!((normal([0x8000_0000, 0, 0x4000_0000, 0]) - near).abs() < 1e-31);
        assert!((normal([0x8000_0000, 0, 0xc000_0000, 0]) + 3.0 * near).abs() < 1e-31);
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let n = 100_000;
        let words = |i| element_words(42, i);
        let moment = |f: &dyn Fn([u32; 4]) -> f64| (0..n).map(|i| f(words(i))).sum::<f64>() / n as f64;
        assert!((moment(&|w| uniform(Dtype::F32, w)) - 0.5).abs() < 0.005);
        assert!((moment(&|w| uniform(Dtype::F64, w).powi(2)) - 1.0 / 3.0).abs() < 0.005);
        assert!(moment(&normal).abs() < 0.015);
        assert!((moment(&|w| normal(w).powi(2)) - 1.0).abs() < 0.02);
        assert!((moment(&|w| normal(w).powi(4)) - 3.0).abs() < 0.15);
    }
}
