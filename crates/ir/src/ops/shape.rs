//! Ops that move elements without computing on them: reshape, permute, slice, concat and the like.

use consort_types::Failure;
use consort_types::layout::{Dims, Layout};
use smallvec::smallvec;

use crate::index::{Guard, Index};
use crate::literal::{Literal, ravel, unravel};
use crate::op;
use crate::ops::{
    Alias, Cost, CostCx, Cotangents, EvalCx, EvalError, InferCx, Joined, Layouts, OpDef, Term, VjpCx,
};
use crate::types::Type;

op! {
    /// The same elements in row-major order in another shape.
    ///
    /// (C1) Both shapes have as many elements.
    ///
    /// (C2) No size is negative.
    pub struct Reshape("reshape")(x) {
        /// The shape of the result.
        shape: Vec<Index>
    }
    example "mesh ()\n\nfunc @f(v0: f32[4]) -> f32[2,2] {\n    v1 = reshape[shape=[2, 2]] v0 : f32[2,2]\n    return v1\n}\n; run: @f([1, 2, 3, 4]) == [[1, 2], [3, 4]]\n"
}

impl OpDef for Reshape {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        self.shape.iter().try_for_each(|size| cx.require_size("C2", "a size", size))?;
        cx.require_eq("C1", &x.numel(), &Index::product(&self.shape), |cx| {
            let (to, from) = (cx.shape_text(&self.shape), cx.shape_text(&x.shape));
            (format!("a shape with as many elements as {from}"), to.to_string())
        })?;
        Ok(vec![x.with_shape(self.shape.clone()).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn view(&self, cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        Ok(x.reshaped(&dims(cx, &self.shape)?).map(|layout| smallvec![layout]))
    }
    fn keeps_order(&self) -> bool {
        true
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let shape = cx.shape(&self.shape)?;
        if shape.iter().product::<usize>() != args[0].numel() {
            return Err(EvalError::new((
                format!("a shape of {} elements", args[0].numel()),
                format!("{shape:?}"),
            )));
        }
        Ok(vec![args[0].reshaped(shape)])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        Ok(vec![Some(cx.cotangent(0).reshape(&cx.arg_ty(0).shape))])
    }
}

op! {
    /// The dimensions in another order: dimension i of the result is dimension `dims[i]` of the operand.
    ///
    /// (C1) The dimensions are those of the operand, each once.
    pub struct Permute("permute")(x) {
        /// Where each dimension of the result comes from.
        dims: Vec<usize>
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,3]) -> f32[3,2] {\n    v1 = permute[dims=[1, 0]] v0 : f32[3,2]\n    return v1\n}\n; run: @f([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]\n"
}

impl OpDef for Permute {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        if self.dims.len() != x.rank() {
            return Err(Failure::rule(
                "C1",
                (format!("{} dimensions", x.rank()), self.dims.len().to_string()),
            ));
        }
        cx.require_dims("C1", &self.dims, x.rank())?;
        Ok(vec![x.with_shape(self.dims.iter().map(|dim| x.shape[*dim].clone()).collect()).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn view(&self, _cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        Ok(Some(smallvec![x.permuted(&self.dims)]))
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let x = args[0];
        let shape: Vec<usize> = self.dims.iter().map(|dim| x.shape[*dim]).collect();
        let out_shape = shape.clone();
        Ok(vec![x.pick(shape, |i| {
            let at = unravel(i, &out_shape);
            let mut from = vec![0; at.len()];
            self.dims.iter().zip(at).for_each(|(dim, at)| from[*dim] = at);
            ravel(&from, &x.shape)
        })])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let mut back = vec![0; self.dims.len()];
        self.dims.iter().enumerate().for_each(|(to, from)| back[*from] = to);
        Ok(vec![Some(cx.cotangent(0).permute(&back))])
    }
}

op! {
    /// A box of the operand: in each dimension `size` elements from `start`, every `step`th.
    ///
    /// (C1) `start`, `size` and `step` have an entry for each dimension.
    ///
    /// (C2) No start or size is negative, and every step is at least 1.
    ///
    /// (C3) The box lies inside the operand.
    pub struct Slice("slice")(x) {
        /// The first place in each dimension.
        start: Vec<Index>,
        /// How many places in each dimension.
        size: Vec<Index>,
        /// From one place to the next in each dimension.
        step: Vec<usize>
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[4]) -> f32[2]{tp} {\n    v1 = slice[start=[2*rank(tp)], size=[2], step=[1]] v0 : f32[2]{tp}\n    return v1\n}\n; run: @f([1, 2, 3, 4]) == [1, 2] | [3, 4]\n"
}

impl OpDef for Slice {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        if [self.start.len(), self.size.len(), self.step.len()] != [x.rank(); 3] {
            let got = [self.start.len(), self.size.len(), self.step.len()];
            return Err(Failure::rule(
                "C1",
                (format!("{} entries in start, size and step", x.rank()), format!("{got:?}")),
            ));
        }
        for i in 0..x.rank() {
            let (start, size, step) = (&self.start[i], &self.size[i], self.step[i]);
            cx.require_size("C2", "a start", start)?;
            cx.require_size("C2", "a size", size)?;
            if step == 0 {
                return Err(Failure::rule("C2", ("a step of at least 1", "0")));
            }
            // The last index is start + (size - 1) * step; with a step of 1 an empty box may begin at the end.
            let reach = if step == 1 {
                start + size
            } else {
                &(start + &(&(size - &Index::constant(1)) * &Index::from(step))) + &Index::constant(1)
            };
            inside(cx, "C3", i, start, &x.shape[i])?;
            inside(cx, "C3", i, &reach, &x.shape[i])?;
        }
        Ok(vec![x.with_shape(self.size.clone()).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn view(&self, cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        let (start, size) = (dims(cx, &self.start)?, dims(cx, &self.size)?);
        let mut layout = x.clone();
        for dim in 0..size.len() {
            let (start, size, step) = (start[dim], size[dim], self.step[dim]);
            let last = start.saturating_add(size.saturating_sub(1).saturating_mul(step));
            if size > 0 && last >= x.shape[dim] {
                return Err(outside(dim, start, size, x.shape[dim]));
            }
            layout = layout.narrowed(dim, start, size);
            // With a single index any step is valid.
            if size > 1 {
                layout.strides[dim] *= step;
            }
        }
        Ok(Some(smallvec![layout]))
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let x = args[0];
        let (start, shape) = (dims(cx, &self.start)?, cx.shape(&self.size)?);
        for i in 0..shape.len() {
            if shape[i] > 0
                && start[i].saturating_add((shape[i] - 1).saturating_mul(self.step[i])) >= x.shape[i]
            {
                return Err(outside(i, start[i], shape[i], x.shape[i]));
            }
        }
        let out_shape = shape.clone();
        Ok(vec![x.pick(shape, |i| {
            let mut at = unravel(i, &out_shape);
            at.iter_mut().enumerate().for_each(|(i, at)| *at = start[i] + *at * self.step[i]);
            ravel(&at, &x.shape)
        })])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let shape = cx.arg_ty(0).shape;
        let mut g = cx.cotangent(0);
        let mut high = Vec::new();
        for (dim, size) in shape.iter().enumerate() {
            g = g.dilate(dim, self.step[dim]);
            let end = match self.step[dim] {
                1 => &self.start[dim] + &self.size[dim],
                // A step makes no difference to a box of at most one place.
                step => &self.start[dim] + &dilated(&self.size[dim], step),
            };
            high.push(size - &end);
        }
        Ok(vec![Some(g.then(Pad { low: self.start.clone(), high, value: 0.0 }))])
    }
}

/// The size of a dimension after `Term::dilate`.
fn dilated(size: &Index, step: usize) -> Index {
    match size.as_const() {
        Some(0) => Index::constant(0),
        _ => &(&Index::from(step) * &(size - &Index::constant(1))) + &Index::constant(1),
    }
}

impl<'c, 'm> Term<'c, 'm> {
    /// A dimension with `step` - 1 zeros between its places.
    pub(super) fn dilate(self, dim: usize, step: usize) -> Term<'c, 'm> {
        let shape = self.ty().shape;
        let Some(size) =
            shape.get(dim).filter(|size| step > 1 && size.as_const().is_none_or(|size| size > 1))
        else {
            return self;
        };
        let split = |inner: usize| {
            let mut split = shape.clone();
            split.insert(dim + 1, Index::from(inner));
            split
        };
        let mut high = vec![Index::constant(0); shape.len() + 1];
        high[dim + 1] = Index::from(step - 1);
        let low = vec![Index::constant(0); shape.len() + 1];
        let padded = self.reshape(&split(1)).then(Pad { low, high, value: 0.0 });
        let mut joined = shape.clone();
        joined[dim] = size * &Index::from(step);
        padded.reshape(&joined).narrow(dim, &Index::constant(0), &dilated(size, step))
    }
}

fn dims(cx: &EvalCx<'_>, list: &[Index]) -> Result<Dims, EvalError> {
    list.iter().map(|size| cx.size(size)).collect()
}

fn outside(dim: usize, start: usize, size: usize, of: usize) -> EvalError {
    EvalError::new(format!("dimension {dim}: {size} places from {start} do not lie inside {of}"))
}

fn inside(
    cx: &mut InferCx<'_>,
    rule: &'static str,
    dim: usize,
    end: &Index,
    of: &Index,
) -> Result<(), Box<Failure>> {
    cx.require(rule, Guard::Le(end.clone(), of.clone()), |cx| {
        (format!("to end by {}", of.display(cx.mesh)), end.display(cx.mesh).to_string())
    })
    .map_err(|failure| failure.of(format!("dimension {dim}")))
}

op! {
    /// The first operand with a box of it, from `start`, replaced by the second.
    ///
    /// (C1) Both operands have one element type and as many dimensions, and `start` an entry for each.
    ///
    /// (C2) No start is negative.
    ///
    /// (C3) The box lies inside the first operand.
    pub struct UpdateSlice("update_slice")(x, part) {
        /// The first place in each dimension.
        start: Vec<Index>
    }
    example "mesh ()\n\nfunc @f(v0: f32[4], v1: f32[2]) -> f32[4] {\n    v2 = update_slice[start=[1]] v0, v1 : f32[4]\n    return v2\n}\n; run: @f([1, 2, 3, 4], [20, 30]) == [1, 20, 30, 4]\n"
}

impl OpDef for UpdateSlice {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, part) = (cx.tensor(0)?, cx.tensor(1)?);
        if x.dtype != part.dtype || x.rank() != part.rank() || x.rank() != self.start.len() {
            let (x, part) = (cx.text(&cx.args[0]), cx.text(&cx.args[1]));
            let message = (
                format!("a part like {x} and a start for each dimension"),
                format!("{part} and {} starts", self.start.len()),
            );
            return Err(Failure::rule("C1", message));
        }
        for (i, start) in self.start.iter().enumerate() {
            cx.require_size("C2", "a start", start)?;
            inside(cx, "C3", i, &(start + &part.shape[i]), &x.shape[i])?;
        }
        Ok(vec![x.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(Index::constant(0))
    }
    fn alias(&self) -> Alias {
        Alias::First
    }
    fn joins(&self) -> bool {
        true
    }
    fn boxes(&self, cx: &EvalCx<'_>, shapes: &[&[usize]]) -> Result<Vec<Joined>, EvalError> {
        let [whole, part] = shapes else { return Err(EvalError::new("expected two operands")) };
        let start = dims(cx, &self.start)?;
        for dim in 0..whole.len() {
            if start[dim].saturating_add(part[dim]) > whole[dim] {
                return Err(outside(dim, start[dim], part[dim], whole[dim]));
            }
        }
        // The base around the part: before and after it in each dimension, within its extent in all outer ones.
        let mut boxes = Vec::new();
        for dim in 0..whole.len() {
            let after = start[dim] + part[dim];
            for (first, n) in
                [(0, start[dim]), (after, whole[dim] - after)].into_iter().filter(|(_, n)| *n > 0)
            {
                let mut from: Dims = start[..dim].into();
                from.push(first);
                from.resize(whole.len(), 0);
                let mut size: Dims = part[..dim].into();
                size.push(n);
                size.extend_from_slice(&whole[dim + 1..]);
                boxes.push(Joined { operand: 0, to: from.clone(), from, size });
            }
        }
        let from = Dims::from_elem(0, whole.len());
        boxes.push(Joined { operand: 1, from, to: start, size: (*part).into() });
        Ok(boxes)
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (mut out, part, start) = (args[0].clone(), args[1], dims(cx, &self.start)?);
        for (i, start) in start.iter().enumerate() {
            if start.saturating_add(part.shape[i]) > out.shape[i] {
                return Err(outside(i, *start, part.shape[i], out.shape[i]));
            }
        }
        for i in 0..part.numel() {
            let at: Vec<usize> =
                unravel(i, &part.shape).iter().zip(&start).map(|(at, start)| at + start).collect();
            let to = ravel(&at, &out.shape);
            out.set(to, part, i);
        }
        Ok(vec![out])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let (g, part) = (cx.cotangent(0), cx.arg_ty(1));
        cx.each(|i| {
            let step = vec![1; self.start.len()];
            Some(match i {
                0 => cx.op(UpdateSlice { start: self.start.clone() }, &[g, cx.zeros(&part)]),
                _ => g.then(Slice { start: self.start.clone(), size: part.shape.clone(), step }),
            })
        })
    }
}

op! {
    /// The operands one after the other along a dimension.
    ///
    /// (C1) All operands have one element type and as many dimensions.
    ///
    /// (C2) The dimension exists.
    ///
    /// (C3) All operands agree in every other dimension.
    pub struct Concat("concat")(x; more..) {
        /// Along which dimension.
        dim: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[1], v1: f32[2]) -> f32[3] {\n    v2 = concat[dim=0] v0, v1 : f32[3]\n    return v2\n}\n; run: @f([1], [2, 3]) == [1, 2, 3]\n"
}

impl OpDef for Concat {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let parts = cx.tensors()?;
        let first = parts[0];
        cx.require_dim("C2", self.dim, first.rank())?;
        for part in &parts[1..] {
            if part.dtype != first.dtype || part.rank() != first.rank() {
                let (a, b) = (first.display(cx.mesh), part.display(cx.mesh));
                return Err(Failure::rule("C1", (format!("operands like {a}"), b.to_string())));
            }
            let mut like = part.shape.clone();
            like[self.dim] = first.shape[self.dim].clone();
            cx.require_same_shape("C3", "operands like", &first.shape, &like)?;
        }
        let mut shape = first.shape.clone();
        shape[self.dim] = Index::sum(parts.iter().map(|part| &part.shape[self.dim]));
        Ok(vec![first.with_shape(shape).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(Index::constant(0))
    }
    fn joins(&self) -> bool {
        true
    }
    fn boxes(&self, _cx: &EvalCx<'_>, shapes: &[&[usize]]) -> Result<Vec<Joined>, EvalError> {
        let mut end = 0;
        let whole = |(operand, shape): (usize, &&[usize])| {
            let from = Dims::from_elem(0, shape.len());
            let mut to = from.clone();
            to[self.dim] = end;
            end += shape[self.dim];
            Joined { operand, from, to, size: (*shape).into() }
        };
        Ok(shapes.iter().enumerate().map(whole).collect())
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![Literal::concat(args, self.dim)])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let sizes: Vec<Index> = (0..cx.n_args()).map(|i| cx.arg_ty(i).shape[self.dim].clone()).collect();
        cx.each(|i| Some(cx.cotangent(0).narrow(self.dim, &Index::sum(&sizes[..i]), &sizes[i])))
    }
}

op! {
    /// The operand cut along a dimension into parts of these sizes.
    ///
    /// (C1) The dimension exists.
    ///
    /// (C2) No size is negative, and they add up to the dimension.
    pub struct Split("split")(x) {
        /// Along which dimension.
        dim: usize,
        /// The sizes of the parts.
        sizes: Vec<Index>
    }
    example "mesh ()\n\nfunc @f(v0: f32[3]) -> (f32[1], f32[2]) {\n    v1, v2 = split[dim=0, sizes=[1, 2]] v0 : f32[1], f32[2]\n    return v1, v2\n}\n; run: @f([1, 2, 3]) == [1], [2, 3]\n"
}

impl OpDef for Split {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        cx.require_dim("C1", self.dim, x.rank())?;
        self.sizes.iter().try_for_each(|size| cx.require_size("C2", "a size", size))?;
        cx.require_eq("C2", &x.shape[self.dim], &Index::sum(&self.sizes), |cx| {
            let (of, sizes) = (x.shape[self.dim].display(cx.mesh).to_string(), cx.shape_text(&self.sizes));
            (format!("sizes that add up to {of}"), sizes.to_string())
        })?;
        let part = |size: &Index| {
            let mut shape = x.shape.clone();
            shape[self.dim] = size.clone();
            Type::Tensor(x.with_shape(shape))
        };
        Ok(self.sizes.iter().map(part).collect())
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn view(&self, cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        let mut start = 0;
        let part = |size: &usize| {
            let layout = x.narrowed(self.dim, start, *size);
            start += size;
            layout
        };
        Ok(Some(dims(cx, &self.sizes)?.iter().map(part).collect()))
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let sizes = dims(cx, &self.sizes)?;
        let total = sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size));
        if total != Some(args[0].shape[self.dim]) {
            return Err(EvalError::new((
                format!("sizes that add up to {}", args[0].shape[self.dim]),
                format!("{sizes:?}"),
            )));
        }
        let mut start = 0;
        let parts = sizes.into_iter().map(|size| {
            start += size;
            args[0].narrow(self.dim, start - size, size)
        });
        Ok(parts.collect())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let parts: Vec<Term<'c, 'm>> = (0..cx.n_results()).map(|i| cx.cotangent(i)).collect();
        Ok(vec![Some(cx.op(Concat { dim: self.dim }, &parts))])
    }
}

op! {
    /// The operand padded with a value: `low` elements before and `high` after it in each dimension.
    ///
    /// (C1) `low` and `high` have an entry for each dimension.
    ///
    /// (C2) No entry is negative.
    ///
    /// (C3) The value is one of the element type: an integer in its range for integers, 0 or 1 for bool.
    pub struct Pad("pad")(x) {
        /// Elements before.
        low: Vec<Index>,
        /// Elements after.
        high: Vec<Index>,
        /// Their value; floats are rounded to the element type.
        value: f64
    }
    example "mesh ()\n\nfunc @f(v0: f32[2]) -> f32[4] {\n    v1 = pad[low=[1], high=[1], value=9.0] v0 : f32[4]\n    return v1\n}\n; run: @f([1, 2]) == [9, 1, 2, 9]\n"
}

impl OpDef for Pad {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        if [self.low.len(), self.high.len()] != [x.rank(); 2] {
            let got = [self.low.len(), self.high.len()];
            return Err(Failure::rule(
                "C1",
                (format!("{} entries in low and high", x.rank()), format!("{got:?}")),
            ));
        }
        self.low.iter().chain(&self.high).try_for_each(|size| cx.require_size("C2", "a padding", size))?;
        let (low, high) = x.dtype.int_range();
        let fits = self.value.fract() == 0.0 && (low as f64..=high as f64).contains(&self.value);
        if !x.dtype.is_float() && !fits {
            return Err(Failure::rule("C3", (format!("a value of {}", x.dtype), self.value.to_string())));
        }
        let shape = (0..x.rank()).map(|i| &(&x.shape[i] + &self.low[i]) + &self.high[i]).collect();
        Ok(vec![x.with_shape(shape).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(Index::constant(0))
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let x = args[0];
        let (low, high) = (dims(cx, &self.low)?, dims(cx, &self.high)?);
        let grow = |i: usize| x.shape[i].checked_add(low[i]).and_then(|n| n.checked_add(high[i]));
        let shape: Option<Vec<usize>> = (0..low.len()).map(grow).collect();
        let shape = shape.ok_or_else(|| EvalError::new("a padded size does not fit in 64 bits"))?;
        let n = shape.iter().product();
        let mut out = if x.dtype.is_float() {
            Literal::floats(x.dtype, shape, vec![self.value; n])
        } else {
            Literal::ints(x.dtype, shape, vec![self.value as i64; n])
        };
        for i in 0..x.numel() {
            let at: Vec<usize> = unravel(i, &x.shape).iter().zip(&low).map(|(at, low)| at + low).collect();
            let to = ravel(&at, &out.shape);
            out.set(to, x, i);
        }
        Ok(vec![out])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let size = cx.arg_ty(0).shape;
        let step = vec![1; size.len()];
        Ok(vec![Some(cx.cotangent(0).then(Slice { start: self.low.clone(), size, step }))])
    }
}

op! {
    /// The operand repeated to a larger shape: its dimensions stand last, and those of size 1 are repeated.
    ///
    /// (C1) The shape has at least as many dimensions as the operand.
    ///
    /// (C2) Every dimension of the operand is 1 or the size it gets.
    ///
    /// (C3) No size is negative.
    pub struct Broadcast("broadcast")(x) {
        /// The shape of the result.
        shape: Vec<Index>
    }
    example "mesh ()\n\nfunc @f(v0: f32[2,1]) -> f32[2,3] {\n    v1 = broadcast[shape=[2, 3]] v0 : f32[2,3]\n    return v1\n}\n; run: @f([[1], [2]]) == [[1, 1, 1], [2, 2, 2]]\n"
}

impl OpDef for Broadcast {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        let Some(lead) = self.shape.len().checked_sub(x.rank()) else {
            let (from, to) = (cx.shape_text(&x.shape), cx.shape_text(&self.shape));
            return Err(Failure::rule("C1", (format!("at least the dimensions of {from}"), to.to_string())));
        };
        self.shape.iter().try_for_each(|size| cx.require_size("C3", "a size", size))?;
        for (from, to) in x.shape.iter().zip(&self.shape[lead..]) {
            if from.as_const() != Some(1) {
                cx.require_eq("C2", from, to, |cx| {
                    let (from, to) = (cx.shape_text(&x.shape), cx.shape_text(&self.shape));
                    (format!("sizes of 1 or those of {to}"), from.to_string())
                })?;
            }
        }
        Ok(vec![x.with_shape(self.shape.clone()).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn view(&self, cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        Ok(Some(smallvec![x.broadcast(&dims(cx, &self.shape)?)]))
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let x = args[0];
        let shape = cx.shape(&self.shape)?;
        let lead = shape.len() - x.shape.len();
        if x.shape.iter().zip(&shape[lead..]).any(|(from, to)| *from != 1 && from != to) {
            return Err(EvalError::new((
                format!("sizes of 1 or those of {shape:?}"),
                format!("{:?}", x.shape),
            )));
        }
        let out_shape = shape.clone();
        Ok(vec![x.pick(shape, |i| {
            let at = unravel(i, &out_shape);
            let from: Vec<usize> =
                at[lead..].iter().zip(&x.shape).map(|(at, size)| if *size == 1 { 0 } else { *at }).collect();
            ravel(&from, &x.shape)
        })])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let shape = cx.arg_ty(0).shape;
        let lead = self.shape.len() - shape.len();
        let repeated = |dim: &usize| {
            *dim < lead || shape[*dim - lead].as_const() == Some(1) && self.shape[*dim].as_const() != Some(1)
        };
        let dims: Vec<usize> = (0..self.shape.len()).filter(repeated).collect();
        Ok(vec![Some(cx.cotangent(0).sum(&dims, true).reshape(&shape))])
    }
}

#[cfg(test)]
mod tests {
    use consort_types::Rank;

    use crate::mesh::Mesh;

    use super::*;

    #[test]
    fn a_slice_with_steps_is_a_view() {
        let mesh = Mesh::default();
        let cx = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &Default::default() };
        let x = Layout::contiguous(&[6, 8]);
        let list = |numbers: [i64; 2]| numbers.map(Index::constant).to_vec();
        let op = Slice { start: list([1, 2]), size: list([2, 3]), step: vec![3, 2] };
        let views = op.view(&cx, &x).unwrap().unwrap();
        assert_eq!((views[0].start, &views[0].strides[..]), (10, &[24, 2][..]));
        let op = Slice { start: list([1, 2]), size: list([2, 4]), step: vec![3, 2] };
        assert!(op.view(&cx, &x).is_err());
    }
}
