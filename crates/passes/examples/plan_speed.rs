//! How long it takes to simplify and plan programs of 10, 10,000 and 100,000 nodes, and to check them: the program
//! itself, and the hazards of its plan. `cargo run --release -p consort-passes --example plan_speed`, with files of
//! programs to measure those.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use consort_ir::index::Sym;
use consort_ir::ops::OpTable;
use consort_ir::program::{Func, Program};
use consort_ir::text::{parse, run_lines};
use consort_ir::verify::{hazards, verify};
use consort_oracle::bind;
use consort_passes::{Binding, PASSES, PassCx, PlanReport, plan, report, simplify};
use consort_types::Rank;

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

/// Steps of nine nodes each on one array with many rows: a column is summed in place beside another that is written, and
/// a row is received.
fn columns(n: usize) -> Result<Program, Box<dyn std::error::Error>> {
    let mut text =
        "mesh (tp: 2)\n\nfunc @f(v0: f32[256,64]{tp}, v1: f32[256,1]{tp}) -> f32[256,64]{tp} {\n".to_string();
    let (mut x, mut next) = (0, 2);
    for step in 0..n {
        let (v, column) = (|i: usize| next + i, step % 64);
        writeln!(
            text,
            "v{} = slice[start=[0, {column}], size=[256, 1], step=[1, 1]] v{x} : f32[256,1]{{tp}}",
            v(0)
        )?;
        writeln!(text, "v{} = all_reduce_start[reduce=sum, over=tp] v{} : pending<f32[256,1]>", v(1), v(0))?;
        writeln!(text, "v{} = wait v{} : f32[256,1]", v(2), v(1))?;
        writeln!(text, "v{} = update_slice[start=[0, {column}]] v{x}, v{} : f32[256,64]{{tp}}", v(3), v(2))?;
        writeln!(
            text,
            "v{} = update_slice[start=[0, {}]] v{}, v1 : f32[256,64]{{tp}}",
            v(4),
            (column + 7) % 64,
            v(3)
        )?;
        writeln!(
            text,
            "v{} = slice[start=[{column}, 0], size=[1, 64], step=[1, 1]] v{} : f32[1,64]{{tp}}",
            v(5),
            v(4)
        )?;
        writeln!(
            text,
            "v{} = exchange_start[send=[ring(+1) tag 0], recv=[ring(-1) tag 0], over=tp] v{}, v{} : pending<f32[1,64]{{tp}}>",
            v(6),
            v(5),
            v(5)
        )?;
        writeln!(text, "v{} = wait v{} : f32[1,64]{{tp}}", v(7), v(6))?;
        writeln!(
            text,
            "v{} = update_slice[start=[{column}, 0]] v{}, v{} : f32[256,64]{{tp}}",
            v(8),
            v(4),
            v(7)
        )?;
        x = v(8);
        next += 9;
    }
    writeln!(text, "return v{x}\n}}")?;
    Ok(parse(&text, &OpTable::built_in())?.program)
}

/// The least time of several runs, in seconds: other load on the machine only adds to it.
fn best<T>(runs: usize, mut f: impl FnMut() -> T) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..runs {
        let begin = Instant::now();
        let made = f();
        best = best.min(begin.elapsed().as_secs_f64());
        drop(std::hint::black_box(made));
    }
    best
}

/// Microseconds of each stage: simplify, plan, verify, hazards.
type Times = [f64; 4];

/// Measures a program for rank 0 and these symbols.
fn measure(
    program: &Program,
    func: &Func,
    symbols: &BTreeMap<Sym, i64>,
    runs: usize,
) -> Result<(Times, Func), Box<dyn std::error::Error>> {
    let program = Program { mesh: program.mesh.clone(), funcs: vec![func.clone()] };
    let binding = Binding { rank: Rank(0), symbols, donated: &[true] };
    let planned = plan(&program.mesh, func, &binding)?;
    if let Some(error) = verify(&program).first().or(hazards(&program.mesh, &planned).first()) {
        return Err(error.headline().into());
    }
    let times = [
        best(runs, || simplify(&program, PASSES, &mut PassCx::default())),
        best(runs, || plan(&program.mesh, func, &binding)),
        best(runs, || verify(&program)),
        best(runs, || hazards(&program.mesh, &planned)),
    ];
    Ok((times.map(|seconds| seconds * 1e6), planned))
}

fn text([simplified, planned, verified, checked]: Times) -> String {
    format!(
        "simplify {simplified:.1} us, plan {planned:.1} us; verify {verified:.1} us, hazards {checked:.1} us"
    )
}

/// The programs of some files, with the inputs of their first run lines.
fn files(paths: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let (mut all, mut n) = ([0.0; 4], 0);
    for path in paths {
        let source = std::fs::read_to_string(path)?;
        let program = parse(&source, &OpTable::built_in())?.program;
        let lines = run_lines(&source)?;
        let Some((line, inputs)) = lines.iter().find_map(|line| Some((line, line.inputs(&program).ok()?)))
        else {
            continue;
        };
        let Some(func) = program.func(&line.func).filter(|func| func.plan.is_none()) else { continue };
        let Ok(symbols) = bind(&program.mesh, func, &inputs) else { continue };
        let Ok((times, _)) = measure(&program, func, &symbols[0], 200) else { continue };
        println!("{path}: {}", text(times));
        (0..4).for_each(|i| all[i] += times[i]);
        n += 1;
    }
    println!("{n} programs: {}", text(all));
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    if !paths.is_empty() {
        return files(&paths);
    }
    for (what, make) in [("layers", layers as fn(usize) -> _), ("columns", columns)] {
        for n in [1, 1_000, 10_000] {
            let program: Program = make(n)?;
            let func = &program.funcs[0];
            let runs = (20_000 / n).clamp(5, 1000);
            let (times, planned) = measure(&program, func, &BTreeMap::new(), runs)?;
            let PlanReport { peak_bytes, live_bytes, .. } = report(&program.mesh, &planned);
            let nodes = func.body.nodes.len();
            println!("{what}, {nodes} nodes: {}; takes {peak_bytes} bytes, needs {live_bytes}", text(times));
        }
    }
    Ok(())
}
