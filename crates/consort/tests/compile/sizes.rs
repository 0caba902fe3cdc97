//! Cases of compiled functions: sizes that are symbols, that depend on the rank, that come from data; views of what is
//! pending; groups found by name.

use consort::{Dtype, Group, Index, Mesh, Missing, Reduce, Result, Route, Steady, Tensor, compile, scan};

use super::{numbers, same};

/// A number for each rank, to be a size; 0 and 1 among them.
fn rows(rank: usize, round: usize) -> usize {
    (3 * rank + 2 * round) % 5
}

/// The elements of this many rows of 2, as `ramp` makes them.
fn ramp_of(rank: usize, rows: usize) -> Vec<f32> {
    (0..2 * rows).map(|i| (100 * rank + i) as f32).collect()
}

fn ramp(rank: usize, rows: usize) -> Result<Tensor> {
    Tensor::from_slice(&ramp_of(rank, rows), &[rows, 2])
}

/// All members' numbers of rows, as sizes that come from data.
fn all_rows(group: &Group, x: &Tensor) -> Result<Vec<Index>> {
    group.all_gather(Tensor::index(x.dim(0)?)?, 0)?.to_sizes()
}

pub(crate) fn a10_uneven_sizes_come_from_data(mesh: Mesh) -> Result<()> {
    let (me, n) = (mesh.my_rank()?, mesh.size());
    let gather = |group: &Group, x: Tensor| group.all_gather_v(&x, 0, &all_rows(group, &x)?)?.neg();
    let scatter = |group: &Group, (x, sizes): (Tensor, Tensor)| {
        let sizes = group.broadcast(sizes, 0)?.to_sizes()?;
        group.reduce_scatter_v(x, Reduce::Sum, 0, &sizes)?.neg()
    };
    let group = mesh.clone();
    let gathering = compile(move |x: Tensor| gather(&group, x)).fullgraph(true);
    let group = mesh.clone();
    let scattering = compile(move |args: (Tensor, Tensor)| scatter(&group, args)).fullgraph(true);
    for round in 0..4 {
        let x = ramp(me, rows(me, round))?;
        let wanted: Vec<f32> = (0..n).flat_map(|rank| ramp_of(rank, rows(rank, round))).map(|x| -x).collect();
        assert_eq!(gather(&mesh, x.clone())?.to_vec::<f32>()?, wanted);
        assert_eq!(gathering.call(x)?.to_vec::<f32>()?, wanted);

        let sizes: Vec<i64> = (0..n).map(|rank| rows(rank, round) as i64).collect();
        let (all, before): (i64, i64) = (sizes.iter().sum(), sizes[..me].iter().sum());
        let x = ramp(me, all as usize)?;
        let wanted = |row: i64, column: i64| -> f32 {
            -(0..n as i64).map(|rank| (100 * rank + 2 * row + column) as f32).sum::<f32>()
        };
        let own = before..before + sizes[me];
        let wanted: Vec<f32> = own.flat_map(|row| [wanted(row, 0), wanted(row, 1)]).collect();
        let args = || -> Result<(Tensor, Tensor)> { Ok((x.clone(), Tensor::from_iter(sizes.clone())?)) };
        assert_eq!(scatter(&mesh, args()?)?.to_vec::<f32>()?, wanted);
        assert_eq!(scattering.call(args()?)?.to_vec::<f32>()?, wanted);
    }
    // Sizes of arguments that differ between ranks are symbols at once, 0 and 1 among their values.
    if n == 1 { Ok(()) } else { gathering.expect_steady(Steady::graphs(1)) }
}

pub(crate) fn a10_uneven_sizes_are_those_of_other_tensors(mesh: Mesh) -> Result<()> {
    let (me, n) = (mesh.my_rank()?, mesh.size());
    let step = |group: &Group, (x, like): (Tensor, Tensor)| {
        let sizes: Vec<Index> =
            (0..group.size()).map(|rank| Ok(like.dim(0)? * (rank + 1))).collect::<Result<_>>()?;
        let all = group.all_gather_v(x, 0, &sizes)?;
        group.reduce_scatter_v(&all, Reduce::Sum, 0, &sizes)
    };
    let group = mesh.clone();
    let f = compile(move |args: (Tensor, Tensor)| step(&group, args)).fullgraph(true);
    for least in [3usize, 2, 5, 4] {
        let (x, like) = (ramp(me, least * (me + 1))?, ramp(0, least)?);
        let wanted: Vec<f32> = x.to_vec::<f32>()?.into_iter().map(|x| x * n as f32).collect();
        assert_eq!(step(&mesh, (x.clone(), like.clone()))?.to_vec::<f32>()?, wanted);
        assert_eq!(f.call((x, like))?.to_vec::<f32>()?, wanted);
    }
    f.expect_steady(Steady::graphs(2).recompiles(1))
}

/// The guard that both are equal mentions two sizes, of which the second is read when the first has its new value.
pub(crate) fn a10_two_sizes_from_data_are_compared_in_each_call(_: Mesh) -> Result<()> {
    let sum = |a: &Tensor, b: &Tensor| {
        let x = Tensor::ones(Dtype::F64, &[a.to_sizes()?[0].clone()])?;
        let y = Tensor::full(Dtype::F64, &[b.to_sizes()?[0].clone()], 2.0)?;
        x.add(&y)?.sum_all()
    };
    let once = compile(move |(a, b): (Tensor, Tensor)| sum(&a, &b)).fullgraph(true);
    let each = compile(move |lists: (Tensor, Tensor)| {
        let body = move |(): (), (a, b): (Tensor, Tensor)| Ok(((), sum(&a, &b)?));
        Ok(scan(3usize, (), lists, body)?.1)
    });
    let list = |sizes: [i64; 3]| Tensor::from_iter(sizes);
    for first in [2i64, 3, 1, 4] {
        let sizes = [first, 0, first + 2];
        let wanted = sizes.map(|size| 3.0 * size as f64);
        for (size, wanted) in sizes.into_iter().zip(wanted) {
            let args = (Tensor::scalar(size)?, Tensor::scalar(size)?);
            assert_eq!(once.call(args)?.item::<f64>()?, wanted);
        }
        assert_eq!(each.call((list(sizes)?, list(sizes)?))?.to_vec::<f64>()?, wanted);
    }
    // The second size of an iteration or a call is not that of the next one.
    let error = |outcome: Result<Tensor>| outcome.and_then(|x| x.wait()).unwrap_err().to_string();
    let wrong = error(each.call((list([2, 3, 4])?, list([3, 4, 4])?)));
    assert!(wrong.starts_with("to_sizes: guard `u0 == u1` failed: 2 and 3\n"), "{wrong}");
    let wrong = error(once.call((Tensor::scalar(5i64)?, Tensor::scalar(6i64)?)));
    assert!(wrong.starts_with("to_sizes: guard `u0 == u1` failed: 5 and 6\n"), "{wrong}");
    once.expect_steady(Steady::graphs(1))?;
    each.expect_steady(Steady::graphs(1))
}

pub(crate) fn a10_wrong_sizes_from_data_are_an_error(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |(x, sizes): (Tensor, Tensor)| {
        let sizes = group.broadcast(sizes, 0)?.to_sizes()?;
        group.all_gather_v(x, 0, &sizes)
    });
    let args = |rows: usize| -> Result<(Tensor, Tensor)> {
        Ok((ramp(0, 2)?, Tensor::from_iter((0..mesh.size()).map(|_| rows as i64))?))
    };
    f.call(args(2)?)?.wait()?;
    let error = f.call(args(3)?).and_then(|all| all.wait()).unwrap_err().to_string();
    assert!(error.contains("sizes.rs:"), "{error}");
    Ok(())
}

pub(crate) fn a10_sizes_that_cannot_be_are_errors(mesh: Mesh) -> Result<()> {
    let error = |outcome: Result<Tensor>| outcome.and_then(|x| x.wait()).unwrap_err().to_string();
    let (x, one) = (ramp(0, 1)?, Index::from(1usize));
    // The sizes of all members must be equal on all of them.
    let n = mesh.size();
    let (group, sizes) = (mesh.clone(), (0..n).map(|i| mesh.rank() + i).collect::<Vec<_>>());
    let traced = error(compile(move |x: Tensor| group.all_gather_v(x, 0, &sizes)).call(x.clone()));
    let wanted =
        "all_gather_v: expected a size to be equal on all members, but rank(world) differs over world";
    assert!(traced.starts_with(wanted), "{traced}");
    let wrong = error(mesh.reduce_scatter_v(&x, Reduce::Sum, 0, &[1]));
    let wanted = format!("reduce_scatter_v: expected {n} sizes, one for each member, got 1");
    assert!(wrong.starts_with(&wanted), "{wrong}");
    let splits: Vec<Index> = (0..n).map(|i| if i == 0 { &one - 2 } else { one.clone() }).collect();
    let wrong = error(mesh.all_to_all(&x, Some(&splits), Some(&splits)));
    assert!(wrong.starts_with("all_to_all: expected a split of at least 0, got -1"), "{wrong}");
    let wrong = error(mesh.irecv(Dtype::F32, &[&one - 2], 0, 0));
    assert!(wrong.starts_with("irecv: expected a size of at least 0, got -1"), "{wrong}");
    // A size of a traced call has no value outside of it.
    let kept = std::rc::Rc::new(std::cell::RefCell::new(None));
    let keeps = std::rc::Rc::clone(&kept);
    compile(move |x: Tensor| {
        *keeps.borrow_mut() = Some(x.cast(Dtype::I64)?.sum_all()?.to_sizes()?.remove(0));
        Ok(x)
    })
    .call(x.clone())?;
    let outside = kept.take().unwrap();
    for wrong in [
        error(mesh.all_gather_v(&x, 0, &vec![outside.clone(); n])),
        error(mesh.irecv(Dtype::F32, &[outside], 0, 0)),
    ] {
        assert!(
            wrong.contains("`u0`, which a traced function kept") && wrong.contains("sizes.rs:"),
            "{wrong}"
        );
    }
    Ok(())
}

pub(crate) fn c1_received_shapes_are_symbols(mesh: Mesh) -> Result<()> {
    let (me, n) = (mesh.my_rank()?, mesh.size());
    let step = |group: &Group, x: Tensor| {
        let mine = Tensor::index(x.dim(0)?)?.reshape(&[1])?;
        let rows = group.permute(mine, Route::Ring(1), Missing::Error)?.to_sizes()?;
        let sent = group.isend(&x, Route::Ring(1), 0)?;
        let data = group.irecv(Dtype::F32, &[rows[0].clone(), 2.into()], Route::Ring(-1), 0)?;
        sent.wait()?;
        // The shape of another tensor, and one that depends on the rank.
        let sent = group.isend(&data, Route::Ring(-1), 1)?;
        let back = group.irecv(Dtype::F32, &[x.dim(0)?, x.dim(1)?], Route::Ring(1), 1)?;
        sent.wait()?;
        let one = Tensor::iota(Dtype::I64, &[group.rank() + 1], 0)?;
        let sent = group.isend(&one, Route::Ring(1), 2)?;
        let from = (group.rank() + (group.size() - 1)) % group.size();
        let ramp = group.irecv(Dtype::I64, &[from + 1], Route::Ring(-1), 2)?;
        sent.wait()?;
        Ok((data.neg()?, back, ramp))
    };
    let group = mesh.clone();
    let f = compile(move |x: Tensor| step(&group, x)).fullgraph(true);
    let from = (me + n - 1) % n;
    for round in 0..4 {
        let x = ramp(me, rows(me, round) + 2)?;
        let sent = ramp_of(from, rows(from, round) + 2).into_iter().map(|x| -x).collect::<Vec<_>>();
        for (data, back, counted) in [step(&mesh, x.clone())?, f.call(x.clone())?] {
            assert_eq!(data.to_vec::<f32>()?, sent);
            same(&back, &x)?;
            assert_eq!(counted.to_vec::<i64>()?, (0..=from as i64).collect::<Vec<_>>());
        }
    }
    f.expect_steady(Steady::graphs(if n == 1 { 2 } else { 1 }).recompiles(u64::from(n == 1)))
}

pub(crate) fn a7_splits_depend_on_the_rank(mesh: Mesh) -> Result<()> {
    let (me, n) = (mesh.my_rank()?, mesh.size());
    // Member a sends a + b rows to member b.
    let step = |group: &Group, x: Tensor| {
        let splits: Vec<Index> = (0..group.size()).map(|other| group.rank() + other).collect();
        let mut into = Tensor::zeros(Dtype::F32, &[x.dim(0)?, 2.into()])?;
        group.all_to_all_into(&mut into, &x, Some(&splits), Some(&splits))?;
        into.add(&group.all_to_all(x, Some(&splits), Some(&splits))?)
    };
    let group = mesh.clone();
    let f = compile(move |x: Tensor| step(&group, x)).fullgraph(true);
    let all = |rank: usize| (0..n).map(|other| rank + other).sum::<usize>();
    let part = |from: usize, to: usize| {
        let start: usize = (0..to).map(|other| from + other).sum();
        ramp_of(from, all(from))[2 * start..2 * (start + from + to)].to_vec()
    };
    let wanted: Vec<f32> = (0..n).flat_map(|from| part(from, me)).map(|x| 2.0 * x).collect();
    for _ in 0..3 {
        assert_eq!(step(&mesh, ramp(me, all(me))?)?.to_vec::<f32>()?, wanted);
        assert_eq!(f.call(ramp(me, all(me))?)?.to_vec::<f32>()?, wanted);
    }
    f.expect_steady(Steady::graphs(1))
}

pub(crate) fn a7_splits_of_an_uncompiled_group(mesh: Mesh) -> Result<()> {
    let (me, n) = (mesh.my_rank()?, mesh.size());
    let group = mesh.uncompiled();
    let other = group.clone();
    let f = compile(move |x: Tensor| {
        let splits: Vec<Index> = (0..n).map(|other| (group.rank() + other) % n + 1).collect();
        let there = group.all_to_all(x, Some(&splits), Some(&splits))?;
        group.all_to_all(there, Some(&splits), Some(&splits))?.neg()
    });
    for _ in 0..3 {
        let x = ramp(me, n * (n + 1) / 2)?;
        same(&f.call(x.clone())?, &x.neg()?)?;
    }
    // Outside of the program there is no size from data that the program has yet to read.
    let g = compile(move |(x, sizes): (Tensor, Tensor)| {
        let sizes = sizes.to_sizes()?;
        other.all_to_all(x, Some(&sizes), Some(&sizes))
    });
    let sizes = Tensor::from_iter((0..n).map(|_| 1i64))?;
    let error = g.call((ramp(me, n)?, sizes)).map(drop).unwrap_err().to_string();
    let wanted =
        "all_to_all: expected a number that is known while tracing, got a size that is read from data";
    assert!(error.starts_with(wanted), "{error}");
    Ok(())
}

pub(crate) fn b9_sizes_that_differ_between_ranks_make_one_graph(mesh: Mesh) -> Result<()> {
    let (me, n) = (mesh.my_rank()?, mesh.size());
    let group = mesh.clone();
    let f = compile(move |(x, count): (Tensor, Index)| {
        let sum = group.all_reduce(x.sum(&[0], false)?, Reduce::Sum)?;
        sum.add(&group.all_reduce(Tensor::index(count)?.cast(Dtype::F32)?, Reduce::Sum)?)
    });
    let sizes: [fn(usize) -> usize; 6] =
        [|rank| 3 + rank, |rank| 9 - 2 * rank, |_| 4, |rank| rank, |rank| 1 - rank.min(1), |_| 1];
    for size in sizes {
        let counted: f32 = (0..n).map(|rank| size(rank) as f32).sum();
        let wanted = |column: usize| -> f32 {
            let of = |rank: usize| ramp_of(rank, size(rank)).into_iter().skip(column).step_by(2).sum::<f32>();
            (0..n).map(of).sum::<f32>() + counted
        };
        let got = f.call((ramp(me, size(me))?, size(me).into()))?.to_vec::<f32>()?;
        assert_eq!(got, [wanted(0), wanted(1)]);
    }
    f.expect_steady(Steady::graphs(1))
}

/// The lines of a program whose op is this one, by their place.
fn lines(program: &str, op: &str) -> Vec<usize> {
    let is = |line: &str| line.split_once(" = ").is_some_and(|(_, node)| node.starts_with(op));
    program.lines().enumerate().filter(|(_, line)| is(line)).map(|(at, _)| at).collect()
}

pub(crate) fn b2_views_of_what_is_pending_do_not_wait(mesh: Mesh) -> Result<()> {
    let me = mesh.my_rank()?;
    let step = |group: &Group, (x, w): (Tensor, Tensor)| {
        let sum = group.all_reduce(&x, Reduce::Sum)?;
        let part = sum.reshape(&[2, 8])?.t()?.narrow(0, 2, 4)?;
        let rows = group.all_gather_list(&x)?;
        let busy = w.matmul(&w)?.matmul(&w)?;
        let used = part.sum_all()?.add(&busy)?;
        used.add(&rows[0].add(&sum)?)
    };
    let group = mesh.clone();
    let f = compile(move |args: (Tensor, Tensor)| step(&group, args));
    for round in 0..3 {
        let args =
            || -> Result<(Tensor, Tensor)> { Ok((numbers(&[4, 4], me + round)?, numbers(&[4, 4], 5)?)) };
        same(&f.call(args()?)?, &step(&mesh, args()?)?)?;
    }
    f.expect_steady(Steady::graphs(1))?;
    let program = &f.explain().graphs[0].program;
    let (waits, work, views) = (lines(program, "wait"), lines(program, "matmul"), lines(program, "reshape"));
    let starts = [lines(program, "all_reduce_start"), lines(program, "all_gather_start")].concat();
    assert_eq!((waits.len(), work.len(), starts.len()), (2, 2, 2), "{program}");
    assert!(starts.iter().all(|at| *at < work[0]) && waits.iter().all(|at| *at > work[1]), "{program}");
    assert!(views.iter().filter(|at| **at > waits[0]).count() >= 2, "{program}");
    Ok(())
}

/// A view of a sum, and the sum.
fn view_and_sum(group: &Group, x: &Tensor) -> Result<(Tensor, Tensor)> {
    let sum = group.all_reduce(x, Reduce::Sum)?;
    Ok((sum.reshape(&[2, 2])?, sum))
}

/// Views that are returned, beside the pending and without it, and one that is dropped.
fn returned(group: &Group, x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let (view, sum) = view_and_sum(group, x)?;
    let (other, _) = view_and_sum(group, x)?;
    drop(view_and_sum(group, x)?);
    Ok((sum, view, other))
}

/// A view that is used after a break.
fn broken(group: &Group, x: &Tensor) -> Result<Tensor> {
    let (view, sum) = view_and_sum(group, x)?;
    let other = consort::uncompiled(|| x.neg())?;
    view.add(&other.reshape(&[2, 2])?)?.add(&sum.reshape(&[2, 2])?)
}

/// A view that the body of a loop captures. It is traced twice: its carry differs between ranks after an iteration.
fn looped(group: &Group, x: &Tensor) -> Result<Tensor> {
    let (view, _) = view_and_sum(group, x)?;
    let (inner, own) = (group.clone(), x.clone());
    let first = group.all_reduce(Tensor::zeros(Dtype::F32, &[2, 2])?, Reduce::Max)?;
    let (sum, _) = scan(3usize, first, (), |carry: Tensor, ()| {
        let (within, _) = view_and_sum(&inner, &own)?;
        Ok((carry.add(&view)?.add(&own.reshape(&[2, 2])?)?.add(&within)?, Tensor::zeros(Dtype::F32, &[1])?))
    })?;
    sum.add(&view)
}

pub(crate) fn b2_views_of_what_is_pending_are_used_anywhere(mesh: Mesh) -> Result<()> {
    let me = mesh.my_rank()?;
    let groups: Vec<Group> = (0..3).map(|_| Group::clone(&mesh)).collect();
    let [a, b, c] = <[Group; 3]>::try_from(groups).unwrap_or_else(|_| unreachable!());
    let (f, g, h) = (
        compile(move |x: Tensor| returned(&a, &x)),
        compile(move |x: Tensor| broken(&b, &x)),
        compile(move |x: Tensor| looped(&c, &x)),
    );
    for round in 0..3 {
        let x = numbers(&[4], me + round)?;
        let (sum, view, other) = f.call(x.clone())?;
        let wanted = mesh.all_reduce(&x, Reduce::Sum)?;
        let box_of_4 = wanted.reshape(&[2, 2])?;
        same(&sum, &wanted)?;
        same(&view, &box_of_4)?;
        same(&other, &box_of_4)?;
        same(&g.call(x.clone())?, &box_of_4.mul(2.0)?.sub(&x.reshape(&[2, 2])?)?)?;
        // Sums of small integers, so exact in any order.
        let looped = box_of_4.mul(7.0)?.add(&x.reshape(&[2, 2])?.mul(3.0)?)?;
        same(&h.call(x)?, &looped)?;
    }
    f.expect_steady(Steady::graphs(1))?;
    h.expect_steady(Steady::graphs(1))
}

pub(crate) fn a13_groups_are_found_again_by_name(mesh: Mesh) -> Result<()> {
    let (me, n, before) = (mesh.my_rank()?, mesh.size(), mesh.groups().len());
    let backwards: Vec<usize> = (0..n).rev().collect();
    let (world, own) = (mesh.clone(), backwards.clone());
    // Made inside the function: by the first trace, and found again by the traces that check it.
    let f = compile(move |x: Tensor| {
        let turned = world.lists("turned", &[&own])?;
        let alone = world.split("alone", Some(me as u32), 0)?;
        let mine = turned.all_gather(x.add(&Tensor::index(turned.rank())?.cast(Dtype::F32)?)?, 0)?;
        alone.all_reduce(mine, Reduce::Sum)
    });
    let wanted: Vec<f32> = (0..n).map(|place| (10 * (n - 1 - place) + place) as f32).collect();
    for call in 0..40 {
        let x = Tensor::from_iter([10.0 * me as f32])?;
        assert_eq!(f.call(x)?.to_vec::<f32>()?, wanted);
        // A group that is made later is no part of the program.
        let name = if call < 20 { "later" } else { "last" };
        mesh.lists(name, &[&backwards])?;
    }
    f.expect_steady(Steady::graphs(1))?;
    let text = f.explain().graphs[0].program.clone();
    let groups: Vec<&str> = text.lines().filter(|line| line.starts_with("group ")).collect();
    assert!(groups.len() == 2 && groups[0].starts_with("group turned = "), "{text}");
    assert_eq!(mesh.groups()[before..], ["turned", "alone", "later", "last"]);
    // A function with a break is traced at each call.
    let world = mesh.clone();
    let g = compile(move |x: Tensor| {
        let turned = world.lists("turned", &[&backwards])?;
        let y = turned.all_reduce(&x, Reduce::Sum)?;
        let first = consort::uncompiled(|| y.to_vec::<f32>())?[0];
        turned.all_reduce(x.add(f64::from(first))?, Reduce::Sum)
    });
    for _ in 0..10 {
        let sum = (n * (n - 1) / 2 * 10) as f32;
        let x = Tensor::from_iter([10.0 * me as f32])?;
        assert_eq!(g.call(x)?.to_vec::<f32>()?, [sum + n as f32 * sum]);
    }
    assert_eq!((g.stats().graphs, mesh.groups().len()), (2, before + 4));
    Ok(())
}
