//! One rank of the plan oracle: a position in its plan, and the placements of its values.

use consort_types::{Failure, Rank};

use super::memory::{Memory, TypedPlacement};
use super::{World, at};
use crate::Stuck;
use crate::comm::PendingId;
use crate::inputs::Symbols;
use crate::rank::Step;
use crate::sizes::Sizes;
use consort_ir::entity::{Value, ValueMap};
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Effects, EvalCx, Flow, Trips};
use consort_ir::plan::{NodePlan, Place};
use consort_ir::program::{Block, Func, Node};
use consort_ir::storage::{Placement, entry_leases, is_needed, may_take_over, pieces};
use consort_ir::text::node_text;
use consort_ir::types::Type;

/// A block being run, and the use of its results.
struct Frame<'a> {
    block: &'a Block,
    next: usize,
    then: Then<'a>,
}

#[derive(Clone, Copy)]
enum Then<'a> {
    Return,
    Cond(&'a Node),
    Loop { node: &'a Node, carries: usize, slices: usize, iteration: usize },
}

pub(super) struct PlanRank<'a> {
    mesh: &'a Mesh,
    func: &'a Func,
    rank: Rank,
    symbols: Symbols,
    read: Sizes<'a>,
    seats: ValueMap<Vec<TypedPlacement>>,
    sizes: ValueMap<Literal>,
    /// The operation of each pending; absent if its tensors have arrived.
    pendings: ValueMap<PendingId>,
    /// The latest run of each start.
    starts: ValueMap<PendingId>,
    frames: Vec<Frame<'a>>,
    node: Option<&'a Node>,
    /// The operation that it waits for.
    waits: Option<PendingId>,
}

impl<'a> PlanRank<'a> {
    pub(super) fn new(
        mesh: &'a Mesh,
        func: &'a Func,
        rank: Rank,
        symbols: Symbols,
        inputs: &[Literal],
        world: &mut World<'a>,
    ) -> Result<PlanRank<'a>, String> {
        let mut state = PlanRank {
            mesh,
            func,
            rank,
            symbols,
            read: Sizes::new(func),
            seats: ValueMap::default(),
            sizes: ValueMap::default(),
            pendings: ValueMap::default(),
            starts: ValueMap::default(),
            frames: vec![Frame { block: &func.body, next: 0, then: Then::Return }],
            node: None,
            waits: None,
        };
        state.seat(&func.body.params, &func.body.places);
        for (param, input) in func.body.params.iter().zip(inputs) {
            match state.seats(*param).first() {
                Some(seat) => state.memory(world).write(seat, input)?,
                None => drop(state.sizes.insert(*param, input.clone())),
            }
        }
        state.memory(world).lend(&entry_leases(func));
        Ok(state)
    }

    fn memory<'w>(&self, world: &'w mut World<'_>) -> &'w mut Memory {
        &mut world.memories[self.rank.0 as usize]
    }

    /// The position of the rank and what it waits for, unless it has finished.
    pub(super) fn stuck(&self, world: &World<'_>) -> Option<Stuck> {
        let waits_for = world.comm.describe(self.waits?);
        let node = match self.node {
            Some(node) => {
                node_text(node, self.func, self.mesh).split_whitespace().collect::<Vec<_>>().join(" ")
            }
            None => format!("the end of @{}", self.func.name),
        };
        let site = self.node.and_then(|node| node.site.as_ref()).map(ToString::to_string);
        Some(Stuck { rank: self.rank, node, site, waits_for })
    }

    /// Checks that arguments that were not donated are unchanged.
    pub(super) fn check_arguments(&self, inputs: &[Literal], world: &mut World<'_>) -> Result<(), String> {
        let donated = self.func.plan.as_ref().map_or(&[][..], |head| &head.donated);
        for (param, input) in self.func.body.params.iter().zip(inputs) {
            let kept = self.seats(*param).into_iter().next().filter(|_| !donated.contains(param));
            if let Some(seat) = kept
                && self.memory(world).bytes(&seat)? != input.to_bytes()
            {
                return Err(at(self.rank, "return", format!("argument {param} has been written")));
            }
        }
        Ok(())
    }

    /// Reads the results from their places.
    pub(super) fn results(&self, world: &mut World<'_>) -> Result<Vec<Literal>, String> {
        let mut results = Vec::new();
        for value in &self.func.body.results {
            results.extend(self.sizes.get(*value).cloned());
            for seat in self.seats(*value) {
                results.push(self.memory(world).read(&seat)?);
            }
        }
        Ok(results)
    }

    fn cx<'c>(&self, symbols: &'c Symbols) -> EvalCx<'c>
    where
        'a: 'c,
    {
        EvalCx { mesh: self.mesh, rank: self.rank, symbols }
    }

    /// Assigns places to values.
    fn seat(&mut self, values: &[Value], places: &[Place]) {
        let mut places = places.iter();
        for value in values {
            let types = self.func.ty(*value).map_or(&[][..], Type::tensors);
            let seats = types.iter().zip(places.by_ref()).map(|(ty, place)| TypedPlacement {
                placement: Placement::new(*place, ty, &self.cx(&self.symbols)),
                dtype: ty.dtype,
            });
            let seats = seats.collect();
            self.seats.insert(*value, seats);
        }
    }

    fn seats(&self, value: Value) -> Vec<TypedPlacement> {
        self.seats.get(value).cloned().unwrap_or_default()
    }

    fn all_seats(&self, values: &[Value]) -> Vec<TypedPlacement> {
        values.iter().flat_map(|value| self.seats(*value)).collect()
    }

    /// Runs one line, or ends one block.
    pub(super) fn step(&mut self, world: &mut World<'a>) -> Result<Step, String> {
        let Some(frame) = self.frames.last() else { return Ok(Step::Stands) };
        self.node = frame.block.nodes.get(frame.next);
        let op = self.node.map_or("return", |node| node.op.info().name);
        self.waits = match self.node {
            Some(node) => self.line(node, world),
            None => self.leave(world),
        }
        .map_err(|error| at(self.rank, op, error))?;
        Ok(if self.waits.is_none() { Step::Moved } else { Step::Stands })
    }

    /// Runs a line; returns the operation that it must wait for, if any.
    fn line(&mut self, node: &'a Node, world: &mut World<'a>) -> Result<Option<PendingId>, String> {
        let nothing = NodePlan::default();
        let plan = node.plan.as_deref().unwrap_or(&nothing);
        if let Some(id) = self.release(&plan.release, world)? {
            return Ok(Some(id));
        }
        match (node.op.flow(), node.op.effects()) {
            (Flow::Cond, _) => return self.cond(node, plan, world),
            (Flow::Loop { carries, slices, .. }, _) => {
                return self.repeat(node, plan, carries, slices, world);
            }
            (_, Effects::Wait) => {
                if let Some(id) = self.arrive(&node.args, world)? {
                    return Ok(Some(id));
                }
                self.seat(&node.results, &plan.places);
                if let Some(PendingId(at)) = self.starts.get(node.args[0]) {
                    world.flights[*at].waited_here = true;
                }
            }
            (_, Effects::Collective(_) | Effects::Messages(_)) => self.start(node, plan, world)?,
            _ if plan.view => self.view(node, world)?,
            _ => {
                self.seat(&node.results, &plan.places);
                self.release_entry(plan, &node.results, world)?;
                if node.op.joins() { self.join(node, world)? } else { self.kernel(node, world)? }
            }
        }
        self.advance();
        Ok(None)
    }

    fn advance(&mut self) {
        if let Some(frame) = self.frames.last_mut() {
            frame.next += 1;
        }
    }

    /// Ends older leases on the storage of these values, if the line says so.
    fn release_entry(&self, plan: &NodePlan, values: &[Value], world: &mut World<'_>) -> Result<(), String> {
        let mut seats = self.all_seats(values).into_iter().filter(|_| plan.entry);
        seats.try_for_each(|seat| self.memory(world).release_entry(&seat))
    }

    fn release(&mut self, starts: &[Value], world: &mut World<'_>) -> Result<Option<PendingId>, String> {
        for start in starts {
            let id =
                self.starts.get(*start).copied().ok_or_else(|| format!("{start} has not been started"))?;
            if !world.release(id)? {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    /// Waits for the pendings among some values.
    fn arrive(&mut self, values: &[Value], world: &mut World<'_>) -> Result<Option<PendingId>, String> {
        for value in values {
            let Some(id) = self.pendings.get(*value).copied() else { continue };
            if !world.comm.ready(id) {
                return Ok(Some(id));
            }
            world.complete(id)?;
            self.pendings.remove(*value);
        }
        Ok(None)
    }

    fn view(&mut self, node: &Node, world: &mut World<'_>) -> Result<(), String> {
        if node.op.effects() == Effects::Host {
            let seats = self.all_seats(&node.args);
            let memory = self.memory(world);
            let tensors = seats.iter().map(|seat| memory.read(seat)).collect::<Result<Vec<_>, _>>()?;
            let tensors: Vec<&Literal> = tensors.iter().collect();
            node.op.eval(&self.cx(&self.symbols), &tensors).map_err(|error| error.to_string())?;
        }
        let seat = self.seats(node.args[0]).into_iter().next().ok_or("a view of what has no place")?;
        let placements = seat.placement.views(&*node.op, &self.cx(&self.symbols), node.results.len());
        let placements =
            placements.ok_or_else(|| format!("elements of {} must move for this view", node.args[0]))?;
        for (result, placement) in node.results.iter().zip(placements) {
            self.seats.insert(*result, vec![TypedPlacement { placement, dtype: seat.dtype }]);
        }
        Ok(())
    }

    fn kernel(&mut self, node: &Node, world: &mut World<'_>) -> Result<(), String> {
        let (args, results) = (self.all_seats(&node.args), self.all_seats(&node.results));
        let takes_over = |j: usize| {
            let here = |(k, result): (usize, &TypedPlacement)| {
                may_take_over(&*node.op, k, j) && result.placement.same(&args[j].placement)
            };
            results.iter().enumerate().any(here)
        };
        let memory = self.memory(world);
        let mut tensors: Vec<Option<Literal>> = vec![None; args.len()];
        for first in [true, false] {
            for j in (0..args.len()).filter(|j| takes_over(*j) == first) {
                tensors[j] = Some(memory.read(&args[j])?);
            }
            if first {
                results.iter().try_for_each(|seat| memory.poison(seat))?;
            }
        }
        let tensors: Vec<&Literal> = tensors.iter().flatten().collect();
        let values = node.op.eval(&self.cx(&self.symbols), &tensors).map_err(|error| error.to_string())?;
        self.read.define((self.mesh, self.rank), node, &values, &mut self.symbols)?;
        for (result, value) in node.results.iter().zip(values) {
            match self.seats(*result).first() {
                Some(seat) => self.memory(world).write(seat, &value)?,
                None => drop(self.sizes.insert(*result, value)),
            }
        }
        Ok(())
    }

    fn join(&mut self, node: &Node, world: &mut World<'_>) -> Result<(), String> {
        let (args, results) = (self.all_seats(&node.args), self.all_seats(&node.results));
        let placements: Vec<Placement> = args.iter().map(|seat| seat.placement.clone()).collect();
        let pieces = pieces(&*node.op, &self.cx(&self.symbols), &placements, &results[0].placement);
        let pieces = pieces.ok_or("a part does not lie inside the whole")?;
        let seat =
            |placement: &Placement| TypedPlacement { placement: placement.clone(), dtype: results[0].dtype };
        let moves: Vec<(TypedPlacement, TypedPlacement)> =
            pieces.iter().map(|piece| (seat(&piece.from), seat(&piece.to))).collect();
        join(self.memory(world), &moves)
    }

    fn start(&mut self, node: &'a Node, plan: &NodePlan, world: &mut World<'a>) -> Result<(), String> {
        self.seat(&node.results, &plan.places);
        self.release_entry(plan, &node.results, world)?;
        let (args, results) = (self.all_seats(&node.args), self.all_seats(&node.results));
        let symbols = self.symbols.clone();
        let cx = self.cx(&symbols);
        let memory = self.memory(world);
        let mut tensors: Vec<Option<Literal>> = vec![None; args.len()];
        let over =
            |k: usize| node.op.overwrites(k).map(|j| (j, args[j].placement.same(&results[k].placement)));
        let copied = |j: usize| plan.copies.iter().any(|(value, _)| *value == node.args[j]);
        // An overwritten operand is read at the result's place: it lies there, is copied there, or is missing.
        for (k, result) in results.iter().enumerate() {
            let Some((j, in_place)) = over(k) else { continue };
            if in_place || !copied(j) && is_needed(&*node.op, j, &cx) {
                tensors[j] = Some(memory.read(result)?);
            }
        }
        let copies: Vec<(usize, usize)> = (0..results.len())
            .filter_map(|k| over(k).map(|(j, in_place)| (j, k, in_place)))
            .filter_map(|(j, k, in_place)| (!in_place && copied(j)).then_some((j, k)))
            .collect();
        copies.iter().try_for_each(|(_, k)| memory.poison(&results[*k]))?;
        for (j, _) in &copies {
            tensors[*j] = Some(memory.read(&args[*j])?);
        }
        results.iter().try_for_each(|seat| memory.poison(seat))?;
        let mut leased = Vec::new();
        for (j, seat) in args.iter().enumerate() {
            if tensors[j].is_some() {
                continue;
            }
            if is_needed(&*node.op, j, &cx) {
                // Communication requires contiguous operands.
                tensors[j] = Some(memory.read(&seat.without_gaps())?);
                leased.push(seat.clone());
            } else {
                tensors[j] = Some(memory.nothing(seat)?);
            }
        }
        let id = world.start(&cx, node, tensors.into_iter().flatten().collect(), results, &leased)?;
        for pending in &node.results {
            self.pendings.insert(*pending, id);
            self.starts.insert(*pending, id);
        }
        Ok(())
    }

    fn cond(
        &mut self,
        node: &'a Node,
        plan: &NodePlan,
        world: &mut World<'a>,
    ) -> Result<Option<PendingId>, String> {
        let seat = self.seats(node.args[0]).into_iter().next().ok_or("a condition without a place")?;
        let holds = self.memory(world).read(&seat)?.as_size() != Some(0);
        let block = &node.blocks[usize::from(!holds)];
        self.seat(&block.params, &block.places);
        self.enter(&node.args[1..], &block.params);
        self.seat(&node.results, &plan.places);
        self.release_entry(plan, &node.results, world)?;
        self.frames.push(Frame { block, next: 0, then: Then::Cond(node) });
        Ok(None)
    }

    /// Passes operands to the parameters of a block; if both have the same place, the layout is passed too.
    fn enter(&mut self, args: &[Value], params: &[Value]) {
        for (arg, param) in args.iter().zip(params) {
            let mut seats = self.seats(*param);
            for (seat, there) in seats.iter_mut().zip(self.seats(*arg)) {
                if seat.placement.place == there.placement.place {
                    *seat = there;
                }
            }
            self.seats.insert(*param, seats);
        }
        self.pass(args, params);
    }

    /// Passes sizes and pendings on under other names.
    fn pass(&mut self, from: &[Value], to: &[Value]) {
        let of = |value: &Value| (self.sizes.get(*value).cloned(), self.pendings.get(*value).copied());
        let passed: Vec<_> = from.iter().map(of).collect();
        for (to, (size, pending)) in to.iter().zip(passed) {
            size.and_then(|size| self.sizes.insert(*to, size));
            match pending {
                Some(id) => self.pendings.insert(*to, id),
                None => self.pendings.remove(*to),
            };
        }
    }

    /// Copies tensors to the places of others, unless they are there already.
    fn carry(&mut self, from: &[Value], to: &[Value], world: &mut World<'_>) -> Result<(), String> {
        let moves: Vec<(TypedPlacement, TypedPlacement)> = self.moves(from, to);
        copy(self.memory(world), &moves)?;
        self.pass(from, to);
        Ok(())
    }

    fn moves(&self, from: &[Value], to: &[Value]) -> Vec<(TypedPlacement, TypedPlacement)> {
        let ends = |(from, to): (&Value, &Value)| self.seats(*from).into_iter().zip(self.seats(*to));
        from.iter().zip(to).flat_map(ends).collect()
    }

    /// Whether a loop continues after `done` iterations. Its carries are in the parameters of its block.
    fn goes_on(&self, node: &Node, done: usize, world: &mut World<'a>) -> Result<bool, String> {
        match node.op.flow() {
            Flow::Loop { trips: Trips::Count(length), .. } => {
                Ok(done < self.cx(&self.symbols).size(length).map_err(|error| error.to_string())?)
            }
            Flow::Loop { trips: Trips::While { limit, .. }, .. } => {
                let seat = self.seats(node.blocks[0].params[0]).into_iter().next();
                let holds = self.memory(world).read(&seat.ok_or("a condition without a place")?)?.as_size()
                    != Some(0);
                if holds && done == limit {
                    return Err(Failure::new(Trips::unfinished(limit)).to_string());
                }
                Ok(holds)
            }
            Flow::Straight | Flow::Cond => Ok(false),
        }
    }

    fn repeat(
        &mut self,
        node: &'a Node,
        plan: &NodePlan,
        carries: usize,
        slices: usize,
        world: &mut World<'a>,
    ) -> Result<Option<PendingId>, String> {
        if let Some(id) = self.arrive(&node.args[..carries], world)? {
            return Ok(Some(id));
        }
        let block = &node.blocks[0];
        self.seat(&block.params, &block.places);
        self.seat(&node.results, &plan.places);
        self.release_entry(plan, &node.results, world)?;
        self.release_entry(plan, &block.params[..carries + slices], world)?;
        self.carry(&node.args[..carries], &block.params[..carries], world)?;
        self.enter(&node.args[carries + slices..], &block.params[carries + slices..]);
        for seat in self.all_seats(&node.results[carries..]) {
            self.memory(world).poison(&seat)?;
        }
        if !self.goes_on(node, 0, world)? {
            self.pass(&block.params[..carries], &node.results[..carries]);
            self.advance();
            return Ok(None);
        }
        self.slices(node, carries, slices, 0, world)?;
        let then = Then::Loop { node, carries, slices, iteration: 0 };
        self.frames.push(Frame { block, next: 0, then });
        Ok(None)
    }

    /// The entry that an iteration takes and stacks; a loop whose length is not known has no entries.
    fn entry(&self, node: &Node, iteration: usize) -> Result<usize, String> {
        match node.op.flow() {
            Flow::Loop { trips: Trips::Count(length), reverse, .. } => {
                let length = self.cx(&self.symbols).size(length).map_err(|error| error.to_string())?;
                Ok(Flow::entry(reverse, length, iteration))
            }
            _ => Ok(iteration),
        }
    }

    /// An iteration begins: its entries are copied to the parameters.
    fn slices(
        &mut self,
        node: &Node,
        carries: usize,
        slices: usize,
        iteration: usize,
        world: &mut World<'_>,
    ) -> Result<(), String> {
        let entry = self.entry(node, iteration)?;
        let entries = carries..carries + slices;
        let mut moves = self.moves(&node.args[entries.clone()], &node.blocks[0].params[entries]);
        for (from, _) in &mut moves {
            from.placement = from.placement.entry(entry);
        }
        join(self.memory(world), &moves)
    }

    /// Ends a block: releases the leases that no line could end, and moves its results to their places. Pendings among
    /// them are waited for, unless they can stay in flight in place.
    fn leave(&mut self, world: &mut World<'a>) -> Result<Option<PendingId>, String> {
        let Some(Frame { block, then, .. }) = self.frames.last() else { return Ok(None) };
        let (block, then): (&'a Block, Then<'a>) = (block, *then);
        let mut landing = block.results.clone();
        if let Then::Cond(node) = then {
            let stays = |(from, to): &(TypedPlacement, TypedPlacement)| from.placement.same(&to.placement);
            let pairs = block.results.iter().zip(&node.results);
            let moved = pairs.filter(|(from, to)| !self.moves(&[**from], &[**to]).iter().all(stays));
            landing = moved.map(|(from, _)| *from).collect();
        }
        if let Some(id) = self.arrive(&landing, world)? {
            return Ok(Some(id));
        }
        let starts = block.nodes.iter().filter(|node| node.op.effects().starts().is_some());
        let starts = starts.filter_map(|node| node.results.first().copied());
        // A start that no line of the block waits for cannot be released by one.
        let left = |start: &Value| self.starts.get(*start).is_some_and(|id| !world.flights[id.0].waited_here);
        let starts: Vec<Value> = starts.filter(left).collect();
        if !matches!(then, Then::Return)
            && let Some(id) = self.release(&starts, world)?
        {
            return Ok(Some(id));
        }
        self.frames.pop();
        self.read.leave(block, &mut self.symbols);
        match then {
            Then::Return => {}
            Then::Cond(node) => {
                self.carry(&block.results, &node.results, world)?;
                self.advance();
            }
            Then::Loop { node, carries, slices, iteration } => {
                let mut stack = self.moves(&block.results[carries..], &node.results[carries..]);
                let entry = self.entry(node, iteration)?;
                for (_, to) in &mut stack {
                    to.placement = to.placement.entry(entry);
                }
                join(self.memory(world), &stack)?;
                self.carry(&block.results[..carries], &block.params[..carries], world)?;
                if !self.goes_on(node, iteration + 1, world)? {
                    self.pass(&block.params[..carries], &node.results[..carries]);
                    self.advance();
                    return Ok(None);
                }
                self.slices(node, carries, slices, iteration + 1, world)?;
                let then = Then::Loop { node, carries, slices, iteration: iteration + 1 };
                self.frames.push(Frame { block, next: 0, then });
            }
        }
        Ok(None)
    }
}

/// Copies tensors to their places as one parallel assignment.
fn copy(memory: &mut Memory, moves: &[(TypedPlacement, TypedPlacement)]) -> Result<(), String> {
    let go: Vec<&(TypedPlacement, TypedPlacement)> =
        moves.iter().filter(|(from, to)| !from.placement.same(&to.placement)).collect();
    let tensors = go.iter().map(|(from, _)| memory.read(from)).collect::<Result<Vec<Literal>, String>>()?;
    go.iter().zip(tensors).try_for_each(|((_, to), tensor)| memory.write(to, &tensor))
}

/// The same, but destinations are poisoned before anything is read.
fn join(memory: &mut Memory, moves: &[(TypedPlacement, TypedPlacement)]) -> Result<(), String> {
    let go = moves.iter().filter(|(from, to)| !from.placement.same(&to.placement));
    go.clone().try_for_each(|(_, to)| memory.poison(to))?;
    copy(memory, moves)
}
