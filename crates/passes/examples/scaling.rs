//! How long the passes take on programs of 10,000 and 100,000 nodes, or as many as the arguments say:
//! `cargo run --release -p consort-passes --example scaling`.

use std::time::Instant;

use consort_ir::builder::Builder;
use consort_ir::index::{Index, Sym};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Add, AllReduceStart, Constant, Elements, Mul, Neg, Reshape, Tanh};
use consort_ir::program::Program;
use consort_ir::types::TensorType;
use consort_ir::verify::verify;
use consort_passes::{PASSES, PassCx, Stage, simplify};
use consort_types::{Axes, Axis, Dtype, Failure, GroupName, Reduce};

/// A chain of elementwise ops with an occasional all_reduce; `useful` of four steps stay, the others can be folded,
/// shared or removed.
fn chain(nodes: usize, useful: usize) -> Result<Program, Box<Failure>> {
    let mesh = Mesh::new([("dp", 2), ("tp", 4)]).unwrap_or_default();
    let mut b = Builder::new(&mesh, "f");
    let tp = Axes::one(Axis(1));
    let shape = vec![Index::sym(Sym::Backed(0)), Index::constant(64)];
    let mut x = b.param(TensorType::new(Dtype::F32, shape.clone(), mesh.all_axes()));
    let y = b.param(TensorType::new(Dtype::F32, shape.clone(), tp));
    for step in 0..nodes / 4 {
        if step % 4 < useful {
            let z = b.one(Tanh {}, &[x])?;
            let z = b.one(Mul {}, &[z, y])?;
            let start = AllReduceStart { reduce: Reduce::Sum, over: GroupName::Axes(tp) };
            let z = if step % 8 == 0 { b.start_wait(start, &[z])?[0] } else { b.one(Add {}, &[z, y])? };
            x = b.one(Add {}, &[z, x])?;
        } else if step % 4 == 1 {
            let value = Elements::Float(1.0);
            let one = b.one(Constant { dtype: Dtype::F32, shape: shape.clone(), value }, &[])?;
            let z = b.one(Mul {}, &[x, one])?;
            let z = b.one(Reshape { shape: vec![Index::product(&shape)] }, &[z])?;
            x = b.one(Reshape { shape: shape.clone() }, &[z])?;
        } else if step % 4 == 2 {
            let (a, c) = (b.one(Neg {}, &[x])?, b.one(Neg {}, &[x])?);
            let z = b.one(Add {}, &[a, c])?;
            x = b.one(Mul {}, &[z, y])?;
        } else {
            let start = AllReduceStart { reduce: Reduce::Max, over: GroupName::Axes(tp) };
            let z = b.start_wait(start, &[x])?[0];
            let z = b.one(Tanh {}, &[z])?;
            b.one(Add {}, &[z, x])?;
        }
    }
    let func = b.finish(&[x]);
    Ok(Program { mesh: mesh.clone(), funcs: vec![func] })
}

/// Seconds for all passes, the rewrites and time of each, and the number of nodes left.
fn measure(program: &Program) -> Result<(f64, String, usize), String> {
    let mut stages = String::new();
    let begin = Instant::now();
    let mut last = begin;
    let mut watch = |stage: Stage<'_>| {
        let ms = last.elapsed().as_secs_f64() * 1e3;
        match stage {
            Stage::Pass(ran) => stages += &format!("  {} {} in {ms:.1} ms", ran.pass.name, ran.rewrites),
            _ => stages += &format!(", verified in {ms:.1} ms"),
        }
        last = Instant::now();
    };
    let result = simplify(program, PASSES, &mut PassCx::watched(&mut watch));
    let seconds = begin.elapsed().as_secs_f64();
    let result = result.map_err(|error| error.to_string())?;
    Ok((seconds, stages, result.funcs[0].body.nodes.len()))
}

fn main() -> Result<(), String> {
    let mut sizes: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    if sizes.is_empty() {
        sizes = vec![10_000, 100_000];
    }
    for (useful, what) in [(4, "nothing to do"), (1, "three of four steps to simplify")] {
        println!("{what}");
        let mut before = None;
        for nodes in sizes.iter().copied() {
            let program = chain(nodes, useful).map_err(|error| error.message())?;
            let begin = Instant::now();
            if let Some(error) = verify(&program).first() {
                return Err(error.headline());
            }
            let verified = begin.elapsed().as_secs_f64() * 1e3;
            // The best of several: other load on the machine only adds to it.
            let mut best = measure(&program)?;
            for _ in 0..6 {
                let next = measure(&program)?;
                if next.0 < best.0 {
                    best = next;
                }
            }
            let (seconds, stages, left) = best;
            let times =
                before.map_or(String::new(), |before| format!(", {:.1} times as long", seconds / before));
            println!(
                "{nodes} nodes, {left} left: {:.1} ms{times}; to verify: {verified:.1} ms",
                seconds * 1e3
            );
            println!("{stages}");
            before = Some(seconds);
        }
    }
    Ok(())
}
