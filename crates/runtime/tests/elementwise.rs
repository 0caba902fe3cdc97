//! Every elementwise kernel against the op's own evaluation: all types, layouts, in place, empty, on threads.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod common;

use common::{PLACES, Place, Placed, assert_none, check, op, results};
use consort_ir::literal::Literal;
use consort_ir::ops::{Op, elementwise_ops};
use consort_runtime::threads::Threads;
use consort_types::{Dtype, Rng};

const SHAPES: [&[usize]; 9] =
    [&[], &[1], &[8], &[19], &[3, 5, 7], &[40, 300], &[6, 1, 1100], &[4, 0, 3], &[2, 2, 2, 2, 2, 2, 3, 2]];

/// The ops of one or two operands, each with the element types that it takes and whether the result has that type.
fn ops() -> Vec<(Op, Vec<(Dtype, bool)>)> {
    let takes = |op: &Op| {
        let arity = op.info().args.len();
        let result =
            |dtype: Dtype| Some((dtype, results(&**op, &vec![(dtype, vec![1]); arity])?[0].0 == dtype));
        Dtype::ALL.into_iter().filter_map(result).collect()
    };
    let ops = elementwise_ops().filter(|op| op.info().args.len() <= 2);
    ops.map(|op| (op.clone(), takes(&op))).collect()
}

#[test]
fn every_op_in_every_type_and_layout() {
    let mut rng = Rng::new(1);
    let mut failures = Vec::new();
    for (op, takes) in ops() {
        let (name, arity) = (op.info().name, op.info().args.len());
        for (dtype, _) in takes {
            for shape in SHAPES {
                for place in PLACES {
                    // The other operand has each layout once.
                    let other = rng.pick(&PLACES);
                    let x = Placed::random(dtype, shape, place, &mut rng);
                    let y = Placed::random(dtype, shape, other, &mut rng);
                    if let Err(error) = check(&*op, &[&x, &y][..arity], None, &Threads::ONE) {
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
    for (op, takes) in ops() {
        let (name, arity) = (op.info().name, op.info().args.len());
        for (dtype, _) in takes.into_iter().filter(|(_, same)| *same) {
            for (shape, i) in SHAPES.into_iter().flat_map(|shape| (0..arity).map(move |i| (shape, i))) {
                let x = Placed::random(dtype, shape, Place::Whole, &mut rng);
                let y = Placed::random(dtype, shape, rng.pick(&PLACES), &mut rng);
                let operands = if i == 0 { [&x, &y] } else { [&y, &x] };
                check(&*op, &operands[..arity], Some(i), &Threads::ONE)
                    .unwrap_or_else(|error| panic!("{name} {dtype}{shape:?} operand {i}: {error}"));
            }
        }
    }
}

/// Numbers of all sizes, those around which functions overflow, vanish or change their method, and special ones.
fn whole_range(dtype: Dtype) -> Placed {
    let edges = [
        0.0,
        1.0,
        0.5,
        0.7,
        0.921_875,
        14.0,
        15.0,
        30.0,
        37.5,
        87.336_54,
        88.722_83,
        88.722_84,
        103.278_93,
        103.972_08,
        127.999_99,
        128.0,
        149.0,
        150.0,
        170.0,
        708.4,
        709.782_712_893_384,
        720.0,
        745.0,
        745.2,
        760.0,
        1023.999,
        1024.0,
        1074.0,
        1075.0,
        1e9,
        9.010_9,
        1e-17,
        5e-324,
        1e-310,
        1e-45,
        1.175_494_4e-38,
    ];
    let most = [f64::from(f32::MAX), f64::MAX, f64::INFINITY, f64::NAN];
    let edges = edges.into_iter().chain(most).flat_map(|x| [x, -x]);
    let singles = (0..=u32::MAX).step_by(4999).map(|bits| f64::from(f32::from_bits(bits)));
    let doubles = (0..1u64 << 18).map(|i| f64::from_bits(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let (close, near) = (
        (0..1u64 << 19).map(|i| i as f64 * 2.8e-3 - 750.0),
        (0..1u64 << 19).map(|i| i as f64 * 8.2e-6 - 2.0),
    );
    let all: Vec<f64> = match dtype {
        Dtype::F64 => edges.chain(doubles).chain(close).chain(near).collect(),
        _ => edges.chain(singles).collect(),
    };
    Placed::whole(&Literal::floats(dtype, vec![all.len()], all))
}

#[test]
fn functions_keep_to_their_tolerances_over_their_whole_range() {
    let mut failures = Vec::new();
    for dtype in [Dtype::F32, Dtype::F64] {
        let x = whole_range(dtype);
        for (op, _) in ops().iter().filter(|(op, _)| !op.tolerance().is_exact(dtype)) {
            if op.info().args.len() == 1
                && let Err(error) = check(&**op, &[&x], None, &Threads::new(2))
            {
                failures.push(format!("{dtype}: {error}"));
            }
        }
    }
    assert_none(&failures);
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
                    let checked = check(&*op, &[&condition, &x, &y], in_place, &Threads::ONE);
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
                    let checked = check(&*op, &[&x], None, &Threads::ONE);
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
    for name in ["add", "exp"] {
        for place in [Place::Whole, Place::Transposed, Place::RowRepeated] {
            let operands = [0, 1].map(|_| Placed::random(Dtype::F32, &[150, 1000], place, &mut rng));
            let op = op(name);
            let arity = op.info().args.len();
            check(&*op, &[&operands[0], &operands[1]][..arity], None, &threads).unwrap();
        }
    }
}
