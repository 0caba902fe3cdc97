//! Programs of many ops for `consort bench compile`: how long each stage takes on them.

use std::time::Instant;

use anyhow::anyhow;
use consort::Dtype;
use consort_ir::builder::Builder;
use consort_ir::index::Index;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Add, AllReduceStart, Mul, Permute, Reshape, Sigmoid, Tanh};
use consort_ir::program::{Func, Program};
use consort_ir::types::TensorType;
use consort_passes::{Binding, PassCx, Stage, compile, report};
use consort_runtime::device::Cpu;
use consort_runtime::execute::Exec;
use consort_types::{Failure, GroupName, Rank, Reduce};
use serde_json::{Value, json};

/// Takes a program of `ops` ops through all stages; returns how long each took.
pub(crate) fn measure(case: &str, ops: usize) -> anyhow::Result<Value> {
    let mesh = Mesh::new([("dp", 2)]).map_err(|error| anyhow!("bench: {error:?}"))?;
    let func = chain(&mesh, ops).map_err(|failure| anyhow!("bench: {failure}"))?;
    let program = Program { mesh, funcs: vec![func] };
    let ops = program.funcs[0].body.nodes.len();
    let mut start = Instant::now();
    let mut lap = || {
        let ms = start.elapsed().as_secs_f64() * 1e3;
        start = Instant::now();
        ms
    };
    let (mut verify_ms, mut simplify_ms, mut plan_ms, mut hazards_ms) = (0.0, 0.0, 0.0, 0.0);
    let mut watch = |stage: Stage<'_>| {
        let stage_ms = match stage {
            Stage::Verified(_) => &mut verify_ms,
            Stage::Pass(_) => &mut simplify_ms,
            Stage::Planned => &mut plan_ms,
            Stage::Checked => &mut hazards_ms,
        };
        *stage_ms += lap();
    };
    let cx = &mut PassCx::watched(&mut watch);
    let decided = compile(&program, cx)?;
    let binding = Binding { rank: Rank(0), symbols: &Default::default(), donated: &[] };
    let planned = decided.bind("chain", &binding, cx)?;
    lap();
    let costs = report(decided.mesh(), &planned);
    let report_ms = lap();
    Exec::lower(decided.mesh(), &planned, &Cpu::default())?;
    let lower_ms = lap();
    let checks = verify_ms + hazards_ms;
    let all = checks + simplify_ms + plan_ms + report_ms + lower_ms;
    let tenths = |ms: f64| (ms * 10.0).round() / 10.0;
    Ok(json!({
        "bench": "compile", "case": case, "compile_ms": tenths(all), "call_us": null,
        "copied_bytes": costs.copied_bytes, "peak_bytes": costs.peak_bytes, "live_bytes": costs.live_bytes,
        "breaks": 0, "graphs": 1, "ops": ops, "ops_left": planned.body.nodes.len(),
        "verify_ms": tenths(verify_ms), "simplify_ms": tenths(simplify_ms), "plan_ms": tenths(plan_ms),
        "hazards_ms": tenths(hazards_ms), "report_ms": tenths(report_ms), "lower_ms": tenths(lower_ms),
        "checks_share": (checks / all * 1000.0).round() / 1000.0,
    }))
}

/// A chain of elementwise ops and views on small tensors, with a sum over all ranks after every 50.
fn chain(mesh: &Mesh, ops: usize) -> Result<Func, Box<Failure>> {
    let shape = |sizes: &[i64]| sizes.iter().map(|size| Index::constant(*size)).collect::<Vec<_>>();
    let mut builder = Builder::new(mesh, "chain");
    let ty = TensorType::new(Dtype::F32, shape(&[8, 8]), mesh.all_axes());
    let (mut x, w) = (builder.param(ty.clone()), builder.param(ty));
    let over = GroupName::Axes(mesh.all_axes());
    for op in 0..ops {
        x = match op % 50 {
            49 => builder.start_wait(AllReduceStart { reduce: Reduce::Avg, over }, &[x])?[0],
            n => match n % 7 {
                0 => builder.one(Add {}, &[x, w])?,
                1 => builder.one(Tanh {}, &[x])?,
                2 => builder.one(Permute { dims: vec![1, 0] }, &[x])?,
                3 => builder.one(Mul {}, &[x, w])?,
                4 => builder.one(Reshape { shape: shape(&[64]) }, &[x])?,
                5 => builder.one(Sigmoid {}, &[x])?,
                _ => builder.one(Reshape { shape: shape(&[8, 8]) }, &[x])?,
            },
        };
    }
    Ok(builder.finish(&[x]))
}
