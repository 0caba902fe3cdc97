//! Pipelines of two stages, each of two tensor parallel ranks, whose stages are roles of one compiled call; peers given by
//! numbers. On threads (`tests/roles.rs`) and on processes and over MPI (`tests/on_processes.rs`).

use consort::nn::clip;
use consort::{
    Compiled, Dtype, Group, Mesh, Pending, Reduce, Result, Steady, Tensor, compile, value_and_grad, vjp,
};

type Case = fn(Mesh) -> Result<()>;

/// Each case runs on 2 x 2 ranks: the axes `pp` and `tp`.
pub(crate) const CASES: &[(&str, Case)] = &[
    ("f1_gpipe_and_1f1b_give_the_values_of_one_loop", f1_gpipe_and_1f1b_give_the_values_of_one_loop),
    ("f1_roles_recompile_together", f1_roles_recompile_together),
    ("f1_sizes_of_one_role_become_symbols", f1_sizes_of_one_role_become_symbols),
    ("c1_peers_given_by_numbers_are_a_table", c1_peers_given_by_numbers_are_a_table),
    ("f1_peers_given_by_numbers_within_a_role", f1_peers_given_by_numbers_within_a_role),
    ("d2_source_lines_stand_beside_the_program", d2_source_lines_stand_beside_the_program),
    ("a14_gradients_in_roles", a14_gradients_in_roles),
    ("a14_the_vjp_of_a_stage_in_its_role", a14_the_vjp_of_a_stage_in_its_role),
    ("a14_a_norm_in_roles_is_that_of_all_roles", a14_a_norm_in_roles_is_that_of_all_roles),
    ("a14_a_norm_in_roles_sums_in_one_order", a14_a_norm_in_roles_sums_in_one_order),
    ("d2_roles_of_a_sub_mesh_beside_free_ranks", d2_roles_of_a_sub_mesh_beside_free_ranks),
    ("d3_roles_that_meet_at_every_fourth_call", d3_roles_that_meet_at_every_fourth_call),
];

/// Forward and backward steps of each stage, in order: `f2` is the forward step of micro-batch 2.
pub(crate) const GPIPE: [&str; 2] = ["f0 f1 f2 f3 b0 b1 b2 b3", "f0 f1 f2 f3 b0 b1 b2 b3"];
const ONE_F_ONE_B: [&str; 2] = ["f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"];

/// Rows of a micro-batch, its width, and the hidden width of a stage on all ranks.
const SIZES: [usize; 3] = [2, 3, 4];
const BATCHES: usize = 4;

/// Small whole numbers, so that all sums are exact.
fn element(key: usize, i: usize) -> f64 {
    ((i * i + 7 * i + 3 * key) % 5) as f64 - 2.0
}

fn numbers(key: usize, n: usize) -> Vec<f64> {
    (0..n).map(|i| element(key, i)).collect()
}

/// This rank's part of the weights of a stage: columns of the first, rows of the second.
pub(crate) fn weights(stage: usize, tp: &Group) -> Result<(Tensor, Tensor)> {
    let [_, width, hidden] = SIZES;
    let (me, part) = (tp.my_rank()?, hidden / tp.size());
    let a = Tensor::from_slice(&numbers(2 * stage, width * hidden), &[width, hidden])?;
    let b = Tensor::from_slice(&numbers(2 * stage + 1, hidden * width), &[hidden, width])?;
    Ok((a.narrow(1, me * part, part)?.contiguous()?, b.narrow(0, me * part, part)?.contiguous()?))
}

pub(crate) fn batches(key: usize) -> Result<Vec<Tensor>> {
    let [rows, width, _] = SIZES;
    let one = |m: usize| Tensor::from_slice(&numbers(10 * key + m, rows * width), &[rows, width]);
    (0..BATCHES).map(one).collect()
}

type Weights = (Tensor, Tensor);

/// A stage forward, and the gradient of its input from that of its result.
fn forward(tp: &Group, x: &Tensor, (a, b): &Weights) -> Result<Tensor> {
    tp.all_reduce(x.matmul(a)?.matmul(b)?, Reduce::Sum)
}

fn backward(tp: &Group, grad: &Tensor, (a, b): &Weights) -> Result<Tensor> {
    tp.all_reduce(grad.matmul(&b.t()?)?.matmul(&a.t()?)?, Reduce::Sum)
}

fn steps(order: &str) -> Vec<(bool, usize)> {
    let step = |word: &str| (word.starts_with('f'), word[1..].parse().unwrap());
    order.split_whitespace().map(step).collect()
}

/// The first stage: gives the gradients of the micro-batches.
pub(crate) fn first(
    (pp, tp): (Group, Group),
    order: &'static str,
) -> Compiled<(Weights, Vec<Tensor>), Vec<Tensor>> {
    compile(move |(w, xs): (Weights, Vec<Tensor>)| {
        let (mut sent, mut grads): (Vec<Pending<()>>, Vec<Tensor>) = (Vec::new(), Vec::new());
        for (is_forward, m) in steps(order) {
            if is_forward {
                sent.push(pp.isend(forward(&tp, &xs[m], &w)?, 1, m as i64)?);
            } else {
                let grad = pp.irecv(Dtype::F64, &SIZES[..2], 1, 100 + m as i64)?;
                grads.push(backward(&tp, &grad, &w)?);
            }
        }
        sent.into_iter().try_for_each(|sent| sent.wait())?;
        Ok(grads)
    })
}

/// The last stage: gives its results, which are also their gradients, those of half the sum of their squares.
pub(crate) fn last((pp, tp): (Group, Group), order: &'static str) -> Compiled<Weights, Vec<Tensor>> {
    compile(move |w: Weights| {
        let (mut sent, mut results): (Vec<Pending<()>>, Vec<Tensor>) = (Vec::new(), Vec::new());
        for (is_forward, m) in steps(order) {
            if is_forward {
                let x = pp.irecv(Dtype::F64, &SIZES[..2], 0, m as i64)?;
                results.push(forward(&tp, &x, &w)?);
            } else {
                sent.push(pp.isend(backward(&tp, &results[m], &w)?, 0, 100 + m as i64)?);
            }
        }
        sent.into_iter().try_for_each(|sent| sent.wait())?;
        Ok(results)
    })
}

/// The product of two matrices of rows.
fn product(x: &[f64], y: &[f64], inner: usize) -> Vec<f64> {
    let columns = y.len() / inner;
    let entry = |row: &[f64], column: usize| (0..inner).map(|k| row[k] * y[k * columns + column]).sum();
    x.chunks(inner)
        .flat_map(|row| (0..columns).map(|column| entry(row, column)).collect::<Vec<f64>>())
        .collect()
}

fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
    (0..columns)
        .flat_map(|column| x.iter().skip(column).step_by(columns).copied().collect::<Vec<_>>())
        .collect()
}

/// The results of the last stage, and the gradients of the micro-batches, by plain loops.
fn expected(key: usize) -> [Vec<Vec<f64>>; 2] {
    let [rows, width, hidden] = SIZES;
    let w = |stage: usize| [numbers(2 * stage, width * hidden), numbers(2 * stage + 1, hidden * width)];
    let (mut results, mut grads) = (Vec::new(), Vec::new());
    for m in 0..BATCHES {
        let mut x = numbers(10 * key + m, rows * width);
        for stage in 0..2 {
            let [a, b] = w(stage);
            x = product(&product(&x, &a, width), &b, hidden);
        }
        results.push(x.clone());
        for stage in [1, 0] {
            let [a, b] = w(stage);
            x = product(&product(&x, &transposed(&b, width), width), &transposed(&a, hidden), hidden);
        }
        grads.push(x);
    }
    [results, grads]
}

fn groups(mesh: &Mesh) -> Result<(Group, Group)> {
    Ok((mesh.axis("pp")?, mesh.axis("tp")?))
}

fn f1_gpipe_and_1f1b_give_the_values_of_one_loop(mesh: Mesh) -> Result<()> {
    let (pp, tp) = groups(&mesh)?;
    let (stage, w) = (pp.my_rank()?, weights(pp.my_rank()?, &tp)?);
    for orders in [GPIPE, ONE_F_ONE_B] {
        let first = first((pp.clone(), tp.clone()), orders[0]).role("first");
        let last = last((pp.clone(), tp.clone()), orders[1]).role("last");
        for key in 0..5 {
            let [results, grads] = expected(key);
            let (got, expected) = match stage {
                0 => (first.call((w.clone(), batches(key)?))?, grads),
                _ => (last.call(w.clone())?, results),
            };
            let got = got.iter().map(Tensor::to_vec::<f64>).collect::<Result<Vec<_>>>()?;
            assert_eq!(got, expected, "rank {}, {}", mesh.my_rank()?, orders[0]);
        }
        match stage {
            0 => first.expect_steady(Steady::graphs(1))?,
            _ => last.expect_steady(Steady::graphs(1))?,
        }
    }
    Ok(())
}

/// Sends what is computed of the argument from the first stage to the last.
fn relay(pp: &Group) -> (Compiled<Tensor, Tensor>, Compiled<Tensor, Tensor>) {
    let (one, two) = (pp.clone(), pp.clone());
    let first = compile(move |x: Tensor| {
        one.isend(x.neg()?, 1, 0)?.wait()?;
        Ok(x)
    });
    let last = compile(move |x: Tensor| two.irecv(Dtype::F64, x.shape(), 0, 0)?.mul(&x));
    (first.role("first"), last.role("last"))
}

fn f1_roles_recompile_together(mesh: Mesh) -> Result<()> {
    let (pp, _) = groups(&mesh)?;
    let (first, last) = relay(&pp);
    let stage = pp.my_rank()?;
    let f = if stage == 0 { &first } else { &last };
    for (call, n) in [2, 2, 3, 3, 4, 4, 2].into_iter().enumerate() {
        let x = Tensor::from_iter((0..n).map(|i| (i + call) as f64))?;
        let got = f.call(x.clone())?.to_vec::<f64>()?;
        let plain = x.to_vec::<f64>()?.into_iter().map(|x| if stage == 0 { x } else { -x * x });
        assert_eq!(got, plain.collect::<Vec<_>>());
    }
    // What fits together is known for each size only, so each is compiled once; the first is found again.
    assert_eq!((f.stats().recompiles, f.stats().breaks), (2, 0));
    // A size of one stage only: the other compiles too, and the two do not fit.
    let n = if stage == 0 { 5 } else { 2 };
    let error = f.call(Tensor::from_iter((0..n).map(f64::from))?).map(drop).unwrap_err().to_string();
    assert!(error.contains("must have one element type and shape (J1)"), "{error}");
    assert!(error.contains("sends f64[5]") && error.contains("receives f64[2]"), "{error}");
    Ok(())
}

fn f1_sizes_of_one_role_become_symbols(mesh: Mesh) -> Result<()> {
    // The first stage keeps rows up to a place that changes at each call, as a cache does; the messages do not change.
    let (pp, _) = groups(&mesh)?;
    let (one, two) = (pp.clone(), pp.clone());
    let first = compile(move |(x, n): (Tensor, consort::Index)| {
        let kept = x.narrow(0, 0, &n)?.sum_all()?;
        one.isend(kept.reshape(&[1])?, 1, 0)?.wait()?;
        Ok(kept)
    });
    let last = compile(move |x: Tensor| two.irecv(Dtype::F64, &[1], 0, 0)?.add(&x));
    let (first, last) = (first.role("first"), last.role("last"));
    for n in 1..20usize {
        let x = Tensor::from_iter((0..20).map(f64::from))?;
        let sum = (n * (n - 1) / 2) as f64;
        match pp.my_rank()? {
            0 => assert_eq!(first.call((x, n.into()))?.item::<f64>()?, sum),
            _ => assert_eq!(last.call(Tensor::from_iter([0.5f64])?)?.to_vec::<f64>()?, [sum + 0.5]),
        }
    }
    let recompiles = if pp.my_rank()? == 0 { first.stats().recompiles } else { last.stats().recompiles };
    assert!(recompiles <= 2, "{recompiles}");
    Ok(())
}

fn c1_peers_given_by_numbers_are_a_table(mesh: Mesh) -> Result<()> {
    // A ring over all ranks, and pairs whose members differ between the groups.
    let (me, n, group) = (mesh.my_rank()?, mesh.size(), mesh.clone());
    let (_, tp) = groups(&mesh)?;
    let (other, stage) = (1 - tp.my_rank()?, me / 2);
    let f = compile(move |x: Tensor| {
        let got = group.irecv(Dtype::F64, &[1], (me + n - 1) % n, 3)?;
        group.isend(&x, (me + 1) % n, 3)?.wait()?;
        // In stage 0 both send to themselves, in stage 1 to each other.
        let peer = if stage == 0 { 1 - other } else { other };
        let pair = tp.irecv(Dtype::F64, &[1], peer, 4)?;
        tp.isend(&x, peer, 4)?.wait()?;
        got.add(&pair.mul(10.0)?)
    });
    for round in 0..5 {
        let got = f.call(Tensor::from_iter([(me + round) as f64])?)?.to_vec::<f64>()?;
        let pair = if stage == 0 { me } else { 5 - me };
        assert_eq!(got, [((me + n - 1) % n + round + 10 * (pair + round)) as f64]);
    }
    f.expect_steady(Steady::graphs(1))?;
    let program = f.explain().graphs[0].program.clone();
    for part in ["send=[table(1, 2, 3, 0) tag 3]", "recv=[table(3, 0, 1, 2) tag 3]", "tag 4], over=tp]"] {
        assert!(program.contains(part), "{part}\n{program}");
    }
    assert!(!program.contains("at(1) tag 4"), "{program}");
    Ok(())
}

fn f1_peers_given_by_numbers_within_a_role(mesh: Mesh) -> Result<()> {
    // Over all ranks, so that the two ranks of a stage name different peers.
    let (me, one, two) = (mesh.my_rank()?, mesh.clone(), mesh.clone());
    let first = compile(move |x: Tensor| {
        one.isend(&x, me + 2, 0)?.wait()?;
        Ok(x)
    });
    let last = compile(move |x: Tensor| two.irecv(Dtype::F64, &[1], me - 2, 0)?.sub(&x));
    let f = if me < 2 { first.role("first") } else { last.role("last") };
    for _ in 0..3 {
        let got = f.call(Tensor::from_iter([me as f64])?)?.to_vec::<f64>()?;
        assert_eq!(got, [if me < 2 { me as f64 } else { -2.0 }]);
    }
    f.expect_steady(Steady::graphs(1))
}

#[allow(clippy::if_same_then_else, reason = "ranks take equal ops on different lines")]
fn d2_source_lines_stand_beside_the_program(mesh: Mesh) -> Result<()> {
    let (me, group) = (mesh.my_rank()?, mesh.clone());
    let f = compile(move |x: Tensor| {
        if me == 0 {
            let sum = group.all_reduce(x, Reduce::Sum)?;
            sum.mul(2.0)
        } else {
            let sum = group.all_reduce(x, Reduce::Sum)?;
            sum.mul(2.0)
        }
    });
    for _ in 0..3 {
        assert_eq!(f.call(Tensor::from_iter([me as f64])?)?.to_vec::<f64>()?, [12.0]);
    }
    f.expect_steady(Steady::graphs(1))
}

fn a14_gradients_in_roles(mesh: Mesh) -> Result<()> {
    // Each stage has a loss of its own, averaged over its ranks, which have different data: the first is linear in its
    // weights, the last quadratic.
    let (pp, tp) = groups(&mesh)?;
    let (stage, group) = (pp.my_rank()?, tp.clone());
    let step = compile(move |(w, x): (Tensor, Tensor)| {
        let group = group.clone();
        let loss = value_and_grad(move |w: Tensor| {
            let y = if stage == 0 { w.mul(&x)? } else { w.mul(&w)?.mul(&x)? };
            group.all_reduce(y.sum_all()?, Reduce::Avg)
        });
        loss.call(w)
    });
    let step = step.role(if stage == 0 { "first" } else { "last" });
    let data = |tp: usize, call: usize| [1.0 + (tp * call) as f64, 3.0 - 2.0 * tp as f64];
    for call in 0..4 {
        let w = [0.5, call as f64];
        let x = Tensor::from_iter(data(tp.my_rank()?, call))?;
        let (loss, slope) = step.call((Tensor::from_iter(w)?.equal_over(&["tp"])?, x))?;
        let mean = |i: usize| (data(0, call)[i] + data(1, call)[i]) / 2.0;
        let loss_of = |w: f64| if stage == 0 { w } else { w * w };
        let slope_of = |w: f64| if stage == 0 { 1.0 } else { 2.0 * w };
        assert_eq!(loss.item::<f64>()?, (0..2).map(|i| loss_of(w[i]) * mean(i)).sum::<f64>());
        assert_eq!(slope.to_vec::<f64>()?, [0, 1].map(|i| slope_of(w[i]) * mean(i)));
        // The gradient is equal on the ranks of a stage, and nothing is known of the other stage.
        assert_eq!(slope.varies(), ["pp"]);
    }
    step.expect_steady(Steady::graphs(1))?;
    let sums = step.explain().gradients[0].sums.clone();
    assert!(sums.len() == 1 && sums[0].contains("summed over tp"), "{sums:?}");
    Ok(())
}

fn a14_the_vjp_of_a_stage_in_its_role(mesh: Mesh) -> Result<()> {
    // A stage multiplies by its weight, which is equal on its ranks, and these have parts of the rows. The loss is half the
    // sum of the squares of the last stage's results.
    let (pp, tp) = groups(&mesh)?;
    let (stage, group) = (pp.my_rank()?, tp.clone());
    let step = compile(move |(w, x): (Tensor, Tensor)| {
        let shape = [2usize];
        let x = if stage == 0 { x } else { pp.irecv(Dtype::F64, &shape, 0, 0)? };
        let (y, sent) = match stage {
            0 => {
                let y = x.mul(&w)?;
                (y.clone(), Some(pp.isend(y, 1, 0)?))
            }
            _ => (x.mul(&w)?, None),
        };
        let by = if stage == 0 { pp.irecv(Dtype::F64, &shape, 1, 1)? } else { y };
        let (_, (of_x, of_w)) = vjp(|(x, w): (Tensor, Tensor)| x.mul(&w)).call(((x, w), by))?;
        let back = if stage == 1 { Some(pp.isend(of_x, 0, 1)?) } else { None };
        sent.into_iter().chain(back).try_for_each(|sent| sent.wait())?;
        Ok(of_w)
    });
    let step = step.role(if stage == 0 { "first" } else { "last" });
    for call in 0..4 {
        let rows = |tp: usize| [(call + tp) as f64, 1.0 - tp as f64];
        let weights = [2.0, 3.0 + call as f64];
        let w = Tensor::from_iter([weights[stage]])?.equal_over(&["tp"])?;
        let slope = step.call((w, Tensor::from_iter(rows(group.my_rank()?))?))?;
        // Of (x a b)^2 / 2, summed over the rows of all ranks: by `a`, a b^2 x^2.
        let squares: f64 = [rows(0), rows(1)].concat().iter().map(|x| x * x).sum();
        let [a, b] = weights;
        let expected = squares * if stage == 0 { a * b * b } else { a * a * b };
        assert_eq!((slope.to_vec::<f64>()?, slope.varies()), (vec![expected], vec!["pp".to_string()]));
    }
    step.expect_steady(Steady::graphs(1))
}

/// Calls of a function of the two ranks of a stage: in the first stage they have roles, and one sends to the other; in the
/// last they have none.
pub(crate) fn roles_of_a_sub_mesh(tp: &Group, stage: usize, calls: usize) -> Result<()> {
    let (me, group) = (tp.my_rank()?, tp.clone());
    let f = compile(move |x: Tensor| match (stage, me) {
        (0, 0) => {
            group.isend(x.neg()?, 1, 0)?.wait()?;
            Ok(x)
        }
        (0, _) => group.irecv(Dtype::F64, &[1], 0, 0)?.mul(&x),
        _ => group.all_reduce(x, Reduce::Sum),
    });
    let f = f.over(tp);
    let f = if stage == 0 { f.role(["left", "right"][me]) } else { f };
    for call in 0..calls {
        let x = (call + 1) as f64;
        let got = f.call(Tensor::from_iter([x])?)?.to_vec::<f64>()?;
        let expected = match (stage, me) {
            (0, 0) => x,
            (0, _) => -x * x,
            _ => 2.0 * x,
        };
        assert_eq!(got, [expected]);
    }
    f.expect_steady(Steady::graphs(1))
}

/// The first stage has 3 and 4, split over `tp`, and 12, equal there; the last has 84, equal there. Together their norm is 85.
fn a14_a_norm_in_roles_is_that_of_all_roles(mesh: Mesh) -> Result<()> {
    let (pp, tp) = groups(&mesh)?;
    let equal = |x: f64| Tensor::from_iter([x])?.equal_over(&["tp"]);
    let (stage, split) = (pp.my_rank()?, [3.0, 4.0][tp.my_rank()?]);
    let own = match stage {
        0 => vec![Tensor::from_iter([split])?, equal(12.0)?],
        _ => vec![equal(84.0)?],
    };
    let f = compile(|own: Vec<Tensor>| clip(&own, 17.0)).role(&format!("stage {stage}"));
    let (clipped, norm) = f.call(own)?;
    assert_eq!(norm.item::<f64>()?, 85.0);
    let clipped = clipped.iter().map(Tensor::item::<f64>).collect::<Result<Vec<_>>>()?;
    assert_eq!(clipped, if stage == 0 { vec![split / 5.0, 12.0 / 5.0] } else { vec![84.0 / 5.0] });
    f.expect_steady(Steady::graphs(1))
}

/// The stages have the same kinds of tensors in another order: 3 and 4 split over `tp`, and 12 equal there, in each.
fn a14_a_norm_in_roles_sums_in_one_order(mesh: Mesh) -> Result<()> {
    let (pp, tp) = groups(&mesh)?;
    let (stage, split) = (pp.my_rank()?, [3.0, 4.0][tp.my_rank()?]);
    let mut own = vec![Tensor::from_iter([split])?, Tensor::from_iter([12.0])?.equal_over(&["tp"])?];
    if stage == 1 {
        own.reverse();
    }
    let f = compile(|own: Vec<Tensor>| clip(&own, 1.0)).role(&format!("stage {stage}"));
    let norm = (2.0 * (9.0 + 16.0 + 144.0f64)).sqrt();
    let (clipped, got) = f.call(own)?;
    assert!((got.item::<f64>()? - norm).abs() < 1e-13);
    let mut expected = [split / norm, 12.0 / norm];
    if stage == 1 {
        expected.reverse();
    }
    for (got, expected) in clipped.iter().zip(expected) {
        assert!((got.item::<f64>()? - expected).abs() < 1e-15);
    }
    f.expect_steady(Steady::graphs(1))
}

fn d2_roles_of_a_sub_mesh_beside_free_ranks(mesh: Mesh) -> Result<()> {
    let (pp, tp) = groups(&mesh)?;
    let stage = pp.my_rank()?;
    roles_of_a_sub_mesh(&tp, stage, [3, 20][stage])
}

/// This rank's function of a relay.
pub(crate) fn one_of_relay(pp: &Group) -> Result<Compiled<Tensor, Tensor>> {
    let (first, last) = relay(pp);
    Ok(if pp.my_rank()? == 0 { first } else { last })
}

fn d3_roles_that_meet_at_every_fourth_call(mesh: Mesh) -> Result<()> {
    let (pp, _) = groups(&mesh)?;
    let (f, is_first) = (one_of_relay(&pp)?.lockstep(4), pp.my_rank()? == 0);
    // New sizes at a call at which they meet.
    for (call, n) in [2, 2, 2, 2, 3, 3, 3, 3, 3].into_iter().enumerate() {
        let x: Vec<f64> = (0..n).map(|i| (i + call) as f64).collect();
        let got = f.call(Tensor::from_iter(x.iter().copied())?)?.to_vec::<f64>()?;
        let expected = x.iter().map(|x| if is_first { *x } else { -x * x });
        assert_eq!(got, expected.collect::<Vec<_>>());
    }
    assert_eq!((f.stats().recompiles, f.stats().breaks), (1, 0));
    Ok(())
}
