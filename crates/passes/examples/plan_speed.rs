//! How long it takes to plan programs of 10, 10,000 and 100,000 nodes: `cargo run --release --example plan_speed`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use consort_ir::mesh::Rank;
use consort_ir::ops::OpTable;
use consort_ir::program::Program;
use consort_ir::text::parse;
use consort_passes::{At, plan, report};

/// Layers of ten nodes each: matmuls, an all_reduce in flight beside other work, views, an update in place.
fn layers(n: usize) -> Result<Program, Box<dyn std::error::Error>> {
    let mut text =
        "mesh (tp: 2)\n\nfunc @f(v0: f32[64,64]{tp}, v1: f32[64,64]{tp}) -> f32[64,64]{tp} {\n".to_string();
    let (mut x, mut next) = (0, 2);
    for _ in 0..n {
        let v = |i: usize| next + i;
        writeln!(text, "v{} = matmul v{x}, v1 : f32[64,64]{{tp}}", v(0))?;
        writeln!(text, "v{} = relu v{} : f32[64,64]{{tp}}", v(1), v(0))?;
        writeln!(text, "v{} = matmul v{}, v1 : f32[64,64]{{tp}}", v(2), v(1))?;
        writeln!(text, "v{} = all_reduce_start[reduce=sum, over=tp] v{} : pending<f32[64,64]>", v(3), v(2))?;
        writeln!(text, "v{} = permute[dims=[1, 0]] v{x} : f32[64,64]{{tp}}", v(4))?;
        writeln!(text, "v{} = neg v{} : f32[64,64]{{tp}}", v(5), v(4))?;
        writeln!(text, "v{} = wait v{} : f32[64,64]", v(6), v(3))?;
        writeln!(text, "v{} = add v{}, v{} : f32[64,64]{{tp}}", v(7), v(6), v(5))?;
        writeln!(
            text,
            "v{} = slice[start=[0, 0], size=[1, 64], step=[1, 1]] v{} : f32[1,64]{{tp}}",
            v(8),
            v(5)
        )?;
        writeln!(text, "v{} = update_slice[start=[3, 0]] v{}, v{} : f32[64,64]{{tp}}", v(9), v(7), v(8))?;
        x = v(9);
        next += 10;
    }
    writeln!(text, "return v{x}\n}}")?;
    Ok(parse(&text, &OpTable::built_in())?.program)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let symbols = BTreeMap::new();
    let at = At { rank: Rank(0), symbols: &symbols, donated: &[true] };
    for n in [1, 1_000, 10_000] {
        let program = layers(n)?;
        let func = &program.funcs[0];
        let mut best = f64::INFINITY;
        for _ in 0..(20_000 / n).clamp(5, 1000) {
            let begin = Instant::now();
            let planned = plan(&program.mesh, func, &at)?;
            best = best.min(begin.elapsed().as_secs_f64());
            drop(std::hint::black_box(planned));
        }
        let report = report(&program.mesh, &plan(&program.mesh, func, &at)?);
        let (takes, needs) = (report.peak_bytes, report.live_bytes);
        println!("{} nodes: {:.1} us, takes {takes} bytes, needs {needs}", func.body.nodes.len(), best * 1e6);
    }
    Ok(())
}
