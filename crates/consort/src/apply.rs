//! Runs an op at once: types by the op's own rule, then a view, or a kernel.
//!
//! Operands are passed by value. The result reuses the storage of an operand that is its only owner, if the kernel can
//! compute in place.

use std::panic::Location;
use std::rc::Rc;

use consort_comm::{About, Buffer, Note, from_now};
use consort_ir::infer::infer;
use consort_ir::ops::{
    Alias, EvalCx, EvalError, OpDef, Undecided, boxes_of, built_in, call_name, check_name, view_of,
};
use consort_ir::types::{TensorType, Type};
use consort_runtime::call::{self, Few, Operand, Stored};
use consort_runtime::device::Device;
use consort_runtime::kernels::Kernel;
use consort_runtime::start::{call_text, digest, message_digest, type_text};
use consort_types::layout::{Dims, Layout};
use consort_types::{Dtype, Failure, Kind};
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::placement::Origin;
use crate::storage::{Storage, alloc, check_size};
use crate::tensor::{CachedLayout, Tensor, Tensors};
use crate::trace::{check_sizes, record, settle};
use crate::world::World;

/// Runs a built-in or user-defined op on tensors. Operands passed by value may be overwritten in place.
///
/// ```
/// use consort::{Tensor, ops};
///
/// # fn main() -> consort::Result<()> {
/// let x = Tensor::from_slice(&[1.0f32, 4.0, 9.0], &[3])?;
/// let roots = consort::apply(&ops::Sqrt {}, [x])?;
/// assert_eq!(roots[0].to_vec::<f32>()?, [1.0, 2.0, 3.0]);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn apply(op: &dyn OpDef, args: impl IntoIterator<Item = Tensor>) -> Result<Vec<Tensor>> {
    Ok(run(op, &mut args.into_iter().collect(), Location::caller())?.into_vec())
}

/// The only result of an op.
pub(crate) fn run_one(op: &dyn OpDef, mut args: Tensors, site: &'static Location<'static>) -> Result<Tensor> {
    let mut results = run(op, &mut args, site)?;
    results.pop().ok_or_else(|| no_result(op, site))
}

#[cold]
pub(crate) fn no_result(op: &dyn OpDef, site: &'static Location<'static>) -> Error {
    Error::new(op.info().name, "it has no result", site)
}

/// Outcome of an op's type rule for given operands: types and layouts of the results, and the kernel.
pub(crate) struct Prepared {
    pub(crate) results: SmallVec<[(Rc<TensorType>, Rc<CachedLayout>); 1]>,
    /// The op and its attributes, and the axes over which these differ.
    pub(crate) made_by: Origin,
    kernel: Option<Kernel>,
    /// What group members compare about the call; empty for ops that do not communicate.
    pub(crate) note: Note,
    /// The same for each message of an exchange.
    pub(crate) messages: SmallVec<[About; 2]>,
}

/// Runs an op. An operand whose storage a result reuses has none afterwards; on failure all operands keep theirs.
pub(crate) fn run(op: &dyn OpDef, args: &mut Tensors, site: &'static Location<'static>) -> Result<Tensors> {
    let info = op.info();
    let world = world_of(info.name, args, site)?;
    if op.effects().starts().is_some() {
        return Err(Error::new(call_name(info.name), "expected a group: it has a method for this", site));
    }
    if let Some(traced) = record(op, args, site) {
        return traced;
    }
    settle_all(args, info.name, site)?;
    let prepared = prepared(op, &world, args, site)?;
    let origin = Origin::of(&prepared, args);
    let one = |(ty, layout): &(Rc<TensorType>, Rc<CachedLayout>), storage| Tensor {
        ty: Rc::clone(ty),
        layout: Rc::clone(layout),
        storage,
        traced: None,
        world: world.id,
        origin,
    };
    if world.heap().is_none() || args.iter().any(|arg| arg.storage.is_none()) {
        return Ok(prepared.results.iter().map(|result| one(result, None)).collect());
    }
    let mesh = world.mesh();
    let sizes = world.sizes(&mesh);
    if let (Alias::View, Some(x)) = (op.alias(), args.first()) {
        let shapes = prepared.results.iter().map(|(_, layout)| &layout.shape[..]);
        let layouts = view_of(op, &sizes, &x.layout, shapes);
        let layouts = layouts.map_err(|error| Error::new(info.name, error.headline, site))?;
        if let Some(layouts) = layouts {
            for layout in &layouts {
                check_size(info.name, &layout.shape, x.dtype(), site)?;
            }
            let results = prepared.results.iter().zip(layouts);
            let one = |((ty, _), layout): (&(Rc<TensorType>, _), Layout)| {
                one(&(Rc::clone(ty), CachedLayout::new(layout)), x.storage.clone())
            };
            return Ok(results.map(one).collect());
        }
    }
    match prepared.kernel {
        Some(kernel) => compute(op, &world, &sizes, kernel, args, (&prepared, origin), site),
        None => evaluate(op, &world, &sizes, args, (&prepared, origin), site),
    }
}

/// Replaces traced tensors by the concrete tensors that they became.
fn settle_all(args: &mut [Tensor], op: &str, site: &'static Location<'static>) -> Result<()> {
    for arg in args.iter_mut().filter(|arg| arg.traced.is_some()) {
        *arg = settle(arg, op, site)?;
    }
    Ok(())
}

/// Outcome of the op's type rule, cached by operand types.
pub(crate) fn prepared(
    op: &dyn OpDef,
    world: &World,
    args: &[Tensor],
    site: &'static Location<'static>,
) -> Result<Rc<Prepared>> {
    if let Some(prepared) = world.memo().find(op, args) {
        return Ok(prepared);
    }
    let prepared = Rc::new(prepare(op, world, args, site)?);
    world.memo().keep(op, args, &prepared);
    Ok(prepared)
}

fn prepare(
    op: &dyn OpDef,
    world: &World,
    args: &[Tensor],
    site: &'static Location<'static>,
) -> Result<Prepared> {
    let name = op.info().name;
    check_name(op.info()).map_err(|failure| Error::of(call_name(name), failure, site))?;
    check_sizes(op, site)?;
    let types = types_of(op, world, args, site)?;
    let mesh = world.mesh();
    let sizes = world.sizes(&mesh);
    // Constants may differ between ranks; for symbolic sizes the type rule derives the axes.
    let mut symbolic = false;
    op.indices(&mut |index| symbolic |= index.as_const().is_none());
    let made_from_numbers = args.is_empty() && op.effects().starts().is_none() && !symbolic;
    let mut results = SmallVec::new();
    for ty in types {
        let types = match ty {
            Type::Tensor(ty) => vec![ty],
            Type::Pending(types) => types,
            Type::Size(..) => {
                return Err(Error::new(name, "it returns a size: use `Tensor::dim` or `Group::size`", site));
            }
        };
        for ty in types {
            let (mut ty, shape) =
                concrete(ty, &sizes).map_err(|error| Error::new(call_name(name), error.headline, site))?;
            if made_from_numbers {
                ty.varies = mesh.all_axes();
            }
            results.push((world.memo().share(ty), CachedLayout::new(Layout::contiguous(&shape))));
        }
    }
    // Only of users' ops: the boxes of built-in ones follow from the types.
    if op.joins() && built_in(name).is_none() {
        let shapes: Vec<&[usize]> = args.iter().map(|arg| &arg.layout.shape[..]).collect();
        let boxes = results.iter().try_for_each(|(_, layout): &(_, Rc<CachedLayout>)| {
            boxes_of(op, &sizes, &shapes, &layout.shape).map(drop)
        });
        boxes.map_err(|error| Error::new(name, error.headline, site))?;
    }
    let kernel = world.cpu().kernel(name);
    let (note, messages) = notes(op, world, args);
    let made_by = Origin::of_op(op, &mesh, &world.facts());
    Ok(Prepared { results, made_by, kernel, note, messages })
}

/// What group members compare about a start and its messages; empty for other ops.
fn notes(op: &dyn OpDef, world: &World, args: &[Tensor]) -> (Note, SmallVec<[About; 2]>) {
    let (Some(collective), Some(all)) = (op.collective(), world.all()) else { return Default::default() };
    let types = || args.iter().map(|arg| (arg.dtype(), &arg.layout.shape[..]));
    let digest = digest(&collective, types());
    let text = all.recorder().name(&call_text(op, &world.mesh(), types()));
    let message = |(dtype, shape): (Dtype, &[usize])| About {
        digest: message_digest(dtype, shape),
        text: all.recorder().name(&type_text(dtype, shape)),
    };
    let is_exchange = collective.kind == Kind::Exchange;
    let messages = if is_exchange { types().map(message).collect() } else { SmallVec::new() };
    (Note { digest, text, ..Note::default() }, messages)
}

/// This thread's world, to which all of the tensors must belong.
pub(crate) fn world_of(op: &str, args: &[Tensor], site: &'static Location<'static>) -> Result<Rc<World>> {
    let world = World::current()?;
    let foreign = |arg: &&Tensor| arg.world != 0 && arg.world != world.id && arg.storage.is_some();
    match args.iter().find(foreign) {
        Some(_) => Err(Error::new(op, ("a tensor of this world", "one of a world that was dropped"), site)),
        None => Ok(world),
    }
}

/// The types of an op's results, by its own rule.
fn types_of(
    op: &dyn OpDef,
    world: &World,
    args: &[Tensor],
    site: &'static Location<'static>,
) -> Result<Vec<Type>> {
    let types: SmallVec<[Type; 3]> = args.iter().map(|arg| Type::Tensor((*arg.ty).clone())).collect();
    let (mesh, mut facts) = (world.mesh(), world.facts());
    infer(op, &mesh, &types, &[], &mut facts, Undecided::Refuse)
        .map_err(|failure: Box<Failure>| Error::of(call_name(op.info().name), failure, site))
}

/// A type with the sizes that it has on this rank.
fn concrete(ty: TensorType, sizes: &EvalCx<'_>) -> Result<(TensorType, Dims), EvalError> {
    let shape = ty.shape.iter().map(|size| sizes.size(size)).collect::<Result<Dims, _>>()?;
    if ty.shape.iter().all(|size| size.as_const().is_some()) {
        return Ok((ty, shape));
    }
    Ok((ty.with_shape(crate::tensor::constant_shape(&shape)), shape))
}

/// Runs a kernel, in place where an operand has no other owner.
fn compute(
    op: &dyn OpDef,
    world: &World,
    sizes: &EvalCx<'_>,
    kernel: Kernel,
    args: &mut Tensors,
    (prepared, origin): (&Prepared, Origin),
    site: &'static Location<'static>,
) -> Result<Tensors> {
    let name = op.info().name;
    for arg in args.iter() {
        arg.wait()?;
    }
    poll_before(world, name, prepared, site)?;
    let fits = |arg: &Tensor| {
        let (ty, layout) = &prepared.results[0];
        arg.dtype() == ty.dtype && arg.layout.shape == layout.shape && arg.held(1, false).is_none()
    };
    let reused = match op.alias() {
        Alias::First => args.first().filter(|first| fits(first)).map(|_| 0),
        _ if kernel.in_place => args.iter().position(fits),
        _ => None,
    };
    let mut made: Tensors = SmallVec::new();
    for (i, (ty, layout)) in prepared.results.iter().enumerate() {
        let lent = reused.filter(|_| i == 0).and_then(|at| Some((at, args[at].storage.take()?)));
        let (layout, storage) = match lent {
            Some((at, storage)) => (Rc::clone(&args[at].layout), storage),
            None => {
                let buffer = alloc(world, name, ty.dtype, &layout.shape, site)?;
                (Rc::clone(layout), Storage::new(buffer))
            }
        };
        made.push(Tensor {
            ty: Rc::clone(ty),
            layout,
            storage: Some(storage),
            traced: None,
            world: world.id,
            origin,
        });
    }
    let outcome = run_kernel(op, world, sizes, &kernel, args, (reused, &made), site);
    if let (Err(_), Some(at)) = (&outcome, reused) {
        args[at].storage = made[0].storage.take();
    }
    outcome.map(|()| made)
}

/// Advances operations in flight before results are computed, if that is due.
fn poll_before(world: &World, op: &str, prepared: &Prepared, site: &'static Location<'static>) -> Result<()> {
    let sizes = prepared.results.iter().map(|(ty, layout)| layout.bytes(ty.dtype).len());
    let bytes = sizes.fold(0, usize::saturating_add);
    world.poll_for(bytes).map_err(|error| Error::comm(op, error, site))
}

/// Calls a kernel; the operand of number `reused` is the first result.
fn run_kernel(
    op: &dyn OpDef,
    world: &World,
    sizes: &EvalCx<'_>,
    kernel: &Kernel,
    args: &[Tensor],
    (reused, made): (Option<usize>, &[Tensor]),
    site: &'static Location<'static>,
) -> Result<()> {
    let name = op.info().name;
    let mut given = Few::new(args.len(), || Operand::Result);
    for (i, (given, arg)) in given.items().iter_mut().zip(args).enumerate() {
        if reused != Some(i) {
            *given = Operand::Stored(stored(arg, name, site)?);
        }
    }
    let launched = match made {
        [made] => world.cpu().launch(sizes, (kernel, op), given.items(), &[stored(made, name, site)?]),
        _ => world.cpu().launch(sizes, (kernel, op), given.items(), &all_stored(made, name, site)?),
    };
    launched.map_err(|error| Error::run(name, &error, site))
}

/// A tensor in its buffer.
fn stored<'a>(tensor: &'a Tensor, op: &str, site: &'static Location<'static>) -> Result<Stored<'a>> {
    let buffer = &tensor.data(op, site)?.buffer;
    Ok(Stored { buffer, bytes: tensor.byte_range(), dtype: tensor.dtype(), layout: &tensor.layout })
}

fn all_stored<'a>(
    tensors: &'a [Tensor],
    op: &str,
    site: &'static Location<'static>,
) -> Result<Vec<Stored<'a>>> {
    tensors.iter().map(|tensor| stored(tensor, op, site)).collect()
}

/// Copies a tensor's elements into a new buffer, without gaps. Waits for them.
pub(crate) fn copy_into(tensor: &Tensor, buffer: &Buffer, site: &'static Location<'static>) -> Result<()> {
    tensor.wait()?;
    let (world, layout) = (World::current()?, Layout::contiguous(&tensor.layout.shape));
    let to = Stored { buffer, bytes: 0..buffer.len(), dtype: tensor.dtype(), layout: &layout };
    copy(&world, &stored(tensor, "copy", site)?, &to, site)
}

/// Copies elements to memory that no peer reads.
fn copy(world: &World, from: &Stored<'_>, to: &Stored<'_>, site: &'static Location<'static>) -> Result<()> {
    world.poll_for(to.bytes.len()).map_err(|error| Error::comm("copy", error, site))?;
    world.cpu().copy(from, to).map_err(|error| Error::run("copy", &error, site))
}

/// Runs a user-defined op that has no kernel through its reference evaluation.
fn evaluate(
    op: &dyn OpDef,
    world: &World,
    sizes: &EvalCx<'_>,
    args: &[Tensor],
    (prepared, origin): (&Prepared, Origin),
    site: &'static Location<'static>,
) -> Result<Tensors> {
    let name = op.info().name;
    // A built-in op never falls back to its definition: that would hide a missing kernel.
    if built_in(name).is_some() {
        return Err(Error::new(name, "it has no kernel", site));
    }
    let mut made = Tensors::new();
    for (ty, layout) in &prepared.results {
        let storage = Some(Storage::new(alloc(world, name, ty.dtype, &layout.shape, site)?));
        let (ty, layout) = (Rc::clone(ty), Rc::clone(layout));
        made.push(Tensor { ty, layout, storage, traced: None, world: world.id, origin });
    }
    args.iter().try_for_each(Tensor::wait)?;
    poll_before(world, name, prepared, site)?;
    call::evaluate(sizes, op, &all_stored(args, name, site)?, &all_stored(&made, name, site)?)
        .map_err(|error| Error::run(name, &error, site))?;
    Ok(made)
}

/// Copies the elements of `from` into the storage of `to`, of the same shape and type. Waits for both.
pub(crate) fn write_into(to: &Tensor, from: &Tensor, site: &'static Location<'static>) -> Result<()> {
    to.wait()?;
    if to.storage.is_none() || from.storage.is_none() {
        return Ok(());
    }
    from.wait()?;
    let world = World::current()?;
    let (from, to) = (stored(from, "copy", site)?, stored(to, "copy", site)?);
    to.release(|| from_now(world.timeout())).map_err(|error| Error::run("copy", &error, site))?;
    copy(&world, &from, &to, site)
}
