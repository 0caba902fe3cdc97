//! Placements that only the elements show: digests of tensors, and the declaration that ranks have equal ones.

use consort_types::{Dtype, Failure, GroupName, Headline};

use crate::index::Index;
use crate::literal::{Data, Literal};
use crate::op;
use crate::ops::{
    Alias, Cost, CostCx, Cotangents, Effects, EvalCx, EvalError, InferCx, Layouts, OpDef, VjpCx,
};
use crate::types::{TensorType, Type};
use consort_types::layout::Layout;

op! {
    /// A digest of the elements, bit for bit. Tensors with the same elements have the same digest; others have another one,
    /// but for one pair in 2^64.
    pub struct Digest("digest")(x) {}
    example "mesh ()\n\nfunc @f(v0: u8[3]) -> i64[1] {\n    v1 = digest v0 : i64[1]\n    return v1\n}\n; run: @f([1, 2, 3]) == [1769602743430480034]\n"
}

/// The digest of a tensor's bytes: its length, then each 8 bytes as a number, and at the end what is left.
fn digest(x: &Literal) -> i64 {
    let bytes = x.to_bytes();
    let mut words = Vec::new();
    for start in (0..bytes.len() / 8 * 8).step_by(8) {
        words.push((0..8).map(|i| u64::from(bytes[start + i]) << (8 * i)).sum::<u64>());
    }
    let rest = &bytes[bytes.len() / 8 * 8..];
    words.push(rest.iter().enumerate().map(|(i, byte)| u64::from(*byte) << (8 * i)).sum());
    let mut state = bytes.len() as u64;
    for word in words {
        let product = u128::from(state ^ word) * 0x9e37_79b9_7f4a_7c15;
        state = product as u64;
        state ^= state / (1 << 29);
    }
    state as i64
}

impl OpDef for Digest {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        Ok(vec![TensorType::new(Dtype::I64, vec![Index::constant(1)], x.varies).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.arg_numel(0))
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![Literal::ints(Dtype::I64, vec![1], vec![digest(args[0])])])
    }
}

op! {
    /// The operand, declared to be equal on ranks that differ only in their places along axes: its type no longer has these
    /// axes. It is a view, and when it runs, it fails on all of these ranks if they have other elements.
    ///
    /// `digests` is what all_gather gives of each rank's `digest`. The own digest is computed again and must be every one of
    /// them, so that no other numbers can pass for them.
    ///
    /// (C1) The group is axes of the mesh.
    ///
    /// (C2) There is an i64 digest for each member of the group.
    ///
    /// (C3) The digests are equal on all members of the group.
    ///
    /// (C4) So are the sizes of the operand.
    pub struct EqualOver("equal_over")(x, digests) {
        /// The axes.
        over: GroupName
    }
    example "mesh (dp: 2)\n\nfunc @f(v0: f32[2]{dp}) -> f32[2] {\n    v1 = digest v0 : i64[1]{dp}\n    v2 = all_gather_start[dims=[0], over=dp] v1 : pending<i64[2]>\n    v3 = wait v2 : i64[2]\n    v4 = equal_over[over=dp] v0, v3 : f32[2]\n    return v4\n}\n; run: @f([1, 2] | [1, 2]) == [1, 2]\n"
}

impl OpDef for EqualOver {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, digests) = (cx.tensor(0)?, cx.tensor(1)?);
        let GroupName::Axes(axes) = self.over else {
            let got = cx.mesh.group_text(self.over);
            return Err(Failure::rule("C1", ("axes of the mesh", format!("the list group `{got}`"))));
        };
        let n = Index::from(i64::from(cx.mesh.group_size(self.over)));
        let expected = |cx: &InferCx<'_>| {
            (format!("i64[{}] as digests", n.display(cx.mesh)), cx.text(&cx.args[1]).to_string())
        };
        let [size] = &digests.shape[..] else { return Err(Failure::rule("C2", expected(cx))) };
        if digests.dtype != Dtype::I64 {
            return Err(Failure::rule("C2", expected(cx)));
        }
        cx.require_eq("C2", &n, size, |cx| expected(cx))?;
        let differ = digests.varies.intersect(axes);
        if !differ.is_empty() {
            let (over, differ) = (cx.mesh.axes_text(axes), cx.mesh.axes_text(differ));
            let headline = (
                format!("digests that are equal over {over}"),
                format!("some that may differ over {differ}"),
            );
            return Err(Failure::rule("C3", headline).note("gather them with all_gather over these axes"));
        }
        x.shape.iter().try_for_each(|size| cx.require_equal_on("C4", "a size", size, self.over))?;
        Ok(vec![x.with_varies(x.varies.minus(axes)).into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        Cost { bytes: cx.arg_bytes(), flops: cx.arg_numel(0), ..cx.free() }
    }
    fn effects(&self) -> Effects {
        Effects::Host
    }
    fn alias(&self) -> Alias {
        Alias::View
    }
    fn view(&self, _cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        Ok(Some([x.clone()].into_iter().collect()))
    }
    fn keeps_order(&self) -> bool {
        true
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let Data::Int(all) = &args[1].data else {
            return Err(EvalError::new("the digests are not integers"));
        };
        let own = digest(args[0]);
        if all.iter().all(|other| *other == own) {
            return Ok(vec![args[0].clone()]);
        }
        let ranks: Vec<usize> = cx
            .mesh
            .members(self.over, cx.rank)
            .unwrap_or_default()
            .iter()
            .map(|rank| rank.0 as usize)
            .collect();
        let expected = format!("a tensor that is equal over {}", cx.mesh.group_text(self.over));
        Err(EvalError::new(Headline::unequal(expected, &ranks, all)))
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        // The result is any of the equal operands, so each has an equal share in it.
        let axes = cx.mesh().group_axes(self.over).intersect(cx.arg_ty(0).varies);
        let n = cx.mesh().group_size(GroupName::Axes(axes));
        cx.each(|_| Some(if n == 1 { cx.cotangent(0) } else { cx.cotangent(0) / f64::from(n) }))
    }
}
