//! Views that change nothing but what gradients do: `spread` and `stop_gradient`.

use consort_types::layout::Layout;
use consort_types::{Failure, GroupName, Reduce};
use smallvec::smallvec;

use crate::literal::Literal;
use crate::op;
use crate::ops::{
    Alias, AllReduceStart, Cost, CostCx, Cotangents, EvalCx, EvalError, InferCx, Layouts, OpDef, VjpCx,
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
        let sum = AllReduceStart { reduce: Reduce::Sum, over: self.over };
        Ok(vec![cx.start_wait(sum, &[cx.cotangent(0)]).first().copied()])
    }
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
