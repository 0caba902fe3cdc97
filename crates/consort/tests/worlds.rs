//! Tensors of a dropped mesh, and errors of ranks whose calls differ.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use consort::{Batched, Dtype, Reduce, Route, Tensor};

#[test]
fn a_tensor_of_a_mesh_that_is_gone_is_refused_by_the_next() {
    let first = consort::init().unwrap();
    let x = Tensor::from_slice(&[1.0f32], &[1]).unwrap();
    drop(first);
    let second = consort::init().unwrap();
    let error = second.all_reduce(&x, Reduce::Sum).map(drop).unwrap_err().to_string();
    let expected = "all_reduce: expected tensors of the group's world, got one of another";
    assert!(error.starts_with(expected), "{error}");
    let error = x.add(&x).map(drop).unwrap_err().to_string();
    assert!(error.starts_with("add: expected a tensor of this world, got one of another"), "{error}");
    assert!(x.to_vec::<f32>().is_ok_and(|x| x == [1.0]), "it can still be read");
}

#[test]
fn roots_that_differ_are_refused_before_there_is_a_result() {
    let errors = consort::spawn(2, |mesh| {
        let me = mesh.number(&mesh.rank())?;
        mesh.broadcast(Tensor::from_slice(&[1.0f32], &[1])?, me)?.wait()
    });
    for error in errors {
        let error = error.unwrap_err().to_string();
        assert!(
            error.starts_with("broadcast: call 0 on world: the root must be the same on all ranks"),
            "{error}"
        );
        assert!(error.contains("rank 1   broadcast[root=1, over=world] f32[1]   "), "{error}");
    }
}

#[test]
fn a_group_goes_on_after_a_call_that_all_ranks_were_refused() {
    let sums = consort::spawn(2, |mesh| {
        let x = Tensor::from_slice(&[1.0f32], &[1])?;
        let error = mesh.broadcast(&x, 7).map(drop).unwrap_err().to_string();
        assert!(
            error.starts_with("broadcast: expected a root below 2, the size of the group, got 7 (C1)\n  at "),
            "{error}"
        );
        mesh.all_reduce(x, Reduce::Sum)?.item::<f32>()
    });
    assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 2.0)));
}

#[test]
fn shapes_of_messages_are_nothing_to_later_calls() {
    let sums = consort::spawn(2, |mesh| {
        let me = mesh.number(&mesh.rank())?;
        let mut got = Tensor::zeros(Dtype::F32, &[5 - me])?;
        let message = |n: usize| Tensor::ones(Dtype::F32, &[n]);
        mesh.batch(vec![
            Batched::send(message(4 + me)?, Route::Ring(1), 0),
            Batched::recv(&mut got, Route::Ring(1), 0),
        ])?
        .wait()?;
        let same = Tensor::from_slice(&[3i64], &[1])?.replicated()?;
        let sent = mesh.isend(message(4 + me)?, Route::Ring(1), 1)?;
        mesh.recv_into(&mut got, Route::Ring(1), 1)?;
        sent.wait()?;
        let pair = mesh.lists("pair", &[&[0, 1]])?;
        // Gathering an empty tensor is an ordinary call.
        assert_eq!(mesh.all_gather(Tensor::zeros(Dtype::F32, &[0, 2])?, 1)?.shape(), [0, 4]);
        let turned = mesh.lists("turned", &[&[1, 0]])?;
        let mine = Tensor::from_slice(&[me as i64 + 1], &[1])?;
        let sum = pair.all_reduce(&mine, Reduce::Sum)?.add(&turned.all_reduce(&mine, Reduce::Sum)?)?;
        Ok((sum.add(&same)?.item::<i64>()?, got.sum_all()?.item::<f32>()?))
    });
    assert_eq!(sums.into_iter().collect::<consort::Result<Vec<_>>>().unwrap(), [(9, 5.0), (9, 4.0)]);
}
