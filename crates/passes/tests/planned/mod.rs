//! Plans of all ranks of a program, and checks of their results.
#![allow(dead_code, reason = "each test takes what it needs")]

use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::program::{Func, Program};
use consort_ir::text::print;
use consort_ir::verify::{hazards, verify};
use consort_oracle::bind;
use consort_oracle::plan::{Timing, run};
use consort_passes::{Binding, plan};
use consort_types::Rank;

/// A plan for each rank. `given` says for each rank and parameter whether it is donated.
pub(crate) fn plans(
    program: &Program,
    func: &Func,
    inputs: &[Vec<Literal>],
    given: impl Fn(u32, usize) -> bool,
) -> Vec<Func> {
    let symbols = bind(&program.mesh, func, inputs).unwrap();
    let plan = |(rank, symbols)| {
        let donated: Vec<bool> = (0..func.body.params.len()).map(|param| given(rank, param)).collect();
        plan(&program.mesh, func, &Binding { rank: Rank(rank), symbols, donated: &donated }).unwrap()
    };
    (0u32..).zip(&symbols).map(plan).collect()
}

/// A plan as text.
pub(crate) fn text(mesh: &Mesh, plan: &Func) -> String {
    print(&Program { mesh: mesh.clone(), funcs: vec![plan.clone()] })
}

/// The errors of a plan: from the verifier, or hazards.
pub(crate) fn refused(mesh: &Mesh, plan: &Func) -> Vec<String> {
    let mut errors = verify(&Program { mesh: mesh.clone(), funcs: vec![plan.clone()] });
    if errors.is_empty() {
        errors = hazards(mesh, plan);
    }
    errors.iter().map(|error| error.headline()).collect()
}

pub(crate) fn same(a: &[Vec<Literal>], b: &[Vec<Literal>]) -> bool {
    let all = |list: &[Vec<Literal>]| list.iter().map(Vec::len).collect::<Vec<_>>();
    all(a) == all(b) && a.iter().flatten().zip(b.iter().flatten()).all(|(a, b)| a.same(b))
}

/// Checks that the plans have no hazards and match the program's oracle under these timings.
pub(crate) fn check(
    program: &Program,
    func: &Func,
    plans: &[Func],
    inputs: &[Vec<Literal>],
    timings: &[Timing],
    what: &str,
) {
    for (rank, plan) in plans.iter().enumerate() {
        let errors = refused(&program.mesh, plan);
        assert!(errors.is_empty(), "{what}, rank {rank}: {errors:#?}\n{}", text(&program.mesh, plan));
    }
    let expected = consort_oracle::run(program, &func.name, inputs).unwrap();
    for timing in timings {
        let got = run(&program.mesh, plans, inputs, *timing).unwrap_or_else(|error| {
            panic!("{what}, {timing:?}: {error}\n{}", text(&program.mesh, &plans[0]))
        });
        if !same(&got, &expected) {
            let differs = |rank: &usize| !same(&got[*rank..=*rank], &expected[*rank..=*rank]);
            let rank = (0..plans.len()).find(differs).unwrap_or(0);
            let texts = |list: &[Literal]| list.iter().map(Literal::text).collect::<Vec<_>>();
            panic!(
                "{what}, {timing:?}, rank {rank}: expected\n{:#?}, got\n{:#?}\n{}",
                texts(&expected[rank]),
                texts(&got[rank]),
                text(&program.mesh, &plans[rank])
            );
        }
    }
}

/// A number from the environment.
pub(crate) fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// The seeds of random programs: `default` of them, or CONSORT_PROGRAMS, or only CONSORT_SEED.
pub(crate) fn seeds(default: u64) -> std::ops::Range<u64> {
    match setting("CONSORT_SEED", u64::MAX) {
        u64::MAX => 0..setting("CONSORT_PROGRAMS", default),
        seed => seed..seed + 1,
    }
}
