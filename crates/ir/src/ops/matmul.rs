//! Matrix products, batched.

use consort_types::{Dtype, Failure};

use crate::index::Index;
use crate::literal::{Data, Literal};
use crate::op;
use crate::ops::exact::Exact;
use crate::ops::{Cost, CostCx, Cotangents, EvalCx, EvalError, InferCx, OpDef, Term, VjpCx};
use crate::tolerance::Tolerance;
use crate::types::Type;

op! {
    /// The product of matrices in the last two dimensions, for every entry of the dimensions before them.
    /// A 2-d y serves every matrix of x.
    ///
    /// (C1) Both operands have one element type, a float or integer type.
    ///
    /// (C2) Both operands have at least two dimensions.
    ///
    /// (C3) The last size of x equals the second to last of y.
    ///
    /// (C4) y has two dimensions, or the leading dimensions of x.
    pub struct Matmul("matmul")(x, y) {}
    example "mesh ()\n\nfunc @f(v0: f32[2,2], v1: f32[2,1]) -> f32[2,1] {\n    v2 = matmul v0, v1 : f32[2,1]\n    return v2\n}\n; run: @f([[1, 2], [3, 4]], [[10], [1]]) == [[12], [34]]\n"
}

impl OpDef for Matmul {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, y) = (cx.tensor(0)?, cx.tensor(1)?);
        if x.dtype != y.dtype || x.dtype == Dtype::Bool {
            let message = ("operands of one float or integer type", format!("{} and {}", x.dtype, y.dtype));
            return Err(Failure::rule("C1", message));
        }
        let (Some((xs, [m, k])), Some((ys, [k2, n]))) =
            (x.shape.split_last_chunk::<2>(), y.shape.split_last_chunk::<2>())
        else {
            let (x, y) = (cx.shape_text(&x.shape), cx.shape_text(&y.shape));
            return Err(Failure::rule("C2", ("operands of at least 2 dimensions", format!("{x} and {y}"))));
        };
        cx.require_eq("C3", k, k2, |cx| {
            let (x, y) = (cx.shape_text(&x.shape), cx.shape_text(&y.shape));
            ("the last size of x to equal the second to last of y", format!("{x} and {y}"))
        })?;
        if !ys.is_empty() {
            cx.require_same_shape("C4", "leading dimensions of y", xs, ys)?;
        }
        Ok(vec![x.with_shape([xs, &[m.clone(), n.clone()]].concat()).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        let k = match cx.args.first() {
            Some(Type::Tensor(x)) => x.shape.last().cloned().unwrap_or(Index::constant(1)),
            _ => Index::constant(1),
        };
        cx.kernel(&(&Index::constant(2) * &k) * &cx.result_numel())
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::PRODUCT
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (x, y) = (args[0], args[1]);
        let rank = x.shape.len();
        let (m, k, n) = (x.shape[rank - 2], x.shape[rank - 1], y.shape[y.shape.len() - 1]);
        let mut shape = x.shape.clone();
        shape[rank - 1] = n;
        // Without columns there may be any number of rows.
        let batch = if n == 0 { 0 } else { shape[..rank - 2].iter().product::<usize>() };
        let y_step = if y.shape.len() == 2 { 0 } else { k * n };
        let places = (0..batch).flat_map(|b| (0..m).flat_map(move |i| (0..n).map(move |j| (b, i, j))));
        let x_at = |b: usize, i: usize, l: usize| (b * m + i) * k + l;
        let y_at = |b: usize, l: usize, j: usize| b * y_step + l * n + j;
        Ok(vec![match (&x.data, &y.data) {
            (Data::Float(xs), Data::Float(ys)) => {
                let dot = |(b, i, j)| {
                    let term = |l| (xs[x_at(b, i, l)], ys[y_at(b, l, j)]);
                    (0..k).map(term).fold(Exact::ZERO, |sum, (x, y)| sum.plus_product(x, y)).value()
                };
                Literal::floats(x.dtype, shape, places.map(dot).collect())
            }
            (Data::Int(xs), Data::Int(ys)) => {
                let dot = |(b, i, j)| {
                    (0..k)
                        .fold(0i64, |a, l| a.wrapping_add(xs[x_at(b, i, l)].wrapping_mul(ys[y_at(b, l, j)])))
                };
                Literal::ints(x.dtype, shape, places.map(dot).collect())
            }
            _ => return Err(EvalError::new("operands of two kinds")),
        }])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let (x, y, g) = (cx.arg(0), cx.arg(1), cx.cotangent(0));
        let (xs, ys, gs) = (x.ty().shape, y.ty().shape, cx.result_ty(0).shape);
        // A y that serves every matrix of x gets the sum over them: one product of all rows.
        let rows = |x: Term<'c, 'm>, shape: &[Index]| match shape.split_last() {
            Some((last, rows)) if ys.len() < shape.len() => x.reshape(&[Index::product(rows), last.clone()]),
            _ => x,
        };
        cx.each(|i| {
            Some(match i {
                0 => cx.op(Matmul {}, &[g, y.transpose()]),
                _ => cx.op(Matmul {}, &[rows(x, &xs).transpose(), rows(g, &gs)]),
            })
        })
    }
}
