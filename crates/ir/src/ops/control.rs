//! Control flow inside the program: a conditional and a loop.

use consort_types::Dtype;

use crate::index::Index;
use crate::infer::{fits, same_type};
use crate::op;
use crate::ops::{Cost, CostCx, Flow, InferCx, OpDef, Takes, Violation, count};
use crate::types::{TensorType, Type};

const OUTSIDE: &str = "wait for the pending, or read the size, outside the blocks";

/// Checks that operands fit the parameters of a block.
fn check_params(
    cx: &InferCx<'_>,
    rule: &'static str,
    args: &[Type],
    params: &[Type],
) -> Result<(), Violation> {
    if args.len() != params.len() {
        return Err(Violation::new(
            rule,
            format!("expected a block with {}, got {}", count(args.len(), "parameter"), params.len()),
        ));
    }
    for (arg, param) in args.iter().zip(params) {
        if !fits(arg, param, cx.facts) {
            return Err(Violation::new(
                rule,
                format!("expected a parameter for {}, got {}", cx.text(arg), cx.text(param)),
            ));
        }
    }
    Ok(())
}

op! {
    /// Runs the first block where the condition is true, the second where it is false. Both take the other
    /// operands; a pending among them is theirs to wait for or to return. A result differs over an axis
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
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Violation> {
        let condition = match &cx.args[0] {
            Type::Tensor(TensorType { dtype: Dtype::Bool, shape, varies }) if shape.is_empty() => *varies,
            other => {
                return Err(Violation::new(
                    "C1",
                    format!("expected a condition of type bool[], got {}", cx.text(other)),
                ));
            }
        };
        let (then, other) = (&cx.blocks[0], &cx.blocks[1]);
        check_params(cx, "C2", &cx.args[1..], &then.params)?;
        check_params(cx, "C2", &cx.args[1..], &other.params)?;
        if then.results.len() != other.results.len() {
            let message = format!(
                "expected blocks with as many results, got {} and {}",
                then.results.len(),
                other.results.len()
            );
            return Err(Violation::new("C3", message));
        }
        let join = |(a, b): (&Type, &Type)| match (a, b) {
            (Type::Tensor(a), Type::Tensor(b)) => {
                let all = a.varies.union(b.varies).union(condition);
                let (a, b) = (a.with_varies(all), b.with_varies(all));
                if !same_type(&a.clone().into(), &b.clone().into(), cx.facts) {
                    let (a, b) = (a.display(cx.mesh), b.display(cx.mesh));
                    return Err(Violation::new(
                        "C3",
                        format!("expected results of one type, got {a} and {b}"),
                    ));
                }
                Ok(Type::Tensor(a))
            }
            (a, b) if same_type(a, b, cx.facts) && condition.is_empty() => Ok(a.clone()),
            (a, b) if same_type(a, b, cx.facts) => {
                let (text, axes) = (cx.text(a), cx.mesh.axes_text(condition));
                let message = format!(
                    "expected a condition equal on all ranks to return {text}, but it differs over {axes}"
                );
                Err(Violation::new("C4", message).note(OUTSIDE))
            }
            (a, b) => {
                let message = format!("expected results of one type, got {} and {}", cx.text(a), cx.text(b));
                Err(Violation::new("C4", message).note(OUTSIDE))
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
    /// are cut along their first dimension, one entry for each iteration; every iteration sees the rest.
    /// The results are the last carries, then whatever else the block returns, stacked along a new first
    /// dimension. A pending may be carried: started in one iteration and waited for in the next.
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
        slices: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[], v1: f32[3]) -> (f32[], f32[3]) {\n    v2, v3 = scan[length=3, carries=1, slices=1] v0, v1 : f32[], f32[3] {\n        body(v4: f32[], v5: f32[]) {\n            v6 = add v4, v5 : f32[]\n            return v6, v6\n        }\n    }\n    return v2, v3\n}\n; run: @f(10, [1, 2, 3]) == 16, [11, 13, 16]\n"
}

impl OpDef for Scan {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Violation> {
        let (carries, slices) = (self.carries, self.slices);
        if carries.saturating_add(slices) > cx.args.len() {
            let message = format!("expected at least {carries} + {slices} operands, got {}", cx.args.len());
            return Err(Violation::new("C1", message));
        }
        cx.require_size("C1", "a length", &self.length)?;
        let mut enter = cx.args[..carries].to_vec();
        for arg in &cx.args[carries..carries + slices] {
            let Type::Tensor(tensor) = arg else {
                return Err(Violation::new(
                    "C2",
                    format!("expected a tensor to slice, got {}", cx.text(arg)),
                ));
            };
            let Some((first, rest)) = tensor.shape.split_first() else {
                return Err(Violation::new(
                    "C2",
                    format!("expected a first dimension to slice, got {}", cx.text(arg)),
                ));
            };
            cx.require_eq("C2", &self.length, first, |cx| {
                let (length, got) = (self.length.display(cx.mesh).to_string(), cx.text(arg));
                format!("expected a first dimension of {length}, got {got}")
            })?;
            enter.push(tensor.with_shape(rest.to_vec()).into());
        }
        enter.extend_from_slice(&cx.args[carries + slices..]);
        let block = &cx.blocks[0];
        check_params(cx, "C3", &enter, &block.params)?;
        let length_varies = cx.facts.varies(&self.length);
        if block.results.len() < carries {
            return Err(Violation::new(
                "C4",
                format!("expected at least {}, got {}", count(carries, "result"), block.results.len()),
            ));
        }
        let mut results = Vec::new();
        for (result, param) in block.results.iter().zip(&block.params[..carries]) {
            if !fits(result, param, cx.facts) {
                let (expected, got) = (cx.text(param), cx.text(result));
                let violation = Violation::new("C4", format!("expected a carry of {expected}, got {got}"));
                return Err(violation
                    .note("give the parameter the wider set of axes, or make the carry equal on all ranks"));
            }
            let fixed = !matches!(param, Type::Tensor(_)) && !length_varies.is_empty();
            if fixed || !length_varies.is_subset(param.varies()) {
                let axes = cx.mesh.axes_text(length_varies);
                return Err(Violation::new(
                    "C6",
                    format!(
                        "expected a carry that differs over {axes} like the length, got {}",
                        cx.text(param)
                    ),
                ));
            }
            results.push(param.clone());
        }
        if let Some(rest) = block.params[carries + slices..].iter().find(|ty| ty.is_pending()) {
            return Err(Violation::new(
                "C5",
                format!("expected no pending in every iteration, got {}", cx.text(rest)),
            ));
        }
        for stacked in &block.results[carries..] {
            let Type::Tensor(tensor) = stacked else {
                return Err(Violation::new(
                    "C5",
                    format!("expected a tensor to stack, got {}", cx.text(stacked)),
                ));
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
        Flow::Scan { length: &self.length, carries: self.carries, slices: self.slices }
    }
    fn takes(&self) -> Takes {
        Takes::Any
    }
}
