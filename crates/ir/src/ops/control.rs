//! Control flow inside the program: a conditional and two loops.

use consort_types::{Axes, Dtype, Failure};

use crate::index::Index;
use crate::infer::{fits, same_type};
use crate::op;
use crate::ops::{Cost, CostCx, Flag, Flow, InferCx, OpDef, Takes, Trips, count};
use crate::types::{TensorType, Type};

const OUTSIDE: &str = "wait for the pending, or read the size, outside the blocks";

/// Checks that operands fit the parameters of a block.
fn check_params(
    cx: &InferCx<'_>,
    rule: &'static str,
    args: &[Type],
    params: &[Type],
) -> Result<(), Box<Failure>> {
    if args.len() != params.len() {
        return Err(Failure::rule(
            rule,
            (format!("a block with {}", count(args.len(), "parameter")), params.len().to_string()),
        ));
    }
    for (arg, param) in args.iter().zip(params) {
        if !fits(arg, param, cx.facts) {
            return Err(Failure::rule(
                rule,
                (format!("a parameter for {}", cx.text(arg)), cx.text(param).to_string()),
            ));
        }
    }
    Ok(())
}

/// Checks that a loop's block returns its carries.
fn check_carries(cx: &InferCx<'_>, rule: &'static str, carries: usize) -> Result<(), Box<Failure>> {
    let block = &cx.blocks[0];
    if block.results.len() < carries {
        return Err(Failure::rule(
            rule,
            (format!("at least {}", count(carries, "result")), block.results.len().to_string()),
        ));
    }
    for (result, param) in block.results.iter().zip(&block.params[..carries]) {
        if !fits(result, param, cx.facts) {
            let (expected, got) = (cx.text(param), cx.text(result));
            let violation = Failure::rule(rule, (format!("a carry of {expected}"), got.to_string()));
            let differs_only = fits(&as_wide(result, param.varies()), param, cx.facts);
            return Err(violation.note(match differs_only {
                true => "give the parameter the wider set of axes, or make the carry equal on all ranks",
                false => "a carry keeps its element type and shape from one iteration to the next",
            }));
        }
    }
    Ok(())
}

/// A tensor's type with other axes; other types as they are.
fn as_wide(ty: &Type, varies: Axes) -> Type {
    match ty {
        Type::Tensor(tensor) => tensor.with_varies(varies).into(),
        other => other.clone(),
    }
}

/// Checks that carries differ wherever the number of iterations does.
fn check_trips(
    cx: &InferCx<'_>,
    rule: &'static str,
    carries: &[Type],
    differs: Axes,
    what: &str,
) -> Result<(), Box<Failure>> {
    let fits =
        |ty: &&Type| differs.is_subset(ty.varies()) && (differs.is_empty() || matches!(ty, Type::Tensor(_)));
    let Some(carry) = carries.iter().find(|ty| !fits(ty)) else { return Ok(()) };
    let axes = cx.mesh.axes_text(differs);
    let expected = format!("a carry that differs over {axes} like the {what}");
    Err(Failure::rule(rule, (expected, cx.text(carry).to_string())))
}

/// Checks that what every iteration sees is no pending.
fn check_rest(cx: &InferCx<'_>, rule: &'static str, rest: &[Type]) -> Result<(), Box<Failure>> {
    match rest.iter().find(|ty| ty.is_pending()) {
        Some(ty) => Err(Failure::rule(rule, ("no pending in every iteration", cx.text(ty).to_string()))),
        None => Ok(()),
    }
}

op! {
    /// Runs the first block where the condition is true, the second where it is false. Both take the other
    /// operands; both must wait for a pending among them, or return it. A result differs over an axis
    /// where the condition or the block's result does.
    ///
    /// (C1) The condition is a 0-d bool.
    ///
    /// (C2) The operands fit the parameters of both blocks.
    ///
    /// (C3) Both blocks return as many values, of equal element types and shapes.
    ///
    /// (C4) A block returns a pending or a size only where the other returns the same, and the condition is
    /// equal on all ranks.
    pub struct Cond("cond")(condition; args..) {}
    example "mesh ()\n\nfunc @f(v0: bool[], v1: f32[2]) -> f32[2] {\n    v2 = cond v0, v1 : f32[2] {\n        then(v3: f32[2]) {\n            return v3\n        }\n        else(v4: f32[2]) {\n            v5 = neg v4 : f32[2]\n            return v5\n        }\n    }\n    return v2\n}\n; run: @f(true, [1, 2]) == [1, 2]\n; run: @f(false, [1, 2]) == [-1, -2]\n"
}

impl OpDef for Cond {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let condition = match &cx.args[0] {
            Type::Tensor(TensorType { dtype: Dtype::Bool, shape, varies }) if shape.is_empty() => *varies,
            other => {
                return Err(Failure::rule("C1", ("a condition of type bool[]", cx.text(other).to_string())));
            }
        };
        let (then, other) = (&cx.blocks[0], &cx.blocks[1]);
        check_params(cx, "C2", &cx.args[1..], &then.params)?;
        check_params(cx, "C2", &cx.args[1..], &other.params)?;
        if then.results.len() != other.results.len() {
            let message = (
                "blocks with as many results",
                format!("{} and {}", then.results.len(), other.results.len()),
            );
            return Err(Failure::rule("C3", message));
        }
        let join = |(a, b): (&Type, &Type)| match (a, b) {
            (Type::Tensor(a), Type::Tensor(b)) => {
                let all = a.varies.union(b.varies).union(condition);
                let (a, b) = (a.with_varies(all), b.with_varies(all));
                if !same_type(&a.clone().into(), &b.clone().into(), cx.facts) {
                    let (a, b) = (a.display(cx.mesh), b.display(cx.mesh));
                    return Err(Failure::rule("C3", ("results of one type", format!("{a} and {b}"))));
                }
                Ok(Type::Tensor(a))
            }
            (a, b) if same_type(a, b, cx.facts) && condition.is_empty() => Ok(a.clone()),
            (a, b) if same_type(a, b, cx.facts) => {
                let (text, axes) = (cx.text(a), cx.mesh.axes_text(condition));
                let message = format!(
                    "expected a condition equal on all ranks to return {text}, but it differs over {axes}"
                );
                Err(Failure::rule("C4", message).note(OUTSIDE))
            }
            (a, b) => {
                let message = ("results of one type", format!("{} and {}", cx.text(a), cx.text(b)));
                Err(Failure::rule("C4", message).note(OUTSIDE))
            }
        };
        then.results.iter().zip(&other.results).map(join).collect()
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn flow(&self) -> Flow<'_> {
        Flow::Cond
    }
    fn takes(&self) -> Takes {
        Takes::Any
    }
}

op! {
    /// Runs its block `length` times: a loop, never unrolled. The first `carries` operands enter the first
    /// iteration, and what the block returns in their place enters the next; the following `slices` operands
    /// are cut along their first dimension, one entry for each iteration, the last first if the loop is `reverse`;
    /// every iteration sees the rest.
    /// The results are the last carries, then whatever else the block returns, stacked along a new first
    /// dimension in the order of the entries. A pending may be carried: started in one iteration and waited for in the next.
    ///
    /// (C1) There are at least `carries` + `slices` operands, and the length is not negative.
    ///
    /// (C2) A sliced operand is a tensor whose first dimension is the length.
    ///
    /// (C3) The block takes the carries, the entries and the rest, in this order.
    ///
    /// (C4) The block returns at least the carries, and they fit the parameters they become.
    ///
    /// (C5) What is stacked is a tensor, and what every iteration sees is no pending.
    ///
    /// (C6) A carry differs wherever the length does; a carried pending or size needs a length equal on all
    /// ranks.
    pub struct Scan("scan")(; args..) {
        /// How many iterations.
        length: Index,
        /// How many operands are carried.
        carries: usize,
        /// How many operands are sliced.
        slices: usize,
        /// Whether iteration i of n takes and stacks entry n - 1 - i, instead of entry i.
        reverse: Flag
    }
    example "mesh ()\n\nfunc @f(v0: f32[], v1: f32[3]) -> (f32[], f32[3]) {\n    v2, v3 = scan[length=3, carries=1, slices=1] v0, v1 : f32[], f32[3] {\n        body(v4: f32[], v5: f32[]) {\n            v6 = add v4, v5 : f32[]\n            return v6, v6\n        }\n    }\n    return v2, v3\n}\n; run: @f(10, [1, 2, 3]) == 16, [11, 13, 16]\n"
}

impl OpDef for Scan {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (carries, slices) = (self.carries, self.slices);
        if carries.saturating_add(slices) > cx.args.len() {
            let message = (format!("at least {carries} + {slices} operands"), cx.args.len().to_string());
            return Err(Failure::rule("C1", message));
        }
        cx.require_size("C1", "a length", &self.length)?;
        let mut enter = cx.args[..carries].to_vec();
        for arg in &cx.args[carries..carries + slices] {
            let Type::Tensor(tensor) = arg else {
                return Err(Failure::rule("C2", ("a tensor to slice", cx.text(arg).to_string())));
            };
            let Some((first, rest)) = tensor.shape.split_first() else {
                return Err(Failure::rule("C2", ("a first dimension to slice", cx.text(arg).to_string())));
            };
            cx.require_eq("C2", &self.length, first, |cx| {
                let (length, got) = (self.length.display(cx.mesh).to_string(), cx.text(arg));
                (format!("a first dimension of {length}"), got.to_string())
            })?;
            enter.push(tensor.with_shape(rest.to_vec()).into());
        }
        enter.extend_from_slice(&cx.args[carries + slices..]);
        let block = &cx.blocks[0];
        check_params(cx, "C3", &enter, &block.params)?;
        check_carries(cx, "C4", carries)?;
        let mut results = block.params[..carries].to_vec();
        check_trips(cx, "C6", &results, cx.facts.varies(&self.length), "length")?;
        check_rest(cx, "C5", &block.params[carries + slices..])?;
        for stacked in &block.results[carries..] {
            let Type::Tensor(tensor) = stacked else {
                return Err(Failure::rule("C5", ("a tensor to stack", cx.text(stacked).to_string())));
            };
            let shape = [std::slice::from_ref(&self.length), &tensor.shape].concat();
            results.push(tensor.with_shape(shape).into());
        }
        Ok(results)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn flow(&self) -> Flow<'_> {
        Flow::Loop {
            trips: Trips::Count(&self.length),
            carries: self.carries,
            slices: self.slices,
            reverse: self.reverse.0,
        }
    }
    fn takes(&self) -> Takes {
        Takes::Any
    }
}

op! {
    /// Runs its block as long as the first carry is true: not at all if it is false at the beginning. The first
    /// `carries` operands enter the first iteration, and what the block returns in their place enters the next; every
    /// iteration sees the rest. The results are the last carries. If the first is still true after `limit`
    /// iterations, the loop fails on all ranks. Costs are computed with the `expected` number of iterations.
    ///
    /// (C1) There are at least `carries` operands, one of them the condition, and at most `limit` iterations are
    /// expected.
    ///
    /// (C2) The first carry is a 0-d bool.
    ///
    /// (C3) The block takes the carries and the rest, in this order.
    ///
    /// (C4) The block returns the carries, and they fit the parameters they become.
    ///
    /// (C5) What every iteration sees is no pending.
    ///
    /// (C6) A carry differs wherever the condition does; a carried pending or size needs a condition equal on all
    /// ranks.
    pub struct While("while")(; args..) {
        /// The largest number of iterations.
        limit: usize,
        /// How many iterations are expected.
        expected: usize,
        /// How many operands are carried.
        carries: usize
    }
    example "mesh ()\n\nfunc @f(v0: bool[], v1: i32[], v2: i32[], v3: i32[]) -> (bool[], i32[]) {\n    v4, v5 = while[limit=100, expected=5, carries=2] v0, v1, v2, v3 : bool[], i32[] {\n        body(v6: bool[], v7: i32[], v8: i32[], v9: i32[]) {\n            v10 = mul v7, v8 : i32[]\n            v11 = lt v10, v9 : bool[]\n            return v11, v10\n        }\n    }\n    return v4, v5\n}\n; run: @f(true, 1, 3, 50) == false, 81\n; run: @f(false, 1, 3, 50) == false, 1\n"
}

impl OpDef for While {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let carries = self.carries;
        if carries == 0 || carries > cx.args.len() {
            let expected = format!("between 1 and {} carries", cx.args.len());
            return Err(Failure::rule("C1", (expected, carries.to_string())));
        }
        if self.expected > self.limit {
            let expected = format!("at most {} expected iterations", self.limit);
            return Err(Failure::rule("C1", (expected, self.expected.to_string())));
        }
        let block = &cx.blocks[0];
        let is_condition = |ty: &&Type| matches!(ty, Type::Tensor(TensorType { dtype: Dtype::Bool, shape, .. }) if shape.is_empty());
        if let Some(other) =
            [&cx.args[..1], &block.results].concat().iter().take(2).find(|ty| !is_condition(ty))
        {
            return Err(Failure::rule("C2", ("a condition of type bool[]", cx.text(other).to_string())));
        }
        check_params(cx, "C3", cx.args, &block.params)?;
        check_carries(cx, "C4", carries)?;
        if block.results.len() > carries {
            let got = block.results.len().to_string();
            return Err(Failure::rule("C4", (count(carries, "result"), got)));
        }
        check_rest(cx, "C5", &block.params[carries..])?;
        let results = block.params[..carries].to_vec();
        check_trips(cx, "C6", &results, results[0].varies(), "condition")?;
        Ok(results)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn flow(&self) -> Flow<'_> {
        let trips = Trips::While { limit: self.limit, expected: self.expected };
        Flow::Loop { trips, carries: self.carries, slices: 0, reverse: false }
    }
    fn takes(&self) -> Takes {
        Takes::Any
    }
}
