//! Softmax, normalizations and running sums against the ops' own evaluations.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod common;

use common::{PLACES, Place, Placed, assert_none, check, check_threads, op};
use consort_ir::ops::OpTable;
use consort_runtime::threads::Threads;
use consort_types::{Dtype, Rng};

const SHAPES: [&[usize]; 8] =
    [&[1], &[8], &[1100], &[3, 5, 7], &[33, 70], &[5, 600], &[2, 0, 3], &[3, 2, 40, 2]];

#[test]
fn ops_along_any_dimension() {
    let (mut rng, table) = (Rng::new(21), OpTable::built_in());
    let mut failures = Vec::new();
    for name in ["softmax", "log_softmax", "cumsum"].into_iter().filter(|name| table.get(name).is_some()) {
        let takes = |dtype: &Dtype| dtype.is_float() || name == "cumsum" && dtype.is_int();
        for dtype in Dtype::ALL.into_iter().filter(takes) {
            for (shape, dim) in SHAPES.iter().flat_map(|shape| (0..shape.len()).map(move |dim| (*shape, dim)))
            {
                if shape[dim] == 0 && name != "cumsum" {
                    continue;
                }
                let op = op(&format!("{name}[dim={dim}]"));
                for place in PLACES {
                    let x = Placed::moderate(dtype, shape, place, &mut rng);
                    let in_place = if place == Place::Whole { Some(0) } else { None };
                    for in_place in [None, in_place] {
                        if let Err(error) = check(&*op, &[&x], in_place, &Threads::ONE) {
                            failures.push(format!("{name} {dtype}{shape:?} along {dim} {place:?}: {error}"));
                        }
                    }
                }
            }
        }
    }
    assert_none(&failures);
}

#[test]
fn normalized_rows() {
    let (mut rng, table) = (Rng::new(22), OpTable::built_in());
    let mut failures = Vec::new();
    for name in ["rms_norm", "layer_norm"].into_iter().filter(|name| table.get(name).is_some()) {
        let op = op(&format!("{name}[eps=1e-5]"));
        let arity = op.info().args.len();
        for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.is_float()) {
            for shape in SHAPES {
                for place in PLACES {
                    let last = &shape[shape.len() - 1..];
                    let x = Placed::random(dtype, shape, place, &mut rng);
                    let weight = Placed::moderate(dtype, last, rng.pick(&PLACES), &mut rng);
                    let bias = Placed::moderate(dtype, last, rng.pick(&PLACES), &mut rng);
                    let operands = &[&x, &weight, &bias][..arity];
                    // A single row may alias its weight.
                    let choices = if shape.len() == 1 { arity } else { 1 };
                    for in_place in [None].into_iter().chain((0..choices).map(Some)) {
                        if let Err(error) = check(&*op, operands, in_place, &Threads::ONE) {
                            failures.push(format!("{name} {dtype}{shape:?} {place:?} {in_place:?}: {error}"));
                        }
                    }
                }
            }
        }
    }
    assert_none(&failures);
}

#[test]
fn threads_change_no_bit() {
    let mut rng = Rng::new(23);
    for text in ["softmax[dim=0]", "softmax[dim=1]", "softmax[dim=2]"] {
        let op = op(text);
        let x = Placed::moderate(Dtype::F32, &[10, 70, 300], Place::Whole, &mut rng);
        check_threads(&*op, &[&x], text);
    }
}
