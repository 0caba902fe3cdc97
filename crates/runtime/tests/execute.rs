//! Plans on threads: every case under `filetests/` that runs, planned by the naive planner, against the oracle; and the
//! meaning of plan annotations.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "execute/calls.rs"]
mod calls;
#[path = "execute/late.rs"]
mod late;
#[path = "execute/ranks.rs"]
mod ranks;
#[path = "execute/releases.rs"]
mod releases;
#[path = "execute/words.rs"]
mod words;

use std::path::{Path, PathBuf};

use consort_ir::literal::Literal;
use consort_ir::ops::OpTable;
use consort_ir::program::{Func, Program};
use consort_ir::text::{Expect, parse, print, run_lines};
use consort_ir::tolerance;
use consort_ir::verify::verify;
use consort_oracle::{OracleError, naive, same_error};
use consort_types::Rank;
use ranks::run;

/// All cases that run, except those that show the oracle's own limits.
fn cases() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests");
    let read = |path: PathBuf| (path.display().to_string(), std::fs::read_to_string(&path).unwrap());
    let mut found: Vec<(String, String)> =
        consort_filetests::cases(&folder).unwrap().into_iter().map(read).collect();
    found.retain(|(name, text)| text.contains("; test: oracle\n") && !name.contains("filetests/oracle/"));
    found
}

/// Plans for all ranks, which must verify.
fn planned(program: &Program, func: &Func, inputs: &[Vec<Literal>], lazy: bool) -> Result<Vec<Func>, String> {
    let symbols = consort_oracle::bind(&program.mesh, func, inputs).map_err(|failure| failure.to_string())?;
    let mut plans = Vec::new();
    for (rank, symbols) in (0u32..).map(Rank).zip(&symbols) {
        let func = naive::plan(&program.mesh, func, rank, symbols, lazy);
        let plan = Program { mesh: program.mesh.clone(), funcs: vec![func.clone()] };
        if let Some(error) = verify(&plan).iter().find(|error| error.failure.rule != "V9") {
            return Err(format!("{}\n{}", error.headline(), print(&plan)));
        }
        plans.push(func);
    }
    Ok(plans)
}

/// Compares the results or errors of ranks with those of the oracle.
fn compare(
    func: &Func,
    expected: &Result<Vec<Vec<Literal>>, OracleError>,
    got: &[Result<Vec<Literal>, String>],
) -> Result<(), String> {
    let expected = match expected {
        Ok(expected) => expected,
        Err(error) => return same_error(error, got),
    };
    let tolerance = tolerance::of_func(func);
    for (rank, (expected, got)) in expected.iter().zip(got).enumerate() {
        let got = got.as_ref().map_err(|error| format!("rank {rank}: {error}"))?;
        let same = got.len() == expected.len()
            && expected.iter().zip(got).all(|(a, b)| Expect::close(a, b, tolerance));
        if !same {
            let text = |list: &[Literal]| list.iter().map(Literal::text).collect::<Vec<_>>().join(", ");
            return Err(format!("rank {rank}: expected {}, got {}", text(expected), text(got)));
        }
    }
    Ok(())
}

#[test]
fn every_case_gives_what_the_oracle_gives() {
    let (mut wrong, mut ran) = (Vec::new(), 0);
    for (name, text) in cases() {
        let program = parse(&text, &OpTable::built_in()).unwrap().program;
        for line in run_lines(&text).unwrap() {
            let func = program.func(&line.func).unwrap();
            let Ok(inputs) = line.inputs(&program) else { continue };
            let expected = consort_oracle::run(&program, &line.func, &inputs);
            let refused = matches!(expected, Err(OracleError::Input(_) | OracleError::Deadlock(_)));
            if func.plan.is_some() || refused {
                continue;
            }
            for lazy in [false, true] {
                ran += 1;
                let outcome = planned(&program, func, &inputs, lazy).and_then(|plans| {
                    compare(func, &expected, &run(&program.mesh, &plans, &inputs))?;
                    let got = late::run(&program.mesh, &plans, &inputs);
                    compare(func, &expected, &got).map_err(|error| format!("on a late device: {error}"))
                });
                if let Err(error) = outcome {
                    wrong.push(format!("{name}:{}: {error}", line.line));
                }
            }
        }
    }
    println!("{ran} runs");
    assert!(wrong.is_empty(), "{} wrong\n{}", wrong.len(), wrong.join("\n"));
    assert!(ran > 2000);
}
