//! A composite's expansion matches its own evaluation, though they share no code.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort_ir::builder::expand;
use consort_ir::index::Index;
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{
    Add, Attention, AttentionBackward, LayerNorm, LogSoftmax, Logsumexp, Op, OpDef, RmsNorm, Softmax,
};
use consort_ir::program::{Block, Func, Node, Program};
use consort_ir::text::Expect;
use consort_ir::tolerance::of_runs;
use consort_ir::types::{TensorType, Type};
use consort_ir::verify::verify;
use consort_oracle::run;
use consort_types::{Axes, Dtype, Rng};

fn random(rng: &mut Rng, dtype: Dtype, shape: &[usize]) -> Literal {
    let n = shape.iter().product();
    Literal::floats(dtype, shape.to_vec(), (0..n).map(|_| rng.below(400) as f64 / 100.0 - 2.0).collect())
}

/// A function of the one node.
fn single(expanded: &Func, op: Op) -> Func {
    let mut func = expanded.clone();
    let (args, results) = (expanded.body.params.clone(), expanded.body.results.clone());
    let node =
        Node { op, args: args.clone(), results: results.clone(), blocks: vec![], site: None, plan: None };
    func.body = Block { params: args, nodes: vec![node], results, ..Block::default() };
    func
}

fn check(op: impl OpDef + Clone, shapes: &[&[usize]], dtype: Dtype) {
    let mesh = Mesh::default();
    let types: Vec<Type> = shapes
        .iter()
        .map(|shape| {
            TensorType::new(dtype, shape.iter().map(|n| Index::from(*n)).collect(), Axes::NONE).into()
        })
        .collect();
    let expanded = expand(&mesh, &op, &types).expect("a composite").expect("fits");
    assert!(expanded.body.nodes.iter().all(|node| node.op.info().name != op.info().name));
    let original = single(&expanded, Op::new(op.clone()));
    let program = |func| Program { mesh: mesh.clone(), funcs: vec![func] };
    let (expanded, original) = (program(expanded), program(original));
    assert_eq!(verify(&expanded), []);
    assert_eq!(verify(&original), []);
    let mut rng = Rng::new(7);
    for _ in 0..8 {
        let inputs = vec![shapes.iter().map(|shape| random(&mut rng, dtype, shape)).collect::<Vec<_>>()];
        let a = run(&original, op.info().name, &inputs).unwrap();
        let b = run(&expanded, op.info().name, &inputs).unwrap();
        assert_eq!(a[0].len(), b[0].len());
        for (a, b) in a[0].iter().zip(&b[0]) {
            assert!(Expect::close(a, b, of_runs(dtype)), "{op:?}\n{}\n{}", a.text(), b.text());
        }
    }
}

#[test]
fn expansions_agree_with_evaluations() {
    for dtype in [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for dim in 0..3 {
            check(Softmax { dim }, &[&[2, 3, 4]], dtype);
            check(LogSoftmax { dim }, &[&[2, 3, 4]], dtype);
        }
        for (dims, keep) in [(vec![2], false), (vec![1, 0], true), (vec![], false)] {
            check(Logsumexp { dims, keep }, &[&[2, 3, 4]], dtype);
        }
        check(RmsNorm { eps: 1e-5 }, &[&[2, 3, 8], &[8]], dtype);
        check(LayerNorm { eps: 1e-5 }, &[&[2, 3, 8], &[8], &[8]], dtype);
        let q: &[usize] = &[2, 4, 3, 5];
        for kv in [4, 2, 1] {
            let (k, v): (&[usize], &[usize]) = (&[2, kv, 6, 5], &[2, kv, 6, 7]);
            for causal in
                [None, Some(Index::constant(0)), Some(Index::constant(3)), Some(Index::constant(-2))]
            {
                check(Attention { scale: 0.4, causal: causal.clone() }, &[q, k, v], dtype);
                let z: &[usize] = &[2, 4, 3, 7];
                check(AttentionBackward { scale: 0.4, causal }, &[q, k, v, z, z], dtype);
            }
        }
    }
}

#[test]
fn a_plain_op_has_no_expansion() {
    let ty = Type::Tensor(TensorType::new(Dtype::F32, vec![Index::constant(2)], Axes::NONE));
    assert!(expand(&Mesh::default(), &Add {}, &[ty.clone(), ty]).is_none());
}
