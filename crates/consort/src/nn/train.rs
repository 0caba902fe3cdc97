//! Parts of a step of training: the norm of a gradient, the loss of many micro-batches, and parameters in another type.

use std::collections::BTreeMap;
use std::panic::Location;

use consort_ir::ops;
use consort_types::{Axes, Failure, GroupName};

use crate::error::{Error, Named};
use crate::trace::{self, record_start};
use crate::{Dtype, Flatten, Reduce, Result, Tensor, scan};

/// The root of the sum of the squares of all elements of all shards, in f64: sums are added over the axes over which a
/// tensor differs, and what is equal counts once. It belongs in a compiled function, where types say what differs.
///
/// In a function of some ranks ([`over`](crate::Compiled::over), [`local`](crate::Compiled::local)) it is the norm of what these
/// have. In a [`role`](crate::Compiled::role) it is that of all roles of the call, as of a pipeline whose stages have the layers of
/// one model: each role calls it, equally often, and what is not of its own type counts once for every rank along the axes over
/// which roles differ.
///
/// ```
/// use consort::nn::norm;
/// use consort::{Tensor, compile};
///
/// let norms = consort::spawn(2, |mesh| {
///     let norm = compile(|tensors: (Tensor, Tensor)| norm(&tensors));
///     let shard = Tensor::from_iter([3.0 + mesh.my_rank()? as f64])?; // 3 and 4.
///     let equal = Tensor::from_iter([12.0f64])?.replicated()?;
///     norm.call((shard, equal))?.item::<f64>()
/// });
/// assert!(norms.into_iter().all(|norm| norm.is_ok_and(|norm| norm == 13.0)));
/// ```
#[track_caller]
pub fn norm<P: Flatten>(tensors: &P) -> Result<Tensor> {
    let site = Location::caller();
    let Some(session) = trace::current() else {
        let failure = Failure::new("a norm over shards needs a compiled function")
            .note("there types say over which axes each tensor differs: call it in `compile(..)`");
        return Err(Error::of("norm", failure, site));
    };
    let (outside, roles) = (session.about.outside(&session.world.mesh()), session.about.roles_over);
    // One sum for each set of axes, in an order that does not depend on that of the tensors: roles may have others.
    let mut sums: BTreeMap<Axes, Tensor> = BTreeMap::new();
    for tensor in tensors.flatten() {
        let axes = tensor.ty.varies.minus(outside).minus(roles);
        let tensor = tensor.cast(if tensor.dtype() == Dtype::F64 { Dtype::F64 } else { Dtype::F32 })?;
        let squares = tensor.mul(&tensor)?.sum_all()?.cast(Dtype::F64)?;
        let sum = match sums.get(&axes) {
            Some(sum) => sum.add(&squares)?,
            None => squares,
        };
        sums.insert(axes, sum);
    }
    let mut all = Tensor::zeros(Dtype::F64, &())?;
    for (axes, sum) in sums {
        all = all.add(&sum_over(axes, sum, site).named("norm", site)?)?;
    }
    // Once, since tensors of roles differ over other sets of axes.
    sum_over(roles, all, site).named("norm", site)?.sqrt()
}

/// The sum over axes, in a trace.
fn sum_over(axes: Axes, x: Tensor, site: &'static Location<'static>) -> Result<Tensor> {
    if axes.is_empty() {
        return Ok(x);
    }
    let op = ops::AllReduceStart { reduce: Reduce::Sum, over: GroupName::Axes(axes) };
    match record_start(&op, std::slice::from_ref(&x), site) {
        Some(started) => Ok(started?.0.swap_remove(0)),
        None => Ok(x),
    }
}

/// Gradients scaled so that their [`norm`] is at most `most`, and the norm before that.
///
/// ```
/// use consort::nn::clip;
/// use consort::{Tensor, compile};
///
/// # fn main() -> consort::Result<()> {
/// let clip = compile(|slope: Tensor| clip(&slope, 1.0));
/// let (slope, norm) = clip.call(Tensor::from_iter([3.0f64, 4.0])?)?;
/// assert_eq!(norm.item::<f64>()?, 5.0);
/// assert!(slope.to_vec::<f64>()?.iter().zip([0.6, 0.8]).all(|(a, b)| (a - b).abs() < 1e-15));
/// # Ok(()) }
/// ```
#[track_caller]
pub fn clip<P: Flatten>(grads: &P, most: f64) -> Result<(P, Tensor)> {
    let norm = norm(grads)?;
    let scale = norm.maximum(most)?.div(most)?;
    let mut clipped = Vec::new();
    for grad in grads.flatten() {
        clipped.push(grad.div(&scale.cast(grad.dtype())?)?);
    }
    Ok((grads.unflatten(clipped)?, norm))
}

/// The mean of a loss over micro-batches, which are the entries of the batch along the first dimension. They are computed one
/// after the other, and the gradient of the mean has one sum over ranks, not one for each. In
/// [`recompute`](crate::recompute) the loss keeps the intermediate values of one micro-batch at a time.
///
/// ```
/// use consort::nn::mean_of;
/// use consort::{Tensor, grad};
///
/// # fn main() -> consort::Result<()> {
/// let batch = Tensor::from_slice(&[1.0f64, 2.0, 3.0, 6.0], &[2, 2])?; // Two micro-batches.
/// let slope = grad(move |w: Tensor| mean_of(batch.clone(), |x: Tensor| x.mul(&w)?.sum_all()));
/// assert_eq!(slope.call(Tensor::scalar(1.0f64)?)?.item::<f64>()?, 6.0);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn mean_of<B: Flatten>(batch: B, loss: impl Fn(B) -> Result<Tensor>) -> Result<Tensor> {
    let tensors = batch.flatten();
    let Some(first) = tensors.first() else {
        return Err(Error::new("mean_of", ("a batch with tensors", "one without"), Location::caller()));
    };
    let (_, losses) = scan(first.dim(0)?, (), batch, |(), one| Ok(((), loss(one)?)))?;
    losses.mean_all()
}

/// Tensors in another element type. In the loss, it is what mixed precision takes: `cast(&params, Dtype::Bf16)` computes in
/// bf16, while parameters and gradients stay f32.
///
/// ```
/// use consort::nn::cast;
/// use consort::{Dtype, Tensor, grad};
///
/// # fn main() -> consort::Result<()> {
/// let slope = grad(|w: Tensor| {
///     let w = cast(&w, Dtype::Bf16)?;
///     w.mul(&w)?.sum_all()?.cast(Dtype::F32)
/// });
/// let slope = slope.call(Tensor::from_iter([1.0f32, 3.0])?)?;
/// assert_eq!((slope.dtype(), slope.to_vec::<f32>()?), (Dtype::F32, vec![2.0, 6.0]));
/// # Ok(()) }
/// ```
#[track_caller]
pub fn cast<P: Flatten>(params: &P, dtype: Dtype) -> Result<P> {
    let mut tensors = Vec::new();
    for param in params.flatten() {
        tensors.push(if param.dtype().is_float() { param.cast(dtype)? } else { param });
    }
    params.unflatten(tensors)
}
