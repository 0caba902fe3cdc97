//! Kernels of uniform and normal: vectorised, bit-identical to the definitions in `consort_ir::random`.
//!
//! The bits themselves are the definition, so the number of an element (`element_number`), and `normal` near right
//! angles, are those of `consort_ir::random`; its tests have the known answers for both.

use bytemuck::Pod;
use consort_ir::index::Index;
use consort_ir::literal::unravel;
use consort_ir::ops::{Normal, OpDef, Uniform};
use consort_ir::random::element_number;
use consort_types::Dtype;
use half::f16;

use crate::kernels::gaussian::normals;
use crate::kernels::isa::{Loop, vectorize};
use crate::kernels::operand::{attributes, view};
use crate::kernels::{Arg, Kernel, KernelCx, KernelError, ViewMut};

pub(crate) static KERNELS: &[Kernel] = &[
    Kernel { op: "uniform", family: "random", in_place: false, strided: true, run: uniform },
    Kernel { op: "normal", family: "random", in_place: false, strided: true, run: normal },
];

/// Elements computed at once.
pub(crate) const LANES: usize = 16;

/// Elements per thread task.
const PART: usize = 1 << 16;

/// The four words of each element.
pub(crate) type Words = [[u32; LANES]; 4];

/// The words of elements with consecutive numbers. The reference is `consort_ir::random::element_words`.
#[inline(always)]
fn words(key: u64, number: u64) -> Words {
    let (mut c0, mut c1) = ([0u32; LANES], [0u32; LANES]);
    for i in 0..LANES {
        let number = number.wrapping_add(i as u64);
        (c0[i], c1[i]) = (number as u32, (number >> 32) as u32);
    }
    let (mut c2, mut c3) = ([0u32; LANES], [0u32; LANES]);
    let (mut k0, mut k1) = (key as u32, (key >> 32) as u32);
    for _ in 0..10 {
        for i in 0..LANES {
            let (a, b) = (u64::from(c0[i]) * 0xd251_1f53, u64::from(c2[i]) * 0xcd9e_8d57);
            c0[i] = (b >> 32) as u32 ^ c1[i] ^ k0;
            c1[i] = b as u32;
            c2[i] = (a >> 32) as u32 ^ c3[i] ^ k1;
            c3[i] = a as u32;
        }
        (k0, k1) = (k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85));
    }
    [c0, c1, c2, c3]
}

/// An element type, computed from random words.
trait Element: Sync {
    type Bits: Pod + Send + Sync;
    /// Writes at most `LANES` elements.
    fn write(words: &Words, out: &mut [Self::Bits]);
}

struct Uniform32;
struct Uniform64;
struct Uniform16;
struct UniformB16;
struct Normal32;
struct Normal64;
struct Normal16;
struct NormalB16;

#[inline(always)]
fn single(word: u32) -> f32 {
    // The bits fit an i32, and converting a vector of those is one instruction.
    (word >> 8) as i32 as f32 * (1.0 / (1u32 << 24) as f32)
}

/// `x` if it is an `f32`, else its neighbour whose last bit is 1 (round to odd): rounding that to a narrower type gives
/// the same as rounding `x` directly.
#[inline(always)]
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    let (bits, wide) = (near.to_bits(), f64::from(near));
    let odd = if wide.abs() > x.abs() { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
    f32::from_bits(if wide == x || bits & 1 == 1 { bits } else { odd })
}

/// The nearest `bf16` of a finite number, as bits.
#[inline(always)]
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

macro_rules! elements {
    ($($name:ident: $bits:ty, $words:ident, $i:ident, $values:expr => $element:expr;)*) => {$(
        impl Element for $name {
            type Bits = $bits;
            #[inline(always)]
            fn write(words: &Words, out: &mut [$bits]) {
                let $words = $values(words);
                for ($i, out) in out.iter_mut().enumerate() {
                    *out = $element;
                }
            }
        }
    )*};
}

#[inline(always)]
fn same(words: &Words) -> &Words {
    words
}

elements! {
    Uniform32: f32, words, i, same => single(words[0][i]);
    Uniform64: f64, words, i, same => {
        let bits = (u64::from(words[0][i]) << 32 | u64::from(words[1][i])) >> 11;
        bits as i64 as f64 * (1.0 / (1u64 << 53) as f64)
    };
    Uniform16: u16, words, i, same => f16::from_f32(f32::from_bits(single(words[0][i]).to_bits() >> 13 << 13)).to_bits();
    UniformB16: u16, words, i, same => (single(words[0][i]).to_bits() >> 16) as u16;
    Normal32: f32, values, i, normals => values[i] as f32;
    Normal64: f64, values, i, normals => values[i];
    Normal16: u16, values, i, normals => f16::from_f32(to_odd(values[i])).to_bits();
    NormalB16: u16, values, i, normals => to_bf16(to_odd(values[i]));
}

/// A line of elements with consecutive numbers.
struct Line<'a, E: Element> {
    key: u64,
    number: u64,
    out: &'a mut [E::Bits],
}

impl<E: Element> Loop for Line<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let mut number = self.number;
        let mut blocks = self.out.chunks_exact_mut(LANES);
        for out in &mut blocks {
            E::write(&words(self.key, number), out);
            number = number.wrapping_add(LANES as u64);
        }
        let rest = blocks.into_remainder();
        if !rest.is_empty() {
            E::write(&words(self.key, number), rest);
        }
    }
}

fn uniform(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let op = attributes::<Uniform>(op)?;
    let (of, start) = (&op.of, &op.start);
    match op.dtype {
        Dtype::F32 => make::<Uniform32>(cx, of, start, args, out),
        Dtype::F16 => make::<Uniform16>(cx, of, start, args, out),
        Dtype::Bf16 => make::<UniformB16>(cx, of, start, args, out),
        _ => make::<Uniform64>(cx, of, start, args, out),
    }
}

fn normal(
    cx: &KernelCx<'_>,
    op: &dyn OpDef,
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let op = attributes::<Normal>(op)?;
    let (of, start) = (&op.of, &op.start);
    match op.dtype {
        Dtype::F32 => make::<Normal32>(cx, of, start, args, out),
        Dtype::F16 => make::<Normal16>(cx, of, start, args, out),
        Dtype::Bf16 => make::<NormalB16>(cx, of, start, args, out),
        _ => make::<Normal64>(cx, of, start, args, out),
    }
}

fn make<E: Element>(
    cx: &KernelCx<'_>,
    of: &[Index],
    start: &[Index],
    args: &[Arg<'_>],
    out: &mut [ViewMut<'_>],
) -> Result<(), KernelError> {
    let key = view(args, 0)?.elements::<i64>()?[0] as u64;
    let sizes = |list: &[Index]| -> Result<Vec<u64>, KernelError> {
        list.iter().map(|size| Ok(cx.sizes.size(size)? as u64)).collect()
    };
    let (of, start, shape) = (sizes(of)?, sizes(start)?, out[0].shape);
    for (i, size) in shape.iter().enumerate() {
        if start[i].saturating_add(*size as u64) > of[i] {
            let (start, of) = (start[i], of[i]);
            return Err(KernelError::new(format!(
                "dimension {i}: {size} places from {start} do not lie inside {of}"
            )));
        }
    }
    // Trailing dimensions that are complete have consecutive numbers across lines: they form one line.
    let mut inner = shape.len().saturating_sub(1);
    while inner > 0 && shape[inner] as u64 == of[inner] {
        inner -= 1;
    }
    let length: usize = shape[inner..].iter().product();
    let outer = &shape[..inner];
    let elements = out[0].elements::<E::Bits>()?;
    if elements.is_empty() {
        return Ok(());
    }
    let number = |line: usize| {
        let mut at: Vec<u64> = unravel(line, outer).iter().map(|at| *at as u64).collect();
        at.resize(shape.len(), 0);
        element_number(&start, &at, &of)
    };
    let mut parts = Vec::new();
    for (i, line) in elements.chunks_mut(length).enumerate() {
        let first = number(i);
        let numbered = line.chunks_mut(PART).enumerate();
        parts.extend(numbered.map(|(k, part)| (first.wrapping_add((k * PART) as u64), part)));
    }
    cx.threads.for_each(parts, |(number, out)| vectorize(Line::<E> { key, number, out }));
    Ok(())
}
