//! Gradients of every op against differences, in f64, on 1, 2 and 4 ranks. Up to three operands have all placements together
//! that the op takes; of more operands, every two have all placements that they can have together. The ops come from the list:
//! a new op without a rule, or without a reason to have none, fails here.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "gradients/blocks.rs"]
mod blocks;

use std::collections::{BTreeMap, BTreeSet};

use consort_ir::builder::Builder;
use consort_ir::index::Index;
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::*;
use consort_ir::program::Program;
use consort_ir::text::{parse, print};
use consort_ir::types::{TensorType, Type};
use consort_ir::verify::verify;
use consort_oracle::differences::check_gradient;
use consort_passes::{Wanted, gradient};
use consort_types::{
    Axes, Axis, Dtype, Failure, GroupId, GroupName, Message, Missing, Peer, Rank, Reduce, Rng, Route, Site,
};

use blocks::Blocks;

/// The meshes: 1, 2 and 4 ranks. Axis 0 is `a`; a list group pairs ranks across the axes.
fn meshes() -> Vec<Mesh> {
    let mut meshes = vec![
        Mesh::new([("a", 1u32)]).unwrap(),
        Mesh::new([("a", 2u32)]).unwrap(),
        Mesh::new([("a", 2u32), ("b", 2)]).unwrap(),
    ];
    let lists: [Vec<Vec<Rank>>; 3] = [
        vec![vec![Rank(0)]],
        vec![vec![Rank(1), Rank(0)]],
        vec![vec![Rank(0), Rank(3)], vec![Rank(2), Rank(1)]],
    ];
    for (mesh, lists) in meshes.iter_mut().zip(lists) {
        mesh.add_list_group("list", lists).unwrap();
    }
    // One that leaves ranks out.
    meshes[2].add_list_group("some", vec![vec![Rank(2), Rank(0)]]).unwrap();
    meshes
}

/// A case: an op, the types of its operands, without placements, and its blocks.
struct Case {
    op: Op,
    types: Vec<TensorType>,
    blocks: Blocks,
}

fn sizes(shape: &[usize]) -> Vec<Index> {
    shape.iter().map(|size| Index::from(*size)).collect()
}

fn x(shape: &[usize]) -> TensorType {
    TensorType::new(Dtype::F64, sizes(shape), Axes::NONE)
}

fn places(shape: &[usize]) -> TensorType {
    TensorType::new(Dtype::I64, sizes(shape), Axes::NONE)
}

fn case(op: impl OpDef, types: &[TensorType]) -> Case {
    Case { op: Op::new(op), types: types.to_vec(), blocks: blocks::none }
}

/// The example of an op, with all floats as f64.
fn example(info: &OpInfo) -> Option<Case> {
    let text = info.example.replace("f32", "f64");
    let program = parse(&text, &OpTable::built_in()).ok()?.program;
    let func = &program.funcs[0];
    let node = func.body.nodes.iter().find(|node| node.op.info().name == info.name)?;
    let ty = |arg: &consort_ir::entity::Value| Some(func.ty(*arg)?.as_tensor()?.with_varies(Axes::NONE));
    let types = node.args.iter().map(ty).collect::<Option<_>>()?;
    Some(Case { op: node.op.clone(), types, blocks: blocks::none })
}

/// Further cases of ops without communication.
fn local_cases() -> Vec<Case> {
    let mut list = vec![
        case(Matmul {}, &[x(&[2, 3, 2]), x(&[2, 2])]),
        case(Matmul {}, &[x(&[2, 3, 2]), x(&[2, 2, 3])]),
        case(Slice { start: sizes(&[1, 0]), size: sizes(&[2, 2]), step: vec![3, 2] }, &[x(&[5, 3])]),
        case(Permute { dims: vec![2, 0, 1] }, &[x(&[2, 3, 1])]),
        case(Concat { dim: 1 }, &[x(&[2, 1]), x(&[2, 2]), x(&[2, 1])]),
        case(Split { dim: 1, sizes: sizes(&[1, 2]) }, &[x(&[2, 3])]),
        case(Pad { low: sizes(&[1, 0]), high: sizes(&[0, 2]), value: 2.0 }, &[x(&[2, 2])]),
        case(Broadcast { shape: sizes(&[2, 2, 3]) }, &[x(&[2, 1])]),
        case(UpdateSlice { start: sizes(&[1, 1]) }, &[x(&[3, 2]), x(&[1, 1])]),
        case(Gather { dim: 1 }, &[x(&[2, 3]), places(&[2, 2])]),
        case(TakeAlong { dim: 0 }, &[x(&[3, 2]), places(&[4, 2])]),
        case(Scatter { dim: 1 }, &[x(&[2, 3]), places(&[4]), x(&[2, 4])]),
        case(ScatterAdd { dim: 0 }, &[x(&[3, 2]), places(&[2, 2]), x(&[2, 2, 2])]),
        case(Sort { dim: 1, descending: true }, &[x(&[2, 3])]),
        case(Topk { dim: 0, k: Index::constant(2) }, &[x(&[4, 2])]),
        case(Cumsum { dim: 1 }, &[x(&[2, 3])]),
        case(Flip { dims: vec![0, 1] }, &[x(&[2, 3])]),
        case(Logsumexp { dims: vec![0, 2], keep: true }, &[x(&[2, 2, 2])]),
        case(Softmax { dim: 0 }, &[x(&[3, 2])]),
        case(RmsNorm { eps: 1e-3 }, &[x(&[2, 2, 3]), x(&[3])]),
        case(LayerNorm { eps: 1e-3 }, &[x(&[2, 3]), x(&[3]), x(&[3])]),
        case(Attention { scale: 0.7, causal: None }, &[x(&[1, 2, 2, 2]), x(&[1, 2, 3, 2]), x(&[1, 2, 3, 1])]),
        case(
            Attention { scale: 0.7, causal: Some(Index::constant(-1)) },
            &[x(&[1, 2, 2, 2]), x(&[1, 1, 2, 2]), x(&[1, 1, 2, 2])],
        ),
        case(
            AttentionBackward { scale: 0.7, causal: Some(Index::constant(0)) },
            &[x(&[1, 2, 2, 2]), x(&[1, 1, 2, 2]), x(&[1, 1, 2, 1]), x(&[1, 2, 2, 1]), x(&[1, 2, 2, 1])],
        ),
    ];
    for keep in [false, true] {
        list.push(case(Sum { dims: vec![0, 2], keep }, &[x(&[2, 3, 2])]));
        list.push(case(Mean { dims: vec![2, 0], keep }, &[x(&[2, 3, 2])]));
        list.push(case(Max { dims: vec![1], keep }, &[x(&[2, 3])]));
        list.push(case(Min { dims: vec![0, 1], keep }, &[x(&[2, 3])]));
        list.push(case(Prod { dims: vec![1], keep }, &[x(&[2, 3])]));
    }
    for (a, b, stride, padding, dilation, groups) in [
        (&[2, 2, 5][..], &[3, 2, 3][..], 1, 1, 1, 1),
        (&[1, 4, 7], &[2, 2, 2], 2, 0, 2, 2),
        (&[1, 1, 4], &[1, 1, 1], 3, 2, 1, 1),
    ] {
        list.push(case(Conv1d { stride, padding, dilation, groups }, &[x(a), x(b)]));
    }
    for (a, b, stride, padding, dilation, groups) in [
        (&[1, 2, 3, 4][..], &[2, 2, 2, 2][..], [1, 1], [1, 0], [1, 1], 1),
        (&[1, 2, 4, 5], &[2, 1, 2, 2], [2, 1], [0, 1], [1, 2], 2),
    ] {
        let [stride, padding, dilation] = [stride, padding, dilation].map(|list| list.to_vec());
        list.push(case(Conv2d { stride, padding, dilation, groups }, &[x(a), x(b)]));
    }
    list
}

/// Communication over a group of `n` members.
fn starts(over: GroupName, n: u32, mesh: &Mesh) -> Vec<Case> {
    let size = n as usize;
    let mut list = vec![
        case(AllGatherStart { dims: vec![1, 0], over }, &[x(&[2, 1]), x(&[])]),
        case(AllToAllStart { in_splits: None, out_splits: None, over }, &[x(&[2 * size])]),
        case(BroadcastStart { root: size - 1, over }, &[x(&[2]), x(&[])]),
        case(GatherStart { dims: vec![0, 0], root: size - 1, over }, &[x(&[2]), x(&[])]),
        case(ScatterStart { dims: vec![1], root: 0, over }, &[x(&[1, 2 * size])]),
    ];
    for reduce in [Reduce::Sum, Reduce::Avg, Reduce::PremulSum(0.3)] {
        list.push(case(AllReduceStart { reduce, over }, &[x(&[2]), x(&[])]));
        list.push(case(ReduceStart { reduce, root: size - 1, over }, &[x(&[2])]));
        let dims = vec![1];
        list.push(case(ReduceScatterStart { reduce, dims, over }, &[x(&[1, 2 * size])]));
    }
    let uneven: Vec<Index> = (1..=n).map(Index::from_u32).collect();
    let me = group_rank(mesh, over);
    let own = TensorType::new(Dtype::F64, vec![Index::constant(2), Index::pick(&me, &uneven)], Axes::NONE);
    list.push(case(AllGatherVStart { dim: 1, sizes: uneven.clone(), over }, &[own]));
    let total = (n * (n + 1) / 2) as usize;
    let reduce = Reduce::Avg;
    list.push(case(ReduceScatterVStart { reduce, dim: 0, sizes: uneven, over }, &[x(&[total, 1])]));
    for (route, missing) in [
        (Route::Ring(1), Missing::Error),
        (Route::Shift(1), Missing::Zeros),
        (Route::Table((0..n).map(|i| (i > 0).then_some(0).filter(|_| i == 1)).collect()), Missing::Zeros),
    ] {
        list.push(case(PermuteStart { route: route.clone(), missing, over }, &[x(&[2]), x(&[])]));
    }
    let message = |route: Route, tag: i64| Message { peer: Peer::Route(route), tag: Index::constant(tag) };
    let shift = |by, tag| message(Route::Shift(by), tag);
    let halo =
        ExchangeStart { send: vec![shift(1, 0), shift(-1, 1)], recv: vec![shift(-1, 0), shift(1, 1)], over };
    list.push(case(halo, &[x(&[1]), x(&[2]), x(&[1]), x(&[2])]));
    let ring = ExchangeStart {
        send: vec![message(Route::Ring(1), 0), message(Route::Ring(1), 0)],
        recv: vec![message(Route::Ring(-1), 0), message(Route::Ring(-1), 0)],
        over,
    };
    list.push(case(ring, &[x(&[1]), x(&[1]), x(&[1]), x(&[1])]));
    list.extend(starts_by_member(over, n, mesh));
    list
}

/// Communication of which sizes, peers and tags differ between the members of a group of `n`.
fn starts_by_member(over: GroupName, n: u32, mesh: &Mesh) -> Vec<Case> {
    let me = group_rank(mesh, over);
    let by_member = |of: &dyn Fn(u32) -> i64| {
        let table: Vec<Index> = (0..n).map(|member| Index::from(of(member))).collect();
        Index::pick(&me, &table)
    };
    // What member i sends to member j: nothing, a row or two.
    let rows = |i: u32, j: u32| i64::from((i + 2 * j + 1) % 3);
    let in_splits: Vec<Index> = (0..n).map(|j| by_member(&|i| rows(i, j))).collect();
    let out_splits: Vec<Index> = (0..n).map(|j| by_member(&|i| rows(j, i))).collect();
    let total = in_splits.iter().fold(Index::constant(0), |sum, size| &sum + size);
    let own = TensorType::new(Dtype::F64, vec![total, Index::constant(2)], Axes::NONE);
    let uneven = AllToAllStart { in_splits: Some(in_splits), out_splits: Some(out_splits), over };
    // A ring whose messages are numbered by their senders; and the last member sends to the first, which alone receives.
    let at = |peer: &dyn Fn(u32) -> i64, tag: &dyn Fn(u32) -> i64| Message {
        peer: Peer::At(by_member(peer)),
        tag: by_member(tag),
    };
    let (next, before) = (|i: u32| i64::from((i + 1) % n), |i: u32| i64::from((i + n - 1) % n));
    let only = |member: u32, peer: u32| move |i: u32| if i == member { i64::from(peer) } else { -1 };
    let exchange = ExchangeStart {
        send: vec![at(&next, &i64::from), at(&only(n - 1, 0), &|_| 7)],
        recv: vec![at(&before, &before), at(&only(0, n - 1), &|_| 7)],
        over,
    };
    vec![case(uneven, &[own]), case(exchange, &[x(&[1]), x(&[2]), x(&[1]), x(&[2])])]
}

trait FromU32 {
    fn from_u32(n: u32) -> Index;
}

impl FromU32 for Index {
    fn from_u32(n: u32) -> Index {
        Index::from(i64::from(n))
    }
}

/// All subsets of the axes of a mesh.
fn subsets(mesh: &Mesh) -> Vec<Axes> {
    let n = mesh.axes().len() as u8;
    let subset = |bits: u8| (0..n).filter(|i| bits & (1 << i) != 0).map(Axis).collect();
    (0..1 << n).map(subset).collect()
}

/// All ways to place `n` operands.
fn placements(mesh: &Mesh, n: usize) -> Vec<Vec<Axes>> {
    let mut all: Vec<Vec<Axes>> = vec![Vec::new()];
    for _ in 0..n {
        all = all
            .into_iter()
            .flat_map(|before| subsets(mesh).into_iter().map(move |axes| [&before[..], &[axes]].concat()))
            .collect();
    }
    all
}

/// Up to this many placements of the operands of one case are all tried.
const ALL: usize = 64;

/// The programs of a case: one for each placement that its operands can have. Of more than [`ALL`] placements, some in which
/// every two operands have all pairs of placements that they can have.
fn placed(mesh: &Mesh, case: &Case) -> Vec<Program> {
    let all = placements(mesh, case.types.len());
    let (some, mut pairs) = (all.len() > ALL, BTreeSet::new());
    let mut programs = Vec::new();
    for number in 0..all.len() {
        // Their number is a power of two. Steps of an odd number visit all, and change all operands.
        let placement = &all[number * 37 % all.len()];
        let placed: Vec<TensorType> =
            case.types.iter().zip(placement).map(|(ty, axes)| ty.with_varies(*axes)).collect();
        let Some(program) = program(mesh, case, &placed).filter(|program| verify(program).is_empty()) else {
            continue;
        };
        let known = pairs.len();
        for (j, b) in placement.iter().enumerate() {
            pairs.extend(placement[..j].iter().enumerate().map(|(i, a)| (i, j, *a, *b)));
        }
        if !some || pairs.len() > known {
            programs.push(program);
        }
    }
    programs
}

/// The loss: results times weights that differ everywhere, summed over all elements and ranks; `None` if the op does not
/// take operands of these types.
fn program(mesh: &Mesh, case: &Case, types: &[TensorType]) -> Option<Program> {
    let mut b = Builder::new(mesh, "f");
    let args: Vec<_> = types.iter().map(|ty| b.param(ty.clone())).collect();
    let blocks = (case.blocks)(&mut b, types).ok()?;
    let mut results = b.node(case.op.clone(), &args, blocks).ok()?;
    if results.iter().any(|result| b.ty(*result).unwrap().is_pending()) {
        results = b.op(Wait {}, &results).ok()?;
    }
    let mut total = None;
    for result in results {
        let ty = b.tensor_ty(result).ok()?;
        if !ty.dtype.is_float() {
            continue;
        }
        let weight = b.param(ty.with_dtype(Dtype::F64).with_varies(mesh.all_axes()));
        let result = b.one(Cast { to: Dtype::F64 }, &[result]).ok()?;
        let product = b.one(Mul {}, &[result, weight]).ok()?;
        let sum = b.one(Sum { dims: (0..ty.rank()).collect(), keep: false }, &[product]).ok()?;
        total = Some(match total {
            None => sum,
            Some(before) => b.one(Add {}, &[before, sum]).ok()?,
        });
    }
    let over = GroupName::Axes(mesh.all_axes());
    let loss = b.start_wait(AllReduceStart { reduce: Reduce::Sum, over }, &[total?]).ok()?;
    Some(Program { mesh: mesh.clone(), funcs: vec![b.finish(&loss)] })
}

/// Random arguments, equal where the types say so. Integers are places below 2.
fn inputs(program: &Program, seed: u64, negative: bool) -> Vec<Vec<Literal>> {
    let (mesh, func) = (&program.mesh, &program.funcs[0]);
    let of = |rank: u32| {
        let symbols = BTreeMap::new();
        let cx = EvalCx { mesh, rank: Rank(rank), symbols: &symbols };
        let argument = |(i, param): (usize, &consort_ir::entity::Value)| {
            let Some(Type::Tensor(ty)) = func.ty(*param) else { panic!("{param} is no tensor") };
            let place =
                ty.varies.iter().fold(7, |at, axis| at * 31 + u64::from(mesh.coordinate(Rank(rank), axis)));
            let mut rng = Rng::new(seed ^ (i as u64) << 32 ^ place << 8);
            let shape = cx.shape(&ty.shape).unwrap();
            let n: usize = shape.iter().product();
            if !ty.dtype.is_float() {
                return Literal::ints(ty.dtype, shape, (0..n).map(|_| rng.below(2) as i64).collect());
            }
            let mut one = |_| {
                let x = 0.3 + rng.below(10_000) as f64 * 1.3e-4;
                if negative && rng.one_in(2) { -x } else { x }
            };
            Literal::floats(ty.dtype, shape, (0..n).map(&mut one).collect())
        };
        func.body.params.iter().enumerate().map(argument).collect()
    };
    (0..mesh.n_ranks()).map(of).collect()
}

/// What became of the cases of one op.
#[derive(Default)]
struct Tried {
    elements: usize,
    programs: usize,
    refusals: BTreeMap<String, usize>,
}

fn try_case(mesh: &Mesh, case: &Case, tried: &mut Tried) {
    let Case { op, types, .. } = case;
    if op.stops_gradient() || HAVE_CASES.contains(&op.info().name) {
        return;
    }
    let floats: Vec<usize> = (0..types.len()).filter(|i| types[*i].dtype.is_float()).collect();
    if floats.is_empty() {
        return;
    }
    for program in placed(mesh, case) {
        let text = print(&program);
        let made = match gradient(&program, "f", &Wanted::by(&floats[..])) {
            Ok(made) => made.program,
            Err(failure) => {
                *tried.refusals.entry(reason(&failure)).or_default() += 1;
                continue;
            }
        };
        tried.programs += 1;
        for negative in [false, true] {
            let inputs = inputs(&program, tried.programs as u64, negative);
            let compared = check_gradient(&program, &made, "f", &floats, &inputs, 1e-6);
            tried.elements += compared.unwrap_or_else(|error| panic!("{error}\n{text}\n{}", print(&made)));
        }
    }
}

fn reason(failure: &Failure) -> String {
    failure.headline().to_string()
}

/// Ops with cases in filetests/grad alone: `equal_over` fails where an operand is changed on one rank, and `regather` takes
/// the result of an all_gather.
const HAVE_CASES: [&str; 2] = ["equal_over", "regather"];

/// Ops that refuse, and why.
const REFUSALS: [(&str, &str); 1] = [("while", "none: the number of iterations is not known")];

#[test]
fn every_op_has_a_gradient_or_a_reason_to_have_none() {
    let mut tried: BTreeMap<(&str, u32), Tried> = BTreeMap::new();
    for mesh in meshes() {
        let mut cases = local_cases();
        cases.extend(blocks::cases(&mesh));
        let rows = BUILT_IN.iter().flat_map(|(_, rows)| rows.iter());
        // Examples of communication are for axis 0 of their own mesh.
        cases.extend(rows.filter_map(example).filter(|case| case.op.effects().starts().is_none()));
        let mut groups = vec![GroupName::Axes(Axes::one(Axis(0))), GroupName::List(GroupId(0))];
        if mesh.axes().len() > 1 {
            groups.push(GroupName::Axes(Axes::one(Axis(1))));
            groups.push(GroupName::Axes(mesh.all_axes()));
            groups.push(GroupName::List(GroupId(1)));
        }
        for over in groups {
            cases.extend(starts(over, mesh.group_size(over), &mesh));
        }
        for case in &cases {
            try_case(&mesh, case, tried.entry((case.op.info().name, mesh.n_ranks())).or_default());
        }
    }
    let mut wrong = Vec::new();
    for info in BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()) {
        let name = info.name;
        let op = info.example_op().unwrap();
        let (mesh, types) =
            (Mesh::new([("tp", 2u32), ("b", 2)]).unwrap(), example(info).map(|case| case.types));
        let types: Option<Vec<Type>> = types.map(|types| types.into_iter().map(Type::Tensor).collect());
        let words = types.map(|types| gradient_words(&mesh, &op, &types));
        if let Some((_, why)) = REFUSALS.iter().find(|(op, _)| *op == name) {
            assert_eq!(words.as_deref(), Some(*why), "{name}");
            continue;
        }
        // The example of `reduce_start` is by `max`.
        let is_rule = |words: &str| words == "rule" || words.starts_with("none: a reduction by");
        let has_rule = op.flow() != Flow::Straight || words.as_deref().is_some_and(is_rule);
        let passes = has_rule && !HAVE_CASES.contains(&name);
        for ranks in [1, 2, 4] {
            let none = Tried::default();
            let own = tried.get(&(name, ranks)).unwrap_or(&none);
            let what = format!(
                "{name} on {ranks}: {} programs, {} elements, refused: {:?}, {words:?}",
                own.programs, own.elements, own.refusals
            );
            if passes && own.elements == 0 || !own.refusals.is_empty() {
                wrong.push(what);
            } else {
                println!("{what}");
            }
        }
        if words.is_some_and(|words| words.contains("yet")) {
            wrong.push(format!("{name}: no rule"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Reductions that have a slope: those of which the table has cases.
fn is_linear(reduce: Reduce) -> bool {
    matches!(reduce, Reduce::Sum | Reduce::Avg | Reduce::PremulSum(_))
}

#[test]
fn reductions_that_are_not_linear_refuse_with_their_reason() {
    let mesh = Mesh::new([("a", 2u32)]).unwrap();
    let over = GroupName::Axes(mesh.all_axes());
    let mut refused = BTreeSet::new();
    for reduce in Reduce::ALL.into_iter().filter(|reduce| !is_linear(*reduce) && reduce.takes(Dtype::F64)) {
        let uneven = ReduceScatterVStart { reduce, dim: 0, sizes: sizes(&[1, 2]), over };
        for case in [
            case(AllReduceStart { reduce, over }, &[x(&[2])]),
            case(ReduceStart { reduce, root: 1, over }, &[x(&[2])]),
            case(ReduceScatterStart { reduce, dims: vec![0], over }, &[x(&[2])]),
            case(uneven, &[x(&[3])]),
        ] {
            let mut program = program(&mesh, &case, &[case.types[0].with_varies(mesh.all_axes())]).unwrap();
            assert_eq!(verify(&program), []);
            let site = Site::new("model.rs", 8);
            program.funcs[0].body.nodes[0].site = Some(site);
            let error = gradient(&program, "f", &Wanted::by([0])).unwrap_err();
            let op = case.op.info().name;
            let call = op.trim_end_matches("_start");
            let expected = format!(
                "grad: {call}: a reduction by `{}` has no gradient\n  at {site}\n  \
                 note: reduce by `sum` or `avg`, or stop the gradient before it with `stop_gradient`",
                reduce.name()
            );
            assert_eq!(error.to_string(), expected);
            refused.insert((op, reduce.name()));
        }
    }
    assert_eq!(refused.len(), 12, "{refused:?}");
}
