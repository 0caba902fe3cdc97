//! Plans keep what a plan promises: of random programs and of every program in `filetests`, byte by byte.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod follow;

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};

use consort_ir::generate;
use consort_ir::index::{Index, Sym};
use consort_ir::mesh::Rank;
use consort_ir::ops::{EvalCx, OpTable};
use consort_ir::program::{Func, Program};
use consort_ir::text::{parse, print};
use consort_ir::verify::verify;
use consort_passes::{At, PlanError, PlanReport, plan, report};

fn planned(
    program: &Program,
    func: &Func,
    rank: u32,
    sizes: &[i64],
    given: &[bool],
) -> Result<Program, PlanError> {
    let symbols: BTreeMap<Sym, i64> = (0u32..).zip(sizes).map(|(i, size)| (Sym::Backed(i), *size)).collect();
    let func = plan(&program.mesh, func, &At { rank: Rank(rank), symbols: &symbols, donated: given })?;
    Ok(Program { mesh: program.mesh.clone(), funcs: vec![func] })
}

/// A plan verifies, and every line finds what it reads; `what` is named where not.
fn check(plan: &Program, what: &str) {
    assert_eq!(verify(plan), [], "{what}\n{}", print(plan));
    let regions = &plan.funcs[0].plan.as_ref().unwrap().regions;
    if regions.iter().any(|(_, size)| *size > 1 << 20) {
        return;
    }
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| follow::follow(plan)));
    assert!(result.is_ok(), "{what}\n{}", print(plan));
}

#[test]
fn sizes_without_a_value_or_beyond_memory_are_refused() {
    let text = "mesh ()\n\nfunc @f(v0: f32[s0]) -> f32[s0] {\n    return v0\n}\n";
    let program = parse(text, &OpTable::built_in()).unwrap().program;
    let error = planned(&program, &program.funcs[0], 0, &[], &[]).unwrap_err();
    let expected = "plan: @f: expected sizes that are known, got f32[s0]: s0: a symbol has no value\n  \
                    note: a plan is made for given values of the symbols; give each of them one";
    assert_eq!(error.to_string(), expected);
    let error = planned(&program, &program.funcs[0], 0, &[i64::MAX], &[]).unwrap_err();
    assert_eq!(error.to_string(), "plan: @f: f32[s0] does not fit in 64 bits of memory");
}

#[test]
fn random_programs() {
    let seeds = std::env::var("CONSORT_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    for seed in 0..seeds {
        let program = generate::program(seed, 8 + seed as usize % 24);
        for rank in 0..program.mesh.n_ranks() {
            for given in [&[][..], &[true; 8], &[true, false, true]] {
                let plan = planned(&program, &program.funcs[0], rank, &[4, 3], given).unwrap();
                check(&plan, &format!("seed {seed}, rank {rank}"));
            }
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
    let (mut plans, mut costs) = (0, Vec::new());
    for path in files(folder) {
        let name = path.strip_prefix(folder).unwrap().display().to_string();
        let Ok(parsed) = parse(&std::fs::read_to_string(&path).unwrap(), &OpTable::built_in()) else {
            continue;
        };
        let program = parsed.program;
        if program.funcs.iter().any(|func| func.plan.is_some()) || !verify(&program).is_empty() {
            continue;
        }
        for func in &program.funcs {
            for rank in 0..program.mesh.n_ranks().min(8) {
                let Some(size) = size_for(&program, func, rank) else { continue };
                for given in [&[][..], &[true; 16]] {
                    let plan = planned(&program, func, rank, &[size; 8], given).unwrap();
                    check(&plan, &format!("{name}, rank {rank}"));
                    if rank == 0 {
                        costs.push((name.clone(), func.name.clone(), report(&plan.mesh, &plan.funcs[0])));
                    }
                    plans += 1;
                }
            }
        }
    }
    assert!(plans > 1000, "{plans}");
    if std::env::var_os("CONSORT_COSTS").is_some() {
        for (name, func, report) in costs {
            let PlanReport { peak_bytes, live_bytes, copied_bytes, .. } = report;
            println!("{name} @{func}: takes {peak_bytes}, needs {live_bytes}, copies {copied_bytes}");
        }
    }
}
