//! SPEC B20: an op that a user declares and whose facets contradict each other, its types or its evaluation is one clear
//! error of that op, eager and compiled, on every rank.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::layout::{Dims, Layout};
use consort::ops::{Alias, Cost, CostCx, Effects, EvalCx, EvalError, InferCx, Joined, Layouts, OpDef};
use consort::{Collective, Dtype, GroupName, Kind, Reduce, Tensor, apply, compile, spawn};
use consort_ir::index::Index;
use consort_ir::literal::{Data, Literal};
use consort_ir::op;
use consort_ir::types::{TensorType, Type};
use consort_types::Failure;

/// The facets of an op.
struct Facets {
    infer: fn(&TensorType) -> Vec<Type>,
    effects: Effects,
    alias: Alias,
    joins: bool,
    keeps_order: bool,
    view: fn(&Layout) -> Layouts,
    boxes: fn() -> Vec<Joined>,
    eval: fn(&Literal) -> Vec<Literal>,
    error: &'static str,
}

const RIGHT: Facets = Facets {
    infer: |x| vec![x.clone().into()],
    effects: Effects::Pure,
    alias: Alias::None,
    joins: false,
    keeps_order: false,
    view: |x| std::iter::once(x.clone()).collect(),
    boxes: Vec::new,
    eval: |x| vec![x.clone()],
    error: "",
};

op! {
    /// An op with the facets of a row of `WRONG`.
    pub struct Odd("odd")(x) {
        /// The row.
        row: usize
    }
    example ""
}

impl OpDef for Odd {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok((WRONG[self.row].infer)(cx.tensor(0)?))
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn effects(&self) -> Effects {
        WRONG[self.row].effects
    }
    fn alias(&self) -> Alias {
        WRONG[self.row].alias
    }
    fn joins(&self) -> bool {
        WRONG[self.row].joins
    }
    fn keeps_order(&self) -> bool {
        WRONG[self.row].keeps_order
    }
    fn view(&self, _cx: &EvalCx<'_>, x: &Layout) -> Result<Option<Layouts>, EvalError> {
        Ok(Some((WRONG[self.row].view)(x)))
    }
    fn boxes(&self, _cx: &EvalCx<'_>, _: &[&[usize]]) -> Result<Vec<Joined>, EvalError> {
        Ok((WRONG[self.row].boxes)())
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok((WRONG[self.row].eval)(args[0]))
    }
}

fn one(layout: Layout) -> Layouts {
    std::iter::once(layout).collect()
}

/// A view of these sizes, strides and start.
fn seen<const N: usize>(shape: [usize; N], strides: [usize; N], start: usize) -> Layouts {
    one(Layout { shape: Dims::from_slice(&shape), strides: Dims::from_slice(&strides), start })
}

fn with_shape(x: &TensorType, shape: &[i64]) -> Vec<Type> {
    vec![x.with_shape(shape.iter().map(|size| Index::constant(*size)).collect()).into()]
}

fn floats(n: usize) -> Vec<Literal> {
    vec![Literal { dtype: Dtype::F32, shape: vec![4], data: Data::Float(vec![7.0; n]) }]
}

fn piece(operand: usize, from: usize, to: usize, n: usize) -> Joined {
    let dims = |n: usize| Dims::from_slice(&[n]);
    Joined { operand, from: dims(from), to: dims(to), size: dims(n) }
}

const VIEW: Facets = Facets {
    alias: Alias::View,
    error: "its view does not have the inferred shape, or reaches outside its operand",
    ..RIGHT
};
const JOIN: Facets = Facets { joins: true, error: "its boxes ", ..RIGHT };
const EVAL: Facets = Facets { error: "its evaluation gave ", ..RIGHT };
const ONE_TYPE: &str = "a view or a join must have one element type in its operands and its results";
const HUGE: usize = usize::MAX;

/// The operand is f32[4].
static WRONG: &[Facets] = &[
    Facets { view: |x| seen([4], [1], x.start + 1), ..VIEW },
    Facets { view: |x| seen([4], [HUGE / 2], x.start), ..VIEW },
    Facets { view: |x| seen([2], [1], x.start), ..VIEW },
    Facets { view: |_| Layouts::new(), ..VIEW },
    Facets { view: |x| seen([4], [1], x.start.wrapping_sub(1)), ..VIEW },
    Facets { view: |_| seen([4], [1], HUGE), ..VIEW },
    // Of one entry and of none a stride or a start is not used, until bytes are counted.
    Facets { infer: |x| with_shape(x, &[1]), view: |x| seen([1], [HUGE], x.start), ..VIEW },
    Facets { infer: |x| with_shape(x, &[1, 4]), view: |x| seen([1, 4], [HUGE / 3, 1], x.start), ..VIEW },
    Facets { infer: |x| with_shape(x, &[0]), view: |_| seen([0], [1], HUGE), ..VIEW },
    Facets { infer: |x| with_shape(x, &[0, 2]), view: |x| seen([0, 2], [HUGE, HUGE], x.start), ..VIEW },
    Facets {
        infer: |x| with_shape(x, &[0]),
        view: |x| one(Layout { shape: Dims::from_slice(&[0]), strides: Dims::new(), start: x.start }),
        ..VIEW
    },
    Facets { infer: |x| vec![x.with_dtype(Dtype::F64).into()], error: ONE_TYPE, ..VIEW },
    Facets { infer: |x| vec![x.with_dtype(Dtype::I32).into()], error: ONE_TYPE, ..VIEW },
    Facets {
        infer: |x| with_shape(x, &[2]),
        keeps_order: true,
        view: |x| seen([2], [2], x.start),
        error: "its view does not keep the order of the elements, as it states",
        ..VIEW
    },
    Facets { boxes: || vec![piece(0, 0, 0, 2)], ..JOIN },
    Facets { boxes: || vec![piece(0, 0, 0, 3), piece(0, 0, 2, 2)], ..JOIN },
    Facets { boxes: || vec![piece(0, 2, 0, 4)], ..JOIN },
    Facets { boxes: || vec![piece(7, 0, 0, 4)], ..JOIN },
    Facets { boxes: || vec![piece(0, 0, HUGE, 4)], ..JOIN },
    Facets { infer: |x| vec![x.with_dtype(Dtype::I32).into()], error: ONE_TYPE, ..JOIN },
    Facets { eval: |_| Vec::new(), ..EVAL },
    Facets { eval: |x| vec![x.clone(), x.clone()], ..EVAL },
    Facets { eval: |x| vec![Literal { dtype: Dtype::F64, ..x.clone() }], ..EVAL },
    Facets { eval: |x| vec![Literal { shape: vec![2, 2], ..x.clone() }], ..EVAL },
    Facets { eval: |_| floats(3), ..EVAL },
    Facets { eval: |x| vec![Literal { data: Data::Int(vec![7; 4]), ..x.clone() }], ..EVAL },
    Facets { eval: |_| floats(3), alias: Alias::Reuse, ..EVAL },
    Facets { eval: |_| floats(3), effects: Effects::Host, ..EVAL },
    Facets {
        infer: |x| vec![x.clone().into(), x.clone().into()],
        alias: Alias::Reuse,
        error: "expected one result, because of its alias or its boxes, got 2",
        ..RIGHT
    },
    Facets {
        infer: |_| Vec::new(),
        alias: Alias::First,
        error: "an op with an alias or boxes must have an operand and a result",
        ..RIGHT
    },
    Facets { effects: Effects::Wait, error: "expected a pending to wait for", ..RIGHT },
    Facets {
        infer: |x| vec![Type::Pending(vec![x.clone()])],
        error: "expected a collective, because it returns a pending, got none",
        ..RIGHT
    },
];

#[test]
fn b20_wrong_facets_are_errors_of_the_op() {
    for (row, Facets { error, .. }) in WRONG.iter().enumerate() {
        let x = || Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[4]).unwrap();
        let said = apply(&Odd { row }, [x()]).map(|got| format!("{got:?}")).unwrap_err().to_string();
        assert!(said.starts_with(&format!("odd: {error}")), "{row}, eager: {said}");
        let compiled = compile(move |x: Tensor| -> consort::Result<Tensor> {
            let y = apply(&Odd { row }, [x.exp()?])?.remove(0);
            y.cast(Dtype::F32)?.sum_all()
        });
        let said = compiled.call(x()).map(|got| format!("{got}")).unwrap_err().to_string();
        // What is found after the trace is an error of the call, and then of the op.
        let of_op = said.strip_prefix("compile: ").unwrap_or(&said);
        assert!(of_op.starts_with(&format!("odd: {error}")), "{row}, compiled: {said}");
        assert!(said.contains("user_op_wrong.rs:"), "{row}, compiled: {said}");
    }
}

op! {
    /// A start with the description and the result of a row of `STARTS`.
    pub struct OddStart("odd_start")(x) {
        /// The row.
        row: usize,
        /// The group.
        over: GroupName
    }
    example ""
}

type Start = (Kind, fn(&TensorType) -> Vec<Type>, &'static str);

/// The operand is f32[4], the group has two members.
static STARTS: &[Start] = &[
    (
        Kind::AllReduce,
        |x| pending([x.with_dtype(Dtype::F64)]),
        "f32[4] as result 0 of all_reduce, got f64[4]",
    ),
    (Kind::AllReduce, |x| pending([sized(x, 8)]), "f32[4] as result 0 of all_reduce, got f32[8]"),
    (Kind::AllReduce, |x| pending([sized(x, 2)]), "f32[4] as result 0 of all_reduce, got f32[2]"),
    (Kind::AllReduce, |x| pending([x.clone(), x.clone()]), "1 result of all_reduce, got 2"),
    (Kind::AllReduce, |_| pending([]), "1 result of all_reduce, got 0"),
    (Kind::AllReduce, |x| vec![x.clone().into()], "one pending as the result of a start, got f32[4]"),
    (Kind::AllReduce, |_| Vec::new(), "one pending as the result of a start, got none"),
    (Kind::Broadcast, |x| pending([x.with_dtype(Dtype::I32)]), "f32[4] as result 0 of broadcast, got i32[4]"),
    (Kind::Reduce, |x| pending([sized(x, 5)]), "f32[4] as result 0 of reduce, got f32[5]"),
    (Kind::AllGather, |x| pending([x.clone()]), "f32[8] as result 0 of all_gather, got f32[4]"),
    (Kind::Gather, |x| pending([x.clone()]), "f32[8] as result 0 of gather, got f32[4]"),
    (Kind::ReduceScatter, |x| pending([x.clone()]), "f32[2] as result 0 of reduce_scatter, got f32[4]"),
    (Kind::Scatter, |x| pending([x.clone()]), "f32[2] as result 0 of scatter, got f32[4]"),
    (Kind::AllToAll, |x| pending([sized(x, 2)]), "f32[4] as result 0 of all_to_all, got f32[2]"),
    (Kind::Permute, |x| pending([sized(x, 3)]), "f32[4] as result 0 of permute, got f32[3]"),
    (Kind::Barrier, |x| pending([x.clone()]), "0 operands of barrier, got 1"),
];

fn pending<const N: usize>(types: [TensorType; N]) -> Vec<Type> {
    vec![Type::Pending(types.to_vec())]
}

fn sized(x: &TensorType, n: i64) -> TensorType {
    x.with_shape(vec![Index::constant(n)])
}

impl OpDef for OddStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok((STARTS[self.row].1)(cx.tensor(0)?))
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        let (reduce, root) = (Some(Reduce::Sum), Some(0));
        Some(Collective { reduce, root, ..Collective::new(STARTS[self.row].0, self.over) })
    }
}

#[test]
fn b20_a_start_that_contradicts_its_collective_is_an_error_on_every_rank() {
    let outcomes = spawn(2, |mesh| {
        let world = mesh.axis("world")?;
        let over = world.name();
        for (row, (_, _, error)) in STARTS.iter().enumerate() {
            let said = world.apply(&OddStart { row, over }, [Tensor::ones(Dtype::F32, &[4])?]);
            let said = said.map(|got| format!("{got:?}")).unwrap_err().to_string();
            assert!(said.starts_with(&format!("odd: expected {error}")), "{row}, eager: {said}");
            let group = world.clone();
            let compiled = compile(move |x: Tensor| -> consort::Result<Vec<Tensor>> {
                group.apply(&OddStart { row, over }, [x.exp()?])
            });
            let said = compiled.call(Tensor::ones(Dtype::F32, &[4])?);
            let said = said.map(|got| format!("{got:?}")).unwrap_err().to_string();
            assert!(said.starts_with(&format!("odd: expected {error}")), "{row}, compiled: {said}");
        }
        // Nothing was started, so the ranks are still in step.
        assert_eq!(world.all_reduce(Tensor::ones(Dtype::F32, &[1])?, Reduce::Sum)?.item::<f32>()?, 2.0);
        Ok::<(), consort::Error>(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
