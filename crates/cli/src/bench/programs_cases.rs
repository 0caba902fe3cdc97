//! A rank of `consort bench programs`: the cases, each in several modes.

use std::rc::Rc;
use std::time::Duration;

use consort::{Batched, Dtype, Flatten, Group, Index, Init, Mesh, Reduce, Result, Route, Tensor, compile};
use consort_examples::{halo, ring_attention};
use serde_json::json;

use super::figures::median;
use super::table::write_out;
use super::tp_block::{Model, SIZES, Sizes};
use crate::modes::{Mode, in_turns, round};
use crate::report::{Machine, Report};

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
    /// The group of this rank alone.
    alone: Group,
    seconds: f64,
    cases: Vec<String>,
    small: bool,
}

/// Runs all cases; rank 0 prints a line for each mode.
pub(crate) fn run_programs_rank(args: &ProgramsArgs) -> anyhow::Result<Report> {
    let run = || -> Result<()> {
        let mesh = Init::new().timeout(TIMEOUT).heap(HEAP).start()?;
        // One thread for each rank, as the peers are measured.
        mesh.set_threads(1);
        let alone = mesh.split("alone", Some(mesh.my_rank()? as u32), 0)?;
        let cases = args.cases.split(',').map(String::from).collect();
        let bench = Bench { mesh, alone, seconds: args.seconds, cases, small: args.small };
        for (case, sizes) in SIZES {
            bench.case(case, || bench.tp(sizes))?;
        }
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

/// A mode of running a function, eager or compiled, `times` times in a step; `next` makes arguments of the last result.
fn way<A: Flatten + 'static, R: Flatten + 'static>(
    mode: &'static str,
    is_compiled: bool,
    times: usize,
    f: impl Fn(A) -> Result<R> + 'static,
    next: impl Fn(Option<R>) -> Result<A> + 'static,
) -> Mode {
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
    Mode { mode, step: Box::new(step), explain }
}

/// Two exchanges, each overlapped with some work; the second sends the result of the first.
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

/// Halo rows alone: the border receives those of the neighbours. The sent rows are written first and the received ones
/// are read, so that the data has to move.
fn exchange(down: Option<&Group>, (mut x, _): (Tensor, Tensor)) -> Result<(Tensor, Tensor)> {
    let height = x.dim(0)? - 2;
    for row in [Index::from(1), height.clone()] {
        let sent = (x.narrow(0, row.clone(), 1)? * 0.999)?;
        x.narrow_mut(0, row, 1)?.copy_from(&sent)?;
    }
    if let Some(down) = down {
        let first = x.narrow(0, 1, 1)?;
        let below = Batched::recv(x.narrow_mut(0, &height + 1, 1)?, Route::Shift(1), 0);
        let up = down.batch(vec![Batched::send(first, Route::Shift(-1), 0), below])?;
        let last = x.narrow(0, height.clone(), 1)?;
        let above = Batched::recv(x.narrow_mut(0, 0, 1)?, Route::Shift(-1), 1);
        let down = down.batch(vec![Batched::send(last, Route::Shift(1), 1), above])?;
        up.wait()?;
        down.wait()?;
    }
    let came = |row: Index| x.narrow(0, row, 1)?.sum(&[1], false);
    let came = (came(0.into())? + came(height + 1)?)?;
    Ok((x, came))
}

impl Bench {
    fn case(&self, name: &str, ways: impl FnOnce() -> Result<Vec<Mode>>) -> Result<()> {
        if !self.cases.iter().any(|start| name.starts_with(start.as_str())) {
            return Ok(());
        }
        let mut ways = ways()?;
        let all = in_turns(&self.mesh, &mut ways, self.seconds, self.small)?;
        for (way, measured) in ways.iter().zip(&all) {
            let ms = |samples: &[f64]| round(1e3 * median(samples.iter().copied()).unwrap_or(f64::NAN));
            if self.mesh.my_rank()? == 0 {
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

    fn tp(&self, sizes: Sizes) -> Result<Vec<Mode>> {
        let small = Sizes { hidden: 16, heads: 2, ffn: 8, seq: 2, layers: 2 };
        let sizes = if self.small { small } else { sizes };
        let model = Model::new(&sizes, self.mesh.size())?;
        let x = Tensor::normal(Dtype::F32, &[sizes.seq, sizes.hidden], 1)?;
        let modes = [
            ("compiled", true, Some((*self.mesh).clone())),
            ("eager", false, Some((*self.mesh).clone())),
            ("broken", true, Some(self.mesh.uncompiled())),
            ("no_collectives", true, None),
        ];
        let make = |(mode, is_compiled, group): (&'static str, bool, Option<Group>)| {
            let f = move |(model, x): (Model, Tensor)| model.forward(group.as_ref(), x);
            let (model, x) = (model.clone(), x.clone());
            way(mode, is_compiled, 1, f, move |_| Ok((model.clone(), x.clone())))
        };
        Ok(modes.into_iter().map(make).collect())
    }

    fn ring_attention(&self) -> Result<Vec<Mode>> {
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
            // As many keys, all of them on this rank.
            make("no_exchange", true, &self.alone, (q, all_k, all_v)),
        ])
    }

    fn ring_kernel(&self) -> Result<Vec<Mode>> {
        let x = Tensor::normal(Dtype::F32, &[if self.small { 8 } else { 1 << 20 }], 1)?;
        let make = |mode, is_compiled| {
            let (ring, x) = ((*self.mesh).clone(), x.clone());
            way(mode, is_compiled, 1, move |x: Tensor| ring_kernel(&ring, &x), move |_| Ok(x.clone()))
        };
        Ok(vec![make("compiled", true), make("eager", false)])
    }

    /// This rank's rows of a grid of 2048 x 2048 with an open border, sharded over a group.
    fn grid(&self, down: &Group) -> (halo::Sharing, impl Fn() -> Result<Tensor> + 'static) {
        let [height, width] = if self.small { [4, 6] } else { [2048 / self.mesh.size(), 2048] };
        let grid = halo::Sharing { down: down.clone(), along: self.alone.clone(), periodic: false };
        let own = grid.clone();
        (grid, move || halo::start(&own, height, width))
    }

    fn halo_exchange(&self) -> Vec<Mode> {
        let make = |(mode, is_compiled, exchanges): (_, _, bool)| {
            let (grid, start) = self.grid(&self.mesh);
            let start = move || Ok((start()?, Tensor::zeros(Dtype::F32, &[1])?));
            let next = move |last: Option<_>| last.map_or_else(&start, Ok);
            way(mode, is_compiled, 1, move |last| exchange(exchanges.then_some(&grid.down), last), next)
        };
        [("compiled", true, true), ("eager", false, true), ("no_exchange", true, false)].map(make).into()
    }

    fn halo_jacobi(&self) -> Vec<Mode> {
        let steps = if self.small { 2 } else { 200 };
        let modes = [
            ("compiled", true, &*self.mesh),
            ("eager", false, &*self.mesh),
            ("no_exchange", true, &self.alone),
        ];
        let make = |(mode, is_compiled, group): (_, _, &Group)| {
            let (grid, start) = self.grid(group);
            let next = move |last: Option<Tensor>| last.map_or_else(&start, Ok);
            way(mode, is_compiled, steps, move |x| halo::step(&grid, x), next)
        };
        modes.map(make).into()
    }

    fn coalesced(&self) -> Vec<Mode> {
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
