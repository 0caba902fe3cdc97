//! The error of each function against the exact result, over its whole range.

use super::{double, single};

/// The distance in `f32` ulps between a result and the exact value, less what rounding itself may cost.
fn ulps(got: f32, exact: f64) -> f64 {
    let want = exact as f32;
    if got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan() {
        return 0.0;
    }
    if !got.is_finite() || !want.is_finite() || got == want {
        return f64::INFINITY;
    }
    let unit = f64::from(f32::from_bits(want.abs().to_bits() + 1)) - f64::from(want.abs());
    (f64::from(got) - exact).abs() / unit
}

fn ulps_double(got: f64, want: f64) -> f64 {
    if got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan() {
        return 0.0;
    }
    if !got.is_finite() || !want.is_finite() || got == want || got.signum() != want.signum() {
        return f64::INFINITY;
    }
    got.to_bits().abs_diff(want.to_bits()) as f64
}

/// Every 997th float, and special points: zeros, the smallest and largest, the ends of exp's range.
fn samples() -> impl Iterator<Item = f32> {
    let edges = [
        0.0,
        1e-45,
        1.175_494_4e-38,
        1.0,
        0.5,
        88.722_84,
        88.722_83,
        103.972_08,
        103.278_93,
        87.336_54,
        0.7,
        0.921_875,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
        127.999_99,
        128.0,
        149.0,
        150.0,
        14.0,
        15.0,
        170.0,
        1e9,
        9.010_9,
    ];
    (0..=u32::MAX).step_by(997).map(f32::from_bits).chain(edges.into_iter().flat_map(|x| [x, -x]))
}

#[test]
fn single_precision_functions_keep_to_their_errors() {
    type Row = (&'static str, fn(f32) -> f32, fn(f64) -> f64, f64);
    let rows: [Row; 13] = [
        ("exp", single::exp, f64::exp, 1.1),
        ("exp2", single::exp2, f64::exp2, 1.0),
        ("expm1", single::expm1, f64::exp_m1, 1.0),
        ("log", single::log, f64::ln, 1.0),
        ("log2", single::log2, f64::log2, 1.0),
        ("log1p", single::log1p, f64::ln_1p, 1.0),
        ("tanh", single::tanh, f64::tanh, 1.1),
        ("erf", single::erf, libm::erf, 1.0),
        ("sigmoid", single::sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 1.0),
        ("silu", single::silu, |x| if x == f64::NEG_INFINITY { -0.0 } else { x / (1.0 + (-x).exp()) }, 1.0),
        (
            "gelu",
            single::gelu,
            |x| {
                if x == f64::NEG_INFINITY {
                    -0.0
                } else {
                    x * 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
                }
            },
            1.0,
        ),
        ("sin", single::sin, f64::sin, 1.0),
        ("cos", single::cos, f64::cos, 1.0),
    ];
    let mut failed = Vec::new();
    for (name, function, exact, most) in rows {
        let angle = matches!(name, "sin" | "cos");
        let (mut worst, mut at) = (0.0, 0.0);
        for x in samples().filter(|x| !angle || x.abs() <= single::MAX_ANGLE) {
            let error = ulps(function(x), exact(f64::from(x)));
            if error > worst {
                (worst, at) = (error, x);
            }
        }
        println!("{name}: {worst:.3} ulp at {at:e}");
        if worst > most {
            failed.push(format!(
                "{name}: {worst} ulp at {at:e}: {:e}, expected {:e}",
                function(at),
                exact(f64::from(at))
            ));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn double_precision_functions_keep_to_their_errors() {
    type Row = (&'static str, fn(f64) -> f64, fn(f64) -> f64, f64);
    let rows: [Row; 9] = [
        ("exp", double::exp, f64::exp, 1.0),
        ("exp2", double::exp2, f64::exp2, 1.0),
        ("expm1", double::expm1, f64::exp_m1, 2.0),
        ("log", double::log, f64::ln, 2.0),
        ("log2", double::log2, f64::log2, 2.0),
        ("log1p", double::log1p, f64::ln_1p, 2.0),
        ("tanh", double::tanh, f64::tanh, 5.0),
        ("sigmoid", double::sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 4.0),
        (
            "silu",
            double::silu,
            |x| if x == f64::NEG_INFINITY { -0.0 } else { x * (1.0 / (1.0 + (-x).exp())) },
            3.0,
        ),
    ];
    let edges =
        [0.0, 1.0, 709.782_712_893_384, 745.2, 745.0, 708.4, 720.0, 760.0, 1023.999, 1024.0, 1074.0, 1075.0];
    let edges =
        edges.into_iter().chain([5e-324, 1e-310, f64::MAX, f64::INFINITY, f64::NAN, 1e-17, 37.5, 30.0]);
    let edges: Vec<f64> = edges.flat_map(|x| [x, -x]).collect();
    // Samples all bit patterns, and more densely where functions are neither 0 nor infinite.
    let wide = (0..1u64 << 20).map(|i| f64::from_bits(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let close = (0..1u64 << 20).map(|i| i as f64 * 1.4e-3 - 750.0);
    let near = (0..1u64 << 20).map(|i| i as f64 * 4.1e-6 - 2.0);
    let samples: Vec<f64> = edges.into_iter().chain(wide).chain(close).chain(near).collect();
    let mut failed = Vec::new();
    for (name, function, exact, most) in rows {
        let (mut worst, mut at) = (0.0, 0.0);
        for &x in &samples {
            // The oracle's formula overflows before its result does.
            if matches!(name, "sigmoid" | "silu") && x < -700.0 && x > f64::NEG_INFINITY {
                continue;
            }
            let error = ulps_double(function(x), exact(x));
            if error > worst {
                (worst, at) = (error, x);
            }
        }
        println!("f64 {name}: {worst} ulp at {at:e}");
        if worst > most {
            failed.push(format!(
                "{name}: {worst} ulp at {at:e}: {:e}, expected {:e}",
                function(at),
                exact(at)
            ));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn powers_below_one_keep_to_their_errors() {
    for x in samples().filter(|x| *x <= 0.0) {
        let (got, exact) = (single::exp_below_one(x), f64::from(x).exp());
        if exact < f64::from(f32::MIN_POSITIVE) {
            assert!((0.0..=f32::MIN_POSITIVE).contains(&got), "{x:e}: {got:e}");
        } else {
            let off = ulps(got, exact);
            assert!(off <= if x > -20.0 { 3.0 } else { 5.0 }, "{x:e}: {got:e}, off by {off}");
        }
    }
    assert_eq!((single::exp_below_one(0.0), single::exp_below_one(f32::NEG_INFINITY)), (1.0, 0.0));
    assert!(single::exp_below_one(f32::NAN).is_nan());
}
