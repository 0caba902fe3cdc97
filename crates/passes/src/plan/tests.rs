//! Plans of small programs, as text, and of random ones, whose every byte is followed.

use consort_ir::generate;
use consort_ir::index::Sym;
use consort_ir::mesh::Rank;
use consort_ir::ops::OpTable;
use consort_ir::program::Program;
use consort_ir::text::{parse, print};
use consort_ir::verify::verify;

use super::*;

fn program(text: &str) -> Program {
    parse(text, &OpTable::built_in()).unwrap().program
}

/// The plan of a program's only function for a rank.
fn planned(
    program: &Program,
    rank: u32,
    symbols: &[(u32, i64)],
    donated: &[bool],
) -> Result<Program, PlanError> {
    let symbols = symbols.iter().map(|(sym, value)| (Sym::Backed(*sym), *value)).collect();
    let at = At { rank: Rank(rank), symbols: &symbols, donated };
    let func = plan(&program.mesh, &program.funcs[0], &at)?;
    Ok(Program { mesh: program.mesh.clone(), funcs: vec![func] })
}

#[test]
fn sizes_without_a_value_or_beyond_memory_are_refused() {
    let text = "mesh ()\n\nfunc @f(v0: f32[s0]) -> f32[s0] {\n    return v0\n}\n";
    let error = planned(&program(text), 0, &[], &[]).unwrap_err();
    let expected = "plan: @f: expected sizes that are known, got f32[s0]: s0: a symbol has no value\n  \
                    note: a plan is made for given values of the symbols; give each of them one";
    assert_eq!(error.to_string(), expected);
    let error = planned(&program(text), 0, &[(0, i64::MAX)], &[]).unwrap_err();
    assert_eq!(error.to_string(), "plan: @f: f32[s0] does not fit in 64 bits of memory");
}

#[test]
fn random_programs_have_plans_that_verify() {
    for seed in 0..300 {
        let program = generate::program(seed, 24);
        for rank in 0..program.mesh.n_ranks() {
            for donated in [&[][..], &[true; 8]] {
                let plan = planned(&program, rank, &[(0, 4), (1, 3)], donated).unwrap();
                assert_eq!(verify(&plan), [], "seed {seed}, rank {rank}\n{}", print(&plan));
            }
        }
    }
}
