//! The context of gradient rules, and the notation that they are written in.
//!
//! A rule ([`OpDef::vjp`](super::OpDef::vjp)) turns the cotangents of an op's results into those of its operands. It
//! emits ordinary ops, so that a gradient is a program like any other. A [`Term`] is a value that is being built:
//! `g * z` adds a `mul`. The first op that does not fit is kept as the failure of the rule, and nothing is emitted
//! after it, so that formulas need no `?`.

use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Sub};

use consort_types::{Axes, Dtype, Failure};

use crate::builder::Builder;
use crate::entity::Value;
use crate::index::Index;
use crate::mesh::Mesh;
use crate::ops::{
    self, Broadcast, Cast, Constant, Effects, Elements, Flow, IndexValue, Op, OpDef, Permute, Reshape,
    Select, Slice, Sum, Trips,
};
use crate::program::Func;
use crate::types::{TensorType, Type};

/// The cotangents of an op's operands; `None` for zero, and for operands whose cotangent nothing needs.
pub type Cotangents<'c, 'm> = Result<Vec<Option<Term<'c, 'm>>>, Box<Failure>>;

/// What a rule is asked about: a node of the forward function.
#[derive(Clone, Debug, Default)]
pub struct VjpNode {
    /// The operands.
    pub args: Vec<Value>,
    /// The tensors among the results, those inside a pending too: their types, and their values where there are any.
    pub results: Vec<(TensorType, Option<Value>)>,
    /// The cotangent of each of these tensors; none is zero.
    pub cotangents: Vec<Option<Value>>,
    /// Whether the cotangent of an operand is needed.
    pub wanted: Vec<bool>,
    /// The element type of sums over ranks, where the summands have a smaller one.
    pub sums: Option<Dtype>,
}

/// The context of a gradient rule.
#[derive(Debug)]
pub struct VjpCx<'m> {
    builder: RefCell<Builder<'m>>,
    failure: RefCell<Option<Box<Failure>>>,
    node: VjpNode,
}

/// What stands for a value after a failure.
const NO_VALUE: Value = Value(u32::MAX);

impl<'m> VjpCx<'m> {
    /// A context that emits into a function under construction.
    pub fn new(builder: Builder<'m>, node: VjpNode) -> VjpCx<'m> {
        VjpCx { builder: RefCell::new(builder), failure: RefCell::new(None), node }
    }

    /// The function again, or why the rule failed.
    pub fn finish(self) -> (Builder<'m>, Option<Box<Failure>>) {
        (self.builder.into_inner(), self.failure.into_inner())
    }

    /// The mesh.
    pub fn mesh(&self) -> &'m Mesh {
        self.builder.borrow().mesh()
    }

    /// The number of operands.
    pub fn n_args(&self) -> usize {
        self.node.args.len()
    }

    /// The number of tensors among the results.
    pub fn n_results(&self) -> usize {
        self.node.results.len()
    }

    /// An operand, which must be a tensor.
    pub fn arg(&self, i: usize) -> Term<'_, 'm> {
        match self.node.args.get(i) {
            Some(value) => Term { cx: self, value: *value },
            None => self.fail(Failure::new(format!("the op has no operand {i}"))),
        }
    }

    /// The type of an operand.
    pub fn arg_ty(&self, i: usize) -> TensorType {
        self.arg(i).ty()
    }

    /// A result, which must be a tensor.
    pub fn result(&self, i: usize) -> Term<'_, 'm> {
        match self.node.results.get(i) {
            Some((_, Some(value))) => Term { cx: self, value: *value },
            _ => self.fail(Failure::new(format!("the op has no tensor as result {i}"))),
        }
    }

    /// The type of a tensor among the results.
    pub fn result_ty(&self, i: usize) -> TensorType {
        self.node.results.get(i).map_or_else(scalar, |(ty, _)| ty.clone())
    }

    /// Whether a result has a cotangent other than zero.
    pub fn has_cotangent(&self, i: usize) -> bool {
        self.node.cotangents.get(i).is_some_and(Option::is_some)
    }

    /// The cotangent of a result; zeros if nothing depends on it.
    pub fn cotangent(&self, i: usize) -> Term<'_, 'm> {
        match self.node.cotangents.get(i) {
            Some(Some(value)) => Term { cx: self, value: *value },
            _ => self.zeros(&self.result_ty(i)),
        }
    }

    /// Whether the cotangent of an operand is needed.
    pub fn wants(&self, i: usize) -> bool {
        self.node.wanted.get(i).copied().unwrap_or(false)
    }

    /// The cotangents of all operands, computed by `rule` where they are needed.
    pub fn each<'c>(&'c self, rule: impl Fn(usize) -> Option<Term<'c, 'm>>) -> Cotangents<'c, 'm> {
        Ok((0..self.n_args()).map(|i| if self.wants(i) { rule(i) } else { None }).collect())
    }

    /// The cotangents of the operands that need one, made together from those of the results at their places; zero
    /// where a result has none.
    pub fn together<'c>(
        &'c self,
        rule: impl FnOnce(&[usize], &[Term<'c, 'm>]) -> Vec<Term<'c, 'm>>,
    ) -> Cotangents<'c, 'm> {
        let made = |i: &usize| self.wants(*i) && self.has_cotangent(*i);
        let wanted: Vec<usize> = (0..self.n_args()).filter(made).collect();
        let mut all = vec![None; self.n_args()];
        if wanted.is_empty() {
            return Ok(all);
        }
        let cotangents: Vec<Term<'c, 'm>> = wanted.iter().map(|i| self.cotangent(*i)).collect();
        let made = rule(&wanted, &cotangents);
        wanted.iter().zip(made).for_each(|(i, term)| all[*i] = Some(term.reshape(&self.arg_ty(*i).shape)));
        Ok(all)
    }

    fn fail(&self, failure: Box<Failure>) -> Term<'_, 'm> {
        self.failure.borrow_mut().get_or_insert(failure);
        Term { cx: self, value: NO_VALUE }
    }

    /// Adds an op with one result.
    pub fn op<'c>(&'c self, op: impl OpDef, args: &[Term<'c, 'm>]) -> Term<'c, 'm> {
        self.node(Op::new(op), args)
    }

    /// Adds an op.
    pub fn ops<'c>(&'c self, op: impl OpDef, args: &[Term<'c, 'm>]) -> Vec<Term<'c, 'm>> {
        self.nodes(Op::new(op), args)
    }

    /// Adds an op that a node could hold, with one result.
    pub fn node<'c>(&'c self, op: Op, args: &[Term<'c, 'm>]) -> Term<'c, 'm> {
        match self.nodes(op, args).first() {
            Some(term) => *term,
            None => self.fail(Failure::new(("an op with a result", "none"))),
        }
    }

    fn nodes<'c>(&'c self, op: Op, args: &[Term<'c, 'm>]) -> Vec<Term<'c, 'm>> {
        if self.failure.borrow().is_some() {
            return vec![Term { cx: self, value: NO_VALUE }];
        }
        let args: Vec<Value> = args.iter().map(|term| term.value).collect();
        let made = self.builder.borrow_mut().node(op, &args, Vec::new());
        match made {
            Ok(values) => values.into_iter().map(|value| Term { cx: self, value }).collect(),
            Err(failure) => vec![self.fail(failure)],
        }
    }

    /// Adds the nodes of a function, with these terms as its first arguments; the others are sizes.
    pub fn splice<'c>(&'c self, func: &Func, args: &[Term<'c, 'm>]) -> Vec<Term<'c, 'm>> {
        if self.failure.borrow().is_some() {
            return Vec::new();
        }
        let args: Vec<Value> = args.iter().map(|term| term.value).collect();
        let made = self.builder.borrow_mut().splice(func, &args);
        match made {
            Ok(values) => values.into_iter().map(|value| Term { cx: self, value }).collect(),
            Err(failure) => vec![self.fail(failure)],
        }
    }

    /// The element type of sums over ranks, where the summands have a smaller one.
    pub fn sums(&self) -> Option<Dtype> {
        self.node.sums
    }

    /// What `build` makes of a term with the builder itself.
    pub fn build<'c>(
        &'c self,
        build: impl FnOnce(&mut Builder<'m>, Value) -> Result<Value, Box<Failure>>,
        of: Term<'c, 'm>,
    ) -> Term<'c, 'm> {
        if self.failure.borrow().is_some() {
            return of;
        }
        let built = build(&mut self.builder.borrow_mut(), of.value);
        match built {
            Ok(value) => Term { cx: self, value },
            Err(failure) => self.fail(failure),
        }
    }

    /// Adds a start and its wait; one result for each tensor.
    pub fn start_wait<'c>(&'c self, op: impl OpDef, args: &[Term<'c, 'm>]) -> Vec<Term<'c, 'm>> {
        let pending = self.op(op, args);
        self.ops(ops::Wait {}, &[pending])
    }

    /// Zeros of a type.
    pub fn zeros(&self, ty: &TensorType) -> Term<'_, 'm> {
        self.filled(ty, 0.0)
    }

    /// A tensor of this element type and shape that holds one number: a 0-d constant, widened.
    pub fn filled(&self, ty: &TensorType, value: f64) -> Term<'_, 'm> {
        let value = if ty.dtype.is_float() { Elements::Float(value) } else { Elements::Int(value as i64) };
        let constant = self.op(Constant { dtype: ty.dtype, shape: vec![], value }, &[]);
        constant.widen_to(&ty.shape)
    }

    /// A size expression in every place of a tensor of this type.
    pub fn size(&self, ty: &TensorType, value: &Index) -> Term<'_, 'm> {
        match value.as_const() {
            Some(value) => self.filled(ty, value as f64),
            None => {
                let value = self.op(IndexValue { value: value.clone() }, &[]);
                value.cast(ty.dtype).widen_to(&ty.shape)
            }
        }
    }
}

fn scalar() -> TensorType {
    TensorType::new(Dtype::F32, vec![], Axes::NONE)
}

/// A value that a rule builds or uses.
#[derive(Clone, Copy, Debug)]
pub struct Term<'c, 'm> {
    cx: &'c VjpCx<'m>,
    value: Value,
}

impl<'c, 'm> Term<'c, 'm> {
    /// The value.
    pub fn value(self) -> Value {
        self.value
    }

    /// Its type; that of a 0-d f32 after a failure.
    pub fn ty(self) -> TensorType {
        let builder = self.cx.builder.borrow();
        match builder.ty(self.value) {
            Ok(Type::Tensor(ty)) => ty.clone(),
            _ => scalar(),
        }
    }

    /// The result of an op on this one operand.
    pub fn then(self, op: impl OpDef) -> Term<'c, 'm> {
        self.cx.op(op, &[self])
    }

    /// Whether it is smaller, larger or equal, as `op` says.
    pub fn compare(self, op: impl OpDef, other: Term<'c, 'm>) -> Term<'c, 'm> {
        self.cx.op(op, &[self, other])
    }

    /// `x` where this is true, `y` elsewhere.
    pub fn select(self, x: Term<'c, 'm>, y: Term<'c, 'm>) -> Term<'c, 'm> {
        self.cx.op(Select {}, &[self, x, y])
    }

    /// A tensor of its type that holds one number.
    pub fn fill(self, value: f64) -> Term<'c, 'm> {
        self.cx.filled(&self.ty(), value)
    }

    /// Converted, unless it has this element type.
    pub fn cast(self, to: Dtype) -> Term<'c, 'm> {
        if self.ty().dtype == to { self } else { self.then(Cast { to }) }
    }

    /// Repeated to a shape.
    pub fn widen_to(self, shape: &[Index]) -> Term<'c, 'm> {
        if self.ty().shape == shape { self } else { self.then(Broadcast { shape: shape.to_vec() }) }
    }

    /// Repeated to the shape of another term.
    pub fn widen(self, like: Term<'c, 'm>) -> Term<'c, 'm> {
        self.widen_to(&like.ty().shape)
    }

    /// In another shape.
    pub fn reshape(self, shape: &[Index]) -> Term<'c, 'm> {
        if self.ty().shape == shape { self } else { self.then(Reshape { shape: shape.to_vec() }) }
    }

    /// With its dimensions in another order.
    pub fn permute(self, dims: &[usize]) -> Term<'c, 'm> {
        self.then(Permute { dims: dims.to_vec() })
    }

    /// With its last two dimensions exchanged.
    pub fn transpose(self) -> Term<'c, 'm> {
        let rank = self.ty().rank();
        let mut dims: Vec<usize> = (0..rank).collect();
        if let Some(i) = rank.checked_sub(2) {
            dims.swap(i, i + 1);
        }
        self.permute(&dims)
    }

    /// Its sum over dimensions.
    pub fn sum(self, dims: &[usize], keep: bool) -> Term<'c, 'm> {
        if dims.is_empty() { self } else { self.then(Sum { dims: dims.to_vec(), keep }) }
    }

    /// Its sum over dimensions, repeated over them.
    pub fn sum_along(self, dims: &[usize]) -> Term<'c, 'm> {
        self.sum(dims, true).widen(self)
    }

    /// `size` places of a dimension from `start` on.
    pub fn narrow(self, dim: usize, start: &Index, size: &Index) -> Term<'c, 'm> {
        let shape = self.ty().shape;
        let (mut starts, mut sizes) = (vec![Index::constant(0); shape.len()], shape.clone());
        if dim < shape.len() {
            (starts[dim], sizes[dim]) = (start.clone(), size.clone());
        }
        self.then(Slice { start: starts, size: sizes, step: vec![1; shape.len()] })
    }

    /// Keeps reduced dimensions as 1: from the shape without `dims` of `full` to the shape with them as 1.
    pub fn unreduce(self, full: &[Index], dims: &[usize]) -> Term<'c, 'm> {
        let one =
            |(i, size): (usize, &Index)| if dims.contains(&i) { Index::constant(1) } else { size.clone() };
        self.reshape(&full.iter().enumerate().map(one).collect::<Vec<_>>())
    }
}

macro_rules! arithmetic {
    ($($name:ident $method:ident;)*) => {$(
        impl<'c, 'm> $name for Term<'c, 'm> {
            type Output = Term<'c, 'm>;
            fn $method(self, other: Term<'c, 'm>) -> Term<'c, 'm> {
                self.cx.op(ops::$name {}, &[self, other])
            }
        }
        impl<'c, 'm> $name<f64> for Term<'c, 'm> {
            type Output = Term<'c, 'm>;
            fn $method(self, other: f64) -> Term<'c, 'm> {
                let other = self.fill(other);
                $name::$method(self, other)
            }
        }
        impl<'c, 'm> $name<Term<'c, 'm>> for f64 {
            type Output = Term<'c, 'm>;
            fn $method(self, other: Term<'c, 'm>) -> Term<'c, 'm> {
                $name::$method(other.fill(self), other)
            }
        }
    )*};
}

arithmetic! {
    Add add;
    Sub sub;
    Mul mul;
    Div div;
}

impl<'c, 'm> Neg for Term<'c, 'm> {
    type Output = Term<'c, 'm>;
    fn neg(self) -> Term<'c, 'm> {
        self.then(ops::Neg {})
    }
}

/// How gradients pass through an op with operands of these types: `rule`, or `none` and the reason.
pub fn gradient_words(mesh: &Mesh, op: &Op, args: &[Type]) -> String {
    match op.flow() {
        Flow::Straight if op.effects() == Effects::Wait => return "that of its start".to_string(),
        Flow::Straight => {}
        Flow::Cond => return "that of the block that ran".to_string(),
        Flow::Loop { trips: Trips::Count(_), .. } => return "a loop in reverse".to_string(),
        Flow::Loop { .. } => return "none: the number of iterations is not known".to_string(),
    }
    match try_rule(mesh, op, args) {
        Ok(words) => words.to_string(),
        Err(failure) => format!("none: {}", failure.headline()),
    }
}

fn try_rule(mesh: &Mesh, op: &Op, args: &[Type]) -> Result<&'static str, Box<Failure>> {
    let mut builder = Builder::new(mesh, op.info().name);
    let args: Vec<Value> = args.iter().map(|ty| builder.param(ty.clone())).collect();
    let is_float = |ty: &TensorType| ty.dtype.is_float();
    let mut wanted = Vec::new();
    for arg in &args {
        wanted.push(builder.ty(*arg)?.as_tensor().is_some_and(is_float));
    }
    let (mut results, mut cotangents) = (Vec::new(), Vec::new());
    for value in builder.node(op.clone(), &args, Vec::new())? {
        let ty = builder.ty(value)?.clone();
        for tensor in ty.tensors() {
            results.push((tensor.clone(), (!ty.is_pending()).then_some(value)));
            cotangents.push(is_float(tensor).then(|| builder.param(tensor.clone())));
        }
    }
    if !wanted.contains(&true) || cotangents.iter().all(Option::is_none) {
        return Ok("none: no floats");
    }
    if op.stops_gradient() {
        return Ok("none: it is there to stop gradients");
    }
    let cx = VjpCx::new(builder, VjpNode { args, results, cotangents, wanted, sums: None });
    let flat = op.vjp(&cx)?.iter().all(Option::is_none);
    match cx.finish().1 {
        Some(failure) => Err(failure),
        None => Ok(if flat { "zero" } else { "rule" }),
    }
}
