//! Lowers a plan to lines with kernels, slots and groups resolved.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use consort_ir::cost;
use consort_ir::entity::{Value, ValueMap};
use consort_ir::index::{Index, Sym, Waiting};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Alias, Effects, EvalCx, Flow, Op, boxes_of, built_in, layouts_of, view_of};
use consort_ir::plan::{NodePlan, Place, Region};
use consort_ir::program::{Block, Func, Node};
use consort_ir::storage::{arrived, copies_for_communication};
use consort_ir::types::{TensorType, Type};
use consort_types::layout::{Dims, Layout};
use consort_types::{GroupName, Rank, Space};
use smallvec::SmallVec;

use super::memory::{RegionMemory, Slot, SlotId};
use super::step::{BlockId, Blocks, FlightId, Found, Line, Needs, Release, Slots, Step, Work};
use crate::RunError;
use crate::device::Device;
use crate::kernels::Kernel;

/// Builds the lines of one function.
pub(super) struct Lowerer<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) rank: Rank,
    pub(super) func: &'a Func,
    device: &'a dyn Device,
    pub(super) symbols: BTreeMap<Sym, i64>,
    pub(super) memory: Vec<RegionMemory>,
    /// The number of each region among them.
    pub(super) regions: BTreeMap<Region, usize>,
    pub(super) slots: Vec<Slot>,
    values: ValueMap<Slots>,
    flights: ValueMap<FlightId>,
    pub(super) n_flights: usize,
    /// The groups on which it starts operations, and the number of the next one on the queue of each.
    pub(super) queues: Vec<(GroupName, u32)>,
    /// Guards on sizes that no line has read yet.
    waiting: Waiting,
    /// The symbols that lines of the current block read from data.
    read: Vec<Sym>,
    /// The starts in blocks for which no line of their block waits.
    leaving: BTreeSet<Value>,
    /// Whether a value is read by communication alone.
    for_starts: ValueMap<bool>,
    /// The values that hold what communication gave.
    arrived: BTreeSet<Value>,
    /// Slots of the current line that depend on sizes known only at run time.
    pub(super) found: Vec<(SlotId, Found)>,
    pub(super) blocks: Blocks,
}

impl<'a> Lowerer<'a> {
    pub(super) fn new(
        mesh: &'a Mesh,
        func: &'a Func,
        device: &'a dyn Device,
    ) -> Result<Lowerer<'a>, RunError> {
        let Some(head) = &func.plan else {
            return Err(RunError::of(format!("@{}", func.name), ("a plan", "a program without places")));
        };
        let size = |(region, bytes): &(Region, u64)| {
            let bytes = usize::try_from(*bytes);
            let bytes = bytes.map_err(|_| RunError::new(format!("{region}: it does not fit in memory")))?;
            if !(region.space == Space::Host || region.space == device.space()) {
                let expected = format!("regions of the {}, where this rank computes", device.space());
                return Err(RunError::of(format!("@{}", func.name), (expected, region.to_string())));
            }
            Ok(RegionMemory::new(*region, bytes))
        };
        let regions =
            head.regions.iter().enumerate().map(|(number, (region, _))| (*region, number)).collect();
        let mut lowerer = Lowerer {
            mesh,
            rank: head.rank,
            func,
            device,
            symbols: head.symbols.iter().copied().collect(),
            memory: head.regions.iter().map(size).collect::<Result<_, RunError>>()?,
            regions,
            slots: Vec::new(),
            values: ValueMap::default(),
            flights: ValueMap::default(),
            n_flights: 0,
            queues: Vec::new(),
            leaving: BTreeSet::new(),
            waiting: Waiting::new(&func.guards, |sym| !matches!(sym, Sym::Unbacked(_))).0,
            read: Vec::new(),
            for_starts: ValueMap::default(),
            arrived: arrived(&func.body),
            found: Vec::new(),
            blocks: Blocks::new(),
        };
        lowerer.uses(&func.body);
        lowerer.define(&func.body.params, &func.body.places)?;
        Ok(lowerer)
    }

    /// Records which values only communication reads, directly or through views. Walks a block backwards.
    fn uses(&mut self, block: &Block) {
        for result in &block.results {
            self.for_starts.insert(*result, false);
        }
        for node in block.nodes.iter().rev() {
            let seen = node.plan.as_ref().is_some_and(|plan| plan.view);
            let only = |result: &Value| self.for_starts.get(*result).copied().unwrap_or(false);
            let of_start = match seen {
                true => node.results.iter().all(only),
                false => node.op.effects().starts().is_some(),
            };
            for arg in &node.args {
                let before = self.for_starts.get(*arg).copied().unwrap_or(true);
                self.for_starts.insert(*arg, before && of_start);
            }
            node.blocks.iter().for_each(|block| self.uses(block));
        }
    }

    pub(super) fn sizes(&self) -> EvalCx<'_> {
        EvalCx { mesh: self.mesh, rank: self.rank, symbols: &self.symbols }
    }

    /// Gives values their slots.
    pub(super) fn define(&mut self, values: &[Value], places: &[Place]) -> Result<(), RunError> {
        let mut places = places.iter();
        for value in values {
            let Some(ty) = self.func.ty(*value) else {
                return Err(RunError::new(format!("{value} has no type")));
            };
            let mut slots = Slots::new();
            for tensor in ty.tensors() {
                let place = places.next().ok_or_else(|| RunError::new(format!("{value} has no place")))?;
                slots.push(self.slot(tensor, *place)?);
            }
            if ty.is_pending() {
                self.flights.insert(*value, self.n_flights);
                self.n_flights += 1;
            }
            self.values.insert(*value, slots);
        }
        Ok(())
    }

    /// A slot of a tensor at a place.
    fn slot(&mut self, ty: &TensorType, place: Place) -> Result<SlotId, RunError> {
        let region = self.regions.get(&place.region).copied();
        let region = region.ok_or_else(|| RunError::new(format!("{place} lies in no region of the plan")))?;
        let offset = usize::try_from(place.offset).unwrap_or(usize::MAX);
        let shape = ty.shape.iter().map(|size| self.sizes().size(size)).collect::<Result<Dims, _>>();
        let known = shape.is_ok() && !place.region.is_dyn();
        let layout =
            Layout { start: offset / ty.dtype.size(), ..Layout::contiguous(&shape.unwrap_or_default()) };
        self.slots.push(Slot::new(region, ty.dtype, layout, known));
        let slot = self.slots.len() - 1;
        if !known {
            self.found.push((slot, Found::At { shape: ty.shape.clone(), offset }));
        }
        Ok(slot)
    }

    /// The slot of a view of another slot: result `result` of `n`.
    fn seen(&mut self, op: &Op, of: SlotId, (result, n): (usize, usize)) -> SlotId {
        let from = &self.slots[of];
        let known = match from.fixed {
            true => layouts_of(&**op, &self.sizes(), &from.layout, n).ok(),
            false => None,
        };
        // A reshape that is not a view: its elements are read in place.
        let layout = match &known {
            Some(Some(layouts)) => {
                layouts.get(result).map_or_else(|| Rc::clone(&from.layout), |x| x.clone().into())
            }
            _ => Rc::clone(&from.layout),
        };
        let slot = Slot::new(from.region, from.dtype, layout, known.is_some());
        self.slots.push(slot);
        if known.is_none() {
            self.found.push((self.slots.len() - 1, Found::View { op: op.clone(), of, result, n }));
        }
        self.slots.len() - 1
    }

    pub(super) fn slots_of(&self, value: Value) -> &[SlotId] {
        self.values.get(value).map_or(&[], |slots| slots)
    }

    /// The slots of some values, those inside pendings included.
    pub(super) fn all_slots(&self, values: &[Value]) -> Slots {
        values.iter().flat_map(|value| self.slots_of(*value)).copied().collect()
    }

    pub(super) fn flight(&self, value: Value) -> Result<FlightId, RunError> {
        self.flights.get(value).copied().ok_or_else(|| RunError::new(format!("{value} is not pending")))
    }

    pub(super) fn ty(&self, value: Value) -> Option<&Type> {
        self.func.ty(value)
    }

    /// Lowers a block of the function, or the function itself.
    pub(super) fn block(&mut self, block: &Block) -> Result<BlockId, RunError> {
        let id = self.open();
        self.fill(id, block)?;
        Ok(id)
    }

    /// A new block, still empty.
    pub(super) fn open(&mut self) -> BlockId {
        self.blocks.push(Vec::new());
        self.blocks.len() - 1
    }

    /// Whether a start is in a block of which no line waits for it.
    pub(super) fn leaves(&self, start: Value) -> bool {
        self.leaving.contains(&start)
    }

    /// Appends the lines of a block's nodes.
    pub(super) fn fill(&mut self, id: BlockId, block: &Block) -> Result<(), RunError> {
        // Nothing that the function's own starts have leased is written where no line of it can say `release`.
        if id > 0 {
            let starts = block.nodes.iter().filter(|node| node.op.effects().starts().is_some());
            self.leaving.extend(starts.flat_map(|node| &node.results));
            let waits = block.nodes.iter().filter(|node| node.op.effects() == Effects::Wait);
            for node in waits {
                self.leaving.remove(&node.args[0]);
            }
        }
        let outside = std::mem::take(&mut self.read);
        for node in &block.nodes {
            self.node(id, node).map_err(|error| error.at(node.op.info().name, node.site))?;
        }
        // The next iteration, or the other branch, reads them again.
        let inside = std::mem::replace(&mut self.read, outside);
        self.waiting.leave(&inside);
        Ok(())
    }

    /// Appends a line, with the slots that it has to resolve first.
    pub(super) fn line(&mut self, to: BlockId, node: &Node, step: Step, work: Work) {
        let found = std::mem::take(&mut self.found);
        if !(found.is_empty() && matches!(step, Step::Nothing)) {
            let needs = self.needs(&step, &found);
            self.blocks[to].push(Line { op: node.op.info().name, site: node.site, found, needs, step, work });
        }
    }

    /// What a line waits for before it runs.
    fn needs(&self, step: &Step, found: &[(SlotId, Found)]) -> Needs {
        let mut arguments = SmallVec::new();
        step.for_each_slot(&mut |slot| {
            let region = self.slots[slot].region;
            if self.memory[region].region.is_arg() && !arguments.contains(&region) {
                arguments.push(region);
            }
        });
        // A region of unknown size may move when a slot in it is resolved.
        Needs { device: step.is_on_host() || !found.is_empty(), arguments }
    }

    /// The work of a node.
    pub(super) fn work(&self, node: &Node) -> Work {
        let cost = cost::of_node(self.mesh, self.func, node);
        let known = |index: &Index| self.sizes().index(index).is_ok();
        let later = (!known(&cost.flops) || !known(&cost.bytes)).then(|| Box::new(cost));
        Work { known: cost::total_of_node(&self.sizes(), self.func, node), later }
    }

    fn node(&mut self, to: BlockId, node: &Node) -> Result<(), RunError> {
        let none = NodePlan::default();
        let plan = node.plan.as_deref().unwrap_or(&none);
        if plan.view {
            self.release(to, node, plan, &[])?;
            let step = self.view(node)?;
            self.line(to, node, step, self.work(node));
            return Ok(());
        }
        self.define(&node.results, &plan.places)?;
        let is_wait = node.op.effects() == Effects::Wait;
        let step = match node.op.flow() {
            Flow::Cond => {
                self.release(to, node, plan, &node.results)?;
                return self.cond(to, node);
            }
            Flow::Loop { trips, carries, slices, .. } => {
                return self.repeat(to, node, plan, trips, carries..carries + slices);
            }
            Flow::Straight if is_wait => self.straight(to, node, plan)?,
            Flow::Straight => {
                self.release(to, node, plan, &node.results)?;
                self.straight(to, node, plan)?
            }
        };
        self.line(to, node, step, self.work(node));
        // A wait may release its own start.
        if is_wait { self.release(to, node, plan, &[]) } else { Ok(()) }
    }

    /// Appends what a line says of leases that must end; those older than the call on the storage of these values.
    pub(super) fn release(
        &mut self,
        to: BlockId,
        node: &Node,
        plan: &NodePlan,
        written: &[Value],
    ) -> Result<(), RunError> {
        let starts = plan.release.iter().map(|start| self.flight(*start)).collect::<Result<_, _>>()?;
        let mut entry = Slots::new();
        for slot in self.all_slots(written).into_iter().filter(|_| plan.entry) {
            let home = &mut self.memory[self.slots[slot].region];
            // Other regions are new in each call.
            if home.region.is_arg() || home.region.is_kept() {
                home.entry = true;
                entry.push(slot);
            }
        }
        let leases = Release { starts, entry };
        if !(leases.starts.is_empty() && leases.entry.is_empty()) {
            self.line(to, node, Step::Release(leases), Work::default());
        }
        Ok(())
    }

    fn view(&mut self, node: &Node) -> Result<Step, RunError> {
        let args = self.all_slots(&node.args);
        for (i, result) in node.results.iter().enumerate() {
            let of = *args.first().ok_or_else(|| RunError::new("a `view` line has no operand"))?;
            let slot = self.seen(&node.op, of, (i, node.results.len()));
            self.values.insert(*result, [slot].into_iter().collect());
        }
        match node.op.effects() == Effects::Host {
            true => self.check(node, args),
            false => Ok(Step::Nothing),
        }
    }

    fn straight(&mut self, to: BlockId, node: &Node, plan: &NodePlan) -> Result<Step, RunError> {
        let (args, results) = (self.all_slots(&node.args), self.all_slots(&node.results));
        match node.op.effects() {
            Effects::Wait => Ok(Step::Wait(self.flight(node.args[0])?)),
            Effects::Collective(_) | Effects::Messages(_) => self.start(to, node, plan),
            Effects::Host if results.is_empty() => {
                let types: Vec<Type> = node.args.iter().filter_map(|arg| self.ty(*arg).cloned()).collect();
                let symbols: Vec<Sym> = node.op.defines(&types).into_iter().map(|(sym, _)| sym).collect();
                let ready = self.waiting.define(&symbols).into_iter();
                let guards = ready.map(|number| self.func.guards[number].clone()).collect();
                self.read.extend(&symbols);
                Ok(Step::ToSize { op: node.op.clone(), args, symbols, guards })
            }
            // It yields only sizes, which the types already state.
            Effects::Pure if results.is_empty() => Ok(Step::Nothing),
            Effects::Pure | Effects::Host => self.pure(node, args, results),
        }
    }

    /// A view that checks its operands: its kernel runs without a result.
    fn check(&self, node: &Node, args: Slots) -> Result<Step, RunError> {
        let kernel = self
            .kernel(&node.op, &args, &[])
            .ok_or_else(|| RunError::new("a view with an effect needs a kernel"))?;
        Ok(Step::Kernel { kernel, op: node.op.clone(), args, results: Slots::new() })
    }

    /// The kernel of an op on slots.
    fn kernel(&self, op: &Op, args: &[SlotId], results: &[SlotId]) -> Option<Kernel> {
        let dtypes = |slots: &[SlotId]| slots.iter().map(|slot| self.slots[*slot].dtype).collect::<Vec<_>>();
        self.device.find(op.info().name, &dtypes(args), &dtypes(results))
    }

    fn pure(&mut self, node: &Node, args: Slots, results: Slots) -> Result<Step, RunError> {
        let (op, name) = (node.op.clone(), node.op.info().name);
        let kernel = self.kernel(&op, &args, &results);
        if let (Alias::View, [from]) = (op.alias(), &args[..])
            && self.is_copy(&op, *from, &results, built_in(name).is_some())?
            && let [to] = &results[..]
        {
            let counted = node.results.iter().all(|result| self.for_starts.get(*result) == Some(&true));
            return Ok(Step::Copy { from: self.seen(&op, *from, (0, 1)), to: *to, counted });
        }
        if let (true, [result]) = (op.joins(), &results[..]) {
            let fixed = args.iter().chain(&results).all(|slot| self.slots[*slot].fixed);
            let shapes: Vec<&[usize]> = args.iter().map(|slot| &self.slots[*slot].layout.shape[..]).collect();
            let whole = &self.slots[*result].layout.shape;
            let boxes = fixed.then(|| boxes_of(&*op, &self.sizes(), &shapes, whole)).transpose()?;
            let counted =
                (0..args.len()).map(|arg| copies_for_communication(node, arg, &self.arrived)).collect();
            return Ok(Step::Join { op, boxes, counted, args, result: *result });
        }
        match kernel {
            Some(kernel) => Ok(Step::Kernel { kernel, op, args, results }),
            // A built-in op never falls back to its definition: that would hide a missing kernel.
            None if built_in(name).is_some() => Err(RunError::new("it has no kernel")),
            None => Ok(Step::Eval { op, args, results }),
        }
    }

    /// Whether a view op that must be materialised is a plain copy of its view. That of a built-in op always is; the
    /// view of a user-defined op may be refused, and then the op itself runs.
    fn is_copy(&self, op: &Op, from: SlotId, to: &[SlotId], is_built_in: bool) -> Result<bool, RunError> {
        let (sizes, from) = (self.sizes(), &self.slots[from]);
        // An op that mentions unknown sizes has no view yet.
        if !from.fixed || op.view(&sizes, &from.layout).is_err() {
            return Ok(is_built_in);
        }
        let layouts = match to.iter().all(|to| self.slots[*to].fixed) {
            true => {
                let shapes = to.iter().map(|to| &self.slots[*to].layout.shape[..]);
                view_of(&**op, &sizes, &from.layout, shapes)?
            }
            false => layouts_of(&**op, &sizes, &from.layout, to.len())?,
        };
        Ok(layouts.is_some() || op.keeps_order())
    }
}

/// The only slot, or the first of several.
pub(super) fn first(slots: &[SlotId]) -> Result<SlotId, RunError> {
    slots.first().copied().ok_or_else(|| RunError::new("expected a tensor"))
}
