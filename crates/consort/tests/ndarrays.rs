//! Arrays of ndarray and tensors: any order in memory, any number of dimensions, any element type.
#![cfg(feature = "ndarray")]
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use consort::{Dtype, Tensor};
use ndarray::{Array, Array3, ArrayD, Axis, IxDyn, arr0, s};

#[test]
fn arrays_and_views_come_back() {
    let array = Array3::from_shape_fn((2, 3, 4), |(i, j, k)| (100 * i + 10 * j + k) as i32);
    assert_eq!(Tensor::from_ndarray(&array).unwrap().to_ndarray::<i32>().unwrap(), array.clone().into_dyn());
    let view = array.slice(s![..;-1, 1.., ..;2]);
    let x = Tensor::from_ndarray(&view).unwrap();
    assert_eq!((x.dtype(), x.shape()), (Dtype::I32, &[2, 2, 2][..]));
    assert_eq!(x.to_ndarray::<i32>().unwrap(), view.into_dyn());
    let column = array.index_axis(Axis(2), 3);
    assert_eq!(Tensor::from_ndarray(&column).unwrap().to_vec::<i32>().unwrap(), [3, 13, 23, 103, 113, 123]);
    assert_eq!(Tensor::from_ndarray(&arr0(2.5f64)).unwrap().item::<f64>().unwrap(), 2.5);
    let empty: ArrayD<bool> = Array::from_elem(IxDyn(&[0, 3]), true);
    assert_eq!(Tensor::from_ndarray(&empty).unwrap().to_ndarray::<bool>().unwrap(), empty);
}

#[test]
fn a_view_of_a_tensor_becomes_an_array_in_row_major_order() {
    let x = Tensor::from_iter(0..6i64).unwrap().reshape(&[2, 3]).unwrap().permute(&[1, 0]).unwrap();
    let array = x.to_ndarray::<i64>().unwrap();
    assert_eq!(array, ndarray::arr2(&[[0i64, 3], [1, 4], [2, 5]]).into_dyn());
    let error = x.to_ndarray::<f32>().unwrap_err().to_string();
    assert!(error.starts_with("to_ndarray: expected the element type i64, got f32"), "{error}");
}
