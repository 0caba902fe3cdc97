//! Elements for the checks: operands that every member can make for every other, and reductions by plain loops.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use consort_types::{Dtype, Reduce, Rng};
use half::{bf16, f16};

/// Whether the sums and products of floats are exact in any order, for engines that do not fix it.
pub(crate) static IS_EXACT: AtomicBool = AtomicBool::new(false);

/// Bits that follow from a member, a place in its operand and a salt.
fn bits(member: usize, i: usize, salt: usize) -> u64 {
    Rng::new((member as u64) << 48 ^ (salt as u64) << 32 ^ i as u64).next_u64()
}

/// A number whose sums depend on their order: either sign, many magnitudes, all digits, now and then a zero.
fn number(bits: u64, magnitudes: i32) -> f64 {
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    if bits >> 1 & 31 == 0 {
        return sign * 0.0;
    }
    if IS_EXACT.load(Relaxed) {
        return sign * [0.5, 1.0, 2.0][(bits >> 6) as usize % 3];
    }
    let magnitude = (bits >> 6 & 0xff) as i32 % (2 * magnitudes + 1) - magnitudes;
    sign * (1.0 + (bits >> 14) as f64 / 2f64.powi(50)) * 2f64.powi(magnitude)
}

/// The operand of a member.
pub(crate) fn operand(dtype: Dtype, member: usize, count: usize, salt: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for i in 0..count {
        let bits = bits(member, i, salt);
        match dtype {
            Dtype::F32 => bytes.extend((number(bits, 12) as f32).to_le_bytes()),
            Dtype::F64 => bytes.extend(number(bits, 40).to_le_bytes()),
            Dtype::F16 => bytes.extend(f16::from_f64(number(bits, 12)).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(bf16::from_f64(number(bits, 12)).to_le_bytes()),
            Dtype::I32 => bytes.extend((bits as i32).to_le_bytes()),
            Dtype::I64 => bytes.extend(bits.to_le_bytes()),
            Dtype::U8 => bytes.push(bits as u8),
            Dtype::Bool => bytes.push(bits as u8 & 1),
        }
    }
    bytes
}

/// The operands of all members, reduced in their order.
pub(crate) fn reduced(dtype: Dtype, reduce: Reduce, operands: &[Vec<u8>]) -> Vec<u8> {
    let fold32 = |load: fn([u8; 2]) -> f32, store: fn(f32) -> [u8; 2]| {
        let (scale, op, end) = floats32(reduce, operands.len());
        fold(operands, |bytes| scale(load(bytes)), op, |x| store(end(x)))
    };
    match dtype {
        Dtype::F32 => {
            let (scale, op, end) = floats32(reduce, operands.len());
            fold(operands, |bytes| scale(f32::from_le_bytes(bytes)), op, |x| end(x).to_le_bytes())
        }
        Dtype::F64 => {
            let (scale, op, end) = floats64(reduce, operands.len());
            fold(operands, |bytes| scale(f64::from_le_bytes(bytes)), op, |x| end(x).to_le_bytes())
        }
        // The 16-bit floats are added up in 32 bits and rounded once.
        Dtype::F16 => fold32(|bytes| f16::from_le_bytes(bytes).to_f32(), |x| f16::from_f32(x).to_le_bytes()),
        Dtype::Bf16 => {
            fold32(|bytes| bf16::from_le_bytes(bytes).to_f32(), |x| bf16::from_f32(x).to_le_bytes())
        }
        // What wraps in 64 bits and is cut is what wraps in fewer.
        Dtype::I32 => {
            fold(operands, |b| i64::from(i32::from_le_bytes(b)), ints(reduce), |x| (x as i32).to_le_bytes())
        }
        Dtype::I64 => fold(operands, i64::from_le_bytes, ints(reduce), i64::to_le_bytes),
        Dtype::U8 => fold(operands, |[byte]: [u8; 1]| i64::from(byte), ints(reduce), |x| [x as u8]),
        // A sum or product of truth values is true if it is not zero.
        Dtype::Bool => {
            fold(operands, |[byte]: [u8; 1]| i64::from(byte), ints(reduce), |x| [u8::from(x != 0)])
        }
    }
}

/// The plain loop.
fn fold<const SIZE: usize, A>(
    operands: &[Vec<u8>],
    load: impl Fn([u8; SIZE]) -> A,
    op: impl Fn(A, A) -> A,
    store: impl Fn(A) -> [u8; SIZE],
) -> Vec<u8> {
    let mut result = Vec::with_capacity(operands[0].len());
    for at in (0..operands[0].len()).step_by(SIZE) {
        let mut dtype = load(operands[0][at..at + SIZE].try_into().unwrap());
        for operand in &operands[1..] {
            dtype = op(dtype, load(operand[at..at + SIZE].try_into().unwrap()));
        }
        result.extend(store(dtype));
    }
    result
}

/// What is done with each element, with two of them, and with the last; total order has -0 before 0.
macro_rules! floats {
    ($name:ident, $type:ty) => {
        #[allow(clippy::type_complexity, reason = "three functions, taken apart at once")]
        fn $name(
            reduce: Reduce,
            n: usize,
        ) -> (impl Fn($type) -> $type, fn($type, $type) -> $type, impl Fn($type) -> $type) {
            let op: fn($type, $type) -> $type = match reduce {
                Reduce::Product => |a, b| a * b,
                Reduce::Min => |a, b| if a.total_cmp(&b).is_le() { a } else { b },
                Reduce::Max => |a, b| if a.total_cmp(&b).is_ge() { a } else { b },
                _ => |a, b| a + b,
            };
            let scale = move |x: $type| if let Reduce::PremulSum(f) = reduce { x * f as $type } else { x };
            let end = move |x: $type| if reduce == Reduce::Avg { x / n as $type } else { x };
            (scale, op, end)
        }
    };
}

floats!(floats32, f32);
floats!(floats64, f64);

fn ints(reduce: Reduce) -> fn(i64, i64) -> i64 {
    match reduce {
        Reduce::Product => i64::wrapping_mul,
        Reduce::Min => Ord::min,
        Reduce::Max => Ord::max,
        Reduce::And => |a, b| a & b,
        Reduce::Or => |a, b| a | b,
        Reduce::Xor => |a, b| a ^ b,
        _ => i64::wrapping_add,
    }
}
