//! Collectives whose members have parts of different sizes.

use consort_types::{Collective, Failure, GroupName, Kind, Reduce};

use crate::index::Index;
use crate::literal::Literal;
use crate::op;
use crate::ops::collective::{
    check_covers, check_reduce, column, is_common, join, n_members, own, pending, scaled, shared, slope,
};
use crate::ops::{Cost, CostCx, Cotangents, EvalError, GroupEvalCx, InferCx, OpDef, VjpCx, fold, group_rank};
use crate::types::{TensorType, Type};

op! {
    /// Concatenates shards of different sizes along a dimension, in group order; every member gets the result.
    ///
    /// (C1) The dimension exists.
    ///
    /// (C2) There is a size for each member, not negative, equal on all of them.
    ///
    /// (C3) The dimension is this member's size: `pick(rank(axis), sizes..)`.
    ///
    /// (C4) All other dimensions are equal on all members.
    ///
    /// (C5) The group has every rank in it.
    pub struct AllGatherVStart("all_gather_v_start")(x) {
        /// The dimension to join along.
        dim: usize,
        /// The size of each member's tensor there.
        sizes: Vec<Index>,
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[pick(rank(tp),2,1)]{tp}) -> f32[3] {\n    v1 = all_gather_v_start[dim=0, sizes=[2, 1], over=tp] v0 : pending<f32[3]>\n    v2 = wait v1 : f32[3]\n    return v2\n}\n; run: @f([1, 2] | [3]) == [1, 2, 3]\n"
}

/// Checks the uneven sizes; returns them and this member's.
fn check_uneven(
    cx: &mut InferCx<'_>,
    x: &TensorType,
    dim: usize,
    sizes: &[Index],
    over: GroupName,
) -> Result<Index, Box<Failure>> {
    cx.require_dim("C1", dim, x.rank())?;
    let n = cx.mesh.group_size(over) as usize;
    if sizes.len() != n {
        return Err(Failure::rule(
            "C2",
            (format!("{n} sizes, one for each member"), sizes.len().to_string()),
        ));
    }
    for size in sizes {
        cx.require_size("C2", "a size", size)?;
        cx.require_equal_on("C2", "a size", size, over)?;
    }
    for (i, size) in x.shape.iter().enumerate().filter(|(i, _)| *i != dim) {
        cx.require_equal_on("C4", &format!("dimension {i}"), size, over)?;
    }
    check_covers(cx, "C5", over)?;
    Ok(Index::pick(&group_rank(cx.mesh, over), sizes))
}

impl OpDef for AllGatherVStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        let mine = check_uneven(cx, x, self.dim, &self.sizes, self.over)?;
        cx.require_eq("C3", &mine, &x.shape[self.dim], |cx| {
            let (mine, got) =
                (mine.display(cx.mesh).to_string(), x.shape[self.dim].display(cx.mesh).to_string());
            (format!("dimension {} to be {mine}, this member's entry of the sizes", self.dim), got)
        })?;
        let mut shape = x.shape.clone();
        shape[self.dim] = Index::sum(&self.sizes);
        Ok(pending(vec![x.with_shape(shape).with_varies(shared(x.varies, self.over, cx.mesh))]))
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.comm(Index::constant(0), &cx.result_bytes() - &cx.arg_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective {
            dims: std::slice::from_ref(&self.dim),
            sizes: &self.sizes,
            ..Collective::new(Kind::AllGatherV, self.over)
        })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        for (m, member) in cx.members.iter().enumerate() {
            let (expected, got) = (member.size(&self.sizes[m])?, args[m][0].shape[self.dim]);
            if expected != got {
                let expected = format!("dimension {} of {} to be {expected}", self.dim, member.rank);
                return Err(EvalError::new((expected, got.to_string())));
            }
        }
        Ok(vec![vec![join(args, 0, self.dim)]; cx.n()])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let part = |me: &Index| {
            let starts: Vec<Index> = (0..self.sizes.len()).map(|i| Index::sum(&self.sizes[..i])).collect();
            cx.cotangent(0).narrow(self.dim, &Index::pick(me, &starts), &Index::pick(me, &self.sizes))
        };
        cx.together(|_, terms| match self.over {
            GroupName::Axes(_) => vec![part(&group_rank(cx.mesh(), self.over))],
            GroupName::List(_) if is_common(cx, 0, self.over) => {
                let parts = (0..self.sizes.len()).map(|i| part(&Index::from(i)));
                parts.reduce(|sum, part| sum + part).into_iter().collect()
            }
            GroupName::List(_) => {
                let (dim, sizes) = (self.dim, self.sizes.clone());
                cx.start_wait(ReduceScatterVStart { reduce: Reduce::Sum, dim, sizes, over: self.over }, terms)
            }
        })
    }
}

op! {
    /// Reduces a tensor over the members and gives each a shard of its own size along a dimension.
    ///
    /// (C1) The dimension exists.
    ///
    /// (C2) There is a size for each member, not negative, equal on all of them.
    ///
    /// (C3) The sizes add up to the dimension, which is equal on all members.
    ///
    /// (C4) All other dimensions are equal on all members.
    ///
    /// (C5) The group has every rank in it.
    ///
    /// (C6) The reduction is defined for the element type.
    pub struct ReduceScatterVStart("reduce_scatter_v_start")(x) {
        /// The reduction.
        reduce: Reduce,
        /// The dimension to shard.
        dim: usize,
        /// The size of each member's part.
        sizes: Vec<Index>,
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[3]{tp}) -> f32[pick(rank(tp),2,1)]{tp} {\n    v1 = reduce_scatter_v_start[reduce=sum, dim=0, sizes=[2, 1], over=tp] v0 : pending<f32[pick(rank(tp),2,1)]{tp}>\n    v2 = wait v1 : f32[pick(rank(tp),2,1)]{tp}\n    return v2\n}\n; run: @f([1, 2, 3] | [10, 20, 30]) == [11, 22] | [33]\n"
}

impl OpDef for ReduceScatterVStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        check_reduce(cx, "C6", self.reduce)?;
        let mine = check_uneven(cx, x, self.dim, &self.sizes, self.over)?;
        let total = Index::sum(&self.sizes);
        cx.require_equal_on("C3", "the dimension", &x.shape[self.dim], self.over)?;
        cx.require_eq("C3", &x.shape[self.dim], &total, |cx| {
            let (size, sizes) = (x.shape[self.dim].display(cx.mesh).to_string(), cx.shape_text(&self.sizes));
            (format!("sizes that add up to {size}"), sizes.to_string())
        })?;
        let mut shape = x.shape.clone();
        shape[self.dim] = mine;
        Ok(pending(vec![x.with_shape(shape).with_varies(own(x.varies, self.over, cx.mesh))]))
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        let others = &n_members(cx.mesh, self.over) - &Index::constant(1);
        cx.comm(&others * &cx.result_numel(), &others * &cx.result_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective {
            reduce: Some(self.reduce),
            dims: std::slice::from_ref(&self.dim),
            sizes: &self.sizes,
            ..Collective::new(Kind::ReduceScatterV, self.over)
        })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        let sum = fold(self.reduce, &column(args, 0))?;
        let sizes = self.sizes.iter().map(|size| cx.members[0].size(size)).collect::<Result<Vec<_>, _>>()?;
        if sizes.iter().fold(0usize, |a, b| a.saturating_add(*b)) != sum.shape[self.dim] {
            return Err(EvalError::new((
                format!("sizes that add up to {}", sum.shape[self.dim]),
                format!("{sizes:?}"),
            )));
        }
        Ok((0..cx.n()).map(|m| vec![sum.narrow(self.dim, sizes[..m].iter().sum(), sizes[m])]).collect())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let slope = slope(self.reduce, cx.mesh().group_size(self.over))?;
        cx.together(|_, terms| {
            let (dim, sizes) = (self.dim, self.sizes.clone());
            cx.start_wait(AllGatherVStart { dim, sizes, over: self.over }, &scaled(terms, slope))
        })
    }
}
