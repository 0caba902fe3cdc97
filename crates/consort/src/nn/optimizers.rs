//! Optimizers: functions from parameters, gradients and a state to the next parameters and state.
//!
//! They work on any struct of tensors. A state has the types of the parameters, so it is sharded as they are, and a step of
//! training is one compiled function.

use std::panic::Location;

use consort_ir::index::Index;
use consort_ir::types::shape_text;
use consort_types::Failure;

use crate::operand::Operand;
use crate::world::World;
use crate::{Dtype, Error, Flatten, Result, Tensor};

/// Gradient descent, with momentum if it is not 0.
///
/// ```
/// use consort::nn::Sgd;
/// use consort::Tensor;
///
/// # fn main() -> consort::Result<()> {
/// let sgd = Sgd { momentum: 0.5 };
/// let (mut w, slope) = (Tensor::from_iter([1.0f64])?, Tensor::from_iter([2.0f64])?);
/// let mut state = sgd.state(&w)?;
/// for expected in [0.8, 0.5] {
///     (w, state) = sgd.step(&w, &slope, &state, 0.1)?; // By 0.1 times 2, then by 0.1 times 2 + 0.5 * 2.
///     assert!((w.item::<f64>()? - expected).abs() < 1e-15);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sgd {
    /// What is kept of the last step.
    pub momentum: f64,
}

impl Sgd {
    /// The state before the first step; none without momentum.
    ///
    /// [`Sgd`] has an example.
    #[track_caller]
    pub fn state<P: Flatten>(&self, params: &P) -> Result<Option<P>> {
        if self.momentum == 0.0 { Ok(None) } else { zeros(params).map(Some) }
    }

    /// The next parameters and state. The rate is a number, or a 0-d tensor of a [schedule](super::Cosine).
    ///
    /// [`Sgd`] has an example.
    #[track_caller]
    pub fn step<'a, P: Flatten>(
        &self,
        params: &P,
        grads: &P,
        state: &Option<P>,
        rate: impl Into<Operand<'a>>,
    ) -> Result<(P, Option<P>)> {
        check(params, Location::caller())?;
        check_fit(params, "gradients", grads)?;
        if let Some(state) = state {
            check_fit(params, "tensors of the state", state)?;
        }
        let rate = number(rate)?;
        let velocities = state.as_ref().map(Flatten::flatten);
        let (mut next, mut kept) = (Vec::new(), Vec::new());
        for (place, (param, grad)) in params.flatten().iter().zip(grads.flatten()).enumerate() {
            let step = match velocities.as_ref().and_then(|all| all.get(place)) {
                Some(last) => last.mul(self.momentum)?.add(&grad)?,
                None => grad,
            };
            next.push(param.sub(&step.mul(&rate.cast(param.dtype())?)?)?);
            kept.push(step);
        }
        let state = state.as_ref().map(|state| state.unflatten(kept)).transpose()?;
        Ok((params.unflatten(next)?, state))
    }
}

/// Adam; with a decay it is AdamW.
///
/// Parameters should be f32 or f64. Moments have the type of their parameter, and what a 16-bit type cannot hold is lost: 1.0 in
/// bf16 stays 1.0 however often 0.001 is subtracted. To compute in bf16, [`cast`](super::cast) f32 parameters in the loss.
///
/// ```
/// use consort::nn::Adam;
/// use consort::{Tensor, compile, grad};
///
/// # fn main() -> consort::Result<()> {
/// let adam = Adam { decay: 0.01, ..Adam::default() };
/// let step = compile(move |(w, state)| {
///     let slope = grad(|w: Tensor| w.mul(&w)?.sum_all()).call(Tensor::clone(&w))?;
///     adam.step(&w, &slope, &state, 0.1)
/// });
/// let mut w = Tensor::from_iter([1.0f64, -1.0])?;
/// let mut state = adam.state(&w)?;
/// for _ in 0..100 {
///     (w, state) = step.call((w, state))?;
/// }
/// assert!(w.to_vec::<f64>()?.iter().all(|w| w.abs() < 0.01));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// What is kept of the mean of gradients.
    pub beta1: f64,
    /// What is kept of the mean of their squares.
    pub beta2: f64,
    /// What is added to the root of that mean.
    pub eps: f64,
    /// What parameters lose in a step, times the rate.
    pub decay: f64,
}

impl Default for Adam {
    fn default() -> Adam {
        Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.0 }
    }
}

/// The state of [`Adam`].
#[derive(Flatten, Clone)]
pub struct Moments<P> {
    /// How many steps were made: a 0-d i64.
    pub step: Tensor,
    /// Means of the gradients.
    pub first: P,
    /// Means of their squares.
    pub second: P,
}

impl Adam {
    /// The state before the first step.
    ///
    /// [`Adam`] has an example.
    #[track_caller]
    pub fn state<P: Flatten>(&self, params: &P) -> Result<Moments<P>> {
        let step = Tensor::zeros(Dtype::I64, &())?.taken_as_equal()?;
        Ok(Moments { step, first: zeros(params)?, second: zeros(params)? })
    }

    /// The next parameters and state. The rate is a number, or a 0-d tensor of a [schedule](super::Cosine).
    ///
    /// [`Adam`] has an example.
    #[track_caller]
    pub fn step<'a, P: Flatten>(
        &self,
        params: &P,
        grads: &P,
        state: &Moments<P>,
        rate: impl Into<Operand<'a>>,
    ) -> Result<(P, Moments<P>)> {
        check(params, Location::caller())?;
        check_fit(params, "gradients", grads)?;
        check_fit(params, "first moments", &state.first)?;
        check_fit(params, "second moments", &state.second)?;
        let (rate, step) = (number(rate)?, state.step.add(1)?);
        let time = step.cast(Dtype::F64)?;
        let length = rate.div(&seen(&time, self.beta1)?)?;
        let root = seen(&time, self.beta2)?.rsqrt()?;
        let kept = rate.mul(-self.decay)?.add(1.0)?;
        let (firsts, seconds) = (state.first.flatten(), state.second.flatten());
        let (mut next, mut first, mut second) = (Vec::new(), Vec::new(), Vec::new());
        for (place, (param, grad)) in params.flatten().iter().zip(grads.flatten()).enumerate() {
            let dtype = param.dtype();
            let mean = firsts[place].mul(self.beta1)?.add(&grad.mul(1.0 - self.beta1)?)?;
            let square = grad.mul(&grad)?.mul(1.0 - self.beta2)?;
            let square = seconds[place].mul(self.beta2)?.add(&square)?;
            let size = square.sqrt()?.mul(&root.cast(dtype)?)?.add(self.eps)?;
            let step = mean.mul(&length.cast(dtype)?)?.div(&size)?;
            let param = if self.decay == 0.0 { param.clone() } else { param.mul(&kept.cast(dtype)?)? };
            next.push(param.sub(&step)?);
            first.push(mean);
            second.push(square);
        }
        let (first, second) = (state.first.unflatten(first)?, state.second.unflatten(second)?);
        Ok((params.unflatten(next)?, Moments { step, first, second }))
    }
}

/// Fails unless there is one of these for each parameter, of its shape. Sizes that are known only when a compiled function
/// runs are compared by the ops of the step.
#[track_caller]
fn check_fit<P: Flatten>(params: &P, what: &str, others: &P) -> Result<()> {
    let (params, others, site) = (params.flatten(), others.flatten(), Location::caller());
    let refused = |expected, got: String| Err(Error::new("step", (expected, got), site));
    if others.len() != params.len() {
        return refused(format!("{} {what}, one for each parameter", params.len()), others.len().to_string());
    }
    for (place, (param, other)) in params.iter().zip(&others).enumerate() {
        let (expected, got) = (&param.ty.shape, &other.ty.shape);
        let differ = |(a, b): (&Index, &Index)| (a - b).as_const().is_some_and(|more| more != 0);
        if expected.len() != got.len() || expected.iter().zip(got).any(differ) {
            let world = World::current()?;
            let mesh = world.mesh();
            let text = |shape: &[Index]| shape_text(shape, &mesh);
            return refused(
                format!("{what} of the shapes of the parameters, number {place} of {}", text(expected)),
                text(got),
            );
        }
    }
    Ok(())
}

/// Zeros of the same types. They are computed from the tensors, so that they differ over the same axes.
#[track_caller]
fn zeros<P: Flatten>(params: &P) -> Result<P> {
    let mut zeros = Vec::new();
    for param in params.flatten() {
        zeros.push(param.lt(&param)?.cast(param.dtype())?);
    }
    params.unflatten(zeros)
}

/// The weight of what a mean that begins at zero has seen: 1 - beta^time.
#[track_caller]
fn seen(time: &Tensor, beta: f64) -> Result<Tensor> {
    time.mul(beta.ln())?.expm1()?.neg()
}

/// Fails unless all parameters are floats.
fn check<P: Flatten>(params: &P, site: &'static Location<'static>) -> Result<()> {
    match params.flatten().iter().position(|param| !param.dtype().is_float()) {
        None => Ok(()),
        Some(place) => {
            let got = format!("{} in tensor {place}", params.flatten()[place].dtype());
            let failure = Failure::new(("parameters of float types", got));
            Err(Error::of("step", failure.note("keep other tensors outside of the parameters"), site))
        }
    }
}

/// A number as a 0-d f64.
#[track_caller]
fn number<'a>(number: impl Into<Operand<'a>>) -> Result<Tensor> {
    number.into().tensor(Dtype::F64, ("step", Location::caller()))?.cast(Dtype::F64)
}
