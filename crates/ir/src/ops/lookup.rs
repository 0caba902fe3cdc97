//! Reading, writing and adding at indices given by a tensor: gather (embedding is one), take_along, scatter,
//! scatter-add, one_hot.

use consort_types::{Dtype, Failure};

use crate::index::Index;
use crate::literal::{Data, Literal, ravel, unravel};
use crate::op;
use crate::ops::{
    Alias, Cost, CostCx, Cotangents, Eq, EvalCx, EvalError, InferCx, Iota, OpDef, Term, VjpCx, check_numel,
};
use crate::types::{TensorType, Type};

fn check(cx: &InferCx<'_>, x: &TensorType, places: &TensorType, dim: usize) -> Result<(), Box<Failure>> {
    if !matches!(places.dtype, Dtype::I32 | Dtype::I64) {
        return Err(Failure::rule("C1", ("places of type i32 or i64", places.dtype.to_string())));
    }
    cx.require_dim("C2", dim, x.rank())
}

/// `x`'s shape with a dimension replaced by the shape of the indices.
fn with_places<T: Clone>(x: &[T], dim: usize, places: &[T]) -> Vec<T> {
    [&x[..dim], places, &x[dim + 1..]].concat()
}

/// Zeros of a type, with `g` added along a dimension at these places, line by line: what `take_along` becomes in
/// gradients.
pub(super) fn add_along<'c, 'm>(
    cx: &'c VjpCx<'m>,
    ty: &TensorType,
    places: Term<'c, 'm>,
    dim: usize,
    g: Term<'c, 'm>,
) -> Term<'c, 'm> {
    let shape = places.ty().shape;
    let mut flat = places.cast(Dtype::I64);
    let stride = |i: usize| cx.size(&flat.ty(), &Index::product(&ty.shape[i + 1..]));
    let own = flat * stride(dim);
    flat = (0..shape.len()).filter(|i| *i != dim).fold(own, |sum, i| {
        sum + cx.op(Iota { dtype: Dtype::I64, shape: shape.clone(), dim: i }, &[]) * stride(i)
    });
    let numel = [Index::product(&shape)];
    let zeros = cx.zeros(&ty.with_shape(vec![ty.numel()]));
    let sum = cx.op(ScatterAdd { dim: 0 }, &[zeros, flat.reshape(&numel), g.reshape(&numel)]);
    sum.reshape(&ty.shape)
}

/// The indices along a dimension, each checked against `size`.
fn places(places: &Literal, size: usize) -> Result<Vec<usize>, EvalError> {
    let Data::Int(list) = &places.data else { return Err(EvalError::new("places are not integers")) };
    let check = |place: &i64| match usize::try_from(*place) {
        Ok(at) if at < size => Ok(at),
        _ => Err(EvalError::new((format!("places in 0..{size}"), place.to_string()))),
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
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, places) = (cx.tensor(0)?, cx.tensor(1)?);
        check(cx, x, places, self.dim)?;
        Ok(vec![x.with_shape(with_places(&x.shape, self.dim, &places.shape)).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        // Only the selected entries are read, not the whole of x.
        let bytes = &cx.result_bytes() + &cx.result_bytes();
        Cost { bytes, ..cx.free() }
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (x, named) = (args[0], places(args[1], args[0].shape[self.dim])?);
        let shape = with_places(&x.shape, self.dim, &args[1].shape);
        let (out_shape, depth) = (shape.clone(), args[1].shape.len());
        Ok(vec![x.pick(shape, |i| {
            let at = unravel(i, &out_shape);
            let place = named[ravel(&at[self.dim..self.dim + depth], &args[1].shape)];
            ravel(&[&at[..self.dim], &[place], &at[self.dim + depth..]].concat(), &x.shape)
        })])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let zeros = cx.zeros(&cx.arg_ty(0));
        let sum = ScatterAdd { dim: self.dim };
        cx.each(|_| Some(cx.op(sum.clone(), &[zeros, cx.arg(1), cx.cotangent(0)])))
    }
}

/// For each update, the index of the element of x that it applies to.
fn targets(x: &Literal, named: &Literal, updates: &Literal, dim: usize) -> Result<Vec<usize>, EvalError> {
    let (list, depth) = (places(named, x.shape[dim])?, named.shape.len());
    let target = |i: usize| {
        let at = unravel(i, &updates.shape);
        let place = list[ravel(&at[dim..dim + depth], &named.shape)];
        ravel(&[&at[..dim], &[place], &at[dim + depth..]].concat(), &x.shape)
    };
    Ok((0..updates.numel()).map(target).collect())
}

op! {
    /// x with its entries along a dimension at these places replaced by the updates; of several for one
    /// place, the last stays. A place outside x is an error.
    ///
    /// (C1) The places are of type i32 or i64.
    ///
    /// (C2) The dimension exists.
    ///
    /// (C3) The updates have x's element type.
    ///
    /// (C4) The updates have the shape that `gather` of x at these places has.
    pub struct Scatter("scatter")(x, places, updates) {
        /// The dimension that the places index.
        dim: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[3], v1: i64[3], v2: f32[3]) -> f32[3] {\n    v3 = scatter[dim=0] v0, v1, v2 : f32[3]\n    return v3\n}\n; run: @f([0, 0, 100], [1, 2, 1], [1, 2, 3]) == [0, 3, 2]\n"
}

impl Scatter {
    /// Whether each update is the last for its place: the number of the last is scattered, and read again.
    fn stays<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Term<'c, 'm> {
        let (x, places, updates) = (cx.arg_ty(0), cx.arg(1), cx.arg_ty(2));
        let shape = places.ty().shape;
        let numel = vec![Index::product(&shape)];
        let numbers = cx.op(Iota { dtype: Dtype::I64, shape: numel, dim: 0 }, &[]).reshape(&shape);
        let none = cx.zeros(&numbers.ty().with_shape(vec![x.shape[self.dim].clone()]));
        let last = cx.op(Scatter { dim: 0 }, &[none, places, numbers]);
        let stays = cx.op(Gather { dim: 0 }, &[last, places]).compare(Eq {}, numbers);
        let after = updates.rank() - self.dim - shape.len();
        let ones = vec![Index::constant(1); after];
        stays.reshape(&[shape, ones].concat()).widen_to(&updates.shape)
    }
}

impl OpDef for Scatter {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, places, updates) = (cx.tensor(0)?, cx.tensor(1)?, cx.tensor(2)?);
        check(cx, x, places, self.dim)?;
        if updates.dtype != x.dtype {
            let message = (format!("updates of type {}", x.dtype), updates.dtype.to_string());
            return Err(Failure::rule("C3", message));
        }
        let expected = with_places(&x.shape, self.dim, &places.shape);
        cx.require_same_shape("C4", "updates of shape", &expected, &updates.shape)?;
        Ok(vec![x.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(Index::constant(0))
    }
    fn alias(&self) -> Alias {
        Alias::First
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let mut out = args[0].clone();
        for (i, to) in targets(args[0], args[1], args[2], self.dim)?.into_iter().enumerate() {
            out.set(to, args[2], i);
        }
        Ok(vec![out])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let (g, places) = (cx.cotangent(0), cx.arg(1));
        cx.each(|i| {
            let zeros = || cx.zeros(&cx.arg_ty(2));
            Some(match i {
                0 => cx.op(self.clone(), &[g, places, zeros()]),
                _ => {
                    let own = cx.op(Gather { dim: self.dim }, &[g, places]);
                    self.stays(cx).select(own, zeros())
                }
            })
        })
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
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, places, updates) = (cx.tensor(0)?, cx.tensor(1)?, cx.tensor(2)?);
        check(cx, x, places, self.dim)?;
        if updates.dtype != x.dtype || x.dtype == Dtype::Bool {
            let message =
                ("updates of one float or integer type with x", format!("{} and {}", updates.dtype, x.dtype));
            return Err(Failure::rule("C3", message));
        }
        cx.require_same_shape(
            "C4",
            "updates of shape",
            &with_places(&x.shape, self.dim, &places.shape),
            &updates.shape,
        )?;
        Ok(vec![x.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.arg_numel(2))
    }
    fn alias(&self) -> Alias {
        Alias::First
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (x, updates) = (args[0], args[2]);
        let mut out = x.clone();
        for (i, to) in targets(x, args[1], updates, self.dim)?.into_iter().enumerate() {
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
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let g = cx.cotangent(0);
        cx.each(|i| Some(if i == 0 { g } else { cx.op(Gather { dim: self.dim }, &[g, cx.arg(1)]) }))
    }
}

op! {
    /// The elements of x along a dimension at these places, line by line: along the second of two dimensions,
    /// place (i, j) names an element of row i, which becomes element (i, j) of the result. This puts a tensor
    /// into the order that `sort` or `topk` found in another, and reads the entries that labels name. A place
    /// outside x is an error.
    ///
    /// (C1) The places are of type i32 or i64.
    ///
    /// (C2) The dimension exists.
    ///
    /// (C3) The places have as many dimensions as x and agree with it in every other one.
    pub struct TakeAlong("take_along")(x, places) {
        /// The dimension that the places index.
        dim: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,3], v1: i64[2,1]) -> f32[2,1] {\n    v2 = take_along[dim=1] v0, v1 : f32[2,1]\n    return v2\n}\n; run: @f([[1, 2, 3], [4, 5, 6]], [[2], [0]]) == [[3], [4]]\n"
}

impl OpDef for TakeAlong {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, places) = (cx.tensor(0)?, cx.tensor(1)?);
        check(cx, x, places, self.dim)?;
        let mut expected = x.shape.clone();
        if let Some(own) = places.shape.get(self.dim) {
            expected[self.dim] = own.clone();
        }
        cx.require_same_shape("C3", "places of shape", &expected, &places.shape)?;
        Ok(vec![x.with_shape(places.shape.clone()).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        // Only the selected elements are read, not the whole of x.
        let read = cx.args.get(1).and_then(Type::as_tensor).map_or(Index::constant(0), TensorType::bytes);
        let bytes = &(&cx.result_bytes() + &cx.result_bytes()) + &read;
        Cost { bytes, ..cx.free() }
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (x, named) = (args[0], places(args[1], args[0].shape[self.dim])?);
        Ok(vec![x.pick(args[1].shape.clone(), |i| {
            let mut at = unravel(i, &args[1].shape);
            at[self.dim] = named[i];
            ravel(&at, &x.shape)
        })])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let x = cx.arg_ty(0);
        // Refuses the places that `take_along` refuses, also where it is not computed: sums are flat, over all lines.
        let numbers = Iota { dtype: Dtype::I64, shape: vec![x.shape[self.dim].clone()], dim: 0 };
        let checked = cx.op(Gather { dim: 0 }, &[cx.op(numbers, &[]), cx.arg(1)]);
        Ok(vec![Some(add_along(cx, &x, checked, self.dim, cx.cotangent(0))), None])
    }
}

op! {
    /// A new last dimension, with 1 at the index that each element gives and 0 elsewhere. An element that
    /// is out of range gives only zeros.
    ///
    /// (C1) The element type is an integer type.
    ///
    /// (C2) The number of classes is not negative.
    pub struct OneHot("one_hot")(x) {
        /// The size of the new dimension.
        classes: Index,
        /// The element type of the result; bool has true and false.
        dtype: Dtype
    }
    example "mesh ()\n\nfunc @f(v0: i64[3]) -> f32[3,2] {\n    v1 = one_hot[classes=2, dtype=f32] v0 : f32[3,2]\n    return v1\n}\n; run: @f([1, 0, 2]) == [[0, 1], [1, 0], [0, 0]]\n"
}

impl OpDef for OneHot {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        if !x.dtype.is_int() {
            return Err(Failure::rule("C1", ("an integer type", x.dtype.to_string())));
        }
        cx.require_size("C2", "a number of classes", &self.classes)?;
        let shape = [&x.shape[..], std::slice::from_ref(&self.classes)].concat();
        Ok(vec![x.with_shape(shape).with_dtype(self.dtype).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(Index::constant(0))
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let Data::Int(list) = &args[0].data else { return Err(EvalError::new("places are not integers")) };
        let classes = cx.size(&self.classes)?;
        let shape = [&args[0].shape[..], &[classes]].concat();
        check_numel(&shape)?;
        let hot = || list.iter().flat_map(|at| (0..classes).map(move |class| *at == class as i64));
        Ok(vec![if self.dtype.is_float() {
            Literal::floats(self.dtype, shape, hot().map(|hot| f64::from(u8::from(hot))).collect())
        } else {
            Literal::ints(self.dtype, shape, hot().map(i64::from).collect())
        }])
    }
}
