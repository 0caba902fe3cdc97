//! Reductions against the ops' own evaluations: all types, layouts and choices of dimensions.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod common;

use common::{Near, PLACES, Place, Placed, assert_none, both, check, check_threads, eval_cx, op};
use consort_ir::ops::{OpDef, OpTable};
use consort_ir::tensor::{Data, Tensor};
use consort_runtime::threads::Threads;
use consort_runtime::tolerance;
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

/// The tolerance of a fold: sums of some thousand elements of about 8 lose some of their last bits.
fn near(name: &str, dtype: Dtype) -> Near {
    match (name, dtype) {
        ("sum" | "mean", Dtype::F32) => Near::Within(1e-4),
        ("sum" | "mean", Dtype::F64) => Near::Within(1e-12),
        ("sum" | "mean", Dtype::F16) => Near::Within(2e-3),
        ("sum" | "mean", Dtype::Bf16) => Near::Within(1.6e-2),
        _ => Near::Same,
    }
}

/// Compares the kernel with the definition, within the table of tolerances.
fn check_table(op: &dyn OpDef, x: &Placed) -> Result<(), String> {
    let (_, got) = both(op, &[x], None, &Threads::ONE)?;
    tolerance::check(op, &eval_cx(), &[&x.tensor], &[got])
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
                        let near = check(&*op, &[&x], None, &Threads::ONE, near(name, dtype));
                        if let Err(error) = near.and_then(|()| check_table(&*op, &x)) {
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
                    let tensor = Tensor::floats(Dtype::F32, vec![rows, len], elements.to_vec());
                    Placed::new(&tensor, Layout::contiguous(&[rows, len]))
                };
                let elements: Vec<f64> =
                    (0..rows * len).map(|_| f64::from((rng.next_u64() as i32) as f32)).collect();
                let result = |x: &Placed| match both(&*op, &[x], None, &Threads::ONE).unwrap().1.data {
                    Data::Float(elements) => elements,
                    Data::Int(_) => unreachable!("floats"),
                };
                let together = result(&placed(rows, &elements));
                let alone = elements.chunks(len).flat_map(|row| result(&placed(1, row)));
                assert_eq!(together, alone.collect::<Vec<f64>>(), "{name} {rows} x {len}");
                // And it is the right one, of the right row.
                for (row, got) in elements.chunks(len).zip(&together) {
                    let size: f64 = row.iter().map(|x| x.abs()).sum();
                    let want = match name {
                        "sum" => row.iter().sum(),
                        _ => row.iter().copied().fold(f64::MIN, f64::max),
                    };
                    assert!((got - want).abs() <= size * 1e-6, "{name} {rows} x {len}: {got}, not {want}");
                }
            }
        }
    }
}

#[test]
fn long_sums_lose_little() {
    // A sum of 0.1 in one accumulator would be wrong in the third digit.
    for (shape, dims) in [(&[1, 1 << 20][..], "[1]"), (&[1 << 20, 3], "[0]"), (&[1 << 20], "[0]")] {
        let op = op(&format!("sum[dims={dims}, keep=false]"));
        let x = Placed::whole(&Tensor::floats(Dtype::F32, shape.to_vec(), vec![0.1; shape.iter().product()]));
        check(&*op, &[&x], None, &Threads::ONE, Near::Relative(4e-6)).unwrap();
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
