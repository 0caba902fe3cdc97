//! One rank of the oracle: a position in the program and the values so far.

use std::rc::Rc;

use consort_types::Rank;

use super::comm::{Comm, PendingId};
use super::in_use::{InUse, bytes_of, bytes_of_type};
use super::inputs::Symbols;
use super::sizes::Sizes;
use super::{OracleError, Stuck};
use consort_ir::cost::{Total, total_of_node};
use consort_ir::entity::{Value, ValueMap};
use consort_ir::limits::{Budget, Excess, Limits};
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Effects, EvalCx, EvalError, Flow, Trips, check_numel};
use consort_ir::program::{Block, Func, Node};
use consort_ir::text::node_text;

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The rank advanced.
    Moved,
    /// It waits, or has finished.
    Stands,
}

#[derive(Clone)]
enum Item {
    Tensor(Rc<Literal>),
    /// A started operation, and the bytes of its operands and results until it is waited for.
    Pending(PendingId, u64),
}

impl Item {
    fn bytes(&self) -> u64 {
        match self {
            Item::Tensor(tensor) => bytes_of(tensor),
            Item::Pending(_, bytes) => *bytes,
        }
    }
}

/// A block being run, and the use of its results.
struct Frame<'a> {
    block: &'a Block,
    at: usize,
    then: Then<'a>,
}

enum Then<'a> {
    /// The function returns.
    Return,
    /// They are the results of a `cond`.
    Cond(&'a Node),
    /// The next iteration of a loop begins, or it ends.
    Loop { node: &'a Node, iteration: usize, stacked: Vec<Vec<Rc<Literal>>> },
}

pub(super) struct RankState<'a> {
    mesh: &'a Mesh,
    func: &'a Func,
    rank: Rank,
    values: ValueMap<Item>,
    symbols: Symbols,
    sizes: Sizes<'a>,
    frames: Vec<Frame<'a>>,
    /// The returned items; pendings among them are waited for before the rank finishes.
    returned: Option<Vec<Item>>,
    node: Option<&'a Node>,
    budget: Budget,
    in_use: &'a InUse,
}

impl<'a> RankState<'a> {
    pub(super) fn new(
        mesh: &'a Mesh,
        func: &'a Func,
        rank: Rank,
        inputs: &[Literal],
        symbols: Symbols,
        (limits, in_use): (Limits, &'a InUse),
    ) -> Result<RankState<'a>, OracleError> {
        let mut rank = RankState {
            mesh,
            func,
            rank,
            values: ValueMap::default(),
            symbols,
            sizes: Sizes::new(func),
            frames: vec![Frame { block: &func.body, at: 0, then: Then::Return }],
            returned: None,
            node: None,
            budget: Budget::new(limits),
            in_use,
        };
        for (param, input) in func.body.params.iter().zip(inputs) {
            in_use.check(bytes_of(input)).map_err(|excess| rank.limit(excess))?;
            rank.insert(*param, Item::Tensor(Rc::new(input.clone())));
        }
        Ok(rank)
    }

    /// Sets the item of a value.
    fn insert(&mut self, value: Value, item: Item) {
        self.in_use.add(item.bytes());
        if let Some(before) = self.values.insert(value, item) {
            self.in_use.drop(before.bytes());
        }
    }

    /// An error at the node being run.
    pub(super) fn error(&self, error: EvalError) -> OracleError {
        let (node, site) = self.here();
        let op = self.node.map_or("return", |node| node.op.info().name);
        OracleError::Op { rank: self.rank, op, node, site, error: Box::new(error) }
    }

    /// A limit error at the node being run, or at the arguments before any.
    fn limit(&self, excess: Excess) -> OracleError {
        let (node, site) = self.here();
        let op = self.node.map_or("parameter", |node| node.op.info().name);
        OracleError::Limit { rank: self.rank, op, node, site, excess }
    }

    fn here(&self) -> (String, Option<String>) {
        match self.node {
            Some(node) => {
                let text =
                    node_text(node, self.func, self.mesh).split_whitespace().collect::<Vec<_>>().join(" ");
                (text, node.site.as_ref().map(ToString::to_string))
            }
            None if self.returned.is_some() => (format!("the end of @{}", self.func.name), None),
            None => (format!("the start of @{}", self.func.name), None),
        }
    }

    /// The position of the rank and what it waits for, unless it has finished.
    pub(super) fn stuck(&self, comm: &Comm<'_>) -> Option<Stuck> {
        let pending = match (&self.returned, self.node) {
            (Some(items), _) => items.iter().find_map(|item| match item {
                Item::Pending(id, _) => (!comm.ready(*id)).then_some(*id),
                Item::Tensor(_) => None,
            })?,
            (None, node) => match self.values.get(*node?.args.first()?)? {
                Item::Pending(id, _) => *id,
                Item::Tensor(_) => return None,
            },
        };
        let (node, site) = self.here();
        Some(Stuck { rank: self.rank, node, site, waits_for: comm.describe(pending) })
    }

    /// The results of a rank that has finished.
    pub(super) fn results(self) -> Vec<Literal> {
        let tensors = self.returned.into_iter().flatten().filter_map(|item| match item {
            Item::Tensor(tensor) => Some(Rc::unwrap_or_clone(tensor)),
            Item::Pending(..) => None,
        });
        tensors.collect()
    }

    /// Runs one node, or leaves one block.
    pub(super) fn step(&mut self, comm: &mut Comm<'a>) -> Result<Step, OracleError> {
        if let Some(items) = &mut self.returned {
            // Returned pendings become tensors when they are ready.
            let Some(at) =
                items.iter().position(|item| matches!(item, Item::Pending(id, _) if comm.ready(*id)))
            else {
                return Ok(Step::Stands);
            };
            if let Item::Pending(id, _) = items[at] {
                items.splice(at..=at, comm.take(id).into_iter().map(|tensor| Item::Tensor(Rc::new(tensor))));
            }
            return Ok(Step::Moved);
        }
        let Some(frame) = self.frames.last_mut() else { return Ok(Step::Stands) };
        let Some(node) = frame.block.nodes.get(frame.at) else {
            self.leave()?;
            return Ok(Step::Moved);
        };
        self.node = Some(node);
        if node.op.effects() == Effects::Wait {
            let Some(Item::Pending(id, _)) = self.values.get(node.args[0]) else {
                return Err(self.error(EvalError::new("waits for what is not pending")));
            };
            let id = *id;
            if !comm.ready(id) {
                return Ok(Step::Stands);
            }
            self.spend(Total { steps: 1, ..Total::default() })?;
            self.insert(node.args[0], Item::Pending(id, 0));
            let tensors = comm.take(id).into_iter().map(|tensor| Item::Tensor(Rc::new(tensor))).collect();
            self.advance(node, tensors);
            return Ok(Step::Moved);
        }
        match node.op.flow() {
            Flow::Straight => self.straight(node, comm)?,
            Flow::Cond => {
                self.spend(Total { steps: 1, ..Total::default() })?;
                let condition = self.tensors(node)?[0].as_size() != Some(0);
                let block = &node.blocks[usize::from(!condition)];
                self.enter(block, &node.args[1..], Then::Cond(node));
            }
            Flow::Loop { .. } => self.begin_loop(node)?,
        }
        Ok(Step::Moved)
    }

    /// The tensors among a node's operands, in order.
    fn tensors(&self, node: &Node) -> Result<Vec<Rc<Literal>>, OracleError> {
        let tensors = node.args.iter().filter_map(|arg| match self.values.get(*arg) {
            Some(Item::Tensor(tensor)) => Some(Ok(tensor.clone())),
            Some(Item::Pending(..)) => None,
            None => Some(Err(self.error(EvalError::new(format!("{arg} has no value"))))),
        });
        tensors.collect()
    }

    /// Stores the results of a node and advances to the next.
    fn advance(&mut self, node: &Node, results: Vec<Item>) {
        for (value, item) in node.results.iter().zip(results) {
            self.insert(*value, item);
        }
        if let Some(frame) = self.frames.last_mut() {
            frame.at += 1;
        }
    }

    /// Charges work to the budget of the rank.
    fn spend(&mut self, work: Total) -> Result<(), OracleError> {
        self.budget.spend(work).map_err(|excess| self.limit(excess))
    }

    /// Bytes of the results of a node, checked against the limit. A result may be too large even if all operands are
    /// empty.
    fn room(&self, node: &Node) -> Result<u64, OracleError> {
        let cx = EvalCx { mesh: self.mesh, rank: self.rank, symbols: &self.symbols };
        let mut bytes = 0u64;
        for ty in node.results.iter().filter_map(|result| self.func.ty(*result)) {
            bytes = bytes.saturating_add(bytes_of_type(&cx, ty).map_err(|error| self.error(error))?);
        }
        self.in_use.check(bytes).map_err(|excess| self.limit(excess))?;
        Ok(bytes)
    }

    fn straight(&mut self, node: &'a Node, comm: &mut Comm<'a>) -> Result<(), OracleError> {
        let results = self.room(node)?;
        let cx = EvalCx { mesh: self.mesh, rank: self.rank, symbols: &self.symbols };
        self.spend(total_of_node(&cx, self.func, node))?;
        let args = self.tensors(node)?;
        let cx = EvalCx { mesh: self.mesh, rank: self.rank, symbols: &self.symbols };
        if node.op.effects().starts().is_some() {
            let bytes = args.iter().fold(results, |all, arg| all.saturating_add(bytes_of(arg)));
            self.in_use.check(bytes).map_err(|excess| self.limit(excess))?;
            let args = args.iter().map(|tensor| (**tensor).clone()).collect();
            let id = comm.start(&cx, node, args).map_err(|error| self.error(error))?;
            self.advance(node, vec![Item::Pending(id, bytes)]);
            return Ok(());
        }
        let args: Vec<&Literal> = args.iter().map(|tensor| &**tensor).collect();
        let results = node.op.eval(&cx, &args).map_err(|error| self.error(error))?;
        let defined = self.sizes.define((self.mesh, self.rank), node, &results, &mut self.symbols);
        defined.map_err(|message| self.error(EvalError::new(message)))?;
        self.advance(node, results.into_iter().map(|tensor| Item::Tensor(Rc::new(tensor))).collect());
        Ok(())
    }

    fn enter(&mut self, block: &'a Block, args: &[Value], then: Then<'a>) {
        for (param, arg) in block.params.iter().zip(args) {
            if let Some(item) = self.values.get(*arg).cloned() {
                self.insert(*param, item);
            }
        }
        self.frames.push(Frame { block, at: 0, then });
    }

    /// Whether a loop continues after `done` iterations; `first` is its first carry.
    fn goes_on(&self, node: &Node, done: usize, first: Option<&Item>) -> Result<bool, OracleError> {
        match node.op.flow() {
            Flow::Loop { trips: Trips::Count(length), .. } => {
                let cx = EvalCx { mesh: self.mesh, rank: self.rank, symbols: &self.symbols };
                Ok(done < cx.size(length).map_err(|error| self.error(error))?)
            }
            Flow::Loop { trips: Trips::While { limit, .. }, .. } => {
                let holds = matches!(first, Some(Item::Tensor(holds)) if holds.as_size() != Some(0));
                if holds && done == limit {
                    return Err(self.error(EvalError::new(Trips::unfinished(limit))));
                }
                Ok(holds)
            }
            Flow::Straight | Flow::Cond => Ok(false),
        }
    }

    fn begin_loop(&mut self, node: &'a Node) -> Result<(), OracleError> {
        let Flow::Loop { carries, .. } = node.op.flow() else { return Ok(()) };
        // The whole loop is charged before it begins, so one that exceeds the budget never starts.
        let cx = EvalCx { mesh: self.mesh, rank: self.rank, symbols: &self.symbols };
        let all = total_of_node(&cx, self.func, node);
        self.budget.check(all).map_err(|excess| self.limit(excess))?;
        self.room(node)?;
        self.spend(Total { steps: 1, ..Total::default() })?;
        let (block, args) = (&node.blocks[0], &node.args);
        if !self.goes_on(node, 0, args.first().and_then(|arg| self.values.get(*arg)))? {
            let carried = args[..carries].iter().filter_map(|arg| self.values.get(*arg).cloned());
            let mut results: Vec<Item> = carried.collect();
            for stacked in &block.results[carries..] {
                results.push(Item::Tensor(Rc::new(self.empty_stack(*stacked)?)));
            }
            self.advance(node, results);
            return Ok(());
        }
        let stacked = vec![Vec::new(); block.results.len() - carries];
        self.spend(Total { steps: 1, ..Total::default() })?;
        self.enter(block, args, Then::Loop { node, iteration: 0, stacked });
        self.set_slices(node, 0)
    }

    /// An empty stack of a block's result.
    fn empty_stack(&self, value: Value) -> Result<Literal, OracleError> {
        let ty = self.func.ty(value).and_then(|ty| ty.as_tensor());
        let ty = ty.ok_or_else(|| self.error(EvalError::new(format!("{value} is no tensor"))))?;
        let cx = EvalCx { mesh: self.mesh, rank: self.rank, symbols: &self.symbols };
        let mut shape = vec![0];
        shape.extend(cx.shape(&ty.shape).map_err(|error| self.error(error))?);
        Ok(Literal::zeros(ty.dtype, shape))
    }

    /// Sets the slice parameters of a loop's block to the entries of an iteration.
    fn set_slices(&mut self, node: &Node, iteration: usize) -> Result<(), OracleError> {
        let Flow::Loop { trips: Trips::Count(length), carries, slices, reverse } = node.op.flow() else {
            return Ok(());
        };
        let cx = EvalCx { mesh: self.mesh, rank: self.rank, symbols: &self.symbols };
        let length = cx.size(length).map_err(|error| self.error(error))?;
        let entry = Flow::entry(reverse, length, iteration);
        for i in carries..carries + slices {
            if let Some(Item::Tensor(whole)) = self.values.get(node.args[i]) {
                let entry = whole.narrow(0, entry, 1).reshaped(whole.shape[1..].to_vec());
                self.insert(node.blocks[0].params[i], Item::Tensor(Rc::new(entry)));
            }
        }
        Ok(())
    }

    /// Ends a block and passes on its results.
    fn leave(&mut self) -> Result<(), OracleError> {
        let Some(frame) = self.frames.pop() else { return Ok(()) };
        self.sizes.leave(frame.block, &mut self.symbols);
        let results: Vec<Item> =
            frame.block.results.iter().filter_map(|value| self.values.get(*value).cloned()).collect();
        match frame.then {
            Then::Return => {
                self.node = None;
                self.returned = Some(results);
            }
            Then::Cond(node) => self.advance(node, results),
            Then::Loop { node, iteration, mut stacked } => {
                let Flow::Loop { carries, reverse, .. } = node.op.flow() else { return Ok(()) };
                let mut results = results.into_iter();
                let carried: Vec<Item> = results.by_ref().take(carries).collect();
                for (stack, item) in stacked.iter_mut().zip(results) {
                    if let Item::Tensor(tensor) = item {
                        self.in_use.add(bytes_of(&tensor));
                        stack.push(tensor);
                    }
                }
                self.node = Some(node);
                if !self.goes_on(node, iteration + 1, carried.first())? {
                    if reverse {
                        stacked.iter_mut().for_each(|entries| entries.reverse());
                    }
                    let stacks =
                        stacked.iter().map(|entries| self.stack(entries)).collect::<Result<Vec<_>, _>>()?;
                    stacked.iter().flatten().for_each(|entry| self.in_use.drop(bytes_of(entry)));
                    self.advance(node, carried.into_iter().chain(stacks).collect());
                    return Ok(());
                }
                self.spend(Total { steps: 1, ..Total::default() })?;
                for (param, item) in node.blocks[0].params.iter().zip(carried) {
                    self.insert(*param, item);
                }
                self.set_slices(node, iteration + 1)?;
                let then = Then::Loop { node, iteration: iteration + 1, stacked };
                self.frames.push(Frame { block: frame.block, at: 0, then });
            }
        }
        Ok(())
    }

    fn stack(&self, entries: &[Rc<Literal>]) -> Result<Item, OracleError> {
        let mut shape = vec![entries.len()];
        shape.extend(&entries[0].shape);
        check_numel(&shape).map_err(|error| self.error(error))?;
        let rows: Vec<Literal> =
            entries.iter().map(|entry| entry.reshaped([&[1], &entry.shape[..]].concat())).collect();
        Ok(Item::Tensor(Rc::new(Literal::concat(&rows.iter().collect::<Vec<_>>(), 0).reshaped(shape))))
    }
}
