//! Every collective, on every element type, reduction, layout and number of ranks, against its definition. The tests run
//! the cases on threads (`tests/collectives.rs`), on processes and over MPI (`tests/on_processes.rs`).

use std::collections::BTreeMap;

use consort::{Dtype, Element, Group, Mesh, Missing, Reduce, Result, Route, Tensor, ops, tolerance};
use consort_ir::literal::{Data, Literal};
use consort_ir::mesh;
use consort_ir::ops::{EvalCx, GroupEvalCx, OpDef};
use consort_types::{GroupName, Rank, Rng};
use half::{bf16, f16};

use crate::sums;

type Check = fn(Mesh) -> Result<()>;

/// Each case, for any number of ranks.
pub(crate) const CASES: &[(&str, Check)] = &[
    ("a1_a5_reductions_of_every_type", a1_a5_reductions_of_every_type),
    ("a1_to_a10_every_layout", a1_to_a10_every_layout),
    ("a7_splits_of_every_rank", a7_splits_of_every_rank),
    ("a2_a4_a6_lists_are_each_as_alone", a2_a4_a6_lists_are_each_as_alone),
];

const REDUCTIONS: [Reduce; 9] = [
    Reduce::Sum,
    Reduce::Avg,
    Reduce::Product,
    Reduce::Min,
    Reduce::Max,
    Reduce::And,
    Reduce::Or,
    Reduce::Xor,
    Reduce::PremulSum(0.375),
];

/// A collective in the API and its definition as an op.
struct Case {
    op: Box<dyn OpDef>,
    run: Box<Run>,
    /// The shape of a rank's operand.
    shape: Box<dyn Fn(usize) -> Vec<usize>>,
}

type Run = dyn Fn(&Group, Tensor) -> Result<Tensor>;

impl Case {
    fn new(
        op: impl OpDef,
        run: impl Fn(&Group, Tensor) -> Result<Tensor> + 'static,
        shape: impl Fn(usize) -> Vec<usize> + 'static,
    ) -> Case {
        Case { op: Box::new(op), run: Box::new(run), shape: Box::new(shape) }
    }
}

/// Pseudorandom elements of an element type.
fn elements(dtype: Dtype, shape: &[usize], seed: u64) -> Literal {
    let n: usize = shape.iter().product();
    let mut rng = Rng::new(seed);
    let shape = shape.to_vec();
    if dtype.is_float() {
        let number = |bits: u64| (bits % 4001) as f64 / 250.0 - 8.0;
        return Literal::floats(dtype, shape, (0..n).map(|_| number(rng.next_u64())).collect());
    }
    Literal::ints(dtype, shape, (0..n).map(|_| (rng.next_u64() >> 17) as i64).collect())
}

fn from_reference(x: &Literal) -> Tensor {
    let bytes = x.to_bytes();
    macro_rules! of {
        ($ty:ty, $size:literal) => {{
            let list: Vec<$ty> =
                bytes.chunks_exact($size).map(|b| <$ty>::from_le_bytes(b.try_into().unwrap())).collect();
            Tensor::from_slice(&list, &x.shape).unwrap()
        }};
    }
    match x.dtype {
        Dtype::F32 => of!(f32, 4),
        Dtype::F64 => of!(f64, 8),
        Dtype::F16 => of!(f16, 2),
        Dtype::Bf16 => of!(bf16, 2),
        Dtype::I32 => of!(i32, 4),
        Dtype::I64 => of!(i64, 8),
        Dtype::U8 => Tensor::from_slice(&bytes, &x.shape).unwrap(),
        Dtype::Bool => {
            Tensor::from_slice(&bytes.iter().map(|byte| *byte != 0).collect::<Vec<bool>>(), &x.shape).unwrap()
        }
    }
}

fn bytes_of(x: &Tensor) -> Vec<u8> {
    fn of<T: Element + bytemuck::Pod>(x: &Tensor) -> Vec<u8> {
        bytemuck::cast_slice(&x.to_vec::<T>().unwrap()).to_vec()
    }
    match x.dtype() {
        Dtype::F32 => of::<f32>(x),
        Dtype::F64 => of::<f64>(x),
        Dtype::F16 => of::<f16>(x),
        Dtype::Bf16 => of::<bf16>(x),
        Dtype::I32 => of::<i32>(x),
        Dtype::I64 => of::<i64>(x),
        Dtype::U8 => of::<u8>(x),
        Dtype::Bool => x.to_vec::<bool>().unwrap().into_iter().map(u8::from).collect(),
    }
}

/// The same elements in storage with another order of dimensions, or out of a larger tensor.
fn laid_out(x: Tensor, how: usize) -> Tensor {
    let rank = x.rank();
    match how {
        1 if rank > 1 => {
            let turned: Vec<usize> = (0..rank).rev().collect();
            let stored = x.permute(&turned).unwrap().contiguous().unwrap();
            stored.permute(&turned).unwrap()
        }
        2 if rank > 0 => {
            let mut wide = Tensor::concat(&[&x, &x, &x], rank - 1).unwrap();
            let size = x.shape()[rank - 1];
            wide = wide.contiguous().unwrap();
            wide.narrow(rank - 1, size, size).unwrap()
        }
        _ => x,
    }
}

/// The result of each rank by the op's definition.
fn expected(case: &Case, n: usize, args: &[Literal]) -> Vec<Literal> {
    let mesh = mesh::Mesh::new([("world", n as u32)]).unwrap();
    let symbols = BTreeMap::new();
    let members: Vec<EvalCx<'_>> =
        (0..n).map(|rank| EvalCx { mesh: &mesh, rank: Rank(rank as u32), symbols: &symbols }).collect();
    let args: Vec<Vec<Literal>> = args.iter().map(|arg| vec![arg.clone()]).collect();
    let results = case.op.eval_group(&GroupEvalCx { members: &members }, &args).unwrap();
    results.into_iter().map(|mut results| results.remove(0)).collect()
}

/// Whether a result has these elements: bit for bit, but for sums and products of floats over MPI.
fn is_right(reduce: Option<Reduce>, got: &Tensor, want: &Literal) -> bool {
    let bytes = bytes_of(got);
    let rounds = reduce.is_some_and(|reduce| !matches!(reduce, Reduce::Min | Reduce::Max));
    if !(sums::are_over_mpi() && rounds && want.dtype.is_float()) {
        return bytes == want.to_bytes();
    }
    let got = Literal::from_bytes(want.dtype, want.shape.clone(), &bytes).unwrap();
    let (Data::Float(got), Data::Float(floats)) = (&got.data, &want.data) else { return false };
    tolerance::difference(floats, got) <= sums::allowed(want.dtype)
}

fn literal(x: &Tensor) -> Literal {
    Literal::from_bytes(x.dtype(), x.shape().to_vec(), &bytes_of(x)).unwrap()
}

fn check(mesh: &Mesh, case: &Case, dtype: Dtype, how: usize) -> Result<()> {
    let (n, rank) = (mesh.size(), mesh.my_rank()?);
    let args: Vec<Literal> =
        (0..n).map(|rank| elements(dtype, &(case.shape)(rank), 7 + rank as u64)).collect();
    let want = expected(case, n, &args).swap_remove(rank);
    let reduce = case.op.collective().and_then(|collective| collective.reduce);
    let what = format!("{:?} of {dtype} on {n} ranks, layout {how}, rank {rank}", case.op);
    let x = laid_out(from_reference(&args[rank]), how);
    let kept = x.clone();
    // Passed by reference the operand keeps its value; passed by value it may be overwritten.
    let first = (case.run)(mesh, kept.clone())?;
    let second = (case.run)(mesh, laid_out(from_reference(&args[rank]), how))?;
    assert_eq!(bytes_of(&kept), args[rank].to_bytes(), "{what}: the operand");
    for got in [first, second] {
        assert_eq!(got.shape(), want.shape, "{what}");
        assert!(is_right(reduce, &got, &want), "{what}: got {got}, want {}", want.text());
    }
    Ok(())
}

fn world(n: usize) -> GroupName {
    GroupName::Axes(mesh::Mesh::new([("world", n as u32)]).unwrap().all_axes())
}

fn a1_a5_reductions_of_every_type(mesh: Mesh) -> Result<()> {
    let n = mesh.size();
    let over = world(n);
    for reduce in REDUCTIONS {
        let cases = [
            Case::new(
                ops::AllReduceStart { reduce, over },
                move |g, x| g.all_reduce(x, reduce),
                |_| vec![3, 5],
            ),
            Case::new(ops::AllReduceStart { reduce, over }, move |g, x| g.all_reduce(x, reduce), |_| vec![]),
            Case::new(
                ops::ReduceScatterStart { reduce, dims: vec![1], over },
                move |g, x| g.reduce_scatter(x, reduce, 1),
                move |_| vec![2, 3 * n, 2],
            ),
            Case::new(
                ops::ReduceStart { reduce, root: n - 1, over },
                move |g, x| g.reduce(x, reduce, n - 1),
                |_| vec![4],
            ),
        ];
        for dtype in Dtype::ALL.into_iter().filter(|dtype| reduce.takes(*dtype)) {
            cases.iter().try_for_each(|case| check(&mesh, case, dtype, 0))?;
        }
    }
    Ok(())
}

fn a1_to_a10_every_layout(mesh: Mesh) -> Result<()> {
    let n = mesh.size();
    let over = world(n);
    let sizes: Vec<usize> = (0..n).map(|rank| 2 * rank % 5).collect();
    let all: usize = sizes.iter().sum();
    let list = || sizes.iter().map(|size| (*size).into()).collect::<Vec<_>>();
    let (own, same, other) = (sizes.clone(), sizes.clone(), sizes.clone());
    let ring = || ops::PermuteStart { route: Route::Ring(1), missing: Missing::Error, over };
    let shift = || ops::PermuteStart { route: Route::Shift(-1), missing: Missing::Zeros, over };
    let cases = [
        Case::new(
            ops::AllReduceStart { reduce: Reduce::Sum, over },
            |g, x| g.all_reduce(x, Reduce::Sum),
            |_| vec![40, 30],
        ),
        Case::new(ops::AllGatherStart { dims: vec![0], over }, |g, x| g.all_gather(x, 0), |_| vec![3, 4]),
        Case::new(ops::AllGatherStart { dims: vec![1], over }, |g, x| g.all_gather(x, 1), |_| vec![40, 35]),
        Case::new(ops::AllGatherStart { dims: vec![2], over }, |g, x| g.all_gather(x, 2), |_| vec![2, 3, 4]),
        Case::new(ops::AllGatherStart { dims: vec![0], over }, |g, x| g.all_gather(x, 0), |_| vec![]),
        Case::new(ops::AllGatherStart { dims: vec![0], over }, |g, x| g.all_gather(x, 0), |_| vec![0, 3]),
        Case::new(
            ops::ReduceScatterStart { reduce: Reduce::Max, dims: vec![0], over },
            |g, x| g.reduce_scatter(x, Reduce::Max, 0),
            move |_| vec![20 * n, 50],
        ),
        Case::new(
            ops::AllToAllStart { in_splits: None, out_splits: None, over },
            |g, x| g.all_to_all(x, None, None),
            move |_| vec![2 * n, 3],
        ),
        Case::new(
            ops::BroadcastStart { root: n / 2, over },
            move |g, x| g.broadcast(x, n / 2),
            |_| vec![50, 40],
        ),
        Case::new(
            ops::GatherStart { dims: vec![1], root: 0, over },
            |g, x| g.gather(x, 1, 0),
            |_| vec![3, 2],
        ),
        Case::new(
            ops::ScatterStart { dims: vec![1], root: n - 1, over },
            move |g, x| g.scatter(x, 1, n - 1),
            move |_| vec![3, 2 * n],
        ),
        Case::new(ring(), |g, x| g.permute(x, Route::Ring(1), Missing::Error), |_| vec![7, 3]),
        Case::new(shift(), |g, x| g.permute(x, Route::Shift(-1), Missing::Zeros), |_| vec![60, 30]),
        Case::new(
            ops::AllGatherVStart { dim: 1, sizes: list(), over },
            move |g, x| g.all_gather_v(x, 1, &own),
            move |rank| vec![2, same[rank]],
        ),
        Case::new(
            ops::ReduceScatterVStart { reduce: Reduce::Sum, dim: 0, sizes: list(), over },
            move |g, x| g.reduce_scatter_v(x, Reduce::Sum, 0, &other),
            move |_| vec![all, 3],
        ),
    ];
    for case in &cases {
        for how in 0..3 {
            check(&mesh, case, Dtype::F32, how)?;
        }
        for dtype in [Dtype::Bf16, Dtype::I64, Dtype::U8, Dtype::F64] {
            check(&mesh, case, dtype, 1)?;
        }
    }
    Ok(())
}

fn a7_splits_of_every_rank(mesh: Mesh) -> Result<()> {
    let (n, rank) = (mesh.size(), mesh.my_rank()?);
    // Rank r sends r + 1 rows to rank 0, and one more to each next one.
    let ins = |rank: usize| (0..n).map(|to| (rank + to) % 4).collect::<Vec<usize>>();
    let outs = |rank: usize| (0..n).map(|from| ins(from)[rank]).collect::<Vec<usize>>();
    let row = |from: usize, to: usize, i: usize| (100 * from + 10 * to + i) as i64;
    let given: Vec<i64> =
        (0..n).flat_map(|to| (0..ins(rank)[to]).flat_map(move |i| [row(rank, to, i); 2])).collect();
    let x = Tensor::from_slice(&given, &[given.len() / 2, 2])?;
    let got = mesh.all_to_all(&x, Some(&outs(rank)), Some(&ins(rank)))?;
    let want: Vec<i64> =
        (0..n).flat_map(|from| (0..outs(rank)[from]).flat_map(move |i| [row(from, rank, i); 2])).collect();
    assert_eq!(got.to_vec::<i64>()?, want);
    Ok(())
}

fn a2_a4_a6_lists_are_each_as_alone(mesh: Mesh) -> Result<()> {
    let (n, rank) = (mesh.size(), mesh.my_rank()?);
    let list: Vec<Tensor> = [(Dtype::F32, vec![n, 4]), (Dtype::I64, vec![n]), (Dtype::F32, vec![6000, n])]
        .iter()
        .map(|(dtype, shape)| from_reference(&elements(*dtype, shape, rank as u64)))
        .collect();
    let sums = mesh.all_reduce_coalesced(list.clone(), Reduce::Sum)?;
    let gathered = mesh.all_gather_coalesced(&list)?;
    let parts = mesh.reduce_scatter_coalesced(&list, Reduce::Max, &[0, 0, 1])?;
    for (i, x) in list.iter().enumerate() {
        let alone = literal(&mesh.all_reduce(x, Reduce::Sum)?);
        assert!(is_right(Some(Reduce::Sum), &sums[i], &alone), "{i}: {}", sums[i]);
        assert_eq!(bytes_of(&gathered[i]), bytes_of(&mesh.all_gather(x, 0)?));
        let dim = usize::from(i == 2);
        assert_eq!(bytes_of(&parts[i]), bytes_of(&mesh.reduce_scatter(x, Reduce::Max, dim)?));
    }
    Ok(())
}

/// On 2 x 3 ranks: the axes `dp` and `tp`.
pub(crate) fn a13_groups_by_axis_lists_and_split_and_placements_follow(mesh: Mesh) -> Result<()> {
    let rank = mesh.my_rank()?;
    let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
    let x = Tensor::from_slice(&[rank as i64], &[1])?;
    assert_eq!(x.varies(), ["dp", "tp"]);
    let over_tp = tp.all_reduce(&x, Reduce::Sum)?;
    assert_eq!((over_tp.item::<i64>()?, over_tp.varies()), ([3, 12][rank / 3], vec!["dp".to_string()]));
    let over_dp = dp.all_reduce(&x, Reduce::Sum)?;
    assert_eq!((over_dp.item::<i64>()?, over_dp.varies()), (rank as i64 % 3 * 2 + 3, vec!["tp".to_string()]));
    let all = mesh.axes(&["dp", "tp"])?.all_reduce(&x, Reduce::Sum)?;
    assert_eq!((all.item::<i64>()?, all.varies().len()), (15, 0));
    // Ranks in no list pass their tensors through.
    let some = mesh.lists("some", &[&[5, 0], &[1, 2]])?;
    let got = some.all_reduce(&x, Reduce::Sum)?.item::<i64>()?;
    assert_eq!(got, [5, 3, 3, 3, 4, 5][rank]);
    assert_eq!(some.has_me(), ![3, 4].contains(&rank));
    let odd = mesh.split("odd", Some(rank as u32 % 2), -(rank as i64))?;
    assert_eq!(odd.all_gather(&x, 0)?.to_vec::<i64>()?, [[4, 2, 0], [5, 3, 1]][rank % 2]);
    for (error, expected) in [
        (mesh.axis("pp").map(drop), "mesh: expected one of the axes dp, tp, got `pp`\n  at "),
        (
            mesh.lists("uneven", &[&[0, 1], &[2]]).map(drop),
            "mesh: group `uneven`: lists must have equal sizes, but one has 2 ranks and another 1\n  at ",
        ),
        (
            mesh.lists("some", &[&[0, 1]]).map(drop),
            "mesh: expected the lists [[5, 0], [1, 2]], of which `some` was made, got [[0, 1]]\n  at ",
        ),
        (
            mesh.split("some", Some(0), 0).map(drop),
            "expected the lists [[5, 0], [1, 2]], of which `some` was made, got colour 0 and key 0\n  at ",
        ),
        (mesh.split("odd", None, 3).map(drop), "of which `odd` was made, got no colour\n  at "),
        (mesh.lists("tp", &[&[0, 1]]).map(drop), "duplicate name `tp`\n  at "),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // The same calls find the same groups, without communication: one rank may make them alone.
    if rank == 4 {
        assert!(mesh.lists("some", &[&[5, 0], &[1, 2]])?.raw().is_none());
        assert_eq!(mesh.split("odd", Some(0), -4)?.name(), odd.name());
    }
    assert_eq!(mesh.groups(), ["some", "odd"]);
    // Sizes may depend on the place along another axis.
    let sizes = [dp.rank() + 1, dp.rank() * 2, 1.into()];
    let mine = [[1, 0, 1], [2, 2, 1]][rank / 3];
    let part = Tensor::full(Dtype::I64, &[mine[rank % 3]], rank as f64)?;
    let all = tp.all_gather_v(part, 0, &sizes)?;
    assert_eq!(all.to_vec::<i64>()?, [vec![0, 2], vec![3, 3, 4, 4, 5]][rank / 3]);
    let sums = tp.reduce_scatter_v(&all, Reduce::Sum, 0, &sizes)?.to_vec::<i64>()?;
    assert_eq!(sums, vec![3 * rank as i64; mine[rank % 3]]);
    let zeros = Tensor::zeros(Dtype::F32, &[3])?;
    // Constants, which may differ between ranks.
    assert_eq!(zeros.varies(), ["dp", "tp"]);
    assert_eq!(zeros.add(&x.cast(Dtype::F32)?)?.varies(), ["dp", "tp"]);
    Ok(())
}
