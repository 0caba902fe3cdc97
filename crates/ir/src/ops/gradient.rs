//! Views that change nothing but what gradients do: where they sum, where they stop, and what they compute again.

use consort_types::layout::Layout;
use consort_types::{Dtype, Failure, GroupName, Reduce};
use smallvec::smallvec;

use crate::builder::Builder;
use crate::entity::Value;
use crate::literal::Literal;
use crate::op;
use crate::ops::{
    Alias, AllReduceStart, Cast, Cost, CostCx, Cotangents, EvalCx, EvalError, InferCx, Layouts, OpDef, VjpCx,
};
use crate::types::Type;

op! {
    /// The operand as a value that may differ over these axes: the same bits, a wider type. Before a gradient is taken,
    /// one stands wherever a value that is equal on all ranks of a group enters a computation that differs between
    /// them. Its gradient is the sum of the cotangents over these axes, and no other op's is.
    ///
    /// (C1) The group is one of axes, not a list.
    ///
    /// (C2) The operand is equal over these axes.
    pub struct Spread("spread")(x) {
        /// The axes over which the result may differ.
        over: GroupName
    }
    example "mesh (dp: 2)\n\nfunc @f(v0: f32[2], v1: f32[2]{dp}) -> f32[2]{dp} {\n    v2 = spread[over=dp] v0 : f32[2]{dp}\n    v3 = mul v2, v1 : f32[2]{dp}\n    return v3\n}\n; run: @f([1, 2], [3, 4] | [5, 6]) == [3, 8] | [5, 12]\n"
}

impl OpDef for Spread {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        let GroupName::Axes(axes) = self.over else {
            return Err(Failure::rule(
                "C1",
                ("axes", format!("the list group `{}`", cx.mesh.group_text(self.over))),
            ));
        };
        let differs = x.varies.intersect(axes);
        if !differs.is_empty() {
            let expected = format!("an operand equal over {}", cx.mesh.axes_text(axes));
            return Err(Failure::rule("C2", (expected, cx.text(&cx.args[0]))));
        }
        Ok(vec![x.with_varies(x.varies.union(axes)).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn view(&self, _cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        Ok(Some(smallvec![x.clone()]))
    }
    fn keeps_order(&self) -> bool {
        true
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![args[0].clone()])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let sum = |b: &mut Builder<'m>, x| sum_over(b, x, self.over, cx.sums());
        Ok(vec![Some(cx.build(sum, cx.cotangent(0)))])
    }
}

/// The sum of cotangents over ranks, in element type `least` if theirs is smaller.
pub fn sum_over(
    b: &mut Builder<'_>,
    x: Value,
    over: GroupName,
    least: Option<Dtype>,
) -> Result<Value, Box<Failure>> {
    let own = b.tensor_ty(x)?.dtype;
    let wide = least.filter(|least| least.size() > own.size());
    let x = wide.map_or(Ok(x), |to| b.one(Cast { to }, &[x]))?;
    let sum = b.start_wait(AllReduceStart { reduce: Reduce::Sum, over }, &[x])?[0];
    wide.map_or(Ok(sum), |_| b.one(Cast { to: own }, &[sum]))
}

op! {
    /// The operand, through which no gradient flows: for a gradient it is a constant.
    pub struct StopGradient("stop_gradient")(x) {}
    example "mesh ()\n\nfunc @f(v0: f32[2]) -> f32[2] {\n    v1 = stop_gradient v0 : f32[2]\n    return v1\n}\n; run: @f([1, 2]) == [1, 2]\n"
}

impl OpDef for StopGradient {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![cx.tensor(0)?.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn view(&self, _cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        Ok(Some(smallvec![x.clone()]))
    }
    fn keeps_order(&self) -> bool {
        true
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![args[0].clone()])
    }
    fn stops_gradient(&self) -> bool {
        true
    }
}

/// The rules of a view that gives its operand as it is, and a cotangent to it as it is.
macro_rules! same {
    ($name:ident) => {
        impl OpDef for $name {
            fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
                Ok(vec![cx.tensor(0)?.clone().into()])
            }
            fn cost(&self, cx: &CostCx<'_>) -> Cost {
                cx.free()
            }
            fn alias(&self) -> Alias {
                Alias::View
            }
            fn view(&self, _cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
                Ok(Some(smallvec![x.clone()]))
            }
            fn keeps_order(&self) -> bool {
                true
            }
            fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
                Ok(vec![args[0].clone()])
            }
            fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
                Ok(vec![Some(cx.cotangent(0))])
            }
        }
    };
}

op! {
    /// The operand, from which a gradient computes again what it needs: what depends on the result is not kept for the
    /// backward, up to a `keep`.
    pub struct Recompute("recompute")(x) {}
    example "mesh ()\n\nfunc @f(v0: f32[2]) -> f32[2] {\n    v1 = recompute v0 : f32[2]\n    v2 = exp v1 : f32[2]\n    v3 = keep v2 : f32[2]\n    return v3\n}\n; run: @f([0, 0]) == [1, 1]\n"
}

same!(Recompute);

op! {
    /// The operand, as a value that is kept for the backward again: it ends what a `recompute` has begun.
    pub struct Keep("keep")(x) {}
    example "mesh ()\n\nfunc @f(v0: f32[2]) -> f32[2] {\n    v1 = recompute v0 : f32[2]\n    v2 = neg v1 : f32[2]\n    v3 = keep v2 : f32[2]\n    return v3\n}\n; run: @f([1, 2]) == [-1, -2]\n"
}

same!(Keep);

op! {
    /// The operand, from which a backward computes something again. What depends on the result is never made one with what
    /// depends on the operand: then it would be kept after all.
    pub struct Again("again")(x) {}
    example "mesh ()\n\nfunc @f(v0: f32[2]) -> f32[2] {\n    v1 = exp v0 : f32[2]\n    v2 = again v0 : f32[2]\n    v3 = exp v2 : f32[2]\n    v4 = sub v1, v3 : f32[2]\n    return v4\n}\n; run: @f([1, 2]) == [0, 0]\n"
}

same!(Again);

op! {
    /// The operand, which is the result of an all_gather: a gradient gathers it again instead of keeping it, and its views
    /// and casts with it.
    pub struct Regather("regather")(x) {}
    example "mesh (dp: 2)\n\nfunc @f(v0: f32[1]{dp}) -> f32[2] {\n    v1 = all_gather_start[dims=[0], over=dp] v0 : pending<f32[2]>\n    v2 = wait v1 : f32[2]\n    v3 = regather v2 : f32[2]\n    return v3\n}\n; run: @f([1] | [2]) == [1, 2]\n"
}

same!(Regather);
