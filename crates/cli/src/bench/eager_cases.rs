//! A rank of `consort bench eager`: the cases, each against its limit.

use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use consort::{Dtype, Init, Mesh, Reduce, Tensor};
use consort_comm::Buffer;
use consort_runtime::kernels::gemm_alone;
use serde_json::json;

use super::figures::median;
use super::table::write_out;
use crate::report::{Machine, Report};

/// The name of the entry that becomes a rank. It is not for users.
pub(crate) const EAGER: &str = "__eager";

#[derive(Debug, clap::Args)]
pub(crate) struct EagerArgs {
    #[arg(long)]
    seconds: f64,
    #[arg(long, default_value = "")]
    cases: String,
}

/// How long ranks wait for one another: rank-local measurements take a while.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Floats of a tensor that exceeds the caches.
const LARGE: usize = 4 << 20;

struct Bench {
    mesh: Mesh,
    rank: usize,
    seconds: f64,
    cases: Vec<String>,
}

/// Runs all cases; rank 0 prints a line for each.
pub(crate) fn run_eager_rank(args: &EagerArgs) -> anyhow::Result<Report> {
    let run = || -> anyhow::Result<()> {
        let mesh = Init::new().timeout(TIMEOUT).start()?;
        let rank = mesh.my_rank()?;
        let cases = args.cases.split(',').map(String::from).collect();
        let bench = Bench { mesh, rank, seconds: args.seconds, cases };
        for bytes in [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20] {
            bench.all_reduce(bytes)?;
        }
        if bench.rank == 0 {
            bench.kernels()?;
        }
        bench.mesh.barrier()?;
        Ok(())
    };
    run().map_err(|error| Machine(format!("{error:#}")))?;
    Ok(Report::fine(String::new()))
}

/// Writes all elements. Compiled once, as `look` is, so that both sides of a comparison run the same code.
#[inline(never)]
fn fill(elements: &mut [f32], value: usize) {
    elements.fill(value as f32);
}

/// Reads all elements.
#[inline(never)]
fn look(elements: &[f32]) {
    black_box(elements.iter().fold(0u32, |all, x| all ^ x.to_bits()));
}

fn raw_write(buffer: &mut Buffer, value: usize, deadline: Instant) -> anyhow::Result<()> {
    let mut bytes = buffer.bytes_mut(deadline)?;
    fill(bytemuck::cast_slice_mut(&mut bytes), value);
    Ok(())
}

fn raw_read(buffer: &Buffer) -> anyhow::Result<()> {
    look(bytemuck::cast_slice(&buffer.bytes()?));
    Ok(())
}

/// `4`, `64k`, `16m`.
fn size_text(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes}"),
        1024..1_048_576 => format!("{}k", bytes >> 10),
        _ => format!("{}m", bytes >> 20),
    }
}

/// A result, made and dropped.
fn done(result: consort::Result<Tensor>) -> anyhow::Result<()> {
    black_box(result?);
    Ok(())
}

/// Nanoseconds of `times` calls.
fn time(times: usize, mut work: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    for _ in 0..times {
        work()?;
    }
    Ok(start.elapsed().as_nanos() as f64 / times as f64)
}

impl Bench {
    fn wants(&self, case: &str) -> bool {
        self.cases.iter().any(|start| case.starts_with(start.as_str()))
    }

    fn show(&self, case: &str, beside: &str, pairs: &[(f64, f64)]) {
        let us = median(pairs.iter().map(|(ours, _)| ours / 1e3)).unwrap_or(f64::NAN);
        let limit = median(pairs.iter().map(|(_, limit)| limit / 1e3)).unwrap_or(f64::NAN);
        let ratio = median(pairs.iter().map(|(ours, limit)| ours / limit)).unwrap_or(f64::NAN);
        let round = |x: f64| (x * 1e4).round() / 1e4;
        if self.rank == 0 {
            let figure = json!({
                "bench": "eager", "case": case, "us": round(us), "limit_us": round(limit), "ratio": round(ratio),
                "samples": pairs.len(), "beside": beside,
            });
            write_out(&format!("{figure}\n"));
        }
    }

    /// A case on this rank alone, in turns with its limit.
    fn case(
        &self,
        name: &str,
        beside: &str,
        mut ours: impl FnMut() -> anyhow::Result<()>,
        mut limit: impl FnMut() -> anyhow::Result<()>,
        share: f64,
    ) -> anyhow::Result<()> {
        if !self.wants(name) {
            return Ok(());
        }
        ours()?;
        limit()?;
        let once = time(3, &mut ours)?.max(1.0);
        let times = ((2e6 / once) as usize).clamp(1, 100_000);
        let (start, mut pairs) = (Instant::now(), Vec::new());
        while pairs.len() < 5 || start.elapsed().as_secs_f64() < self.seconds {
            pairs.push((time(times, &mut ours)?, time(times, &mut limit)? * share));
        }
        self.show(name, beside, &pairs);
        Ok(())
    }

    /// An all_reduce of tensors against that of the underlying group, on live data: every iteration writes the input
    /// and reads the result, both whole; the same loop without the operation is subtracted.
    fn all_reduce(&self, bytes: usize) -> anyhow::Result<()> {
        let [owned, shared] =
            ["owned", "shared"].map(|case| format!("all_reduce_{case}_{}", size_text(bytes)));
        if !self.wants(&owned) && !self.wants(&shared) {
            return Ok(());
        }
        let group = self.mesh.raw().context("bench: no group")?;
        let floats = bytes / 4;
        let times = (20_000_000 / (bytes + 2000)).clamp(2, 4000);
        let mut x = Tensor::zeros(Dtype::F32, &[floats])?;
        let mut other = Tensor::zeros(Dtype::F32, &[floats])?;
        let mut buffer = group.heap().alloc(bytes)?;
        let mut target = group.heap().alloc(bytes)?;
        let deadline = Instant::now() + TIMEOUT;
        let (mut of_owned, mut of_shared) = (Vec::new(), Vec::new());
        let samples = ((self.seconds * 1e9) as usize / (times * (bytes / 2 + 3000))).clamp(7, 60);
        for _ in 0..samples {
            self.mesh.barrier()?;
            let mut i = 0;
            let plain = time(times, || {
                i += 1;
                raw_write(&mut buffer, i, deadline)?;
                raw_read(&buffer)
            })?;
            self.mesh.barrier()?;
            let mut given = Some(buffer);
            let raw = time(times, || {
                i += 1;
                let mut buffer = given.take().context("bench: no buffer")?;
                raw_write(&mut buffer, i, deadline)?;
                let buffer = group
                    .all_reduce(buffer, Dtype::F32, consort_types::Reduce::Sum)?
                    .wait(deadline)?
                    .remove(0);
                raw_read(&buffer)?;
                given = Some(buffer);
                Ok(())
            })?;
            buffer = given.context("bench: no buffer")?;
            self.mesh.barrier()?;
            let update = |x: &mut Tensor, i: usize| x.update(|elements| fill(elements, i));
            let tensor_plain = time(times, || {
                i += 1;
                update(&mut x, i)?;
                Ok(x.read(look)?)
            })?;
            self.mesh.barrier()?;
            let mut given = Some(x);
            let tensor = time(times, || {
                i += 1;
                let mut x = given.take().context("bench: no tensor")?;
                update(&mut x, i)?;
                let y = self.mesh.all_reduce(x, Reduce::Sum)?;
                y.read(look)?;
                given = Some(y);
                Ok(())
            })?;
            x = given.context("bench: no tensor")?;
            of_owned.push((tensor - tensor_plain, raw - plain));
            self.mesh.barrier()?;
            let copied = time(times, || {
                i += 1;
                update(&mut other, i)?;
                let y = self.mesh.all_reduce(&other, Reduce::Sum)?;
                Ok(y.read(look)?)
            })?;
            self.mesh.barrier()?;
            let copy = time(times, || {
                let from = buffer.bytes()?;
                target.bytes_mut(deadline)?.copy_from_slice(&from);
                black_box(&target);
                Ok(())
            })?;
            of_shared.push((copied - tensor_plain, raw - plain + copy));
        }
        if self.wants(&owned) {
            self.show(&owned, "the group's own, in place", &of_owned);
        }
        if self.wants(&shared) {
            self.show(&shared, "the group's own and a copy", &of_shared);
        }
        Ok(())
    }

    fn kernels(&self) -> anyhow::Result<()> {
        let (a, b) = (Tensor::uniform(Dtype::F32, &[LARGE], 1)?, Tensor::uniform(Dtype::F32, &[LARGE], 2)?);
        let (x, y) = (a.to_vec::<f32>()?, b.to_vec::<f32>()?);
        let mut z = vec![0f32; LARGE];
        let plain = |z: &mut Vec<f32>| {
            for ((z, x), y) in z.iter_mut().zip(&x).zip(&y) {
                *z = x + y;
            }
            black_box(z);
            Ok(())
        };
        self.case("add_16m", "a plain loop", || done(a.add(&b)), || plain(&mut z), 1.0)?;
        let copy = |z: &mut Vec<f32>| {
            z.copy_from_slice(&x);
            black_box(z);
            Ok(())
        };
        let rows = a.reshape(&[LARGE / 1024, 1024])?;
        let weight = Tensor::ones(Dtype::F32, &[1024])?;
        let moved = "a copy of the bytes it moves";
        self.case("softmax_16m", moved, || done(rows.softmax(1)), || copy(&mut z), 1.0)?;
        self.case("rms_norm_16m", moved, || done(rows.rms_norm(&weight, 1e-6)), || copy(&mut z), 1.0)?;
        self.case("sum_16m", moved, || done(rows.sum(&[1], false)), || copy(&mut z), 0.5)?;
        self.products()?;
        let (s, t) = (Tensor::from_slice(&[1f32; 8], &[8])?, Tensor::from_slice(&[2f32; 8], &[8])?);
        self.beside("add_8_floats", "0.25 us", || done(s.add(&t)), 250.0)
    }

    fn products(&self) -> anyhow::Result<()> {
        const N: usize = 1024;
        let (a, b) = (Tensor::uniform(Dtype::F32, &[N, N], 1)?, Tensor::uniform(Dtype::F32, &[N, N], 2)?);
        let (x, y, mut z) = (a.to_vec::<f32>()?, b.to_vec::<f32>()?, vec![0f32; N * N]);
        let alone = || {
            gemm_alone(N, &x, &y, &mut z);
            black_box(&z);
            Ok(())
        };
        self.case("matmul_1024", "the product alone", || done(a.matmul(&b)), alone, 1.0)?;
        if !self.wants("matmul_skinny") {
            return Ok(());
        }
        let matrix = Tensor::uniform(Dtype::F32, &[N, 1408], 3)?;
        let vector = Tensor::uniform(Dtype::F32, &[1, N], 4)?;
        let elements = matrix.to_vec::<f32>()?;
        let read = || {
            look(&elements);
            Ok(())
        };
        let numpy = numpy_skinny();
        if let Some(limit) = numpy {
            self.beside("matmul_skinny_read", "numpy in f32", read, limit)?;
        }
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let (matrix, vector) = (matrix.cast(dtype)?, vector.cast(dtype)?);
            let name = format!("matmul_skinny_{dtype}");
            let ours = || done(vector.matmul(&matrix));
            match numpy {
                Some(limit) => self.beside(&name, "numpy in f32", ours, limit)?,
                None => self.case(&name, "reading the matrix in f32", ours, read, 1.0)?,
            }
        }
        Ok(())
    }

    /// A case against a given figure.
    fn beside(
        &self,
        name: &str,
        beside: &str,
        mut ours: impl FnMut() -> anyhow::Result<()>,
        limit: f64,
    ) -> anyhow::Result<()> {
        if !self.wants(name) {
            return Ok(());
        }
        ours()?;
        let times = ((2e6 / time(3, &mut ours)?.max(1.0)) as usize).clamp(1, 100_000);
        let (start, mut pairs) = (Instant::now(), Vec::new());
        while pairs.len() < 5 || start.elapsed().as_secs_f64() < self.seconds {
            pairs.push((time(times, &mut ours)?, limit));
        }
        self.show(name, beside, &pairs);
        Ok(())
    }
}

/// Nanoseconds that numpy, on one thread, takes for (1,1024) x (1024,1408) in f32; `None` without numpy.
fn numpy_skinny() -> Option<f64> {
    let script = "\
import numpy as np, time
a, b = np.random.rand(1, 1024).astype('f4'), np.random.rand(1024, 1408).astype('f4')
ts = []
for _ in range(60):
    t = time.perf_counter()
    for _ in range(20): a @ b
    ts.append((time.perf_counter() - t) / 20)
print(sorted(ts)[30] * 1e9)";
    let mut command = Command::new("python3");
    command.args(["-c", script]);
    for name in ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"] {
        command.env(name, "1");
    }
    String::from_utf8(command.output().ok()?.stdout).ok()?.trim().parse().ok()
}
