//! Kernels of products against the ops' own evaluations: random sizes, layouts and types. Integers are equal; floats
//! differ by no more than the ops allow.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod common;

use common::{Placed, all_computed, check_threads, computed};
use consort_ir::index::Index;
use consort_ir::literal::{Data, Literal};
use consort_ir::ops::{Attention, AttentionBackward, Conv1d, Conv2d, Matmul, OpDef};
use consort_runtime::threads::Threads;
use consort_types::layout::Layout;
use consort_types::{Dtype, Rng};

/// The layout of a tensor.
#[derive(Clone, Copy, Debug)]
enum Lie {
    Contiguous,
    /// Permuted dimensions, slices of larger tensors, broadcasts.
    Anyhow,
}

/// An operand of random numbers between -1 and 1, or of any integers.
fn random(dtype: Dtype, shape: &[usize], lie: Lie, rng: &mut Rng) -> Placed {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    let mut layout = Layout::contiguous(shape);
    if matches!(lie, Lie::Anyhow) {
        for i in (1..order.len()).rev() {
            if rng.one_in(2) {
                order.swap(i, rng.below(i + 1));
            }
        }
        let mut next = 1;
        for dim in order.iter().rev() {
            if rng.one_in(8) {
                layout.strides[*dim] = 0;
                continue;
            }
            let gap = if rng.one_in(3) { 1 + rng.below(3) } else { 0 };
            let step = if rng.one_in(8) { 2 } else { 1 };
            layout.strides[*dim] = next * step;
            next *= (shape[*dim] + gap).max(1) * step;
        }
        layout.start = rng.below(5);
    }
    let count = shape.iter().product();
    let tensor = if dtype.is_float() {
        let mut float = || (rng.next_u64() as i64) as f64 / 2f64.powi(63);
        Literal::floats(dtype, shape.to_vec(), (0..count).map(|_| float()).collect())
    } else {
        Literal::ints(dtype, shape.to_vec(), (0..count).map(|_| rng.next_u64() as i64).collect())
    };
    Placed::new(&tensor, layout)
}

/// Fails if a kernel's result is further from the op's own evaluation than the op allows.
fn check(op: &dyn OpDef, args: &[Placed], threads: &Threads, what: &str) {
    let args: Vec<&Placed> = args.iter().collect();
    common::check(op, &args, None, threads).unwrap_or_else(|error| panic!("{what}: {error}"));
}

fn check_matmul(dtype: Dtype, x: &[usize], y: &[usize], lie: Lie, threads: &Threads, rng: &mut Rng) {
    let args = [random(dtype, x, lie, rng), random(dtype, y, lie, rng)];
    let what = format!("{dtype} {x:?} {:?} {y:?} {:?}", args[0].layout.strides, args[1].layout.strides);
    check(&Matmul {}, &args, threads, &what);
}

#[test]
fn products_of_matrices_of_all_types_and_layouts() {
    let mut rng = Rng::new(7);
    let sizes = [0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64, 70];
    for round in 0..3000 {
        let dtype =
            [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16, Dtype::I32, Dtype::I64, Dtype::U8][round % 7];
        let lie = if round / 7 % 4 == 0 { Lie::Contiguous } else { Lie::Anyhow };
        let [m, k, n] = std::array::from_fn(|_| rng.pick(&sizes));
        let leading: Vec<usize> = (0..rng.next_u64() % 3).map(|_| (rng.next_u64() % 4) as usize).collect();
        let x = [&leading[..], &[m, k]].concat();
        let y = if rng.one_in(2) { vec![k, n] } else { [&leading[..], &[k, n]].concat() };
        check_matmul(dtype, &x, &y, lie, &Threads::ONE, &mut rng);
    }
}

#[test]
fn products_of_matrices_larger_than_a_block() {
    let mut rng = Rng::new(8);
    let two = Threads::new(2);
    for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16, Dtype::I32, Dtype::U8] {
        for (m, k, n) in
            [(300, 270, 260), (1, 1500, 4200), (1200, 1100, 1), (3, 5000, 30), (30, 5000, 2), (2, 3, 9000)]
        {
            for lie in [Lie::Contiguous, Lie::Anyhow] {
                check_matmul(dtype, &[m, k], &[k, n], lie, &Threads::ONE, &mut rng);
                check_matmul(dtype, &[m, k], &[k, n], lie, &two, &mut rng);
            }
        }
        check_matmul(dtype, &[3, 5, 40, 64], &[3, 5, 64, 30], Lie::Anyhow, &two, &mut rng);
        check_matmul(dtype, &[3, 150, 140], &[3, 140, 160], Lie::Anyhow, &two, &mut rng);
    }
}

#[test]
fn a_product_is_the_same_on_any_number_of_threads() {
    let mut rng = Rng::new(9);
    for dtype in [Dtype::F32, Dtype::F64, Dtype::F16] {
        for (m, k, n) in [(400, 1030, 130), (130, 1030, 400), (2, 1500, 2500), (2500, 700, 1)] {
            let args = [[m, k], [k, n]].map(|shape| random(dtype, &shape, Lie::Contiguous, &mut rng));
            check_threads(&Matmul {}, &args.each_ref(), &format!("{dtype} {m} {k} {n}"));
        }
    }
}

#[test]
fn rows_of_16_bits_have_the_same_sums_alone_and_together() {
    let mut rng = Rng::new(10);
    for dtype in [Dtype::F16, Dtype::Bf16] {
        // Depths that the streams do not divide evenly, in one block and in several.
        for k in [1, 2, 3, 4, 5, 1023, 1024, 1026, 2500] {
            let [x, y] = [[4, k], [k, 37]].map(|shape| random(dtype, &shape, Lie::Contiguous, &mut rng));
            let product = |x: &Placed| match computed(&Matmul {}, &[x, &y], None, &Threads::ONE).unwrap().data
            {
                Data::Float(elements) => elements,
                Data::Int(_) => unreachable!("a product of floats"),
            };
            let Data::Float(rows) = &x.tensor.data else { unreachable!("floats") };
            let alone = rows.chunks(k).flat_map(|row| {
                let row = Literal::floats(dtype, vec![1, k], row.to_vec());
                product(&Placed::new(&row, Layout::contiguous(&[1, k])))
            });
            assert_eq!(alone.collect::<Vec<f64>>(), product(&x), "{dtype} {k}");
        }
    }
}

/// Operands of attention: batch entries, heads of q and of k, queries, keys, width of keys and of values. Then those that
/// its backward has besides.
fn attention(dtype: Dtype, sizes: [usize; 7], lie: Lie, rng: &mut Rng) -> [Placed; 5] {
    let [batch, heads, own, queries, keys, depth, width] = sizes;
    let result = [batch, heads, queries, width];
    let operands = [[batch, heads, queries, depth], [batch, own, keys, depth], [batch, own, keys, width]];
    [operands[0], operands[1], operands[2], result, result].map(|shape| random(dtype, &shape, lie, rng))
}

/// Checks attention and its backward.
fn check_attention(args: &[Placed; 5], causal: Option<i64>, scale: f64, threads: &Threads) {
    let causal = causal.map(Index::constant);
    let [q, k] = [&args[0].tensor, &args[1].tensor];
    let what = format!("{} {:?} {:?} {causal:?}", q.dtype, q.shape, k.shape);
    check(&Attention { scale, causal: causal.clone() }, &args[..3], threads, &what);
    check(&AttentionBackward { scale, causal }, args, threads, &what);
}

#[test]
fn attention_of_all_types_layouts_and_offsets() {
    let mut rng = Rng::new(10);
    for round in 0..400 {
        let dtype = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16][round % 4];
        let lie = if round / 4 % 3 == 0 { Lie::Contiguous } else { Lie::Anyhow };
        let (own, group) = (1 + rng.below(2), 1 + rng.below(4));
        let (queries, keys) = (rng.pick(&[0, 1, 2, 3, 5, 9, 33, 40]), rng.pick(&[1, 2, 15, 17, 40]));
        let (depth, width) = (rng.pick(&[0, 1, 3, 8, 17]), rng.pick(&[0, 1, 5, 16, 19]));
        let causal =
            rng.pick(&[None, Some(0), Some(-3), Some(7), Some(-100), Some(i64::MAX), Some(i64::MIN)]);
        let sizes = [rng.below(3), own * group, own, queries, keys, depth, width];
        let args = attention(dtype, sizes, lie, &mut rng);
        check_attention(&args, causal, 0.5, &Threads::ONE);
    }
}

#[test]
fn attention_over_several_blocks() {
    let mut rng = Rng::new(11);
    for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16] {
        for (queries, keys, causal) in [
            (1, 1300, None),
            (3, 1200, Some(1197)),
            (150, 600, None),
            (150, 600, Some(450)),
            (600, 600, Some(0)),
            (40, 520, Some(-30)),
        ] {
            for lie in [Lie::Contiguous, Lie::Anyhow] {
                let args = attention(dtype, [1, 2, 1, queries, keys, 12, 9], lie, &mut rng);
                check_attention(&args, causal, 3.0, &Threads::ONE);
                check_attention(&args, causal, 3.0, &Threads::new(2));
            }
        }
    }
}

#[test]
fn scores_that_are_not_finite_are_as_defined() {
    let nan = f64::NAN;
    let inf = f64::INFINITY;
    // Each row: keys for a query of 1, at three distant positions, and the result for values of 1.
    for (keys, expected) in [
        ([0.0, -inf, 0.0], 1.0),
        ([-inf, -inf, 0.0], 1.0),
        ([-inf, 0.0, -inf], 1.0),
        ([-inf, -inf, -inf], nan),
        ([0.0, inf, 0.0], nan),
        ([nan, 0.0, 0.0], nan),
        ([0.0, 0.0, nan], nan),
    ] {
        for queries in [1usize, 20] {
            let place = |shape: [usize; 4], value: &dyn Fn(usize) -> f64| {
                let values = (0..shape.iter().product()).map(value).collect();
                Placed::whole(&Literal::floats(Dtype::F32, shape.to_vec(), values))
            };
            let args = [
                place([1, 1, queries, 1], &|_| 1.0),
                place([1, 1, 1500, 1], &|i| keys[i / 500]),
                place([1, 1, 1500, 1], &|_| 1.0),
            ];
            let op = Attention { scale: 1.0, causal: None };
            check(&op, &args, &Threads::ONE, "against the definition");
            let got = computed(&op, &args.each_ref(), None, &Threads::ONE).unwrap();
            let Data::Float(got) = got.data else { unreachable!("floats") };
            // The check takes an infinity for a NaN.
            assert!(got.iter().all(|x| x.is_nan() == expected.is_nan()), "{keys:?}: {got:?}");
        }
    }
}

/// The number of output positions along a dimension; `None` if the kernel does not fit.
fn places(size: usize, kernel: usize, stride: usize, padding: usize, dilation: usize) -> Option<usize> {
    Some((size + 2 * padding).checked_sub(dilation * (kernel - 1) + 1)? / stride + 1)
}

#[test]
fn convolutions_of_all_types_layouts_and_moves() {
    let mut rng = Rng::new(12);
    let mut done = 0;
    for round in 0..1500 {
        let dtype = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16][round % 4];
        let lie = if round / 4 % 3 == 0 { Lie::Contiguous } else { Lie::Anyhow };
        let (groups, own, per_group) = (1 + rng.below(3), rng.below(4), rng.pick(&[0, 1, 2, 4, 7]));
        let mut pick = |choices: &[usize]| [rng.pick(choices), rng.pick(choices)];
        let (size, kernel) = (pick(&[0, 1, 2, 5, 9, 20]), pick(&[1, 2, 3, 4]));
        let (stride, padding, dilation) = (pick(&[1, 1, 2, 3]), pick(&[0, 1, 2, 5]), pick(&[1, 1, 2, 3]));
        if (0..2).any(|i| places(size[i], kernel[i], stride[i], padding[i], dilation[i]).is_none()) {
            continue;
        }
        done += 1;
        let (channels, batch) = (groups * per_group, rng.below(3));
        let threads = if rng.one_in(4) { Threads::new(2) } else { Threads::ONE };
        let (x, weight, op): (Vec<usize>, Vec<usize>, Box<dyn OpDef>) = if rng.one_in(2) {
            let op = Conv1d { stride: stride[1], padding: padding[1], dilation: dilation[1], groups };
            (vec![batch, groups * own, size[1]], vec![channels, own, kernel[1]], Box::new(op))
        } else {
            let lists = [stride, padding, dilation].map(|list| list.to_vec());
            let [stride, padding, dilation] = lists;
            let op = Conv2d { stride, padding, dilation, groups };
            (
                vec![batch, groups * own, size[0], size[1]],
                vec![channels, own, kernel[0], kernel[1]],
                Box::new(op),
            )
        };
        let args = [random(dtype, &x, lie, &mut rng), random(dtype, &weight, lie, &mut rng)];
        let what = format!("{dtype} {x:?} {weight:?} {op:?}");
        check(&*op, &args, &threads, &what);
    }
    assert!(done > 800, "{done} of them fit");
}

#[test]
fn convolutions_over_several_blocks() {
    let mut rng = Rng::new(13);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (x, weight, groups) in [
            ([1, 24, 30, 33], [6, 24, 3, 3], 1),
            ([2, 4, 40, 45], [8, 2, 5, 5], 2),
            ([1, 3, 9, 2100], [3, 1, 3, 3], 3),
        ] {
            let op = Conv2d { stride: vec![1, 1], padding: vec![1, 1], dilation: vec![1, 1], groups };
            let args = [x, weight].map(|shape| random(dtype, &shape, Lie::Contiguous, &mut rng));
            for threads in [Threads::ONE, Threads::new(2)] {
                check(&op, &args, &threads, &format!("{dtype} {x:?} {weight:?}"));
            }
        }
    }
}

#[test]
fn an_infinite_weight_outside_x_adds_nothing() {
    let x = Placed::whole(&Literal::floats(Dtype::F32, vec![1, 1, 3], vec![1.0, 2.0, 3.0]));
    let values = [f64::INFINITY, 1.0, 0.0].repeat(5);
    let weight = Placed::whole(&Literal::floats(Dtype::F32, vec![5, 1, 3], values));
    let op = Conv1d { stride: 1, padding: 1, dilation: 1, groups: 1 };
    check(&op, &[x, weight], &Threads::ONE, "an infinite weight");
}

#[test]
fn values_that_a_query_does_not_see_do_not_reach_it() {
    let mut rng = Rng::new(14);
    for queries in [3, 20, 200] {
        let [q, k, _, z, g] =
            attention(Dtype::F32, [1, 1, 1, queries, queries, 4, 2], Lie::Contiguous, &mut rng);
        let values = (0..queries * 2).map(|i| if i >= queries { f64::NAN } else { 1.0 }).collect();
        let v = Placed::whole(&Literal::floats(Dtype::F32, vec![1, 1, queries, 2], values));
        check_attention(&[q, k, v, z, g], Some(0), 0.5, &Threads::ONE);
    }
}

#[test]
fn the_backward_of_attention_reaches_what_a_query_sees_and_no_more() {
    let mut rng = Rng::new(15);
    // In one block and in several.
    for (queries, keys) in [(5, 5), (150, 700)] {
        // The last query sees all keys, those before it all but the last.
        let causal = Some((keys - queries) as i64);
        let op = AttentionBackward { scale: 0.5, causal: causal.map(Index::constant) };
        for wrong in [0, 1, 2, 4] {
            let sizes = [1, 2, 1, queries, keys, 4, 2];
            let mut args = attention(Dtype::F32, sizes, Lie::Contiguous, &mut rng);
            // The last query, key, value or cotangent is infinite.
            let mut tensor = args[wrong].tensor.clone();
            let Data::Float(elements) = &mut tensor.data else { unreachable!("floats") };
            *elements.last_mut().unwrap() = f64::INFINITY;
            args[wrong] = Placed::whole(&tensor);
            check_attention(&args, causal, 0.5, &Threads::ONE);
            let made = all_computed(&op, &args.each_ref(), None, &Threads::ONE).unwrap();
            let Data::Float(of_q) = &made[0].data else { unreachable!("floats") };
            assert!(of_q[..(queries - 1) * 4].iter().all(|x| x.is_finite()), "operand {wrong}");
            assert!(!of_q[of_q.len() - 1].is_finite(), "operand {wrong}");
        }
    }
}

#[test]
fn the_backward_of_attention_is_the_same_on_any_number_of_threads() {
    let mut rng = Rng::new(16);
    for dtype in [Dtype::F32, Dtype::F64, Dtype::Bf16] {
        let args = attention(dtype, [2, 6, 3, 140, 560, 16, 8], Lie::Contiguous, &mut rng);
        let op = AttentionBackward { scale: 0.5, causal: Some(Index::constant(420)) };
        check_threads(&op, &args.each_ref(), &format!("{dtype}"));
    }
}
