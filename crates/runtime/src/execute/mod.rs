//! Runs plans. A plan is lowered once: kernels, places, groups and copies are resolved, so that each call only walks
//! lines. Values lie in the buffers of the plan's regions; only results are allocated per call.
//!
//! The plan says on which queue communication starts, in which order, what it leases, and which leases a line waits for.
//! Nothing else waits before a write: one that meets a lease is an error.

mod lower;
mod lower_blocks;
mod lower_start;
mod machine;
mod memory;
mod movement;
mod start;
mod state;
mod step;
mod watch;

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, Clock, Group, Heap, Pending, after};
use consort_ir::cost::Total;
use consort_ir::index::Index;
use consort_ir::limits::{Budget, Limits, Resource};
use consort_ir::mesh::Mesh;
use consort_ir::plan::{Region, RegionKind};
use consort_ir::program::Func;
use consort_ir::types::Type;
use consort_types::layout::Layout;
use consort_types::{Dtype, GroupName};
use smallvec::SmallVec;

use crate::RunError;
use crate::device::Device;

pub use machine::{Stepped, Until};
pub use memory::Wait;

use lower::Lowerer;
use memory::{Memory, SlotId};
use state::State;
use step::{Blocks, FlightId, Line, Slots, Step};
use watch::Watch;

/// A plan of one rank, ready for repeated runs.
pub struct Exec {
    name: String,
    params: Vec<Param>,
    blocks: Blocks,
    results: Vec<Returned>,
    groups: Vec<GroupName>,
    limits: Option<Limits>,
    state: State,
}

/// Context of a run.
pub struct RunCx<'a> {
    /// This rank's heap.
    pub heap: &'a Arc<Heap>,
    /// The groups that [`Exec::groups`] lists, in its order; `None` where this rank is not a member.
    pub groups: &'a [Option<Group>],
    /// What computes.
    pub device: &'a dyn Device,
    /// How long each operation may wait for other ranks.
    pub timeout: Duration,
    /// The time, by which a wait begins and so ends.
    pub clock: Clock<'a>,
}

impl RunCx<'_> {
    /// When a wait that begins now must be over.
    pub(crate) fn deadline(&self) -> Instant {
        after((self.clock)(), self.timeout)
    }
}

/// An argument.
pub enum ArgValue {
    /// A contiguous tensor at the start of a buffer.
    Tensor {
        /// Its storage; written only if the plan says that it was donated.
        buffer: Buffer,
        /// Waits for the operation in flight that will write it, if any. Called when the tensor is first needed.
        pending: Option<Wait>,
    },
    /// A size.
    Size(i64),
}

/// A result.
pub enum Out {
    /// A tensor.
    Tensor(OutTensor),
    /// A size.
    Size(i64),
    /// Tensors that are valid once these operations have been waited for.
    Pending {
        /// The operations.
        pending: Option<Pending>,
        /// The tensors.
        tensors: SmallVec<[OutTensor; 1]>,
    },
}

/// Results in order.
pub type Outs = SmallVec<[Out; 1]>;

/// A tensor that is a result.
pub struct OutTensor {
    /// The region of its storage: an argument, or a new one. Results of one region share storage.
    pub region: Region,
    /// The buffer of the whole region.
    pub buffer: Buffer,
    /// Its layout in the region, in elements; the same `Rc` at each call while it is unchanged.
    pub layout: Rc<Layout>,
    /// Its element type.
    pub dtype: Dtype,
}

enum Param {
    /// A tensor, and the number of its region if it has one.
    Tensor(Option<usize>),
    Size(Index),
}

enum Returned {
    Tensor(SlotId),
    Size(Index),
    Pending(FlightId, Slots),
}

impl Exec {
    /// Lowers a plan to what runs on a device.
    pub fn lower(mesh: &Mesh, func: &Func, device: &dyn Device) -> Result<Exec, RunError> {
        let mut lowerer = Lowerer::new(mesh, func, device)?;
        let mut params = Vec::new();
        for (number, param) in (0u32..).zip(&func.body.params) {
            params.push(match func.ty(*param) {
                Some(Type::Tensor(_)) => {
                    let region = Region::of(RegionKind::Arg(number));
                    Param::Tensor(lowerer.regions.get(&region).copied())
                }
                Some(Type::Size(index, _)) => Param::Size(index.clone()),
                _ => return Err(RunError::new(format!("@{}: {param} is a pending argument", func.name))),
            });
        }
        lowerer.block(&func.body)?;
        let mut results = Vec::new();
        for result in &func.body.results {
            let slots = lowerer.all_slots(&[*result]);
            let lost = |slot: &&SlotId| lowerer.memory[lowerer.slots[**slot].region].region.is_kept();
            if slots.iter().find(lost).is_some() {
                let message = "lies in memory that is kept, where the next call writes";
                return Err(RunError::new(format!("@{}: result {result} {message}", func.name)));
            }
            results.push(match func.ty(*result) {
                Some(Type::Tensor(_)) => Returned::Tensor(lower::first(&slots)?),
                Some(Type::Size(index, _)) => Returned::Size(index.clone()),
                _ => Returned::Pending(lowerer.flight(*result)?, slots),
            });
        }
        let state = State {
            mesh: mesh.clone(),
            rank: lowerer.rank,
            symbols: lowerer.symbols,
            memory: Memory(lowerer.memory),
            heap: 0,
            handles: vec![None; lowerer.slots.len()],
            slots: lowerer.slots,
            flights: (0..lowerer.n_flights).map(|_| None).collect(),
            lent: vec![None; lowerer.n_flights],
            said: (0..lowerer.n_flights).map(|_| None).collect(),
            in_flight: vec![0; lowerer.queues.len()],
            all_in_flight: 0,
            work: 0,
            watch: Watch::default(),
            copied: 0,
            budget: None,
            frames: Vec::new(),
        };
        let groups = lowerer.queues.into_iter().map(|(group, _)| group).collect();
        let (name, blocks) = (func.name.clone(), lowerer.blocks);
        Ok(Exec { name, params, blocks, results, groups, limits: None, state })
    }

    /// Limits the steps and operations of a call. A call known to exceed them fails before it does anything; if
    /// sizes come from data, it fails before the op or loop that would exceed them. Memory is limited by the
    /// heap.
    pub fn limit(&mut self, limits: Limits) {
        self.limits = Some(limits);
    }

    /// Starts the budget of a call.
    fn allot(&mut self) -> Result<(), RunError> {
        self.state.budget = self.limits.map(Budget::new);
        if self.limits.is_none() {
            return Ok(());
        }
        let lines = &self.blocks[0];
        let all = lines.iter().fold(Total::default(), |all, line| all.plus(line.work.known));
        // The error names the line that does most of the work.
        self.state.check(all).map_err(|error| {
            let share = |line: &&Line| (line.work.known.operations(), line.work.known.steps);
            let most = match error.excess() {
                Some(excess) if excess.resource == Resource::Steps => {
                    lines.iter().max_by_key(|line| share(line).1)
                }
                _ => lines.iter().max_by_key(share),
            };
            most.map_or(error.clone(), |line| error.at(line.op, line.site))
        })
    }

    /// The groups on which it communicates, in the order in which [`RunCx`] expects them.
    pub fn groups(&self) -> &[GroupName] {
        &self.groups
    }

    /// The ops that have no kernel and run by their reference evaluation, each once.
    pub fn evaluated(&self) -> BTreeSet<&'static str> {
        let lines = self.blocks.iter().flatten();
        lines.filter(|line| matches!(line.step, Step::Eval { .. })).map(|line| line.op).collect()
    }

    /// Bytes copied for communication, over all calls.
    pub fn copied_bytes(&self) -> u64 {
        self.state.copied
    }

    /// Runs it once. No operation waits longer than the timeout of the context.
    pub fn run(&mut self, cx: &RunCx<'_>, args: &mut [ArgValue]) -> Result<Outs, RunError> {
        let ran = self.begin(cx, args).and_then(|()| self.state.run(&self.blocks, cx));
        self.end(cx, ran)
    }

    /// Begins a run whose steps the caller takes: [`step`](Exec::step) until it is done, [`block`](Exec::block) or whatever
    /// else brings an end to what a step waits for, then [`end`](Exec::end). [`run`](Exec::run) does all of this.
    pub fn begin(&mut self, cx: &RunCx<'_>, args: &mut [ArgValue]) -> Result<(), RunError> {
        self.allot()?;
        self.open(cx, args)?;
        self.state.begin();
        Ok(())
    }

    /// Runs a line, or says what it waits for.
    pub fn step(&mut self, cx: &RunCx<'_>) -> Result<Stepped, RunError> {
        self.state.step(&self.blocks, cx)
    }

    /// Blocks until what the last step waits for is over, at most until its deadline.
    pub fn block(&mut self, until: Until, cx: &RunCx<'_>) -> Result<(), RunError> {
        self.state.block(until, &self.blocks, cx)
    }

    /// Ends a run: its results, if all went well.
    pub fn end(&mut self, cx: &RunCx<'_>, ran: Result<(), RunError>) -> Result<Outs, RunError> {
        let outcome = ran.and_then(|()| self.arrive()).and_then(|()| self.close(cx));
        self.state.memory.close();
        if let Err(error) = &outcome {
            consort_comm::note_trouble(error.failure(), &[]);
            // Operations in flight complete without their handles.
            self.state.flights.iter_mut().for_each(|flight| *flight = None);
        }
        outcome
    }

    /// Binds arguments and allocates memory for a call.
    fn open(&mut self, cx: &RunCx<'_>, args: &mut [ArgValue]) -> Result<(), RunError> {
        let Exec { name, params, groups, state, .. } = self;
        if args.len() != params.len() || cx.groups.len() != groups.len() {
            let expected = format!("{} arguments and {} groups", params.len(), groups.len());
            let got = format!("{} and {}", args.len(), cx.groups.len());
            return Err(RunError::of(format!("@{name}"), (expected, got)));
        }
        for (param, arg) in params.iter().zip(args) {
            match (param, arg) {
                (Param::Tensor(region), ArgValue::Tensor { buffer, pending }) => {
                    if let Some(region) = region {
                        state.memory.give(*region, buffer.clone(), pending.take())?;
                    }
                }
                (Param::Size(index), ArgValue::Size(got)) => {
                    let expected = state.sizes().index(index)?;
                    if expected != *got {
                        let size = index.display(&state.mesh).to_string();
                        let message = format!("@{name}: the plan is for {size} = {expected}, got {got}");
                        return Err(RunError::new(message));
                    }
                }
                _ => {
                    return Err(RunError::new(format!(
                        "@{name}: expected a tensor and got a size, or the reverse"
                    )));
                }
            }
        }
        let heap = Arc::as_ptr(cx.heap).addr();
        let is_other = std::mem::replace(&mut state.heap, heap) != heap;
        if state.memory.open(cx.heap)? || is_other {
            // Handles and notes belonged to another heap and its recorder.
            state.handles.fill(None);
            state.said.iter_mut().for_each(|said| *said = None);
        }
        state.in_flight.iter_mut().for_each(|n| *n = 0);
        state.lent.fill(None);
        (state.all_in_flight, state.work) = (0, 0);
        Ok(())
    }

    /// Waits for what other operations write to arguments that are results.
    fn arrive(&mut self) -> Result<(), RunError> {
        for result in &self.results {
            let slots = match result {
                Returned::Tensor(slot) => std::slice::from_ref(slot),
                Returned::Pending(_, slots) => &slots[..],
                Returned::Size(_) => &[],
            };
            for slot in slots {
                self.state.memory.arrive(self.state.slots[*slot].region)?;
            }
        }
        Ok(())
    }

    /// The results of a call.
    fn close(&mut self, cx: &RunCx<'_>) -> Result<Outs, RunError> {
        let mut outs = Outs::with_capacity(self.results.len());
        for result in &self.results {
            outs.push(match result {
                Returned::Tensor(slot) => Out::Tensor(self.out(*slot)?),
                Returned::Size(index) => Out::Size(self.state.sizes().index(index)?),
                Returned::Pending(flight, slots) => {
                    let flying = self.state.flights[*flight].as_ref();
                    if flying.is_some_and(|flight| !flight.zeros_after.is_empty()) {
                        self.state.wait(*flight, cx)?;
                        machine::reach(cx.device.mark(), cx)?;
                    }
                    let pending = self.state.flights[*flight].take().and_then(|flight| flight.pending);
                    let tensors = slots.iter().map(|slot| self.out(*slot)).collect::<Result<_, _>>()?;
                    Out::Pending { pending, tensors }
                }
            });
        }
        Ok(outs)
    }

    fn out(&self, slot: SlotId) -> Result<OutTensor, RunError> {
        let slot = &self.state.slots[slot];
        let buffer = self.state.memory.buffer(slot.region)?.clone();
        let region = self.state.memory.0[slot.region].region;
        Ok(OutTensor { region, buffer, layout: Rc::clone(&slot.layout), dtype: slot.dtype })
    }
}
