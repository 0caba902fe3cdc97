//! A collective in flight over MPI: its buffers, the calls of MPI that move its data, and what is done after them.

use smallvec::SmallVec;

use consort_types::{Dtype, Kind};

use crate::engine::Given;
use crate::error::CommError;
use crate::mpi::compare::{Comparison, Envelope};
use crate::mpi::error::MpiError;
use crate::mpi::flight::Flight;
use crate::mpi::span::Span;
use crate::mpi::transfers::{join, scale};
use crate::op::{Key, Lists, Op};
use crate::recorder::{CallRecord, CallText, Name};
use crate::shm::buffer::{Access, Buffer, unclaim_all};
use crate::shm::buffers::Buffers;
use crate::shm::common_result::Common;

/// A collective in flight.
pub(super) struct Call {
    pub(super) number: u64,
    pub(super) op: Op,
    pub(super) lists: Option<Box<Lists>>,
    /// The operands, then the results.
    pub(super) buffers: Buffers,
    /// How many are operands, and how the operation uses them.
    pub(super) claims: (usize, Access),
    /// Whether the claims were recorded.
    pub(super) noted: bool,
    pub(super) key: Key,
    pub(super) site: Name,
    pub(super) text: CallText,
    pub(super) event: u64,
    pub(super) stage: Stage,
    /// The result that members do not bring themselves.
    pub(super) common: Option<Buffer>,
    pub(super) is_abandoned: bool,
}

/// The stage of a call.
pub(super) enum Stage {
    /// The members compare what they have called.
    Comparing(Comparison),
    /// The members compare what they are about to run.
    Agreeing(Envelope),
    /// That was its whole reduction; it waits for its turn, and moves nothing.
    Reduced,
    /// It waits for its turn.
    Ready,
    /// Its data move.
    Moving(Moves),
    Finished,
}

/// The calls of MPI that move the data of one call, and what is done when all are over.
#[derive(Default)]
pub(super) struct Moves {
    pub(super) flights: SmallVec<[Flight; 1]>,
    /// Of which flights the length is only known when they are over: the flight, the sender, and what is expected.
    pub(super) expected: Vec<(usize, usize)>,
    pub(super) after: SmallVec<[After; 1]>,
}

/// What is done with the data that MPI has moved.
pub(super) enum After {
    /// Multiplies by a factor.
    Scale(Span, Dtype, f64),
    /// Joins stripes that came member by member: from, into, stripes, bytes of each member in one.
    Join(Span, Span, usize, Vec<usize>),
}

impl Moves {
    /// Whether all are over; then the result is made.
    pub(super) fn advance(&mut self) -> Result<bool, MpiError> {
        // All of them, not up to the first that is not over: each test lets MPI advance.
        let mut over = true;
        for flight in &mut self.flights {
            over &= flight.test()?;
        }
        if over {
            for after in self.after.drain(..) {
                match after {
                    After::Scale(mut span, dtype, factor) => scale(span.bytes_mut(), dtype, factor),
                    After::Join(from, mut into, outer, sizes) => {
                        join(from.bytes(), into.bytes_mut(), outer, &sizes);
                    }
                }
            }
        }
        Ok(over)
    }

    /// A member that sent another number of bytes than expected: it, what it sent, and what was expected.
    pub(super) fn unexpected(&self) -> Option<(usize, usize, usize)> {
        let sent = |(index, from): &(usize, usize)| {
            let flight = &self.flights[*index];
            let expected = flight.span(0).len();
            (flight.received != expected).then_some((*from, flight.received, expected))
        };
        self.expected.iter().find_map(sent)
    }
}

impl Call {
    pub(super) fn operands(&self) -> &[Buffer] {
        &self.buffers[..self.claims.0]
    }

    pub(super) fn results(&self) -> &[Buffer] {
        &self.buffers[self.claims.0..]
    }

    pub(super) fn is_finished(&self) -> bool {
        matches!(self.stage, Stage::Finished)
    }

    /// The stripes of operand `item`.
    pub(super) fn outer(&self, item: usize) -> usize {
        match self.lists.as_deref() {
            Some(Lists::Operands(list)) => list[item].1,
            _ => self.op.outer,
        }
    }

    /// The element type of operand `item`, in a reduction.
    pub(super) fn dtype(&self, item: usize) -> Dtype {
        match self.lists.as_deref() {
            Some(Lists::Operands(list)) => list[item].0,
            _ => self.op.dtype,
        }
    }

    /// Its record for the flight recorder.
    pub(super) fn record(&self) -> CallRecord {
        CallRecord { number: self.number, key: self.key, text: self.text }
    }

    /// Whether the operand itself becomes the common result: a broadcast, at its root.
    fn gives_operand(&self) -> bool {
        self.op.kind == Kind::Broadcast && self.key.is_common() && self.claims.0 == 1
    }

    /// Its data have moved: frees the buffers for others.
    pub(super) fn finish(&mut self) {
        // The calls of MPI give their hold on the buffers up.
        self.stage = Stage::Finished;
        if self.gives_operand() {
            self.common = Some(self.buffers.remove(0));
        } else if self.noted {
            unclaim_all(&self.buffers, self.claims);
        }
        if self.is_abandoned {
            self.take_outcome();
        }
    }

    /// Gives the outcome, once.
    pub(super) fn take_outcome(&mut self) -> Given {
        self.is_abandoned = true;
        let common =
            self.common.take().map(|block| Box::new(Common::own(block, self.gives_operand() && self.noted)));
        (std::mem::take(&mut self.buffers), common)
    }

    /// Nobody waits for it any more.
    pub(super) fn abandon(&mut self) {
        self.is_abandoned = true;
        if self.is_finished() {
            self.take_outcome();
        }
    }
}

/// Why a call cannot begin or go on.
pub(super) type Outcome<T> = Result<T, CommError>;
