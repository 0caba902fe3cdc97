//! Parse, verify and print a large program: time, and how it grows from 10,000 to 100,000 ops.
//!
//! `cargo bench -p consort-ir --bench text` (add `-- --json` for one object a line). The bars: 100,000 ops in
//! under 2 s, and at most 12 times the time of 10,000.

use std::time::Instant;

use consort_ir::builder::Builder;
use consort_ir::index::{Index, Sym};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Add, AllReduceStart, Gelu, Matmul, OpTable, Reshape, RmsNorm, Slice, Wait};
use consort_ir::program::Program;
use consort_ir::text::{parse, print};
use consort_ir::types::TensorType;
use consort_ir::verify::verify;
use consort_types::Site;
use consort_types::{Axes, Dtype, GroupName, Reduce};

/// Layers of a tensor-parallel block, ten ops each, with a symbolic batch size.
fn program(ops: usize) -> Program {
    let mesh = Mesh::new([("dp", 2), ("tp", 4)]).expect("a mesh");
    let (dp, tp) = (mesh.axis("dp").expect("dp"), mesh.axis("tp").expect("tp"));
    let shape = |sizes: &[i64]| sizes.iter().map(|n| Index::constant(*n)).collect::<Vec<_>>();
    let mut b = Builder::new(&mesh, "f");
    let batch = Index::sym(Sym::Backed(0));
    let x = vec![batch.clone(), Index::constant(512)];
    let mut x = b.param(TensorType::new(Dtype::F32, x, Axes::one(dp)));
    let up = b.param(TensorType::new(Dtype::F32, shape(&[512, 128]), Axes::one(tp)));
    let down = b.param(TensorType::new(Dtype::F32, shape(&[128, 512]), Axes::one(tp)));
    let weight = b.param(TensorType::new(Dtype::F32, shape(&[512]), Axes::NONE));
    let over = GroupName::Axes(Axes::one(tp));
    let fits = "the layer is well typed";
    for layer in 0..ops / 10 {
        b.set_site(Some(Site::new("model.rs", layer as u32 + 1)));
        let normal = b.one(RmsNorm { eps: 1e-5 }, &[x, weight]).expect(fits);
        let hidden = b.one(Matmul {}, &[normal, up]).expect(fits);
        let active = b.one(Gelu {}, &[hidden]).expect(fits);
        let part = b.one(Matmul {}, &[active, down]).expect(fits);
        let pending = b.one(AllReduceStart { reduce: Reduce::Sum, over }, &[part]).expect(fits);
        let flat = b.one(Reshape { shape: vec![&batch * &Index::constant(512)] }, &[normal]).expect(fits);
        let whole = vec![batch.clone(), Index::constant(512)];
        let back = b.one(Reshape { shape: whole.clone() }, &[flat]).expect(fits);
        let slice = Slice { start: shape(&[0, 0]), size: whole, step: vec![1, 1] };
        let same = b.one(slice, &[back]).expect(fits);
        let sum = b.op(Wait {}, &[pending]).expect(fits);
        x = b.one(Add {}, &[sum[0], same]).expect(fits);
    }
    let func = b.finish(&[x]);
    Program { mesh, funcs: vec![func] }
}

/// The median of five runs, in seconds: parse, verify, print.
fn measure(ops: usize, table: &OpTable) -> [f64; 3] {
    let text = print(&program(ops));
    let run = || {
        let start = Instant::now();
        let parsed = parse(&text, table).expect("printed text parses");
        let parse = start.elapsed();
        let errors = verify(&parsed.program);
        let verify = start.elapsed();
        let again = print(&parsed.program);
        let print = start.elapsed();
        assert!(errors.is_empty() && again == text);
        [parse, verify - parse, print - verify].map(|time| time.as_secs_f64())
    };
    let runs: Vec<[f64; 3]> = (0..5).map(|_| run()).collect();
    [0, 1, 2].map(|stage| {
        let mut times: Vec<f64> = runs.iter().map(|run| run[stage]).collect();
        times.sort_by(f64::total_cmp);
        times[2]
    })
}

fn main() {
    let table = OpTable::built_in();
    let json = std::env::args().any(|arg| arg == "--json");
    let (small, large) = (measure(10_000, &table), measure(100_000, &table));
    let total = |times: [f64; 3]| times.iter().sum::<f64>();
    for (ops, times) in [(10_000, small), (100_000, large)] {
        let [parse, verify, print] = times.map(|seconds| seconds * 1e3);
        if json {
            println!(
                "{{\"bench\":\"text\",\"ops\":{ops},\"parse_ms\":{parse:.2},\"verify_ms\":{verify:.2},\"print_ms\":{print:.2}}}"
            );
        } else {
            println!("{ops:>7} ops   parse {parse:8.2} ms   verify {verify:8.2} ms   print {print:8.2} ms");
        }
    }
    let ratio = total(large) / total(small);
    if json {
        println!("{{\"bench\":\"text\",\"total_s\":{:.3},\"ratio\":{ratio:.2}}}", total(large));
    } else {
        println!("100,000 ops: {:.3} s in all (bar: 2), {ratio:.1} times 10,000 ops (bar: 12)", total(large));
    }
}
