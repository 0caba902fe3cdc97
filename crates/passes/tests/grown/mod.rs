//! Random programs made differentiable: all floats are f64, and the mean of everything they return is the loss.

use consort_ir::entity::Value;
use consort_ir::index::Facts;
use consort_ir::infer::infer;
use consort_ir::literal::{Data, Literal};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Add, AllReduceStart, Op, OpDef, OpTable, Sin, Sum, Undecided, Wait};
use consort_ir::program::{Func, Node, Program};
use consort_ir::text::{parse, print};
use consort_ir::types::Type;
use consort_oracle::generate;
use consort_types::{GroupName, Reduce};

/// The program of a seed, if it returns a float.
pub(crate) fn program(seed: u64, size: usize) -> Option<Program> {
    let text = print(&generate::program(seed, size));
    let words = ["bf16", "f16", "f32"];
    let text = words.iter().fold(text, |text, word| text.replace(word, "f64"));
    // At 0 its value is finite and its slope is not, so that gradients are NaN where differences are not.
    let text = text.replace(" = sqrt ", " = tanh ");
    // Only an all_gather can be gathered again, and random programs seldom have one just before.
    let text = text.replace(" = regather ", " = recompute ");
    let Program { mesh, mut funcs } = parse(&text, &OpTable::built_in()).ok()?.program;
    let mut func = funcs.pop()?;
    let mut total: Option<Value> = None;
    for result in func.body.results.clone() {
        let tensors = match func.ty(result)? {
            Type::Pending(_) => append(&mesh, &mut func, Wait {}, &[result])?,
            _ => vec![result],
        };
        for tensor in tensors {
            let Some(ty) = func.ty(tensor)?.as_tensor().cloned() else { continue };
            if !ty.dtype.is_float() {
                continue;
            }
            let smooth = append(&mesh, &mut func, Sin {}, &[tensor])?[0];
            let sum = Sum { dims: (0..ty.rank()).collect(), keep: false };
            let sum = append(&mesh, &mut func, sum, &[smooth])?[0];
            total = Some(match total {
                None => sum,
                Some(before) => append(&mesh, &mut func, Add {}, &[before, sum])?[0],
            });
        }
    }
    let over = GroupName::Axes(mesh.all_axes());
    let pending = append(&mesh, &mut func, AllReduceStart { reduce: Reduce::Avg, over }, &[total?])?;
    func.body.results = append(&mesh, &mut func, Wait {}, &pending)?;
    func.results = func.body.results.iter().filter_map(|value| func.ty(*value).cloned()).collect();
    Some(Program { mesh, funcs: vec![func] })
}

fn append(mesh: &Mesh, func: &mut Func, op: impl OpDef, args: &[Value]) -> Option<Vec<Value>> {
    let types: Vec<Type> = args.iter().filter_map(|arg| func.ty(*arg).cloned()).collect();
    let mut facts: Facts = func.entry_facts(mesh);
    let made = infer(&op, mesh, &types, &[], &mut facts, Undecided::Assume).ok()?;
    let first = func.types.end();
    let results: Vec<Value> = (first..).map(Value).take(made.len()).collect();
    results.iter().zip(made).for_each(|(result, ty)| {
        func.types.insert(*result, ty);
    });
    let node = Node {
        op: Op::new(op),
        args: args.to_vec(),
        results: results.clone(),
        blocks: Vec::new(),
        site: None,
        plan: None,
    };
    func.body.nodes.push(node);
    Some(results)
}

/// Inputs for it, away from the round numbers at which functions have corners.
pub(crate) fn inputs(program: &Program, seed: u64) -> Vec<Vec<Literal>> {
    let mut inputs = generate::inputs(program, seed);
    for literal in inputs.iter_mut().flatten() {
        if let Data::Float(data) = &mut literal.data {
            let shift = |(i, x): (usize, &f64)| x + 0.01 * (37.0 * x + 1.3 * i as f64).sin();
            let shifted = data.iter().enumerate().map(shift).collect();
            literal.data = Data::Float(shifted);
        }
    }
    inputs
}
