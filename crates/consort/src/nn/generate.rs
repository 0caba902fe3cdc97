//! Token generation: greedy or sampled, eager or compiled.

use consort_types::Rng;

use super::attention::KvCache;
use super::model::Llama;
use crate::compile::{CompiledMut, compile_mut};
use crate::{Flatten, Index, Result, Tensor};

/// How a token is chosen.
///
/// [`Generator`] has an example.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The softmax temperature: near 0 the likeliest token is taken, at 1 the model's probabilities are used.
    pub temperature: f32,
    /// The same seed gives the same tokens.
    pub seed: u64,
}

/// The state of a step.
#[derive(Flatten)]
struct State {
    model: Llama,
    caches: Vec<KvCache>,
}

/// A model that generates tokens, with its step compiled.
///
/// ```
/// use consort::nn::{Config, Generator, Llama, Sampling};
///
/// let done = consort::spawn(2, |mesh| {
///     let config = Config::tiny();
///     let model = Llama::random(&config, &mesh, 7)?;
///     let plain = model.generate(&[1, 2, 3], 6, None)?;
///     let mut generator = Generator::new(model, config.places)?;
///     assert_eq!(generator.generate(&[1, 2, 3], 6, None)?, plain);
///     let some = generator.generate(&[1, 2, 3], 6, Some(Sampling { temperature: 0.8, seed: 1 }))?;
///     assert_eq!(some.len(), 6);
///     Ok(())
/// });
/// assert!(done.into_iter().all(|done| done.is_ok()));
/// ```
pub struct Generator {
    state: State,
    step: CompiledMut<State, (Tensor, Index), Tensor>,
    places: usize,
}

impl Generator {
    /// A generator with room for `places` tokens.
    ///
    /// [`Generator`] has an example.
    #[track_caller]
    pub fn new(model: Llama, places: usize) -> Result<Generator> {
        let step = compile_mut(|state: &mut State, (tokens, first): (Tensor, Index)| {
            state.model.forward(&tokens, &mut state.caches, &first)
        });
        let caches = model.caches(places)?;
        Ok(Generator { state: State { model, caches }, step: step.name("generate"), places })
    }

    /// Generates the `n` tokens that follow the prompt.
    ///
    /// [`Generator`] has an example.
    #[track_caller]
    pub fn generate(&mut self, prompt: &[i64], n: usize, sampling: Option<Sampling>) -> Result<Vec<i64>> {
        let Generator { state, step, places } = self;
        check_room(prompt, n, *places)?;
        follow(prompt, n, sampling, |tokens, first| step.call(state, (tokens, first)))
    }

    /// What was compiled, and why.
    ///
    /// [`Compiled::explain`](crate::Compiled::explain) has an example.
    pub fn explain(&self) -> crate::Explanation {
        self.step.explain()
    }
}

impl Llama {
    /// Generates the `n` tokens that follow the prompt, without compiling anything.
    ///
    /// [`nn`](super) has an example.
    #[track_caller]
    pub fn generate(&self, prompt: &[i64], n: usize, sampling: Option<Sampling>) -> Result<Vec<i64>> {
        let places = prompt.len().saturating_add(n);
        check_room(prompt, n, places)?;
        let mut caches = self.caches(places)?;
        follow(prompt, n, sampling, |tokens, first| self.forward(&tokens, &mut caches, &first))
    }
}

/// Fails if there is no prompt, or no room for it and `n` tokens.
#[track_caller]
fn check_room(prompt: &[i64], n: usize, places: usize) -> Result<()> {
    if prompt.is_empty() || prompt.len().checked_add(n).is_none_or(|all| all > places) {
        let message = (
            format!("a prompt, and room for it and {n} tokens in {places} places"),
            prompt.len().to_string(),
        );
        return Err(crate::Error::new("generate", message, std::panic::Location::caller()));
    }
    Ok(())
}

/// Chooses tokens one by one, each from the logits of a step.
#[track_caller]
fn follow(
    prompt: &[i64],
    n: usize,
    sampling: Option<Sampling>,
    mut step: impl FnMut(Tensor, Index) -> Result<Tensor>,
) -> Result<Vec<i64>> {
    let mut chance = sampling.map(|sampling| Rng::new(sampling.seed));
    let (mut tokens, mut given) = (prompt.to_vec(), 0);
    while tokens.len() < prompt.len() + n {
        let new = Tensor::from_slice(&tokens[given..], &[tokens.len() - given])?.replicated()?;
        let numbers = step(new, Index::from(given))?;
        given = tokens.len();
        let last = numbers.narrow(0, numbers.dim(0)? - 1, 1)?.cast(crate::Dtype::F32)?.to_vec::<f32>()?;
        tokens.push(match (&mut chance, sampling) {
            (Some(rng), Some(sampling)) => choose(&last, sampling.temperature, rng),
            _ => likeliest(&last),
        });
    }
    Ok(tokens.split_off(prompt.len()))
}

/// The index of the largest logit, the first of equals.
fn likeliest(numbers: &[f32]) -> i64 {
    let best = numbers.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (place, number)| {
        if *number > best.1 { (place, *number) } else { best }
    });
    best.0 as i64
}

/// Samples a token. All ranks have equal logits and seeds, so they choose the same one.
fn choose(numbers: &[f32], temperature: f32, rng: &mut Rng) -> i64 {
    let most = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> =
        numbers.iter().map(|number| f64::from((number - most) / temperature.max(1e-6)).exp()).collect();
    let mut rest = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * weights.iter().sum::<f64>();
    for (place, weight) in weights.iter().enumerate() {
        rest -= weight;
        if rest < 0.0 {
            return place as i64;
        }
    }
    likeliest(numbers)
}
