//! Random programs: they verify, read back, run on the oracle, and have the properties that their types state.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::collections::BTreeMap;

use consort_ir::ops::{BUILT_IN, OpTable};
use consort_ir::program::Block;
use consort_ir::text::{parse, print};
use consort_ir::types::Type;
use consort_ir::verify::verify;
use consort_oracle::generate::{inputs, program};
use consort_oracle::{check_placement, run};

const PROGRAMS: u64 = 600;

/// The seeds of random programs: the default number, or CONSORT_PROGRAMS, or only CONSORT_SEED.
fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse().ok());
    number("CONSORT_SEED").map_or(0..number("CONSORT_PROGRAMS").unwrap_or(PROGRAMS), |seed| seed..seed + 1)
}

fn count(block: &Block, counts: &mut BTreeMap<&'static str, usize>) {
    for node in &block.nodes {
        *counts.entry(node.op.info().name).or_default() += 1;
        node.blocks.iter().for_each(|inside| count(inside, counts));
    }
}

#[test]
fn generated_programs_verify_read_back_and_run() {
    let ops = OpTable::built_in();
    let mut counts = BTreeMap::new();
    for seed in seeds() {
        let program = program(seed, 24);
        let text = print(&program);
        let errors: Vec<String> = verify(&program).iter().map(|error| error.headline()).collect();
        assert!(errors.is_empty(), "seed {seed}: {errors:?}\n{text}");
        let again = parse(&text, &ops).unwrap_or_else(|error| panic!("seed {seed}: {error}\n{text}")).program;
        assert_eq!(again, program, "seed {seed}");
        assert_eq!(print(&again), text, "seed {seed}");
        let inputs = inputs(&program, seed);
        let results =
            run(&program, "f", &inputs).unwrap_or_else(|error| panic!("seed {seed}: {error}\n{text}"));
        let types = program.funcs[0].results.iter().flat_map(|ty| match ty {
            Type::Pending(tensors) => tensors.iter().cloned().map(Type::Tensor).collect(),
            other => vec![other.clone()],
        });
        for (i, ty) in types.enumerate() {
            let values: Vec<_> = results.iter().map(|results| &results[i]).collect();
            check_placement(&program.mesh, &ty, &values)
                .unwrap_or_else(|error| panic!("seed {seed}: result {i}: {error}\n{text}"));
        }
        let second = run(&again, "f", &inputs).unwrap();
        assert!(results.iter().flatten().zip(second.iter().flatten()).all(|(a, b)| a.same(b)), "seed {seed}");
        count(&program.funcs[0].body, &mut counts);
    }
    let never: Vec<&str> = BUILT_IN
        .iter()
        .flat_map(|(_, rows)| rows.iter().map(|info| info.name))
        .filter(|name| counts.get(name).is_none_or(|n| *n < 5))
        .collect();
    assert!(
        seeds().count() < PROGRAMS as usize || never.is_empty(),
        "ops that are hardly ever generated: {never:?}"
    );
}

#[test]
fn programs_are_functions_of_their_seed() {
    for seed in [0, 7, 123_456] {
        assert_eq!(print(&program(seed, 40)), print(&program(seed, 40)));
    }
}
