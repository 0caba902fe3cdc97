//! Random programs through each pass and through all of them: they verify and give the same results, bit by bit, on
//! all ranks.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod rough;

use consort_ir::entity::Value;
use consort_ir::ops::{Flow, OpTable};
use consort_ir::program::{Block, Program};
use consort_ir::text::{parse, print};
use consort_ir::types::Type;
use consort_ir::verify::verify;
use consort_oracle::generate::{self, inputs};
use consort_passes::{PASSES, Pass, PassCx, Stage, simplify};

/// The seeds of random programs: `default` of them, or CONSORT_PROGRAMS, or only CONSORT_SEED.
fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse().ok());
    let count = number("CONSORT_PROGRAMS").map_or(default, |n: u64| n * default / PROGRAMS);
    number("CONSORT_SEED").map_or(0..count, |seed| seed..seed + 1)
}

const PROGRAMS: u64 = 300;

/// A random program, every other one with detours.
fn program(seed: u64) -> Program {
    let program = generate::program(seed, 24);
    if seed.is_multiple_of(2) { program } else { rough::roughen(&program, seed) }
}

/// Each pass alone, then all.
fn pipelines() -> impl Iterator<Item = &'static [Pass]> {
    PASSES.iter().map(std::slice::from_ref).chain([PASSES])
}

/// The program after some passes, and the rewrites they made.
fn after(program: &Program, passes: &'static [Pass], fuel: u64) -> (Program, u64) {
    let mut rewrites = 0;
    let mut watch = |stage: Stage<'_>| {
        if let Stage::Pass(ran) = stage {
            rewrites += ran.rewrites;
        }
    };
    let mut cx = PassCx::watched(&mut watch);
    cx.fuel = fuel;
    let result = simplify(program, passes, &mut cx);
    let result = result.unwrap_or_else(|error| panic!("{error}\n{}", print(program)));
    (result, rewrites)
}

#[test]
fn results_stay_the_same_bit_by_bit() {
    let ops = OpTable::built_in();
    let mut total = [0; PASSES.len() + 1];
    for seed in seeds(PROGRAMS) {
        let program = program(seed);
        let inputs = inputs(&program, seed);
        let expected = consort_oracle::run(&program, "f", &inputs).unwrap();
        for (passes, total) in pipelines().zip(&mut total) {
            let (simple, rewrites) = after(&program, passes, u64::MAX);
            *total += rewrites;
            let (before, text) = (print(&program), print(&simple));
            assert_eq!(verify(&simple), [], "seed {seed}\n{before}\n{text}");
            let got = consort_oracle::run(&simple, "f", &inputs);
            let got = got.unwrap_or_else(|error| panic!("seed {seed}: {error}\n{before}\n{text}"));
            let same = expected.iter().flatten().zip(got.iter().flatten()).all(|(a, b)| a.same(b));
            assert!(same && expected.len() == got.len(), "seed {seed}: other results\n{before}\n{text}");
            assert_eq!(rewrites == 0, simple == program, "seed {seed}");
            assert_eq!(parse(&text, &ops).unwrap().program, simple, "seed {seed}: reads back otherwise");
            let (again, more) = after(&simple, passes, u64::MAX);
            assert!(more == 0 && again == simple, "seed {seed}: {more} more\n{text}\n{}", print(&again));
            assert_eq!(print(&after(&program, passes, u64::MAX).0), text, "seed {seed}");
        }
    }
    println!("rewrites by pass, and by all: {total:?}");
    let programs = seeds(PROGRAMS).count() as u64;
    assert!(
        programs < PROGRAMS || total.iter().all(|n| *n > programs),
        "hardly anything was rewritten: {total:?}"
    );
}

/// Whether a `cond` returns a pending. While there is one no type may change; once it has been inlined they may, so a
/// pass that starts over sees more than one that continues.
fn returns_pendings(block: &Block, program: &Program) -> bool {
    block.nodes.iter().any(|node| {
        let pending = |value: &Value| program.funcs[0].ty(*value).is_some_and(Type::is_pending);
        node.op.flow() == Flow::Cond && node.results.iter().any(pending)
            || node.blocks.iter().any(|inside| returns_pendings(inside, program))
    })
}

#[test]
fn fuel_stops_after_so_many_rewrites() {
    for seed in seeds(PROGRAMS / 10) {
        let program = program(seed);
        let goes_on = !returns_pendings(&program.funcs[0].body, &program);
        for passes in pipelines() {
            let (whole, all) = after(&program, passes, u64::MAX);
            let mut before = program.clone();
            for fuel in 0..=all {
                let (simple, rewrites) = after(&program, passes, fuel);
                assert_eq!(rewrites, fuel, "seed {seed}");
                // A single pass continues where it stopped, so one more unit of fuel is its next rewrite.
                if passes.len() == 1 && fuel > 0 && goes_on {
                    assert_eq!(
                        print(&after(&before, passes, 1).0),
                        print(&simple),
                        "seed {seed}, fuel {fuel}"
                    );
                }
                before = simple;
            }
            assert_eq!(print(&before), print(&whole), "seed {seed}");
        }
    }
}
