//! Plans keep what a plan promises: those of random programs and of every program in `filetests` have no hazards, and
//! give what the programs give on real bytes, whatever the timing.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use consort_ir::diagnostic::Diagnostic;
use consort_ir::generate;
use consort_ir::index::{Index, Sym};
use consort_ir::mesh::Rank;
use consort_ir::ops::{EvalCx, OpTable};
use consort_ir::oracle::{self, bind, plan::Timing};
use consort_ir::program::{Func, Program};
use consort_ir::tensor::Tensor;
use consort_ir::text::{parse, print, run_lines};
use consort_ir::verify::{hazards, verify};
use consort_passes::{At, PlanError, plan};

type Symbols = BTreeMap<Sym, i64>;

/// A plan, which has no hazards.
fn planned(
    program: &Program,
    func: &Func,
    rank: u32,
    symbols: &Symbols,
    donated: &[bool],
) -> Result<Func, PlanError> {
    let func = plan(&program.mesh, func, &At { rank: Rank(rank), symbols, donated })?;
    let program = Program { mesh: program.mesh.clone(), funcs: vec![func.clone()] };
    assert_eq!(verify(&program), [], "{}", print(&program));
    let mut found = hazards(&program.mesh, &func);
    found.retain(|error| !moves_at_once(error));
    assert!(found.is_empty(), "{found:#?}\n{}", print(&program));
    Ok(func)
}

/// Whether a block returns what lies where another of its results belongs. The executor moves them all at once; the
/// checker and the oracle know no such move, and there may be no other plan.
fn moves_at_once(error: &Diagnostic) -> bool {
    error.message.starts_with("return: copies to ")
}

/// What plans for all ranks give, which is the same whatever the timing.
fn run(
    program: &Program,
    func: &Func,
    inputs: &[Vec<Tensor>],
    donated: &[bool],
) -> Result<Vec<Vec<Tensor>>, String> {
    let symbols = bind(&program.mesh, func, inputs)?;
    let ranks = (0u32..).zip(&symbols);
    let plans: Vec<Func> =
        ranks.map(|(rank, sizes)| planned(program, func, rank, sizes, donated).unwrap()).collect();
    let timings = [Timing::Earliest, Timing::Latest, Timing::Mixed(1), Timing::Mixed(2)];
    let mut outcomes =
        timings.map(|timing| oracle::plan::run(&program.mesh, &plans, inputs, timing)).into_iter();
    let first = outcomes.next().unwrap();
    for other in outcomes {
        let same = match (&first, &other) {
            (Ok(a), Ok(b)) => a.iter().flatten().zip(b.iter().flatten()).all(|(a, b)| a.same(b)),
            (a, b) => a.is_err() == b.is_err(),
        };
        assert!(same, "{other:?}\n{}", print(&Program { mesh: program.mesh.clone(), funcs: plans }));
    }
    first
}

#[test]
fn sizes_without_a_value_or_beyond_memory_are_refused() {
    let text = "mesh ()\n\nfunc @f(v0: f32[s0]) -> f32[s0] {\n    return v0\n}\n";
    let program = parse(text, &OpTable::built_in()).unwrap().program;
    let error = planned(&program, &program.funcs[0], 0, &Symbols::new(), &[]).unwrap_err();
    let expected = "plan: @f: expected sizes that are known, got f32[s0]: s0: a symbol has no value\n  \
                    note: a plan is made for given values of the symbols; give each of them one";
    assert_eq!(error.to_string(), expected);
    let large = Symbols::from([(Sym::Backed(0), i64::MAX)]);
    let error = planned(&program, &program.funcs[0], 0, &large, &[]).unwrap_err();
    assert_eq!(error.to_string(), "plan: @f: f32[s0] does not fit in 64 bits of memory");
}

/// How many random programs are tried; `CONSORT_PROGRAMS` asks for more.
fn n_programs() -> u64 {
    std::env::var("CONSORT_PROGRAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(200)
}

#[test]
fn random_programs() {
    for seed in 0..n_programs() {
        let program = generate::program(seed, 8 + seed as usize % 24);
        let inputs = generate::inputs(&program, seed);
        let expected = oracle::run(&program, "f", &inputs).unwrap();
        for donated in [&[][..], &[true; 8], &[true, false, true]] {
            let got = run(&program, &program.funcs[0], &inputs, donated).unwrap();
            let same = expected.iter().flatten().zip(got.iter().flatten()).all(|(a, b)| a.same(b));
            assert!(same, "seed {seed}: other results\n{}", print(&program));
        }
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

/// One size for all symbols that the function may be called with.
fn size_for(program: &Program, func: &Func, rank: u32) -> Option<i64> {
    let fits = |size: i64| {
        let none = BTreeMap::new();
        let cx = EvalCx { mesh: &program.mesh, rank: Rank(rank), symbols: &none };
        let env =
            |sym| if matches!(sym, Sym::Backed(_)) { Some(size) } else { cx.index(&Index::sym(sym)).ok() };
        let inside =
            func.symbols.iter().filter(|(sym, _)| matches!(sym, Sym::Backed(_))).all(|(_, facts)| {
                (facts.min..=facts.max.unwrap_or(i64::MAX)).contains(&size) && size % facts.multiple_of == 0
            });
        inside && func.guards.iter().all(|guard| guard.holds(&env).unwrap_or(true))
    };
    [8, 12, 6, 4, 3, 2, 1, 0].into_iter().find(|size| fits(*size))
}

#[test]
fn programs_of_the_filetests() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../filetests"));
    let (mut plans, mut runs) = (0, 0);
    for path in files(folder) {
        let text = std::fs::read_to_string(&path).unwrap();
        let Ok(parsed) = parse(&text, &OpTable::built_in()) else { continue };
        let program = parsed.program;
        if program.funcs.iter().any(|func| func.plan.is_some()) || !verify(&program).is_empty() {
            continue;
        }
        for func in &program.funcs {
            for rank in 0..program.mesh.n_ranks().min(8) {
                let Some(size) = size_for(&program, func, rank) else { continue };
                let symbols = (0..8).map(|i| (Sym::Backed(i), size)).collect();
                for donated in [&[][..], &[true; 16]] {
                    planned(&program, func, rank, &symbols, donated).unwrap();
                    plans += 1;
                }
            }
        }
        for line in run_lines(&text).unwrap() {
            let (func, inputs) = (program.func(&line.func).unwrap(), line.inputs(&program).unwrap());
            // Of what fails, the oracle of programs knows more.
            if text.lines().nth(line.line as usize - 1).is_some_and(|line| line.contains("fails:")) {
                continue;
            }
            let symbols = bind(&program.mesh, func, &inputs).unwrap();
            let first = planned(&program, func, 0, &symbols[0], &[]).unwrap();
            if hazards(&program.mesh, &first).iter().any(moves_at_once) {
                continue;
            }
            for donated in [&[][..], &[true; 16]] {
                let outcome = run(&program, func, &inputs, donated);
                let checked = line.check(&program, &outcome);
                assert_eq!(checked, Ok(()), "{}, line {}", path.display(), line.line);
                runs += 1;
            }
        }
    }
    assert!(plans > 1000 && runs > 1000, "{plans}, {runs}");
}
