//! Ownership of storage decides between a write in place and a copy; no owner sees another's writes.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Batched, Dtype, Group, Mesh, Reduce, Result, Route, Tensor, spawn};

/// Numbers of floats that make a communication small (staged) and large (read in place).
const SIZES: [usize; 2] = [16, 50_000];

fn me(group: &Group) -> usize {
    group.my_rank().unwrap()
}

fn ones(n: usize) -> Tensor {
    Tensor::from_slice(&vec![1.0f32; n], &[n]).unwrap()
}

fn first_line(error: &consort::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

fn holds(x: &Tensor, value: f32) {
    assert!(x.to_vec::<f32>().unwrap().iter().all(|x| *x == value), "expected {value}, got {x}");
}

/// Runs on `n` ranks; all of them must succeed.
fn on(n: usize, f: impl Fn(Mesh) -> Result<()> + Sync) {
    for (rank, outcome) in spawn(n, f).into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
}

/// Bytes that a rank copies for communication during `f`.
fn copied(mesh: &Mesh, f: impl FnOnce()) -> u64 {
    let before = mesh.copied_bytes();
    f();
    mesh.copied_bytes() - before
}

#[test]
fn a1_an_owned_tensor_is_reduced_where_it_lies_and_a_shared_one_is_copied_once() {
    for n in SIZES {
        on(3, |mesh| {
            let mut x = ones(n);
            // In a loop, as in programs: each round reuses the storage of the previous one.
            for round in 0..20 {
                let bytes = copied(&mesh, || {
                    x = mesh.all_reduce(std::mem::replace(&mut x, ones(1)), Reduce::Avg).unwrap()
                });
                assert_eq!(bytes, 0, "round {round}");
                x.add_(&ones(n))?;
                x.sub_(&ones(n))?;
                holds(&x, 1.0);
            }
            let bytes = copied(&mesh, || holds(&mesh.all_reduce(&x, Reduce::Sum).unwrap(), 3.0));
            assert_eq!(bytes, 4 * n as u64);
            holds(&x, 1.0);
            // A view is another owner.
            let view = x.narrow(0, 0, 4)?;
            let sum = mesh.all_reduce(x, Reduce::Sum)?;
            holds(&view, 1.0);
            holds(&sum, 3.0);
            Ok(())
        });
    }
}

#[test]
fn a12_in_place_forms_write_where_the_tensor_is() {
    for n in SIZES {
        on(2, |mesh| {
            let mut x = ones(n);
            assert_eq!(copied(&mesh, || mesh.all_reduce_(&mut x, Reduce::Sum).unwrap()), 0);
            holds(&x, 2.0);
            // Another owner keeps its value.
            let kept = x.clone();
            mesh.all_reduce_(&mut x, Reduce::Sum)?;
            holds(&x, 4.0);
            holds(&kept, 2.0);
            // A slice of a tensor with one owner is written in place; of one with two, in a copy of the tensor.
            let mut wide = Tensor::ones(Dtype::F32, &[4, n])?;
            let part = wide.narrow_mut(0, 1, 2)?;
            assert_eq!(copied(&mesh, || mesh.all_reduce_(part, Reduce::Sum).unwrap()), 0);
            let expected = [1.0, 2.0, 2.0, 1.0];
            for (row, value) in expected.into_iter().enumerate() {
                holds(&wide.at(0, row)?, value);
            }
            let kept = wide.clone();
            mesh.all_reduce_(wide.narrow_mut(0, 3, 1)?, Reduce::Sum)?;
            holds(&wide.at(0, 3)?, 2.0);
            holds(&wide.at(0, 1)?, 2.0);
            holds(&kept.at(0, 3)?, 1.0);
            // A slice with gaps is copied, and the result is copied back.
            let mut gaps = Tensor::ones(Dtype::F32, &[n, 3])?;
            mesh.all_reduce_(gaps.narrow_mut(1, 1, 1)?, Reduce::Sum)?;
            assert_eq!(gaps.at(0, n - 1)?.to_vec::<f32>()?, [1.0, 2.0, 1.0]);
            Ok(())
        });
    }
}

/// The element of rank `r` at (i, j).
fn at(r: usize, i: usize, j: usize) -> f32 {
    (1000 * r + 100 * i + j) as f32
}

/// A matrix, element by element.
fn matrix([rows, cols]: [usize; 2], f: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    (0..rows).flat_map(|i| (0..cols).map(|j| f(i, j)).collect::<Vec<_>>()).collect()
}

#[test]
fn a12_parts_are_gathered_and_reduced_where_they_are() {
    for ranks in 1..=4 {
        on(ranks, |mesh| {
            let (n, me) = (mesh.size(), me(&mesh));
            for dim in 0..2 {
                let shape = if dim == 0 { [2 * n, 3] } else { [3, 2 * n] };
                let owner = |i: usize, j: usize| [i, j][dim] / 2;
                let gathered = matrix(shape, |i, j| at(owner(i, j), i, j));
                let reduced = matrix(shape, |i, j| match owner(i, j) == me {
                    true => (0..n).map(|r| at(r, i, j)).sum(),
                    false => at(me, i, j),
                });
                let given = Tensor::from_slice(&matrix(shape, |i, j| at(me, i, j)), &shape)?;
                // A tensor with another owner, and one without.
                for shared in [true, false] {
                    let mut x = if shared { given.clone() } else { given.mul(&ones(1))? };
                    let bytes = copied(&mesh, || mesh.all_gather_(&mut x, dim).unwrap());
                    assert!(dim > 0 || bytes == 0, "{bytes}");
                    assert_eq!(x.to_vec::<f32>()?, gathered);
                    let mut x = if shared { given.clone() } else { given.mul(&ones(1))? };
                    mesh.reduce_scatter_(&mut x, Reduce::Sum, dim)?;
                    assert_eq!(x.to_vec::<f32>()?, reduced);
                    assert_eq!(given.to_vec::<f32>()?, matrix(shape, |i, j| at(me, i, j)));
                }
                // A box of a larger tensor, whose borders stay unchanged.
                let around = |inner: &[f32]| {
                    let inside = |i: usize, j: usize| i > 0 && i <= shape[0] && j > 0;
                    matrix([shape[0] + 2, shape[1] + 1], |i, j| match inside(i, j) {
                        true => inner[(i - 1) * shape[1] + j - 1],
                        false => -1.0,
                    })
                };
                let mut outer = Tensor::full(Dtype::F32, &[shape[0] + 2, shape[1] + 1], -1.0)?;
                outer.slice_mut(&[1, 1], &shape)?.copy_from(&given)?;
                mesh.all_gather_(outer.slice_mut(&[1, 1], &shape)?, dim)?;
                assert_eq!(outer.to_vec::<f32>()?, around(&gathered));
                outer.slice_mut(&[1, 1], &shape)?.copy_from(&given)?;
                mesh.reduce_scatter_(outer.slice_mut(&[1, 1], &shape)?, Reduce::Sum, dim)?;
                assert_eq!(outer.to_vec::<f32>()?, around(&reduced));
                // The same compiled.
                let group = mesh.clone();
                let gather = consort::compile(move |mut x: Tensor| {
                    group.all_gather_(&mut x, dim)?;
                    Ok(x)
                });
                assert_eq!(gather.call(given.clone())?.to_vec::<f32>()?, gathered);
                let group = mesh.clone();
                let reduce = consort::compile(move |mut x: Tensor| {
                    group.reduce_scatter_(&mut x, Reduce::Sum, dim)?;
                    Ok(x)
                });
                assert_eq!(reduce.call(given.clone())?.to_vec::<f32>()?, reduced);
            }
            Ok(())
        });
    }
}

#[test]
fn a12_parts_that_are_not_even_and_groups_that_leave_ranks_out_are_refused() {
    on(3, |mesh| {
        let mut x = ones(4);
        let error = mesh.all_gather_(&mut x, 0).unwrap_err().to_string();
        assert!(
            error.contains("dimension 0") && error.contains("3 members") && error.contains("4 places"),
            "{error}"
        );
        let error = mesh.reduce_scatter_(&mut x, Reduce::Sum, 1).unwrap_err().to_string();
        assert!(error.contains("expected a dimension below 1, got 1"), "{error}");
        let pair = mesh.lists("pair", &[&[0, 1]])?;
        for error in [pair.reduce_scatter_(&mut x, Reduce::Sum, 0), pair.all_gather_(&mut x, 0)] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("`pair` leaves some out"), "{error}");
        }
        holds(&x, 1.0);
        Ok(())
    });
}

#[test]
fn a_handle_of_what_is_over_is_not_one_of_what_comes_after() {
    for n in SIZES {
        on(2, |mesh| {
            let (mut x, mut y) = (ones(n), ones(n));
            let first = mesh.pending(|| mesh.all_reduce_(&mut x, Reduce::Sum))?;
            x.wait()?;
            let second = mesh.pending(|| mesh.all_reduce_(&mut y, Reduce::Sum))?;
            assert!(first.test()?);
            first.wait()?;
            assert_eq!(mesh.in_flight(), 1);
            second.wait()?;
            holds(&x, 2.0);
            holds(&y, 2.0);
            Ok(())
        });
    }
}

#[test]
fn what_a_failed_group_refuses_is_left_as_it_was() {
    for n in SIZES {
        on(2, |mesh| {
            let mut x = ones(n);
            // Shared, so that the result would get new storage.
            let shared = x.clone();
            mesh.all_reduce(ones(n + me(&mesh)), Reduce::Sum).and_then(|sum| sum.wait()).unwrap_err();
            mesh.broadcast_(&mut x, 0).and_then(|()| x.wait()).unwrap_err();
            mesh.all_reduce_(&mut x, Reduce::Sum).and_then(|()| x.wait()).unwrap_err();
            holds(&x, 1.0);
            holds(&shared, 1.0);
            Ok(())
        });
    }
}

#[test]
fn a12_results_go_into_tensors_and_slices_that_are_there() {
    for n in SIZES {
        on(2, |mesh| {
            let rank = me(&mesh) as f32;
            let mut out = Tensor::zeros(Dtype::F32, &[2 * n])?;
            let x = (&ones(n) * rank as f64)?;
            assert_eq!(copied(&mesh, || mesh.all_gather_into(&mut out, &x, 0).unwrap()), 0);
            holds(&out.narrow(0, 0, n)?, 0.0);
            holds(&out.narrow(0, n, n)?, 1.0);
            let mut wide = Tensor::full(Dtype::F32, &[4, n], 7.0)?;
            let rows = wide.narrow_mut(0, 1, 2)?;
            assert_eq!(copied(&mesh, || mesh.all_gather_into(rows, x.unsqueeze(0).unwrap(), 0).unwrap()), 0);
            for (row, value) in [7.0, 0.0, 1.0, 7.0].into_iter().enumerate() {
                holds(&wide.at(0, row)?, value);
            }
            let mut half = Tensor::zeros(Dtype::F32, &[n / 2])?;
            mesh.reduce_scatter_into(&mut half, ones(n), Reduce::Sum, 0)?;
            holds(&half, 2.0);
            let kept = half.clone();
            mesh.all_to_all_into(&mut half, &kept, None, None)?;
            holds(&half, 2.0);
            holds(&kept, 2.0);
            let error = mesh.all_gather_into(&mut half, &x, 0).unwrap_err().to_string();
            let expected =
                format!("all_gather_into: expected f32[{}] for the result, got f32[{}]\n  at ", 2 * n, n / 2);
            assert!(error.starts_with(&expected), "{error}");
            Ok(())
        });
    }
}

#[test]
fn a11_views_and_shapes_do_not_wait_and_elements_do() {
    on(2, |mesh| {
        let x = ones(100_000);
        assert_eq!(mesh.in_flight(), 0);
        let sum = mesh.all_gather(x, 0)?;
        assert_eq!(mesh.in_flight(), 1);
        let view = sum.narrow(0, 5, 10)?.reshape(&[2, 5])?.permute(&[1, 0])?;
        assert_eq!((view.shape(), sum.numel(), mesh.in_flight()), (&[5, 2][..], 200_000, 1));
        holds(&view, 1.0);
        assert_eq!(mesh.in_flight(), 0);
        let pending = mesh.pending(|| mesh.all_reduce(&sum, Reduce::Max))?;
        assert_eq!(mesh.in_flight(), 1);
        holds(&pending.wait()?, 1.0);
        assert_eq!(mesh.in_flight(), 0);
        // Waiting for one of several results waits for all of them.
        let list = mesh.all_reduce_coalesced(vec![ones(3), ones(50_000)], Reduce::Sum)?;
        assert_eq!(mesh.in_flight(), 1);
        holds(&list[1], 2.0);
        assert_eq!(mesh.in_flight(), 0);
        holds(&list[0], 2.0);
        assert!(mesh.unwaited().is_empty());
        drop(mesh.all_reduce(ones(2), Reduce::Sum)?);
        mesh.barrier()?;
        assert_eq!(mesh.unwaited().len(), 1);
        assert_eq!(mesh.unwaited()[0].op, "all_reduce");
        Ok(())
    });
}

#[test]
fn an_operand_in_flight_is_read_at_once_and_written_without_anyone_seeing() {
    for n in SIZES {
        on(3, |mesh| {
            let mut x = (&ones(n) * me(&mesh) as f64)?;
            let all = mesh.all_gather(&x, 0)?;
            holds(&x, me(&mesh) as f32);
            x.add_(&Tensor::full(Dtype::F32, &[n], 100.0)?)?;
            for rank in 0..3 {
                holds(&all.narrow(0, rank * n, n)?, rank as f32);
            }
            holds(&x, 100.0 + me(&mesh) as f32);
            Ok(())
        });
    }
}

#[test]
fn c3_halo_rows_arrive_where_they_belong_with_no_copy() {
    const WIDTH: usize = 3000;
    on(3, |mesh| {
        let rank = me(&mesh);
        let mut x = Tensor::full(Dtype::F32, &[6, WIDTH], rank as f64)?;
        for _ in 0..10 {
            let (first, last) = (x.narrow(0, 1, 1)?, x.narrow(0, 4, 1)?);
            let bytes = copied(&mesh, || {
                let _ = mesh.isend(&first, Route::Ring(-1), 0).unwrap();
                let _ = mesh.isend(&last, Route::Ring(1), 1).unwrap();
            });
            assert_eq!(bytes, 0);
            drop((first, last));
            let bytes = copied(&mesh, || {
                mesh.recv_into(x.narrow_mut(0, 0, 1).unwrap(), Route::Ring(-1), 1).unwrap();
                mesh.recv_into(x.narrow_mut(0, 5, 1).unwrap(), Route::Ring(1), 0).unwrap();
            });
            assert_eq!(bytes, 0);
            // The interior is read while the halos are pending.
            holds(&x.narrow(0, 1, 4)?, rank as f32);
            holds(&x.at(0, 0)?, ((rank + 2) % 3) as f32);
            holds(&x.at(0, 5)?, ((rank + 1) % 3) as f32);
            mesh.barrier()?;
        }
        Ok(())
    });
}

#[test]
fn a_batch_receives_beside_what_it_sends() {
    for n in SIZES {
        on(3, |mesh| {
            let rank = me(&mesh);
            let (above, below) = ((rank + 2) % 3, (rank + 1) % 3);
            let mut x = Tensor::full(Dtype::F32, &[6, n], rank as f64)?;
            for round in 0..10 {
                // The sent rows change each time, and arrive with their current values.
                x.narrow_mut(0, 1, 4)?.copy_from(&Tensor::full(
                    Dtype::F32,
                    &[4, n],
                    (rank + 10 * round) as f64,
                )?)?;
                let bytes = copied(&mesh, || {
                    let up = Batched::send(x.narrow(0, 1, 1).unwrap(), Route::Ring(-1), 0);
                    let into = Batched::recv(x.narrow_mut(0, 5, 1).unwrap(), Route::Ring(1), 0);
                    let _ = mesh.batch(vec![up, into]).unwrap();
                    let down = Batched::send(x.narrow(0, 4, 1).unwrap(), Route::Ring(1), 1);
                    let into = Batched::recv(x.narrow_mut(0, 0, 1).unwrap(), Route::Ring(-1), 1);
                    let _ = mesh.batch(vec![into, down]).unwrap();
                });
                assert_eq!(bytes, 0, "round {round}");
                for (row, from) in [above, rank, rank, rank, rank, below].into_iter().enumerate() {
                    holds(&x.at(0, row)?, (from + 10 * round) as f32);
                }
            }
            // A part that is sent and received into is copied, and arrives with its old values; other owners see none.
            let mut x = Tensor::from_iter((0..2 * n).map(|i| (rank * 2 * n + i) as f32))?;
            let sent = Batched::send(x.narrow(0, 0, n)?, Route::Ring(1), 2);
            let into = Batched::recv(x.narrow_mut(0, n / 2, n)?, Route::Ring(-1), 2);
            assert_eq!(copied(&mesh, || drop(mesh.batch(vec![sent, into]).unwrap())), 4 * n as u64);
            let (kept, before) = (x.clone(), x.to_vec::<f32>()?);
            let expected = (0..2 * n).map(|i| match i.checked_sub(n / 2).filter(|at| *at < n) {
                Some(at) => (above * 2 * n + at) as f32,
                None => (rank * 2 * n + i) as f32,
            });
            assert!(expected.eq(before.iter().copied()));
            let whole = vec![Batched::send(&x, Route::Ring(1), 3), Batched::recv(&mut x, Route::Ring(-1), 3)];
            mesh.batch(whole)?.wait()?;
            assert_eq!(x.at(0, 0)?.item::<f32>()?, (above * 2 * n) as f32);
            assert_eq!(kept.to_vec::<f32>()?, before);
            Ok(())
        });
    }
}

#[test]
fn who_is_in_no_list_sends_and_receives_nothing() {
    on(3, |mesh| {
        let pair = mesh.lists("pair", &[&[0, 1]])?;
        let rank = me(&mesh);
        let (x, mut y) = ((&ones(4) * rank as f64)?, Tensor::full(Dtype::F32, &[4], 9.0)?);
        pair.batch(vec![Batched::send(&x, Route::Ring(1), 0), Batched::recv(&mut y, Route::Ring(1), 0)])?
            .wait()?;
        holds(&y, [1.0, 0.0, 9.0][rank]);
        Ok(())
    });
}

#[test]
fn open_borders_keep_what_is_there() {
    on(3, |mesh| {
        let rank = me(&mesh) as f32;
        let (x, mut y) = (ones(2000), Tensor::full(Dtype::F32, &[2000], -1.0)?);
        let x = (&x * rank as f64)?;
        mesh.batch(vec![Batched::send(&x, Route::Shift(1), 3), Batched::recv(&mut y, Route::Shift(-1), 3)])?
            .wait()?;
        holds(&y, rank - 1.0);
        Ok(())
    });
}

#[test]
fn ops_compute_in_place_only_where_nobody_else_looks() {
    let x = ones(1000);
    let y = x.clone();
    let z = (x + 1.0).unwrap();
    holds(&y, 1.0);
    holds(&z, 2.0);
    let mut z = (z * 2.0).unwrap();
    let view = z.narrow(0, 0, 10).unwrap();
    z.neg_().unwrap();
    holds(&z, -4.0);
    holds(&view, 4.0);
    // An op that fails leaves its operand unchanged.
    let errors = [z.add_(&ones(7)), z.and_(&ones(1000))].map(|outcome| first_line(&outcome.unwrap_err()));
    assert_eq!(
        errors,
        [
            "add_: expected sizes of 1 or those of [1000], got [7] (C2)",
            "and_: expected an integer type or bool, got f32 (C1)"
        ]
    );
    holds(&z, -4.0);
    z.narrow_mut(0, 5, 5).unwrap().copy_from(&view.narrow(0, 0, 5).unwrap()).unwrap();
    assert_eq!(z.narrow(0, 4, 3).unwrap().to_vec::<f32>().unwrap(), [-4.0, 4.0, 4.0]);
    // Overlapping source and destination: as if the source had been copied first.
    let mut w = Tensor::from_iter(0..6i64).unwrap();
    let head = w.narrow(0, 0, 4).unwrap();
    w.narrow_mut(0, 2, 4).unwrap().copy_from(&head).unwrap();
    drop(head);
    assert_eq!(w.to_vec::<i64>().unwrap(), [0, 1, 0, 1, 2, 3]);
}

#[test]
fn a15_shapes_need_neither_data_nor_ranks() {
    let mesh = Mesh::of_shapes(&[("dp", 2), ("tp", 4)], 3).unwrap();
    let tp = mesh.axis("tp").unwrap();
    let x = Tensor::of_shape(Dtype::F32, &[8, 1 << 40]);
    assert_eq!(tp.all_gather(&x, 0).unwrap().shape(), [32, 1 << 40]);
    assert_eq!(mesh.reduce_scatter(&x, Reduce::Sum, 0).unwrap().shape(), [1, 1 << 40]);
    assert_eq!(tp.all_to_all(&x, None, None).unwrap().shape(), x.shape());
    let splits = tp.all_to_all(&x, Some(&[1, 2, 3]), Some(&[2, 2, 2, 2])).map(drop).unwrap_err();
    assert_eq!(first_line(&splits), "all_to_all: expected 4 splits each way, got 4 and 3 (C1)");
    assert_eq!(tp.all_reduce(&x, Reduce::Sum).unwrap().add(&x).unwrap().shape(), x.shape());
    assert_eq!(
        first_line(&x.to_vec::<f32>().map(drop).unwrap_err()),
        "to_vec: expected a tensor with data, got a shape"
    );
    assert_eq!(mesh.in_flight(), 0);
}
