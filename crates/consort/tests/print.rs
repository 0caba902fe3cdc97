//! Tensors print as numpy prints them: the expected texts were printed by numpy 2.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Dtype, Element, Tensor};

fn check<T: Element>(elements: &[T], shape: &[usize], want: &str) {
    assert_eq!(Tensor::from_slice(elements, shape).unwrap().to_string(), want);
}

#[test]
fn floats_have_one_format() {
    check(&[1.0f32, 2.5, -3.25], &[3], "[ 1.    2.5  -3.25]");
    check(&[0.1f32, 0.2], &[2], "[0.1 0.2]");
    check(&[1f32 / 3.0, 2.0 / 3.0], &[2], "[0.33333334 0.6666667 ]");
    check(&[1f64 / 3.0, 100.0], &[2], "[  0.33333333 100.        ]");
    check(&[1e-5f32, 1.0], &[1, 2], "[[1.e-05 1.e+00]]");
    check(&[1e10f32, 1.0], &[2], "[1.e+10 1.e+00]");
    check(&[1.5e10f64, 1.0 / 3.0], &[2], "[1.50000000e+10 3.33333333e-01]");
    check(&[f64::NAN, 1.5, f64::NEG_INFINITY], &[3], "[ nan  1.5 -inf]");
    check(&[3.5f64], &[], "3.5");
    check(&[0.0f64, -0.0], &[2], "[ 0. -0.]");
}

#[test]
fn dimensions_nest_and_columns_align() {
    check(&[true, false], &[2], "[ True False]");
    check(&[1i64, -20, 300, 4], &[2, 2], "[[  1 -20]\n [300   4]]");
    let list: Vec<f64> = (0..24).map(f64::from).collect();
    let want = "[[[ 0.  1.  2.  3.]\n  [ 4.  5.  6.  7.]\n  [ 8.  9. 10. 11.]]\n\n [[12. 13. 14. 15.]\n  [16. 17. 18. 19.]\n  [20. 21. 22. 23.]]]";
    check(&list, &[2, 3, 4], want);
    assert_eq!(Tensor::zeros(Dtype::F32, &[0]).unwrap().to_string(), "[]");
}

#[test]
fn long_ones_are_broken_and_large_ones_shortened() {
    let list: Vec<i64> = (0..30).map(|i| i * 1000).collect();
    let want = "[    0  1000  2000  3000  4000  5000  6000  7000  8000  9000 10000 11000\n 12000 13000 14000 15000 16000 17000 18000 19000 20000 21000 22000 23000\n 24000 25000 26000 27000 28000 29000]";
    check(&list, &[30], want);
    let list: Vec<i64> = (0..2000).collect();
    let want = "[[   0    1    2 ...   47   48   49]\n [  50   51   52 ...   97   98   99]\n [ 100  101  102 ...  147  148  149]\n ...\n [1850 1851 1852 ... 1897 1898 1899]\n [1900 1901 1902 ... 1947 1948 1949]\n [1950 1951 1952 ... 1997 1998 1999]]";
    check(&list, &[40, 50], want);
}
