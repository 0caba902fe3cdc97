//! Starts group operations on tensors in all forms: functional, in place, into a given tensor.
//!
//! A contiguous operand in the rank's heap is used without a copy. One that an operation writes must
//! have no other owner; otherwise it is copied first, and the copy is counted.

use std::panic::Location;
use std::rc::Rc;

use consort_comm::{Buffer, Buffers, CommError, OperandType, Request};
use consort_ir::index::Index;
use consort_ir::ops::{OpDef, call_name, no_communication};
use consort_ir::types::TensorType;
use consort_runtime::start::start;
use consort_types::layout::Layout;
use consort_types::{Collective, Destination, Held, Written};
use smallvec::SmallVec;

use crate::apply::{Prepared, copy_into, no_result, prepared};
use crate::error::{Error, Result};
use crate::flight::{Flight, Way};
use crate::mesh::Group;
use crate::placement::Origin;
use crate::storage::{Storage, alloc, fill_new};
use crate::tensor::{CachedLayout, Tensor};
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

/// The results of a started operation.
pub(crate) type Results = SmallVec<[Tensor; 1]>;

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
    ) -> Result<Results> {
        let (world, name) = (&self.world, call_name(op.info().name));
        check_world(name, world, args.iter().chain(outs), site)?;
        if self.breaks && is_tracing() {
            let eager = || Ok(self.start(op, args, owners, outs, site)?.into_vec());
            return Ok(uncompiled_at(name, site, eager)?.into());
        }
        if let Some(traced) = record_start(op, args, site) {
            let (results, start) = traced?;
            world.add_start(|| Way::Traced(start));
            return Ok(results.into_iter().collect());
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
                origin: Origin::NONE,
            };
            return Ok(results.iter().map(shape).collect());
        }
        let mesh = world.mesh();
        let sizes = world.sizes(&mesh);
        let failed = |error| Error::comm(name, error, site);
        let Some(comm) = &self.comm else {
            // A rank outside the group passes its tensors through.
            return Ok(args.iter().cloned().collect());
        };
        let collective =
            op.collective().ok_or_else(|| Error::new(name, no_communication().headline, site))?;
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
        let mut made = match written {
            Written::New | Written::Zeros => {
                self.make_results(name, &prepared, written, (outs, owners), site)?
            }
            Written::InPlace | Written::Same | Written::Nothing => SmallVec::new(),
        };
        let (mut types, mut operands) = (SmallVec::<[OperandType<'_>; 2]>::new(), Buffers::default());
        for (arg, taken) in args.iter().zip(&taken) {
            operands.push(taken.buffer(&arg.ty).map_err(failed)?);
            types.push(OperandType::new(arg.dtype(), &arg.layout.shape));
        }
        let mut buffers = Buffers::default();
        if written == Written::New {
            for ((ty, _), one) in results.iter().zip(&made) {
                buffers.push(one.buffer(ty).map_err(failed)?);
            }
        }
        let request = Request {
            collective: &collective,
            types: &types,
            operands,
            results: buffers,
            note: prepared.note,
            site,
        };
        let pending = start(comm, &sizes, request).map_err(failed)?;
        let flight = Flight::new(pending, world, name, site);
        if made.is_empty() {
            made = taken;
        }
        // Not `collect`: this is on the hot path of every call.
        let mut awaited = SmallVec::new();
        for ((ty, _), made) in results.iter().zip(made) {
            awaited.push(self.awaited(ty, made, &flight));
        }
        Ok(awaited)
    }

    /// The storage of the results: that of the given tensors where they can be written, else new storage.
    fn make_results(
        &self,
        name: &str,
        prepared: &Prepared,
        written: Written,
        (outs, owners): (&[Tensor], usize),
        site: &'static Location<'static>,
    ) -> Result<SmallVec<[StorageView; 2]>> {
        let mut made = SmallVec::new();
        for (i, (ty, layout)) in prepared.results.iter().enumerate() {
            let one = match outs.get(i).and_then(|out| self.take_out(out, owners)) {
                Some(out) => out,
                None => self.make(name, ty, layout, site)?,
            };
            if written == Written::Zeros {
                let buffer = one.buffer(ty).map_err(|error| Error::comm(name, error, site))?;
                fill_new(name, &buffer, site, |bytes| {
                    bytes.fill(0);
                    Ok(())
                })?;
            }
            made.push(one);
        }
        Ok(made)
    }

    /// Starts an operation with one operand, which its one result replaces: in place if `x` is the only owner.
    #[track_caller]
    pub(crate) fn start_on(
        &self,
        op: &dyn OpDef,
        x: &mut Tensor,
        site: &'static Location<'static>,
    ) -> Result<()> {
        if let Some(comm) = &self.comm
            && x.storage.is_some()
            && x.traced.is_none()
            && !is_tracing()
            && let Some(collective) = op.collective()
            && collective.role(comm.rank()).written == Written::InPlace
        {
            return self.start_in_place(comm, op, &collective, x, site);
        }
        let mut results = self.start(op, std::slice::from_ref(x), 1, &[], site)?;
        *x = results.pop().ok_or_else(|| no_result(op, site))?;
        Ok(())
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
    ) -> Result<()> {
        let (world, name) = (&self.world, call_name(op.info().name));
        check_world(name, world, std::iter::once(&*x), site)?;
        let prepared = prepared(op, world, std::slice::from_ref(x), site)?;
        let [(ty, _)] = &prepared.results[..] else { return Err(no_result(op, site)) };
        let storage = x.data(name, site)?;
        let needed = collective.needs(0, comm.rank(), |_| None);
        let other = match self.destination(x, storage, 1, needed)? {
            Destination::Operand => None,
            Destination::Copy(_) => Some(self.copy(name, x, site)?),
            Destination::New => Some(self.make(name, &x.ty, &x.layout, site)?),
        };
        let (layout, storage) = match &other {
            Some(other) => (&other.layout, &other.storage),
            None => (&x.layout, storage),
        };
        let range = layout.bytes(x.dtype());
        let failed = |error| Error::comm(name, error, site);
        let buffer = storage.part(&range).map_err(failed)?;
        let types = [OperandType::new(x.dtype(), &layout.shape)];
        let mesh = world.mesh();
        let note = prepared.note;
        let request = Request { collective, types: &types, operands: buffer, results: None, note, site };
        let pending = start(comm, &world.sizes(&mesh), request).map_err(failed)?;
        let flight = Flight::new(pending, world, name, site);
        storage.add_flight(range, flight);
        // Only now: a call that fails must leave `x` unchanged.
        if let Some(other) = other {
            (x.layout, x.storage) = (other.layout, Some(other.storage));
        }
        if !Rc::ptr_eq(&x.ty, ty) {
            x.ty = Rc::clone(ty);
        }
        x.world = world.id;
        x.origin = Origin::NONE;
        Ok(())
    }

    /// A tensor that a pending operation will write.
    pub(crate) fn awaited(&self, ty: &Rc<TensorType>, made: StorageView, flight: &Rc<Flight>) -> Tensor {
        let (ty, layout, storage) = (Rc::clone(ty), made.layout, made.storage);
        let tensor = Tensor {
            ty,
            layout,
            storage: Some(Rc::clone(&storage)),
            traced: None,
            world: self.world.id,
            origin: Origin::NONE,
        };
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
        match self.is_near(storage) && x.layout.is_contiguous() {
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
        match self.destination(x, storage, owners, needed)? {
            Destination::Operand => Ok(StorageView { layout: x.layout.clone(), storage: Rc::clone(storage) }),
            Destination::Copy(_) => self.copy(op, x, site),
            Destination::New => self.make(op, &x.ty, &x.layout, site),
        }
    }

    /// Where an operation that overwrites a tensor writes its result. Waits for the tensor.
    fn destination(
        &self,
        x: &Tensor,
        storage: &Rc<Storage>,
        owners: usize,
        needed: bool,
    ) -> Result<Destination> {
        storage.wait(x.byte_range())?;
        let held = match self.is_near(storage) {
            true => x.held(owners, true),
            false => Some(Held::Needed),
        };
        Ok(Destination::of(held, needed))
    }

    /// Whether peers can reach a storage: it lies in this rank's heap.
    #[inline]
    fn is_near(&self, storage: &Storage) -> bool {
        self.world.heap().is_some_and(|heap| storage.buffer.is_in(heap))
    }

    /// The storage of a tensor that takes a result, if it can be written at once.
    fn take_out(&self, out: &Tensor, owners: usize) -> Option<StorageView> {
        let storage = out.storage.as_ref()?;
        (self.is_near(storage) && out.wait().is_ok() && out.held(owners, true).is_none())
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

/// Checks that tensors with data belong to the world of the group.
pub(crate) fn check_world<'a>(
    op: &str,
    world: &World,
    mut tensors: impl Iterator<Item = &'a Tensor>,
    site: &'static Location<'static>,
) -> Result<()> {
    let is_of_one = |tensor: &Tensor| tensor.storage.is_some() || tensor.traced.is_some();
    match tensors.any(|tensor| tensor.world != 0 && tensor.world != world.id && is_of_one(tensor)) {
        true => Err(Error::new(op, ("tensors of the group's world", "one of another"), site)),
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
        let message = (format!("{} tensors for the results", results.len()), outs.len().to_string());
        return Err(Error::new(op, message, site));
    }
    for ((ty, layout), out) in results.iter().zip(outs) {
        let shape = &layout.shape;
        if out.dtype() != ty.dtype || out.layout.shape != *shape {
            let message = (
                format!("{}{:?} for the result", ty.dtype, &shape[..]),
                format!("{}{:?}", out.dtype(), &out.layout.shape[..]),
            );
            return Err(Error::new(op, message, site));
        }
    }
    Ok(())
}
