//! Collectives with a root: one member sends to all, or receives from all.

use consort_types::{Collective, Failure, GroupName, Kind, Reduce};

use crate::index::Index;
use crate::literal::Literal;
use crate::op;
use crate::ops::collective::{
    at, by_rank, check_covers, check_dims, check_equal_shapes, check_reduce, check_same_shapes, fold_all,
    gathered, join, n_members, only_at, own, part, pending, scaled, scattered, shared, slope, unless_common,
};
use crate::ops::{Cost, CostCx, Cotangents, EvalError, GroupEvalCx, InferCx, OpDef, Term, VjpCx};
use crate::types::Type;

fn check_root(
    cx: &InferCx<'_>,
    rule: &'static str,
    root: usize,
    over: GroupName,
) -> Result<(), Box<Failure>> {
    let n = cx.mesh.group_size(over);
    if root < n as usize {
        return Ok(());
    }
    Err(Failure::rule(rule, (format!("a root below {n}, the size of the group"), root.to_string())))
}
op! {
    /// Gives every member the tensors of one of them.
    ///
    /// (C1) The root is a rank of the group.
    ///
    /// (C2) The shapes are equal on all members.
    pub struct BroadcastStart("broadcast_start")(x; more..) {
        /// The member whose tensors all get.
        root: usize,
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{tp}) -> f32[2] {\n    v1 = broadcast_start[root=1, over=tp] v0 : pending<f32[2]>\n    v2 = wait v1 : f32[2]\n    return v2\n}\n; run: @f([1, 2] | [3, 4]) == [3, 4]\n"
}

impl OpDef for BroadcastStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        check_root(cx, "C1", self.root, self.over)?;
        check_equal_shapes(cx, "C2", self.over)?;
        Ok(pending(
            cx.tensors()?.iter().map(|x| x.with_varies(shared(x.varies, self.over, cx.mesh))).collect(),
        ))
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.comm(Index::constant(0), cx.result_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective { root: Some(self.root), ..Collective::new(Kind::Broadcast, self.over) })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        check_same_shapes(args)?;
        Ok(vec![args[self.root].clone(); cx.n()])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        cx.together(|wanted, terms| match self.over {
            GroupName::Axes(_) => terms.iter().map(|term| only_at(cx, *term, self.root, self.over)).collect(),
            GroupName::List(_) => {
                let sum = ReduceStart { reduce: Reduce::Sum, root: self.root, over: self.over };
                let all = |_: &[usize], terms: &[Term<'c, 'm>]| cx.start_wait(sum, terms);
                unless_common(cx, wanted, terms, self.over, |_, term| term, all)
            }
        })
    }
}

op! {
    /// Reduces tensors over the members for one of them; the others get zeros.
    ///
    /// (C1) The reduction is defined for the element types.
    ///
    /// (C2) The root is a rank of the group.
    ///
    /// (C3) The shapes are equal on all members.
    pub struct ReduceStart("reduce_start")(x; more..) {
        /// The reduction.
        reduce: Reduce,
        /// The member that gets the result.
        root: usize,
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{tp}) -> f32[2]{tp} {\n    v1 = reduce_start[reduce=max, root=1, over=tp] v0 : pending<f32[2]{tp}>\n    v2 = wait v1 : f32[2]{tp}\n    return v2\n}\n; run: @f([1, 20] | [10, 2]) == [0, 0] | [10, 20]\n"
}

impl OpDef for ReduceStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        check_reduce(cx, "C1", self.reduce)?;
        check_root(cx, "C2", self.root, self.over)?;
        check_equal_shapes(cx, "C3", self.over)?;
        Ok(pending(cx.tensors()?.iter().map(|x| x.with_varies(own(x.varies, self.over, cx.mesh))).collect()))
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        let n = n_members(cx.mesh, self.over);
        let others = &n - &Index::constant(1);
        let wire = (&(&Index::constant(2) * &others) * &cx.arg_bytes()).div(&n);
        cx.comm((&others * &cx.result_numel()).div(&n), wire)
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective {
            reduce: Some(self.reduce),
            root: Some(self.root),
            ..Collective::new(Kind::Reduce, self.over)
        })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        let sums = fold_all(args, self.reduce)?;
        Ok(at_root(sums, self.root, cx.n()))
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let (mesh, over) = (cx.mesh(), self.over);
        let slope = slope(self.reduce, mesh.group_size(over))?;
        let broadcast = BroadcastStart { root: self.root, over };
        if slope == 1.0 || mesh.covers(over) {
            return cx.together(|_, terms| cx.start_wait(broadcast, &scaled(terms, slope)));
        }
        // A rank outside of the group has its operand as the result.
        let member = by_rank(mesh, over, |me| Index::from(i64::from(me.is_some())));
        cx.together(|_, terms| {
            let scaled = |term: &Term<'c, 'm>| *term * (cx.size(&term.ty(), &member) * (slope - 1.0) + 1.0);
            cx.start_wait(broadcast, &terms.iter().map(scaled).collect::<Vec<_>>())
        })
    }
}

/// The tensors for the root, zeros of their shapes for the others.
fn at_root(tensors: Vec<Literal>, root: usize, n: usize) -> Vec<Vec<Literal>> {
    let zeros: Vec<Literal> = tensors.iter().map(|x| Literal::zeros(x.dtype, x.shape.clone())).collect();
    let mut all = vec![zeros; n];
    all[root] = tensors;
    all
}

op! {
    /// Concatenates the members' tensors along a dimension for one of them; the others get zeros.
    ///
    /// (C1) There is a dimension for each operand, and it exists (0 for a 0-d tensor).
    ///
    /// (C2) The root is a rank of the group.
    ///
    /// (C3) The shapes are equal on all members.
    ///
    /// (C4) The group has every rank in it.
    pub struct GatherStart("gather_start")(x; more..) {
        /// The dimension to join along, for each operand.
        dims: Vec<usize>,
        /// The member that gets the result.
        root: usize,
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[1]{tp}) -> f32[2]{tp} {\n    v1 = gather_start[dims=[0], root=0, over=tp] v0 : pending<f32[2]{tp}>\n    v2 = wait v1 : f32[2]{tp}\n    return v2\n}\n; run: @f([1] | [2]) == [1, 2] | [0, 0]\n"
}

impl OpDef for GatherStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        check_dims(cx, "C1", &self.dims, true)?;
        check_root(cx, "C2", self.root, self.over)?;
        check_equal_shapes(cx, "C3", self.over)?;
        check_covers(cx, "C4", self.over)?;
        gathered(cx, &self.dims, self.over, own)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.comm(Index::constant(0), &(&n_members(cx.mesh, self.over) - &Index::constant(1)) * &cx.arg_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective {
            dims: &self.dims,
            root: Some(self.root),
            ..Collective::new(Kind::Gather, self.over)
        })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        check_same_shapes(args)?;
        let all = self.dims.iter().enumerate().map(|(i, dim)| join(args, i, *dim)).collect();
        Ok(at_root(all, self.root, cx.n()))
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        cx.together(|wanted, terms| {
            let dims = at(&self.dims, wanted);
            cx.start_wait(ScatterStart { dims, root: self.root, over: self.over }, terms)
        })
    }
}

op! {
    /// Gives each member its shard, along a dimension, of one member's tensors.
    ///
    /// (C1) There is a dimension for each operand, and it exists.
    ///
    /// (C2) The dimension is divisible by the size of the group.
    ///
    /// (C3) The root is a rank of the group.
    ///
    /// (C4) The shapes are equal on all members.
    ///
    /// (C5) The group has every rank in it.
    pub struct ScatterStart("scatter_start")(x; more..) {
        /// The dimension to shard, for each operand.
        dims: Vec<usize>,
        /// The member whose tensors are sharded.
        root: usize,
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{tp}) -> f32[1]{tp} {\n    v1 = scatter_start[dims=[0], root=0, over=tp] v0 : pending<f32[1]{tp}>\n    v2 = wait v1 : f32[1]{tp}\n    return v2\n}\n; run: @f([1, 2] | [0, 0]) == [1] | [2]\n"
}

impl OpDef for ScatterStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        check_dims(cx, "C1", &self.dims, false)?;
        check_root(cx, "C3", self.root, self.over)?;
        check_equal_shapes(cx, "C4", self.over)?;
        check_covers(cx, "C5", self.over)?;
        scattered(cx, "C2", &self.dims, self.over)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.comm(Index::constant(0), cx.result_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective {
            dims: &self.dims,
            root: Some(self.root),
            ..Collective::new(Kind::Scatter, self.over)
        })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        check_same_shapes(args)?;
        let own =
            |m| args[self.root].iter().zip(&self.dims).map(|(x, dim)| part(x, *dim, m, cx.n())).collect();
        Ok((0..cx.n()).map(own).collect())
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        cx.together(|wanted, terms| {
            let dims = at(&self.dims, wanted);
            cx.start_wait(GatherStart { dims, root: self.root, over: self.over }, terms)
        })
    }
}
