//! A line of a plan after lowering, with everything it needs resolved.

use consort_comm::{About, Note, Pending};
use consort_ir::cost::Total;
use consort_ir::index::{Guard, Index, Sym};
use consort_ir::ops::{Cost, Joined, Op, no_communication};

use consort_types::{Collective, Site};
use smallvec::SmallVec;

use super::memory::SlotId;
use crate::RunError;
use crate::kernels::Kernel;

/// Slot ids.
pub(super) type Slots = SmallVec<[SlotId; 4]>;

/// Id of a pending.
pub(super) type FlightId = usize;

/// Id of a block.
pub(super) type BlockId = usize;

/// The lines of all blocks, that of the function first. A line that has blocks names them.
pub(super) type Blocks = Vec<Vec<Line>>;

/// A line that does something.
pub(super) struct Line {
    pub(super) op: &'static str,
    pub(super) site: Option<Site>,
    /// Slots that depend on sizes known only at run time.
    pub(super) found: Vec<(SlotId, Found)>,
    pub(super) needs: Needs,
    pub(super) step: Step,
    pub(super) work: Work,
}

/// What a line waits for before it runs.
pub(super) struct Needs {
    /// Everything that was launched: the host or an engine reads what kernels write, or writes what they read.
    pub(super) device: bool,
    /// Operations that were in flight before the call and write these regions.
    pub(super) arguments: SmallVec<[usize; 2]>,
}

/// The work of a line; none of one that belongs to another.
#[derive(Default)]
pub(super) struct Work {
    /// Including its blocks, loops multiplied by their length; terms with sizes known only at run time count as 0.
    pub(super) known: Total,
    /// Without its blocks, if that depends on sizes known only at run time.
    pub(super) later: Option<Box<Cost>>,
}

/// How to resolve a slot that is not fixed.
pub(super) enum Found {
    /// A contiguous tensor of this shape, `offset` bytes into its region.
    At { shape: Vec<Index>, offset: usize },
    /// Result `result` of the `n` results of view `op` applied to slot `of`.
    View { op: Op, of: SlotId, result: usize, n: usize },
}

pub(super) enum Step {
    /// The line only resolves slots.
    Nothing,
    Kernel {
        kernel: Kernel,
        op: Op,
        args: Slots,
        results: Slots,
    },
    /// A user-defined op without a kernel.
    Eval {
        op: Op,
        args: Slots,
        results: Slots,
    },
    /// Copies elements; counted if the copy is for communication.
    Copy {
        from: SlotId,
        to: SlotId,
        counted: bool,
    },
    /// Results of a start that are zero on this rank, before it.
    Zeros(Slots),
    /// Copies boxes of operands to their places in the result unless they lie there already; boxes that depend on sizes
    /// known only at run time are computed at each call.
    Join {
        op: Op,
        boxes: Option<Vec<Joined>>,
        /// For each operand, whether moving it counts as a copy for communication.
        counted: SmallVec<[bool; 4]>,
        args: Slots,
        result: SlotId,
    },
    Start(Box<Start>),
    Wait(FlightId),
    Release(Release),
    Move(Moves),
    /// Copies between entries of whole tensors and single ones, of the iteration that runs.
    Entries {
        /// The whole tensor and the single one.
        pairs: Vec<(SlotId, SlotId)>,
        /// Whether the entry of the whole tensor is written.
        into: bool,
        /// Whether the last entry is the first iteration's.
        reverse: bool,
    },
    ToSize {
        op: Op,
        args: Slots,
        symbols: Vec<Sym>,
        /// The conditions that mention them, and no size that is read later.
        guards: Vec<Guard>,
    },
    Cond(Cond),
    Loop(Box<Loop>),
}

impl Step {
    /// Whether the host or an engine touches the tensors of the line, and not kernels alone.
    pub(super) fn is_on_host(&self) -> bool {
        match self {
            Step::Eval { .. } | Step::Start(_) | Step::ToSize { .. } | Step::Cond(_) => true,
            Step::Loop(each) => matches!(each.trips, Trips::While { .. }),
            Step::Nothing | Step::Kernel { .. } | Step::Copy { .. } | Step::Zeros(_) | Step::Join { .. } => {
                false
            }
            Step::Wait(_) | Step::Release(_) | Step::Move(_) | Step::Entries { .. } => false,
        }
    }

    /// Calls `f` with each slot that the line reads or writes.
    pub(super) fn for_each_slot(&self, f: &mut dyn FnMut(SlotId)) {
        let mut each = |slots: &[SlotId]| slots.iter().for_each(|slot| f(*slot));
        match self {
            Step::Nothing | Step::Wait(_) => {}
            Step::Kernel { args, results, .. } | Step::Eval { args, results, .. } => {
                each(args);
                each(results);
            }
            Step::Copy { from, to, .. } => each(&[*from, *to]),
            Step::Join { args, result, .. } => {
                each(args);
                each(&[*result]);
            }
            Step::Start(start) => {
                each(&start.zeros_after);
                each(&start.written);
                if let Some(call) = &start.call {
                    each(&call.operands);
                    each(&call.results);
                }
            }
            Step::Release(leases) => each(&leases.entry),
            Step::Zeros(results) => each(results),
            Step::Move(moves) => moves.tensors.iter().for_each(|one| each(&[one.from, one.to])),
            Step::Entries { pairs, .. } => pairs.iter().for_each(|(whole, one)| each(&[*whole, *one])),
            Step::ToSize { args, .. } => each(args),
            Step::Cond(cond) => each(&[cond.condition]),
            Step::Loop(each_time) => {
                if let Trips::While { condition, .. } = each_time.trips {
                    each(&[condition]);
                }
            }
        }
    }
}

/// Leases that must end before the next line.
#[derive(Default)]
pub(super) struct Release {
    /// Those of these starts, by their own pendings.
    pub(super) starts: SmallVec<[FlightId; 2]>,
    /// Those on these slots that are older than the call.
    pub(super) entry: Slots,
}

/// Starts communication.
pub(super) struct Start {
    /// The number of its group; `None` if this rank is not a member.
    pub(super) group: Option<usize>,
    /// Results that are zero on this rank, zeroed after the wait because peers read the memory until then.
    pub(super) zeros_after: Slots,
    /// Slots that the operation writes, whose leases must have ended.
    pub(super) written: Slots,
    /// Whether no line of its block waits for it: its leases end where it is waited for, since no line can say so.
    pub(super) leaves: bool,
    /// `None` if no message has a peer.
    pub(super) call: Option<Call>,
    pub(super) flight: FlightId,
}

/// A call of a group.
pub(super) struct Call {
    pub(super) op: Op,
    pub(super) operands: Slots,
    pub(super) results: Slots,
}

impl Call {
    pub(super) fn collective(&self) -> Result<Collective<'_, Index>, RunError> {
        Ok(self.op.collective().ok_or_else(no_communication)?)
    }
}

/// What ranks tell each other about an operation.
pub(super) struct Said {
    pub(super) note: Note,
    /// Per message, for an exchange.
    pub(super) messages: SmallVec<[About; 2]>,
}

/// A start in flight.
pub(super) struct Flight {
    pub(super) group: usize,
    pub(super) pending: Option<Pending>,
    pub(super) zeros_after: Slots,
    /// The start's own pending, and whether its leases end with the wait.
    pub(super) start: FlightId,
    pub(super) leaves: bool,
}

/// A parallel assignment of values to places.
pub(super) struct Moves {
    /// Pendings that stay in flight under a new id.
    pub(super) flights: Vec<(FlightId, FlightId)>,
    pub(super) tensors: Vec<Move>,
}

pub(super) struct Move {
    pub(super) from: SlotId,
    pub(super) to: SlotId,
    /// Whether an earlier move may overwrite its source.
    pub(super) staged: bool,
}

pub(super) struct Cond {
    pub(super) condition: SlotId,
    /// The branches for true and for false.
    pub(super) branches: [BlockId; 2],
}

pub(super) struct Loop {
    pub(super) trips: Trips,
    /// The known work of one iteration.
    pub(super) iteration: Total,
    pub(super) body: BlockId,
}

/// How often a loop runs.
pub(super) enum Trips {
    Count(Index),
    /// As long as the slot holds true; fails if it still does after `limit` iterations.
    While {
        condition: SlotId,
        limit: usize,
    },
}
