//! Reductions over slices of bytes, by which each member combines the operands of all.

use std::ops::{BitAnd, BitOr, BitXor};

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use consort_types::{Dtype, Reduce};
use half::{bf16, f16};

/// One member's operand: this member's own, which lies where the result goes, or another's.
#[derive(Clone, Copy)]
pub(crate) enum Part<'a> {
    /// The contents of `out`.
    Own,
    /// A peer's bytes.
    Peer(&'a [u8]),
}

/// Elements that are folded at once.
const BLOCK: usize = 512;
/// Up to this many elements use smaller blocks.
const FEW: usize = 16;

/// Folds the parts, in order, into `out`. All have the length of `out`, a multiple of the element's size, and lie
/// aligned to it; there is at least one part, and at most one is `Own`.
pub(crate) fn reduce(out: &mut [u8], parts: &[Part<'_>], dtype: Dtype, reduce: Reduce) {
    match dtype {
        Dtype::F32 => floats::<f32, f32>(out, parts, reduce, |x| x, |x| x, |x| x as f32),
        Dtype::F64 => floats::<f64, f64>(out, parts, reduce, |x| x, |x| x, |x| x),
        Dtype::F16 => floats::<f16, f32>(out, parts, reduce, f16::to_f32, f16::from_f32, |x| x as f32),
        Dtype::Bf16 => floats::<bf16, f32>(out, parts, reduce, bf16::to_f32, bf16::from_f32, |x| x as f32),
        Dtype::I32 => ints::<i32>(out, parts, reduce),
        Dtype::I64 => ints::<i64>(out, parts, reduce),
        Dtype::U8 => ints::<u8>(out, parts, reduce),
        // Truth values are 0 and 1, for which the operations on bytes are the logical ones, but for the sum.
        Dtype::Bool => ints::<u8>(out, parts, if reduce == Reduce::Sum { Reduce::Or } else { reduce }),
    }
}

/// Operations of float accumulators.
trait Float:
    Copy
    + Default
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
{
    fn is_negative(self) -> bool;
}

impl Float for f32 {
    fn is_negative(self) -> bool {
        self.is_sign_negative()
    }
}

impl Float for f64 {
    fn is_negative(self) -> bool {
        self.is_sign_negative()
    }
}

/// The larger, as IEEE 754 `maximum`: a NaN if there is one, and 0 before -0.
fn maximum<A: Float>(a: A, b: A) -> A {
    #[allow(clippy::eq_op, reason = "a number that differs from itself is a NaN")]
    if a > b || a != a || a == b && b.is_negative() { a } else { b }
}

/// The smaller, as IEEE 754 `minimum`.
fn minimum<A: Float>(a: A, b: A) -> A {
    #[allow(clippy::eq_op, reason = "a number that differs from itself is a NaN")]
    if a < b || a != a || a == b && a.is_negative() { a } else { b }
}

fn floats<T: Pod, A: Float>(
    out: &mut [u8],
    parts: &[Part<'_>],
    reduce: Reduce,
    load: impl Fn(T) -> A + Copy,
    store: impl Fn(A) -> T + Copy,
    constant: impl Fn(f64) -> A,
) {
    let n = constant(parts.len() as f64);
    match reduce {
        Reduce::Avg => fold::<T, A>(out, parts, load, |a, b| a + b, |a| store(a / n)),
        Reduce::Product => fold::<T, A>(out, parts, load, |a, b| a * b, store),
        Reduce::Min => fold::<T, A>(out, parts, load, minimum, store),
        Reduce::Max => fold::<T, A>(out, parts, load, maximum, store),
        Reduce::PremulSum(factor) => {
            let factor = constant(factor);
            fold::<T, A>(out, parts, |x| load(x) * factor, |a, b| a + b, store);
        }
        _ => fold::<T, A>(out, parts, load, |a, b| a + b, store),
    }
}

/// Operations of integers; arithmetic wraps.
trait Int: Pod + Default + Ord + BitAnd<Output = Self> + BitOr<Output = Self> + BitXor<Output = Self> {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
}

macro_rules! int {
    ($($type:ty),*) => {$(
        impl Int for $type {
            fn plus(self, other: $type) -> $type {
                self.wrapping_add(other)
            }
            fn times(self, other: $type) -> $type {
                self.wrapping_mul(other)
            }
        }
    )*};
}

int!(i32, i64, u8);

fn ints<T: Int>(out: &mut [u8], parts: &[Part<'_>], reduce: Reduce) {
    match reduce {
        Reduce::Product => fold::<T, T>(out, parts, |x| x, T::times, |x| x),
        Reduce::Min => fold::<T, T>(out, parts, |x| x, Ord::min, |x| x),
        Reduce::Max => fold::<T, T>(out, parts, |x| x, Ord::max, |x| x),
        Reduce::And => fold::<T, T>(out, parts, |x| x, |a, b| a & b, |x| x),
        Reduce::Or => fold::<T, T>(out, parts, |x| x, |a, b| a | b, |x| x),
        Reduce::Xor => fold::<T, T>(out, parts, |x| x, |a, b| a ^ b, |x| x),
        _ => fold::<T, T>(out, parts, |x| x, T::plus, |x| x),
    }
}

/// The first part is loaded, the others are folded in, the result is stored.
fn fold<T: Pod, A: Copy + Default>(
    out: &mut [u8],
    parts: &[Part<'_>],
    load: impl Fn(T) -> A + Copy,
    op: impl Fn(A, A) -> A + Copy,
    store: impl Fn(A) -> T + Copy,
) {
    let out: &mut [T] = cast_slice_mut(out);
    // Two parts are folded element by element, without accumulators.
    match parts {
        [Part::Own, Part::Peer(b)] => {
            out.iter_mut().zip(cast_slice(b)).for_each(|(out, b)| *out = store(op(load(*out), load(*b))));
        }
        [Part::Peer(a), Part::Own] => {
            out.iter_mut().zip(cast_slice(a)).for_each(|(out, a)| *out = store(op(load(*a), load(*out))));
        }
        [Part::Peer(a), Part::Peer(b)] => {
            let pairs = cast_slice(a).iter().zip(cast_slice(b));
            out.iter_mut().zip(pairs).for_each(|(out, (a, b))| *out = store(op(load(*a), load(*b))));
        }
        // Few elements need few accumulators, which are zeroed first.
        _ if out.len() <= FEW => fold_blocks::<T, A, FEW>(out, parts, load, op, store),
        _ => fold_blocks::<T, A, BLOCK>(out, parts, load, op, store),
    }
}

/// Folds many parts, block by block, so that every part is read once and the accumulators stay in the L1 cache.
fn fold_blocks<T: Pod, A: Copy + Default, const N: usize>(
    out: &mut [T],
    parts: &[Part<'_>],
    load: impl Fn(T) -> A + Copy,
    op: impl Fn(A, A) -> A + Copy,
    store: impl Fn(A) -> T + Copy,
) {
    let mut accumulators = [A::default(); N];
    for (number, block) in out.chunks_mut(N).enumerate() {
        let start = number * N;
        let accumulators = &mut accumulators[..block.len()];
        for (i, part) in parts.iter().enumerate() {
            let part: &[T] = match part {
                Part::Own => block,
                Part::Peer(bytes) => &cast_slice(bytes)[start..start + block.len()],
            };
            if i == 0 {
                accumulators.iter_mut().zip(part).for_each(|(a, x)| *a = load(*x));
            } else {
                accumulators.iter_mut().zip(part).for_each(|(a, x)| *a = op(*a, load(*x)));
            }
        }
        block.iter_mut().zip(accumulators).for_each(|(out, a)| *out = store(*a));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(parts: &[[f32; 2]], reduction: Reduce) -> [f32; 2] {
        let mut out = parts[0];
        let peers: Vec<Part<'_>> = parts.iter().map(|part| Part::Peer(cast_slice(part))).collect();
        reduce(cast_slice_mut(&mut out), &peers, Dtype::F32, reduction);
        out
    }

    #[test]
    fn extremes_keep_nan_and_order_zeros() {
        let max = folded(&[[f32::NAN, -0.0], [1.0, 0.0]], Reduce::Max);
        assert!(max[0].is_nan() && max[1].to_bits() == 0.0f32.to_bits());
        let min = folded(&[[1.0, 0.0], [f32::NAN, -0.0]], Reduce::Min);
        assert!(min[0].is_nan() && min[1].to_bits() == (-0.0f32).to_bits());
    }

    #[test]
    fn the_order_is_that_of_the_parts_wherever_the_own_one_lies() {
        // (1e8 + -1e8) + 1 is 1, (1e8 + 1) + -1e8 is 0.
        for own in 0..3 {
            let parts = [[1e8f32], [-1e8], [1.0]];
            let mut out = parts[own];
            let list: Vec<Part<'_>> = (0..3)
                .map(|i| if i == own { Part::Own } else { Part::Peer(cast_slice(&parts[i])) })
                .collect();
            reduce(cast_slice_mut(&mut out), &list, Dtype::F32, Reduce::Sum);
            assert_eq!(out, [1.0], "own {own}");
        }
    }

    #[test]
    fn sixteen_bit_floats_accumulate_in_f32() {
        let parts = [2048.0f32, 1.0, 1.0].map(|x| [f16::from_f32(x)]);
        let mut out = parts[0];
        let list: Vec<Part<'_>> = parts.iter().map(|part| Part::Peer(cast_slice(part))).collect();
        reduce(cast_slice_mut(&mut out), &list, Dtype::F16, Reduce::Sum);
        assert_eq!(out[0].to_f32(), 2050.0);
    }
}
