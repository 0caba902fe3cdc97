//! How far results may be from an op's definition, and from each other.
//!
//! An op states its tolerance in its definition ([`OpDef::tolerance`]), and `docs/ops.md` lists them in one table. All
//! that compares results asks here: tests of kernels, `consort exec`, demos, and the pass that computes constants.
//!
//! A definition computes in f64 and rounds once. A kernel that also rounds once, or only moves elements, gives the
//! same bits. One that approximates a function is held to a number of ulps, and one that sums many elements to an error
//! relative to their magnitude, because the order of additions is free.
//!
//! Compiled and eager code run the same kernels, on layouts that may differ, and many ranks add in another order than
//! one: then neither side is the definition, and [`of_runs`] says how far they may be apart.

use std::fmt;

use consort_types::Dtype;

use crate::literal::{Data, Literal};
use crate::ops::{EvalCx, OpDef};
use crate::program::{Block, Func};

/// How far a float result may be from the definition. Results of all other types are bit-identical.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// Bit-identical, except that any NaN equals any other.
    Bits,
    /// Units in the last place of the definition's result. 16-bit floats are computed in `f32`, so only a value close
    /// to a midpoint can round the other way, by one unit.
    Ulps {
        /// For `f32`. The definition's result is itself rounded, by half a unit.
        single: f64,
        /// For `f64`. The definition's result may itself be off by a few units.
        double: f64,
    },
    /// One unit in the last place, plus a number of accumulator roundings relative to a size.
    Near {
        /// The number of roundings.
        roundings: f64,
        /// What they are relative to.
        of: Size,
    },
}

/// What the roundings of a sum are relative to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// The same op on absolute values: what a sum would be if nothing cancelled.
    Absolutes,
    /// The same times the square root of the number of terms: they are added sequentially, and errors are as often up
    /// as down.
    AbsolutesByRootOfTerms,
    /// The element itself, and 1.
    ElementAndOne,
    /// The largest finite element of the result.
    LargestResult,
    /// The largest finite element of the last operand, of which every result is a weighted average, times the largest
    /// possible attention score: a rounding of a score is a rounding of a weight.
    LargestOfLastByScores {
        /// The factor of the scores.
        scale: f64,
    },
    /// Of the cotangents of attention: the largest finite elements of what is multiplied, times the sum of the weights
    /// that are added, times the largest possible score.
    AttentionCotangents {
        /// The factor of the scores.
        scale: f64,
    },
}

impl Tolerance {
    /// Of sums. A blocked sum of n elements is off by less than one rounding per block and per sequential addition
    /// within a block; a million equal elements need 38.
    pub const SUM: Tolerance = Tolerance::Near { roundings: 48.0, of: Size::Absolutes };

    /// Of products of matrices, which may add sequentially along the reduced dimension.
    pub const PRODUCT: Tolerance = Tolerance::Near { roundings: 2.0, of: Size::AbsolutesByRootOfTerms };

    /// Of sums of exponentials. exp(-t) is off by t roundings, so by less than half a rounding of 1; the sum
    /// accumulates them.
    pub const EXPONENTIALS: Tolerance = Tolerance::Near { roundings: 16.0, of: Size::ElementAndOne };

    /// Whether results of this type are bit-identical to the definition's.
    pub fn is_exact(self, dtype: Dtype) -> bool {
        self == Tolerance::Bits || !dtype.is_float()
    }
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tolerance::Bits => f.write_str("bit-identical"),
            Tolerance::Ulps { single, double } => {
                write!(f, "{single} ulp (f32), {double} ulp (f64), 1 ulp (f16, bf16)")
            }
            Tolerance::Near { roundings, of } => {
                let of = match of {
                    Size::Absolutes => "of the sum of absolute terms",
                    Size::AbsolutesByRootOfTerms => {
                        "of the sum of absolute terms, times the square root of their number"
                    }
                    Size::ElementAndOne => "of the element and of 1",
                    Size::LargestResult => "of the largest element of the result",
                    Size::LargestOfLastByScores { .. } => "of the largest value, times the largest score",
                    Size::AttentionCotangents { .. } => {
                        "of the largest factors, times the sum of the weights, times the largest score"
                    }
                };
                write!(f, "1 ulp and {roundings} roundings {of}")
            }
        }
    }
}

/// How far results of a whole program may be from the definition, relative to the larger of 1 and the element: 0 if
/// each of its ops is bit-identical, else some roundings of the least precise float type in it.
pub fn of_func(func: &Func) -> f64 {
    let (mut exact, mut unit) = (true, 0.0f64);
    let mut types = Vec::new();
    func.types.iter().for_each(|(_, ty)| types.extend(ty.tensors().iter().map(|ty| ty.dtype)));
    for dtype in types.into_iter().filter(|dtype| dtype.is_float()) {
        // One step of a narrow type is more than all roundings of what computes it.
        let steps = if dtype.size() == 2 { 2.0 } else { 32.0 };
        unit = unit.max(steps * ulp(dtype, 1.0));
    }
    visit(&func.body, &mut |op| {
        // A reduction over a group adds in its own order.
        let reduces = op.collective().is_some_and(|collective| collective.reduce.is_some());
        exact &= op.tolerance() == Tolerance::Bits && !reduces;
    });
    if exact { 0.0 } else { unit }
}

fn visit(block: &Block, f: &mut impl FnMut(&dyn OpDef)) {
    for node in &block.nodes {
        f(&*node.op);
        node.blocks.iter().for_each(|block| visit(block, f));
    }
}

/// How far two runs of one program may be from each other, by [`difference`]: compiled from eager, many ranks from one,
/// ops from the composite that they expand, reductions over MPI, which adds in an order of its own, from their definition.
pub fn of_runs(dtype: Dtype) -> f64 {
    // Narrow types round after each op, and only that counts; others also accumulate the roundings of long sums.
    let steps = if dtype.size() == 2 { 16.0 } else { 64.0 };
    steps * ulp(dtype, 1.0)
}

/// The largest difference of two results of one program, relative to the larger of 1 and the largest expected element;
/// infinite if their lengths differ or an element of one of them is NaN.
pub fn difference<T: Copy + Into<f64>>(expected: &[T], got: &[T]) -> f64 {
    let [expected, got] = [expected, got].map(|list| list.iter().map(|x| (*x).into()).collect::<Vec<f64>>());
    if expected.len() != got.len() || expected.iter().chain(&got).any(|x| x.is_nan()) {
        return f64::INFINITY;
    }
    let largest = expected.iter().fold(1.0, |a: f64, x| a.max(x.abs()));
    expected.iter().zip(&got).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs())) / largest
}

/// The distance between neighbouring values of a float type around `x`.
pub fn ulp(dtype: Dtype, x: f64) -> f64 {
    let (digits, smallest) = match dtype {
        Dtype::F32 => (23, -126),
        Dtype::F16 => (10, -14),
        Dtype::Bf16 => (7, -126),
        _ => (52, -1022),
    };
    // The exponent as it is stored, so that it is exact at powers of two.
    let exponent = (x.abs().to_bits() >> 52) as i32 - 1023;
    // In two steps: for subnormals a single power would overflow and give 0.
    2f64.powi(exponent.max(smallest)) * 2f64.powi(-digits)
}

/// One rounding of the type in which kernels accumulate.
fn rounding(dtype: Dtype) -> f64 {
    ulp(dtype.accumulator(), 1.0) / 2.0
}

/// Compares what a kernel gave with what the op's own evaluation gives; the error says what is furthest off.
pub fn check(op: &dyn OpDef, cx: &EvalCx<'_>, args: &[&Literal], got: &[Literal]) -> Result<(), String> {
    let name = op.info().name;
    let expected = op.eval(cx, args).map_err(|error| format!("{name}: {error}"))?;
    if expected.len() != got.len() {
        return Err(format!("{name}: expected {} results, got {}", expected.len(), got.len()));
    }
    for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
        if (expected.dtype, &expected.shape) != (got.dtype, &got.shape) {
            let type_of = |t: &Literal| format!("{}{:?}", t.dtype, t.shape);
            return Err(format!("{name}: result {i}: expected {}, got {}", type_of(expected), type_of(got)));
        }
        let tolerance = op.tolerance();
        let allowed = allowed(tolerance, op, cx, args, i, expected)?;
        // A weight may underflow in the kernel's type but not in the reference's; times an infinite value the first is
        // NaN and the second infinite.
        let loose = matches!(
            tolerance,
            Tolerance::Near { of: Size::LargestOfLastByScores { .. } | Size::AttentionCotangents { .. }, .. }
        );
        if let Some((at, expected, got)) = first_wrong(expected, got, &allowed, loose) {
            let allowed = allowed.get(at).map_or(String::new(), |allowed| format!(": {allowed:e}"));
            return Err(format!(
                "{name}: result {i}, element {at}: expected {expected}, got {got} \
                 (tolerance of its definition: {tolerance}{allowed})"
            ));
        }
    }
    Ok(())
}

/// The allowed error of each element; empty for bit equality.
fn allowed(
    tolerance: Tolerance,
    op: &dyn OpDef,
    cx: &EvalCx<'_>,
    args: &[&Literal],
    result: usize,
    expected: &Literal,
) -> Result<Vec<f64>, String> {
    let (dtype, floats) = (expected.dtype, floats(expected));
    let unit = |x: &f64| if x.is_finite() { ulp(dtype, *x) } else { 0.0 };
    let (roundings, of) = match if dtype.is_float() { tolerance } else { Tolerance::Bits } {
        Tolerance::Bits => return Ok(Vec::new()),
        Tolerance::Ulps { single, double } => {
            let ulps = match dtype {
                Dtype::F32 => single,
                Dtype::F64 => double,
                _ => 1.0,
            };
            return Ok(floats.iter().map(|x| ulps * unit(x)).collect());
        }
        Tolerance::Near { roundings, of } => (roundings * rounding(dtype), of),
    };
    let sizes: Vec<f64> = match of {
        Size::Absolutes => of_others(op, cx, args, result, f64::abs)?,
        Size::AbsolutesByRootOfTerms => {
            let terms = of_others(op, cx, args, result, |_| 1.0)?;
            let absolutes = of_others(op, cx, args, result, f64::abs)?;
            // Subnormals have no relative precision: each term may lose one of them.
            let smallest = ulp(dtype.accumulator(), 0.0) / rounding(dtype);
            terms
                .iter()
                .zip(absolutes)
                .map(|(terms, size)| (terms + 1.0).sqrt() * (size + smallest))
                .collect()
        }
        Size::ElementAndOne => floats.iter().map(|x| x.abs() + 1.0).collect(),
        Size::LargestResult => vec![largest(expected); floats.len()],
        Size::LargestOfLastByScores { scale } => {
            let [q, k, v] = args else { return Err("expected the operands of attention".into()) };
            let width = q.shape.last().copied().unwrap_or(0) as f64;
            let score = width * largest(q) * largest(k) * scale.abs();
            vec![largest(v) * (width + score + 16.0); floats.len()]
        }
        Size::AttentionCotangents { scale } => of_attention(op, cx, args, result, scale)?,
    };
    let sizes = sizes.iter().map(|size| if size.is_finite() { *size } else { 0.0 });
    Ok(floats.iter().zip(sizes).map(|(x, size)| unit(x) + roundings * size).collect())
}

fn floats(tensor: &Literal) -> &[f64] {
    if let Data::Float(data) = &tensor.data { data } else { &[] }
}

/// The op applied to other elements in place of its own; in `f64`, because a sum without cancellation may overflow
/// their type.
fn of_others(
    op: &dyn OpDef,
    cx: &EvalCx<'_>,
    args: &[&Literal],
    result: usize,
    other: impl Fn(f64) -> f64,
) -> Result<Vec<f64>, String> {
    let changed = |tensor: &&Literal| match &tensor.data {
        Data::Float(data) => {
            Literal::floats(Dtype::F64, tensor.shape.clone(), data.iter().map(|x| other(*x)).collect())
        }
        Data::Int(_) => (*tensor).clone(),
    };
    let changed: Vec<Literal> = args.iter().map(changed).collect();
    let results = op.eval(cx, &changed.iter().collect::<Vec<_>>()).map_err(|error| error.to_string())?;
    Ok(results.get(result).map(|result| floats(result).to_vec()).unwrap_or_default())
}

/// The sizes of a result of the backward of attention. A rounding of a score is one of a weight.
fn of_attention(
    op: &dyn OpDef,
    cx: &EvalCx<'_>,
    args: &[&Literal],
    result: usize,
    scale: f64,
) -> Result<Vec<f64>, String> {
    let [q, k, v, z, g] = args else { return Err("expected the operands of attention_backward".into()) };
    let [depth, width] = [q, v].map(|x| x.shape.last().copied().unwrap_or(0));
    let score = depth as f64 * largest(q) * largest(k) * scale.abs();
    let of_weight = (depth + width) as f64 + score + 16.0;
    let of_score = of_weight * scale.abs() * width as f64 * largest(g) * (largest(v) + largest(z));
    if result == 0 {
        return Ok(vec![of_score * largest(k); floats(q).len()]);
    }
    // The weights of each key: the cotangent of its value for cotangents of 1.
    let wide = |x: &Literal, of: &dyn Fn(f64) -> f64| {
        Literal::floats(Dtype::F64, x.shape.clone(), floats(x).iter().map(|x| of(*x)).collect())
    };
    let args = [wide(q, &|x| x), wide(k, &|x| x), wide(v, &|_| 0.0), wide(z, &|_| 0.0), wide(g, &|_| 1.0)];
    let weights = op.eval(cx, &args.each_ref()).map_err(|error| error.to_string())?;
    let weights = weights.get(2).map(floats).unwrap_or_default();
    // Weights below the smallest normal number may be 0.
    let dtype = q.dtype.accumulator();
    let lost = ulp(dtype, 0.0) / rounding(dtype).powi(2);
    let of = |weight: f64| {
        (weight + lost) * if result == 1 { of_score * largest(q) } else { of_weight * largest(g) }
    };
    match result {
        1 => Ok((0..floats(k).len())
            .map(|i| of(weights.get(i / depth * width).copied().unwrap_or(0.0)))
            .collect()),
        _ => Ok(weights.iter().map(|weight| of(*weight)).collect()),
    }
}

fn largest(tensor: &Literal) -> f64 {
    floats(tensor).iter().filter(|x| x.is_finite()).fold(0.0, |a, x| a.max(x.abs()))
}

/// The first element that is too far off, with both values.
fn first_wrong(
    expected: &Literal,
    got: &Literal,
    allowed: &[f64],
    loose: bool,
) -> Option<(usize, String, String)> {
    match (&expected.data, &got.data) {
        (Data::Float(expected), Data::Float(got)) => {
            let near = |i: usize, a: f64, b: f64| match allowed.get(i) {
                _ if loose && !a.is_finite() && !b.is_finite() => true,
                _ if a.is_nan() || b.is_nan() => a.is_nan() && b.is_nan(),
                Some(allowed) if a.is_finite() && b.is_finite() => (a - b).abs() <= *allowed,
                Some(_) => a == b,
                None => a.to_bits() == b.to_bits(),
            };
            let wrong = expected.iter().zip(got).enumerate().find(|(i, (a, b))| !near(*i, **a, **b));
            wrong.map(|(i, (a, b))| (i, format!("{a:?}"), format!("{b:?}")))
        }
        (Data::Int(expected), Data::Int(got)) => {
            let wrong = expected.iter().zip(got).enumerate().find(|(_, (a, b))| a != b);
            wrong.map(|(i, (a, b))| (i, a.to_string(), b.to_string()))
        }
        _ => Some((0, "one kind of elements".into(), "another".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;
    use crate::ops::{Add, Exp, Sum};
    use consort_types::Rank;
    use std::collections::BTreeMap;

    #[test]
    fn units_in_the_last_place() {
        assert_eq!(ulp(Dtype::F32, 1.0), f64::from(f32::EPSILON));
        assert_eq!(ulp(Dtype::F32, 0.999), f64::from(f32::EPSILON) / 2.0);
        assert_eq!(ulp(Dtype::F64, 4.0), 4.0 * f64::EPSILON);
        assert_eq!(ulp(Dtype::Bf16, 1.5), 2f64.powi(-7));
        assert_eq!(ulp(Dtype::F16, 0.0), 2f64.powi(-24));
        assert_eq!(ulp(Dtype::F64, 0.0), f64::from_bits(1));
    }

    #[test]
    fn what_is_off_is_seen_and_what_is_near_is_not() {
        let mesh = Mesh::new(Vec::<(String, u32)>::new()).unwrap();
        let cx = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &BTreeMap::new() };
        let f32s = |data: &[f64]| Literal::floats(Dtype::F32, vec![data.len()], data.to_vec());
        let x = f32s(&[1.0, f64::NAN, -0.0]);
        let e = std::f64::consts::E;
        let unit = ulp(Dtype::F32, e);
        assert!(check(&Exp {}, &cx, &[&x], &[f32s(&[e + unit, f64::NAN, 1.0])]).is_ok());
        let error = check(&Exp {}, &cx, &[&x], &[f32s(&[e + 4.0 * unit, f64::NAN, 1.0])]).unwrap_err();
        assert!(error.starts_with("exp: result 0, element 0: expected 2.718281"), "{error}");
        let y = f32s(&[0.0; 3]);
        assert!(check(&Add {}, &cx, &[&x, &x], &[f32s(&[2.0, f64::NAN, 0.0])]).is_err());
        assert!(check(&Add {}, &cx, &[&x, &x], &[f32s(&[2.0, f64::NAN, -0.0])]).is_ok());
        assert!(check(&Add {}, &cx, &[&x, &y], &[f32s(&[1.0, f64::NAN])]).is_err());
        // The error of a sum with cancellation is relative to its terms.
        let cancels = f32s(&[1e6, -1e6, 1.0]);
        let total = |x: f64| Literal::floats(Dtype::F32, vec![], vec![x]);
        assert!(check(&Sum { dims: vec![0], keep: false }, &cx, &[&cancels], &[total(3.0)]).is_ok());
        assert!(check(&Sum { dims: vec![0], keep: false }, &cx, &[&cancels], &[total(9.0)]).is_err());
    }
    #[test]
    fn runs_differ_relative_to_the_largest_element() {
        assert_eq!(difference(&[4.0f32, 1.0], &[4.0, 3.0]), 0.5);
        assert_eq!(difference(&[0.0f64], &[0.25]), 0.25);
        assert_eq!(difference::<f32>(&[], &[]), 0.0);
        assert_eq!(difference(&[1.0f32], &[]), f64::INFINITY);
        assert_eq!(difference(&[1.0], &[f32::NAN]), f64::INFINITY);
    }
}
