//! MPI as an engine: one member's side of a group, and everything in flight on it.
//!
//! MPI advances all of its calls whenever one is tested, so any wait advances everything. Calls begin to move data in the
//! order of their numbers on every member, which is what MPI asks for. What is compared first (see `compare`) waits for its
//! turn, and so do the calls after it.

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use consort_types::{Digest, Failure, Kind};
use smallvec::SmallVec;

use crate::CommError;
use crate::engine::{AnyEngine, Checked, Engine, Given, Made, Offer, Said, Ticket};
use crate::error::Side;
use crate::event::EventKind;
use crate::flight_record::FlightRecord;
use crate::message::Parcel;
use crate::mpi::call::{Call, Moves, Stage};
use crate::mpi::comm::Comm;
use crate::mpi::compare::{Comparison, Envelope, Reduced};
use crate::mpi::error::MpiError;
use crate::mpi::groups;
use crate::mpi::job::Job;
use crate::mpi::state::State;
use crate::mpi::transfers::Transfers;
use crate::op::AGREEMENT;
use crate::recorder::{CallRecord, CallText, Recorder, Tape, read_segment};
use crate::settings::Settings;
use crate::shm::buffer::{Access, Buffer, claim_all};
use crate::shm::buffers::bytes;
use crate::shm::call::access;
use crate::shm::heap::Heap;
use crate::unseen::{UNSEEN_NOTE, forget_trouble, report_unseen, trouble};

/// How often a waiting member tests before it lets others run.
pub(super) const LOOKS: usize = 200;

/// One member's side of a group over MPI.
pub(crate) struct MpiGroup {
    pub(super) job: Rc<Job>,
    /// For data and messages. `None` after it was given up.
    pub(super) data: Comm,
    /// For comparing calls, and headers of messages.
    pub(super) check: Comm,
    /// The tag of messages that belong to collectives; those of the program are smaller.
    tag: u64,
    pub(super) ranks: Rc<[usize]>,
    pub(super) heap: Arc<Heap>,
    pub(super) recorder: Recorder,
    pub(super) settings: Rc<Settings>,
    /// A digest of the group's name, the same on all members.
    pub(super) id: u64,
    pub(super) state: RefCell<State>,
    pub(super) is_seen: Cell<bool>,
}

impl MpiGroup {
    /// The group of these ranks, which are the members of a communicator.
    pub(super) fn of_comm(
        job: &Rc<Job>,
        data: Comm,
        ranks: Vec<usize>,
        (heap, recorder, settings): (Arc<Heap>, Recorder, Rc<Settings>),
        deadline: Duration,
    ) -> Result<Made, MpiError> {
        let (check, tag, me) = (data.dup(deadline)?, data.max_tag()?, data.rank());
        let id = Digest::of(recorder.group_name().as_bytes());
        let group = Rc::new(MpiGroup {
            job: Rc::clone(job),
            data,
            check,
            tag,
            ranks: ranks.clone().into(),
            heap,
            recorder,
            settings,
            id,
            state: RefCell::default(),
            is_seen: Cell::new(false),
        });
        groups::add(&group);
        Ok(Made { engine: AnyEngine::Mpi(group), me, ranks })
    }

    /// This rank's number in the world.
    pub(super) fn rank(&self) -> usize {
        self.ranks[self.data.rank()]
    }

    /// Whether members compare their calls.
    pub(super) fn is_checked(&self) -> bool {
        self.job.options().is_checked
    }

    /// How many calls this member has started.
    pub(super) fn calls(&self) -> u64 {
        self.state.borrow().next()
    }

    pub(super) fn is_busy(&self) -> bool {
        self.state.borrow().is_busy()
    }

    /// What this rank does, by its flight recorder.
    pub(super) fn doing(&self) -> Option<Side> {
        let mut flight = FlightRecord::new([self.rank()]);
        flight.add(self.rank(), self.tape());
        flight.sorted().sides().pop()
    }

    /// What this rank's flight recorder holds.
    pub(super) fn tape(&self) -> Option<Tape> {
        read_segment(self.heap.segment(), self.rank())
    }

    /// Advances everything in flight; an error ends the group.
    pub(super) fn advance(&self) -> Result<(), CommError> {
        let outcome = {
            let state = &mut *self.state.borrow_mut();
            match &state.failed {
                Some(error) => return Err(error.clone()),
                None => self.advance_calls(state).and_then(|()| self.advance_batches(state)),
            }
        };
        outcome.map_err(|error| self.fail(error))
    }

    fn advance_calls(&self, state: &mut State) -> Result<(), CommError> {
        for index in 0..state.calls.len() {
            let call = &mut state.calls[index];
            if let Stage::Comparing(comparison) = &mut call.stage
                && comparison.test()?
            {
                if let Some(error) = comparison.mismatch(self, call.number, call.key) {
                    return Err(error);
                }
                if call.op.kind == Kind::Broadcast && call.key.is_common() && call.claims.0 == 0 {
                    call.common = Some(self.heap.alloc(comparison.bytes(call.op.root))?);
                }
                call.stage = Stage::Ready;
            }
            if let Stage::Agreeing(envelope) = &mut call.stage
                && envelope.test()?
            {
                call.stage = match envelope.write(&call.buffers[0]) {
                    Reduced::All => Stage::Reduced,
                    Reduced::Some => Stage::Ready,
                    Reduced::Differs => Stage::Comparing(self.comparison(call)?),
                };
            }
            if state.begun == index && matches!(call.stage, Stage::Ready | Stage::Reduced) {
                let (comm, heap, tag) = (&self.data, &self.heap, self.tag);
                let most = self.job.options().most;
                let transfers = Transfers { comm, heap, tag, most, moves: Default::default() };
                let is_reduced = matches!(call.stage, Stage::Reduced);
                call.stage =
                    Stage::Moving(if is_reduced { Moves::default() } else { transfers.begin(call)? });
                state.begun += 1;
            }
            if let Stage::Moving(moves) = &mut call.stage
                && moves.advance()?
            {
                if let Some((from, sent, expected)) = moves.unexpected() {
                    return Err(self.splits(call, from, sent, expected));
                }
                call.finish();
                self.recorder.finish(call.event, true);
            }
        }
        state.forget();
        Ok(())
    }

    /// Starts to compare a call with those of the other members.
    fn comparison(&self, call: &Call) -> Result<Comparison, MpiError> {
        let (segment, named) = (self.heap.segment(), !call.text.name.is_empty());
        let text = if named { call.text.text(segment) } else { String::new() };
        Comparison::start(&self.check, call.key, &text, &call.site.text(segment))
    }

    /// How a call begins: what members agree on is compared in every build, all else as `CONSORT_CHECK` says.
    fn first_stage(&self, call: &Call, is_agreement: bool) -> Result<Stage, MpiError> {
        let Call { op, key, .. } = call;
        let is_envelope = is_agreement && op.kind == Kind::AllReduce;
        if self.is_checked() || is_agreement && !is_envelope || key.is_common() && op.kind == Kind::Broadcast
        {
            return self.comparison(call).map(Stage::Comparing);
        }
        match is_envelope {
            true => Envelope::start(&self.check, *key, &call.buffers[0]).map(Stage::Agreeing),
            false => Ok(Stage::Ready),
        }
    }

    /// The error of a member that sent another number of bytes than this one expects of it.
    fn splits(&self, call: &Call, from: usize, sent: usize, expected: usize) -> CommError {
        let side = |rank: usize, what: String, site: String| Side { rank, what, site };
        let sender =
            side(self.ranks[from], format!("sends {sent} bytes to rank {}", self.rank()), String::new());
        let site = call.site.text(self.heap.segment());
        let receiver =
            side(self.rank(), format!("expects {expected} bytes from rank {}", self.ranks[from]), site);
        CommError::Splits { call: call.number, sides: Box::new([sender, receiver]) }
    }

    fn advance_batches(&self, state: &mut State) -> Result<(), CommError> {
        for batch in state.batches.values_mut() {
            if self.advance_batch(batch)? {
                self.recorder.finish(batch.event, true);
            }
        }
        state.batches.retain(|_, batch| !(batch.is_abandoned && batch.is_finished()));
        Ok(())
    }

    pub(super) fn is_over(&self, ticket: Ticket) -> bool {
        let state = self.state.borrow();
        match ticket {
            Ticket::Call(number) => state.call(number).is_none_or(Call::is_finished),
            Ticket::Batch(number) => state.batches.get(&number).is_none_or(|batch| batch.is_finished()),
            Ticket::Over => true,
        }
    }
}

impl Engine for MpiGroup {
    fn heap(&self) -> &Arc<Heap> {
        &self.heap
    }

    fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    fn settings(&self) -> &Rc<Settings> {
        &self.settings
    }

    fn start(&self, request: Checked<'_>) -> Result<Ticket, CommError> {
        let Checked { op, lists, buffers, count, common, note, site } = request;
        if let Some(error) = self.state.borrow().failed.clone() {
            return Err(self.give(error));
        }
        let (operands, results) = buffers.split_at(count);
        let n = self.ranks.len();
        // Members other than the root of a scatter have no operand.
        let lengths: SmallVec<[usize; 2]> = match op.kind {
            Kind::Scatter => results.iter().map(|result| result.len() * n).collect(),
            _ => operands.iter().map(Buffer::len).collect(),
        };
        let mut key = op.key(lists.as_deref(), &lengths, common);
        key.extra ^= note.digest;
        key.what |= if note.is_agreement { AGREEMENT } else { 0 };
        let block = match op.kind {
            Kind::Broadcast => None,
            _ if !common => None,
            Kind::AllGather => Some(self.heap.alloc(bytes(operands) * n)?),
            _ => Some(self.heap.alloc(bytes(operands))?),
        };
        let claims = (count, access(&op, self.data.rank(), common));
        let noted = claim_all(&self.heap, &buffers, claims)?;
        forget_trouble();
        let site = if note.site.is_empty() { self.recorder.site(site) } else { note.site };
        let number = self.state.borrow().next();
        let text = CallText { name: note.text, number: note.number };
        let (event, stage, is_abandoned) = (0, Stage::Ready, false);
        let mut call = Call {
            number,
            op,
            lists,
            buffers,
            claims,
            noted,
            key,
            site,
            text,
            event,
            stage,
            common: block,
            is_abandoned,
        };
        call.event = self.recorder.call(EventKind::Start, call.record(), site);
        call.stage = self.first_stage(&call, note.is_agreement).map_err(|error| self.fail(error.into()))?;
        self.state.borrow_mut().calls.push_back(call);
        self.advance().map_err(|error| self.give(error))?;
        Ok(Ticket::Call(number))
    }

    fn start_batch(&self, parcel: &mut Parcel, (note, site): Said<'_>) -> Result<Ticket, CommError> {
        if let Some(error) = self.state.borrow().failed.clone() {
            return Err(self.give(error));
        }
        if let Some(end) = parcel.ends.iter().find(|end| end.tag >= self.tag) {
            let headline = (format!("a tag below {}, the limit of this MPI", self.tag), end.tag.to_string());
            return Err(CommError::Argument(Failure::new(headline).of("exchange")));
        }
        parcel.noted = claim_all(&self.heap, &parcel.buffers, (parcel.sends, Access::Read))?;
        forget_trouble();
        let size = bytes(&parcel.buffers);
        let site = if note.site.is_empty() { self.recorder.site(site) } else { note.site };
        let mut batch = self.batch_of(parcel, site).map_err(|error| self.give(self.fail(error)))?;
        let state = &mut *self.state.borrow_mut();
        let number = state.next_batch;
        state.next_batch += 1;
        batch.event = self.recorder.call(EventKind::Start, CallRecord::batch(number, size), site);
        state.batches.insert(number, batch);
        Ok(Ticket::Batch(number))
    }

    fn poll(&self) -> Result<(), CommError> {
        let polled = self.advance().and_then(|()| if self.is_busy() { self.heed() } else { Ok(()) });
        polled.map_err(|error| self.give(error))
    }

    fn test(&self, ticket: Ticket) -> Result<bool, CommError> {
        let tested = match self.advance_to(ticket) {
            Ok(false) => self.look_around(ticket),
            tested => tested,
        };
        tested.map_err(|error| self.give(error))
    }

    fn finish_soon(&self, ticket: Ticket) -> Result<Option<Given>, CommError> {
        // Most small operations end here, and cost neither a clock nor an event of a wait.
        let looks = if self.job.cores().one_each() { LOOKS } else { 1 };
        for _ in 0..looks {
            if self.advance_to(ticket).map_err(|error| self.give(error))? {
                return Ok(self.take(ticket));
            }
        }
        Ok(None)
    }

    fn wait(
        &self,
        ticket: Ticket,
        until: impl FnOnce() -> Instant,
        site: &'static Location<'static>,
    ) -> Result<(), CommError> {
        if self.advance_to(ticket).map_err(|error| self.give(error))? {
            return Ok(());
        }
        let record = match ticket {
            Ticket::Call(number) => self.state.borrow().call(number).map(Call::record),
            Ticket::Batch(number) => Some(CallRecord::batch(number, 0)),
            Ticket::Over => None,
        };
        if let Some(record) = record {
            self.recorder.call(EventKind::Wait, record, self.recorder.site(site));
        }
        self.wait_for(Some(ticket), until()).map_err(|error| self.give(error))
    }

    // MPI is done with the buffers of an operation when it is over.
    fn released(&self, ticket: Ticket) -> bool {
        self.is_over(ticket)
    }

    fn release(&self, ticket: Ticket, until: impl FnOnce() -> Instant) -> Result<(), CommError> {
        if self.advance_to(ticket).map_err(|error| self.give(error))? {
            return Ok(());
        }
        self.wait_for(Some(ticket), until()).map_err(|error| self.give(error))
    }

    fn take(&self, ticket: Ticket) -> Option<Given> {
        let state = &mut *self.state.borrow_mut();
        match ticket {
            Ticket::Call(number) => state.take(number),
            Ticket::Batch(number) => {
                let is_finished = state.batches.get(&number).is_some_and(|batch| batch.is_finished());
                let batch = if is_finished { state.batches.remove(&number) } else { None };
                batch.map(|batch| (batch.buffers, None))
            }
            Ticket::Over => None,
        }
    }

    fn abandon(&self, ticket: Ticket) {
        let state = &mut *self.state.borrow_mut();
        match ticket {
            Ticket::Call(number) => state.abandon(number),
            Ticket::Batch(number) => {
                state.batches.get_mut(&number).into_iter().for_each(|batch| batch.is_abandoned = true);
                state.batches.retain(|_, batch| !(batch.is_abandoned && batch.is_finished()));
            }
            Ticket::Over => {}
        }
    }

    // What is in flight keeps its buffers: MPI may still write them.
    fn close(&self, abort: bool) {
        if !abort {
            self.leave();
        }
    }

    fn in_flight(&self) -> usize {
        self.state.borrow().in_flight()
    }

    fn next(&self) -> u64 {
        self.calls()
    }

    fn unseen(&self) -> Option<CommError> {
        self.unseen_error().map(|error| self.give(error))
    }

    fn flight_record(&self, ranks: &[usize]) -> FlightRecord {
        self.job.flight_record(ranks, self.tape())
    }

    fn offer(&self, _: Option<&[usize]>) -> Result<Offer, CommError> {
        Ok(Offer { word: 0, block: None })
    }

    fn subgroup(
        &self,
        (number, until): (u64, Instant),
        list: Option<(usize, &[usize])>,
        _: Offer,
        _: &[u64],
    ) -> Result<Option<Made>, CommError> {
        let deadline = until.saturating_duration_since(Instant::now());
        let colour = list.and_then(|(_, list)| list.iter().min().copied());
        let key = list.map_or(0, |(me, _)| me);
        let comm =
            self.data.split(colour, key, deadline).map_err(|error| self.give(self.fail(error.into())))?;
        let (Some(comm), Some((_, list))) = (comm, list) else { return Ok(None) };
        let ranks: Vec<usize> = list.iter().map(|member| self.ranks[*member]).collect();
        let recorder = self.recorder.for_subgroup(number, &ranks);
        let shared = (Arc::clone(&self.heap), recorder, Rc::clone(&self.settings));
        let made = MpiGroup::of_comm(&self.job, comm, ranks, shared, deadline);
        made.map(Some).map_err(|error| self.give(self.fail(error.into())))
    }
}

impl MpiGroup {
    /// Finishes operations in flight, tells the others that this member leaves, and looks for messages that it missed.
    fn leave(&self) {
        let before = self.unseen_error();
        let failed = self.state.borrow().failed.is_some();
        let until = crate::deadline::from_now(self.settings.deadline.get());
        if !failed && self.wait_for(None, until).is_ok() {
            match trouble(self.rank()) {
                Some((error, culprits)) => {
                    let cause = crate::cause::Cause::new(self.rank(), error, culprits);
                    self.job.stop(&cause, self.tape());
                }
                None => {
                    self.job.leave(&self.ranks, self.id, self.calls());
                    if let Ok(Some((from, tag, len))) = self.data.unreceived() {
                        let (what, site) = (format!("{len} bytes"), String::new());
                        let (from, to) = (self.ranks[from], self.rank());
                        self.fail(CommError::Unreceived { from, to, tag, what, site });
                    }
                }
            }
        }
        let told = self.settings.told.get();
        if let Some(error) = before.or_else(|| self.unseen_error().filter(|_| !told)) {
            report_unseen(error.failure(), UNSEEN_NOTE, self.settings.is_process);
            self.is_seen.set(true);
        }
    }
}

impl Drop for MpiGroup {
    fn drop(&mut self) {
        // A panicking rank does not wait: the others learn of the panic afterwards.
        self.close(thread::panicking());
    }
}
