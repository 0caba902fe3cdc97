//! Larger programs take little more memory than they need, and copy nothing for communication. Gradients of loops and of
//! slices have no tensors beside those that they keep and give. Sizes that exceed the address space are refused.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::collections::BTreeMap;
use std::fmt::Write;

use consort_ir::index::Sym;
use consort_ir::ops::OpTable;
use consort_ir::program::Program;
use consort_ir::text::{parse, print};
use consort_ir::verify::{hazards, verify};
use consort_passes::{Binding, PASSES, PassCx, PlanReport, Wanted, gradient, plan, report, simplify};
use consort_types::Rank;

/// Checks that the plan of a program's only function on rank 1 takes little more memory than needed and copies nothing.
fn close(name: &str, text: &str, donated: &[bool]) {
    let Program { mesh, funcs } = parse(text, &OpTable::built_in()).unwrap().program;
    let binding = Binding { rank: Rank(1), symbols: &BTreeMap::new(), donated };
    let func = plan(&mesh, &funcs[0], &binding).unwrap();
    let PlanReport { peak_bytes: takes, live_bytes: needs, copies, .. } = report(&mesh, &func);
    println!("{name}: takes {takes}, needs {needs}, {:.3}", takes as f64 / needs as f64);
    let plan = Program { mesh, funcs: vec![func] };
    assert!(takes * 20 <= needs * 21, "{name}: takes {takes}, needs {needs}\n{}", print(&plan));
    assert_eq!(copies, [], "{name}");
    assert_eq!(verify(&plan), []);
    assert_eq!(hazards(&plan.mesh, &plan.funcs[0]), []);
}

/// Writes nodes in sequence and returns their names.
struct Text {
    text: String,
    next: usize,
}

impl Text {
    fn node(&mut self, op: &str, ty: &str) -> String {
        let name = format!("v{}", self.next);
        self.next += 1;
        writeln!(self.text, "    {name} = {op} : {ty}").unwrap();
        name
    }
}

/// Layers of a transformer whose heads and hidden features are split over ranks.
fn transformer(layers: usize) -> String {
    let head = "mesh (tp: 4)\n\nfunc @f(v0: f32[512,512], v1: f32[512], v2: f32[512,128]{tp}, v3: f32[128,512]{tp}, v4: f32[512,512]{tp}, v5: f32[512,512]{tp}) -> f32[512,512] {\n";
    let mut t = Text { text: head.to_string(), next: 6 };
    let (whole, split, heads) = ("f32[512,512]", "f32[512,512]{tp}", "f32[4,2,128,64]{tp}");
    let mut x = "v0".to_string();
    for _ in 0..layers {
        let normal = t.node(&format!("rms_norm[eps=1e-5] {x}, v1"), whole);
        let mut project = || {
            let q = t.node(&format!("matmul {normal}, v2"), "f32[512,128]{tp}");
            let q = t.node(&format!("reshape[shape=[4, 128, 2, 64]] {q}"), "f32[4,128,2,64]{tp}");
            t.node(&format!("permute[dims=[0, 2, 1, 3]] {q}"), heads)
        };
        let (q, k, v) = (project(), project(), project());
        let a = t.node(&format!("attention[scale=0.125, causal=0] {q}, {k}, {v}"), heads);
        let a = t.node(&format!("permute[dims=[0, 2, 1, 3]] {a}"), "f32[4,128,2,64]{tp}");
        let a = t.node(&format!("reshape[shape=[512, 128]] {a}"), "f32[512,128]{tp}");
        let o = t.node(&format!("matmul {a}, v3"), split);
        let p = t.node(&format!("all_reduce_start[reduce=sum, over=tp] {o}"), "pending<f32[512,512]>");
        let o = t.node(&format!("wait {p}"), whole);
        x = t.node(&format!("add {x}, {o}"), whole);
        let normal = t.node(&format!("rms_norm[eps=1e-5] {x}, v1"), whole);
        let h = t.node(&format!("matmul {normal}, v4"), split);
        let h = t.node(&format!("gelu {h}"), split);
        let o = t.node(&format!("matmul {h}, v5"), split);
        let p = t.node(&format!("all_reduce_start[reduce=sum, over=tp] {o}"), "pending<f32[512,512]>");
        let o = t.node(&format!("wait {p}"), whole);
        x = t.node(&format!("add {x}, {o}"), whole);
    }
    t.text + &format!("    return {x}\n}}\n")
}

/// A step of data-parallel training: gradients are computed into one bucket, averaged, and the weights updated.
fn training_step(layers: usize, d: usize) -> String {
    let (matrix, square) = (format!("f32[{d},{d}]"), d * d);
    let (ty, flat) = (format!("{matrix}{{dp}}"), format!("f32[{square}]"));
    let params: String = (1..=layers).map(|i| format!(", v{i}: {matrix}")).collect();
    let results = vec![&matrix[..]; layers].join(", ");
    let head = format!("mesh (dp: 2)\n\nfunc @f(v0: {ty}{params}) -> ({results}) {{\n");
    let mut t = Text { text: head, next: layers + 1 };
    let mut kept = vec!["v0".to_string()];
    for i in 1..=layers {
        let h = t.node(&format!("matmul {}, v{i}", kept[i - 1]), &ty);
        kept.push(t.node(&format!("relu {h}"), &ty));
    }
    let mut g = kept[layers].clone();
    let mut gradients = Vec::new();
    for i in (1..=layers).rev() {
        let x = t.node(&format!("permute[dims=[1, 0]] {}", kept[i - 1]), &ty);
        let w = t.node(&format!("matmul {x}, {g}"), &ty);
        gradients.push(t.node(&format!("reshape[shape=[{square}]] {w}"), &format!("{flat}{{dp}}")));
        let back = t.node(&format!("permute[dims=[1, 0]] v{i}"), &matrix);
        g = t.node(&format!("matmul {g}, {back}"), &ty);
    }
    let n = square * layers;
    let bucket = t.node(&format!("concat[dim=0] {}", gradients.join(", ")), &format!("f32[{n}]{{dp}}"));
    let p = t.node(&format!("all_reduce_start[reduce=avg, over=dp] {bucket}"), &format!("pending<f32[{n}]>"));
    let mean = t.node(&format!("wait {p}"), &format!("f32[{n}]"));
    let mut updated = Vec::new();
    for i in (1..=layers).rev() {
        let start = (layers - i) * square;
        let g = t.node(&format!("slice[start=[{start}], size=[{square}], step=[1]] {mean}"), &flat);
        let g = t.node(&format!("reshape[shape=[{d}, {d}]] {g}"), &matrix);
        updated.push(t.node(&format!("sub v{i}, {g}"), &matrix));
    }
    updated.reverse();
    t.text + &format!("    return {}\n}}\n", updated.join(", "))
}

/// A filetest with its sizes made larger.
fn larger(name: &str, sizes: &[(&str, &str)]) -> String {
    let path = format!("{}/../../filetests/programs/{name}.csr", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    sizes.iter().fold(text, |text, (from, to)| text.replace(from, to))
}

#[test]
fn memory_is_close_to_what_is_needed() {
    for given in [&[][..], &[true; 7]] {
        close("transformer", &transformer(8), given);
        close("training step", &training_step(6, 256), given);
        let matrices =
            [("[2,2]", "[256,256]"), ("[2, 2]", "[256, 256]"), ("[2,1]", "[256,1]"), ("[2, 1]", "[256, 1]")];
        close("ring attention", &larger("c4-ring-attention-forward", &matrices), given);
        close("ring kernel", &larger("c2-ring-kernel-on-4-ranks", &[("[3]", "[30000]")]), given);
    }
}

/// The simplified gradient of a program's only function by these arguments, as text, and the peak of its plan without its
/// arguments.
fn of_gradient(text: &str, by: &[usize]) -> (String, usize) {
    let program = parse(text, &OpTable::built_in()).unwrap().program;
    let made = gradient(&program, "f", &Wanted::by(by)).unwrap().program;
    let Program { mesh, funcs } = simplify(&made, PASSES, &mut PassCx::default()).unwrap();
    let binding = Binding { rank: Rank(0), symbols: &BTreeMap::new(), donated: &[] };
    let func = plan(&mesh, &funcs[0], &binding).unwrap();
    assert_eq!(hazards(&mesh, &func), []);
    let peak = report(&mesh, &func).peak_bytes as usize;
    let plan = print(&Program { mesh, funcs: vec![func] });
    println!("{peak} bytes\n{plan}");
    (plan, peak)
}

/// The loop keeps two stacks, what enters each iteration and what leaves it, and gives the gradient of what it slices.
#[test]
fn the_gradient_of_a_scan_copies_no_stack() {
    let (entry, stack) = (1000 * 4, 64 * 1000 * 4);
    for reverse in ["", ", reverse=true"] {
        let text = format!(
            "mesh ()

func @f(v0: f32[1000], v1: f32[64,1000]) -> f32[] {{
    v2 = scan[length=64, carries=1, slices=1{reverse}] v0, v1 : f32[1000] {{
        body(v3: f32[1000], v4: f32[1000]) {{
            v5 = mul v3, v4 : f32[1000]
            v6 = tanh v5 : f32[1000]
            return v6
        }}
    }}
    v7 = sum[dims=[0], keep=false] v2 : f32[]
    return v7
}}
"
        );
        let (plan, peak) = of_gradient(&text, &[0, 1]);
        assert!(!plan.contains("flip"), "{plan}");
        assert!(3 * stack <= peak && peak <= 3 * stack + 8 * entry, "{peak} bytes\n{plan}");
    }
}

/// Of each window the square is added up: its cotangent has two parts, which are added before they are put in place.
#[test]
fn slices_of_one_value_have_one_gradient_of_its_size() {
    let (whole, part) = (1024 * 64 * 4, 64 * 64 * 4);
    // Windows that meet, and windows between which something is left out.
    for step in [48, 80] {
        let mut t = Text { text: "mesh ()\n\nfunc @f(v0: f32[1024,64]) -> f32[] {\n".to_string(), next: 1 };
        let mut sum = t.node("constant[dtype=f32, shape=[], value=0.0]", "f32[]");
        for i in 0..12 {
            let start = i * step;
            let window =
                t.node(&format!("slice[start=[{start}, 0], size=[64, 64], step=[1, 1]] v0"), "f32[64,64]");
            let square = t.node(&format!("mul {window}, {window}"), "f32[64,64]");
            let one = t.node(&format!("sum[dims=[0, 1], keep=false] {square}"), "f32[]");
            sum = t.node(&format!("add {sum}, {one}"), "f32[]");
        }
        let (plan, peak) = of_gradient(&(t.text + &format!("    return {sum}\n}}\n")), &[0]);
        assert_eq!(plan.matches(" pad[").count(), 1, "{plan}");
        assert!(peak <= whole + 3 * part, "{peak} bytes\n{plan}");
    }
}

/// Heads of 64 places, of which the cotangents of q, k and v are given, and the result of attention is kept for them.
#[test]
fn the_gradient_of_attention_has_no_matrix_of_scores() {
    let mut peaks = Vec::new();
    for length in [512, 1024] {
        let ty = format!("f32[1,8,{length},64]");
        let text = format!(
            "mesh ()

func @f(v0: {ty}, v1: {ty}, v2: {ty}, v3: {ty}) -> f32[] {{
    v4 = attention[scale=0.125, causal=0] v0, v1, v2 : {ty}
    v5 = mul v4, v3 : {ty}
    v6 = sum[dims=[0, 1, 2, 3], keep=false] v5 : f32[]
    return v6
}}
"
        );
        let (plan, peak) = of_gradient(&text, &[0, 1, 2]);
        assert_eq!(plan.matches("attention_backward[").count(), 1, "{plan}");
        let tensor = 8 * length * 64 * 4;
        assert!(peak <= 5 * tensor + 4096, "{peak} bytes\n{plan}");
        peaks.push(peak);
    }
    assert!(peaks[1] <= 2 * peaks[0], "{peaks:?} bytes");
}

#[test]
fn sizes_without_a_value_or_beyond_memory_are_refused() {
    let text = "mesh ()\n\nfunc @f(v0: f32[s0]) -> f32[s0] {\n    return v0\n}\n";
    let program = parse(text, &OpTable::built_in()).unwrap().program;
    let refused = |symbols: &BTreeMap<Sym, i64>| {
        let binding = Binding { rank: Rank(0), symbols, donated: &[] };
        plan(&program.mesh, &program.funcs[0], &binding).unwrap_err()
    };
    let error = refused(&BTreeMap::new());
    let expected = "plan: @f: expected sizes that are known, got f32[s0]: s0: a symbol has no value\n  \
                    note: a plan is made for given values of the symbols; give each of them one";
    assert_eq!(error.to_string(), expected);
    let error = refused(&BTreeMap::from([(Sym::Backed(0), i64::MAX)]));
    assert_eq!(error.to_string(), "plan: @f: f32[s0] does not fit in 64 bits of memory");
}
