//! What a line of a plan has become: everything it needs, found.

use std::collections::BTreeSet;

use consort_comm::{About, Note, Pending};
use consort_ir::cost::Total;
use consort_ir::index::{Guard, Index, Sym};
use consort_ir::ops::{Cost, Joined, Op};
use consort_ir::program::Loc;
use consort_types::Collective;
use smallvec::SmallVec;

use super::RunError;
use super::memory::SlotId;
use crate::kernels::Kernel;

/// Numbers of slots.
pub(super) type Slots = SmallVec<[SlotId; 4]>;

/// The number of a pending.
pub(super) type FlightId = usize;

/// A line that does something.
pub(super) struct Line {
    pub(super) op: &'static str,
    pub(super) loc: Option<Loc>,
    /// Slots that depend on sizes known only now.
    pub(super) found: Vec<(SlotId, Found)>,
    pub(super) step: Step,
    pub(super) work: Work,
}

/// How much a line does.
pub(super) struct Work {
    /// With its blocks, each loop as often as it runs; what depends on sizes known later counts nothing.
    pub(super) known: Total,
    /// Without its blocks, where that depends on sizes known later.
    pub(super) later: Option<Box<Cost>>,
}

/// How a slot is found that is not the same at each call.
pub(super) enum Found {
    /// A tensor of this shape lies so many bytes into its region.
    At { shape: Vec<Index>, offset: usize },
    /// Result `result` of view `op` applied to slot `of`.
    View { op: Op, of: SlotId, result: usize },
}

pub(super) enum Step {
    /// Only slots were to be found.
    Nothing,
    Kernel {
        kernel: Kernel,
        op: Op,
        args: Slots,
        results: Slots,
    },
    /// An op of the user's own that has no kernel.
    Eval {
        op: Op,
        args: Slots,
        results: Slots,
    },
    /// Elements are written out; it is counted where communication is what they are for.
    Copy {
        from: SlotId,
        to: SlotId,
        counted: bool,
    },
    /// Boxes of operands are put where they belong, unless they are there; the boxes are found at each call where they
    /// depend on sizes known only then.
    Join {
        op: Op,
        boxes: Option<Vec<Joined>>,
        args: Slots,
        result: SlotId,
    },
    Start(Box<Start>),
    Wait(FlightId),
    ToSize {
        op: Op,
        arg: SlotId,
        symbols: Vec<Sym>,
        /// The conditions that mention them.
        guards: Vec<Guard>,
    },
    Cond(Box<Cond>),
    Scan(Box<Scan>),
}

/// Communication begins.
pub(super) struct Start {
    /// The number of its group; none where this rank is in no list of it.
    pub(super) group: Option<usize>,
    /// Operands that take part elsewhere than where they lie, and whether that is counted.
    pub(super) copies: Vec<(SlotId, SlotId, bool)>,
    /// Results that are zeros here, at once.
    pub(super) zeros: Slots,
    /// Results that are zeros here, and lie where peers read until then.
    pub(super) zeros_after: Slots,
    /// What peers must be done with.
    pub(super) written: Slots,
    pub(super) calls: Vec<Call>,
    pub(super) flight: FlightId,
}

/// One call of a group. A start of several tensors may be several of them.
pub(super) struct Call {
    pub(super) op: Op,
    /// The only operand of the op that takes part, where it is not all of them.
    pub(super) alone: Option<usize>,
    pub(super) operands: Slots,
    pub(super) results: Slots,
}

impl Call {
    pub(super) fn collective(&self) -> Result<Collective<'_, Index>, RunError> {
        let collective = self.op.collective().ok_or_else(|| RunError::new("not a communication op"))?;
        Ok(match self.alone {
            Some(operand) => collective.alone(operand),
            None => collective,
        })
    }
}

/// What ranks tell each other of an operation.
pub(super) struct Said {
    pub(super) note: Note,
    /// Of each message, where it is an exchange.
    pub(super) messages: SmallVec<[About; 2]>,
}

/// What is in flight.
pub(super) struct Flight {
    pub(super) group: usize,
    pub(super) pending: SmallVec<[Pending; 1]>,
    pub(super) zeros_after: Slots,
}

/// Values go from one place to another, all at the same time.
#[derive(Default)]
pub(super) struct Moves {
    /// These are waited for first.
    pub(super) land: Vec<FlightId>,
    /// These go on under another number.
    pub(super) flights: Vec<(FlightId, FlightId)>,
    pub(super) tensors: Vec<Move>,
}

pub(super) struct Move {
    pub(super) from: SlotId,
    pub(super) to: SlotId,
    /// Whether one before it may overwrite what it moves.
    pub(super) staged: bool,
}

pub(super) struct Cond {
    pub(super) condition: SlotId,
    /// What happens where it is true, and where it is false.
    pub(super) branches: [Branch; 2],
}

pub(super) struct Branch {
    pub(super) enter: Moves,
    pub(super) body: Vec<Line>,
    pub(super) leave: Moves,
}

pub(super) struct Scan {
    pub(super) length: Index,
    /// How much an iteration is known to do.
    pub(super) iteration: Total,
    /// The first carries, and what every iteration sees.
    pub(super) enter: Moves,
    /// From a whole to a parameter, an entry for each iteration.
    pub(super) slices: Vec<(SlotId, SlotId)>,
    pub(super) body: Vec<Line>,
    /// From a block's results to its parameters.
    pub(super) carry: Moves,
    /// From a block's result to an entry of a whole, for each iteration.
    pub(super) stacks: Vec<(SlotId, SlotId)>,
    /// From the last carries to the results.
    pub(super) leave: Moves,
}

/// Adds the ops of lines, those in blocks included, that run by their reference evaluation.
pub(super) fn evaluated(lines: &[Line], ops: &mut BTreeSet<&'static str>) {
    for line in lines {
        match &line.step {
            Step::Eval { .. } => drop(ops.insert(line.op)),
            Step::Cond(cond) => cond.branches.iter().for_each(|branch| evaluated(&branch.body, ops)),
            Step::Scan(scan) => evaluated(&scan.body, ops),
            _ => {}
        }
    }
}
