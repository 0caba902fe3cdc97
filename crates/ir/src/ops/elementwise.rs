//! Ops that compute each element of the result from the elements at the same position of the operands.
//!
//! Operands have equal shapes: a smaller one is widened by an explicit `broadcast` first. Each
//! op is one entry of the table below; floats are computed in `f64` and rounded once, integers
//! wrap.

use std::f64::consts::{FRAC_2_SQRT_PI, LN_2};

use consort_types::{Dtype, Failure};

use crate::index::Index;
use crate::literal::{Data, Literal};
use crate::op;
use crate::ops::functions::{erf, gelu, maximum, minimum, power, sigmoid, sign, silu};
use crate::ops::slopes::{base_slope, chosen, exponent_slope, gelu_slope, silu_slope};
use crate::ops::{Alias, Cost, CostCx, Cotangents, EvalCx, EvalError, InferCx, OpDef, Term, VjpCx};
use crate::tolerance::Tolerance;
use crate::types::{TensorType, Type};

/// The element types of an op.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Domain {
    Floats,
    Numbers,
    Logic,
    All,
}

impl Domain {
    fn has(self, dtype: Dtype) -> bool {
        match self {
            Domain::Floats => dtype.is_float(),
            Domain::Numbers => dtype != Dtype::Bool,
            Domain::Logic => !dtype.is_float(),
            Domain::All => true,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Domain::Floats => "a float type",
            Domain::Numbers => "a float or integer type",
            Domain::Logic => "an integer type or bool",
            Domain::All => "any type",
        }
    }
}

/// The scalar function of an elementwise op; `int` also handles truth values, as 0 and 1.
struct Rule {
    domain: Domain,
    to_bool: bool,
    float: fn(&[f64]) -> f64,
    int: fn(&[i64]) -> i64,
    compare: fn(&[f64]) -> bool,
    tolerance: Tolerance,
    slopes: Slopes,
}

/// What a cotangent is computed from: operands, result, and the cotangent of the result. `y` is x of unary ops.
#[derive(Clone, Copy)]
struct At<'c, 'm> {
    x: Term<'c, 'm>,
    y: Term<'c, 'm>,
    z: Term<'c, 'm>,
    g: Term<'c, 'm>,
}

type Slope = for<'c, 'm> fn(At<'c, 'm>) -> Term<'c, 'm>;

/// The cotangents of the operands.
enum Slopes {
    Missing,
    Flat,
    One(Slope),
    Two(Slope, Slope),
}

impl Slopes {
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let at = || At { x: cx.arg(0), y: cx.arg(cx.n_args() - 1), z: cx.result(0), g: cx.cotangent(0) };
        match self {
            Slopes::Missing => Err(Failure::new("has no gradient yet")),
            Slopes::Flat => cx.each(|_| None),
            Slopes::One(x) => cx.each(|_| Some(x(at()))),
            Slopes::Two(x, y) => cx.each(|i| Some(if i == 0 { x(at()) } else { y(at()) })),
        }
    }
}

const RULE: Rule = Rule {
    domain: Domain::All,
    to_bool: false,
    float: |x| x[0],
    int: |x| x[0],
    compare: |_| false,
    tolerance: Tolerance::Bits,
    slopes: Slopes::Missing,
};

impl Rule {
    /// The rule of a function that kernels approximate.
    const fn ulps(self, single: f64, double: f64) -> Rule {
        Rule { tolerance: Tolerance::Ulps { single, double }, ..self }
    }

    /// The rule with the cotangent of its one operand.
    const fn slope(self, x: Slope) -> Rule {
        Rule { slopes: Slopes::One(x), ..self }
    }

    /// The rule with the cotangents of both operands.
    const fn slopes(self, x: Slope, y: Slope) -> Rule {
        Rule { slopes: Slopes::Two(x, y), ..self }
    }

    /// The rule of a function that is flat almost everywhere.
    const fn flat(self) -> Rule {
        Rule { slopes: Slopes::Flat, ..self }
    }
}

fn infer(rule: &Rule, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
    let args = cx.tensors()?;
    let first = args[0];
    if !rule.domain.has(first.dtype) {
        return Err(Failure::rule("C1", (rule.domain.text().to_string(), first.dtype.to_string())));
    }
    // An op that takes any type has no constraint on it, so the others are numbered from C1.
    let (one_type, one_shape) = if rule.domain == Domain::All { ("C1", "C2") } else { ("C2", "C3") };
    for other in &args[1..] {
        if other.dtype != first.dtype {
            let message = ("operands of one element type", format!("{} and {}", first.dtype, other.dtype));
            return Err(Failure::rule(one_type, message).note("convert one with `cast`"));
        }
        same_shape(cx, one_shape, first, other)?;
    }
    let dtype = if rule.to_bool { Dtype::Bool } else { first.dtype };
    Ok(vec![first.with_dtype(dtype).into()])
}

fn same_shape(
    cx: &mut InferCx<'_>,
    rule: &'static str,
    a: &TensorType,
    b: &TensorType,
) -> Result<(), Box<Failure>> {
    cx.require_same_shape(rule, "an operand of shape", &a.shape, &b.shape).map_err(|failure| {
        match failure.notes.is_empty() {
            true => failure.note("widen the smaller operand with `broadcast`"),
            false => failure,
        }
    })
}

fn eval(rule: &Rule, args: &[&Literal]) -> Vec<Literal> {
    let (first, n) = (args[0], args[0].numel());
    let column = |i: usize| args.iter().map(move |arg| (arg, i));
    let ints = |i| -> Vec<i64> {
        column(i).map(|(arg, i)| if let Data::Int(data) = &arg.data { data[i] } else { 0 }).collect()
    };
    let floats = |i| -> Vec<f64> {
        column(i).map(|(arg, i)| if let Data::Float(data) = &arg.data { data[i] } else { 0.0 }).collect()
    };
    let shape = first.shape.clone();
    vec![match (first.dtype.is_float(), rule.to_bool) {
        (true, false) => {
            Literal::floats(first.dtype, shape, (0..n).map(|i| (rule.float)(&floats(i))).collect())
        }
        (true, true) => {
            Literal::ints(Dtype::Bool, shape, (0..n).map(|i| i64::from((rule.compare)(&floats(i)))).collect())
        }
        (false, to_bool) => {
            let dtype = if to_bool { Dtype::Bool } else { first.dtype };
            Literal::ints(dtype, shape, (0..n).map(|i| (rule.int)(&ints(i))).collect())
        }
    }]
}

/// Declares elementwise ops of one kind, which determines the numbering of constraints.
macro_rules! elementwise {
    ($kind:ident: $($(#[doc = $doc:expr])* $name:ident($text:literal)($($arg:ident),+)
        $rule:expr, $dtype:literal, $($input:literal),+ => $output:literal : $out:literal;)*) => {$(
        elementwise! {
            @$kind $(#[doc = $doc])* $name($text)($($arg),+)
            elementwise!(@example $text, $dtype, $out, $output, $($arg $input)+)
        }

        impl OpDef for $name {
            fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
                infer(&$rule, cx)
            }
            fn cost(&self, cx: &CostCx<'_>) -> Cost {
                cx.kernel(cx.result_numel())
            }
            fn tolerance(&self) -> Tolerance {
                $rule.tolerance
            }
            fn alias(&self) -> Alias {
                Alias::Reuse
            }
            fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
                Ok(eval(&$rule, args))
            }
            fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
                $rule.slopes.vjp(cx)
            }
        }
    )*};
    (@unary $(#[doc = $doc:expr])* $name:ident($text:literal)($x:ident) $example:expr) => {
        op! {
            $(#[doc = $doc])*
            ///
            /// (C1) The element type is one the op is defined for.
            pub struct $name($text)($x) {}
            example $example
        }
    };
    (@binary $(#[doc = $doc:expr])* $name:ident($text:literal)($x:ident, $y:ident) $example:expr) => {
        op! {
            $(#[doc = $doc])*
            ///
            /// (C1) The element type is one the op is defined for.
            ///
            /// (C2) Both operands have one element type.
            ///
            /// (C3) Both operands have one shape.
            pub struct $name($text)($x, $y) {}
            example $example
        }
    };
    (@compare $(#[doc = $doc:expr])* $name:ident($text:literal)($x:ident, $y:ident) $example:expr) => {
        op! {
            $(#[doc = $doc])*
            ///
            /// (C1) Both operands have one element type.
            ///
            /// (C2) Both operands have one shape.
            pub struct $name($text)($x, $y) {}
            example $example
        }
    };
    (@example $text:literal, $dtype:literal, $out:literal, $output:literal, $a:ident $x:literal) => {
        concat!("mesh ()\n\nfunc @f(v0: ", $dtype, "[3]) -> ", $out, "[3] {\n    v1 = ", $text, " v0 : ", $out,
            "[3]\n    return v1\n}\n; run: @f(", $x, ") == ", $output, "\n")
    };
    (@example $text:literal, $dtype:literal, $out:literal, $output:literal, $a:ident $x:literal $b:ident $y:literal) => {
        concat!("mesh ()\n\nfunc @f(v0: ", $dtype, "[3], v1: ", $dtype, "[3]) -> ", $out, "[3] {\n    v2 = ", $text,
            " v0, v1 : ", $out, "[3]\n    return v2\n}\n; run: @f(", $x, ", ", $y, ") == ", $output, "\n")
    };
}

/// A rule over floats and integers.
const fn numbers(float: fn(&[f64]) -> f64, int: fn(&[i64]) -> i64) -> Rule {
    Rule { domain: Domain::Numbers, float, int, ..RULE }
}

/// A rule over floats.
const fn floats(float: fn(&[f64]) -> f64) -> Rule {
    Rule { domain: Domain::Floats, float, ..RULE }
}

/// A predicate on floats.
const fn question(compare: fn(&[f64]) -> bool) -> Rule {
    Rule { domain: Domain::Floats, to_bool: true, compare, ..RULE }
}

/// A rule over integers and truth values.
const fn logic(int: fn(&[i64]) -> i64) -> Rule {
    Rule { domain: Domain::Logic, int, ..RULE }
}

/// A comparison of elements of any type.
const fn comparison(compare: fn(&[f64]) -> bool, int: fn(&[i64]) -> i64) -> Rule {
    Rule { domain: Domain::All, to_bool: true, compare, int, ..RULE }
}

elementwise! {
    binary:
    /// The sum.
    Add("add")(x, y) numbers(|x| x[0] + x[1], |x| x[0].wrapping_add(x[1]))
        .slopes(|d| d.g, |d| d.g),
        "f32", "[1, 2, 3]", "[10, 20, 0.5]" => "[11, 22, 3.5]" : "f32";
    /// The difference.
    Sub("sub")(x, y) numbers(|x| x[0] - x[1], |x| x[0].wrapping_sub(x[1]))
        .slopes(|d| d.g, |d| -d.g),
        "u8", "[1, 2, 3]", "[0, 2, 4]" => "[1, 0, 255]" : "u8";
    /// The product.
    Mul("mul")(x, y) numbers(|x| x[0] * x[1], |x| x[0].wrapping_mul(x[1]))
        .slopes(|d| d.g * d.y, |d| d.g * d.x),
        "f32", "[1, 2, 3]", "[10, 20, -0.5]" => "[10, 40, -1.5]" : "f32";
    /// The quotient; of integers, rounded towards zero, and 0 where the divisor is 0.
    Div("div")(x, y) numbers(|x| x[0] / x[1], |x| if x[1] == 0 { 0 } else { x[0].wrapping_div(x[1]) })
        .slopes(|d| d.g / d.y, |d| -(d.g * d.z / d.y)),
        "i32", "[7, -7, 7]", "[2, 2, 0]" => "[3, -3, 0]" : "i32";
    /// The remainder, with the sign of the dividend; of integers, 0 where the divisor is 0.
    Rem("rem")(x, y) numbers(|x| x[0] % x[1], |x| if x[1] == 0 { 0 } else { x[0].wrapping_rem(x[1]) })
        .slopes(|d| d.g, |d| -(d.g * ((d.x - d.z) / d.y).then(Round {}))),
        "i32", "[7, -7, 7]", "[4, 4, 0]" => "[3, -3, 0]" : "i32";
    /// The larger of two; NaN where either is, and 0 is larger than -0.
    Maximum("maximum")(x, y) numbers(|x| maximum(x[0], x[1]), |x| x[0].max(x[1]))
        .slopes(|d| chosen(d.x, d.y, d.g), |d| chosen(d.y, d.x, d.g)),
        "f32", "[1, nan, -0]", "[2, 1, 0]" => "[2, nan, 0]" : "f32";
    /// The smaller of two; NaN where either is, and -0 is smaller than 0.
    Minimum("minimum")(x, y) numbers(|x| minimum(x[0], x[1]), |x| x[0].min(x[1]))
        .slopes(|d| chosen(d.y, d.x, d.g), |d| chosen(d.x, d.y, d.g)),
        "f32", "[1, nan, -0]", "[2, 1, 0]" => "[1, nan, -0]" : "f32";
    /// x to the power of y; anything to the power of 0 is 1. Of integers, a negative power of 1 and -1 is 1
    /// or -1, and that of any other is 0.
    Pow("pow")(x, y) numbers(|x| x[0].powf(x[1]), |x| power(x[0], x[1])).ulps(1.0, 1.0)
        .slopes(|d| base_slope(d.x, d.y, d.g), |d| exponent_slope(d.x, d.z, d.g)),
        "i32", "[3, 2, -1]", "[4, -1, -3]" => "[81, 0, -1]" : "i32";
    /// The angle at which the point with coordinates x and y is seen from the positive x axis, in -pi to pi. The
    /// first operand is y.
    Atan2("atan2")(y, x) floats(|x| x[0].atan2(x[1])).ulps(1.0, 1.0)
        .slopes(|d| d.g * d.y / (d.x * d.x + d.y * d.y), |d| -(d.g * d.x / (d.x * d.x + d.y * d.y))),
        "f32", "[0, 1, -1]", "[1, 0, -1]" => "[0, 1.5707964, -2.3561945]" : "f32";
}

elementwise! {
    unary:
    /// The negative.
    Neg("neg")(x) numbers(|x| -x[0], |x| x[0].wrapping_neg())
        .slope(|d| -d.g),
        "f32", "[1, -2, 0]" => "[-1, 2, -0]" : "f32";
    /// The absolute value.
    Abs("abs")(x) numbers(|x| x[0].abs(), |x| x[0].wrapping_abs())
        .slope(|d| d.g * d.x.then(Sign {})),
        "i32", "[1, -2, 0]" => "[1, 2, 0]" : "i32";
    /// e to the power of x.
    Exp("exp")(x) floats(|x| x[0].exp()).ulps(1.6, 1.0)
        .slope(|d| d.g * d.z),
        "f32", "[0, 1, -inf]" => "[1, 2.7182817, 0]" : "f32";
    /// The natural logarithm.
    Log("log")(x) floats(|x| x[0].ln()).ulps(1.5, 2.0)
        .slope(|d| d.g / d.x),
        "f32", "[1, 10, 0]" => "[0, 2.3025851, -inf]" : "f32";
    /// The square root.
    Sqrt("sqrt")(x) floats(|x| x[0].sqrt())
        .slope(|d| d.g / (d.z * 2.0)),
        "f32", "[4, 2, -1]" => "[2, 1.4142135, nan]" : "f32";
    /// One over the square root.
    Rsqrt("rsqrt")(x) floats(|x| 1.0 / x[0].sqrt()).ulps(1.5, 1.5)
        .slope(|d| d.g * (d.z / d.x) * -0.5),
        "f32", "[4, 0.25, 0]" => "[0.5, 2, inf]" : "f32";
    /// The hyperbolic tangent.
    Tanh("tanh")(x) floats(|x| x[0].tanh()).ulps(1.6, 5.0)
        .slope(|d| d.g * (1.0 - d.z * d.z)),
        "f32", "[0, 1, -inf]" => "[0, 0.7615942, -1]" : "f32";
    /// 1 / (1 + exp(-x)).
    Sigmoid("sigmoid")(x) floats(|x| sigmoid(x[0])).ulps(1.5, 4.0)
        .slope(|d| d.g * d.z * (1.0 - d.z)),
        "f32", "[0, 1, -inf]" => "[0.5, 0.7310586, 0]" : "f32";
    /// The error function.
    Erf("erf")(x) floats(|x| erf(x[0])).ulps(1.5, 6.0)
        .slope(|d| d.g * (-(d.x * d.x)).then(Exp {}) * FRAC_2_SQRT_PI),
        "f32", "[0, 1, inf]" => "[0, 0.8427008, 1]" : "f32";
    /// x (1 + erf(x / sqrt 2)) / 2, with the exact error function.
    Gelu("gelu")(x) floats(|x| gelu(x[0])).ulps(1.5, 24.0)
        .slope(|d| d.g * gelu_slope(d.x)),
        "f32", "[0, 1, -1]" => "[0, 0.8413448, -0.15865526]" : "f32";
    /// x * sigmoid(x).
    Silu("silu")(x) floats(|x| silu(x[0])).ulps(1.5, 6.0)
        .slope(|d| d.g * silu_slope(d.x)),
        "f32", "[0, 1, -1]" => "[0, 0.7310586, -0.26894143]" : "f32";
    /// log(1 + exp(x)): above 0 it tends to x, and below to exp(x).
    Softplus("softplus")(x) floats(|x| if x[0] > 700.0 { x[0] } else { x[0].exp().ln_1p() }).ulps(1.5, 4.0)
        .slope(|d| d.g * d.x.then(Sigmoid {})),
        "f32", "[0, 1, -20]" => "[0.693147182, 1.31326163, 2.06115369e-09]" : "f32";
    /// The larger of x and 0; NaN stays.
    Relu("relu")(x) numbers(|x| maximum(x[0], 0.0), |x| x[0].max(0))
        .slope(|d| d.x.compare(Gt {}, d.x.fill(0.0)).select(d.g, d.g.fill(0.0))),
        "f32", "[1, -2, nan]" => "[1, 0, nan]" : "f32";
    /// -1, 0 or 1, as x is below, at or above 0; NaN stays, and so does the sign of zero.
    Sign("sign")(x) numbers(|x| sign(x[0]), |x| x[0].signum())
        .flat(),
        "f32", "[-3, -0, nan]" => "[-1, -0, nan]" : "f32";
    /// One over x.
    Recip("recip")(x) floats(|x| 1.0 / x[0])
        .slope(|d| -(d.g * d.z * d.z)),
        "f32", "[2, -4, 0]" => "[0.5, -0.25, inf]" : "f32";
    /// The sine.
    Sin("sin")(x) floats(|x| x[0].sin()).ulps(1.5, 1.0)
        .slope(|d| d.g * d.x.then(Cos {})),
        "f32", "[0, 1, 2]" => "[0, 0.8414709848, 0.9092974268]" : "f32";
    /// The cosine.
    Cos("cos")(x) floats(|x| x[0].cos()).ulps(1.5, 1.0)
        .slope(|d| -(d.g * d.x.then(Sin {}))),
        "f32", "[0, 1, 2]" => "[1, 0.5403023059, -0.4161468365]" : "f32";
    /// 2 to the power of x.
    Exp2("exp2")(x) floats(|x| x[0].exp2()).ulps(1.5, 1.0)
        .slope(|d| d.g * d.z * LN_2),
        "f32", "[0, 3, -1]" => "[1, 8, 0.5]" : "f32";
    /// exp(x) - 1, exact near 0 too.
    Expm1("expm1")(x) floats(|x| x[0].exp_m1()).ulps(1.5, 2.0)
        .slope(|d| d.g * (d.z + 1.0)),
        "f32", "[1e-20, 1, -inf]" => "[1e-20, 1.718281828, -1]" : "f32";
    /// The logarithm to the base 2.
    Log2("log2")(x) floats(|x| x[0].log2()).ulps(1.5, 2.0)
        .slope(|d| d.g / (d.x * LN_2)),
        "f32", "[1, 8, 0.5]" => "[0, 3, -1]" : "f32";
    /// log(1 + x), exact near 0 too.
    Log1p("log1p")(x) floats(|x| x[0].ln_1p()).ulps(1.5, 2.0)
        .slope(|d| d.g / (d.x + 1.0)),
        "f32", "[1e-20, 1, -1]" => "[1e-20, 0.6931471806, -inf]" : "f32";
    /// The largest integer that is not above x.
    Floor("floor")(x) floats(|x| x[0].floor())
        .flat(),
        "f32", "[1.5, -1.5, -0]" => "[1, -2, -0]" : "f32";
    /// The smallest integer that is not below x.
    Ceil("ceil")(x) floats(|x| x[0].ceil())
        .flat(),
        "f32", "[1.5, -1.5, -0.5]" => "[2, -1, -0]" : "f32";
    /// The nearest integer; halfway between two, the even one.
    Round("round")(x) floats(|x| x[0].round_ties_even())
        .flat(),
        "f32", "[0.5, 1.5, -2.5]" => "[0, 2, -2]" : "f32";
    /// Whether x is NaN.
    IsNan("is_nan")(x) question(|x| x[0].is_nan()), "f32", "[1, nan, inf]" => "[false, true, false]" : "bool";
    /// Whether x is neither infinite nor NaN.
    IsFinite("is_finite")(x) question(|x| x[0].is_finite()), "f32", "[1, nan, inf]" => "[true, false, false]" : "bool";
}

elementwise! {
    compare:
    /// Whether x = y; NaN equals nothing.
    Eq("eq")(x, y) comparison(|x| x[0] == x[1], |x| i64::from(x[0] == x[1])),
        "f32", "[1, 2, nan]", "[1, 3, nan]" => "[true, false, false]" : "bool";
    /// Whether x differs from y; NaN differs from everything.
    Ne("ne")(x, y) comparison(|x| x[0] != x[1], |x| i64::from(x[0] != x[1])),
        "f32", "[1, 2, nan]", "[1, 3, nan]" => "[false, true, true]" : "bool";
    /// Whether x < y.
    Lt("lt")(x, y) comparison(|x| x[0] < x[1], |x| i64::from(x[0] < x[1])),
        "i64", "[1, 2, 3]", "[1, 3, 2]" => "[false, true, false]" : "bool";
    /// Whether x <= y.
    Le("le")(x, y) comparison(|x| x[0] <= x[1], |x| i64::from(x[0] <= x[1])),
        "i64", "[1, 2, 3]", "[1, 3, 2]" => "[true, true, false]" : "bool";
    /// Whether x > y.
    Gt("gt")(x, y) comparison(|x| x[0] > x[1], |x| i64::from(x[0] > x[1])),
        "i64", "[1, 2, 3]", "[1, 3, 2]" => "[false, false, true]" : "bool";
    /// Whether x >= y.
    Ge("ge")(x, y) comparison(|x| x[0] >= x[1], |x| i64::from(x[0] >= x[1])),
        "i64", "[1, 2, 3]", "[1, 3, 2]" => "[true, false, true]" : "bool";
}

elementwise! {
    binary:
    /// Bitwise and; of truth values, both.
    And("and")(x, y) logic(|x| x[0] & x[1]), "bool", "[true, true, false]", "[true, false, false]" => "[true, false, false]" : "bool";
    /// Bitwise or; of truth values, either.
    Or("or")(x, y) logic(|x| x[0] | x[1]), "i32", "[12, 5, 0]", "[10, 2, 0]" => "[14, 7, 0]" : "i32";
    /// Bitwise exclusive or; of truth values, exactly one.
    Xor("xor")(x, y) logic(|x| x[0] ^ x[1]), "i32", "[12, 5, 0]", "[10, 2, 0]" => "[6, 7, 0]" : "i32";
}

op! {
    /// The logical complement of truth values, the bitwise complement of integers.
    ///
    /// (C1) The element type is bool or an integer type.
    pub struct Not("not")(x) {}
    example "mesh ()\n\nfunc @f(v0: bool[2]) -> bool[2] {\n    v1 = not v0 : bool[2]\n    return v1\n}\n; run: @f([true, false]) == [false, true]\n"
}

impl OpDef for Not {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        infer(&logic(|x| x[0]), cx)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn alias(&self) -> Alias {
        Alias::Reuse
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let flip: fn(&[i64]) -> i64 = if args[0].dtype == Dtype::Bool { |x| 1 - x[0] } else { |x| !x[0] };
        Ok(eval(&logic(flip), args))
    }
}

op! {
    /// x where the condition is true, y where it is false.
    ///
    /// (C1) The condition is of type bool.
    ///
    /// (C2) x and y have one element type.
    ///
    /// (C3) All three have one shape.
    pub struct Select("select")(condition, x, y) {}
    example "mesh ()\n\nfunc @f(v0: bool[2], v1: f32[2], v2: f32[2]) -> f32[2] {\n    v3 = select v0, v1, v2 : f32[2]\n    return v3\n}\n; run: @f([true, false], [1, 2], [10, 20]) == [1, 20]\n"
}

impl OpDef for Select {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (condition, x, y) = (cx.tensor(0)?, cx.tensor(1)?, cx.tensor(2)?);
        if condition.dtype != Dtype::Bool {
            return Err(Failure::rule("C1", ("a condition of type bool", condition.dtype.to_string())));
        }
        if x.dtype != y.dtype {
            let message = ("operands of one element type", format!("{} and {}", x.dtype, y.dtype));
            return Err(Failure::rule("C2", message).note("convert one with `cast`"));
        }
        same_shape(cx, "C3", x, condition)?;
        same_shape(cx, "C3", x, y)?;
        Ok(vec![x.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn alias(&self) -> Alias {
        Alias::Reuse
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let mut out = args[2].clone();
        if let Data::Int(condition) = &args[0].data {
            for (i, _) in condition.iter().enumerate().filter(|(_, c)| **c != 0) {
                out.set(i, args[1], i);
            }
        }
        Ok(vec![out])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let g = cx.cotangent(0);
        cx.each(|i| {
            let zero = g.fill(0.0);
            Some(if i == 1 { cx.arg(0).select(g, zero) } else { cx.arg(0).select(zero, g) })
        })
    }
}

op! {
    /// Converts to another element type. Floats become integers towards zero, saturating at the ends of
    /// the range, NaN as 0; wider integers wrap; numbers become truth values by whether they differ from 0.
    pub struct Cast("cast")(x) {
        /// The element type of the result.
        to: Dtype
    }
    example "mesh ()\n\nfunc @f(v0: f32[4]) -> u8[4] {\n    v1 = cast[to=u8] v0 : u8[4]\n    return v1\n}\n; run: @f([1.9, -3, 300, nan]) == [1, 0, 255, 0]\n"
}

impl OpDef for Cast {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![cx.tensor(0)?.with_dtype(self.to).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn alias(&self) -> Alias {
        Alias::Reuse
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let shape = args[0].shape.clone();
        let (low, high) = self.to.int_range();
        Ok(vec![match (&args[0].data, self.to) {
            (Data::Float(data), to) if to.is_float() => Literal::floats(to, shape, data.clone()),
            (Data::Float(data), Dtype::Bool) => {
                Literal::ints(Dtype::Bool, shape, data.iter().map(|x| i64::from(*x != 0.0)).collect())
            }
            (Data::Float(data), to) => {
                Literal::ints(to, shape, data.iter().map(|x| (*x as i64).clamp(low, high)).collect())
            }
            (Data::Int(data), Dtype::F64) => {
                Literal::floats(Dtype::F64, shape, data.iter().map(|x| *x as f64).collect())
            }
            (Data::Int(data), to) if to.is_float() => {
                Literal::floats(to, shape, data.iter().map(|x| to_odd_f64(*x)).collect())
            }
            (Data::Int(data), to) => Literal::ints(to, shape, data.clone()),
        }])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        Ok(vec![Some(cx.cotangent(0).cast(cx.arg_ty(0).dtype))])
    }
}

/// `x` if it is an `f64`, else its neighbour whose last bit is 1 (round to odd), so that rounding once more to a
/// narrower type gives the same as rounding `x` directly.
fn to_odd_f64(x: i64) -> f64 {
    let near = x as f64;
    let (exact, wide) = (i128::from(x), near as i128);
    if exact == wide || near.to_bits() & 1 == 1 {
        return near;
    }
    f64::from_bits(if wide.abs() > exact.abs() { near.to_bits() - 1 } else { near.to_bits() + 1 })
}

/// A count of operations as a size expression.
pub(crate) fn times(n: i64, numel: &Index) -> Index {
    &Index::from(n) * numel
}
