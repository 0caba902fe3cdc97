//! Reductions against the ops' own evaluations: all types, layouts and choices of dimensions.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod common;

use common::{PLACES, Place, Placed, assert_none, check, check_threads, computed, op};
use consort_ir::literal::{Data, Literal};
use consort_ir::ops::OpTable;
use consort_runtime::threads::Threads;
use consort_types::layout::Layout;
use consort_types::{Dtype, Rng};

const SHAPES: [&[usize]; 9] =
    [&[], &[1], &[8], &[100], &[3, 5, 7], &[33, 70], &[70, 33], &[2, 0, 3], &[3, 2, 40, 2]];

/// Whether the reduction needs at least one element.
fn chooses(name: &str) -> bool {
    matches!(name, "max" | "min" | "argmax" | "argmin")
}

fn takes(name: &str, dtype: Dtype) -> bool {
    match name {
        "mean" => dtype.is_float(),
        "any" | "all" => dtype == Dtype::Bool,
        _ => dtype != Dtype::Bool,
    }
}

#[test]
fn every_reduction_in_every_type_and_layout() {
    let (mut rng, table) = (Rng::new(11), OpTable::built_in());
    let names = ["sum", "mean", "max", "min", "argmax", "argmin", "prod", "any", "all"];
    let mut failures = Vec::new();
    for name in names.into_iter().filter(|name| table.get(name).is_some()) {
        for dtype in Dtype::ALL.into_iter().filter(|dtype| takes(name, *dtype)) {
            for shape in SHAPES {
                for chosen in 0..1usize << shape.len() {
                    let dims: Vec<usize> = (0..shape.len()).filter(|dim| chosen >> dim & 1 == 1).collect();
                    if chooses(name) && dims.iter().any(|dim| shape[*dim] == 0) {
                        continue;
                    }
                    for place in PLACES {
                        let op = op(&format!("{name}[dims={dims:?}, keep={}]", rng.one_in(2)));
                        let x = Placed::moderate(dtype, shape, place, &mut rng);
                        if let Err(error) = check(&*op, &[&x], None, &Threads::ONE) {
                            failures
                                .push(format!("{name} {dtype}{shape:?} over {dims:?} {place:?}: {error}"));
                        }
                    }
                }
            }
        }
    }
    assert_none(&failures);
}

#[test]
fn rows_have_the_same_result_alone_and_together() {
    let mut rng = Rng::new(12);
    for name in ["sum", "max"] {
        let op = op(&format!("{name}[dims=[1], keep=false]"));
        for rows in 1..10 {
            // Shorter ones are folded column by column.
            for len in [16, 63, 64, 65, 255, 256, 257, 1024, 1025, 4096, 4097] {
                let placed = |rows: usize, elements: &[f64]| {
                    let tensor = Literal::floats(Dtype::F32, vec![rows, len], elements.to_vec());
                    Placed::new(&tensor, Layout::contiguous(&[rows, len]))
                };
                let elements: Vec<f64> =
                    (0..rows * len).map(|_| f64::from((rng.next_u64() as i32) as f32)).collect();
                let result = |x: &Placed| match computed(&*op, &[x], None, &Threads::ONE).unwrap().data {
                    Data::Float(elements) => elements,
                    Data::Int(_) => unreachable!("floats"),
                };
                let all = placed(rows, &elements);
                let alone = elements.chunks(len).flat_map(|row| result(&placed(1, row)));
                assert_eq!(result(&all), alone.collect::<Vec<f64>>(), "{name} {rows} x {len}");
                check(&*op, &[&all], None, &Threads::ONE).unwrap();
            }
        }
    }
}

#[test]
fn long_sums_lose_little() {
    // A sum of 0.1 in one accumulator would be wrong in the third digit.
    for (shape, dims) in [(&[1, 1 << 20][..], "[1]"), (&[1 << 20, 3], "[0]"), (&[1 << 20], "[0]")] {
        let op = op(&format!("sum[dims={dims}, keep=false]"));
        let x =
            Placed::whole(&Literal::floats(Dtype::F32, shape.to_vec(), vec![0.1; shape.iter().product()]));
        check(&*op, &[&x], None, &Threads::ONE).unwrap();
    }
}

#[test]
fn threads_change_no_bit() {
    let mut rng = Rng::new(13);
    for dims in ["[0]", "[1]", "[0, 2]", "[0, 1, 2]"] {
        let op = op(&format!("sum[dims={dims}, keep=false]"));
        let x = Placed::random(Dtype::F32, &[40, 50, 120], Place::Whole, &mut rng);
        check_threads(&*op, &[&x], dims);
    }
}
