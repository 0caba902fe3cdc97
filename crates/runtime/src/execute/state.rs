//! Runs lines: kernels, evaluations, and every step that resolves sizes.

use std::collections::BTreeMap;
use std::rc::Rc;

use consort_comm::{Buffer, Ticket};
use consort_ir::cost::{self, Total};
use consort_ir::index::{Guard, Index, Sym};
use consort_ir::limits::Budget;
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, Flow, Op, boxes_of, layouts_of};
use consort_ir::symbols::check_guards;
use consort_types::Rank;
use consort_types::layout::{Dims, Layout};
use smallvec::SmallVec;

use super::RunCx;
use super::machine::Frame;
use super::memory::{Memory, Slot, SlotId};
use super::step::{Flight, Found, Line, Said, Step};
use super::watch::Watch;
use crate::RunError;
use crate::call::{Few, Operand, Stored, evaluate};
use crate::kernels::Kernel;

/// Work, in bytes, between two polls of pending operations: some tens of microseconds.
const POLL: u64 = 1 << 18;

/// The mutable state of a plan while it runs.
pub(super) struct State {
    pub(super) mesh: Mesh,
    pub(super) rank: Rank,
    /// The symbols of the plan, and those read from data so far.
    pub(super) symbols: BTreeMap<Sym, i64>,
    pub(super) memory: Memory,
    /// The address of the heap of the last call.
    pub(super) heap: usize,
    pub(super) slots: Vec<Slot>,
    /// Handles of slots that are the same at each call.
    pub(super) handles: Vec<Option<Buffer>>,
    pub(super) flights: Vec<Option<Flight>>,
    /// By each start's own pending: the group and the ticket of the operation, until its release.
    pub(super) lent: Vec<Option<(usize, Ticket)>>,
    /// What ranks tell each other about the operations of each start, by its pending, with this rank's recorder names.
    pub(super) said: Vec<Option<Said>>,
    /// The number of operations in flight per group, and in total.
    pub(super) in_flight: Vec<usize>,
    pub(super) all_in_flight: usize,
    pub(super) work: u64,
    pub(super) watch: Watch,
    pub(super) copied: u64,
    /// The remaining budget of this call, if it has limits.
    pub(super) budget: Option<Budget>,
    /// The blocks that are open, outermost first.
    pub(super) frames: Vec<Frame>,
}

impl State {
    /// The context in which size expressions are evaluated.
    pub(super) fn sizes(&self) -> EvalCx<'_> {
        EvalCx { mesh: &self.mesh, rank: self.rank, symbols: &self.symbols }
    }

    /// Whether a truth value holds.
    pub(super) fn is_true(&self, slot: SlotId) -> Result<bool, RunError> {
        Ok(self.memory.read(&self.slots[slot])?.first() != Some(&0))
    }

    /// Checks that the budget allows `more` work.
    pub(super) fn check(&self, more: Total) -> Result<(), RunError> {
        self.budget.as_ref().map_or(Ok(()), |budget| budget.check(more).map_err(RunError::limit))
    }

    /// Charges `more` work to the budget.
    pub(super) fn spend(&mut self, more: Total) -> Result<(), RunError> {
        self.budget.as_mut().map_or(Ok(()), |budget| budget.spend(more).map_err(RunError::limit))
    }

    /// The work of a line without its blocks, whose lines are counted separately.
    pub(super) fn own_work(&self, line: &Line) -> Total {
        let number = |index: &Index| cost::number(&self.sizes(), index);
        match (&line.work.later, &line.step) {
            (Some(cost), _) => {
                Total { flops: number(&cost.flops), bytes: number(&cost.bytes), steps: 1, ..Total::default() }
            }
            (None, Step::Cond(_) | Step::Loop(_)) => Total { steps: 1, ..Total::default() },
            (None, _) => line.work.known,
        }
    }

    /// Runs a line that neither blocks nor has blocks.
    pub(super) fn line(&mut self, line: &Line, cx: &RunCx<'_>) -> Result<(), RunError> {
        match &line.step {
            Step::Nothing | Step::Release(_) | Step::Wait(_) | Step::Cond(_) | Step::Loop(_) => {}
            Step::Kernel { kernel, op, args, results } => self.kernel(kernel, op, args, results, cx)?,
            Step::Eval { op, args, results } => self.eval(op, args, results)?,
            Step::Copy { from, to, counted } => self.copy(*from, *to, *counted, cx)?,
            Step::Zeros(slots) => {
                for slot in slots {
                    cx.device.zero(&self.memory.stored(&self.slots[*slot])?)?;
                }
            }
            Step::Join { op, boxes, counted, args, result } => match boxes {
                Some(boxes) => self.copied += self.join(boxes, (args, counted), *result, cx)?,
                None => {
                    let shapes: SmallVec<[&[usize]; 4]> =
                        args.iter().map(|arg| &self.slots[*arg].layout.shape[..]).collect();
                    let whole = &self.slots[*result].layout.shape;
                    let boxes = boxes_of(&**op, &self.sizes(), &shapes, whole)?;
                    self.copied += self.join(&boxes, (args, counted), *result, cx)?;
                }
            },
            Step::Start(start) => self.start(start, line.site, cx)?,
            Step::Move(moves) => self.move_all(moves, cx)?,
            Step::Entries { pairs, into, reverse } => {
                let iteration = self.frames.last().map_or(0, |frame| frame.iteration);
                for (whole, single) in pairs {
                    let length = self.slots[*whole].layout.shape.first().copied().unwrap_or(0);
                    let entry = Flow::entry(*reverse, length, iteration);
                    self.copy_entry(*whole, entry, *single, *into, cx)?;
                }
            }
            Step::ToSize { op, args, symbols, guards } => self.read_sizes(op, args, symbols, guards)?,
        }
        Ok(())
    }

    /// Advances pending operations if enough work was done since the last time, that of `line` included.
    pub(super) fn poll_after(&mut self, line: &Line, cx: &RunCx<'_>) -> Result<(), RunError> {
        if self.all_in_flight == 0 {
            return Ok(());
        }
        // Roughly in bytes of memory traffic.
        let Total { flops, bytes, .. } = self.own_work(line);
        self.poll(bytes.saturating_add(flops / 4), cx)
    }

    fn poll(&mut self, work: u64, cx: &RunCx<'_>) -> Result<(), RunError> {
        self.work = self.work.saturating_add(work);
        if self.work < POLL {
            return Ok(());
        }
        self.work = 0;
        for (group, in_flight) in cx.groups.iter().zip(&self.in_flight) {
            if let (Some(group), 1..) = (group, in_flight) {
                group.poll()?;
            }
        }
        Ok(())
    }

    /// Resolves a slot that depends on sizes known only at run time.
    pub(super) fn find(&mut self, slot: SlotId, found: &Found, cx: &RunCx<'_>) -> Result<(), RunError> {
        let Slot { region, dtype, .. } = self.slots[slot];
        let layout = match found {
            Found::At { shape, offset } => {
                let shape = shape.iter().map(|size| self.sizes().size(size)).collect::<Result<Dims, _>>()?;
                let layout = Layout { start: offset / dtype.size(), ..Layout::contiguous(&shape) };
                let bytes = consort_types::layout::numel(&shape).and_then(|n| n.checked_mul(dtype.size()));
                let end = bytes.and_then(|bytes| bytes.checked_add(*offset));
                let end =
                    end.ok_or_else(|| RunError::new(format!("a tensor of shape {shape:?} is too large")))?;
                if self.memory.0[region].region.is_dyn() {
                    self.memory.make_room(region, end, cx.heap)?;
                }
                layout.into()
            }
            Found::View { op, of, result, n } => {
                let of = &self.slots[*of].layout;
                let seen = layouts_of(&**op, &self.sizes(), of, *n)?;
                // A reshape that is not a view: its elements are read in place.
                seen.map_or_else(|| Rc::clone(of), |mut layouts| layouts.swap_remove(*result).into())
            }
        };
        self.slots[slot] = Slot::new(region, dtype, layout, false);
        Ok(())
    }

    fn kernel(
        &self,
        kernel: &Kernel,
        op: &Op,
        args: &[SlotId],
        results: &[SlotId],
        cx: &RunCx<'_>,
    ) -> Result<(), RunError> {
        let (slots, memory) = (&self.slots, &self.memory);
        let mut given = Few::new(args.len(), || Operand::Result);
        for (given, arg) in given.items().iter_mut().zip(args) {
            let arg = &slots[*arg];
            let over = results.iter().position(|result| slots[*result].overlaps(arg));
            *given = match over {
                None => Operand::Stored(memory.stored(arg)?),
                Some(0)
                    if kernel.in_place
                        && arg.layout.shape == slots[results[0]].layout.shape
                        && arg.lies_at(&slots[results[0]]) =>
                {
                    Operand::Result
                }
                Some(_) => Operand::Overlapping(memory.stored(arg)?),
            };
        }
        let (sizes, given) = (self.sizes(), given.items());
        match results {
            [result] => {
                let made = memory.stored(&slots[*result])?;
                cx.device.launch(&sizes, (kernel, &**op), given, std::slice::from_ref(&made))
            }
            _ => {
                let made = results.iter().map(|result| memory.stored(&slots[*result]));
                let made = made.collect::<Result<Vec<_>, _>>()?;
                cx.device.launch(&sizes, (kernel, &**op), given, &made)
            }
        }
    }

    /// Runs a user-defined op through its `eval`.
    fn eval(&self, op: &Op, args: &[SlotId], results: &[SlotId]) -> Result<(), RunError> {
        let stored = |slots: &[SlotId]| -> Result<Vec<Stored<'_>>, RunError> {
            slots.iter().map(|slot| self.memory.stored(&self.slots[*slot])).collect()
        };
        evaluate(&self.sizes(), &**op, &stored(args)?, &stored(results)?)
    }

    /// Reads sizes from tensors and binds their symbols.
    fn read_sizes(
        &mut self,
        op: &Op,
        args: &[SlotId],
        symbols: &[Sym],
        guards: &[Guard],
    ) -> Result<(), RunError> {
        let literal = |arg: &SlotId| self.memory.stored(&self.slots[*arg])?.literal();
        let given = args.iter().map(literal).collect::<Result<Vec<_>, _>>()?;
        let values = op.eval(&self.sizes(), &given.iter().collect::<Vec<_>>())?;
        let values: Option<Vec<i64>> = values.iter().map(Literal::as_size).collect();
        let Some(values) = values.filter(|values| values.len() == symbols.len()) else {
            return Err(RunError::new(("a size for each symbol", "others from its evaluation")));
        };
        self.symbols.extend(symbols.iter().copied().zip(values));
        check_guards(&self.mesh, self.rank, guards, &self.symbols).map_err(RunError::new)
    }
}
