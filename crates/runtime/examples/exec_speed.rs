//! The overhead of the executor over the kernels that it calls: `cargo run --release -p consort-runtime --example
//! exec_speed`.
#![allow(clippy::unwrap_used, reason = "it measures what is known to work")]

use std::fmt::Write;
use std::hint::black_box;
use std::time::{Duration, Instant};

use consort_comm::{Group, spawn};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, Neg, OpTable};
use consort_ir::text::parse;
use consort_runtime::device::Cpu;
use consort_runtime::execute::{ArgValue, Exec, RunCx};
use consort_runtime::kernels::{Arg, KernelCx, View, ViewMut, find};
use consort_runtime::threads::Threads;
use consort_types::{Dtype, Rank, Reduce};

/// The fastest of many runs, in nanoseconds, each of `times` calls.
fn best(times: usize, mut work: impl FnMut()) -> f64 {
    let run = |_| {
        let start = Instant::now();
        (0..times).for_each(|_| work());
        start.elapsed().as_nanos() as f64 / times as f64
    };
    (0..30).map(run).fold(f64::INFINITY, f64::min)
}

/// A plan that negates 16 numbers `ops` times.
fn chain(ops: usize) -> String {
    let mut text = "mesh ()\n\nfunc @f(v0: f32[16] @arg0+0x0) -> f32[16]\nplan (rank 0, arg0: 0x40, arena: 0x80, out0: 0x40) {\n".to_string();
    for i in 1..=ops {
        let place = if i == ops { "out0+0x0".to_string() } else { format!("arena+{:#x}", i % 2 * 64) };
        let _ = writeln!(text, "    v{i} = neg v{} : f32[16] @{place}", i - 1);
    }
    text + &format!("    return v{ops}\n}}\n")
}

fn lowered(text: &str, rank: usize) -> Exec {
    let mut program = parse(text, &OpTable::built_in()).unwrap().program;
    program.funcs[0].plan.as_mut().unwrap().rank = Rank(rank as u32);
    Exec::lower(&program.mesh, &program.funcs[0], &Cpu::default()).unwrap()
}

fn measure(all: &Group, text: &str, times: usize) -> f64 {
    let mut exec = lowered(text, all.rank());
    let groups: Vec<Option<Group>> = exec.groups().iter().map(|_| Some(all.clone())).collect();
    let timeout = Duration::from_secs(10);
    let cx =
        RunCx { heap: all.heap(), groups: &groups, device: &Cpu::default(), timeout, clock: &Instant::now };
    let mut args = [ArgValue::Tensor { buffer: all.heap().alloc_from(&[0; 64]).unwrap(), pending: None }];
    best(times, || drop(black_box(exec.run(&cx, &mut args).unwrap())))
}

fn main() {
    spawn(1, |all| {
        let (mesh, kernel) = (Mesh::default(), find("neg").unwrap());
        let sizes = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &Default::default() };
        let cx = KernelCx { sizes, threads: &Threads::ONE };
        let (from, mut to) = ([0u64; 8], [0u64; 8]);
        let alone = best(10_000, || {
            let bytes = bytemuck::cast_slice(black_box(&from));
            let x = Arg::View(View { dtype: consort_types::Dtype::F32, shape: &[16], strides: &[1], bytes });
            let out = ViewMut {
                dtype: consort_types::Dtype::F32,
                shape: &[16],
                bytes: bytemuck::cast_slice_mut(&mut to),
            };
            (kernel.run)(&cx, &Neg {}, &[x], &mut [out]).unwrap();
        });
        let (one, many) = (measure(&all, &chain(1), 10_000), measure(&all, &chain(101), 500));
        println!(
            "a kernel alone {alone:.0} ns; a call of 1 op {one:.0} ns, each further op {:.0} ns",
            (many - one) / 100.0
        );
    });
    let text =
        "mesh (tp: 2)\n\nfunc @f(v0: f32[16]{tp} @arg0+0x0 donated) -> f32[16]\nplan (rank 0, arg0: 0x40) {
    v1 = all_reduce_start[reduce=sum, over=tp] v0 : pending<f32[16]> @arg0+0x0 queue tp #0
    v2 = wait v1 : f32[16] @arg0+0x0
    return v2\n}\n";
    let times = spawn(2, |all| {
        let mut buffer = Some(all.heap().alloc_from(&[0; 64]).unwrap());
        let alone = best(5_000, || {
            let pending = all.all_reduce(buffer.take().unwrap(), Dtype::F32, Reduce::Sum).unwrap();
            buffer = Some(pending.wait_within(Duration::from_secs(10)).unwrap().remove(0));
        });
        (alone, measure(&all, text, 5_000))
    });
    println!(
        "all_reduce of 64 bytes on 2 threads: {:.0} ns alone, {:.0} ns as a call",
        times[0].0, times[0].1
    );
}
