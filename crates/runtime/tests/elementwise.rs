//! Every elementwise kernel against the op's own evaluation: all types, layouts, in place, empty, on threads.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod common;

use common::{Near, PLACES, Place, Placed, assert_none, check, op};
use consort_ir::ops::OpTable;
use consort_runtime::threads::Threads;
use consort_types::{Dtype, Rng};

/// The element types of an op.
#[derive(Clone, Copy)]
enum Takes {
    Floats,
    Numbers,
    Logic,
    All,
}
use Takes::{All, Floats, Logic, Numbers};

impl Takes {
    fn has(self, dtype: Dtype) -> bool {
        match self {
            Floats => dtype.is_float(),
            Numbers => dtype != Dtype::Bool,
            Logic => !dtype.is_float(),
            All => true,
        }
    }
}

/// Op, operands, types, and ulps for f32 and f64; 0 means bit-identical. An `f32` that is not the nearest may round to
/// the other neighbour in 16 bits.
const OPS: [(&str, usize, Takes, f64, f64); 44] = [
    ("add", 2, Numbers, 0.0, 0.0),
    ("sub", 2, Numbers, 0.0, 0.0),
    ("mul", 2, Numbers, 0.0, 0.0),
    ("div", 2, Numbers, 0.0, 0.0),
    ("rem", 2, Numbers, 0.0, 0.0),
    ("maximum", 2, Numbers, 0.0, 0.0),
    ("minimum", 2, Numbers, 0.0, 0.0),
    ("pow", 2, Numbers, 0.5, 0.0),
    ("atan2", 2, Floats, 0.5, 0.0),
    ("neg", 1, Numbers, 0.0, 0.0),
    ("abs", 1, Numbers, 0.0, 0.0),
    ("relu", 1, Numbers, 0.0, 0.0),
    ("sign", 1, Numbers, 0.0, 0.0),
    ("sqrt", 1, Floats, 0.0, 0.0),
    ("rsqrt", 1, Floats, 1.5, 0.0),
    ("recip", 1, Floats, 0.0, 0.0),
    ("floor", 1, Floats, 0.0, 0.0),
    ("ceil", 1, Floats, 0.0, 0.0),
    ("round", 1, Floats, 0.0, 0.0),
    ("exp", 1, Floats, 1.6, 1.0),
    ("exp2", 1, Floats, 1.5, 1.0),
    ("expm1", 1, Floats, 1.5, 2.0),
    ("log", 1, Floats, 1.5, 2.0),
    ("log2", 1, Floats, 1.5, 2.0),
    ("log1p", 1, Floats, 1.5, 2.0),
    ("tanh", 1, Floats, 1.6, 5.0),
    ("sigmoid", 1, Floats, 1.5, 4.0),
    ("silu", 1, Floats, 1.5, 3.0),
    ("erf", 1, Floats, 1.5, 0.0),
    ("gelu", 1, Floats, 1.5, 0.0),
    ("sin", 1, Floats, 1.5, 0.0),
    ("cos", 1, Floats, 1.5, 0.0),
    ("eq", 2, All, 0.0, 0.0),
    ("ne", 2, All, 0.0, 0.0),
    ("lt", 2, All, 0.0, 0.0),
    ("le", 2, All, 0.0, 0.0),
    ("gt", 2, All, 0.0, 0.0),
    ("ge", 2, All, 0.0, 0.0),
    ("is_nan", 1, Floats, 0.0, 0.0),
    ("is_finite", 1, Floats, 0.0, 0.0),
    ("and", 2, Logic, 0.0, 0.0),
    ("or", 2, Logic, 0.0, 0.0),
    ("xor", 2, Logic, 0.0, 0.0),
    ("not", 1, Logic, 0.0, 0.0),
];

fn near(dtype: Dtype, single: f64, double: f64) -> Near {
    match dtype {
        _ if single == 0.0 && double == 0.0 => Near::Same,
        Dtype::F64 => {
            if double == 0.0 {
                Near::Same
            } else {
                Near::Ulps(double)
            }
        }
        Dtype::F32 => Near::Ulps(single),
        _ => {
            if single == 0.0 {
                Near::Same
            } else {
                Near::Ulps(1.0)
            }
        }
    }
}

const SHAPES: [&[usize]; 9] =
    [&[], &[1], &[8], &[19], &[3, 5, 7], &[40, 300], &[6, 1, 1100], &[4, 0, 3], &[2, 2, 2, 2, 2, 2, 3, 2]];

/// The ops of the table that are defined. Others are counted.
fn defined() -> Vec<(&'static str, usize, Takes, f64, f64)> {
    let table = OpTable::built_in();
    let defined: Vec<_> = OPS.into_iter().filter(|row| table.get(row.0).is_some()).collect();
    println!("{} of {} ops have no definition", OPS.len() - defined.len(), OPS.len());
    defined
}

#[test]
fn every_op_in_every_type_and_layout() {
    let mut rng = Rng::new(1);
    let mut failures = Vec::new();
    for (name, arity, takes, single, double) in defined() {
        let op = op(name);
        for dtype in Dtype::ALL.into_iter().filter(|dtype| takes.has(*dtype)) {
            for shape in SHAPES {
                for place in PLACES {
                    // The other operand has each layout once.
                    let other = rng.pick(&PLACES);
                    let x = Placed::random(dtype, shape, place, &mut rng);
                    let y = Placed::random(dtype, shape, other, &mut rng);
                    let operands = &[&x, &y][..arity];
                    if let Err(error) =
                        check(&*op, operands, None, &Threads::ONE, near(dtype, single, double))
                    {
                        failures.push(format!("{name} {dtype}{shape:?} {place:?} {other:?}: {error}"));
                    }
                }
            }
        }
    }
    assert_none(&failures);
}

#[test]
fn in_place_on_either_operand() {
    let mut rng = Rng::new(2);
    for (name, arity, takes, single, double) in defined() {
        let op = op(name);
        let question = matches!(name, "eq" | "ne" | "lt" | "le" | "gt" | "ge" | "is_nan" | "is_finite");
        for dtype in Dtype::ALL.into_iter().filter(|dtype| takes.has(*dtype)) {
            if question && dtype != Dtype::Bool {
                continue;
            }
            for (shape, i) in SHAPES.into_iter().flat_map(|shape| (0..arity).map(move |i| (shape, i))) {
                let x = Placed::random(dtype, shape, Place::Whole, &mut rng);
                let y = Placed::random(dtype, shape, rng.pick(&PLACES), &mut rng);
                let operands = if i == 0 { [&x, &y] } else { [&y, &x] };
                let checked =
                    check(&*op, &operands[..arity], Some(i), &Threads::ONE, near(dtype, single, double));
                checked.unwrap_or_else(|error| panic!("{name} {dtype}{shape:?} operand {i}: {error}"));
            }
        }
    }
}

#[test]
fn a_choice_moves_elements_of_every_type() {
    let mut rng = Rng::new(3);
    let op = op("select");
    for dtype in Dtype::ALL {
        for shape in SHAPES {
            for place in PLACES {
                let condition = Placed::random(Dtype::Bool, shape, place, &mut rng);
                let x = Placed::random(dtype, shape, rng.pick(&PLACES), &mut rng);
                let y = Placed::random(dtype, shape, Place::Whole, &mut rng);
                for in_place in [None, Some(2)] {
                    let checked = check(&*op, &[&condition, &x, &y], in_place, &Threads::ONE, Near::Same);
                    checked.unwrap_or_else(|error| panic!("select {dtype}{shape:?} {place:?}: {error}"));
                }
            }
        }
    }
}

#[test]
fn conversions_between_all_types() {
    let mut rng = Rng::new(4);
    for from in Dtype::ALL {
        for to in Dtype::ALL {
            let op = op(&format!("cast[to={to}]"));
            for shape in SHAPES {
                for place in PLACES {
                    let x = Placed::random(from, shape, place, &mut rng);
                    let checked = check(&*op, &[&x], None, &Threads::ONE, Near::Same);
                    checked.unwrap_or_else(|error| panic!("{from}{shape:?} to {to} {place:?}: {error}"));
                }
            }
        }
    }
}

#[test]
fn threads_change_nothing() {
    let mut rng = Rng::new(5);
    let threads = Threads::new(2);
    for (name, near) in [("add", Near::Same), ("exp", Near::Ulps(1.6))] {
        for place in [Place::Whole, Place::Transposed, Place::RowRepeated] {
            let operands = [0, 1].map(|_| Placed::random(Dtype::F32, &[150, 1000], place, &mut rng));
            let op = op(name);
            let arity = op.info().args.len();
            check(&*op, &[&operands[0], &operands[1]][..arity], None, &threads, near).unwrap();
        }
    }
}
