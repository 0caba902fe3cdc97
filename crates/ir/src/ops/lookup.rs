//! Reading and adding at places that a tensor names: gather (embedding is one) and scatter-add.

use crate::dtype::Dtype;
use crate::op;
use crate::ops::{Alias, Cost, CostCx, EvalCx, EvalError, InferCx, OpDef, Violation};
use crate::tensor::{Data, Tensor, ravel, unravel};
use crate::types::{TensorType, Type};

fn check(cx: &InferCx<'_>, x: &TensorType, places: &TensorType, dim: usize) -> Result<(), Violation> {
    if !matches!(places.dtype, Dtype::I32 | Dtype::I64) {
        return Err(Violation::new(
            "C1",
            format!("expected places of type i32 or i64, got {}", places.dtype),
        ));
    }
    cx.require_dim("C2", dim, x.rank())
}

/// `x`'s shape with a dimension replaced by the shape of the places.
fn spread<T: Clone>(x: &[T], dim: usize, places: &[T]) -> Vec<T> {
    [&x[..dim], places, &x[dim + 1..]].concat()
}

/// The entries along a dimension that the places name, each checked.
fn places(places: &Tensor, size: usize) -> Result<Vec<usize>, EvalError> {
    let Data::Int(list) = &places.data else { return Err(EvalError("places are not integers".into())) };
    let check = |place: &i64| match usize::try_from(*place) {
        Ok(at) if at < size => Ok(at),
        _ => Err(EvalError(format!("expected places in 0..{size}, got {place}"))),
    };
    list.iter().map(check).collect()
}

op! {
    /// The entries of x along a dimension at these places. With `dim=0` on a table this is an embedding.
    /// A place outside x is an error.
    ///
    /// (C1) The places are of type i32 or i64.
    ///
    /// (C2) The dimension exists.
    pub struct Gather("gather")(x, places) {
        /// The dimension that the places index; the result has their shape there.
        dim: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[3,2], v1: i64[2]) -> f32[2,2] {\n    v2 = gather[dim=0] v0, v1 : f32[2,2]\n    return v2\n}\n; run: @f([[1, 2], [3, 4], [5, 6]], [2, 0]) == [[5, 6], [1, 2]]\n"
}

impl OpDef for Gather {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Violation> {
        let (x, places) = (cx.tensor(0)?, cx.tensor(1)?);
        check(cx, x, places, self.dim)?;
        Ok(vec![x.with_shape(spread(&x.shape, self.dim, &places.shape)).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        // Only the entries named are read, not the whole of x.
        let bytes = &cx.result_bytes() + &cx.result_bytes();
        Cost { bytes, ..cx.free() }
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Tensor]) -> Result<Vec<Tensor>, EvalError> {
        let (x, named) = (args[0], places(args[1], args[0].shape[self.dim])?);
        let shape = spread(&x.shape, self.dim, &args[1].shape);
        let (out_shape, depth) = (shape.clone(), args[1].shape.len());
        Ok(vec![x.pick(shape, |i| {
            let at = unravel(i, &out_shape);
            let place = named[ravel(&at[self.dim..self.dim + depth], &args[1].shape)];
            ravel(&[&at[..self.dim], &[place], &at[self.dim + depth..]].concat(), &x.shape)
        })])
    }
}

op! {
    /// x with the updates added along a dimension at these places, in the order of the updates. This is
    /// how gradients flow back through `gather`. A place outside x is an error.
    ///
    /// (C1) The places are of type i32 or i64.
    ///
    /// (C2) The dimension exists.
    ///
    /// (C3) The updates have x's element type, a float or integer type.
    ///
    /// (C4) The updates have the shape that `gather` of x at these places has.
    pub struct ScatterAdd("scatter_add")(x, places, updates) {
        /// The dimension that the places index.
        dim: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[3], v1: i64[3], v2: f32[3]) -> f32[3] {\n    v3 = scatter_add[dim=0] v0, v1, v2 : f32[3]\n    return v3\n}\n; run: @f([0, 0, 100], [1, 2, 1], [1, 2, 3]) == [0, 4, 102]\n"
}

impl OpDef for ScatterAdd {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Violation> {
        let (x, places, updates) = (cx.tensor(0)?, cx.tensor(1)?, cx.tensor(2)?);
        check(cx, x, places, self.dim)?;
        if updates.dtype != x.dtype || x.dtype == Dtype::Bool {
            let message = format!(
                "expected updates of one float or integer type with x, got {} and {}",
                updates.dtype, x.dtype
            );
            return Err(Violation::new("C3", message));
        }
        cx.require_same_shape(
            "C4",
            "updates of shape",
            &spread(&x.shape, self.dim, &places.shape),
            &updates.shape,
        )?;
        Ok(vec![x.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.arg_numel(2))
    }
    fn alias(&self) -> Alias {
        Alias::Reuse
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Tensor]) -> Result<Vec<Tensor>, EvalError> {
        let (x, updates) = (args[0], args[2]);
        let named = places(args[1], x.shape[self.dim])?;
        let depth = args[1].shape.len();
        let mut out = x.clone();
        for i in 0..updates.numel() {
            let at = unravel(i, &updates.shape);
            let place = named[ravel(&at[self.dim..self.dim + depth], &args[1].shape)];
            let to = ravel(&[&at[..self.dim], &[place], &at[self.dim + depth..]].concat(), &x.shape);
            match (&mut out.data, &updates.data) {
                (Data::Float(out), Data::Float(updates)) => out[to] = x.dtype.round(out[to] + updates[i]),
                (Data::Int(out), Data::Int(updates)) => {
                    out[to] = x.dtype.wrap(out[to].wrapping_add(updates[i]))
                }
                _ => {}
            }
        }
        Ok(vec![out])
    }
}
