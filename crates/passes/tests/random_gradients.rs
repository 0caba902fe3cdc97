//! Gradients of random programs against differences, before and after all passes, and planned: the plans of all ranks have
//! no hazards, and give the bits of the program oracle under every timing.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod grown;
mod planned;

use std::collections::BTreeMap;

use consort_ir::entity::Value;
use consort_ir::literal::Literal;
use consort_ir::ops::{Op, Recompute};
use consort_ir::program::{Block, Node, Program};
use consort_ir::text::print;
use consort_ir::verify::verify;
use consort_oracle::differences::check_gradient;
use consort_oracle::plan::Timing;
use consort_oracle::run;
use consort_passes::{PASSES, PassCx, Wanted, float_arguments, gradient, simplify};
use consort_types::Rank;

/// Reasons for which a gradient may be refused.
const REFUSALS: [&str; 3] = [
    "a reduction by",
    "a loop whose number of iterations is not known has no gradient",
    "the gradient reads a value whose size is read from data",
];

/// Plans a program for each rank, some arguments donated, and runs the plans under every kind of timing.
fn check_plans(program: &Program, inputs: &[Vec<Literal>], seed: u64) {
    let func = &program.funcs[0];
    let given = |rank: u32, param: usize| seed >> ((rank as usize + param) % 5) & 1 == 1;
    let plans = planned::plans(program, func, inputs, given);
    let ahead = Rank((seed % u64::from(program.mesh.n_ranks())) as u32);
    let timings = [Timing::Earliest, Timing::Latest, Timing::Ahead(ahead), Timing::Mixed(seed)];
    planned::check(program, func, &plans, inputs, &timings, &format!("seed {seed}"));
}

#[test]
fn random_programs_have_the_gradients_that_differences_give() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let seeds =
        number("CONSORT_SEED").map_or(0..number("CONSORT_PROGRAMS").unwrap_or(120), |seed| seed..seed + 1);
    let (mut elements, mut tried, mut gradients, mut refused) = (0, 0, 0, BTreeMap::<String, usize>::new());
    let mut backward: BTreeMap<&str, usize> = BTreeMap::new();
    let (mut wrong, one) = (Vec::new(), seeds.end - seeds.start == 1);
    for seed in seeds {
        let Some(program) = grown::program(seed, 16) else { continue };
        tried += 1;
        let text = print(&program);
        assert_eq!(verify(&program), [], "seed {seed}\n{text}");
        let wrt = float_arguments(&program.funcs[0]);
        let made = match gradient(&program, "f", &Wanted::by(&wrt[..])) {
            Ok(made) => made.program,
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
            check_plans(made, &inputs, seed);
        }
        gradients += 1;
        for name in ["cond", "scan"] {
            let is_more = count(&made.funcs[0].body, name) > count(&program.funcs[0].body, name);
            *backward.entry(name).or_default() += usize::from(is_more);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!(
        "{gradients} gradients, {elements} elements, refused: {refused:?}, backwards with blocks: {backward:?}"
    );
    assert!(one || backward.values().all(|programs| *programs > 0), "backwards with blocks: {backward:?}");
    assert!(one || 2 * gradients > tried, "{gradients} gradients of {tried} programs");
}

/// The ops of a name in a block, those in its blocks included.
fn count(block: &Block, name: &str) -> usize {
    let of = |node: &Node| {
        usize::from(node.op.info().name == name)
            + node.blocks.iter().map(|block| count(block, name)).sum::<usize>()
    };
    block.nodes.iter().map(of).sum()
}

/// A program all of which is computed again: its float arguments are read through `recompute`.
fn marked(program: &Program) -> Program {
    let mut program = program.clone();
    let func = &mut program.funcs[0];
    let mut marks = Vec::new();
    for (next, number) in (func.types.end()..).zip(float_arguments(func)) {
        let (arg, result) = (func.body.params[number], Value(next));
        func.types.insert(result, func.ty(arg).unwrap().clone());
        replace(&mut func.body, arg, result);
        let (op, blocks) = (Op::new(Recompute {}), Vec::new());
        marks.push(Node { op, args: vec![arg], results: vec![result], blocks, site: None, plan: None });
    }
    func.body.nodes.splice(0..0, marks);
    program
}

fn replace(block: &mut Block, old: Value, new: Value) {
    let values = block.nodes.iter_mut().flat_map(|node| &mut node.args).chain(&mut block.results);
    values.filter(|value| **value == old).for_each(|value| *value = new);
}

/// What is computed again is what was computed: the same bits, whatever is kept.
#[test]
fn random_programs_have_the_same_gradients_whatever_is_kept() {
    let (mut compared, mut again) = (0, 0);
    for seed in 0..300 {
        let Some(program) = grown::program(seed, 24) else { continue };
        let wanted = Wanted::by(float_arguments(&program.funcs[0]));
        let Ok(plain) = gradient(&program, "f", &wanted) else { continue };
        let inputs = grown::inputs(&program, seed);
        let text = print(&plain.program);
        let expected = run(&plain.program, "f", &inputs).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let none = Wanted { budget: Some(0), ..wanted.clone() };
        for (program, wanted) in [(&program, &none), (&marked(&program), &wanted)] {
            let made = gradient(program, "f", wanted).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            let text = print(&made.program);
            let got = run(&made.program, "f", &inputs);
            let got = got.unwrap_or_else(|error| panic!("seed {seed}: {error}\n{text}"));
            assert!(same(&got, &expected), "seed {seed}\n{text}");
            let simple = simplify(&made.program, PASSES, &mut PassCx::default()).unwrap();
            assert!(same(&run(&simple, "f", &inputs).unwrap(), &expected), "seed {seed}, simplified\n{text}");
            check_plans(&simple, &inputs, seed);
            compared += 1;
            again += usize::from(text.contains("again"));
        }
    }
    assert!(compared > 200 && again > 100, "{compared} gradients, {again} of them compute something again");
}

/// Whether results have the same bits.
fn same(a: &[Vec<Literal>], b: &[Vec<Literal>]) -> bool {
    let bytes =
        |all: &[Vec<Literal>]| -> Vec<Vec<u8>> { all.iter().flatten().map(|one| one.to_bytes()).collect() };
    bytes(a) == bytes(b)
}
