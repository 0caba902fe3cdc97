//! Programs from text through the planner and the executor, on threads: every case under `filetests/` that runs,
//! against the oracle; and the copies that plans state, against those counted at run time.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[allow(dead_code, reason = "the command uses the rest")]
#[path = "../src/exec/rank.rs"]
mod rank;

use std::path::{Path, PathBuf};
use std::time::Duration;

use consort_comm::spawn_with_heap;
use consort_ir::literal::Literal;
use consort_ir::ops::{Flow, OpTable};
use consort_ir::program::{Block, Func, Program};
use consort_ir::text::{Expect, RunLine, parse, print, run_lines};
use consort_ir::verify::verify;
use consort_oracle::{OracleError, same_error};

/// All cases that run, except those that exceed the oracle's limits.
fn cases() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests");
    let read = |path: PathBuf| (path.display().to_string(), std::fs::read_to_string(&path).unwrap());
    let mut found: Vec<(String, String)> =
        consort_filetests::cases(&folder).unwrap().into_iter().map(read).collect();
    found.retain(|(name, text)| text.contains("; test: oracle\n") && !name.contains("filetests/oracle/"));
    found
}

fn loops(block: &Block) -> bool {
    block.nodes.iter().any(|node| node.op.flow() != Flow::Straight)
}

/// The failure of a rank, as text.
fn text(failure: rank::Failure) -> String {
    let op = failure.op.map_or(String::new(), |op| format!("{op}: "));
    format!("{op}{}", failure.message)
}

/// Runs a line three times on all its ranks; the last results, and an error where calls or counts differ.
fn run(
    program: &Program,
    line: &RunLine,
    inputs: &[Vec<Literal>],
    donated: bool,
) -> Vec<Result<Vec<Literal>, String>> {
    let func = program.func(&line.func).unwrap();
    spawn_with_heap(inputs.len(), 1 << 26, |all| {
        let symbols =
            consort_oracle::bind(&program.mesh, func, inputs).map_err(|failure| failure.to_string())?;
        let symbols = &symbols[all.rank()];
        let ready = rank::prepare(program, func, &all, symbols, donated, Duration::from_secs(20));
        let mut ready = ready.map_err(text)?;
        let plan = Program { mesh: program.mesh.clone(), funcs: vec![ready.plan.clone()] };
        if let Some(error) = verify(&plan).iter().find(|error| error.failure.rule != "V9") {
            return Err(format!("{}\n{}", error.headline(), print(&plan)));
        }
        let said = consort_passes::report(&plan.mesh, &plan.funcs[0]).copied_bytes;
        let mut last: Option<Vec<Literal>> = None;
        for call in 1..4 {
            let results = ready.run(&inputs[all.rank()]).map_err(text)?;
            if last.iter().any(|last| !last.iter().zip(&results).all(|(a, b)| a.same(b))) {
                return Err(format!("call {call} gives something else\n{}", print(&plan)));
            }
            let copied = ready.exec.copied_bytes();
            if copied != call * said && !loops(&func.body) {
                return Err(format!(
                    "{copied} bytes were copied in {call} calls, not {said} each\n{}",
                    print(&plan)
                ));
            }
            last = Some(results);
        }
        Ok(last.unwrap_or_default())
    })
}

/// Compares the results or errors of ranks with those of the oracle; kernels may round differently.
fn compare(
    func: &Func,
    expected: &Result<Vec<Vec<Literal>>, OracleError>,
    got: &[Result<Vec<Literal>, String>],
) -> Result<(), String> {
    let expected = match expected {
        Ok(expected) => expected,
        Err(error) => return same_error(error, got),
    };
    let tolerance = consort_ir::tolerance::of_func(func);
    for (rank, (expected, got)) in expected.iter().zip(got).enumerate() {
        let got = got.as_ref().map_err(|error| format!("rank {rank}: {error}"))?;
        if expected.len() != got.len() {
            return Err(format!("rank {rank}: expected {} results, got {}", expected.len(), got.len()));
        }
        let wrong = expected.iter().zip(got).find(|(a, b)| !Expect::close(a, b, tolerance));
        if let Some((a, b)) = wrong {
            return Err(format!("rank {rank}: expected {}, got {}", a.text(), b.text()));
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
            let Ok(inputs) = line.inputs(&program) else { continue };
            let expected = consort_oracle::run(&program, &line.func, &inputs);
            if matches!(expected, Err(OracleError::Input(_) | OracleError::Deadlock(_))) {
                continue;
            }
            for donated in [false, true] {
                ran += 1;
                let got = run(&program, &line, &inputs, donated);
                if let Err(error) = compare(program.func(&line.func).unwrap(), &expected, &got) {
                    wrong.push(format!("{name}:{}: {error}", line.line));
                }
            }
        }
    }
    println!("{ran} runs");
    assert!(wrong.is_empty(), "{} wrong\n{}", wrong.len(), wrong.join("\n"));
    assert!(ran > 2000);
}
