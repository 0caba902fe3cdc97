//! More cases of compiled functions: memory, users' ops, structs, control flow, graph breaks.

use consort::{
    Batched, Dtype, Flatten, Mesh, Missing, Pending, Reduce, Result, Route, Steady, Tensor, compile,
    compile_mut, cond, scan, while_loop,
};

use super::{numbers, same, same_sums};

pub(crate) fn b4_what_is_in_flight_is_not_overwritten(mesh: Mesh) -> Result<()> {
    // Gathered and sent tensors stay unchanged while other values of the same size are computed.
    let step = |mesh: &Mesh, x: Tensor| -> Result<Tensor> {
        let y = x.neg()?;
        let all = mesh.all_gather(&y, 0)?;
        let moved = mesh.permute(&y, Route::Ring(1), Missing::Error)?;
        let mut busy = x.clone();
        for _ in 0..6 {
            busy = busy.add(&x)?.tanh()?;
        }
        let sum = all.sum(&[0], false)?;
        moved.add(&busy)?.add(&sum.broadcast_to(&[8, 8])?)
    };
    let group = mesh.clone();
    let f = compile(move |x: Tensor| step(&group, x));
    let me = mesh.my_rank()?;
    for round in 0..50 {
        let x = numbers(&[8, 8], me + round)?;
        same(&f.call(x.clone())?, &step(&mesh, x)?)?;
    }
    Ok(())
}

pub(crate) fn b19_all_ranks_have_one_text(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| {
        let mine = x.narrow(0, group.rank(), 1)?;
        group.all_gather(mine, 0)?.add(&x)
    });
    f.call(numbers(&[mesh.size(), 3], 0)?)?;
    let text = f.explain().graphs[0].program.clone().into_bytes();
    let all = mesh.all_gather(Tensor::from_slice(&text, &[text.len()])?, 0)?.to_vec::<u8>()?;
    assert!(all.chunks(text.len()).all(|other| other == text));
    Ok(())
}

/// x * x + 1, as a user outside of consort would define it.
mod users {
    use consort::Failure;
    use consort::ops::{Cost, CostCx, EvalCx, EvalError, InferCx, OpDef};
    use consort_ir::literal::Literal;
    use consort_ir::types::Type;

    consort_ir::op! {
        /// Squares and adds one.
        pub struct SquareAndOne("square_and_one")(x) {}
        example ""
    }

    impl OpDef for SquareAndOne {
        fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
            Ok(vec![cx.tensor(0)?.clone().into()])
        }
        fn cost(&self, cx: &CostCx<'_>) -> Cost {
            cx.kernel(cx.arg_numel(0))
        }
        fn eval(&self, _: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
            let x = args[0];
            let bytes: Vec<f64> = x
                .to_bytes()
                .chunks_exact(4)
                .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                .collect();
            Ok(vec![Literal::floats(
                x.dtype,
                x.shape.clone(),
                bytes.into_iter().map(|x| x * x + 1.0).collect(),
            )])
        }
    }
}

pub(crate) fn b20_ops_of_users_are_compiled(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| {
        let y = consort::apply(&users::SquareAndOne {}, [x])?.remove(0);
        group.all_reduce(y, Reduce::Sum)
    });
    let x = numbers(&[5], 1)?;
    let n = mesh.size() as f32;
    let expected: Vec<f32> = x.to_vec::<f32>()?.into_iter().map(|x| n * (x * x + 1.0)).collect();
    for _ in 0..2 {
        assert_eq!(f.call(x.clone())?.to_vec::<f32>()?, expected);
    }
    f.expect_steady(Steady::graphs(1))
}

#[derive(Flatten)]
struct InFlight {
    sum: Tensor,
    scale: f32,
    more: Vec<Tensor>,
}

pub(crate) fn a16_pendings_inside_structs_cross(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let start = compile(move |x: Tensor| {
        assert!(consort::is_tracing());
        Ok(InFlight { sum: group.all_reduce(x.neg()?, Reduce::Sum)?, scale: 2.0, more: vec![x] })
    });
    let end = compile(|flying: InFlight| {
        let scale = Tensor::full(Dtype::F32, &[4], f64::from(flying.scale))?;
        flying.sum.mul(&scale)?.add(&flying.more[0])
    });
    for round in 0..3 {
        let x = numbers(&[4], round)?;
        let flying = start.call(x.clone())?;
        assert_eq!(mesh.in_flight(), 1);
        let got = end.call(flying)?;
        let two = Tensor::full(Dtype::F32, &[4], 2.0)?;
        same(&got, &mesh.all_reduce(x.neg()?, Reduce::Sum)?.mul(&two)?.add(&x)?)?;
    }
    start.expect_steady(Steady::graphs(1))?;
    end.expect_steady(Steady::graphs(1))
}

pub(crate) fn c7_plans_name_op_buffer_queue_and_line(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum)).name("step"); // the line
    let kept = numbers(&[4], 0)?;
    f.call(kept.clone())?;
    let explained = f.explain();
    let plan = explained.graphs[0].plan.clone().unwrap();
    let start = plan.lines().find(|line| line.contains("all_reduce_start")).unwrap();
    assert!(
        start.contains("queue world #0") && start.contains("lease") && start.contains("cases.rs:"),
        "{start}"
    );
    assert!(explained.graphs[0].cost.wire > 0 && explained.graphs[0].peak_bytes > 0);
    assert!(explained.to_string().starts_with("step: 1 call, 1 graph, 0 breaks, 0 recompiles, 1 plan"));
    Ok(())
}

pub(crate) fn trace_cond_and_scan_stay_in_the_program(mesh: Mesh) -> Result<()> {
    let step = |mesh: &Mesh, (x, xs): (Tensor, Tensor)| -> Result<(Tensor, Tensor)> {
        // Equal on all ranks, so that a collective may depend on it; the other function captures.
        let total = mesh.all_reduce(x.sum_all()?, Reduce::Sum)?;
        let positive = total.gt(0.0)?;
        let (group, own) = (mesh.clone(), xs.clone());
        let y = cond(
            &positive,
            x,
            |x| group.all_reduce(x, Reduce::Max),
            |x| x.add(&own.narrow(0, 0, 1)?.reshape(&[4])?),
        )?;
        let weight = y.abs()?;
        scan(xs.dim(0)?, y, xs, |sum: Tensor, x: Tensor| {
            let sum = sum.add(&x)?.mul(&weight)?.tanh()?;
            let all = group.all_reduce(&sum, Reduce::Sum)?;
            Ok((sum, all))
        })
    };
    let group = mesh.clone();
    let f = compile(move |args: (Tensor, Tensor)| step(&group, args));
    let me = mesh.my_rank()?;
    for round in 0..4 {
        let (x, xs) = (numbers(&[4], me + round)?, numbers(&[3, 4], me + round)?);
        let (x, xs) = if round % 2 == 0 { (x.abs()?, xs) } else { (x.abs()?.neg()?, xs) };
        let (a, b) = f.call((x.clone(), xs.clone()))?;
        let (c, d) = step(&mesh, (x, xs))?;
        same_sums(&a, &c)?;
        same_sums(&b, &d)?;
    }
    f.expect_steady(Steady::graphs(1))?;
    let program = f.explain().graphs[0].program.clone();
    assert!(program.contains("= cond ") && program.contains("= scan["), "{program}");
    Ok(())
}

pub(crate) fn b3_a_returned_handle_is_the_real_one(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| group.pending(|| group.all_reduce(x.neg()?, Reduce::Sum)));
    let me = mesh.my_rank()?;
    for round in 0..4 {
        let pending = f.call(Tensor::from_iter([(me + round) as f64])?)?;
        if round % 2 == 0 {
            while !pending.test()? {}
            assert_eq!(mesh.in_flight(), 0);
        }
        let sum: usize = (0..mesh.size()).map(|rank| rank + round).sum();
        let got = pending.wait()?;
        // The operation is over when the handle says so, not when its result is read.
        assert_eq!(mesh.in_flight(), 0);
        assert_eq!(got.to_vec::<f64>()?, [-(sum as f64)]);
    }
    f.expect_steady(Steady::graphs(1))
}

pub(crate) fn b3_handles_of_lists_of_what_is_written_and_of_messages_are_returned(mesh: Mesh) -> Result<()> {
    let (me, n) = (mesh.my_rank()?, mesh.size());
    let group = mesh.clone();
    let listed = compile(move |(x, y): (Tensor, Tensor)| {
        group.pending(|| group.all_reduce_coalesced(vec![x.neg()?, y.neg()?], Reduce::Sum))
    });
    let group = mesh.clone();
    let written = compile_mut(move |x: &mut Tensor, y: Tensor| {
        x.add_(&y)?;
        group.pending(|| group.all_reduce_(x, Reduce::Sum))
    });
    let group = mesh.clone();
    let sent = compile(move |x: Tensor| group.isend(&x.neg()?, Route::Ring(1), 0));
    for round in 0..4 {
        let number = |rank: usize| (rank + round) as f64;
        let sum: f64 = (0..n).map(number).sum();
        let own = || Tensor::from_iter([number(me)]);
        // What a handle waits for is over when it says so, not when a result is read.
        let two = listed.call((own()?, own()?.reshape(&[1, 1])?))?.wait()?;
        assert_eq!(mesh.in_flight(), 0);
        assert_eq!((two[0].to_vec::<f64>()?, two[1].to_vec::<f64>()?), (vec![-sum], vec![-sum]));
        let mut x = own()?;
        let pending = written.call(&mut x, own()?)?;
        while !pending.test()? {}
        assert_eq!(mesh.in_flight(), 0);
        pending.wait()?;
        assert_eq!(x.to_vec::<f64>()?, [2.0 * sum]);
        let pending = sent.call(own()?)?;
        let got = mesh.irecv(Dtype::F64, &[1], Route::Ring(-1), 0)?;
        assert_eq!(got.to_vec::<f64>()?, [-number((me + n - 1) % n)]);
        pending.wait()?;
        assert_eq!(mesh.in_flight(), 0);
    }
    for explained in [listed.explain(), written.explain(), sent.explain()] {
        assert_eq!(explained.graphs.len(), 1);
        assert!(!explained.graphs[0].program.contains("= wait "), "{}", explained.graphs[0].program);
    }
    assert!(mesh.unwaited().is_empty());
    Ok(())
}

pub(crate) fn b3_what_a_handle_among_the_arguments_waits_for_is_over_when_the_call_returns(
    mesh: Mesh,
) -> Result<()> {
    let (me, n) = (mesh.my_rank()?, mesh.size());
    let summed = compile(|(pending, y): (Pending<Tensor>, Tensor)| pending.wait()?.add(&y)).name("summed");
    let after = compile(|(sent, y): (Pending<()>, Tensor)| {
        let read = y.to_vec::<f64>()?;
        sent.wait()?;
        y.mul(read.len() as f64)
    });
    let returned = compile(|(pending, y): (Pending<Tensor>, Tensor)| Ok((pending, y.neg()?)));
    for round in 0..4 {
        let number = |rank: usize| (rank + round) as f64;
        let (sum, own) = ((0..n).map(number).sum::<f64>(), || Tensor::from_iter([number(me)]));
        let pending = mesh.pending(|| mesh.all_reduce(own()?, Reduce::Sum))?;
        assert_eq!(summed.call((pending, own()?))?.to_vec::<f64>()?, [sum + number(me)]);
        assert_eq!(mesh.in_flight(), 0);
        // Of a message; the function has a graph break.
        let sent = mesh.isend(&own()?, Route::Ring(1), 0)?;
        let got = mesh.irecv(Dtype::F64, &[1], Route::Ring(-1), 0)?;
        assert_eq!(after.call((sent, got))?.to_vec::<f64>()?, [number((me + n - 1) % n)]);
        assert_eq!(mesh.in_flight(), 0);
        let pending = mesh.pending(|| mesh.all_reduce(own()?, Reduce::Sum))?;
        let (pending, negated) = returned.call((pending, own()?))?;
        assert_eq!(mesh.in_flight(), 0);
        assert_eq!(pending.wait()?.to_vec::<f64>()?, [sum]);
        assert_eq!(negated.to_vec::<f64>()?, [-number(me)]);
    }
    assert!(mesh.unwaited().is_empty());
    summed.expect_steady(Steady::graphs(1))?;
    returned.expect_steady(Steady::graphs(1))
}

/// Jacobi steps on a ring of `4 * ranks` cells until the largest change of all ranks is small.
fn jacobi(mesh: &Mesh, x: Tensor, eps: &Tensor, limit: usize) -> Result<(Tensor, Tensor)> {
    let change = Tensor::ones(Dtype::F64, &[1])?;
    while_loop(
        limit,
        (x, change),
        |(_, change)| mesh.all_reduce(change, Reduce::Max)?.reshape(&())?.gt(eps),
        |(x, _)| {
            let left = mesh.permute(x.narrow(0, 3, 1)?, Route::Ring(1), Missing::Error)?;
            let right = mesh.permute(x.narrow(0, 0, 1)?, Route::Ring(-1), Missing::Error)?;
            let wide = Tensor::concat(&[&left, &x, &right], 0)?;
            let next = (wide.narrow(0, 0, 4)?.add(&wide.narrow(0, 2, 4)?)? * 0.25)?.add(&(&x * 0.5)?)?;
            let change = next.sub(&x)?.abs()?.max(&[0], true)?;
            Ok((next, change))
        },
    )
}

pub(crate) fn trace_a_while_loop_ends_where_the_data_say(mesh: Mesh) -> Result<()> {
    let (group, me, n) = (mesh.clone(), mesh.my_rank()?, mesh.size());
    let f = compile(move |(x, eps): (Tensor, Tensor)| jacobi(&group, x, &eps, 500)).name("jacobi");
    for (round, eps) in [(0, 1e-3), (1, 1e-6), (2, 2.0)] {
        let start = |rank: usize| (0..4).map(move |i| ((rank * 4 + i + round) % 5) as f64);
        let eps_ = Tensor::scalar(eps)?.replicated()?;
        let x = Tensor::from_iter(start(me))?;
        let (got, _) = f.call((x.clone(), eps_.clone()))?;
        let got = got.to_vec::<f64>()?;
        assert_eq!(got, jacobi(&mesh, x, &eps_, 500)?.0.to_vec::<f64>()?);
        // The same steps on the whole ring, in a plain loop.
        let (mut all, mut change): (Vec<f64>, f64) = ((0..n).flat_map(start).collect(), 1.0);
        while change > eps {
            let at = |i: usize| all[i % (4 * n)];
            let next: Vec<f64> =
                (0..4 * n).map(|i| (at(i + 4 * n - 1) + at(i + 1)) * 0.25 + at(i) * 0.5).collect();
            change = next.iter().zip(&all).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            all = next;
        }
        assert_eq!(got, all[4 * me..4 * me + 4]);
    }
    f.expect_steady(Steady::graphs(1))?;
    assert!(f.explain().graphs[0].program.contains("while[limit=500, expected=500, carries=3]"));
    // Too few iterations: an error on every rank, of the line of the loop.
    let (x, eps) = (Tensor::from_iter([1.0, 2.0, 3.0, 9.0])?, Tensor::scalar(1e-9)?.replicated()?);
    let eager = jacobi(&mesh, x.clone(), &eps, 3).unwrap_err().to_string();
    let group = mesh.clone();
    let short = compile(move |(x, eps): (Tensor, Tensor)| jacobi(&group, x, &eps, 3));
    let compiled = short.call((x, eps)).unwrap_err().to_string();
    for error in [eager, compiled] {
        let wanted = "expected a condition that is false after at most 3 iterations, got true\n  at ";
        assert!(
            error.starts_with(&format!("while_loop: {wanted}")) && error.contains("cases.rs:"),
            "{error}"
        );
    }
    Ok(())
}

pub(crate) fn trace_uncompiled_parts_run_between_graphs(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| {
        let y = group.all_reduce(x, Reduce::Sum)?;
        let z = consort::uncompiled(|| {
            assert!(!consort::is_tracing());
            let most = y.to_vec::<f32>()?.into_iter().fold(f32::MIN, f32::max);
            Tensor::full(Dtype::F32, &[4], f64::from(most))
        })?;
        assert!(consort::is_tracing());
        y.add(&z)
    });
    for round in 0..3 {
        let x = numbers(&[4], round)?;
        let y = mesh.all_reduce(&x, Reduce::Sum)?;
        let most = y.to_vec::<f32>()?.into_iter().fold(f32::MIN, f32::max);
        same(&f.call(x)?, &y.add(f64::from(most))?)?;
    }
    let stats = f.stats();
    assert_eq!((stats.breaks, stats.graphs, stats.retraced), (1, 2, 2), "{}", f.explain());
    Ok(())
}

pub(crate) fn trace_operations_of_an_uncompiled_group_run_between_graphs(mesh: Mesh) -> Result<()> {
    let step = |group: &consort::Group, mesh: &Mesh, mut x: Tensor| -> Result<Tensor> {
        let n = mesh.size();
        let sums = group.all_reduce(x.neg()?, Reduce::Sum)?;
        let sizes: Vec<usize> = (0..n).map(|i| i + 1).collect();
        let mine = x.narrow(0, 0, mesh.rank() + 1)?;
        let all = group.all_gather_v(mine, 0, &sizes)?.sum_all()?;
        let last = x.narrow(0, 3, 1)?;
        let first = Batched::recv(x.narrow_mut(0, 0, 1)?, Route::Ring(-1), 0);
        group.batch(vec![Batched::send(last, Route::Ring(1), 0), first])?.wait()?;
        group.all_reduce_(x.narrow_mut(0, 1, 2)?, Reduce::Max)?;
        x.add(&sums)?.add(&all)
    };
    let (group, own) = (mesh.uncompiled(), mesh.clone());
    let f = compile(move |x: Tensor| step(&group, &own, x));
    let me = mesh.my_rank()?;
    for round in 0..3 {
        let x = numbers(&[4], me + round)?;
        same(&f.call(x.clone())?, &step(&mesh, &mesh, x)?)?;
    }
    assert_eq!((f.stats().breaks, f.stats().recompiles), (4, 0), "{}", f.explain());
    Ok(())
}

pub(crate) fn trace_compiled_inside_compiled_is_one_program(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let inner = compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum));
    let outer = compile(move |x: Tensor| inner.call(x.clone())?.add(&inner.call(x)?));
    let x = numbers(&[4], 1)?;
    let once = mesh.all_reduce(x.neg()?, Reduce::Sum)?;
    same(&outer.call(x)?, &once.add(&once)?)?;
    outer.expect_steady(Steady::graphs(1))
}

pub(crate) fn trace_declared_sizes_are_symbols_at_once(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| group.all_gather(x.exp()?, 0)).dynamic(0, 0);
    for rows in [3usize, 4, 5] {
        let x = numbers(&[rows, 2], rows)?;
        same(&f.call(x.clone())?, &mesh.all_gather(x.exp()?, 0)?)?;
    }
    f.expect_steady(Steady::graphs(1))
}

pub(crate) fn trace_groups_and_settings_are_guards(mesh: Mesh) -> Result<()> {
    let pairs = mesh.split("pairs", Some(mesh.my_rank()? as u32 / 2), 0)?;
    let f = compile(|(group, x, twice): (consort::Group, Tensor, bool)| {
        let y = group.all_reduce(x, Reduce::Sum)?;
        if twice { y.add(&y) } else { Ok(y) }
    });
    let all: consort::Group = (*mesh).clone();
    let x = numbers(&[4], mesh.my_rank()?)?;
    for _ in 0..2 {
        same(&f.call((all.clone(), x.clone(), false))?, &all.all_reduce(&x, Reduce::Sum)?)?;
        same(&f.call((pairs.clone(), x.clone(), false))?, &pairs.all_reduce(&x, Reduce::Sum)?)?;
        let y = pairs.all_reduce(&x, Reduce::Sum)?;
        same(&f.call((pairs.clone(), x.clone(), true))?, &y.add(&y)?)?;
    }
    f.expect_steady(Steady::graphs(3).recompiles(2))
}

pub(crate) fn d7_steps_are_warmed_up_together(mesh: Mesh) -> Result<()> {
    let me = mesh.my_rank()?;
    let group = mesh.clone();
    let step = compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum));
    let sent = mesh.warm_up(|| {
        (0..3).try_for_each(|_| step.call(numbers(&[4], me)?)?.wait())?;
        mesh.isend(numbers(&[2], me)?, Route::Ring(1), 0)
    })?;
    // No rank returns before all are done: the neighbour's last message has arrived.
    let from = (me + mesh.size() - 1) % mesh.size();
    let came = mesh.irecv(Dtype::F32, &[2], Route::Ring(-1), 0)?;
    assert!(came.is_ready()?);
    same(&came, &numbers(&[2], from)?)?;
    sent.wait()?;
    // It is compiled, and calls are counted from here on.
    assert_eq!((step.stats().calls, step.stats().graphs), (0, 1));
    let x = numbers(&[4], me + 7)?;
    same(&step.call(x.clone())?, &mesh.all_reduce(x.neg()?, Reduce::Sum)?)?;
    assert_eq!(step.stats().calls, 1);
    step.expect_steady(Steady::graphs(1))
}
