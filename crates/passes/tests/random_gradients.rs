//! Gradients of random programs against differences, before and after all passes.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod grown;

use std::collections::BTreeMap;

use consort_ir::text::print;
use consort_ir::verify::verify;
use consort_oracle::differences::check_gradient;
use consort_passes::{PASSES, PassCx, float_arguments, gradient, simplify};

/// Reasons for which a gradient may be refused.
const REFUSALS: [&str; 4] = [
    "a reduction by",
    "a loop whose number of iterations is not known has no gradient",
    "what a rank outside of",
    "a value that only one iteration has",
];

#[test]
fn random_programs_have_the_gradients_that_differences_give() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let seeds =
        number("CONSORT_SEED").map_or(0..number("CONSORT_PROGRAMS").unwrap_or(120), |seed| seed..seed + 1);
    let (mut elements, mut gradients, mut refused) = (0, 0, BTreeMap::<String, usize>::new());
    let (mut wrong, one) = (Vec::new(), seeds.end - seeds.start == 1);
    for seed in seeds {
        let Some(program) = grown::program(seed, 16) else { continue };
        let text = print(&program);
        assert_eq!(verify(&program), [], "seed {seed}\n{text}");
        let wrt = float_arguments(&program.funcs[0]);
        let made = match gradient(&program, "f", &wrt) {
            Ok(made) => made,
            Err(failure) => {
                let known = REFUSALS.iter().find(|why| failure.headline().to_string().contains(**why));
                match known {
                    Some(known) => *refused.entry(known.to_string()).or_default() += 1,
                    None => wrong.push(format!("seed {seed}: {failure}{}", if one { &text } else { "" })),
                }
                continue;
            }
        };
        let inputs = grown::inputs(&program, seed);
        let simple = simplify(&made, PASSES, &mut PassCx::default()).unwrap();
        for made in [&made, &simple] {
            match check_gradient(&program, made, "f", &wrt, &inputs, 1e-4) {
                Ok(compared) => elements += compared,
                Err(error) if one => wrong.push(format!("seed {seed}: {error}\n{text}\n{}", print(made))),
                Err(error) => wrong.push(format!("seed {seed}: {error}")),
            }
        }
        gradients += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{gradients} gradients, {elements} elements, refused: {refused:?}");
}
