//! A rank of `consort bench programs`: the cases, each in several modes.

use std::rc::Rc;
use std::time::{Duration, Instant};

use consort::{Batched, Dtype, Flatten, Group, Index, Init, Mesh, Reduce, Result, Route, Tensor, compile};
use serde_json::json;

use super::figures::median;
use super::table::write_out;
use crate::programs::{halo, ring_attention};
use crate::report::{Machine, Report};
use crate::ways::{Measured, Way, round};

/// The name of the entry that becomes a rank. It is not for users.
pub(crate) const PROGRAMS: &str = "__programs";

#[derive(Debug, clap::Args)]
pub(crate) struct ProgramsArgs {
    #[arg(long)]
    seconds: f64,
    #[arg(long, default_value = "")]
    cases: String,
    #[arg(long)]
    small: bool,
}

/// How long ranks wait for one another.
const TIMEOUT: Duration = Duration::from_secs(300);
/// A rank's heap: weights, caches and plans of one case at a time.
const HEAP: usize = 8 << 30;

struct Bench {
    mesh: Mesh,
    /// This rank alone.
    alone: Group,
    seconds: f64,
    cases: Vec<String>,
    small: bool,
}

/// Runs all cases; rank 0 prints a line for each mode.
pub(crate) fn run_programs_rank(args: &ProgramsArgs) -> anyhow::Result<Report> {
    let run = || -> Result<()> {
        let mesh = Init::new().timeout(TIMEOUT).heap(HEAP).start()?;
        // As the peers are measured: a thread for each rank.
        mesh.set_threads(1);
        let alone = mesh.split("alone", Some(mesh.number(&mesh.rank())? as u32), 0)?;
        let cases = args.cases.split(',').map(String::from).collect();
        let bench = Bench { mesh, alone, seconds: args.seconds, cases, small: args.small };
        bench.case("tp_brief", || bench.tp([1024, 16, 2816, 256, 8]))?;
        bench.case("tp_decode", || bench.tp([1024, 16, 2816, 1, 8]))?;
        bench.case("tp_tiny", || bench.tp([128, 4, 256, 16, 8]))?;
        bench.case("ring_attention", || bench.ring_attention())?;
        bench.case("ring_kernel", || bench.ring_kernel())?;
        bench.case("halo_exchange", || Ok(bench.halo_exchange()))?;
        bench.case("halo_jacobi", || Ok(bench.halo_jacobi()))?;
        bench.case("coalesced", || Ok(bench.coalesced()))?;
        bench.mesh.barrier()
    };
    run().map_err(|error| Machine(format!("{error}")))?;
    Ok(Report::fine(String::new()))
}

/// A way to run a function, as it is or compiled, so many times in a step: on what is made of the result before.
fn way<A: Flatten + 'static, R: Flatten + 'static>(
    mode: &'static str,
    is_compiled: bool,
    times: usize,
    f: impl Fn(A) -> Result<R> + 'static,
    next: impl Fn(Option<R>) -> Result<A> + 'static,
) -> Way {
    let f = Rc::new(f);
    let own = Rc::clone(&f);
    let compiled = is_compiled.then(|| Rc::new(compile(move |args: A| own(args)).name(mode)));
    let (called, mut last) = (compiled.clone(), None);
    let step = move || {
        for _ in 0..times {
            let args = next(last.take())?;
            last = Some(match &called {
                Some(compiled) => compiled.call(args)?,
                None => f(args)?,
            });
        }
        last.iter().flat_map(Flatten::flatten).try_for_each(|tensor| tensor.wait())
    };
    let explain = compiled.map(|compiled| -> Box<dyn Fn() -> _> { Box::new(move || compiled.explain()) });
    Way { mode, step: Box::new(step), explain }
}

/// A block of tp_block.py: this rank's part of its weights.
#[derive(Flatten, Clone)]
struct Block {
    qkv: Tensor,
    out: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm1: Tensor,
    norm2: Tensor,
}

impl Block {
    fn new(hidden: usize, feed_forward: usize, ranks: usize, key: i64) -> Result<Block> {
        let weight = |rows: usize, columns: usize, key: i64| {
            Tensor::normal(Dtype::F32, &[rows, columns], key)? * (1.0 / rows as f64).sqrt()
        };
        Ok(Block {
            qkv: weight(hidden, 3 * hidden / ranks, key)?,
            out: weight(hidden / ranks, hidden, key + 1)?,
            gate: weight(hidden, feed_forward / ranks, key + 2)?,
            up: weight(hidden, feed_forward / ranks, key + 3)?,
            down: weight(feed_forward / ranks, hidden, key + 4)?,
            norm1: Tensor::ones(Dtype::F32, &[hidden])?,
            norm2: Tensor::ones(Dtype::F32, &[hidden])?,
        })
    }

    fn forward(&self, reduce: &dyn Fn(Tensor) -> Result<Tensor>, x: &Tensor, heads: usize) -> Result<Tensor> {
        let length = x.shape()[0];
        let own = self.out.shape()[0];
        let width = own / heads;
        let qkv = x.rms_norm(&self.norm1, 1e-6)?.matmul(&self.qkv)?;
        let qkv = qkv.reshape(&[length, 3, heads, width])?.permute(&[1, 2, 0, 3])?;
        let [q, k, v] = [0, 1, 2].map(|part: usize| qkv.narrow(0, part, 1));
        let scale = (width as f64).powf(-0.5);
        let mixed = q?.attention(&k?, &v?, scale, Some(Index::from(0)))?.squeeze(0)?;
        let x = x.add(&reduce(mixed.permute(&[1, 0, 2])?.reshape(&[length, own])?.matmul(&self.out)?)?)?;
        let h = x.rms_norm(&self.norm2, 1e-6)?;
        let inner = h.matmul(&self.gate)?.silu()?.mul(&h.matmul(&self.up)?)?;
        x.add(&reduce(inner.matmul(&self.down)?)?)
    }
}

/// The kernel of p2p_kernel.py: two exchanges, each beside some work, the second of what the first gave.
fn ring_kernel(ring: &Group, x: &Tensor) -> Result<Tensor> {
    let exchange = |x: &Tensor, y: &mut Tensor| {
        ring.batch(vec![Batched::send(x, Route::Ring(1), 0), Batched::recv(y, Route::Ring(-1), 0)])
    };
    let mut y = Tensor::zeros(Dtype::F32, x.shape())?;
    let flying = exchange(x, &mut y)?;
    let t = ((x * 2.0)? + 1.0)?;
    flying.wait()?;
    let a = y.add(&t)?;
    let mut y = Tensor::zeros(Dtype::F32, x.shape())?;
    let flying = exchange(&a, &mut y)?;
    let t = (&a * 1.000244140625)?;
    flying.wait()?;
    y.add(&t)
}

/// Halo rows alone: those of the neighbours come into the border.
fn exchange(down: &Group, mut x: Tensor) -> Result<Tensor> {
    let height = x.dim(0)? - 2;
    let first = x.narrow(0, 1, 1)?;
    let below = Batched::recv(x.narrow_mut(0, &height + 1, 1)?, Route::Shift(1), 0);
    let up = down.batch(vec![Batched::send(first, Route::Shift(-1), 0), below])?;
    let last = x.narrow(0, height, 1)?;
    let above = Batched::recv(x.narrow_mut(0, 0, 1)?, Route::Shift(-1), 1);
    let down = down.batch(vec![Batched::send(last, Route::Shift(1), 1), above])?;
    up.wait()?;
    down.wait()?;
    Ok(x)
}

impl Bench {
    fn case(&self, name: &str, ways: impl FnOnce() -> Result<Vec<Way>>) -> Result<()> {
        if !self.cases.iter().any(|start| name.starts_with(start.as_str())) {
            return Ok(());
        }
        let mut ways = ways()?;
        let mut steps = Vec::new();
        for way in &mut ways {
            (0..2).try_for_each(|_| (way.step)())?;
            steps.push(way.steps_in(&self.mesh, if self.small { 0.0 } else { 0.02 })?);
        }
        let mut all: Vec<Measured> = ways.iter().map(|_| Measured::default()).collect();
        let start = Instant::now();
        loop {
            for ((way, steps), measured) in ways.iter_mut().zip(&steps).zip(&mut all) {
                way.sample(&self.mesh, *steps, measured)?;
            }
            let seconds = crate::ways::largest(&self.mesh, start.elapsed().as_secs_f64())?;
            if seconds >= self.seconds && (self.small || all[0].seconds.len() >= 5) {
                break;
            }
        }
        for (way, measured) in ways.iter().zip(&all) {
            let ms = |samples: &[f64]| round(1e3 * median(samples.iter().copied()).unwrap_or(f64::NAN));
            if self.mesh.number(&self.mesh.rank())? == 0 {
                let figure = json!({
                    "bench": "programs", "case": name, "mode": way.mode, "ranks": self.mesh.size(),
                    "ms": ms(&measured.seconds), "cpu_ms": ms(&measured.cpu), "copied_bytes": measured.copied(), "breaks": way.breaks(),
                    "samples": measured.seconds.len(),
                });
                write_out(&format!("{figure}\n"));
            }
        }
        Ok(())
    }

    fn tp(&self, sizes: [usize; 5]) -> Result<Vec<Way>> {
        let [hidden, heads, feed_forward, length, layers] = if self.small { [16, 2, 8, 2, 2] } else { sizes };
        let ranks = self.mesh.size();
        let me = self.mesh.number(&self.mesh.rank())? as i64;
        let block = |layer: i64| Block::new(hidden, feed_forward, ranks, 100 * layer + 10 * me);
        let blocks = (0..layers as i64).map(block).collect::<Result<Vec<Block>>>()?;
        let x = Tensor::normal(Dtype::F32, &[length, hidden], 1)?;
        let modes = [
            ("compiled", true, Some((*self.mesh).clone())),
            ("eager", false, Some((*self.mesh).clone())),
            ("broken", true, Some(self.mesh.uncompiled())),
            ("no_collectives", true, None),
        ];
        let make = |(mode, is_compiled, group): (&'static str, bool, Option<Group>)| {
            let f = move |(blocks, x): (Vec<Block>, Tensor)| {
                let reduce = |x: Tensor| match &group {
                    Some(group) => group.all_reduce(x, Reduce::Sum),
                    None => Ok(x),
                };
                blocks.iter().try_fold(x, |x, block| block.forward(&reduce, &x, heads / ranks))
            };
            let (blocks, x) = (blocks.clone(), x.clone());
            way(mode, is_compiled, 1, f, move |_| Ok((blocks.clone(), x.clone())))
        };
        Ok(modes.into_iter().map(make).collect())
    }

    fn ring_attention(&self) -> Result<Vec<Way>> {
        let ranks = self.mesh.size();
        let [heads, length, width, tile] = if self.small { [2, 6, 4, 4] } else { [8, 4096 / ranks, 64, 64] };
        let part = |key| ring_attention::part(&self.mesh, heads, length, width, key);
        let (q, k, v) = (part(1)?, part(2)?, part(3)?);
        let all = |x: &Tensor| Tensor::concat(&vec![x; ranks], 2);
        let (all_k, all_v) = (all(&k)?, all(&v)?);
        let make = |mode, is_compiled, group: &Group, args: (Tensor, Tensor, Tensor)| {
            let group = group.clone();
            let f = move |(q, k, v): (Tensor, Tensor, Tensor)| {
                ring_attention::ring_attention(&group, &q, k, v, false, tile)
            };
            way(mode, is_compiled, 1, f, move |_| Ok(args.clone()))
        };
        Ok(vec![
            make("compiled", true, &self.mesh, (q.clone(), k.clone(), v.clone())),
            make("eager", false, &self.mesh, (q.clone(), k, v)),
            // As many keys, all of them here.
            make("no_exchange", true, &self.alone, (q, all_k, all_v)),
        ])
    }

    fn ring_kernel(&self) -> Result<Vec<Way>> {
        let x = Tensor::normal(Dtype::F32, &[if self.small { 8 } else { 1 << 20 }], 1)?;
        let make = |mode, is_compiled| {
            let (ring, x) = ((*self.mesh).clone(), x.clone());
            way(mode, is_compiled, 1, move |x: Tensor| ring_kernel(&ring, &x), move |_| Ok(x.clone()))
        };
        Ok(vec![make("compiled", true), make("eager", false)])
    }

    /// Steps on this rank's rows of a grid of 2048 x 2048 with an open border.
    fn grid(
        &self,
        (mode, is_compiled, times): (&'static str, bool, usize),
        down: &Group,
        f: fn(&halo::Sharing, Tensor) -> Result<Tensor>,
    ) -> Way {
        let [height, width] = if self.small { [4, 6] } else { [2048 / self.mesh.size(), 2048] };
        let grid = halo::Sharing { down: down.clone(), along: self.alone.clone(), periodic: false };
        let own = grid.clone();
        let next = move |last: Option<Tensor>| last.map_or_else(|| halo::start(&own, height, width), Ok);
        way(mode, is_compiled, if self.small { 2 } else { times }, move |x| f(&grid, x), next)
    }

    fn halo_exchange(&self) -> Vec<Way> {
        let modes = [("compiled", true, 1), ("eager", false, 1)];
        modes.map(|mode| self.grid(mode, &self.mesh, |grid, x| exchange(&grid.down, x))).into()
    }

    fn halo_jacobi(&self) -> Vec<Way> {
        vec![
            self.grid(("compiled", true, 200), &self.mesh, halo::step),
            self.grid(("eager", false, 200), &self.mesh, halo::step),
            self.grid(("no_exchange", true, 200), &self.alone, halo::step),
        ]
    }

    fn coalesced(&self) -> Vec<Way> {
        let floats = if self.small { 8 } else { 16 << 10 };
        let make = |mode, is_compiled, at_once: bool| {
            let group = (*self.mesh).clone();
            let f = move |list: Vec<Tensor>| match at_once {
                true => group.all_reduce_coalesced(list, Reduce::Avg),
                false => list.into_iter().map(|x| group.all_reduce(x, Reduce::Avg)).collect(),
            };
            let start = move || (0..100).map(|key| Tensor::normal(Dtype::F32, &[floats], key)).collect();
            way(mode, is_compiled, 1, f, move |last| last.map_or_else(start, Ok))
        };
        vec![
            make("compiled", true, true),
            make("eager", false, true),
            make("compiled_each", true, false),
            make("eager_each", false, false),
        ]
    }
}
