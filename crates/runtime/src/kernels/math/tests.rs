//! The error of `exp_below_one`, which is no op by itself. `tests/elementwise.rs` holds those that are to their
//! tolerances.

use super::single;

#[test]
fn powers_below_one_keep_to_their_errors() {
    let edges = [-0.0, 0.0, -1e-45, -20.0, -87.336_54, -88.0, -88.722_84, -103.972_08, f32::MIN];
    let samples = (0..=u32::MAX).step_by(997).map(f32::from_bits).chain(edges);
    for x in samples.filter(|x| *x <= 0.0) {
        let (got, exact) = (single::exp_below_one(x), f64::from(x).exp());
        if exact < f64::from(f32::MIN_POSITIVE) {
            assert!((0.0..=f32::MIN_POSITIVE).contains(&got), "{x:e}: {got:e}");
        } else {
            let off = (f64::from(got) - exact).abs() / f64::from((exact as f32).next_up() - exact as f32);
            assert!(off <= if x > -20.0 { 3.0 } else { 5.0 }, "{x:e}: {got:e}, off by {off}");
        }
    }
    assert_eq!((single::exp_below_one(0.0), single::exp_below_one(f32::NEG_INFINITY)), (1.0, 0.0));
    assert!(single::exp_below_one(f32::NAN).is_nan());
}
