//! Compiled functions against eager ones, one case for each row of the specification. The tests run
//! them on threads (`tests/compile.rs`), on processes and over MPI (`tests/on_processes.rs`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use consort::{
    Batched, Dtype, Flatten, Index, Mesh, Missing, Reduce, Result, Route, Steady, Tensor, compile,
    compile_mut, tolerance,
};

#[path = "more_cases.rs"]
mod more;

use crate::sums;
use more::{
    a16_pendings_inside_structs_cross, b3_a_returned_handle_is_the_real_one,
    b3_handles_of_lists_of_what_is_written_and_of_messages_are_returned,
    b3_what_a_handle_among_the_arguments_waits_for_is_over_when_the_call_returns,
    b4_what_is_in_flight_is_not_overwritten, b19_all_ranks_have_one_text, b20_ops_of_users_are_compiled,
    c7_plans_name_op_buffer_queue_and_line, d7_steps_are_warmed_up_together,
    trace_a_while_loop_ends_where_the_data_say, trace_compiled_inside_compiled_is_one_program,
    trace_cond_and_scan_stay_in_the_program, trace_declared_sizes_are_symbols_at_once,
    trace_groups_and_settings_are_guards, trace_operations_of_an_uncompiled_group_run_between_graphs,
    trace_uncompiled_parts_run_between_graphs,
};

#[path = "sizes.rs"]
mod sizes;

use sizes::{
    a7_splits_depend_on_the_rank, a7_splits_of_an_uncompiled_group, a10_sizes_that_cannot_be_are_errors,
    a10_two_sizes_from_data_are_compared_in_each_call, a10_uneven_sizes_are_those_of_other_tensors,
    a10_uneven_sizes_come_from_data, a10_wrong_sizes_from_data_are_an_error,
    a13_groups_are_found_again_by_name, b2_views_of_what_is_pending_are_used_anywhere,
    b2_views_of_what_is_pending_do_not_wait, b9_sizes_that_differ_between_ranks_make_one_graph,
    c1_received_shapes_are_symbols,
};

macro_rules! cases {
    ($($name:ident $sizes:expr;)*) => {
        /// Each case, and on how many threads it runs.
        pub(crate) const CASES: &[(&str, &[usize], fn(Mesh) -> Result<()>)] = &[$((stringify!($name), &$sizes, $name)),*];
    };
}

cases! {
    b1_compiled_equals_eager_for_every_collective [1, 2, 3, 4];
    b6_the_program_of_a_collective_is_a_start_and_a_wait [2];
    b5_copies_are_made_only_where_the_data_flow_forces_them [2];
    b9_a_second_size_makes_a_symbol_and_a_third_needs_nothing [2];
    b9_a_decode_step_over_a_hundred_positions_compiles_at_most_twice [2];
    b10_rank_and_size_stay_symbols [3];
    b11_an_async_handle_is_no_break [2];
    b2_independent_work_stands_between_start_and_wait [2];
    b3_a_start_may_be_waited_for_on_the_other_side [2];
    b3_a_returned_handle_is_the_real_one [1, 2, 3];
    b3_handles_of_lists_of_what_is_written_and_of_messages_are_returned [1, 2, 3];
    b3_what_a_handle_among_the_arguments_waits_for_is_over_when_the_call_returns [1, 2, 3];
    b7_scalars_gaps_and_unused_results [2];
    b8_splits_read_from_a_tensor_are_symbols [2];
    b12_many_calls_leave_nothing_behind [2];
    b21_captured_tensors_are_reported_constants [1];
    c1_messages_compile [2, 3, 4];
    c2_the_ring_kernel_compiles_without_copies [2, 3, 4, 8];
    c5_halo_steps_with_mutable_slices_compile_without_copies [1, 2, 3];
    c5_in_place_forms_compile [2];
    d2_the_line_that_calls_is_not_part_of_the_program [2];
    d3_each_call_is_compared [2];
    d5_a_steady_state_is_asserted [2];
    d7_steps_are_warmed_up_together [1, 2, 3];
    d4_breaks_and_recompiles_are_told_apart [2];
    d2_a_rank_that_differs_is_named_on_all_ranks [2, 3];
    d2_a_rank_that_misses_takes_the_others_with_it [2];
    trace_a_step_of_gradient_descent_updates_its_model_in_place [2];
    trace_a_while_loop_ends_where_the_data_say [1, 2, 3];
    trace_lets_nothing_escape_silently [1];
    trace_too_often_runs_the_function_as_it_is [1];
    b4_what_is_in_flight_is_not_overwritten [2, 3];
    b19_all_ranks_have_one_text [2, 4];
    b20_ops_of_users_are_compiled [2];
    a16_pendings_inside_structs_cross [2];
    c6_owned_buffers_rings_and_halos_copy_nothing [2, 3];
    c7_plans_name_op_buffer_queue_and_line [2];
    trace_cond_and_scan_stay_in_the_program [2, 3];
    trace_uncompiled_parts_run_between_graphs [2];
    trace_operations_of_an_uncompiled_group_run_between_graphs [2, 3];
    trace_compiled_inside_compiled_is_one_program [2];
    trace_declared_sizes_are_symbols_at_once [2];
    trace_groups_and_settings_are_guards [4];
    a7_splits_depend_on_the_rank [1, 2, 3];
    a7_splits_of_an_uncompiled_group [1, 2, 3];
    a10_sizes_that_cannot_be_are_errors [2];
    a10_uneven_sizes_come_from_data [1, 2, 3];
    a10_two_sizes_from_data_are_compared_in_each_call [1, 2];
    a10_uneven_sizes_are_those_of_other_tensors [1, 2, 3];
    a10_wrong_sizes_from_data_are_an_error [2];
    a13_groups_are_found_again_by_name [2, 3];
    b2_views_of_what_is_pending_do_not_wait [2];
    b2_views_of_what_is_pending_are_used_anywhere [2, 3];
    b9_sizes_that_differ_between_ranks_make_one_graph [2, 3];
    c1_received_shapes_are_symbols [1, 2, 3];
}

fn numbers(shape: &[usize], seed: usize) -> Result<Tensor> {
    let n = shape.iter().product();
    Tensor::from_slice(&(0..n).map(|i| ((i * 7 + seed * 3) % 11) as f32 - 4.0).collect::<Vec<_>>(), shape)
}

fn same(a: &Tensor, b: &Tensor) -> Result<()> {
    assert_eq!(a.shape(), b.shape());
    assert_eq!(a.to_vec::<f32>()?, b.to_vec::<f32>()?);
    Ok(())
}

/// The same of sums whose elements are not exact in any order.
fn same_sums(a: &Tensor, b: &Tensor) -> Result<()> {
    assert_eq!(a.shape(), b.shape());
    let (a, b) = (a.to_vec::<f32>()?, b.to_vec::<f32>()?);
    assert!(tolerance::difference(&a, &b) <= sums::allowed(Dtype::F32), "{a:?} {b:?}");
    Ok(())
}

fn b1_compiled_equals_eager_for_every_collective(mesh: Mesh) -> Result<()> {
    let me = mesh.my_rank()?;
    type Step = Rc<dyn Fn(&Mesh, Tensor) -> Result<Tensor>>;
    let steps: Vec<Step> = vec![
        Rc::new(|mesh, x| mesh.broadcast(x, 0)),
        Rc::new(|mesh, x| mesh.all_reduce(x, Reduce::Sum)),
        Rc::new(|mesh, x| mesh.all_reduce(x, Reduce::Max)),
        Rc::new(|mesh, x| mesh.all_gather(x, 0)),
        Rc::new(|mesh, x| mesh.all_gather(x, 1)),
        Rc::new(|mesh, x| mesh.reduce_scatter(x, Reduce::Sum, 0)),
        Rc::new(|mesh, x| mesh.reduce_scatter(x, Reduce::Sum, 1)),
        Rc::new(|mesh, x| mesh.all_to_all(x, None, None)),
        Rc::new(|mesh, x| mesh.permute(x, Route::Ring(1), Missing::Error)),
        Rc::new(|mesh, x| mesh.reduce(x, Reduce::Sum, 0)),
        Rc::new(|mesh, x| mesh.gather(x, 0, 0)),
        Rc::new(|mesh, x| mesh.scatter(x, 0, 0)),
    ];
    for (number, step) in steps.into_iter().enumerate() {
        let (group, own) = (mesh.clone(), Rc::clone(&step));
        let alone = compile(move |x: Tensor| own(&group, x));
        let (group, own) = (mesh.clone(), Rc::clone(&step));
        let after = compile(move |(x, w): (Tensor, Tensor)| {
            let y = x.matmul(&w)?;
            own(&group, Tensor::concat(&[&y, &x], 0)?)?.add(&own(&group, Tensor::concat(&[&x, &y], 0)?)?)
        });
        for round in 0..3 {
            let (x, w) = (numbers(&[12, 12], me + round)?, numbers(&[12, 12], number)?);
            same(&alone.call(x.clone())?, &step(&mesh, x.clone())?)?;
            let y = x.matmul(&w)?;
            let eager = step(&mesh, Tensor::concat(&[&y, &x], 0)?)?
                .add(&step(&mesh, Tensor::concat(&[&x, &y], 0)?)?)?;
            same(&after.call((x, w))?, &eager)?;
        }
        assert_eq!((alone.stats().graphs, alone.stats().breaks, alone.stats().recompiles), (1, 0, 0));
    }
    Ok(())
}

fn b6_the_program_of_a_collective_is_a_start_and_a_wait(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let functional = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)?.relu());
    let group = mesh.clone();
    let in_place = compile(move |mut x: Tensor| {
        group.all_reduce_(&mut x, Reduce::Sum)?;
        x.relu()
    });
    let x = numbers(&[8], 1)?;
    same(&functional.call(x.clone())?, &in_place.call(x)?)?;
    let lines = |text: &str| text.lines().filter(|line| line.contains(" = ")).count();
    for explained in [functional.explain(), in_place.explain()] {
        assert_eq!(lines(&explained.graphs[0].program), 3, "{explained}");
    }
    Ok(())
}

fn b5_copies_are_made_only_where_the_data_flow_forces_them(mesh: Mesh) -> Result<()> {
    let bytes = 4 * 8;
    // An intermediate that is not used again is reduced in place.
    let group = mesh.clone();
    let f = compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum));
    f.call(numbers(&[8], 0)?)?.wait()?;
    assert_eq!(f.stats().copied_bytes, 0, "{}", f.explain());
    // One that is used again is copied, once.
    let group = mesh.clone();
    let f = compile(move |x: Tensor| {
        let y = x.neg()?;
        group.all_reduce(&y, Reduce::Sum)?.add(&y)
    });
    f.call(numbers(&[8], 0)?)?.wait()?;
    assert_eq!(f.stats().copied_bytes, bytes, "{}", f.explain());
    // An argument with other owners is copied, once; one that is donated is not.
    let group = mesh.clone();
    let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum));
    let kept = numbers(&[8], 0)?;
    let before = kept.to_vec::<f32>()?;
    f.call(kept.clone())?.wait()?;
    assert_eq!(f.stats().copied_bytes, bytes, "{}", f.explain());
    assert_eq!(kept.to_vec::<f32>()?, before);
    f.call(numbers(&[8], 0)?)?.wait()?;
    assert_eq!(f.stats().copied_bytes, bytes, "{}", f.explain());
    assert_eq!(f.explain().graphs[0].copied_bytes, 0);
    Ok(())
}

fn b9_a_second_size_makes_a_symbol_and_a_third_needs_nothing(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |(x, w): (Tensor, Tensor)| {
        let y = x.matmul(&w)?.add(&x)?;
        group.all_reduce(y, Reduce::Sum)
    });
    for (calls, rows) in [3usize, 5, 7, 3, 9].into_iter().enumerate() {
        let (x, w) = (numbers(&[rows, 4], calls)?, numbers(&[4, 4], 1)?);
        let eager = mesh.all_reduce(x.matmul(&w)?.add(&x)?, Reduce::Sum)?;
        same(&f.call((x, w))?, &eager)?;
        assert_eq!(f.stats().recompiles, u64::from(calls > 0), "{}", f.explain());
    }
    assert_eq!(f.stats().graphs, 2);
    Ok(())
}

#[derive(Flatten)]
struct Cache {
    keys: Tensor,
    values: Tensor,
}

/// One token: its key and value are written at its position.
fn decode(cache: &mut Cache, q: &Tensor, position: &Index) -> Result<Tensor> {
    cache.keys.narrow_mut(2, position.clone(), 1)?.copy_from(q)?;
    cache.values.narrow_mut(2, position.clone(), 1)?.copy_from(&q.neg()?)?;
    let seen = position + 1;
    let keys = cache.keys.narrow(2, 0, seen.clone())?;
    let values = cache.values.narrow(2, 0, seen)?;
    q.attention(&keys, &values, 1.0, None)
}

fn b9_a_decode_step_over_a_hundred_positions_compiles_at_most_twice(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let step = compile_mut(move |cache: &mut Cache, (q, position): (Tensor, Index)| {
        group.all_reduce(decode(cache, &q, &position)?, Reduce::Sum)
    });
    let new = || -> Result<Cache> {
        Ok(Cache {
            keys: Tensor::zeros(Dtype::F32, &[1, 2, 128, 4])?,
            values: Tensor::zeros(Dtype::F32, &[1, 2, 128, 4])?,
        })
    };
    let (mut cache, mut plain) = (new()?, new()?);
    for position in 0..100usize {
        let q = numbers(&[1, 2, 1, 4], position)?;
        let eager = mesh.all_reduce(decode(&mut plain, &q, &Index::from(position))?, Reduce::Sum)?;
        let got = step.call(&mut cache, (q, Index::from(position)))?;
        let (got, eager) = (got.to_vec::<f32>()?, eager.to_vec::<f32>()?);
        let off = tolerance::difference(&eager, &got);
        assert!(off <= tolerance::of_runs(Dtype::F32), "{position}: {got:?} {eager:?}");
    }
    assert!(step.stats().recompiles <= 1, "{}", step.explain());
    same(&cache.keys, &plain.keys)
}

fn b10_rank_and_size_stay_symbols(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| {
        let mine = x.narrow(0, group.rank() * 2, 2)?;
        group.all_gather(mine, 0)?.add(&Tensor::index(group.rank())?.cast(Dtype::F32)?)
    });
    let x = numbers(&[2 * mesh.size()], 0)?;
    let me = mesh.my_rank()? as f32;
    let expected: Vec<f32> = x.to_vec::<f32>()?.into_iter().map(|x| x + me).collect();
    assert_eq!(f.call(x)?.to_vec::<f32>()?, expected);
    let program = &f.explain().graphs[0].program;
    assert!(program.contains("rank(world)"), "{program}");
    // Branching on the rank is refused, with a note.
    let group = mesh.clone();
    let f = compile(move |x: Tensor| if group.rank() == 0 { x.neg() } else { Ok(x) });
    let error = f.call(numbers(&[6], 0)?).unwrap_err().to_string();
    assert!(error.contains("depends on the rank") && error.contains("note:"), "{error}");
    Ok(())
}

fn b11_an_async_handle_is_no_break(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |(x, y): (Tensor, Tensor)| {
        let pending = group.pending(|| group.all_reduce(x.neg()?, Reduce::Sum))?;
        let z = y.matmul(&y)?;
        pending.wait()?.add(&z)
    });
    let (x, y) = (numbers(&[4, 4], 0)?, numbers(&[4, 4], 1)?);
    let eager = mesh.all_reduce(x.neg()?, Reduce::Sum)?.add(&y.matmul(&y)?)?;
    same(&f.call((x, y))?, &eager)?;
    f.expect_steady(Steady::graphs(1))
}

fn b2_independent_work_stands_between_start_and_wait(mesh: Mesh) -> Result<()> {
    let step = |mesh: &Mesh, (a, b): (Tensor, Tensor)| -> Result<Tensor> {
        let c = Tensor::concat(&[&a.matmul(&b)?, &a], 0)?;
        let sum = mesh.all_reduce(c, Reduce::Sum)?;
        let other = b.matmul(&a)?;
        sum.add(&Tensor::concat(&[&other, &other], 0)?)
    };
    let group = mesh.clone();
    let f = compile(move |args: (Tensor, Tensor)| step(&group, args));
    let me = mesh.my_rank()?;
    let args = || -> Result<(Tensor, Tensor)> { Ok((numbers(&[4, 4], me)?, numbers(&[4, 4], me + 1)?)) };
    same(&f.call(args()?)?, &step(&mesh, args()?)?)?;
    let plan = f.explain().graphs[0].plan.clone().unwrap();
    let lines: Vec<&str> = plan.lines().collect();
    let at = |what: &str| {
        lines.iter().position(|line| line.contains(what)).unwrap_or_else(|| panic!("{what}: {plan}"))
    };
    let last = lines.iter().rposition(|line| line.contains("= matmul")).unwrap();
    assert!(at("all_reduce_start") < last && last < at("= wait"), "{plan}");
    Ok(())
}

fn c6_owned_buffers_rings_and_halos_copy_nothing(mesh: Mesh) -> Result<()> {
    // The copies that plans state, and those counted at run time.
    let group = mesh.clone();
    let owned = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum));
    let group = mesh.clone();
    let rings = compile(move |x: Tensor| ring(&group, x));
    let group = mesh.clone();
    let halos = compile(move |x: Tensor| halo(&group, x));
    for round in 0..3 {
        owned.call(numbers(&[64], round)?)?.wait()?;
        rings.call(numbers(&[4, 4], round)?)?.wait()?;
        halos.call(numbers(&[6, 5], round)?)?.wait()?;
    }
    for f in [&owned, &rings, &halos] {
        assert_eq!((f.explain().graphs[0].copied_bytes, f.stats().copied_bytes), (0, 0), "{}", f.explain());
    }
    Ok(())
}

fn d3_each_call_is_compared(mesh: Mesh) -> Result<()> {
    // Ranks that call with different settings get an error before anything runs, and can continue.
    let me = mesh.my_rank()?;
    let group = mesh.clone();
    let f = compile(move |(x, twice): (Tensor, bool)| {
        let x = if twice { x.add(&x)? } else { x };
        group.all_reduce(x, Reduce::Sum)
    });
    f.call((numbers(&[4], me)?, false))?.wait()?;
    let error = f.call((numbers(&[4], me)?, me == 0)).map(drop).unwrap_err().to_string();
    let said = ": the kinds of its arguments must be the same on all ranks; the first difference is in part 1\n  at ";
    assert!(error.contains(said) && error.contains("\n  rank 0: 1\n  rank"), "{error}");
    let x = numbers(&[4], me)?;
    same(&f.call((x.clone(), false))?, &mesh.all_reduce(x, Reduce::Sum)?)
}

fn d2_the_line_that_calls_is_not_part_of_the_program(mesh: Mesh) -> Result<()> {
    // A slice that is in flight when the function returns, and a list of which no tensor was waited for.
    let me = mesh.my_rank()?;
    let group = mesh.clone();
    let f = compile(move |mut x: Tensor| {
        group.all_reduce_(x.narrow_mut(0, 0usize, 2usize)?, Reduce::Sum)?;
        let list = group.all_reduce_coalesced(vec![x.neg()?, x.exp()?], Reduce::Sum)?;
        Ok((x, list))
    });
    let first = f.call(numbers(&[4], 1)?)?;
    // Ranks call it from lines of their own.
    let second = match me {
        0 => f.call(numbers(&[4], 1)?)?,
        _ => f.call(numbers(&[4], 1)?)?,
    };
    let third = f.call(numbers(&[4], 1)?)?;
    same(&first.0, &second.0)?;
    same(&first.0, &third.0)?;
    same_sums(&first.1[1], &third.1[1])
}

fn d5_a_steady_state_is_asserted(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum));
    for rows in [3usize, 3, 3, 5, 6] {
        f.call(numbers(&[rows], 0)?)?.wait()?;
    }
    f.expect_steady(Steady::graphs(2).recompiles(1))?;
    let error = f.expect_steady(Steady::graphs(1)).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "expect_steady: expected at most 1 graph, 0 breaks and 0 recompiles, got 2 graphs, 0 breaks and 1 recompile\n"
        ),
        "{error}"
    );
    assert!(
        error.contains(
            "recompile: dimension 0 of tensor 0 of the arguments: expected 3, got 5\n    at crates/"
        ),
        "{error}"
    );
    Ok(())
}

fn b3_a_start_may_be_waited_for_on_the_other_side(mesh: Mesh) -> Result<()> {
    // Started here, waited for in compiled code.
    let f = compile(|x: Tensor| x.add(&x));
    let pending = mesh.all_reduce(numbers(&[8], 1)?, Reduce::Sum)?;
    assert_eq!(mesh.in_flight(), 1);
    let eager = mesh.all_reduce(numbers(&[8], 1)?, Reduce::Sum)?;
    same(&f.call(pending)?, &eager.add(&eager)?)?;
    assert_eq!(mesh.in_flight(), 0);
    // Started in compiled code, waited for here.
    let group = mesh.clone();
    let g = compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum));
    let y = g.call(numbers(&[8], 1)?)?;
    assert_eq!(mesh.in_flight(), 1);
    same(&y, &eager.neg()?)?;
    assert_eq!(mesh.in_flight(), 0);
    Ok(())
}

fn b7_scalars_gaps_and_unused_results(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |(s, x): (Tensor, Tensor)| {
        drop(group.all_gather(&x, 0)?);
        Ok((group.all_reduce(s, Reduce::Sum)?, group.all_reduce(&x, Reduce::Sum)?))
    });
    let s = Tensor::scalar(3.0f32)?;
    let x = numbers(&[3, 4], 2)?.t()?;
    let eager = (mesh.all_reduce(&s, Reduce::Sum)?, mesh.all_reduce(&x, Reduce::Sum)?);
    for _ in 0..2 {
        let (a, b) = f.call((s.clone(), x.clone()))?;
        same(&a, &eager.0)?;
        same(&b, &eager.1)?;
    }
    Ok(())
}

fn b8_splits_read_from_a_tensor_are_symbols(mesh: Mesh) -> Result<()> {
    let me = mesh.my_rank()?;
    let group = mesh.clone();
    let f = compile(move |(x, sizes): (Tensor, Tensor)| {
        let ins = sizes.to_sizes()?;
        let outs = group.all_to_all(&sizes, None, None)?.to_sizes()?;
        group.all_to_all(x, Some(&outs), Some(&ins))?.neg()
    })
    .fullgraph(true);
    let part = |from: usize, to: usize, round: usize| (from + 2 * to + round) % 3 + 1;
    for round in 0..3usize {
        let ins: Vec<usize> = (0..mesh.size()).map(|to| part(me, to, round)).collect();
        let outs: Vec<usize> = (0..mesh.size()).map(|from| part(from, me, round)).collect();
        let x = numbers(&[ins.iter().sum(), 2], me)?;
        let sizes = Tensor::from_iter(ins.iter().map(|n| *n as i64))?;
        let eager = mesh.all_to_all(&x, Some(&outs), Some(&ins))?.neg()?;
        same(&f.call((x, sizes))?, &eager)?;
    }
    assert_eq!(f.stats().breaks, 0);
    Ok(())
}

fn b12_many_calls_leave_nothing_behind(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| group.all_reduce(x.matmul(&x)?, Reduce::Sum)?.relu());
    let heap = mesh.raw().unwrap().heap().clone();
    let mut used = 0;
    for round in 0..200usize {
        let size = [4, 8, 6][round % 3];
        let x = numbers(&[size, size], round)?;
        let eager = mesh.all_reduce(x.matmul(&x)?, Reduce::Sum)?.relu()?;
        same(&f.call(x)?, &eager)?;
        drop(eager);
        if round == 20 {
            used = heap.in_use();
        }
    }
    assert!(heap.in_use() <= used, "{} after {used}", heap.in_use());
    Ok(())
}

fn b21_captured_tensors_are_reported_constants(_: Mesh) -> Result<()> {
    let w = numbers(&[4], 1)?;
    let own = w.clone();
    let f = compile(move |x: Tensor| x.mul(&own));
    same(&f.call(numbers(&[4], 2)?)?, &numbers(&[4], 2)?.mul(&w)?)?;
    let explained = f.explain();
    assert_eq!(explained.constants.len(), 1, "{explained}");
    let own = w.clone();
    let f = compile(move |x: Tensor| x.mul(&own)).fullgraph(true);
    let error = f.call(numbers(&[4], 2)?).unwrap_err().to_string();
    assert!(error.starts_with("mul: expected tensors that come from the arguments"), "{error}");
    // A captured number that changed is detected when the function is traced again.
    let factor = Rc::new(Cell::new(1.0));
    let own = Rc::clone(&factor);
    let f = compile(move |x: Tensor| x.mul(own.get()));
    f.call(numbers(&[4], 2)?)?;
    factor.set(2.0);
    let error = f.call(numbers(&[4], 2)?).unwrap_err().to_string();
    assert!(error.contains("it depends on something that is no argument"), "{error}");
    Ok(())
}

fn c1_messages_compile(mesh: Mesh) -> Result<()> {
    let step = |mesh: &Mesh, x: Tensor| -> Result<Tensor> {
        let mut y = Tensor::zeros(Dtype::F32, &[4])?;
        let batch = vec![Batched::send(&x, Route::Ring(1), 3), Batched::recv(&mut y, Route::Ring(-1), 3)];
        mesh.batch(batch)?.wait()?;
        let z = mesh.irecv(Dtype::F32, &[4], Route::Ring(-1), 5)?;
        mesh.isend(&x, Route::Ring(1), 5)?.wait()?;
        y.sub(&x)?.add(&z)
    };
    let group = mesh.clone();
    let f = compile(move |x: Tensor| step(&group, x));
    let me = mesh.my_rank()?;
    for round in 0..3 {
        let x = numbers(&[4], me + round)?;
        same(&f.call(x.clone())?, &step(&mesh, x)?)?;
    }
    f.expect_steady(Steady::graphs(1))
}

/// The seed's kernel: two interleaved rings; each step computes on received data while the next transfer is pending.
fn ring(mesh: &Mesh, x: Tensor) -> Result<Tensor> {
    let (mut a, mut sum) = (x.clone(), x);
    for _ in 1..mesh.size() {
        let next = mesh.irecv(Dtype::F32, &[4, 4], Route::Ring(-1), 0)?;
        let sent = mesh.isend(&a, Route::Ring(1), 0)?;
        sum = sum.matmul(&a)?.tanh()?;
        sent.wait()?;
        a = next;
        sum = sum.add(&a)?;
    }
    Ok(sum)
}

fn c2_the_ring_kernel_compiles_without_copies(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| ring(&group, x));
    let me = mesh.my_rank()?;
    for round in 0..3 {
        let x = numbers(&[4, 4], me + round)?;
        let eager = ring(&mesh, x.clone())?;
        same(&f.call(x)?, &eager)?;
    }
    assert_eq!(f.stats().copied_bytes, 0, "{}", f.explain());
    f.expect_steady(Steady::graphs(1))
}

/// One step of a stencil on sharded rows with open borders: halo rows are received in the array itself.
fn halo(mesh: &Mesh, mut x: Tensor) -> Result<Tensor> {
    let rows = x.dim(0)?;
    let (first, last) = (x.narrow(0, 1, 1)?, x.narrow(0, &rows - 2, 1)?);
    mesh.batch(vec![
        Batched::send(first, Route::Shift(-1), 0),
        Batched::recv(x.narrow_mut(0, &rows - 1, 1)?, Route::Shift(1), 0),
    ])?
    .wait()?;
    mesh.batch(vec![
        Batched::send(last, Route::Shift(1), 1),
        Batched::recv(x.narrow_mut(0, 0, 1)?, Route::Shift(-1), 1),
    ])?
    .wait()?;
    let (up, down) = (x.narrow(0, 0, &rows - 2)?, x.narrow(0, 2, &rows - 2)?);
    let inside = up.add(&down)?;
    x.narrow_mut(0, 1, &rows - 2)?.copy_from(&inside)?;
    Ok(x)
}

fn c5_halo_steps_with_mutable_slices_compile_without_copies(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |x: Tensor| halo(&group, x));
    let me = mesh.my_rank()?;
    let (mut x, mut plain) = (numbers(&[6, 5], me)?, numbers(&[6, 5], me)?);
    for _ in 0..3 {
        x = f.call(x)?;
        plain = halo(&mesh, plain)?;
        same(&x, &plain)?;
    }
    assert_eq!(f.stats().copied_bytes, 0, "{}", f.explain());
    Ok(())
}

fn c5_in_place_forms_compile(mesh: Mesh) -> Result<()> {
    let step = |mesh: &Mesh, mut x: Tensor| -> Result<Tensor> {
        mesh.all_reduce_(&mut x, Reduce::Sum)?;
        mesh.all_reduce_(x.narrow_mut(0, 1, 2)?, Reduce::Max)?;
        mesh.broadcast_(&mut x, 1)?;
        let mut list = vec![x.neg()?, x.abs()?];
        mesh.all_reduce_coalesced_(&mut list, Reduce::Sum)?;
        let n = mesh.size();
        let mut out = Tensor::zeros(Dtype::F32, &[5 * n])?;
        mesh.all_gather_into(out.narrow_mut(0, 1, 4 * n)?, &list[0], 0)?;
        let mut half = Tensor::zeros(Dtype::F32, &[5])?;
        mesh.reduce_scatter_into(&mut half, &out, Reduce::Sum, 0)?;
        half.add_(&Tensor::ones(Dtype::F32, &[5])?)?;
        Ok(half)
    };
    let group = mesh.clone();
    let f = compile(move |x: Tensor| step(&group, x));
    let me = mesh.my_rank()?;
    for round in 0..2 {
        let x = numbers(&[4], me + round)?;
        same(&f.call(x.clone())?, &step(&mesh, x)?)?;
    }
    f.expect_steady(Steady::graphs(1))
}

fn d4_breaks_and_recompiles_are_told_apart(mesh: Mesh) -> Result<()> {
    let group = mesh.clone();
    let f = compile(move |(x, scale): (Tensor, f64)| {
        let y = group.all_reduce(x, Reduce::Sum)?;
        let most = y.to_vec::<f32>()?.into_iter().fold(0.0, f32::max); // break
        y.mul(f64::from(most) * scale)
    });
    for (round, scale) in [1.0, 1.0, 2.0].into_iter().enumerate() {
        let x = numbers(&[4], round)?;
        let y = mesh.all_reduce(&x, Reduce::Sum)?;
        let most = y.to_vec::<f32>()?.into_iter().fold(0.0, f32::max);
        let eager = y.mul(f64::from(most) * scale)?;
        same(&f.call((x, scale))?, &eager)?;
    }
    let explained = f.explain();
    assert!(explained.breaks.iter().all(|one| one.op == "to_vec"), "{explained}");
    assert!(explained.breaks[0].site.file().ends_with("cases.rs"));
    assert_eq!((explained.stats.breaks, explained.stats.recompiles), (2, 1), "{explained}");
    let why = &explained.recompiles[0];
    assert_eq!((&why.expected[..], why.got.split(' ').next()), ("1.0", Some("2.0")), "{explained}");
    assert!(
        f.expect_steady(Steady::graphs(10).recompiles(10)).unwrap_err().to_string().contains("break: to_vec")
    );
    Ok(())
}

fn d2_a_rank_that_differs_is_named_on_all_ranks(mesh: Mesh) -> Result<()> {
    let me = mesh.my_rank()?;
    let group = mesh.clone();
    let last = mesh.size() - 1;
    let f = compile(move |x: Tensor| {
        let x = if me == last { x.neg()? } else { x };
        group.all_reduce(x, Reduce::Sum)
    });
    let error = f.call(numbers(&[4], 0)?).map(drop).unwrap_err().to_string();
    assert!(
        error.starts_with("compile: `cases.rs:")
            && error.contains("`: its program must be the same on all ranks"),
        "{error}"
    );
    assert!(error.contains(&format!("rank {last}: v")) && error.contains("neg"), "{error}");
    // The ranks are still in step.
    mesh.all_reduce(numbers(&[4], 0)?, Reduce::Sum)?.wait()
}

fn d2_a_rank_that_misses_takes_the_others_with_it(mesh: Mesh) -> Result<()> {
    let me = mesh.my_rank()?;
    let group = mesh.clone();
    let f = compile(move |x: Tensor| {
        let sums = group.all_reduce(x.sum(&[0], false)?, Reduce::Sum)?;
        x.add(&sums)
    });
    // The sizes change on one rank only.
    for (round, rows) in [4usize, 4, 6, 7, 4].into_iter().enumerate() {
        let rows = if me == 0 { 4 } else { rows };
        let x = numbers(&[rows, 3], round + me)?;
        let eager = x.add(&mesh.all_reduce(x.sum(&[0], false)?, Reduce::Sum)?)?;
        same(&f.call(x)?, &eager)?;
    }
    assert_eq!(f.stats().recompiles, 1, "{}", f.explain());
    Ok(())
}

fn trace_a_step_of_gradient_descent_updates_its_model_in_place(mesh: Mesh) -> Result<()> {
    #[derive(Flatten)]
    struct Model {
        w: Tensor,
        b: Option<Tensor>,
    }
    let group = mesh.clone();
    let step = compile_mut(move |model: &mut Model, (x, rate): (Tensor, Tensor)| {
        let grad = group.all_reduce(x.t()?.matmul(&x.matmul(&model.w)?)?, Reduce::Avg)?;
        model.w.sub_(&grad.mul(&rate)?)?;
        if let Some(b) = &mut model.b {
            b.add_(&rate)?;
        }
        grad.sum_all()
    });
    let new = || -> Result<Model> { Ok(Model { w: numbers(&[4, 4], 3)?, b: Some(numbers(&[4], 4)?) }) };
    let (mut model, mut plain) = (new()?, new()?);
    for round in 0..4 {
        let (x, rate) = (numbers(&[8, 4], round)?, Tensor::scalar(0.001f32)?);
        let grad = mesh.all_reduce(x.t()?.matmul(&x.matmul(&plain.w)?)?, Reduce::Avg)?;
        plain.w.sub_(&grad.mul(&rate)?)?;
        plain.b.as_mut().unwrap().add_(&rate)?;
        same_sums(&step.call(&mut model, (x, rate))?, &grad.sum_all()?)?;
        same_sums(&model.w, &plain.w)?;
        same(model.b.as_ref().unwrap(), plain.b.as_ref().unwrap())?;
    }
    step.expect_steady(Steady::graphs(1))
}

fn trace_lets_nothing_escape_silently(_: Mesh) -> Result<()> {
    // A traced tensor that was kept is refused when used later.
    let kept: Rc<RefCell<Option<Tensor>>> = Rc::default();
    let own = Rc::clone(&kept);
    let f = compile(move |x: Tensor| {
        let y = x.neg()?;
        *own.borrow_mut() = Some(y.clone());
        Ok(y)
    });
    f.call(numbers(&[4], 0)?)?;
    let error = kept.borrow().as_ref().unwrap().exp().map(drop).unwrap_err().to_string();
    assert!(error.contains("a traced function kept"), "{error}");
    // A comparison of a size records a guard.
    let f = compile(|x: Tensor| if x.dim(0)? < 4 { x.neg() } else { Ok(x) });
    for n in [2usize, 3, 5, 3, 6] {
        let x = numbers(&[n], n)?;
        let eager = if n < 4 { x.neg()? } else { x.clone() };
        same(&f.call(x)?, &eager)?;
    }
    // So does a shape that is read as numbers.
    let f = compile(|x: Tensor| x.reshape(&[x.shape()[0] / 2, 2]));
    for n in [2usize, 4, 6, 4] {
        assert_eq!(f.call(numbers(&[n], n)?)?.shape(), [n / 2, 2]);
    }
    Ok(())
}

fn trace_too_often_runs_the_function_as_it_is(_: Mesh) -> Result<()> {
    let f = compile(|(x, n): (Tensor, usize)| x.mul(n as f64)).limit(3);
    for n in 0..6usize {
        let x = numbers(&[4], 0)?;
        same(&f.call((x.clone(), n))?, &x.mul(n as f64)?)?;
    }
    let explained = f.explain();
    assert_eq!((explained.limit, explained.stats.uncompiled), (Some(3), 3), "{explained}");
    assert!(explained.to_string().contains("an Index in its place may change"), "{explained}");
    Ok(())
}
