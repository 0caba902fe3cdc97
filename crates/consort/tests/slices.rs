//! Writes into a slice equal those of a plain loop, for any layout of the tensor.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Dtype, Mesh, Reduce, Result, Route, Tensor, spawn};

const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

/// Elements that count up from a number.
fn count(shape: &[usize], from: usize) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor::from_iter((from..from + n).map(|i| i as f32)).unwrap().reshape(shape).unwrap()
}

/// How many tensors there are.
const TENSORS: usize = 3 * ORDERS.len();

/// A tensor with one owner, in an order of dimensions: all of its storage, a part with gaps, or repeated elements.
fn tensor(which: usize) -> Tensor {
    let x = match which / ORDERS.len() {
        0 => count(&[4, 5, 6], 0),
        1 => count(&[7, 8, 9], 0).narrow(1, 2, 4).unwrap().narrow(2, 1, 5).unwrap(),
        _ => count(&[4, 1, 1], 0).broadcast_to(&[4, 5, 3]).unwrap(),
    };
    x.permute(&ORDERS[which % ORDERS.len()]).unwrap()
}

/// Calls `f` with each index of a slice: in the tensor, in the slice, and along the cut dimension.
fn places(
    shape: &[usize],
    (dim, start, size): (usize, usize, usize),
    mut f: impl FnMut(usize, usize, usize),
) {
    let mut inside = 0;
    for i in 0..shape[0] {
        for j in 0..shape[1] {
            for k in 0..shape[2] {
                let along = [i, j, k][dim];
                if (start..start + size).contains(&along) {
                    f((i * shape[1] + j) * shape[2] + k, inside, along - start);
                    inside += 1;
                }
            }
        }
    }
}

/// Writes into the slice of a tensor in every way, with or without another owner.
fn write(mesh: &Mesh, which: usize, dim: usize, shared: bool) -> Result<()> {
    let me = mesh.my_rank()?;
    let (shape, cut) = (tensor(which).shape().to_vec(), (dim, 1, 2));
    let mut part = shape.clone();
    part[dim] = 2;
    let mut half = shape.clone();
    half[dim] = 1;
    for way in 0..4 {
        let mut x = tensor(which);
        let mut expected = x.to_vec::<f32>()?;
        let before = expected.clone();
        let kept = shared.then(|| x.clone());
        let slice = x.narrow_mut(dim, 1, 2)?;
        match way {
            0 => {
                slice.copy_from(&count(&part, 1000))?;
                places(&shape, cut, |at, inside, _| expected[at] = (1000 + inside) as f32);
            }
            1 => {
                let sent = mesh.isend(count(&part, 2000 + 100 * me), Route::Ring(1), 0)?;
                mesh.recv_into(slice, Route::Ring(1), 0)?;
                sent.wait()?;
                places(&shape, cut, |at, inside, _| expected[at] = (2000 + 100 * (1 - me) + inside) as f32);
            }
            2 => {
                mesh.all_gather_into(slice, count(&half, 3000 + 100 * me), dim)?;
                let mut inside = [3000, 3100];
                places(&shape, cut, |at, _, along| {
                    expected[at] = inside[along] as f32;
                    inside[along] += 1;
                });
            }
            _ => {
                mesh.all_reduce_(slice, Reduce::Sum)?;
                places(&shape, cut, |at, _, _| expected[at] *= 2.0);
            }
        }
        assert_eq!(
            x.to_vec::<f32>()?,
            expected,
            "tensor {which}, dimension {dim}, way {way}, shared: {shared}"
        );
        assert!(kept.is_none_or(|kept| kept.to_vec::<f32>().is_ok_and(|kept| kept == before)));
    }
    Ok(())
}

#[test]
fn every_layout_is_written_like_one_by_one() {
    let done = spawn(2, |mesh| {
        for which in 0..TENSORS {
            for dim in 0..3 {
                write(&mesh, which, dim, false)?;
                write(&mesh, which, dim, true)?;
            }
        }
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn threads_write_the_same_into_a_turned_tensor() {
    let mesh = consort::init().unwrap();
    mesh.set_threads(2);
    let mut x = Tensor::zeros(Dtype::F32, &[900, 1100]).unwrap().permute(&[1, 0]).unwrap();
    x.narrow_mut(0, 50, 1000).unwrap().copy_from(&count(&[1000, 900], 0)).unwrap();
    let expected = (0..1100 * 900).map(|at| match at / 900 {
        row @ 50..1050 => ((row - 50) * 900 + at % 900) as f32,
        _ => 0.0,
    });
    assert!(expected.eq(x.to_vec::<f32>().unwrap()));
}

#[test]
fn repeated_elements_are_replaced_as_a_whole_and_nothing_is_written_to_nothing() {
    let mut x = Tensor::ones(Dtype::F32, &[1, 3]).unwrap().broadcast_to(&[2, 3]).unwrap();
    x.copy_from(&count(&[2, 3], 5)).unwrap();
    assert_eq!(x.to_vec::<f32>().unwrap(), [5.0, 6.0, 7.0, 8.0, 9.0, 10.0]);
    let mut tail = x.narrow(0, 1, 1).unwrap();
    tail.narrow_mut(1, 1, 0).unwrap().copy_from(&count(&[1, 0], 0)).unwrap();
    assert_eq!(tail.to_vec::<f32>().unwrap(), [8.0, 9.0, 10.0]);
}
