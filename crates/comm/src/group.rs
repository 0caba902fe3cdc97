//! A group: what its members can start. `collectives.rs` has the collectives by name, `progress.rs` advances operations in
//! flight.

use std::marker::PhantomData;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use consort_types::{Collective, Dtype, Kind, Reduce};

use crate::CommError;
use crate::arguments::{Arguments, OperandType, check};
use crate::collectives::{in_stripes, of, reducing, stripes};
use crate::event::Event;
use crate::flight_record::FlightRecord;
use crate::pending::{Outcome, Pending};
use crate::recorder::{Recorder, read_segment};
use crate::request::{Note, Request};
use crate::settings::Settings;
use crate::shm::alarm::Alarm;
use crate::shm::buffer::Buffer;
use crate::shm::buffers::Buffers;
use crate::shm::cores::Cores;
use crate::shm::heap::Heap;
use crate::shm::mail::{About, End, Message, Parcel};
use crate::shm::members::Members;
use crate::shm::progress::Inner;
use crate::shm::progress_thread::ProgressThread;
use crate::shm::rows::Rows;
use crate::shm::waiter::What;
use crate::siblings;

/// A rank's place among the ranks that communicate. One thread uses it; its clones are the same group.
///
/// Operations take buffers and give them back when they are finished: first the operands, then the results. All buffers
/// of a list move in one communication. Sizes are in bytes; an operand is `outer` stripes, so that any dimension can be
/// gathered or split without a copy.
#[derive(Clone)]
pub struct Group {
    pub(crate) inner: Rc<Inner>,
    ranks: Rc<[usize]>,
}

/// What starts a collective, of operands in the form `O` and results in the form `R`.
type Start<O, R> = fn(&Group, Request<'_, usize, O, R>) -> Result<Pending, CommError>;

/// What starts a collective, by its kind.
struct Starts<O, R>(PhantomData<(O, R)>);

impl<O: Into<Buffers>, R: IntoIterator<Item = Buffer>> Starts<O, R> {
    const ALL: [Start<O, R>; Kind::ALL.len()] = [
        Group::start_kind::<0, O, R>,
        Group::start_kind::<1, O, R>,
        Group::start_kind::<2, O, R>,
        Group::start_kind::<3, O, R>,
        Group::start_kind::<4, O, R>,
        Group::start_kind::<5, O, R>,
        Group::start_kind::<6, O, R>,
        Group::start_kind::<7, O, R>,
        Group::start_kind::<8, O, R>,
        Group::start_kind::<9, O, R>,
        Group::start_kind::<10, O, R>,
        Group::start_kind::<11, O, R>,
        Group::start_messages::<O, R>,
    ];
}
const _: () = assert!(Kind::Exchange as usize == Kind::ALL.len() - 1);

impl Group {
    pub(crate) fn new(
        rows: Rows,
        me: usize,
        heap: Arc<Heap>,
        alarm: Arc<Alarm>,
        recorder: Recorder,
        cores: Cores,
        settings: Rc<Settings>,
    ) -> Group {
        let ranks = rows.iter().map(|row| row.rank).collect();
        let members = Members::new(rows, me);
        let inner = Rc::new(Inner::new(members, heap, alarm, cores, recorder, settings));
        siblings::add(&inner);
        inner.alarm.add(&inner.members.rows);
        Group { inner, ranks }
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.inner.members.me
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.inner.members.n()
    }

    /// The members by their number in the world, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// This rank's heap, for buffers that take part with no copy.
    pub fn heap(&self) -> &Arc<Heap> {
        &self.inner.heap
    }

    /// The members, and whether each has a core, for measurements.
    pub(crate) fn members(&self) -> &Members {
        &self.inner.members
    }

    pub(crate) fn spins(&self) -> bool {
        self.inner.cores.one_each()
    }

    /// How many operations were not waited for yet.
    pub fn in_flight(&self) -> usize {
        self.inner.state().in_flight()
    }

    /// Starts a thread that advances large reductions while this one computes. True if there is a core for it besides
    /// one for each rank on this host; without one it would only take turns with the ranks.
    pub fn start_progress_thread(&self) -> bool {
        self.inner.cores.two_each() && self.force_progress_thread()
    }

    pub(crate) fn force_progress_thread(&self) -> bool {
        let Some(thread) = ProgressThread::start(&self.inner.members, &self.inner.alarm) else {
            return false;
        };
        // If there is one already, the new one ends at once.
        let _ = self.inner.progress_thread.set(thread);
        true
    }

    /// How many bytes of this member's part of a call are ready.
    #[cfg(test)]
    pub(crate) fn ready_bytes(&self, call: u64) -> usize {
        self.inner.members.ready(self.rank(), call)
    }

    /// How long this rank waits for operations in flight when its groups are dropped. Applies to all groups of this
    /// rank.
    pub fn set_deadline(&self, deadline: Duration) {
        self.inner.settings.deadline.set(deadline);
    }

    /// Whether waiting for a send needs its receive, even for a small message. Applies to all groups of this rank; the
    /// default is `CONSORT_STRICT`, or else true in debug builds.
    pub fn set_strict(&self, strict: bool) {
        self.inner.settings.strict.set(strict);
    }

    /// Advances operations in flight; never blocks.
    pub fn poll(&self) -> Result<(), CommError> {
        self.inner.advance(&mut self.inner.state()).map_err(|stop| self.inner.give(*stop))
    }

    /// Joins the members' bytes, of one length, by which they agree on what the note says.
    #[track_caller]
    pub fn agree(&self, mine: &[u8], note: Note) -> Result<Pending, CommError> {
        let operand = self.heap().alloc_from(mine)?;
        let result = self.heap().alloc(mine.len() * self.size())?;
        let note = Note { is_agreement: true, ..note };
        let collective = in_stripes(of(Kind::AllGather));
        let types = stripes(Dtype::U8, &[1]);
        self.start_as(collective, &types, operand, [result], false, (note, Location::caller()))
    }

    /// Compares words before members run what they stand for: gives the largest of each, in place.
    #[track_caller]
    #[inline]
    pub fn envelope(&self, words: Buffer, note: Note) -> Result<Pending, CommError> {
        let types = [OperandType::new(Dtype::I64, &[])];
        let said = (note, Location::caller());
        self.start_as(reducing(Kind::AllReduce, Reduce::Max), &types, words, None, false, said)
    }

    /// Starts what a request describes. All members must start the same.
    #[inline]
    pub fn start<O: Into<Buffers>, R: IntoIterator<Item = Buffer>>(
        &self,
        request: Request<'_, usize, O, R>,
    ) -> Result<Pending, CommError> {
        Starts::ALL[request.collective.kind as usize](self, request)
    }

    /// Starts a collective of a kind that is known here, so that nothing is left of the checks of others.
    fn start_kind<const KIND: usize, O: Into<Buffers>, R: IntoIterator<Item = Buffer>>(
        &self,
        request: Request<'_, usize, O, R>,
    ) -> Result<Pending, CommError> {
        let Request { collective, types, operands, results, note, site } = request;
        let collective = Collective { kind: const { Kind::ALL[KIND] }, ..*collective };
        self.start_as(collective, types, operands, results, false, (note, site))
    }

    /// Inlined: of a description that is known where it is called, little is left.
    #[inline(always)]
    pub(crate) fn start_as<T: Outcome>(
        &self,
        collective: Collective<'_, usize>,
        types: &[OperandType<'_>],
        operands: impl Into<Buffers>,
        results: impl IntoIterator<Item = Buffer>,
        common: bool,
        (note, site): (Note, &'static Location<'static>),
    ) -> Result<Pending<T>, CommError> {
        let mut buffers = operands.into();
        let count = buffers.len();
        results.into_iter().for_each(|result| buffers.push(result));
        let (operands, results) = buffers.split_at(count);
        let (me, n) = (self.rank(), self.size());
        let form = Arguments { collective, types, operands, results, me, n, common }.checked()?;
        let number = self.inner.start(form, (buffers, count), common, (&note, site))?;
        Ok(Pending::new(&self.inner, What::Call(number)))
    }

    /// Starts the messages that have a peer.
    fn start_messages<O: Into<Buffers>, R>(
        &self,
        request: Request<'_, usize, O, R>,
    ) -> Result<Pending, CommError> {
        let Request { collective, types, operands, note, site, .. } = request;
        let Collective { sends, receives, .. } = *collective;
        let mut parcel = Parcel::default();
        let messages = sends.iter().chain(receives).zip(operands.into()).enumerate();
        for (i, (message, buffer)) in messages {
            let Some(peer) = message.member(self.rank() as u32, self.size() as u32) else { continue };
            let about = types.get(i).map_or(About::default(), |ty| ty.about);
            self.add(&mut parcel, i < sends.len(), Message { peer, tag: message.tag as u64, buffer, about })?;
        }
        self.start_parcel(parcel, (note, site))
    }

    /// A batch of sends and receives. Gives back their buffers, sends first, when all receives have arrived and all
    /// sends are taken, or copied if they are small.
    #[track_caller]
    #[inline]
    pub fn exchange(
        &self,
        sends: impl IntoIterator<Item = Message>,
        recvs: impl IntoIterator<Item = Message>,
    ) -> Result<Pending, CommError> {
        // Pushed one by one: there are few, and collecting them takes longer than sending one.
        let mut parcel = Parcel::default();
        for message in sends {
            self.add(&mut parcel, true, message)?;
        }
        for message in recvs {
            self.add(&mut parcel, false, message)?;
        }
        self.start_parcel(parcel, (Note::default(), Location::caller()))
    }

    /// Adds a message to a batch; sends come first.
    #[inline(always)]
    fn add(&self, parcel: &mut Parcel, is_send: bool, message: Message) -> Result<(), CommError> {
        let Message { peer, tag, buffer, about } = message;
        check(peer < self.size(), || (format!("a peer below {}", self.size()), peer.to_string()))?;
        parcel.ends.push(End { peer, tag, about });
        parcel.buffers.push(buffer);
        parcel.sends += usize::from(is_send);
        Ok(())
    }

    #[inline(always)]
    fn start_parcel(
        &self,
        mut parcel: Parcel,
        (note, site): (Note, &'static Location<'static>),
    ) -> Result<Pending, CommError> {
        let batch = self.inner.start_batch(&mut parcel, (&note, site))?;
        Ok(Pending::new(&self.inner, What::Batch(batch)))
    }

    /// Sends a message: an exchange of one.
    #[track_caller]
    pub fn send(&self, message: Message) -> Result<Pending, CommError> {
        self.exchange([message], [])
    }

    /// Receives a message: an exchange of one.
    #[track_caller]
    pub fn recv(&self, message: Message) -> Result<Pending, CommError> {
        self.exchange([], [message])
    }

    /// This rank's flight recorder, for events other than a group's operations: kernels, compilations.
    pub fn recorder(&self) -> &Recorder {
        &self.inner.recorder
    }

    /// What the flight recorders of all members hold.
    pub fn flight_record(&self) -> FlightRecord {
        let mut flight = FlightRecord::new(self.ranks.iter().copied());
        for row in self.inner.members.rows.iter() {
            flight.add(row.rank, read_segment(&row.segment, row.rank));
        }
        flight.sorted()
    }

    /// The last events of all members, in the order of time.
    pub fn events(&self) -> Vec<Event> {
        self.flight_record().events
    }
}
