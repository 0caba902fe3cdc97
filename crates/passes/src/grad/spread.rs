//! Makes every implicit spread explicit: wherever a value that is equal over an axis enters a computation that differs
//! over it, an op `spread` says so, whose gradient is the sum over that axis. No other rule needs to know placements.
//!
//! - A local op: each operand that is equal over an axis over which its result differs. Per operand, not per op.
//! - A collective over axes: each operand that is equal over one of them, since each member brings its own.
//! - An operand or a result of a block that becomes a value which may differ over more axes.
//!
//! Spreads are shared between uses. One of a value that every iteration of a loop sees stands before the loop, so that
//! its sum is taken once; of a tensor that is sliced, the whole is spread. For axes over which a condition or a number
//! of iterations differs, operands are spread before the block, since no communication over these axes may stand in it.
//! Only values that a gradient passes through are spread.
//!
//! A value that is a view, a cast or a function by elements of one other is spread by spreading the other, where that
//! makes sums fewer or smaller (`origin`):
//!
//! - before a broadcast there are fewer elements to sum;
//! - before a split there is one sum instead of one for each part;
//! - what comes from before a loop is spread there. What is computed in a loop from what every iteration sees is computed
//!   before the loop, if it is not such a form of one value;
//! - before a cast to a smaller element type, an argument of the function is summed in its own.

use std::collections::BTreeMap;

use consort_ir::builder::Builder;
use consort_ir::entity::Value;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Effects, Flow, Op, Scan, Spread, Trips};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::{TensorType, Type};
use consort_types::{Axes, Collective, Failure, GroupName, Kind};

use super::active::Active;
use super::copy::{Copier, located};
use super::origin::{Enters, Made, Origins};
use super::tiles::Tiles;

/// The function with explicit spreads.
pub(super) fn make_spreads_explicit(mesh: &Mesh, func: &Func, active: &Active) -> Result<Func, Box<Failure>> {
    let copier = Copier::new(mesh, func);
    let (tiles, levels) = (Tiles::of(func, active), vec![Level::default()]);
    let mut spreader = Spreader { func, active, tiles, splits: BTreeMap::new(), copier, levels };
    for param in spreader.copier.values(&func.body.params)? {
        spreader.levels[0].origins.add_argument(param);
    }
    spreader.nodes(&func.body)?;
    let results = spreader.copier.values(&func.body.results)?;
    Ok(spreader.copier.finish(&results))
}

/// An open block.
#[derive(Default)]
struct Level {
    /// Spreads by operand and axes.
    spreads: BTreeMap<(Value, Axes), Value>,
    /// Parameters whose value comes from before the loop, with that value.
    outer: BTreeMap<Value, (Value, Enters)>,
    /// What a loop takes besides its own operands: the value outside, the parameter, and how it enters.
    more: Vec<(Value, Value, Enters)>,
    /// How its values were made.
    origins: Origins,
    /// Values that are computed before the loop instead, with those there.
    hoisted: BTreeMap<Value, Value>,
}

impl Level {
    /// A parameter whose value comes from before the loop.
    fn add_outer(&mut self, param: Value, outer: Value, enters: Enters) {
        self.outer.insert(param, (outer, enters));
        self.origins.add_outer(param, enters);
    }
}

struct Spreader<'a> {
    func: &'a Func,
    active: &'a Active,
    tiles: Tiles,
    /// The results of the splits that slices became.
    splits: BTreeMap<usize, Vec<Value>>,
    copier: Copier<'a>,
    levels: Vec<Level>,
}

impl<'a> Spreader<'a> {
    fn builder(&mut self) -> &mut Builder<'a> {
        &mut self.copier.builder
    }

    fn varies(&self, value: Value) -> Result<Axes, Box<Failure>> {
        Ok(self.copier.builder.ty(value)?.varies())
    }

    /// A value that may differ over these axes too, for use in the current block.
    fn spread(&mut self, value: Value, axes: Axes) -> Result<Value, Box<Failure>> {
        let missing = axes.minus(self.varies(value)?);
        let is_tensor = self.copier.builder.ty(value)?.as_tensor().is_some();
        if missing.is_empty() || !is_tensor {
            return Ok(value);
        }
        self.spread_in(self.levels.len() - 1, value, missing)
    }

    fn spread_in(&mut self, level: usize, value: Value, axes: Axes) -> Result<Value, Box<Failure>> {
        if let Some(known) = self.levels[level].spreads.get(&(value, axes)) {
            return Ok(*known);
        }
        let outer = self.levels[level].outer.get(&value).copied();
        let outer = outer.map_or_else(|| self.hoisted(level, value), |outer| Ok(Some(outer)))?;
        if let Some((outer, enters)) = outer {
            let outer = self.spread_in(level - 1, outer, axes)?;
            let ty = self.copier.builder.ty(value)?.widened(axes);
            let param = self.builder().outside(level, |b| b.param(ty));
            self.levels[level].add_outer(param, outer, enters);
            self.levels[level].more.push((outer, param, enters));
            self.levels[level].spreads.insert((value, axes), param);
            return Ok(param);
        }
        let earlier = self.levels[level].origins.earlier(value);
        let Some((mut made, through)) = earlier.map(|(made, through)| (made.clone(), through)) else {
            let spread = Spread { over: GroupName::Axes(axes) };
            let spread = self.builder().outside(level, |b| b.one(spread, &[value]))?;
            self.levels[level].spreads.insert((value, axes), spread);
            return Ok(spread);
        };
        made.args[through] = self.spread_in(level, made.args[through], axes)?;
        let results = made.results.clone();
        let spreads = self.make(level, made)?;
        self.levels[level].spreads.extend(results.into_iter().map(|result| (result, axes)).zip(spreads));
        self.levels[level].spreads.get(&(value, axes)).copied().ok_or_else(|| Failure::new("no result"))
    }

    /// Adds a node like another to an open block: its results.
    fn make(&mut self, level: usize, mut made: Made) -> Result<Vec<Value>, Box<Failure>> {
        let (site, op, args) = (self.copier.builder.site(), made.op.clone(), made.args.clone());
        self.builder().set_site(made.site);
        let results = self.builder().outside(level, |b| b.node(op, &args, Vec::new()));
        self.builder().set_site(site);
        made.results = results?;
        let results = made.results.clone();
        self.remember(level, made);
        Ok(results)
    }

    /// Adds the split that slices of a value become.
    fn split(&mut self, number: usize, made: Made) -> Result<Vec<Value>, Box<Failure>> {
        let parts = self.make(self.levels.len() - 1, made)?;
        self.splits.insert(number, parts.clone());
        Ok(parts)
    }

    fn remember(&mut self, level: usize, made: Made) {
        let ty = |value: &Value| self.copier.builder.ty(*value).ok().cloned();
        let args: Vec<Type> = made.args.iter().filter_map(ty).collect();
        let result = made.results.first().and_then(ty);
        self.levels[level].origins.add(made, &args, result.as_ref());
    }

    /// Computes a value before the loop, if it is the same in every iteration and is not spread by spreading an operand.
    fn hoisted(&mut self, level: usize, value: Value) -> Result<Option<(Value, Enters)>, Box<Failure>> {
        let origins = &self.levels[level].origins;
        if level == 0 || origins.invariant(value).is_none() || origins.earlier(value).is_some() {
            return Ok(None);
        }
        Ok(Some((self.hoist(level, value)?, Enters::Whole)))
    }

    /// A value that is the same in every iteration, before the loop.
    fn hoist(&mut self, level: usize, value: Value) -> Result<Value, Box<Failure>> {
        let known = &self.levels[level];
        let known = known.hoisted.get(&value).or(known.outer.get(&value).map(|(outer, _)| outer));
        if let Some(known) = known {
            return Ok(*known);
        }
        let made = self.levels[level].origins.invariant(value).cloned();
        let mut made = made.ok_or_else(|| Failure::new(format!("{value} differs between iterations")))?;
        for arg in &mut made.args {
            *arg = self.hoist(level, *arg)?;
        }
        let results = made.results.clone();
        let outer = self.make(level - 1, made)?;
        self.levels[level].hoisted.extend(results.into_iter().zip(outer));
        self.levels[level].hoisted.get(&value).copied().ok_or_else(|| Failure::new("no result"))
    }

    fn nodes(&mut self, block: &Block) -> Result<(), Box<Failure>> {
        let site = self.copier.builder.site();
        for node in &block.nodes {
            self.copier.builder.set_site(node.site);
            self.node(node).map_err(|failure| located(failure, node))?;
        }
        self.copier.builder.set_site(site);
        Ok(())
    }

    fn node(&mut self, node: &Node) -> Result<(), Box<Failure>> {
        let args = self.copier.values(&node.args)?;
        match node.op.flow() {
            Flow::Straight => {
                let args = self.operands(node, args)?;
                if let Some((split, op, part)) = self.tiles.get(node) {
                    let parts = match self.splits.get(&split) {
                        Some(parts) => parts.clone(),
                        None => self.split(split, Made::new(op.clone(), args, node.site))?,
                    };
                    self.copier.know(node.results[0], parts[part]);
                    return Ok(());
                }
                self.copier.node(node, node.op.clone(), &args, Vec::new())?;
                let mut varied = (0..args.len()).filter(|i| self.active.is_varied(node.args[*i]));
                let through = varied.next().filter(|_| varied.next().is_none());
                let (op, results) = (node.op.clone(), self.copier.values(&node.results)?);
                self.remember(self.levels.len() - 1, Made { op, args, results, site: node.site, through });
                Ok(())
            }
            Flow::Cond => self.cond(node, args),
            Flow::Loop { trips, carries, slices, .. } => self.looped(node, args, trips, carries, slices),
        }
    }

    /// The operands of an op without blocks, spread where its results need it.
    fn operands(&mut self, node: &Node, mut args: Vec<Value>) -> Result<Vec<Value>, Box<Failure>> {
        if !self.active.passes(node) || node.op.as_op::<Spread>().is_some() {
            return Ok(args);
        }
        let types: Option<Vec<TensorType>> =
            args.iter().map(|arg| self.copier.builder.tensor_ty(*arg).ok()).collect();
        let Some(types) = types else { return Ok(args) };
        let mut own = Axes::NONE;
        node.op.indices(&mut |index| own = own.union(self.copier.builder.facts().varies(index)));
        let mesh = self.copier.builder.mesh();
        let all = types.iter().fold(own, |axes, ty| axes.union(ty.varies));
        for (i, arg) in args.iter_mut().enumerate() {
            if !self.active.is_varied(node.args[i]) {
                continue;
            }
            let axes = match node.op.collective() {
                Some(collective) if meets_elsewhere(&collective, &types) => mesh.all_axes(),
                Some(collective) => starts(mesh, &collective, &types[i], all, own),
                None if matches!(node.op.effects(), Effects::Pure) && !node.op.is_rule_alone() => all,
                None => continue,
            };
            *arg = self.spread(*arg, axes)?;
        }
        Ok(args)
    }

    /// Spreads operands to the parameters that they become; parameters that differ over fewer axes get their type.
    fn enter(
        &mut self,
        args: &mut [(Value, Value)],
        declared: &mut [Type],
        before: Axes,
    ) -> Result<(), Box<Failure>> {
        for ((old, arg), declared) in args.iter_mut().zip(declared) {
            let mut ty = declared.widened(self.varies(*arg)?);
            if self.active.has(*old) {
                ty = ty.widened(before);
                *arg = self.spread(*arg, ty.varies())?;
            }
            *declared = ty;
        }
        Ok(())
    }

    fn declared(&self, params: &[Value]) -> Vec<Type> {
        params.iter().filter_map(|param| self.func.ty(*param).cloned()).collect()
    }

    fn cond(&mut self, node: &Node, args: Vec<Value>) -> Result<(), Box<Failure>> {
        let differs = self.varies(args[0])?;
        let mut operands: Vec<(Value, Value)> =
            node.args[1..].iter().copied().zip(args[1..].iter().copied()).collect();
        let mut types = self.declared(&node.blocks[0].params);
        for (ty, other) in types.iter_mut().zip(self.declared(&node.blocks[1].params)) {
            *ty = ty.widened(other.varies());
        }
        self.enter(&mut operands, &mut types, differs)?;
        let mut blocks = Vec::new();
        for block in &node.blocks {
            self.levels.push(Level::default());
            self.copier.begin(block, types.clone());
            self.nodes(block)?;
            let results = self.copier.values(&block.results)?;
            blocks.push(self.copier.end(&results));
            self.levels.pop();
        }
        self.widen_results(node, &mut blocks, differs)?;
        let args: Vec<Value> = std::iter::once(args[0]).chain(operands.iter().map(|(_, arg)| *arg)).collect();
        self.copier.node(node, node.op.clone(), &args, blocks)
    }

    /// Spreads what a block returns to the type that both blocks and the condition give a result.
    fn widen_results(
        &mut self,
        node: &Node,
        blocks: &mut [Block],
        differs: Axes,
    ) -> Result<(), Box<Failure>> {
        for (i, result) in node.results.iter().enumerate() {
            let mut axes = differs;
            for block in &*blocks {
                axes = axes.union(self.varies(block.results[i])?);
            }
            for block in blocks.iter_mut() {
                let value = block.results[i];
                let missing = axes.minus(self.varies(value)?);
                let is_tensor = self.copier.builder.ty(value)?.as_tensor().is_some();
                if missing.is_empty() || !is_tensor || !self.active.has(*result) {
                    continue;
                }
                self.builder().begin_block(Vec::new());
                let spread = self.builder().one(Spread { over: GroupName::Axes(missing) }, &[value])?;
                let made = self.builder().end_block(&[spread]);
                block.nodes.extend(made.nodes);
                block.results[i] = spread;
            }
        }
        Ok(())
    }

    fn looped(
        &mut self,
        node: &Node,
        args: Vec<Value>,
        trips: Trips<'_>,
        carries: usize,
        slices: usize,
    ) -> Result<(), Box<Failure>> {
        let block = &node.blocks[0];
        let mut differs = match trips {
            Trips::Count(length) => self.copier.builder.facts().varies(length),
            Trips::While { .. } => Axes::NONE,
        };
        let mut operands: Vec<(Value, Value)> = node.args.iter().copied().zip(args).collect();
        let mut types = self.declared(&block.params);
        // What an operand differs over more than it did may reach every carry.
        let mut more = Axes::NONE;
        for (old, new) in &operands {
            let before = self.func.ty(*old).map_or(Axes::NONE, Type::varies);
            more = more.union(self.varies(*new)?.minus(before));
        }
        let is_loop = matches!(trips, Trips::Count(_));
        if !is_loop {
            differs = Axes::NONE;
        }
        types.iter_mut().take(carries).for_each(|ty| *ty = ty.widened(more));
        self.enter(&mut operands, &mut types, differs)?;
        let mut level = Level::default();
        let params = self.copier.begin(block, types);
        for (i, (param, (_, outer))) in params.iter().zip(&operands).enumerate().skip(carries) {
            let enters = if i < carries + slices { Enters::Sliced } else { Enters::Whole };
            if is_loop {
                level.add_outer(*param, *outer, enters);
            }
        }
        self.levels.push(level);
        self.nodes(block)?;
        let mut results = self.copier.values(&block.results)?;
        for (i, param) in params.iter().enumerate().take(carries) {
            if is_loop && self.active.has(block.results[i]) {
                let axes = self.varies(*param)?;
                results[i] = self.spread(results[i], axes)?;
            }
        }
        let mut made = self.copier.end(&results);
        let more = self.levels.pop().map(|level| level.more).unwrap_or_default();
        let mut args: Vec<Value> = operands.iter().map(|(_, arg)| *arg).collect();
        let mut op = node.op.clone();
        if let Some(scan) = node.op.as_op::<Scan>() {
            made.params.truncate(params.len());
            let mut sliced = slices;
            for (outer, param, enters) in more {
                let at = if enters == Enters::Sliced { carries + sliced } else { args.len() };
                sliced += usize::from(enters == Enters::Sliced);
                args.insert(at, outer);
                made.params.insert(at, param);
            }
            op = Op::new(Scan { slices: sliced, ..scan.clone() });
        }
        self.copier.node(node, op, &args, vec![made])
    }
}

/// Whether a batch of messages, or the batch of their answers, receives without sending: what it receives may differ
/// everywhere.
fn meets_elsewhere<S>(start: &Collective<'_, S>, types: &[TensorType]) -> bool {
    let (sent, received) = types.split_at(start.sends.len().min(types.len()));
    let none = |types: &[TensorType]| types.iter().all(|ty| !ty.dtype.is_float());
    start.kind == Kind::Exchange && (none(sent) || none(received))
}

/// The axes over which an operand of a start must differ so that each member brings its own: those of its group. An op
/// over a list group whose result is equal on all ranks, and a permutation of equal values, bring nothing new.
fn starts<S>(mesh: &Mesh, start: &Collective<'_, S>, x: &TensorType, all: Axes, own: Axes) -> Axes {
    let axes = mesh.group_axes(start.over);
    match start.kind {
        Kind::Exchange => all.union(axes),
        Kind::Permute => {
            let everyone = start.route.is_some_and(|route| route.reaches_all(mesh.group_size(start.over)));
            let equal = everyone && x.varies.intersect(axes).is_empty();
            if equal { x.varies.union(own) } else { x.varies.union(axes).union(own) }
        }
        Kind::AllReduce | Kind::AllGather | Kind::AllGatherV | Kind::Broadcast
            if matches!(start.over, GroupName::List(_)) && x.varies.is_empty() && mesh.covers(start.over) =>
        {
            own
        }
        _ => x.varies.union(axes).union(own),
    }
}
