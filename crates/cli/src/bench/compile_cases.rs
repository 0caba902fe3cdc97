//! A rank of `consort bench compile`: the cases, each against the eager function or against its kernel alone.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Context;
use consort::{Compiled, Dtype, Flatten, Init, Mesh, Reduce, Route, Tensor, compile};
use consort_ir::ops::{Add, EvalCx};
use consort_runtime::kernels::{self, Arg, KernelCx, View, ViewMut};
use consort_runtime::threads::Threads;
use serde_json::{Value, json};

use super::compile_scale;
use super::figures::median;
use super::table::write_out;
use super::tp_block::{Model, SIZES};
use super::worker::Cores;
use crate::report::{Machine, Report};

/// The name of the entry that becomes a rank. It is not for users.
pub(crate) const COMPILE: &str = "__compile";

#[derive(Debug, clap::Args)]
pub(crate) struct CompileArgs {
    #[arg(long)]
    seconds: f64,
    #[arg(long, default_value = "")]
    cases: String,
}

/// How long ranks wait for one another: rank-local measurements take a while.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Floats of a small tensor.
const SMALL: usize = 1024;
/// How often a function is compiled again after warm-up.
const AGAIN: usize = 5;

struct Bench {
    mesh: Mesh,
    rank: usize,
    seconds: f64,
    cases: Vec<String>,
}

/// Measurements of a compiled function, in nanoseconds.
struct Measured {
    /// The very first call.
    first: f64,
    /// Its compilation, and those of the same function later.
    compile: f64,
    later: f64,
    /// Times of a call and of its baseline.
    pairs: Vec<(f64, f64)>,
}

impl Measured {
    fn call(&self) -> f64 {
        median(self.pairs.iter().map(|(ours, _)| *ours)).unwrap_or(f64::NAN)
    }

    fn beside(&self) -> f64 {
        median(self.pairs.iter().map(|(_, beside)| *beside)).unwrap_or(f64::NAN)
    }
}

/// Runs all cases; rank 0 prints a line for each.
pub(crate) fn run_compile_rank(args: &CompileArgs) -> anyhow::Result<Report> {
    let run = || -> anyhow::Result<()> {
        let mesh = Init::new().timeout(TIMEOUT).start()?;
        let rank = mesh.my_rank()?;
        Cores::of_this_process()?.pin(rank, mesh.size())?;
        let cases = args.cases.split(',').map(String::from).collect();
        let bench = Bench { mesh, rank, seconds: args.seconds, cases };
        bench.models()?;
        bench.one_op()?;
        bench.one_op_comm()?;
        bench.copies()?;
        bench.agree()?;
        if bench.rank == 0 {
            bench.scale()?;
        }
        bench.mesh.barrier()?;
        Ok(())
    };
    run().map_err(|error| Machine(format!("{error:#}")))?;
    Ok(Report::fine(String::new()))
}

/// Nanoseconds of `times` calls.
fn time(times: usize, mut work: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    for _ in 0..times {
        work()?;
    }
    Ok(start.elapsed().as_nanos() as f64 / times as f64)
}

/// Nanoseconds spent on compiling a function.
fn compiling<A: Flatten + 'static, R: Flatten + 'static>(compiled: &Compiled<A, R>) -> f64 {
    compiled.stats().compiling.as_nanos() as f64
}

fn round(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}

impl Bench {
    fn wants(&self, case: &str) -> bool {
        self.cases.iter().any(|start| case.starts_with(start.as_str()))
    }

    fn show(&self, figure: &Value) {
        if self.rank == 0 {
            write_out(&format!("{figure}\n"));
        }
    }

    /// Reduces a number over all ranks.
    fn joint(&self, number: f64, reduce: Reduce) -> anyhow::Result<f64> {
        let number = Tensor::from_slice(&[number], &[1])?;
        Ok(self.mesh.all_reduce(number, reduce)?.to_vec::<f64>()?[0])
    }

    /// Measures a compiled function in turns with its baseline.
    fn measure<A: Flatten + 'static, R: Flatten + 'static>(
        &self,
        new: impl Fn() -> Compiled<A, R>,
        mut call: impl FnMut(&Compiled<A, R>) -> anyhow::Result<()>,
        mut beside: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<(Compiled<A, R>, Measured)> {
        let compiled = new();
        self.mesh.barrier()?;
        let first = time(1, || call(&compiled))?;
        let compile = compiling(&compiled);
        time(2, || call(&compiled))?;
        let once = self.joint(time(3, || call(&compiled))? + time(3, &mut beside)?, Reduce::Max)?.max(1.0);
        let times = ((2e6 / once) as usize).clamp(1, 10_000);
        let samples = ((self.seconds * 1e9 / once) as usize / times).clamp(5, 1000);
        let mut pairs = Vec::new();
        for _ in 0..samples {
            self.mesh.barrier()?;
            let ours = time(times, || call(&compiled))?;
            self.mesh.barrier()?;
            pairs.push((ours, time(times, &mut beside)?));
        }
        let mut later = Vec::new();
        for _ in 0..AGAIN {
            let compiled = new();
            self.mesh.barrier()?;
            call(&compiled)?;
            later.push(compiling(&compiled));
        }
        let later = median(later.into_iter()).unwrap_or(f64::NAN);
        Ok((compiled, Measured { first, compile, later, pairs }))
    }

    /// The figures that every case reports of a compiled function.
    fn figure<A: Flatten + 'static, R: Flatten + 'static>(
        case: &str,
        compiled: &Compiled<A, R>,
        measured: &Measured,
    ) -> anyhow::Result<Value> {
        let (explained, stats, call) = (compiled.explain(), compiled.stats(), measured.call());
        let graph = explained.graphs.first().context("bench: nothing was compiled")?;
        Ok(json!({
            "bench": "compile", "case": case,
            "compile_ms": round(measured.compile / 1e6), "call_us": round(call / 1e3),
            "copied_bytes": graph.copied_bytes, "peak_bytes": graph.peak_bytes, "live_bytes": graph.live_bytes,
            "breaks": stats.breaks, "graphs": stats.graphs,
            "compile_warm_ms": round(measured.later / 1e6), "first_call_ms": round(measured.first / 1e6),
            "copied_bytes_run": stats.copied_bytes,
            "copies_agree": graph.copied_bytes * stats.calls == stats.copied_bytes,
            "calls": stats.calls, "samples": measured.pairs.len(),
        }))
    }

    /// A compiled function against the eager one.
    fn beside_eager<A: Flatten + Clone + 'static, R: Flatten + 'static>(
        &self,
        case: &str,
        f: impl Fn(A) -> consort::Result<R> + Clone + 'static,
        args: impl Fn() -> consort::Result<A>,
    ) -> anyhow::Result<()> {
        let wait = |result: R| -> anyhow::Result<()> {
            for tensor in black_box(result).flatten() {
                tensor.wait()?;
            }
            Ok(())
        };
        let (compiled, measured) = self.measure(
            || compile(f.clone()),
            |compiled| wait(compiled.call(args()?)?),
            || wait(f(args()?)?),
        )?;
        let mut figure = Self::figure(case, &compiled, &measured)?;
        figure["eager_us"] = json!(round(measured.beside() / 1e3));
        figure["ratio"] = json!(round(median(measured.pairs.iter().map(|(a, b)| a / b)).unwrap_or(f64::NAN)));
        let bytes = |key: &str| figure[key].as_f64().unwrap_or(f64::NAN);
        figure["peak_over_live"] = json!(round(bytes("peak_bytes") / bytes("live_bytes")));
        self.show(&figure);
        Ok(())
    }

    /// A transformer with sharded weights.
    fn models(&self) -> anyhow::Result<()> {
        for (case, sizes) in SIZES {
            if !self.wants(case) || !sizes.divide(self.mesh.size()) {
                continue;
            }
            let model = Model::new(&sizes, self.mesh.size())?;
            let x = Tensor::uniform(Dtype::F32, &[sizes.seq, sizes.hidden], 0)?;
            let mesh = self.mesh.clone();
            let forward = move |(model, x): (Model, Tensor)| model.forward(Some(&mesh), x);
            self.beside_eager(case, forward, || Ok((model.clone(), x.clone())))?;
        }
        Ok(())
    }

    /// One op that does not communicate, against its kernel.
    fn one_op(&self) -> anyhow::Result<()> {
        if !self.wants("one_op") {
            return Ok(());
        }
        let (x, y) = (Tensor::uniform(Dtype::F32, &[SMALL], 1)?, Tensor::uniform(Dtype::F32, &[SMALL], 2)?);
        let (a, b, mut sum) = (x.to_vec::<f32>()?, y.to_vec::<f32>()?, vec![0f32; SMALL]);
        let kernel = kernels::find("add").context("bench: no kernel")?;
        let (mesh, symbols) = (consort_ir::mesh::Mesh::default(), Default::default());
        let sizes = EvalCx { mesh: &mesh, rank: consort_types::Rank(0), symbols: &symbols };
        let cx = KernelCx { sizes, threads: &Threads::ONE };
        let alone = || {
            let view = |bytes| Arg::View(View { dtype: Dtype::F32, shape: &[SMALL], strides: &[1], bytes });
            let bytes = bytemuck::cast_slice_mut(black_box(&mut sum));
            let out = ViewMut { dtype: Dtype::F32, shape: &[SMALL], bytes };
            let args = [view(bytemuck::cast_slice(&a)), view(bytemuck::cast_slice(&b))];
            (kernel.run)(&cx, &Add {}, &args, &mut [out]).map_err(|error| anyhow::anyhow!("{error}"))
        };
        let measured = self.measure(
            || compile(|(x, y): (Tensor, Tensor)| x.add(&y)),
            |compiled| {
                black_box(compiled.call((x.clone(), y.clone()))?);
                Ok(())
            },
            alone,
        )?;
        self.over_kernel("one_op", measured)
    }

    /// One collective, in place, against that of the underlying group.
    fn one_op_comm(&self) -> anyhow::Result<()> {
        if !self.wants("one_op_comm") {
            return Ok(());
        }
        let group = self.mesh.raw().context("bench: no group")?;
        // Replicated from the start, as results are.
        let mut given = Some(Tensor::ones(Dtype::F32, &[1])?.replicated()?);
        let mut buffer = Some(group.heap().alloc_from(&1f32.to_le_bytes())?);
        let deadline = Instant::now() + TIMEOUT;
        let mesh = self.mesh.clone();
        let measured = self.measure(
            || {
                let mesh = mesh.clone();
                compile(move |x: Tensor| mesh.all_reduce(x, Reduce::Max))
            },
            |compiled| {
                let y = compiled.call(given.take().context("bench: no tensor")?)?;
                y.wait()?;
                given = Some(y);
                Ok(())
            },
            || {
                let given = buffer.take().context("bench: no buffer")?;
                let pending = group.all_reduce(given, Dtype::F32, consort_types::Reduce::Max)?;
                buffer = Some(pending.wait(deadline)?.remove(0));
                Ok(())
            },
        )?;
        self.over_kernel("one_op_comm", measured)
    }

    fn over_kernel<A: Flatten + 'static, R: Flatten + 'static>(
        &self,
        case: &str,
        (compiled, measured): (Compiled<A, R>, Measured),
    ) -> anyhow::Result<()> {
        let mut figure = Self::figure(case, &compiled, &measured)?;
        let over = median(measured.pairs.iter().map(|(ours, kernel)| ours - kernel)).unwrap_or(f64::NAN);
        figure["kernel_us"] = json!(round(measured.beside() / 1e3));
        figure["overhead_us"] = json!(round(over / 1e3));
        self.show(&figure);
        Ok(())
    }

    /// Small programs in which communication should copy nothing, or as little as needed. Their arguments are donated.
    fn copies(&self) -> anyhow::Result<()> {
        type Case = (&'static str, fn(&Mesh, Tensor) -> consort::Result<Tensor>);
        let cases: [Case; 5] = [
            ("b5_dead", |mesh, x| mesh.all_reduce(x.neg()?, Reduce::Sum)),
            ("b5_needed", |mesh, x| {
                let y = x.neg()?;
                mesh.all_reduce(&y, Reduce::Sum)?.add(&y)
            }),
            ("b6_in_place", |mesh, mut x| {
                mesh.all_reduce_(&mut x, Reduce::Sum)?;
                x.relu()
            }),
            ("c2_ring", ring),
            ("a12_into", |mesh, x| {
                let n = mesh.size();
                let mut wide = Tensor::zeros(Dtype::F32, &[SMALL * n + 64])?;
                mesh.all_gather_into(wide.narrow_mut(0, 32, SMALL * n)?, x.neg()?, 0)?;
                Ok(wide)
            }),
        ];
        for (case, f) in cases.into_iter().filter(|(case, _)| self.wants(case)) {
            let mesh = self.mesh.clone();
            self.beside_eager(case, move |x| f(&mesh, x), || Tensor::zeros(Dtype::F32, &[SMALL]))?;
        }
        Ok(())
    }

    /// The time from when all ranks have traced a function until they agree on it.
    fn agree(&self) -> anyhow::Result<()> {
        if !self.wants("agree") {
            return Ok(());
        }
        let (mut last, mut agreed) = (None, Vec::new());
        let start = Instant::now();
        let again = |n: usize, seconds: f64| n < AGAIN || (n < 1000 && seconds < self.seconds);
        while self.joint(f64::from(again(agreed.len(), start.elapsed().as_secs_f64())), Reduce::Min)? > 0.0 {
            let mesh = self.mesh.clone();
            let compiled = compile(move |x: Tensor| mesh.all_reduce(x.neg()?, Reduce::Sum));
            self.mesh.barrier()?;
            let first = time(1, || Ok(compiled.call(Tensor::zeros(Dtype::F32, &[SMALL])?)?.wait()?))?;
            let call = time(1, || Ok(compiled.call(Tensor::zeros(Dtype::F32, &[SMALL])?)?.wait()?))?;
            // The rank that comes last does not wait for the others to trace.
            agreed.push(self.joint(compiled.stats().agreeing.as_nanos() as f64, Reduce::Min)?);
            let compile = compiling(&compiled);
            last.get_or_insert((
                compiled,
                Measured { first, compile, later: compile, pairs: vec![(call, call)] },
            ));
        }
        let (compiled, measured) = last.context("bench: nothing was compiled")?;
        let mut figure = Self::figure("agree", &compiled, &measured)?;
        figure["ranks"] = json!(self.mesh.size());
        figure["samples"] = json!(agreed.len());
        figure["agree_ms"] = json!(round(median(agreed.into_iter()).unwrap_or(f64::NAN) / 1e6));
        self.show(&figure);
        Ok(())
    }

    /// Programs of many ops, on this rank alone.
    fn scale(&self) -> anyhow::Result<()> {
        let mut before: Option<f64> = None;
        for (case, ops) in [("ops_10k", 10_000), ("ops_100k", 100_000)] {
            // The larger case is reported relative to the smaller.
            if !(self.wants(case) || before.is_none() && self.wants("ops_100k")) {
                continue;
            }
            let mut figure = compile_scale::measure(case, ops)?;
            let ms = figure["compile_ms"].as_f64().unwrap_or(f64::NAN);
            if let Some(before) = before {
                figure["ratio"] = json!(round(ms / before));
            }
            before = Some(ms);
            if self.wants(case) {
                self.show(&figure);
            }
        }
        Ok(())
    }
}

/// A ring: each step computes on the received data while the next transfer is pending.
fn ring(mesh: &Mesh, x: Tensor) -> consort::Result<Tensor> {
    let (mut a, mut sum) = (x.clone(), x);
    for _ in 1..mesh.size() {
        let next = mesh.irecv(Dtype::F32, &[SMALL], Route::Ring(-1), 0)?;
        let sent = mesh.isend(&a, Route::Ring(1), 0)?;
        sum = sum.mul(&a)?.tanh()?;
        sent.wait()?;
        a = next;
        sum = sum.add(&a)?;
    }
    Ok(sum)
}
