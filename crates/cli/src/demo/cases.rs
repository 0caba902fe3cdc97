//! The programs of the demos, each in three modes.

use std::cell::RefCell;
use std::rc::Rc;

use consort::nn::{Config, Generator, KvCache, Llama};
use consort::{Dtype, Flatten, Group, Index, Mesh, Result, Tensor, compile, compile_mut, tolerance};

use super::rank::Case;
use crate::modes::Mode;

/// A program whose step is a function of a group and some arguments.
struct Program<G, A> {
    f: fn(&G, A) -> Result<Tensor>,
    group: G,
    /// The same group, with operations that end graphs, if the program supports that.
    broken: Option<G>,
    /// The arguments of the next step, from what the last one gave.
    next: Rc<dyn Fn(Option<Tensor>) -> Result<A>>,
    /// The result of every mode after `steps` steps, and how to read it.
    expected: Vec<f32>,
    steps: usize,
    read: fn(&Tensor) -> Result<Vec<f32>>,
}

impl<G: Clone + 'static, A: Flatten + 'static> Program<G, A> {
    /// Runs all modes and compares their results.
    fn case(self, unit: &'static str, per_step: usize) -> Result<Case> {
        let mut ways = Vec::new();
        let mut difference = 0f64;
        let broken = self.broken.iter().map(|group| ("broken", group));
        let modes = [("traced", &self.group)].into_iter().chain(broken).chain([("eager", &self.group)]);
        for (mode, group) in modes {
            let (f, own) = (self.f, group.clone());
            let compiled =
                (mode != "eager").then(|| Rc::new(compile(move |args: A| f(&own, args)).name(mode)));
            let (group, next, called) = (group.clone(), Rc::clone(&self.next), compiled.clone());
            let step = move |last: Option<Tensor>| match &called {
                Some(compiled) => compiled.call(next(last)?),
                None => f(&group, next(last)?),
            };
            let mut last = None;
            for _ in 0..self.steps {
                last = Some(step(last)?);
            }
            let got = last.as_ref().map_or(Ok(Vec::new()), self.read)?;
            difference = difference.max(tolerance::difference(&self.expected, &got));
            ways.push(Mode {
                mode,
                step: Box::new(move || {
                    let made = step(last.take())?;
                    made.wait()?;
                    last = Some(made);
                    Ok(())
                }),
                explain: compiled
                    .map(|compiled| -> Box<dyn Fn() -> _> { Box::new(move || compiled.explain()) }),
            });
        }
        let allowed = tolerance::of_runs(Dtype::F32);
        Ok(Case { ways, unit, per_step: per_step as f64, warm: 2, difference, allowed })
    }
}

fn all(x: &Tensor) -> Result<Vec<f32>> {
    x.to_vec()
}

pub(crate) fn ring(mesh: &Mesh, small: bool) -> Result<Case> {
    let [heads, length, width] = if small { [2, 8, 4] } else { [4, 512, 64] };
    let expected = consort_examples::ring_attention::plain(mesh, heads, length, width, true)?;
    let [q, k, v] =
        [1, 2, 3].map(|key| consort_examples::ring_attention::part(mesh, heads, length, width, key));
    let args = (q?, k?, v?);
    let program = Program {
        f: |group: &Group, (q, k, v): (Tensor, Tensor, Tensor)| {
            consort_examples::ring_attention::ring_attention(group, &q, k, v, true, 64)
        },
        group: (**mesh).clone(),
        broken: Some(mesh.uncompiled()),
        next: Rc::new(move |_| Ok(args.clone())),
        expected,
        steps: 1,
        read: all,
    };
    program.case("tokens", length * mesh.size())
}

pub(crate) fn halo(mesh: &Mesh, small: bool) -> Result<Case> {
    use consort_examples::halo::{Sharing, cells, plain, start, step};
    let size = if small { 6 } else { 512 };
    let grid = Sharing::new(mesh, if mesh.size().is_multiple_of(4) { 2 } else { 1 }, false)?;
    let broken = Sharing { down: grid.down.uncompiled(), along: grid.along.uncompiled(), ..grid.clone() };
    let (expected, own) = (plain(&grid, size, size, 4)?, grid.clone());
    let program = Program {
        f: |grid: &Sharing, x: Tensor| step(grid, x),
        group: grid,
        broken: Some(broken),
        next: Rc::new(move |last| last.map_or_else(|| start(&own, size, size), Ok)),
        expected,
        steps: 4,
        read: cells,
    };
    program.case("steps", 1)
}

pub(crate) fn conv(mesh: &Mesh, small: bool) -> Result<Case> {
    let (own, kernel) = if small { ([1, 2, 5, 4], [2, 2, 3, 3]) } else { ([1, 16, 64, 128], [16, 16, 5, 5]) };
    let (x, whole) = consort_examples::conv::input(mesh, &own, 1)?;
    let weight = Tensor::normal(Dtype::F32, &kernel, 2)?;
    let expected = consort_examples::conv::plain(mesh, &whole, &weight)?;
    let program = Program {
        f: |group: &Group, (x, weight): (Tensor, Tensor)| consort_examples::conv::conv(group, &x, &weight),
        group: (**mesh).clone(),
        broken: Some(mesh.uncompiled()),
        next: Rc::new(move |_| Ok((x.clone(), weight.clone()))),
        expected,
        steps: 1,
        read: all,
    };
    program.case("images", 1)
}

pub(crate) fn moe(mesh: &Mesh, small: bool) -> Result<Case> {
    use consort_examples::moe::{Expert, moe, plain, tokens};
    let [n, width, hidden] = if small { [7, 4, 6] } else { [256, 128, 512] };
    let (own, x) = (Expert::new(mesh, width, hidden)?, tokens(mesh, n, width, 0)?);
    let expected = plain(mesh, &x, &own)?;
    let program = Program {
        f: |group: &Group, (x, own): (Tensor, Expert)| moe(group, &x, &own),
        group: (**mesh).clone(),
        // Data-dependent sizes do not outlive a graph.
        broken: None,
        next: Rc::new(move |_| Ok((x.clone(), own.clone()))),
        expected,
        steps: 1,
        read: all,
    };
    program.case("tokens", n * mesh.size())
}

/// The state of a step, which generates a token.
#[derive(Flatten)]
struct State {
    model: Llama,
    caches: Vec<KvCache>,
}

/// How many tokens precede the measured ones.
const BEFORE: usize = 16;

pub(crate) fn tp(mesh: &Mesh, small: bool) -> Result<Case> {
    let config = match small {
        true => Config::tiny(),
        false => Config {
            vocabulary: 1024,
            hidden: 256,
            layers: 8,
            heads: 8,
            kv_heads: 8,
            feed_forward: 704,
            ..Config::tiny()
        },
    };
    let (prompt, places) = ([1, 2, 3, 4], if small { 4 } else { 16 });
    let plain = consort_examples::tp::plain(mesh, &config, 7, &prompt, places)?;
    let (mut ways, mut difference) = (Vec::new(), 0f64);
    for (mode, group) in
        [("traced", (**mesh).clone()), ("broken", mesh.uncompiled()), ("eager", (**mesh).clone())]
    {
        let model = Llama::random(&config, &group, 7)?;
        let tokens = match mode {
            "eager" => model.generate(&prompt, places, None)?,
            _ => Generator::new(model.clone(), config.places)?.generate(&prompt, places, None)?,
        };
        difference = difference.max(tokens.iter().zip(&plain).filter(|(a, b)| a != b).count() as f64);
        let caches = model.caches(BEFORE + places)?;
        let state = RefCell::new(State { model, caches });
        let forward = |state: &mut State, (token, place): (Tensor, Index)| {
            state.model.forward(&token, &mut state.caches, &place)
        };
        let compiled = (mode != "eager").then(|| Rc::new(compile_mut(forward).name(mode)));
        let (called, mut place) = (compiled.clone(), 0);
        let step = move || {
            place = (place + 1) % places;
            let token = Tensor::from_slice(&[place as i64], &[1])?.replicated()?;
            let args = (token, Index::from(BEFORE + place));
            let state = &mut *state.borrow_mut();
            let numbers = match &called {
                Some(compiled) => compiled.call(state, args)?,
                None => forward(state, args)?,
            };
            // A token is chosen from the logits on the host.
            numbers.to_vec::<f32>().map(drop)
        };
        ways.push(Mode {
            mode,
            step: Box::new(step),
            explain: compiled.map(|compiled| -> Box<dyn Fn() -> _> { Box::new(move || compiled.explain()) }),
        });
    }
    // After one token at each position every plan is cached.
    Ok(Case { ways, unit: "tokens", per_step: 1.0, warm: places + 1, difference, allowed: 0.0 })
}
