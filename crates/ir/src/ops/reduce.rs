//! Ops that reduce over dimensions of a tensor: sums, products, means, extremes, truth values.

use consort_types::{Dtype, Failure};

use crate::index::{Guard, Index};
use crate::literal::{Data, Literal, ravel, unravel};
use crate::op;
use crate::ops::exact::Exact;
use crate::ops::functions::{maximum, minimum};
use crate::ops::{Cost, CostCx, Cotangents, Eq, EvalCx, EvalError, InferCx, OpDef, Term, VjpCx};
use crate::tolerance::Tolerance;
use crate::types::{TensorType, Type};

/// The shape without the reduced dimensions, or with them as 1.
pub(super) fn reduced<T: Clone>(shape: &[T], dims: &[usize], keep: bool, one: T) -> Vec<T> {
    let all = shape.iter().enumerate();
    let kept = all.filter(|(i, _)| keep || !dims.contains(i));
    kept.map(|(i, size)| if dims.contains(&i) { one.clone() } else { size.clone() }).collect()
}

pub(super) fn infer(
    cx: &mut InferCx<'_>,
    dims: &[usize],
    keep: bool,
    takes: (fn(Dtype) -> bool, &str),
    empty: bool,
) -> Result<TensorType, Box<Failure>> {
    let x = cx.tensor(0)?;
    if !takes.0(x.dtype) {
        return Err(Failure::rule("C1", (takes.1.to_string(), x.dtype.to_string())));
    }
    cx.require_dims("C2", dims, x.rank())?;
    if !empty {
        let n = Index::product(dims.iter().map(|dim| &x.shape[*dim]));
        cx.require("C3", Guard::Le(Index::constant(1), n), |cx| {
            ("at least one element to choose from", format!("shape {}", cx.shape_text(&x.shape)))
        })?;
    }
    Ok(x.with_shape(reduced(&x.shape, dims, keep, Index::constant(1))))
}

/// For each element of the result, the row-major indices of the elements that are folded into it, in order.
pub(super) fn folded(x: &Literal, dims: &[usize]) -> (Vec<usize>, Vec<Vec<usize>>) {
    let kept_shape = reduced(&x.shape, dims, true, 1);
    let mut groups = vec![Vec::new(); kept_shape.iter().product()];
    for i in 0..x.numel() {
        let mut at = unravel(i, &x.shape);
        dims.iter().for_each(|dim| at[*dim] = 0);
        groups[ravel(&at, &kept_shape)].push(i);
    }
    (kept_shape, groups)
}

fn fold(
    x: &Literal,
    dims: &[usize],
    keep: bool,
    float: impl Fn(&mut dyn Iterator<Item = f64>) -> f64,
    int: impl Fn(&mut dyn Iterator<Item = i64>) -> i64,
) -> Literal {
    let (_, groups) = folded(x, dims);
    let shape = reduced(&x.shape, dims, keep, 1);
    match &x.data {
        Data::Float(data) => Literal::floats(
            x.dtype,
            shape,
            groups.iter().map(|g| float(&mut g.iter().map(|i| data[*i]))).collect(),
        ),
        Data::Int(data) => Literal::ints(
            x.dtype,
            shape,
            groups.iter().map(|g| int(&mut g.iter().map(|i| data[*i]))).collect(),
        ),
    }
}

/// A sum and the number of its terms.
fn sum(xs: &mut dyn Iterator<Item = f64>) -> (f64, f64) {
    let (sum, n) = xs.fold((Exact::NOTHING, 0.0), |(sum, n), x| (sum.plus(x), n + 1.0));
    (if n == 0.0 { 0.0 } else { sum.value() }, n)
}

const NUMBERS: (fn(Dtype) -> bool, &str) = (|dtype| dtype != Dtype::Bool, "a float or integer type");
pub(super) const FLOATS: (fn(Dtype) -> bool, &str) = (Dtype::is_float, "a float type");
const TRUTH: (fn(Dtype) -> bool, &str) = (|dtype| dtype == Dtype::Bool, "bool");

/// What a cotangent is computed from: the operand, and the result and its cotangent in the operand's shape.
struct At<'a, 'c, 'm> {
    x: Term<'c, 'm>,
    z: Term<'c, 'm>,
    g: Term<'c, 'm>,
    dims: &'a [usize],
}

type Slope = for<'a, 'c, 'm> fn(&'c VjpCx<'m>, At<'a, 'c, 'm>) -> Term<'c, 'm>;

impl<'c, 'm> At<'_, 'c, 'm> {
    /// How many elements are folded into one.
    fn count(&self) -> Index {
        let shape = self.x.ty().shape;
        Index::product(self.dims.iter().filter_map(|dim| shape.get(*dim)))
    }

    /// The cotangent in equal shares for all elements that equal the result.
    fn of_equals(&self) -> Term<'c, 'm> {
        let share = self.x.compare(Eq {}, self.z).cast(self.x.ty().dtype);
        self.g * share / share.sum_along(self.dims)
    }

    /// The product of all other elements. A zero divides nothing: with one, the others are multiplied; with more, all
    /// products are zero.
    fn of_product(&self) -> Term<'c, 'm> {
        let (one, zero) = (self.x.fill(1.0), self.x.fill(0.0));
        let is_zero = self.x.compare(Eq {}, zero);
        let others = is_zero.select(one, self.x).then(Prod { dims: self.dims.to_vec(), keep: true });
        let zeros = is_zero.select(one, zero).sum_along(self.dims);
        let alone = is_zero.select(others.widen(self.x), zero);
        let at_zero = zeros.compare(Eq {}, one).select(alone, zero);
        let slope = zeros.compare(Eq {}, zero).select(self.z / is_zero.select(one, self.x), at_zero);
        self.g * slope
    }
}

macro_rules! reductions {
    ($($(#[doc = $doc:expr])* $name:ident($text:literal) $takes:expr, empty $empty:literal, $tolerance:ident,
        $dtype:literal, $input:literal => $output:literal, $float:expr, $int:expr, $slope:expr;)*) => {$(
        op! {
            $(#[doc = $doc])*
            pub struct $name($text)(x) {
                /// The dimensions to reduce; an empty list reduces none.
                dims: Vec<usize>,
                /// Whether reduced dimensions stay, with size 1.
                keep: bool,
            }
            example concat!("mesh ()\n\nfunc @f(v0: ", $dtype, "[2,2]) -> ", $dtype, "[2] {\n    v1 = ", $text,
                "[dims=[1], keep=false] v0 : ", $dtype, "[2]\n    return v1\n}\n; run: @f(", $input, ") == ", $output, "\n")
        }

        impl OpDef for $name {
            fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
                Ok(vec![infer(cx, &self.dims, self.keep, $takes, $empty)?.into()])
            }
            fn cost(&self, cx: &CostCx<'_>) -> Cost {
                cx.kernel(cx.arg_numel(0))
            }
            fn tolerance(&self) -> Tolerance {
                Tolerance::$tolerance
            }
            fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
                Ok(vec![fold(args[0], &self.dims, self.keep, $float, $int)])
            }
            fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
                let shape = cx.arg_ty(0).shape;
                let over = |z: Term<'c, 'm>| z.unreduce(&shape, &self.dims).widen_to(&shape);
                let slope: Slope = $slope;
                let at = At { x: cx.arg(0), z: over(cx.result(0)), g: over(cx.cotangent(0)), dims: &self.dims };
                Ok(vec![Some(slope(cx, at))])
            }
        }
    )*};
}

reductions! {
    /// The sum over dimensions; 0 for no elements. Integers wrap.
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimensions exist and are distinct.
    Sum("sum") NUMBERS, empty true, SUM, "f32", "[[1, 2], [3, 5]]" => "[3, 8]",
        |xs| sum(xs).0, |xs| xs.fold(0, i64::wrapping_add),
        |_, d| d.g;
    /// The mean over dimensions; NaN for no elements.
    ///
    /// (C1) The element type is a float type.
    ///
    /// (C2) The dimensions exist and are distinct.
    Mean("mean") FLOATS, empty true, SUM, "f32", "[[1, 2], [3, 5]]" => "[1.5, 4]",
        |xs| { let (sum, n) = sum(xs); sum / n }, |_| 0,
        |cx, d| d.g / cx.size(&d.g.ty(), &d.count());
    /// The largest element over dimensions; NaN where one is NaN.
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimensions exist and are distinct.
    ///
    /// (C3) There is at least one element to choose from.
    Max("max") NUMBERS, empty false, Bits, "f32", "[[1, 2], [3, 5]]" => "[2, 5]",
        |xs| xs.fold(f64::NEG_INFINITY, maximum), |xs| xs.max().unwrap_or(0),
        |_, d| d.of_equals();
    /// The smallest element over dimensions; NaN where one is NaN.
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimensions exist and are distinct.
    ///
    /// (C3) There is at least one element to choose from.
    Min("min") NUMBERS, empty false, Bits, "f32", "[[1, 2], [3, 5]]" => "[1, 3]",
        |xs| xs.fold(f64::INFINITY, minimum), |xs| xs.min().unwrap_or(0),
        |_, d| d.of_equals();
    /// The product over dimensions; 1 for no elements. Integers wrap.
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimensions exist and are distinct.
    Prod("prod") NUMBERS, empty true, Bits, "f32", "[[1, 2], [3, 5]]" => "[2, 15]",
        |xs| xs.fold(1.0, |a, x| a * x), |xs| xs.fold(1, i64::wrapping_mul),
        |_, d| d.of_product();
    /// Whether any element over dimensions is true; false for no elements.
    ///
    /// (C1) The element type is bool.
    ///
    /// (C2) The dimensions exist and are distinct.
    Any("any") TRUTH, empty true, Bits, "bool", "[[false, true], [false, false]]" => "[true, false]",
        |_| 0.0, |xs| xs.fold(0, |a, x| a | x),
        |_, d| d.g;
    /// Whether all elements over dimensions are true; true for no elements.
    ///
    /// (C1) The element type is bool.
    ///
    /// (C2) The dimensions exist and are distinct.
    All("all") TRUTH, empty true, Bits, "bool", "[[false, true], [true, true]]" => "[false, true]",
        |_| 0.0, |xs| xs.fold(1, |a, x| a & x),
        |_, d| d.g;
}

op! {
    /// The row-major index of the largest element within the dimensions; the first of equals, and a NaN is
    /// larger than everything.
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimensions exist and are distinct.
    ///
    /// (C3) There is at least one element to choose from.
    pub struct Argmax("argmax")(x) {
        /// The dimensions to reduce; the result is an index into them.
        dims: Vec<usize>,
        /// Whether reduced dimensions stay, with size 1.
        keep: bool,
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,3]) -> i64[2] {\n    v1 = argmax[dims=[1], keep=false] v0 : i64[2]\n    return v1\n}\n; run: @f([[1, 5, 5], [3, 2, 1]]) == [1, 0]\n"
}

impl OpDef for Argmax {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![infer(cx, &self.dims, self.keep, NUMBERS, false)?.with_dtype(Dtype::I64).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.arg_numel(0))
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![place(args[0], &self.dims, self.keep, |a, b| b > a, |a, b| b > a)])
    }
}

op! {
    /// The row-major index of the smallest element within the dimensions; the first of equals, and a NaN is
    /// smaller than everything.
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimensions exist and are distinct.
    ///
    /// (C3) There is at least one element to choose from.
    pub struct Argmin("argmin")(x) {
        /// The dimensions to reduce; the result is an index into them.
        dims: Vec<usize>,
        /// Whether reduced dimensions stay, with size 1.
        keep: bool,
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,3]) -> i64[2] {\n    v1 = argmin[dims=[1], keep=false] v0 : i64[2]\n    return v1\n}\n; run: @f([[5, 1, 1], [3, 2, 1]]) == [1, 2]\n"
}

impl OpDef for Argmin {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![infer(cx, &self.dims, self.keep, NUMBERS, false)?.with_dtype(Dtype::I64).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.arg_numel(0))
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![place(args[0], &self.dims, self.keep, |a, b| b < a, |a, b| b < a)])
    }
}

/// The index of the best element over dimensions: the first NaN, else the first of the best.
fn place(
    x: &Literal,
    dims: &[usize],
    keep: bool,
    float: impl Fn(f64, f64) -> bool,
    int: impl Fn(i64, i64) -> bool,
) -> Literal {
    // Row-major indices follow the order of the dimensions in the tensor, whatever order `dims` has.
    let (_, groups) = folded(x, dims);
    let better = |a: usize, b: usize| match &x.data {
        Data::Float(data) => float(data[a], data[b]) || data[b].is_nan() && !data[a].is_nan(),
        Data::Int(data) => int(data[a], data[b]),
    };
    let best = |group: &Vec<usize>| {
        let best = (1..group.len()).fold(0, |best, i| if better(group[best], group[i]) { i } else { best });
        best as i64
    };
    let shape = reduced(&x.shape, dims, keep, 1);
    Literal::ints(Dtype::I64, shape, groups.iter().map(best).collect())
}
