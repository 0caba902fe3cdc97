//! Starts group operations on tensors in all forms: functional, in place, into a given tensor.
//!
//! A contiguous operand in the rank's heap is used without a copy. One that an operation writes must
//! have no other owner; otherwise it is copied first, and the copy is counted.

use std::panic::Location;
use std::rc::Rc;

use consort_comm::{About, Buffer, CommError, Note};
use consort_ir::index::Index;
use consort_ir::ops::{OpDef, call_name};
use consort_ir::types::TensorType;
use consort_runtime::start::{Operand, Operands, Outs, start};
use consort_types::layout::Layout;
use consort_types::{Collective, Digest, Written};
use smallvec::SmallVec;

use crate::apply::{copy_into, no_result, prepared};
use crate::error::{Error, Result};
use crate::flight::{Flight, Way};
use crate::mesh::Group;
use crate::storage::Storage;
use crate::tensor::{CachedLayout, Tensor, alloc, fill_new};
use crate::trace::{is_tracing, record_start, settle, uncompiled_at};
use crate::world::World;

/// The layout and storage of an operand or a result.
pub(crate) struct StorageView {
    layout: Rc<CachedLayout>,
    storage: Rc<Storage>,
}

impl StorageView {
    pub(crate) fn buffer(&self, ty: &TensorType) -> std::result::Result<Buffer, CommError> {
        self.storage.part(&self.layout.bytes(ty.dtype))
    }
}

/// The results of a started operation, and its handle.
pub(crate) struct Started {
    pub(crate) results: SmallVec<[Tensor; 1]>,
    pub(crate) flight: Option<Way>,
}

impl Group {
    /// Starts an operation. A tensor that is written in place may have at most `owners` owners; `outs` are given
    /// tensors that take the results, if any.
    ///
    /// It and all its callers are track_caller: the ranks' notes on a call name the user's line.
    #[track_caller]
    pub(crate) fn start(
        &self,
        op: &dyn OpDef,
        args: &[Tensor],
        owners: usize,
        outs: &[Tensor],
        site: &'static Location<'static>,
    ) -> Result<Started> {
        let (world, name) = (&self.world, call_name(op.info().name));
        check_world(name, world, args.iter().chain(outs), site)?;
        if self.breaks && is_tracing() {
            let results = uncompiled_at(name, site, || {
                Ok(self.start(op, args, owners, outs, site)?.results.into_vec())
            })?;
            return Ok(Started { results: results.into(), flight: None });
        }
        if let Some(traced) = record_start(op, args, site) {
            let (results, start) = traced?;
            return Ok(Started { results: results.into_iter().collect(), flight: Some(Way::Traced(start)) });
        }
        let settled: SmallVec<[Tensor; 2]>;
        let args = match args.iter().any(|arg| arg.traced.is_some()) {
            true => {
                settled = args.iter().map(|arg| settle(arg, name, site)).collect::<Result<_>>()?;
                &settled
            }
            false => args,
        };
        let prepared = prepared(op, world, args, site)?;
        let results = &prepared.results;
        check_outs(name, results, outs, site)?;
        if world.heap().is_none() || args.iter().any(|arg| arg.storage.is_none()) {
            let shape = |(ty, layout): &(Rc<TensorType>, Rc<CachedLayout>)| Tensor {
                ty: Rc::clone(ty),
                layout: Rc::clone(layout),
                storage: None,
                traced: None,
                world: world.id,
            };
            return Ok(Started { results: results.iter().map(shape).collect(), flight: None });
        }
        let mesh = world.mesh();
        let sizes = world.sizes(&mesh);
        let failed = |error| Error::comm(name, error, site);
        let Some(comm) = &self.comm else {
            // A rank outside the group passes its tensors through.
            return Ok(Started { results: args.iter().cloned().collect(), flight: None });
        };
        let collective = op.collective().ok_or_else(|| Error::new(name, "not a communication op", site))?;
        let written = collective.role(comm.rank()).written;
        let mut taken: SmallVec<[StorageView; 2]> = SmallVec::new();
        for (i, arg) in args.iter().enumerate() {
            taken.push(match written {
                Written::InPlace => {
                    self.take_to_write(name, arg, owners, collective.needs(i, comm.rank(), |_| None), site)?
                }
                _ => self.take_to_read(name, arg, site)?,
            });
        }
        let mut made: SmallVec<[StorageView; 2]> = SmallVec::new();
        match written {
            Written::New | Written::Zeros => {
                for (i, (ty, layout)) in results.iter().enumerate() {
                    let out = outs.get(i).and_then(|out| self.take_out(out, owners));
                    let one = match out {
                        Some(out) => out,
                        None => self.make(name, ty, layout, site)?,
                    };
                    if written == Written::Zeros {
                        let buffer = one.buffer(ty).map_err(failed)?;
                        fill_new(name, &buffer, site, |bytes| {
                            bytes.fill(0);
                            Ok(())
                        })?;
                    }
                    made.push(one);
                }
            }
            Written::InPlace | Written::Same | Written::Nothing => {}
        }
        let mut operands = Operands::new();
        for (arg, taken) in args.iter().zip(&taken) {
            let buffer = taken.buffer(&arg.ty).map_err(failed)?;
            let about = About::default();
            operands.push(Operand { buffer, dtype: arg.dtype(), shape: &arg.layout.shape, about });
        }
        let mut buffers = Outs::new();
        if written == Written::New {
            for ((ty, _), one) in results.iter().zip(&made) {
                buffers.push(one.buffer(ty).map_err(failed)?);
            }
        }
        comm.note(prepared.note);
        let pending = start(&collective, &sizes, comm, &operands, &buffers)
            .map_err(|error| refused(comm, failed(error)))?;
        let flight = Flight::new(pending, world, name, site);
        if made.is_empty() {
            made = taken;
        }
        // Not `collect`: this is on the hot path of every call.
        let mut awaited = SmallVec::new();
        for ((ty, _), made) in results.iter().zip(made) {
            awaited.push(self.awaited(ty, made, &flight));
        }
        Ok(Started { results: awaited, flight: Some(Way::Flying(flight)) })
    }

    /// Starts an operation with one operand, which its one result replaces: in place if `x` is the only owner.
    #[track_caller]
    pub(crate) fn start_on(
        &self,
        op: &dyn OpDef,
        x: &mut Tensor,
        site: &'static Location<'static>,
    ) -> Result<Option<Way>> {
        if let Some(comm) = &self.comm
            && x.storage.is_some()
            && x.traced.is_none()
            && !is_tracing()
            && let Some(collective) = op.collective()
            && collective.role(comm.rank()).written == Written::InPlace
        {
            return Ok(Some(Way::Flying(self.start_in_place(comm, op, &collective, x, site)?)));
        }
        let mut started = self.start(op, std::slice::from_ref(x), 1, &[], site)?;
        *x = started.results.pop().ok_or_else(|| no_result(op, site))?;
        Ok(started.flight)
    }

    /// The same for an operation that writes in place, or to a copy of the operand. Without lists: they take
    /// longer than the rest.
    #[track_caller]
    fn start_in_place(
        &self,
        comm: &consort_comm::Group,
        op: &dyn OpDef,
        collective: &Collective<'_, Index>,
        x: &mut Tensor,
        site: &'static Location<'static>,
    ) -> Result<Rc<Flight>> {
        let (world, name) = (&self.world, call_name(op.info().name));
        check_world(name, world, std::iter::once(&*x), site)?;
        let prepared = prepared(op, world, std::slice::from_ref(x), site)?;
        let [(ty, _)] = &prepared.results[..] else { return Err(no_result(op, site)) };
        let storage = x.data(name, site)?;
        let other = match self.is_free(x, storage, 1)? {
            true => None,
            false => Some(self.instead(name, x, collective.needs(0, comm.rank(), |_| None), site)?),
        };
        let (layout, storage) = match &other {
            Some(other) => (&other.layout, &other.storage),
            None => (&x.layout, storage),
        };
        let range = layout.bytes(x.dtype());
        let failed = |error| refused(comm, Error::comm(name, error, site));
        let buffer = storage.part(&range).map_err(failed)?;
        let operand = Operand { buffer, dtype: x.dtype(), shape: &layout.shape, about: About::default() };
        let mesh = world.mesh();
        comm.note(prepared.note);
        let pending = start(collective, &world.sizes(&mesh), comm, &[operand], &[]).map_err(failed)?;
        let flight = Flight::new(pending, world, name, site);
        storage.add_flight(range, Rc::clone(&flight));
        // Only now: a call that fails must leave `x` unchanged.
        if let Some(other) = other {
            (x.layout, x.storage) = (other.layout, Some(other.storage));
        }
        if !Rc::ptr_eq(&x.ty, ty) {
            x.ty = Rc::clone(ty);
        }
        x.world = world.id;
        Ok(flight)
    }

    /// A tensor that a pending operation will write.
    pub(crate) fn awaited(&self, ty: &Rc<TensorType>, made: StorageView, flight: &Rc<Flight>) -> Tensor {
        let (ty, layout, storage) = (Rc::clone(ty), made.layout, made.storage);
        let tensor =
            Tensor { ty, layout, storage: Some(Rc::clone(&storage)), traced: None, world: self.world.id };
        storage.add_flight(tensor.byte_range(), Rc::clone(flight));
        tensor
    }

    /// An operand that is only read: contiguous and in this rank's heap, by a copy if necessary. Waits for it.
    pub(crate) fn take_to_read(
        &self,
        op: &str,
        x: &Tensor,
        site: &'static Location<'static>,
    ) -> Result<StorageView> {
        let storage = x.data(op, site)?;
        x.wait()?;
        let near = self.world.heap().is_some_and(|heap| storage.buffer.is_in(heap));
        match near && x.layout.is_contiguous() {
            true => Ok(StorageView { layout: x.layout.clone(), storage: Rc::clone(storage) }),
            false => self.copy(op, x, site),
        }
    }

    /// An operand that is written in place: as above, and with at most `owners` owners. Otherwise new storage replaces
    /// it, with its elements copied if they are `needed`.
    pub(crate) fn take_to_write(
        &self,
        op: &str,
        x: &Tensor,
        owners: usize,
        needed: bool,
        site: &'static Location<'static>,
    ) -> Result<StorageView> {
        let storage = x.data(op, site)?;
        match self.is_free(x, storage, owners)? {
            true => Ok(StorageView { layout: x.layout.clone(), storage: Rc::clone(storage) }),
            false => self.instead(op, x, needed, site),
        }
    }

    /// Whether an operation can write a tensor in place. Waits for it.
    fn is_free(&self, x: &Tensor, storage: &Rc<Storage>, owners: usize) -> Result<bool> {
        storage.wait(x.byte_range())?;
        let near = self.world.heap().is_some_and(|heap| storage.buffer.is_in(heap));
        let own = near && Rc::strong_count(storage) <= owners && x.layout.is_contiguous();
        Ok(own && storage.is_writable(x.byte_range()))
    }

    /// The storage that an operation writes instead of a tensor that is not free.
    fn instead(
        &self,
        op: &str,
        x: &Tensor,
        needed: bool,
        site: &'static Location<'static>,
    ) -> Result<StorageView> {
        match needed {
            true => self.copy(op, x, site),
            false => self.make(op, &x.ty, &x.layout, site),
        }
    }

    /// The storage of a tensor that takes a result, if it can be written at once.
    fn take_out(&self, out: &Tensor, owners: usize) -> Option<StorageView> {
        let storage = out.storage.as_ref()?;
        let near = self.world.heap().is_some_and(|heap| storage.buffer.is_in(heap));
        let own = near && Rc::strong_count(storage) <= owners && out.layout.is_contiguous();
        (own && out.wait().is_ok() && storage.is_writable(out.byte_range()))
            .then(|| StorageView { layout: out.layout.clone(), storage: Rc::clone(storage) })
    }

    fn make(
        &self,
        op: &str,
        ty: &TensorType,
        layout: &Rc<CachedLayout>,
        site: &'static Location<'static>,
    ) -> Result<StorageView> {
        let buffer = alloc(&self.world, op, ty.dtype, &layout.shape, site)?;
        let layout = match layout.is_contiguous() && layout.start == 0 {
            true => Rc::clone(layout),
            false => CachedLayout::new(Layout::contiguous(&layout.shape)),
        };
        Ok(StorageView { layout, storage: Storage::new(buffer) })
    }

    fn copy(&self, op: &str, x: &Tensor, site: &'static Location<'static>) -> Result<StorageView> {
        let taken = self.make(op, &x.ty, &x.layout, site)?;
        copy_into(x, &taken.storage.buffer, site)?;
        self.world.count_copy(taken.storage.buffer.len());
        Ok(taken)
    }
}

/// The error of a call that was refused. Clears its note, which the next call would take otherwise.
#[cold]
fn refused(comm: &consort_comm::Group, error: Error) -> Error {
    comm.note(Note::default());
    error
}

/// Checks that tensors with data belong to the world of the group.
pub(crate) fn check_world<'a>(
    op: &str,
    world: &World,
    mut tensors: impl Iterator<Item = &'a Tensor>,
    site: &'static Location<'static>,
) -> Result<()> {
    match tensors.any(|tensor| tensor.world != 0 && tensor.world != world.id && tensor.storage.is_some()) {
        true => Err(Error::new(op, "expected tensors of the group's world, got one of another", site)),
        false => Ok(()),
    }
}

fn check_outs(
    op: &str,
    results: &[(Rc<TensorType>, Rc<CachedLayout>)],
    outs: &[Tensor],
    site: &'static Location<'static>,
) -> Result<()> {
    if outs.is_empty() {
        return Ok(());
    }
    if outs.len() != results.len() {
        let message = format!("expected {} tensors for the results, got {}", results.len(), outs.len());
        return Err(Error::new(op, message, site));
    }
    for ((ty, layout), out) in results.iter().zip(outs) {
        let shape = &layout.shape;
        if out.dtype() != ty.dtype || out.layout.shape != *shape {
            let message = format!(
                "expected {}{:?} for the result, got {}{:?}",
                ty.dtype,
                &shape[..],
                out.dtype(),
                &out.layout.shape[..]
            );
            return Err(Error::new(op, message, site));
        }
    }
    Ok(())
}

/// Fails if a tensor is not equal on all ranks of its world.
pub(crate) fn check_equal(x: &Tensor, site: &'static Location<'static>) -> Result<()> {
    let world = World::current()?;
    let Some(all) = world.all().filter(|all| all.size() > 1) else { return Ok(()) };
    let mine = x.with_bytes("replicated", site, Digest::of)?;
    let failed = |error| Error::comm("replicated", error, site);
    let (text, site_name) =
        (all.recorder().name("compare what is declared equal"), all.recorder().site(site));
    let note = Note { text, site: site_name, ..Note::default() };
    let pending = all.agree(&mine.to_le_bytes(), note).map_err(failed)?;
    let got = pending.wait_within(world.timeout()).map_err(failed)?;
    let bytes = got[1].bytes().map_err(failed)?;
    let other = bytes.chunks_exact(8).position(|one| one != mine.to_le_bytes());
    match other {
        None => Ok(()),
        Some(rank) => Err(Error::new(
            "replicated",
            format!("expected a tensor that is equal on all ranks, but rank {rank} has another"),
            site,
        )),
    }
}
