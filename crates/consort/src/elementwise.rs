//! Elementwise ops on tensors: methods, methods in place, operators.
//!
//! A smaller operand is repeated as numpy does: dimensions are aligned at the end, and sizes of one repeat.

use std::panic::Location;

use consort_ir::index::Index;
use consort_ir::ops;
use consort_ir::ops::OpDef;
use consort_types::Dtype;
use smallvec::smallvec;

use crate::apply::{run, run_one};
use crate::error::{Error, Named, Result};
use crate::operand::Operand;
use crate::place::SliceMut;
use crate::tensor::{Tensor, Tensors};

/// The broadcast shape of two operands: sizes are aligned at the end, and sizes of one repeat. Symbolic sizes
/// are assumed to be equal: the op's type rule records that as a guard.
fn joint_shape(a: &[Index], b: &[Index]) -> Option<Vec<Index>> {
    let rank = a.len().max(b.len());
    let one = Index::constant(1);
    let size = |shape: &[Index], i: usize| match (i + shape.len()).checked_sub(rank) {
        Some(i) => shape[i].clone(),
        None => one.clone(),
    };
    let symbol = |x: &Index| x.as_const().is_none();
    (0..rank)
        .map(|i| match (size(a, i), size(b, i)) {
            (x, y) if x == y || y == one => Some(x),
            (x, y) if x == one => Some(y),
            (x, y) if symbol(&x) || symbol(&y) => Some(x),
            _ => None,
        })
        .collect()
}

/// Whether two tensors have equal shapes, without a guard.
fn alike(x: &Tensor, y: &Tensor) -> bool {
    let here = x.traced.is_none() && y.traced.is_none();
    if here { x.layout.shape == y.layout.shape } else { x.ty.shape == y.ty.shape }
}

/// Broadcasts a tensor to a shape, unless its sizes are equal to it, or symbols that may be.
fn widen(x: Tensor, shape: &[Index], site: &'static Location<'static>) -> Result<Tensor> {
    let fits = |(own, size): (&Index, &Index)| {
        own == size || (own.as_const() != Some(1) && (own.as_const().is_none() || size.as_const().is_none()))
    };
    if x.ty.shape.len() == shape.len() && x.ty.shape.iter().zip(shape).all(fits) {
        return Ok(x);
    }
    run_one(&ops::Broadcast { shape: shape.to_vec() }, smallvec![x], site)
}

/// Broadcasts two operands to one shape. If there is none, the op's type rule reports it.
fn widen_both(x: Tensor, y: Tensor, site: &'static Location<'static>) -> Result<(Tensor, Tensor)> {
    match joint_shape(&x.ty.shape, &y.ty.shape) {
        Some(shape) => Ok((widen(x, &shape, site)?, widen(y, &shape, site)?)),
        None => Ok((x, y)),
    }
}

/// An op of this tensor and another operand.
fn binary_with(
    op: &dyn OpDef,
    x: &Tensor,
    y: Operand<'_>,
    site: &'static Location<'static>,
) -> Result<Tensor> {
    match y {
        Operand::Tensor(y) if alike(x, y) => run_one(op, smallvec![x.clone(), y.clone()], site),
        Operand::Tensor(y) => binary(op, x.clone(), y.clone(), site),
        number => {
            let y = number.tensor(x.dtype(), (op.info().name, site))?;
            binary(op, x.clone(), y, site)
        }
    }
}

fn binary(op: &dyn OpDef, x: Tensor, y: Tensor, site: &'static Location<'static>) -> Result<Tensor> {
    if alike(&x, &y) {
        return run_one(op, smallvec![x, y], site);
    }
    let (x, y) = widen_both(x, y, site).named(op.info().name, site)?;
    run_one(op, smallvec![x, y], site)
}

/// Replaces a tensor by the result of an op, of the same shape. The tensor is unchanged if the op fails.
fn in_place(
    x: &mut Tensor,
    op: &dyn OpDef,
    more: Option<Operand<'_>>,
    (method, site): (&str, &'static Location<'static>),
) -> Result<()> {
    let more = more.map(|other| other.tensor(x.dtype(), (method, site))).transpose()?;
    let mut args = Tensors::new();
    args.push(std::mem::replace(x, Tensor::of_shape(Dtype::F32, &[])));
    let outcome = match more {
        None => run(op, &mut args, site),
        Some(y) => {
            let y = if alike(&args[0], &y) { Ok(y) } else { widen(y, &args[0].ty.shape, site) };
            y.and_then(|y| {
                args.push(y);
                run(op, &mut args, site)
            })
        }
    };
    match outcome.map(|mut results| results.pop()) {
        Ok(Some(result)) => {
            *x = result;
            Ok(())
        }
        Ok(None) => Ok(()),
        Err(error) => {
            *x = args.swap_remove(0);
            Err(error).named(method, site)
        }
    }
}

/// Replaces a slice by the result of an op, of the same shape.
fn in_slice(
    slice: SliceMut<'_>,
    op: &dyn OpDef,
    more: Option<Operand<'_>>,
    (method, site): (&str, &'static Location<'static>),
) -> Result<()> {
    let mut part = slice.view();
    in_place(&mut part, op, more, (method, site))?;
    slice.assign(&part, site).named(method, site)
}

macro_rules! unary {
    ($($(#[doc = $doc:expr])* $name:ident $in_place:ident $op:ident,
        $input:literal => $output:literal;)*) => {
        impl Tensor {$(
            $(#[doc = $doc])*
            ///
            /// ```
            /// # fn main() -> consort::Result<()> {
            #[doc = concat!("let x = consort::Tensor::from_iter(", $input, ")?;")]
            #[doc = concat!("assert_eq!(x.", stringify!($name), "()?.to_string(), \"", $output, "\");")]
            /// # Ok(()) }
            /// ```
            #[track_caller]
            pub fn $name(&self) -> Result<Tensor> {
                run_one(&ops::$op {}, smallvec![self.clone()], Location::caller())
            }

            unary!(@in_place $name $in_place $op);
        )*}

        impl SliceMut<'_> {$(unary!(@slice $name $in_place $op);)*}
    };
    (@slice $name:ident none $op:ident) => {};
    (@slice $name:ident $in_place:ident $op:ident) => {
        #[doc = concat!("[`", stringify!($name), "`](Tensor::", stringify!($name), ") of the slice, in place.")]
        #[track_caller]
        pub fn $in_place(self) -> Result<()> {
            in_slice(self, &ops::$op {}, None, (stringify!($in_place), Location::caller()))
        }
    };
    (@in_place $name:ident none $op:ident) => {};
    (@in_place $name:ident $in_place:ident $op:ident) => {
        #[doc = concat!("[`", stringify!($name), "`](Tensor::", stringify!($name), ") in place.")]
        #[track_caller]
        pub fn $in_place(&mut self) -> Result<()> {
            in_place(self, &ops::$op {}, None, (stringify!($in_place), Location::caller()))
        }
    };
}

macro_rules! binary {
    ($($(#[doc = $doc:expr])* $name:ident $in_place:ident $op:ident,
        $x:literal, $y:literal => $output:literal;)*) => {
        impl Tensor {$(
            $(#[doc = $doc])*
            ///
            /// ```
            /// # fn main() -> consort::Result<()> {
            #[doc = concat!("let x = consort::Tensor::from_iter(", $x, ")?;")]
            #[doc = concat!("let y = consort::Tensor::from_iter(", $y, ")?;")]
            #[doc = concat!("assert_eq!(x.", stringify!($name), "(&y)?.to_string(), \"", $output, "\");")]
            /// # Ok(()) }
            /// ```
            #[track_caller]
            pub fn $name<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Tensor> {
                binary_with(&ops::$op {}, self, other.into(), Location::caller())
            }

            binary!(@in_place $name $in_place $op);
        )*}

        impl SliceMut<'_> {$(binary!(@slice $name $in_place $op);)*}
    };
    (@slice $name:ident none $op:ident) => {};
    (@slice $name:ident $in_place:ident $op:ident) => {
        #[doc = concat!("[`", stringify!($name), "`](Tensor::", stringify!($name), ") of the slice, in place.")]
        #[track_caller]
        pub fn $in_place<'a>(self, other: impl Into<Operand<'a>>) -> Result<()> {
            in_slice(self, &ops::$op {}, Some(other.into()), (stringify!($in_place), Location::caller()))
        }
    };
    (@in_place $name:ident none $op:ident) => {};
    (@in_place $name:ident $in_place:ident $op:ident) => {
        #[doc = concat!("[`", stringify!($name), "`](Tensor::", stringify!($name), ") in place; the other is repeated to this one's shape.")]
        #[track_caller]
        pub fn $in_place<'a>(&mut self, other: impl Into<Operand<'a>>) -> Result<()> {
            in_place(self, &ops::$op {}, Some(other.into()), (stringify!($in_place), Location::caller()))
        }
    };
}

unary! {
    /// The negative.
    neg neg_ Neg, "[1.0f32, -2.0]" => "[-1.  2.]";
    /// The absolute value.
    abs abs_ Abs, "[1i32, -2]" => "[1 2]";
    /// -1, 0 or 1 by the sign; NaN and zeros of either sign stay.
    sign sign_ Sign, "[3.5f32, -2.0, 0.0]" => "[ 1. -1.  0.]";
    /// e to the power of each.
    exp exp_ Exp, "[0.0f32, f32::NEG_INFINITY]" => "[1. 0.]";
    /// 2 to the power of each.
    exp2 exp2_ Exp2, "[0.0f32, 3.0]" => "[1. 8.]";
    /// e to the power of each, less one; exact near zero.
    expm1 expm1_ Expm1, "[0.0f64, 1e-20]" => "[0.e+00 1.e-20]";
    /// The natural logarithm.
    log log_ Log, "[1.0f32, 0.0]" => "[  0. -inf]";
    /// The logarithm to base 2.
    log2 log2_ Log2, "[1.0f32, 8.0]" => "[0. 3.]";
    /// The natural logarithm of one more; exact near zero.
    log1p log1p_ Log1p, "[0.0f64, 1e-20]" => "[0.e+00 1.e-20]";
    /// The square root.
    sqrt sqrt_ Sqrt, "[4.0f32, 9.0]" => "[2. 3.]";
    /// One over the square root.
    rsqrt rsqrt_ Rsqrt, "[4.0f32, 0.25]" => "[0.5 2. ]";
    /// One over each.
    recip recip_ Recip, "[4.0f32, 0.5]" => "[0.25 2.  ]";
    /// The sine.
    sin sin_ Sin, "[0.0f32]" => "[0.]";
    /// The cosine.
    cos cos_ Cos, "[0.0f32]" => "[1.]";
    /// The hyperbolic tangent.
    tanh tanh_ Tanh, "[0.0f32, f32::INFINITY]" => "[0. 1.]";
    /// 1 / (1 + exp(-x)).
    sigmoid sigmoid_ Sigmoid, "[0.0f32, f32::INFINITY]" => "[0.5 1. ]";
    /// The error function.
    erf erf_ Erf, "[0.0f32, f32::INFINITY]" => "[0. 1.]";
    /// x (1 + erf(x / sqrt 2)) / 2, with the exact error function.
    gelu gelu_ Gelu, "[0.0f32, 100.0]" => "[  0. 100.]";
    /// x * sigmoid(x).
    silu silu_ Silu, "[0.0f32, 100.0]" => "[  0. 100.]";
    /// log(1 + exp(x)): above 0 it tends to x, and below to exp(x).
    softplus softplus_ Softplus, "[0.0f32, 100.0]" => "[  0.6931472 100.       ]";
    /// The larger of x and 0.
    relu relu_ Relu, "[1.0f32, -2.0]" => "[1. 0.]";
    /// The largest whole number that is not larger.
    floor floor_ Floor, "[1.5f32, -1.5]" => "[ 1. -2.]";
    /// The smallest whole number that is not smaller.
    ceil ceil_ Ceil, "[1.5f32, -1.5]" => "[ 2. -1.]";
    /// The nearest whole number; of two, the even one.
    round round_ Round, "[1.5f32, 2.5]" => "[2. 2.]";
    /// The logical complement of truth values, the bitwise complement of integers.
    not not_ Not, "[true, false]" => "[False  True]";
    /// Whether each element is NaN.
    is_nan none IsNan, "[1.0f32, f32::NAN]" => "[False  True]";
    /// Whether each is neither infinite nor NaN.
    is_finite none IsFinite, "[1.0f32, f32::INFINITY]" => "[ True False]";
}

binary! {
    /// The sum.
    add add_ Add, "[1.0f32, 2.0]", "[10.0f32, 20.0]" => "[11. 22.]";
    /// The difference.
    sub sub_ Sub, "[1.0f32, 2.0]", "[10.0f32]" => "[-9. -8.]";
    /// The product.
    mul mul_ Mul, "[1.0f32, 2.0]", "[10.0f32, 20.0]" => "[10. 40.]";
    /// The quotient; of integers, rounded towards zero, and 0 where the divisor is 0.
    div div_ Div, "[7i32, -7, 7]", "[2i32, 2, 0]" => "[ 3 -3  0]";
    /// The remainder, with the sign of the dividend; of integers, 0 where the divisor is 0.
    rem rem_ Rem, "[7i32, -7, 7]", "[4i32, 4, 0]" => "[ 3 -3  0]";
    /// The power.
    pow pow_ Pow, "[2.0f32, 3.0]", "[3.0f32, 2.0]" => "[8. 9.]";
    /// The angle of the point (other, self), in radians.
    atan2 atan2_ Atan2, "[0.0f32]", "[1.0f32]" => "[0.]";
    /// The larger of two; NaN where either is.
    maximum maximum_ Maximum, "[1.0f32, 5.0]", "[2.0f32, 3.0]" => "[2. 5.]";
    /// The smaller of two; NaN where either is.
    minimum minimum_ Minimum, "[1.0f32, 5.0]", "[2.0f32, 3.0]" => "[1. 3.]";
    /// Bitwise and; of truth values, both.
    and and_ And, "[12i32, 5]", "[10i32, 3]" => "[8 1]";
    /// Bitwise or; of truth values, either.
    or or_ Or, "[12i32, 5]", "[10i32, 3]" => "[14  7]";
    /// Bitwise exclusive or; of truth values, exactly one.
    xor xor_ Xor, "[12i32, 5]", "[10i32, 3]" => "[6 6]";
    /// Whether both are equal; NaN equals nothing.
    eq none Eq, "[1i64, 2]", "[1i64, 3]" => "[ True False]";
    /// Whether both differ.
    ne none Ne, "[1i64, 2]", "[1i64, 3]" => "[False  True]";
    /// Whether this is smaller.
    lt none Lt, "[1i64, 2]", "[1i64, 3]" => "[False  True]";
    /// Whether this is not larger.
    le none Le, "[1i64, 4]", "[1i64, 3]" => "[ True False]";
    /// Whether this is larger.
    gt none Gt, "[1i64, 4]", "[1i64, 3]" => "[False  True]";
    /// Whether this is not smaller.
    ge none Ge, "[1i64, 2]", "[1i64, 3]" => "[ True False]";
}

impl Tensor {
    /// `yes` where this is true, `no` where it is false; one of them may be a number.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1.0f32, -2.0])?;
    /// assert_eq!(x.gt(0.0)?.select(&x, 0.5)?.to_string(), "[1.  0.5]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn select<'a, 'b>(&self, yes: impl Into<Operand<'a>>, no: impl Into<Operand<'b>>) -> Result<Tensor> {
        let (yes, no, site) = (yes.into(), no.into(), Location::caller());
        let none = || Error::new("select", ("a tensor to select from", "two numbers"), site);
        let dtype = yes.dtype().or(no.dtype()).ok_or_else(none)?;
        let (yes, no) = (yes.tensor(dtype, ("select", site))?, no.tensor(dtype, ("select", site))?);
        let shape =
            joint_shape(&yes.ty.shape, &no.ty.shape).and_then(|shape| joint_shape(&shape, &self.ty.shape));
        let Some(shape) = shape else {
            return run_one(&ops::Select {}, smallvec![self.clone(), yes, no], site);
        };
        let args = [self.clone(), yes, no].into_iter().map(|x| widen(x, &shape, site));
        args.collect::<Result<_>>()
            .and_then(|args| run_one(&ops::Select {}, args, site))
            .named("select", site)
    }

    /// Converted to another element type: to integers towards zero and bounded, to truth values by whether it is not
    /// zero.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([1.9f32, -1.9])?;
    /// assert_eq!(x.cast(consort::Dtype::I32)?.to_string(), "[ 1 -1]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn cast(&self, to: Dtype) -> Result<Tensor> {
        if self.dtype() == to {
            return Ok(self.clone());
        }
        run_one(&ops::Cast { to }, smallvec![self.clone()], Location::caller())
    }

    /// Not below `low` and not above `high`.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let x = consort::Tensor::from_iter([-5.0f32, 0.5, 5.0])?;
    /// assert_eq!(x.clamp(0.0, 1.0)?.to_string(), "[0.  0.5 1. ]");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn clamp<'a, 'b>(&self, low: impl Into<Operand<'a>>, high: impl Into<Operand<'b>>) -> Result<Tensor> {
        let (dtype, site) = (self.dtype(), Location::caller());
        let (low, high) =
            (low.into().tensor(dtype, ("clamp", site))?, high.into().tensor(dtype, ("clamp", site))?);
        let x = binary(&ops::Maximum {}, self.clone(), low, site).named("clamp", site)?;
        binary(&ops::Minimum {}, x, high, site).named("clamp", site)
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident),*) => {$(
        operators!(@pair $trait $method $op, Tensor, Tensor);
        operators!(@pair $trait $method $op, Tensor, &Tensor);
        operators!(@pair $trait $method $op, &Tensor, Tensor);
        operators!(@pair $trait $method $op, &Tensor, &Tensor);
        operators!(@number $trait $method $op, Tensor);
        operators!(@number $trait $method $op, &Tensor);
    )*};
    (@pair $trait:ident $method:ident $op:ident, $x:ty, $y:ty) => {
        impl std::ops::$trait<$y> for $x {
            type Output = Result<Tensor>;
            #[track_caller]
            fn $method(self, other: $y) -> Result<Tensor> {
                binary(&ops::$op {}, self.into(), other.into(), Location::caller())
            }
        }
    };
    (@number $trait:ident $method:ident $op:ident, $x:ty) => {
        impl std::ops::$trait<f64> for $x {
            type Output = Result<Tensor>;
            #[track_caller]
            fn $method(self, other: f64) -> Result<Tensor> {
                let (x, site) = (Tensor::from(self), Location::caller());
                let y = Operand::from(other).tensor(x.dtype(), (stringify!($method), site))?;
                binary(&ops::$op {}, x, y, site)
            }
        }
    };
}

operators!(Add add Add, Sub sub Sub, Mul mul Mul, Div div Div, Rem rem Rem);

impl std::ops::Neg for Tensor {
    type Output = Result<Tensor>;
    #[track_caller]
    fn neg(self) -> Result<Tensor> {
        run_one(&ops::Neg {}, smallvec![self], Location::caller())
    }
}

impl std::ops::Neg for &Tensor {
    type Output = Result<Tensor>;
    #[track_caller]
    fn neg(self) -> Result<Tensor> {
        Tensor::neg(self)
    }
}

impl From<&Tensor> for Tensor {
    fn from(tensor: &Tensor) -> Tensor {
        tensor.clone()
    }
}
