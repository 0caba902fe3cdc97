//! A communicator: the calls of MPI with buffers that stay in place. Collectives start in the same order on all members.

use std::ffi::{c_int, c_void};
use std::rc::Rc;
use std::time::Duration;

use consort_types::{Dtype, Reduce};

use crate::mpi::abi::{Handle, STATUS};
use crate::mpi::calls::{Mpi, Status};
use crate::mpi::error::MpiError;
use crate::mpi::flight::{Flight, Uses};
use crate::mpi::span::{Elements, Span};
use crate::mpi::watchdog::watched;

/// A communicator of this rank.
pub(crate) struct Comm {
    mpi: Rc<Mpi>,
    handle: Handle,
    rank: usize,
    size: usize,
}

/// `MPI_UNDEFINED`, the same number in every interface: the colour of those who are in no group.
const NONE: c_int = -32766;

/// A count that is known to be small enough: larger operands are cut before.
fn int(count: usize) -> c_int {
    c_int::try_from(count).expect("counts are cut to what MPI takes")
}

fn uses(spans: impl IntoIterator<Item = Span>) -> Uses {
    Uses { spans: spans.into_iter().collect(), ints: Vec::new() }
}

impl Comm {
    /// All ranks.
    pub(crate) fn world(mpi: &Rc<Mpi>) -> Result<Comm, MpiError> {
        Comm::of(mpi, mpi.handles.comm_world)
    }

    fn of(mpi: &Rc<Mpi>, handle: Handle) -> Result<Comm, MpiError> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the communicator is valid, and the number is written there.
        mpi.check("MPI_Comm_rank", unsafe { (mpi.functions.comm_rank)(handle, &mut rank) })?;
        // SAFETY: as above.
        mpi.check("MPI_Comm_size", unsafe { (mpi.functions.comm_size)(handle, &mut size) })?;
        let place = |number: c_int| usize::try_from(number).unwrap_or(0);
        Ok(Comm { mpi: Rc::clone(mpi), handle, rank: place(rank), size: place(size) })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// A communicator made by a call that blocks until all members have made it.
    fn made(
        &self,
        call: &'static str,
        deadline: Duration,
        make: impl FnOnce(*mut Handle) -> c_int,
    ) -> Result<Option<Comm>, MpiError> {
        let mut handle = 0;
        self.mpi.check(call, watched(call, deadline, || make(&mut handle)))?;
        if handle == self.mpi.handles.comm_null { Ok(None) } else { Comm::of(&self.mpi, handle).map(Some) }
    }

    /// The same members, apart from all other traffic.
    pub(crate) fn dup(&self, deadline: Duration) -> Result<Comm, MpiError> {
        // SAFETY: the communicator is valid.
        let make = |new| unsafe { (self.mpi.functions.comm_dup)(self.handle, new) };
        let made = self.made("MPI_Comm_dup", deadline, make)?;
        made.ok_or_else(|| MpiError::Call { call: "MPI_Comm_dup", text: "no communicator".to_string() })
    }

    /// The members with the same colour, ordered by key; `None` for those without one.
    pub(crate) fn split(
        &self,
        colour: Option<usize>,
        key: usize,
        deadline: Duration,
    ) -> Result<Option<Comm>, MpiError> {
        let (colour, key) = (colour.map_or(NONE, int), int(key));
        // SAFETY: the communicator is valid.
        let make = |new| unsafe { (self.mpi.functions.comm_split)(self.handle, colour, key, new) };
        self.made("MPI_Comm_split", deadline, make)
    }

    /// The members on this host.
    pub(crate) fn split_by_host(&self, deadline: Duration) -> Result<Comm, MpiError> {
        let (kind, info) = (self.mpi.numbers.comm_type_shared, self.mpi.handles.info_null);
        // SAFETY: the communicator is valid.
        let make = |new| unsafe { (self.mpi.functions.comm_split_type)(self.handle, kind, 0, info, new) };
        let made = self.made("MPI_Comm_split_type", deadline, make)?;
        made.ok_or_else(|| MpiError::Call {
            call: "MPI_Comm_split_type",
            text: "no communicator".to_string(),
        })
    }

    /// Gives the communicator up. All members do, and nothing is in flight on it.
    pub(crate) fn free(mut self) -> Result<(), MpiError> {
        // SAFETY: it was made by a call of this rank, and is not used any more.
        let code = unsafe { (self.mpi.functions.comm_free)(&mut self.handle) };
        self.mpi.check("MPI_Comm_free", code)
    }

    /// The largest tag.
    pub(crate) fn max_tag(&self) -> Result<u64, MpiError> {
        let (mut value, mut flag): (*mut c_int, c_int) = (std::ptr::null_mut(), 0);
        let (key, place) = (self.mpi.numbers.tag_ub, (&raw mut value).cast::<c_void>());
        // SAFETY: the attribute's address is written there.
        let code = unsafe { (self.mpi.functions.comm_get_attr)(self.handle, key, place, &mut flag) };
        self.mpi.check("MPI_Comm_get_attr", code)?;
        // SAFETY: the library keeps the attribute as long as the communicator.
        let value = if flag == 0 || value.is_null() { 32767 } else { unsafe { *value } };
        Ok(u64::try_from(value).unwrap_or(32767))
    }

    fn start(
        &self,
        call: &'static str,
        uses: Uses,
        start: impl FnOnce(*mut Handle) -> c_int,
    ) -> Result<Flight, MpiError> {
        Flight::start(&self.mpi, call, uses, start)
    }

    fn in_place(&self) -> *const c_void {
        std::ptr::without_provenance(self.mpi.numbers.in_place as usize)
    }

    fn elements(&self, dtype: Dtype, reduce: Reduce) -> Result<(Handle, Elements), MpiError> {
        let (operation, element) = self.mpi.operation(dtype, reduce)?;
        Ok((operation, Elements { element, size: dtype.size() }))
    }

    /// Reduces the members' spans; every member's then has the result.
    pub(crate) fn all_reduce(&self, span: Span, dtype: Dtype, reduce: Reduce) -> Result<Flight, MpiError> {
        let (operation, of) = self.elements(dtype, reduce)?;
        let (at, count, from) = (span.address().cast(), int(span.len() / of.size), self.in_place());
        self.start("MPI_Iallreduce", uses([span]), |request| {
            // SAFETY: the flight keeps the span, which has this many elements.
            unsafe {
                (self.mpi.functions.iallreduce)(from, at, count, of.element, operation, self.handle, request)
            }
        })
    }

    /// Reduces the members' spans into the root's. A root with two spans reduces the first into the second.
    pub(crate) fn reduce(
        &self,
        span: Span,
        into: Option<Span>,
        dtype: Dtype,
        reduce: Reduce,
        root: usize,
    ) -> Result<Flight, MpiError> {
        let (operation, of) = self.elements(dtype, reduce)?;
        let count = int(span.len() / of.size);
        let at: *mut c_void = span.address().cast();
        let (from, into_at) = match &into {
            Some(into) => (at.cast_const(), into.address().cast()),
            None if self.rank == root => (self.in_place(), at),
            None => (at.cast_const(), std::ptr::null_mut()),
        };
        let (root, spans) = (int(root), [Some(span), into].into_iter().flatten());
        self.start("MPI_Ireduce", uses(spans), |request| {
            // SAFETY: the flight keeps the spans, which have this many elements; only the root's result is written.
            unsafe {
                (self.mpi.functions.ireduce)(
                    from,
                    into_at,
                    count,
                    of.element,
                    operation,
                    root,
                    self.handle,
                    request,
                )
            }
        })
    }

    /// Reduces the members' spans and gives each its part, of these sizes in bytes.
    pub(crate) fn reduce_scatter(
        &self,
        from: Span,
        into: Span,
        sizes: impl Iterator<Item = usize>,
        dtype: Dtype,
        reduce: Reduce,
    ) -> Result<Flight, MpiError> {
        let (operation, of) = self.elements(dtype, reduce)?;
        let (at, into_at) = (from.address().cast(), into.address().cast());
        let ints: Vec<c_int> = sizes.map(|size| int(size / of.size)).collect();
        let counts = ints.as_ptr();
        let uses = Uses { ints, ..uses([from, into]) };
        self.start("MPI_Ireduce_scatter", uses, |request| {
            // SAFETY: the flight keeps the spans and the counts; the operand has all parts, the result one.
            unsafe {
                (self.mpi.functions.ireduce_scatter)(
                    at,
                    into_at,
                    counts,
                    of.element,
                    operation,
                    self.handle,
                    request,
                )
            }
        })
    }

    /// Gives every member the root's bytes.
    pub(crate) fn broadcast(&self, span: Span, root: usize) -> Result<Flight, MpiError> {
        let (at, count, byte) = (span.address().cast(), int(span.len()), self.mpi.handles.byte);
        self.start("MPI_Ibcast", uses([span]), |request| {
            // SAFETY: the flight keeps the span.
            unsafe { (self.mpi.functions.ibcast)(at, count, byte, int(root), self.handle, request) }
        })
    }

    /// Joins the members' bytes, of one length.
    pub(crate) fn all_gather(&self, from: Span, into: Span) -> Result<Flight, MpiError> {
        let (at, count, byte) = (from.address().cast(), int(from.len()), self.mpi.handles.byte);
        let into_at = into.address().cast();
        self.start("MPI_Iallgather", uses([from, into]), |request| {
            // SAFETY: the flight keeps the spans; the second has room for all members.
            unsafe {
                (self.mpi.functions.iallgather)(at, count, byte, into_at, count, byte, self.handle, request)
            }
        })
    }

    /// Joins the members' bytes, of these sizes.
    pub(crate) fn all_gather_v(&self, from: Span, into: Span, sizes: &[usize]) -> Result<Flight, MpiError> {
        let (at, count, byte) = (from.address().cast(), int(from.len()), self.mpi.handles.byte);
        let into_at = into.address().cast();
        let ints = table(sizes);
        let (counts, offsets) = (ints.as_ptr(), ints[sizes.len()..].as_ptr());
        self.start("MPI_Iallgatherv", Uses { ints, ..uses([from, into]) }, |request| {
            // SAFETY: the flight keeps the spans and the tables; the second has room for all members.
            unsafe {
                (self.mpi.functions.iallgatherv)(
                    at,
                    count,
                    byte,
                    into_at,
                    counts,
                    offsets,
                    byte,
                    self.handle,
                    request,
                )
            }
        })
    }

    /// Joins the members' bytes, of one length, at the root, which alone has room for them.
    pub(crate) fn gather(&self, from: Span, into: Option<Span>, root: usize) -> Result<Flight, MpiError> {
        let (at, count, byte) = (from.address().cast(), int(from.len()), self.mpi.handles.byte);
        let into_at = into.as_ref().map_or(std::ptr::null_mut(), |into| into.address().cast());
        let spans = [Some(from), into].into_iter().flatten();
        self.start("MPI_Igather", uses(spans), |request| {
            // SAFETY: the flight keeps the spans; that of the root has room for all members.
            unsafe {
                (self.mpi.functions.igather)(
                    at,
                    count,
                    byte,
                    into_at,
                    count,
                    byte,
                    int(root),
                    self.handle,
                    request,
                )
            }
        })
    }

    /// Gives each member its part of the bytes of the root, which alone has any.
    pub(crate) fn scatter(&self, from: Option<Span>, into: Span, root: usize) -> Result<Flight, MpiError> {
        let (into_at, count, byte) = (into.address().cast(), int(into.len()), self.mpi.handles.byte);
        let at = from.as_ref().map_or(std::ptr::null(), |from| from.address().cast_const().cast());
        let spans = [from, Some(into)].into_iter().flatten();
        self.start("MPI_Iscatter", uses(spans), |request| {
            // SAFETY: the flight keeps the spans; that of the root has the bytes of all members.
            unsafe {
                (self.mpi.functions.iscatter)(
                    at,
                    count,
                    byte,
                    into_at,
                    count,
                    byte,
                    int(root),
                    self.handle,
                    request,
                )
            }
        })
    }

    /// Sends `part` bytes to each member and receives as many from each.
    pub(crate) fn all_to_all(&self, from: Span, into: Span, part: usize) -> Result<Flight, MpiError> {
        let (at, into_at) = (from.address().cast(), into.address().cast());
        let (count, byte) = (int(part), self.mpi.handles.byte);
        self.start("MPI_Ialltoall", uses([from, into]), |request| {
            // SAFETY: the flight keeps the spans, which have a part for each member.
            unsafe {
                (self.mpi.functions.ialltoall)(at, count, byte, into_at, count, byte, self.handle, request)
            }
        })
    }

    /// Is over when all members have started it.
    pub(crate) fn barrier(&self) -> Result<Flight, MpiError> {
        self.start("MPI_Ibarrier", Uses::default(), |request| {
            // SAFETY: the communicator is valid.
            unsafe { (self.mpi.functions.ibarrier)(self.handle, request) }
        })
    }

    /// Sends a message; `strict` if it is over only when its receive has started.
    pub(crate) fn send(&self, span: Span, to: usize, tag: u64, strict: bool) -> Result<Flight, MpiError> {
        let (at, count, byte) = (span.address().cast(), int(span.len()), self.mpi.handles.byte);
        let (to, tag) = (int(to), int(tag as usize));
        let functions = &self.mpi.functions;
        let send = if strict { functions.issend } else { functions.isend };
        self.start("MPI_Isend", uses([span]), |request| {
            // SAFETY: the flight keeps the span.
            unsafe { send(at, count, byte, to, tag, self.handle, request) }
        })
    }

    /// Receives a message.
    pub(crate) fn receive(&self, span: Span, from: usize, tag: u64) -> Result<Flight, MpiError> {
        let (at, count, byte) = (span.address().cast(), int(span.len()), self.mpi.handles.byte);
        let (from, tag) = (int(from), int(tag as usize));
        self.start("MPI_Irecv", uses([span]), |request| {
            // SAFETY: the flight keeps the span.
            unsafe { (self.mpi.functions.irecv)(at, count, byte, from, tag, self.handle, request) }
        })
    }

    /// Whose message has come that nobody receives: its sender, its tag, and its bytes. It stays where it is.
    pub(crate) fn unreceived(&self) -> Result<Option<(usize, u64, usize)>, MpiError> {
        let (functions, numbers) = (&self.mpi.functions, &self.mpi.numbers);
        let (mut flag, mut status): (c_int, Status) = (0, [0; STATUS]);
        let (source, tag) = (numbers.any_source, numbers.any_tag);
        // SAFETY: everything that is written is here.
        let code = unsafe { (functions.iprobe)(source, tag, self.handle, &mut flag, &mut status) };
        self.mpi.check("MPI_Iprobe", code)?;
        Ok((flag != 0).then(|| self.mpi.envelope(&status)))
    }

    /// Starts to receive a message of any sender and tag, if one has come.
    pub(crate) fn receive_any(&self) -> Result<Option<Flight>, MpiError> {
        let (functions, numbers) = (&self.mpi.functions, &self.mpi.numbers);
        let (mut flag, mut message, mut status): (c_int, Handle, Status) = (0, 0, [0; STATUS]);
        // SAFETY: everything that is written is here.
        let code = unsafe {
            (functions.improbe)(
                numbers.any_source,
                numbers.any_tag,
                self.handle,
                &mut flag,
                &mut message,
                &mut status,
            )
        };
        self.mpi.check("MPI_Improbe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        let (_, _, len) = self.mpi.envelope(&status);
        let span = Span::bytes_of(vec![0; len]);
        let (at, count, byte) = (span.address().cast(), int(len), self.mpi.handles.byte);
        self.start("MPI_Imrecv", uses([span]), |request| {
            // SAFETY: the flight keeps the span, which is as long as the message.
            unsafe { (functions.imrecv)(at, count, byte, &mut message, request) }
        })
        .map(Some)
    }
}

/// Counts, then where each begins when they are laid end to end.
fn table(sizes: &[usize]) -> Vec<c_int> {
    let starts = sizes.iter().scan(0, |next, size| Some(std::mem::replace(next, *next + size)));
    sizes.iter().copied().chain(starts).map(int).collect()
}
