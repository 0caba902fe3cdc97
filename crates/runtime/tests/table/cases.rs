//! The cases of the kernel table test: ops with attributes, and their operands.

use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::literal::Literal;
use consort_ir::ops::*;
use consort_ir::text::{parse, run_lines};
use consort_types::{Axes, Dtype, GroupName};

/// An op with attributes, and its operands.
pub(crate) struct Case {
    pub(crate) op: Op,
    pub(crate) operands: Vec<Operand>,
}

/// An operand: its type, its shape, and its contents.
#[derive(Clone)]
pub(crate) struct Operand {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) holds: Holds,
}

#[derive(Clone)]
pub(crate) enum Holds {
    /// Any value, including infinities and NaN.
    Anything,
    /// Numbers from 0 up to this one.
    Below(usize),
    /// These elements.
    These(Literal),
}

fn case(op: impl OpDef, operands: &[Operand]) -> Case {
    Case { op: Op::new(op), operands: operands.to_vec() }
}

fn sizes(list: &[usize]) -> Vec<Index> {
    list.iter().map(|size| Index::from(*size)).collect()
}

fn places(dtype: Dtype, shape: &[usize], below: usize) -> Operand {
    Operand { dtype, shape: shape.to_vec(), holds: Holds::Below(below) }
}

/// The shapes of elementwise operands: long enough for whole vectors and a tail, empty, 0-d.
const SHAPES: [&[usize]; 5] = [&[67], &[3, 5, 4], &[1, 40, 2], &[2, 0], &[]];

macro_rules! folds {
    ($list:ident, $x:ident, $($op:ident)*) => {$(
        for (shape, dims, keep) in [
            (&[5, 67][..], &[1][..], false),
            (&[67, 5], &[0], true),
            (&[4, 6, 9], &[1], false),
            (&[4, 6, 9], &[2, 0], false),
            (&[4, 6, 9], &[0, 1, 2], true),
            (&[4, 3], &[], false),
            (&[0, 3], &[0], false),
            (&[0, 3], &[1], false),
            (&[], &[], false),
        ] {
            $list.push(case($op { dims: dims.to_vec(), keep }, &[$x(shape)]));
        }
    )*};
}

macro_rules! along {
    ($list:ident, $x:ident, $op:ident { $($attr:ident: $value:expr),* }) => {
        for (shape, dim) in
            [(&[5, 67][..], 1), (&[67, 5], 0), (&[3, 6, 4], 1), (&[2, 3, 1], 2), (&[0, 3], 1), (&[3, 0], 1)]
        {
            $list.push(case($op { dim, $($attr: $value),* }, &[$x(shape)]));
        }
    };
}

/// Every case with operands or an attribute of this type; rules refuse some of them.
pub(crate) fn cases(dtype: Dtype) -> Vec<Case> {
    let x = |shape: &[usize]| Operand { dtype, shape: shape.to_vec(), holds: Holds::Anything };
    let truth = |shape: &[usize]| Operand { dtype: Dtype::Bool, ..x(shape) };
    let mut list = Vec::new();
    for op in elementwise_ops() {
        let operands = |shape| vec![x(shape); op.info().args.len()];
        list.extend(SHAPES.map(|shape| Case { op: op.clone(), operands: operands(shape) }));
    }
    for shape in SHAPES {
        list.push(case(Select {}, &[truth(shape), x(shape), x(shape)]));
        list.extend(Dtype::ALL.map(|to| case(Cast { to }, &[x(shape)])));
    }
    folds!(list, x, Sum Prod Mean Max Min Any All Argmax Argmin Logsumexp);
    along!(list, x, Cumsum {});
    along!(list, x, Sort { descending: false });
    along!(list, x, Sort { descending: true });
    along!(list, x, Softmax {});
    along!(list, x, LogSoftmax {});
    for (shape, dim, k) in [
        (&[3, 300][..], 1, 7),
        (&[3, 20], 1, 20),
        (&[40, 3], 0, 5),
        (&[4, 5, 6], 1, 2),
        (&[3, 0], 1, 0),
        (&[3, 4], 1, 0),
    ] {
        list.push(case(Topk { dim, k: Index::from(k as i64) }, &[x(shape)]));
    }
    for shape in [&[5, 67][..], &[2, 3, 16], &[7], &[0, 4], &[4, 0]] {
        let last = &shape[shape.len() - 1..];
        list.push(case(RmsNorm { eps: 1e-5 }, &[x(shape), x(last)]));
        list.push(case(LayerNorm { eps: 1e-5 }, &[x(shape), x(last), x(last)]));
    }
    products(&mut list, &x);
    shapes(&mut list, &x);
    lookups(&mut list, &x);
    creations(&mut list, dtype);
    list
}

/// Every op as its own example calls it on one rank, so that a new op has a case at least.
pub(crate) fn examples() -> Vec<Case> {
    // One element, so that every layout has it; its digest by hand: (1 ^ 2) * 0x9e3779b97f4a7c15, then ^= itself >> 29.
    let these = |literal: Literal| Operand {
        dtype: literal.dtype,
        shape: literal.shape.clone(),
        holds: Holds::These(literal),
    };
    let alone = EqualOver { over: GroupName::Axes(Axes::NONE) };
    let digest = Literal::ints(Dtype::I64, vec![1], vec![-2691343697317192356]);
    let mut list = vec![case(alone, &[these(Literal::ints(Dtype::U8, vec![1], vec![2])), these(digest)])];
    for info in BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()) {
        let program = parse(info.example, &OpTable::built_in()).unwrap().program;
        let [func] = &program.funcs[..] else { continue };
        let node = func.body.nodes.iter().find(|node| node.op.info().name == info.name).unwrap();
        let place = |arg: &Value| func.body.params.iter().position(|param| param == arg);
        let Some(places) = node.args.iter().map(place).collect::<Option<Vec<usize>>>() else { continue };
        for line in run_lines(info.example).unwrap() {
            let inputs = &line.inputs(&program).unwrap()[0];
            let operand = |place: &usize| {
                let tensor = inputs[*place].clone();
                Operand { dtype: tensor.dtype, shape: tensor.shape.clone(), holds: Holds::These(tensor) }
            };
            list.push(Case { op: node.op.clone(), operands: places.iter().map(operand).collect() });
        }
    }
    list
}

fn products(list: &mut Vec<Case>, x: &dyn Fn(&[usize]) -> Operand) {
    for (a, b) in [
        (&[3, 5][..], &[5, 4][..]),
        (&[33, 70], &[70, 17]),
        (&[1, 40], &[40, 1]),
        (&[2, 3, 9, 8], &[2, 3, 8, 7]),
        (&[2, 3, 4], &[4, 5]),
        (&[3, 0], &[0, 4]),
        (&[0, 3], &[3, 4]),
    ] {
        list.push(case(Matmul {}, &[x(a), x(b)]));
    }
    for (a, b, stride, padding, dilation, groups) in [
        (&[2, 3, 20][..], &[4, 3, 3][..], 1, 1, 1, 1),
        (&[1, 4, 15], &[6, 2, 4], 2, 0, 2, 2),
        (&[0, 2, 5], &[3, 2, 2], 1, 0, 1, 1),
    ] {
        list.push(case(Conv1d { stride, padding, dilation, groups }, &[x(a), x(b)]));
    }
    for (a, b, stride, padding, dilation, groups) in [
        (&[2, 3, 9, 8][..], &[4, 3, 3, 3][..], [1, 1], [1, 1], [1, 1], 1),
        (&[1, 4, 9, 11], &[4, 1, 2, 3], [2, 1], [0, 2], [1, 2], 4),
        (&[1, 2, 4, 4], &[3, 2, 1, 1], [1, 1], [0, 0], [1, 1], 1),
    ] {
        let [stride, padding, dilation] = [stride, padding, dilation].map(|list| list.to_vec());
        list.push(case(Conv2d { stride, padding, dilation, groups }, &[x(a), x(b)]));
    }
    for (q, k, v, causal) in [
        (&[1, 2, 5, 8][..], &[1, 2, 7, 8][..], &[1, 2, 7, 6][..], None),
        (&[2, 4, 20, 16], &[2, 2, 20, 16], &[2, 2, 20, 16], Some(0)),
        (&[1, 1, 6, 4], &[1, 1, 4, 4], &[1, 1, 4, 3], Some(-2)),
        (&[1, 2, 1, 8], &[1, 1, 30, 8], &[1, 1, 30, 8], Some(29)),
        (&[0, 2, 3, 4], &[0, 2, 3, 4], &[0, 2, 3, 4], None),
    ] {
        let (scale, causal) = (0.3, causal.map(|c: i64| Index::from(c)));
        list.push(case(Attention { scale, causal: causal.clone() }, &[x(q), x(k), x(v)]));
        let result = [&q[..3], &v[3..]].concat();
        list.push(case(AttentionBackward { scale, causal }, &[x(q), x(k), x(v), x(&result), x(&result)]));
    }
}

fn shapes(list: &mut Vec<Case>, x: &dyn Fn(&[usize]) -> Operand) {
    for (from, to) in [
        (&[4, 6][..], &[2, 12][..]),
        (&[4, 6], &[4, 6]),
        (&[40, 3], &[120]),
        (&[2, 3, 4], &[4, 3, 2, 1]),
        (&[1, 1], &[]),
        (&[], &[1]),
        (&[0, 3], &[5, 0]),
    ] {
        list.push(case(Reshape { shape: sizes(to) }, &[x(from)]));
    }
    for shape in [&[4, 6][..], &[], &[0, 3]] {
        list.push(case(Spread { over: GroupName::Axes(Axes::NONE) }, &[x(shape)]));
        list.push(case(Keep {}, &[x(shape)]));
        list.push(case(Regather {}, &[x(shape)]));
    }
    for (shape, dims) in [
        (&[4, 6][..], &[1, 0][..]),
        (&[33, 18], &[1, 0]),
        (&[2, 3, 4], &[1, 2, 0]),
        (&[2, 3, 4, 5], &[0, 2, 1, 3]),
        (&[17, 20, 2], &[1, 0, 2]),
        (&[3, 0], &[1, 0]),
        (&[], &[]),
    ] {
        list.push(case(Permute { dims: dims.to_vec() }, &[x(shape)]));
    }
    for (shape, start, size, step) in [
        (&[9, 7][..], &[2, 1][..], &[4, 5][..], &[1, 1][..]),
        (&[9, 7], &[0, 1], &[5, 3], &[2, 3]),
        (&[9, 7], &[9, 0], &[0, 7], &[1, 1]),
        (&[3], &[2], &[1], &[usize::MAX >> 2]),
        (&[], &[], &[], &[]),
    ] {
        let op = Slice { start: sizes(start), size: sizes(size), step: step.to_vec() };
        list.push(case(op, &[x(shape)]));
    }
    for (shape, part, start) in [
        (&[9, 7][..], &[4, 5][..], &[2, 1][..]),
        (&[9, 7], &[9, 7], &[0, 0]),
        (&[9, 7], &[0, 3], &[9, 2]),
        (&[0, 2], &[0, 2], &[0, 0]),
        (&[], &[], &[]),
    ] {
        list.push(case(UpdateSlice { start: sizes(start) }, &[x(shape), x(part)]));
    }
    list.push(case(Concat { dim: 0 }, &[x(&[2, 5]), x(&[1, 5]), x(&[0, 5]), x(&[4, 5])]));
    list.push(case(Concat { dim: 1 }, &[x(&[3, 1]), x(&[3, 20])]));
    list.push(case(Concat { dim: 1 }, &[x(&[3, 1, 1]), x(&[3, 1, 1])]));
    list.push(case(Concat { dim: 0 }, &[x(&[0])]));
    for (shape, dim, parts) in
        [(&[7, 5][..], 0, &[3, 0, 4][..]), (&[7, 5], 1, &[1, 4]), (&[7, 0], 0, &[2, 5]), (&[3], 0, &[3])]
    {
        list.push(case(Split { dim, sizes: sizes(parts) }, &[x(shape)]));
    }
    for (shape, low, high) in [
        (&[3, 4][..], &[1, 0][..], &[2, 3][..]),
        (&[3, 4], &[0, 0], &[0, 0]),
        (&[0, 2], &[2, 1], &[1, 1]),
        (&[], &[], &[]),
    ] {
        let op = Pad { low: sizes(low), high: sizes(high), value: 1.0 };
        list.push(case(op, &[x(shape)]));
    }
    for (from, to) in [
        (&[3, 1][..], &[3, 20][..]),
        (&[4], &[5, 4]),
        (&[], &[2, 3]),
        (&[2, 1, 3], &[4, 2, 5, 3]),
        (&[1, 4], &[0, 4]),
        (&[2, 3], &[2, 3]),
    ] {
        list.push(case(Broadcast { shape: sizes(to) }, &[x(from)]));
    }
    for (shape, dims) in [
        (&[5, 7][..], &[1][..]),
        (&[5, 7], &[0]),
        (&[3, 4, 5], &[2, 0]),
        (&[2, 0], &[0, 1]),
        (&[4], &[]),
        (&[], &[]),
    ] {
        list.push(case(Flip { dims: dims.to_vec() }, &[x(shape)]));
    }
}

fn lookups(list: &mut Vec<Case>, x: &dyn Fn(&[usize]) -> Operand) {
    for (shape, dim, at) in [
        (&[9, 6][..], 0, &[4][..]),
        (&[3, 9], 1, &[2, 5]),
        (&[2, 5, 4], 1, &[3, 2]),
        (&[6], 0, &[]),
        (&[6], 0, &[6]),
        (&[6, 0], 0, &[3]),
        (&[0, 3], 0, &[0]),
    ] {
        let spread = [&shape[..dim], at, &shape[dim + 1..]].concat();
        for dtype in [Dtype::I64, Dtype::I32] {
            let at = places(dtype, at, shape[dim]);
            list.push(case(Gather { dim }, &[x(shape), at.clone()]));
            list.push(case(Scatter { dim }, &[x(shape), at.clone(), x(&spread)]));
            list.push(case(ScatterAdd { dim }, &[x(shape), at, x(&spread)]));
        }
    }
    for (shape, dim, at) in [
        (&[4, 9][..], 1, &[4, 3][..]),
        (&[9, 4], 0, &[3, 4]),
        (&[2, 5, 3], 1, &[2, 6, 3]),
        (&[7], 0, &[2]),
        (&[3, 0], 1, &[3, 0]),
    ] {
        list.push(case(TakeAlong { dim }, &[x(shape), places(Dtype::I64, at, shape[dim])]));
    }
}

fn creations(list: &mut Vec<Case>, dtype: Dtype) {
    let float = dtype.is_float();
    for shape in [&[3, 4][..], &[0, 2], &[]] {
        let n: usize = shape.iter().product();
        let one = if float { Elements::Float(0.3) } else { Elements::Int(1) };
        let all = if float {
            Elements::Floats((0..n).map(|i| i as f64 / 7.0 - 0.5).collect())
        } else {
            Elements::Ints((0..n as i64).map(|i| i % 2).collect())
        };
        for value in [one, all] {
            list.push(case(Constant { dtype, shape: sizes(shape), value }, &[]));
        }
    }
    for (shape, dim) in [(&[300][..], 0), (&[3, 4, 5], 1), (&[3, 4], 1), (&[3, 0], 0)] {
        list.push(case(Iota { dtype, shape: sizes(shape), dim }, &[]));
    }
    list.push(case(IndexValue { value: Index::from(-7i64) }, &[]));
    for (shape, classes) in [(&[5][..], 4), (&[2, 3], 3), (&[], 2), (&[3], 0)] {
        for from in [Dtype::I64, Dtype::I32, Dtype::U8] {
            let op = OneHot { classes: Index::from(classes as i64), dtype };
            list.push(case(op, &[places(from, shape, 6)]));
        }
    }
    for (shape, of, start) in [
        (&[100][..], &[1 << 33][..], &[(1 << 32) - 50][..]),
        (&[3, 5, 4], &[6, 5, 4], &[2, 0, 0]),
        (&[3, 5, 4], &[3, 9, 7], &[0, 2, 1]),
        (&[0, 4], &[0, 4], &[0, 0]),
        (&[], &[], &[]),
    ] {
        let (shape, of, start) = (sizes(shape), sizes(of), sizes(start));
        let key = places(Dtype::I64, &[], 1 << 62);
        list.push(case(
            Uniform { dtype, shape: shape.clone(), of: of.clone(), start: start.clone() },
            std::slice::from_ref(&key),
        ));
        list.push(case(Normal { dtype, shape, of, start }, &[key]));
    }
}
