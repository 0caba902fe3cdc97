//! A group: what its members can start. `collectives.rs` has the collectives by name, `progress.rs` advances operations in
//! flight.

use std::marker::PhantomData;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use consort_types::{Collective, Dtype, Kind, Reduce};

use crate::CommError;
use crate::arguments::{Arguments, OperandType, check};
use crate::collectives::{in_stripes, of, reducing, stripes};
use crate::engine::{AnyEngine, Checked, Engine, Made, Ticket, with_engine};
use crate::event::Event;
use crate::flight_record::FlightRecord;
use crate::message::{About, End, Message, Parcel};
use crate::pending::{Outcome, Pending};
use crate::recorder::Recorder;
use crate::request::{Note, Request};
use crate::shm::buffer::Buffer;
use crate::shm::buffers::Buffers;
use crate::shm::heap::Heap;

/// A rank's place among the ranks that communicate. One thread uses it; its clones are the same group.
///
/// Operations take buffers and give them back when they are finished: first the operands, then the results. All buffers
/// of a list move in one communication. Sizes are in bytes; an operand is `outer` stripes, so that any dimension can be
/// gathered or split without a copy.
#[derive(Clone)]
pub struct Group {
    pub(crate) engine: AnyEngine,
    me: usize,
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
    pub(crate) fn new(made: Made) -> Group {
        let Made { engine, me, ranks } = made;
        Group { engine, me, ranks: ranks.into() }
    }

    /// This rank's place in the group.
    #[inline(always)]
    pub fn rank(&self) -> usize {
        self.me
    }

    /// How many members there are.
    #[inline(always)]
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The members by their number in the world, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// This rank's heap, for buffers that take part with no copy.
    pub fn heap(&self) -> &Arc<Heap> {
        with_engine!(&self.engine, engine => engine.heap())
    }

    /// How many operations were not waited for yet.
    pub fn in_flight(&self) -> usize {
        with_engine!(&self.engine, engine => engine.in_flight())
    }

    /// Starts a thread that advances large reductions while this one computes. True if there is a core for it besides
    /// one for each rank on this host; without one it would only take turns with the ranks.
    pub fn start_progress_thread(&self) -> bool {
        with_engine!(&self.engine, engine => engine.start_progress_thread())
    }

    /// For tests: progress threads start without cores for them. Applies to all groups of this rank.
    #[doc(hidden)]
    pub fn force_progress_threads(&self) {
        with_engine!(&self.engine, engine => engine.settings().forced_threads.set(true));
    }

    /// How long this rank waits for operations in flight when its groups are dropped. Applies to all groups of this
    /// rank.
    pub fn set_deadline(&self, deadline: Duration) {
        with_engine!(&self.engine, engine => engine.settings().deadline.set(deadline));
    }

    /// Whether waiting for a send needs its receive, even for a small message. Applies to all groups of this rank; the
    /// default is `CONSORT_STRICT`, or else true in debug builds.
    pub fn set_strict(&self, strict: bool) {
        with_engine!(&self.engine, engine => engine.settings().strict.set(strict));
    }

    /// Advances operations in flight; never blocks.
    pub fn poll(&self) -> Result<(), CommError> {
        with_engine!(&self.engine, engine => engine.poll())
    }

    /// Whether an operation is over and no member will read its buffers any more.
    pub fn is_released(&self, ticket: Ticket) -> bool {
        with_engine!(&self.engine, engine => engine.released(ticket))
    }

    /// Blocks until then, at most until `until`. The clock is read only if it must block.
    pub fn release(&self, ticket: Ticket, until: impl FnOnce() -> Instant) -> Result<(), CommError> {
        with_engine!(&self.engine, engine => engine.release(ticket, until))
    }

    /// For tests: over shared memory, all buffers of an operation stay leased until somebody asks for their release, as
    /// late as an engine may release them. Applies to all groups of this rank.
    #[doc(hidden)]
    pub fn release_late(&self) {
        with_engine!(&self.engine, engine => engine.settings().late.set(true));
    }

    /// Joins the members' bytes, of one length, by which they agree on what the note says.
    #[track_caller]
    pub fn agree(&self, mine: &[u8], note: Note) -> Result<Pending, CommError> {
        let operand = self.heap().alloc_from(mine)?;
        let result = self.heap().alloc(mine.len() * self.size())?;
        let note = Note { is_agreement: true, ..note };
        let collective = in_stripes(of(Kind::AllGather));
        let types = stripes(Dtype::U8, &[1]);
        self.start_as(Request { note, ..Request::new(&collective, &types, operand, [result]) })
    }

    /// Compares words before members run what they stand for: gives the largest of each, in place.
    #[track_caller]
    #[inline]
    pub fn envelope(&self, words: Buffer, note: Note) -> Result<Pending, CommError> {
        let types = [OperandType::new(Dtype::I64, &[])];
        let collective = reducing(Kind::AllReduce, Reduce::Max);
        self.start_as(Request { note, ..Request::new(&collective, &types, words, None) })
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
        let collective = Collective { kind: const { Kind::ALL[KIND] }, ..*request.collective };
        self.start_as(Request { collective: &collective, ..request })
    }

    /// Inlined: of a description that is known where it is called, little is left.
    #[inline(always)]
    pub(crate) fn start_as<T: Outcome, O: Into<Buffers>, R: IntoIterator<Item = Buffer>>(
        &self,
        request: Request<'_, usize, O, R>,
    ) -> Result<Pending<T>, CommError> {
        let Request { collective, types, operands, results, note, site } = request;
        let mut buffers = operands.into();
        let count = buffers.len();
        results.into_iter().for_each(|result| buffers.push(result));
        let (operands, results) = buffers.split_at(count);
        let (me, n, common) = (self.rank(), self.size(), T::IS_COMMON);
        let collective = *collective;
        let (op, lists) = Arguments { collective, types, operands, results, me, n, common }.checked()?;
        let checked = Checked { op, lists, buffers, count, common, note: &note, site };
        let ticket = with_engine!(&self.engine, engine => Engine::start(&**engine, checked))?;
        Ok(Pending::new(&self.engine, ticket))
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
        let ticket = with_engine!(&self.engine, engine => engine.start_batch(&mut parcel, (&note, site)))?;
        Ok(Pending::new(&self.engine, ticket))
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
        with_engine!(&self.engine, engine => engine.recorder())
    }

    /// What the flight recorders of all members hold.
    pub fn flight_record(&self) -> FlightRecord {
        with_engine!(&self.engine, engine => engine.flight_record(&self.ranks))
    }

    /// The last events of all members, in the order of time.
    pub fn events(&self) -> Vec<Event> {
        self.flight_record().events
    }
}
