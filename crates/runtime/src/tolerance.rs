//! How far a kernel's result may be from the reference evaluation: one table for all tests.
//!
//! The reference computes in f64 and rounds once. A kernel that also rounds once, or only moves elements, gives the
//! same bits. One that approximates a function is held to a number of ulps, and one that sums many elements to an error
//! relative to their magnitude, because the order of additions is free.

use consort_ir::ops::{Attention, EvalCx, OpDef};
use consort_ir::program::{Block, Func};
use consort_ir::tensor::{Data, Tensor};
use consort_types::Dtype;

/// How far a result may be from the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// Bit-identical, except that any NaN equals any other.
    Bits,
    /// A number of units in the last place of the reference.
    Ulps(f64),
    /// One unit in the last place, plus a number of accumulator roundings relative to a size.
    Near {
        /// The number of roundings.
        roundings: f64,
        /// What they are relative to.
        of: Size,
    },
}

/// What the roundings of a sum are relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The same op on absolute values: what a sum would be if nothing cancelled.
    Absolutes,
    /// The same times the number of terms: they are added sequentially.
    AbsolutesByTerms,
    /// The element itself, and 1.
    ElementAndOne,
    /// The largest finite element of the result.
    LargestResult,
    /// The largest finite element of the last operand, of which every result is a weighted average, times the largest
    /// possible attention score: a rounding of a score is a rounding of a weight.
    LargestOfLastByScores,
}

/// Functions that kernels approximate: ulps of `f32` against the exact value, and of `f64` against the reference, which
/// is off by up to one itself. The tests in `kernels/math` use tighter bounds where functions are smooth.
const FUNCTIONS: [(&str, f64, f64); 16] = [
    ("exp", 1.1, 1.0),
    ("exp2", 1.0, 1.0),
    ("expm1", 1.0, 2.0),
    ("log", 1.0, 2.0),
    ("log2", 1.0, 2.0),
    ("log1p", 1.0, 2.0),
    ("sin", 1.0, 1.0),
    ("cos", 1.0, 1.0),
    ("tanh", 2.0, 5.0),
    ("erf", 1.0, 1.0),
    // Quotients and products of those, each of which rounds.
    ("sigmoid", 2.5, 3.0),
    ("silu", 3.0, 5.0),
    ("rsqrt", 1.5, 1.5),
    ("pow", 1.5, 1.0),
    ("atan2", 1.5, 1.0),
    // Below zero most of it cancels.
    ("gelu", 6.0, 6.0),
];

/// The tolerance of an op whose results are of this type.
pub fn of(op: &str, dtype: Dtype) -> Tolerance {
    if !dtype.is_float() {
        return Tolerance::Bits;
    }
    if let Some((_, single, double)) = FUNCTIONS.iter().find(|(name, ..)| *name == op) {
        return match dtype {
            // The reference is itself rounded, by half a unit.
            Dtype::F32 => Tolerance::Ulps(single + 0.5),
            Dtype::F64 => Tolerance::Ulps(*double),
            // Computed in f32: only a value close to a midpoint can round the other way.
            _ => Tolerance::Ulps(1.0),
        };
    }
    match op {
        // A blocked sum of n elements is off by less than one rounding per block and per sequential addition within a
        // block; 16 is more than kernels need for thousands of elements.
        "sum" | "mean" | "cumsum" | "prod" | "rms_norm" => {
            Tolerance::Near { roundings: 16.0, of: Size::Absolutes }
        }
        // A matrix product may add sequentially along the reduced dimension.
        "matmul" | "conv1d" | "conv2d" => Tolerance::Near { roundings: 1.0, of: Size::AbsolutesByTerms },
        // exp(-t) is off by t roundings, so by less than half a rounding of 1; the sum accumulates them.
        "softmax" | "log_softmax" | "logsumexp" => {
            Tolerance::Near { roundings: 16.0, of: Size::ElementAndOne }
        }
        // Subtracting the mean cancels: the difference has the rounding error of the largest element.
        "layer_norm" => Tolerance::Near { roundings: 32.0, of: Size::LargestResult },
        "attention" => Tolerance::Near { roundings: 4.0, of: Size::LargestOfLastByScores },
        // + - * / and square roots round once; all other ops move, count or compare.
        _ => Tolerance::Bits,
    }
}

/// How far results of a whole program may be from the reference, as relative and absolute tolerance: 0 if each of its
/// ops is bit-identical, else some roundings of the least precise float type in it.
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
        let name = op.info().name;
        exact &= of(name, Dtype::F32) == Tolerance::Bits && !name.contains("reduce");
    });
    if exact { 0.0 } else { unit }
}

fn visit(block: &Block, f: &mut impl FnMut(&dyn OpDef)) {
    for node in &block.nodes {
        f(&*node.op);
        node.blocks.iter().for_each(|block| visit(block, f));
    }
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
pub fn check(op: &dyn OpDef, cx: &EvalCx<'_>, args: &[&Tensor], got: &[Tensor]) -> Result<(), String> {
    let name = op.info().name;
    let expected = op.eval(cx, args).map_err(|error| format!("{name}: {error}"))?;
    if expected.len() != got.len() {
        return Err(format!("{name}: expected {} results, got {}", expected.len(), got.len()));
    }
    for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
        if (expected.dtype, &expected.shape) != (got.dtype, &got.shape) {
            let type_of = |t: &Tensor| format!("{}{:?}", t.dtype, t.shape);
            return Err(format!("{name}: result {i}: expected {}, got {}", type_of(expected), type_of(got)));
        }
        let tolerance = of(name, expected.dtype);
        let allowed = allowed(tolerance, op, cx, args, i, expected)?;
        // A weight may underflow in the kernel's type but not in the reference's; times an infinite value the first is
        // NaN and the second infinite.
        let loose = name == "attention";
        let wrong = first_wrong(expected, got, &allowed, loose);
        if let Some((at, expected, got)) = wrong {
            let allowed = allowed.get(at).copied().unwrap_or(0.0);
            return Err(format!(
                "{name}: result {i}, element {at}: expected {expected}, got {got} ({tolerance:?}: {allowed:e})"
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
    args: &[&Tensor],
    result: usize,
    expected: &Tensor,
) -> Result<Vec<f64>, String> {
    let (dtype, floats) = (expected.dtype, floats(expected));
    let unit = |x: &f64| if x.is_finite() { ulp(dtype, *x) } else { 0.0 };
    let (roundings, of) = match tolerance {
        Tolerance::Bits => return Ok(Vec::new()),
        Tolerance::Ulps(n) => return Ok(floats.iter().map(|x| n * unit(x)).collect()),
        Tolerance::Near { roundings, of } => (roundings * rounding(dtype), of),
    };
    let sizes: Vec<f64> = match of {
        Size::Absolutes => of_others(op, cx, args, result, f64::abs)?,
        Size::AbsolutesByTerms => {
            let terms = of_others(op, cx, args, result, |_| 1.0)?;
            let absolutes = of_others(op, cx, args, result, f64::abs)?;
            // Subnormals have no relative precision: each term may lose one of them.
            let smallest = ulp(dtype.accumulator(), 0.0) / rounding(dtype);
            terms.iter().zip(absolutes).map(|(terms, size)| (terms + 1.0) * (size + smallest)).collect()
        }
        Size::ElementAndOne => floats.iter().map(|x| x.abs() + 1.0).collect(),
        Size::LargestResult => vec![largest(expected); floats.len()],
        Size::LargestOfLastByScores => {
            let [q, k, v] = args else { return Err("expected the operands of attention".into()) };
            let scale = op.as_any().downcast_ref().map_or(1.0, |Attention { scale, .. }| scale.abs());
            let width = q.shape.last().copied().unwrap_or(0) as f64;
            let score = width * largest(q) * largest(k) * scale;
            vec![largest(v) * (width + score + 16.0); floats.len()]
        }
    };
    let sizes = sizes.iter().map(|size| if size.is_finite() { *size } else { 0.0 });
    Ok(floats.iter().zip(sizes).map(|(x, size)| unit(x) + roundings * size).collect())
}

fn floats(tensor: &Tensor) -> &[f64] {
    if let Data::Float(data) = &tensor.data { data } else { &[] }
}

/// The op applied to other elements in place of its own; in `f64`, because a sum without cancellation may overflow
/// their type.
fn of_others(
    op: &dyn OpDef,
    cx: &EvalCx<'_>,
    args: &[&Tensor],
    result: usize,
    other: impl Fn(f64) -> f64,
) -> Result<Vec<f64>, String> {
    let changed = |tensor: &&Tensor| match &tensor.data {
        Data::Float(data) => {
            Tensor::floats(Dtype::F64, tensor.shape.clone(), data.iter().map(|x| other(*x)).collect())
        }
        Data::Int(_) => (*tensor).clone(),
    };
    let changed: Vec<Tensor> = args.iter().map(changed).collect();
    let results = op.eval(cx, &changed.iter().collect::<Vec<_>>()).map_err(|error| error.to_string())?;
    Ok(results.get(result).map(|result| floats(result).to_vec()).unwrap_or_default())
}

fn largest(tensor: &Tensor) -> f64 {
    floats(tensor).iter().filter(|x| x.is_finite()).fold(0.0, |a, x| a.max(x.abs()))
}

/// The first element that is too far off, with both values.
fn first_wrong(
    expected: &Tensor,
    got: &Tensor,
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
    use consort_ir::mesh::Mesh;
    use consort_ir::ops::{Add, Exp, Sum};
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
        let f32s = |data: &[f64]| Tensor::floats(Dtype::F32, vec![data.len()], data.to_vec());
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
        let total = |x: f64| Tensor::floats(Dtype::F32, vec![], vec![x]);
        assert!(check(&Sum { dims: vec![0], keep: false }, &cx, &[&cancels], &[total(1.5)]).is_ok());
        assert!(check(&Sum { dims: vec![0], keep: false }, &cx, &[&cancels], &[total(5.0)]).is_err());
    }
}
