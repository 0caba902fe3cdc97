//! Recipes with blocks: conditionals and loops, filled with steps of their own.

use consort_types::{Axes, Dtype, GroupName, Reduce};

use super::{Growing, is_float};
use crate::generate::Flying;
use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::ops::*;
use consort_ir::program::Block;
use consort_ir::types::{TensorType, Type};

/// The maximum nesting of blocks.
const DEPTH: usize = 2;

impl Growing<'_> {
    /// A block of these parameters with a few random steps and no communication over `quiet`. Its results are chosen
    /// among its values at the end, when all its starts have been waited for.
    fn block(
        &mut self,
        params: Vec<Type>,
        quiet: Axes,
        results: impl FnOnce(&mut Self, &[Value]) -> Option<Vec<Value>>,
    ) -> Option<Block> {
        let params = self.builder.begin_block(params);
        let (pendings, tensors): (Vec<Value>, Vec<Value>) =
            params.iter().partition(|param| self.builder.ty(**param).is_ok_and(Type::is_pending));
        let flying = pendings.into_iter().map(|pending| Flying { pending, into: None }).collect();
        let quiet = self.quiet.union(quiet);
        let outside = (
            std::mem::replace(&mut self.tensors, tensors),
            std::mem::replace(&mut self.flying, flying),
            std::mem::replace(&mut self.quiet, quiet),
        );
        for _ in 0..self.rng.below(6) {
            self.step();
        }
        while !self.flying.is_empty() {
            self.wait()?;
        }
        let results = results(self, &params)?;
        let block = self.builder.end_block(&results);
        (self.tensors, self.flying, self.quiet) = outside;
        Some(block)
    }

    /// A value of the block being filled that has the type of a parameter.
    fn result_like(&mut self, param: Value) -> Option<Value> {
        let ty = self.ty(param)?;
        Some(self.like(param, &ty))
    }

    /// Some axes over which communication is allowed here.
    fn axes_but(&mut self, differs: Axes) -> Axes {
        self.axes().minus(differs).minus(self.quiet)
    }
}

/// Both blocks take a few tensors, sometimes a pending that they wait for, and return values of the same types. If the
/// condition is equal on all ranks they may return a pending.
pub(super) fn cond(g: &mut Growing<'_>) -> Option<()> {
    if g.builder.depth() >= DEPTH {
        return None;
    }
    let condition = g.condition()?;
    let differs = g.builder.ty(condition).ok()?.varies();
    let n = 1 + g.rng.below(3);
    let mut args = (0..n).map(|_| g.any()).collect::<Option<Vec<_>>>()?;
    let returned = 1 + g.rng.below(n);
    let free: Vec<usize> = (0..g.flying.len()).filter(|at| g.flying[*at].into.is_none()).collect();
    if !free.is_empty() && g.rng.one_in(3) {
        let at = g.rng.pick(&free);
        args.push(g.flying.swap_remove(at).pending);
    }
    let types = args.iter().map(|arg| g.builder.ty(*arg).ok().cloned()).collect::<Option<Vec<_>>>()?;
    let flies = differs.is_empty() && g.rng.one_in(4);
    let over = GroupName::Axes(g.axes_but(differs));
    let mut blocks = Vec::new();
    for _ in 0..2 {
        let block = g.block(types.clone(), differs, |g, params| {
            let mut results =
                params[..returned].iter().map(|param| g.result_like(*param)).collect::<Option<Vec<_>>>()?;
            if flies {
                let operand = g.result_like(params[0])?;
                let start = if g.ty(operand)?.dtype.is_float() { Reduce::Sum } else { Reduce::Max };
                results.push(g.builder.one(AllReduceStart { reduce: start, over }, &[operand]).ok()?);
            }
            Some(results)
        })?;
        blocks.push(block);
    }
    let operands: Vec<Value> = [condition].into_iter().chain(args.iter().copied()).collect();
    let mut results = g.builder.node(Op::new(Cond {}), &operands, blocks).ok()?;
    if flies {
        let pending = results.pop()?;
        g.flying.push(Flying { pending, into: None });
    }
    if g.rng.one_in(2) {
        g.forget(args[0]);
    }
    g.tensors.extend(results);
    Some(())
}

/// A loop over the entries of a tensor, or of a fixed length: carries that the block may write, an entry, and values
/// that every iteration sees; it may stack any value of the block.
pub(super) fn scan(g: &mut Growing<'_>) -> Option<()> {
    if g.builder.depth() >= DEPTH {
        return None;
    }
    let sliced = if g.rng.one_in(4) { None } else { Some(g.any_where(|ty| ty.rank() > 0)?) };
    let length = match &sliced {
        Some((_, ty)) => ty.shape[0].clone(),
        None => Index::constant(g.rng.below(4) as i64),
    };
    let differs = g.builder.facts().varies(&length);
    let all = g.builder.mesh().all_axes();
    let carries = 1 + g.rng.below(2);
    let mut args = (0..carries).map(|_| g.any()).collect::<Option<Vec<_>>>()?;
    let mut types = Vec::new();
    for arg in &args {
        types.push(g.ty(*arg)?.with_varies(all).into());
    }
    let slices = usize::from(sliced.is_some());
    if let Some((x, ty)) = sliced {
        args.push(x);
        types.push(ty.with_shape(ty.shape[1..].to_vec()).into());
    }
    for _ in 0..g.rng.below(2) {
        let fixed = g.any()?;
        args.push(fixed);
        types.push(g.ty(fixed)?.into());
    }
    let stacked = g.rng.below(3);
    let body = g.block(types, differs, |g, params| {
        let mut results =
            params[..carries].iter().map(|param| g.result_like(*param)).collect::<Option<Vec<_>>>()?;
        for _ in 0..stacked {
            results.push(g.any()?);
        }
        Some(results)
    })?;
    let op = Scan { length, carries, slices, reverse: Flag(g.rng.one_in(3)) };
    let results = g.builder.node(Op::new(op), &args, vec![body]).ok()?;
    if g.rng.one_in(2) {
        g.forget(args[0]);
    }
    g.tensors.extend(results);
    Some(())
}

/// A loop that carries a pending from one iteration to the next.
pub(super) fn scan_of_pendings(g: &mut Growing<'_>) -> Option<()> {
    let (x, ty): (Value, TensorType) = g.any_where(|ty| is_float(ty) && ty.rank() > 0)?;
    // Over no axis along which the length differs.
    let differs = g.builder.facts().varies(&ty.shape[0]);
    let over = GroupName::Axes(g.axes_but(differs));
    let entry = ty.with_shape(ty.shape[1..].to_vec());
    let whole = entry.with_varies(g.builder.mesh().all_axes());
    let zero = Constant { dtype: ty.dtype, shape: entry.shape.clone(), value: Elements::Float(0.0) };
    let zero = g.builder.one(zero, &[]).ok()?;
    let start = || AllReduceStart { reduce: Reduce::Avg, over };
    let first = g.builder.one(start(), &[zero]).ok()?;
    let pending = Type::Pending(vec![whole]);
    let params = g.builder.begin_block(vec![pending, entry.into()]);
    let got = g.builder.op(Wait {}, &params[..1]).ok()?;
    let sum = g.builder.one(Add {}, &[got[0], params[1]]).ok()?;
    let next = g.builder.one(start(), &[sum]).ok()?;
    let body = g.builder.end_block(&[next, sum]);
    let reverse = Flag(g.rng.one_in(3));
    let scan = Scan { length: ty.shape[0].clone(), carries: 1, slices: 1, reverse };
    let results = g.builder.node(Op::new(scan), &[first, x], vec![body]).ok()?;
    g.flying.push(Flying { pending: results[0], into: None });
    g.tensors.push(results[1]);
    Some(())
}

/// A loop that counts, which sometimes ends sooner, or does not begin, by another condition.
pub(super) fn while_loop(g: &mut Growing<'_>) -> Option<()> {
    if g.builder.depth() >= DEPTH {
        return None;
    }
    let all = g.builder.mesh().all_axes();
    let zero = number(g, 0)?;
    let rounds = g.rng.below(4);
    let goes = goes_on(g, zero, rounds as i64)?;
    let carried = 1 + g.rng.below(2);
    let mut args = vec![goes, zero];
    let mut types: Vec<Type> = vec![g.builder.ty(goes).ok()?.clone(), g.builder.ty(zero).ok()?.clone()];
    for _ in 0..carried {
        let arg = g.any()?;
        args.push(arg);
        types.push(g.ty(arg)?.with_varies(all).into());
    }
    let carries = args.len();
    for _ in 0..g.rng.below(2) {
        let fixed = g.any()?;
        args.push(fixed);
        types.push(g.ty(fixed)?.into());
    }
    let body = g.block(types, Axes::NONE, |g, params| {
        let one = number(g, 1)?;
        let count = g.builder.one(Add {}, &[params[1], one]).ok()?;
        let mut results = vec![goes_on(g, count, rounds as i64)?, count];
        for param in &params[2..carries] {
            results.push(g.result_like(*param)?);
        }
        Some(results)
    })?;
    let op = While { limit: rounds + g.rng.below(2), expected: rounds, carries };
    let results = g.builder.node(Op::new(op), &args, vec![body]).ok()?;
    if g.rng.one_in(2) {
        g.forget(args[2]);
    }
    g.tensors.extend(results);
    Some(())
}

/// A 0-d number.
fn number(g: &mut Growing<'_>, value: i64) -> Option<Value> {
    g.builder.one(Constant { dtype: Dtype::I64, shape: vec![], value: Elements::Int(value) }, &[]).ok()
}

/// Whether a count is below a number, and sometimes another condition holds too; equal on all ranks.
fn goes_on(g: &mut Growing<'_>, count: Value, rounds: i64) -> Option<Value> {
    let rounds = number(g, rounds)?;
    let below = g.builder.one(Lt {}, &[count, rounds]).ok()?;
    let other = g.condition()?;
    if g.rng.one_in(3) && g.builder.ty(other).ok()?.varies().is_empty() {
        return g.builder.one(And {}, &[below, other]).ok();
    }
    Some(below)
}
