//! Ops that create tensors from their attributes alone.

use std::fmt::Write;

use consort_types::{Axes, Dtype, Failure};

use crate::index::Index;
use crate::literal::{Literal, unravel};
use crate::mesh::Mesh;
use crate::op;
use crate::ops::attr::write_float;
use crate::ops::{Attr, Cost, CostCx, EvalCx, EvalError, InferCx, OpDef};
use crate::text::{Cursor, ParseError};
use crate::types::{TensorType, Type};

/// The elements of a constant: one for all positions, or one for each in row-major order.
#[derive(Clone, Debug)]
pub enum Elements {
    /// The same float everywhere.
    Float(f64),
    /// The same integer (or truth value) everywhere.
    Int(i64),
    /// A float for each position.
    Floats(Vec<f64>),
    /// An integer (or truth value) for each position.
    Ints(Vec<i64>),
}

impl PartialEq for Elements {
    fn eq(&self, other: &Elements) -> bool {
        let bits = |list: &[f64]| list.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        match (self, other) {
            (Elements::Float(a), Elements::Float(b)) => a.to_bits() == b.to_bits(),
            (Elements::Int(a), Elements::Int(b)) => a == b,
            (Elements::Floats(a), Elements::Floats(b)) => bits(a) == bits(b),
            (Elements::Ints(a), Elements::Ints(b)) => a == b,
            _ => false,
        }
    }
}

impl Elements {
    fn ints(&self) -> &[i64] {
        match self {
            Elements::Int(one) => std::slice::from_ref(one),
            Elements::Ints(list) => list,
            _ => &[],
        }
    }

    fn is_float(&self) -> bool {
        matches!(self, Elements::Float(_) | Elements::Floats(_))
    }
}

impl Attr for Elements {
    const KIND: &'static str = "float or integer, or a list of them";
    fn write(&self, out: &mut String, _mesh: &Mesh) {
        match self {
            Elements::Float(x) => write_float(out, *x),
            Elements::Int(x) => drop(write!(out, "{x}")),
            Elements::Floats(list) => {
                for (i, x) in list.iter().enumerate() {
                    out.push_str(if i == 0 { "[" } else { ", " });
                    write_float(out, *x);
                }
                out.push(']');
            }
            Elements::Ints(list) if list.is_empty() => out.push_str("[]"),
            Elements::Ints(list) => {
                for (i, x) in list.iter().enumerate() {
                    let _ = write!(out, "{}{x}", if i == 0 { "[" } else { ", " });
                }
                out.push(']');
            }
        }
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Elements, ParseError> {
        if !cursor.eat("[") {
            return match Number::read(cursor)? {
                Number::Float(x) => Ok(Elements::Float(x)),
                Number::Int(x) => Ok(Elements::Int(x)),
            };
        }
        let numbers = cursor.list("]", Number::read)?;
        let ints: Option<Vec<i64>> =
            numbers.iter().map(|n| if let Number::Int(x) = n { Some(*x) } else { None }).collect();
        match ints {
            Some(ints) => Ok(Elements::Ints(ints)),
            None if numbers.iter().all(|n| matches!(n, Number::Float(_))) => Ok(Elements::Floats(
                numbers.into_iter().map(|n| if let Number::Float(x) = n { x } else { 0.0 }).collect(),
            )),
            None => Err(cursor.error(("all floats (1.0) or all integers (1)", "both"))),
        }
    }
}

enum Number {
    Float(f64),
    Int(i64),
}

impl Number {
    fn read(cursor: &mut Cursor<'_>) -> Result<Number, ParseError> {
        match cursor.peek() {
            "true" | "false" => Ok(Number::Int(i64::from(cursor.next_token() == "true"))),
            _ if cursor.at_integer() => Ok(Number::Int(cursor.integer()?)),
            _ => Ok(Number::Float(cursor.float()?)),
        }
    }
}

op! {
    /// A tensor of given elements: one for all places, or one for each in row-major order. Floats are
    /// rounded to the element type.
    ///
    /// (C1) Elements of a float type are written as floats (`1.0`), of other types as integers (`1`; truth
    /// values as 0 and 1).
    ///
    /// (C2) Integers lie in the range of the element type.
    ///
    /// (C3) A list has an element for each place.
    ///
    /// (C4) No size is negative.
    pub struct Constant("constant")() {
        /// The element type.
        dtype: Dtype,
        /// The shape.
        shape: Vec<Index>,
        /// The elements.
        value: Elements
    }
    example "mesh ()\n\nfunc @f() -> (f32[2], i64[2]) {\n    v0 = constant[dtype=f32, shape=[2], value=1.5] : f32[2]\n    v1 = constant[dtype=i64, shape=[2], value=[3, 4]] : i64[2]\n    return v0, v1\n}\n; run: @f() == [1.5, 1.5], [3, 4]\n"
}

impl OpDef for Constant {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        if self.value.is_float() != self.dtype.is_float()
            && !matches!(&self.value, Elements::Ints(list) if list.is_empty())
        {
            let (expected, got) =
                if self.dtype.is_float() { ("floats (1.0)", "integers") } else { ("integers (1)", "floats") };
            return Err(Failure::rule("C1", (format!("{expected} for {}", self.dtype), got.to_string())));
        }
        self.shape.iter().try_for_each(|size| cx.require_size("C4", "a size", size))?;
        let (low, high) = self.dtype.int_range();
        if let Some(x) = self.value.ints().iter().find(|x| !(low..=high).contains(x)) {
            return Err(Failure::rule("C2", (format!("{low}..={high} for {}", self.dtype), x.to_string())));
        }
        let listed = match &self.value {
            Elements::Floats(list) => Some(list.len()),
            Elements::Ints(list) => Some(list.len()),
            _ => None,
        };
        if let Some(n) = listed {
            let expected = Index::product(&self.shape);
            cx.require_eq("C3", &expected, &Index::from(n), |cx| {
                (format!("{} elements", expected.display(cx.mesh)), n.to_string())
            })?;
        }
        Ok(vec![TensorType::new(self.dtype, self.shape.clone(), Axes::NONE).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(Index::constant(0))
    }
    fn eval(&self, cx: &EvalCx<'_>, _args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let shape = cx.shape(&self.shape)?;
        let n = shape.iter().product();
        let tensor = match &self.value {
            _ if n == 0 => Literal::zeros(self.dtype, shape),
            Elements::Float(x) => Literal::floats(self.dtype, shape, vec![*x; n]),
            Elements::Int(x) => Literal::ints(self.dtype, shape, vec![*x; n]),
            Elements::Floats(list) => Literal::floats(self.dtype, shape, list.clone()),
            Elements::Ints(list) => Literal::ints(self.dtype, shape, list.clone()),
        };
        if tensor.numel() == n {
            Ok(vec![tensor])
        } else {
            Err(EvalError::new((format!("{n} elements"), tensor.numel().to_string())))
        }
    }
}

op! {
    /// Each element is its place along a dimension: 0, 1, 2, ..
    ///
    /// (C1) The element type is a float or integer type.
    ///
    /// (C2) The dimension exists.
    ///
    /// (C3) No size is negative.
    pub struct Iota("iota")() {
        /// The element type.
        dtype: Dtype,
        /// The shape.
        shape: Vec<Index>,
        /// Along which dimension.
        dim: usize
    }
    example "mesh ()\n\nfunc @f() -> i64[2,3] {\n    v0 = iota[dtype=i64, shape=[2, 3], dim=1] : i64[2,3]\n    return v0\n}\n; run: @f() == [[0, 1, 2], [0, 1, 2]]\n"
}

impl OpDef for Iota {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        if self.dtype == Dtype::Bool {
            return Err(Failure::rule("C1", ("a float or integer type", "bool")));
        }
        cx.require_dim("C2", self.dim, self.shape.len())?;
        self.shape.iter().try_for_each(|size| cx.require_size("C3", "a size", size))?;
        Ok(vec![TensorType::new(self.dtype, self.shape.clone(), Axes::NONE).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(Index::constant(0))
    }
    fn eval(&self, cx: &EvalCx<'_>, _args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let shape = cx.shape(&self.shape)?;
        let places = (0..shape.iter().product::<usize>()).map(|i| unravel(i, &shape)[self.dim]);
        Ok(vec![if self.dtype.is_float() {
            Literal::floats(self.dtype, shape.clone(), places.map(|i| i as f64).collect())
        } else {
            Literal::ints(self.dtype, shape.clone(), places.map(|i| i as i64).collect())
        }])
    }
}

op! {
    /// A size expression as data: a 0-d `i64`. With `rank(axis)` in it the result differs over that axis.
    pub struct IndexValue("index")() {
        /// The expression.
        value: Index
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[s0]) -> i64[]{tp} {\n    v1 = index[value=s0*rank(tp)+1] : i64[]{tp}\n    return v1\n}\n; run: @f([7, 7, 7]) == 1 | 4\n"
}

impl OpDef for IndexValue {
    fn infer(&self, _cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![TensorType::new(Dtype::I64, vec![], Axes::NONE).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(Index::constant(0))
    }
    fn eval(&self, cx: &EvalCx<'_>, _args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![Literal::size(cx.index(&self.value)?)])
    }
}
