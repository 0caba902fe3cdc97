//! `test: oracle`: the program verifies, and the oracle gives the results in the `; run:` lines. With `unverified` the
//! program may break V9, so that a run shows what the rule prevents.

use consort_ir::literal::Literal;
use consort_ir::program::Program;
use consort_ir::text::{RunLine, run_lines};
use consort_ir::types::Type;
use consort_ir::verify::verify;

use crate::Case;

pub(crate) fn run(case: &Case<'_>, options: &[&str]) -> Result<Option<String>, String> {
    let parsed = case.program()?;
    let errors = verify(&parsed.program);
    if let Some(error) =
        errors.iter().find(|error| !(options == ["unverified"] && error.failure.rule == "V9"))
    {
        return Err(error.render("case", &case.text.lines().collect::<Vec<_>>(), &parsed.lines));
    }
    check_runs(case.text, &parsed.program).map(|()| None)
}

/// Checks a program against the run lines of a text.
pub(crate) fn check_runs(text: &str, program: &Program) -> Result<(), String> {
    let lines = run_lines(text).map_err(|error| error.to_string())?;
    if lines.is_empty() {
        return Err("no `; run:` line".to_string());
    }
    let mut wrong = Vec::new();
    for line in lines {
        let outcome = line.inputs(program).and_then(|inputs| {
            consort_oracle::run(program, &line.func, &inputs).map_err(|error| error.to_string())
        });
        let checked = line.check(program, &outcome).and_then(|()| placements(program, &line, &outcome));
        if let Err(error) = checked {
            wrong.push(format!("line {}: {error}", line.line));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

/// Checks that results are equal between ranks wherever their types say so.
fn placements(
    program: &Program,
    line: &RunLine,
    outcome: &Result<Vec<Vec<Literal>>, String>,
) -> Result<(), String> {
    let (Ok(results), Some(func)) = (outcome, program.func(&line.func)) else { return Ok(()) };
    let types = func.results.iter().flat_map(|ty| match ty {
        Type::Pending(tensors) => tensors.iter().cloned().map(Type::Tensor).collect(),
        other => vec![other.clone()],
    });
    for (i, ty) in types.enumerate() {
        let values: Vec<&Literal> = results.iter().map(|results| &results[i]).collect();
        consort_oracle::check_placement(&program.mesh, &ty, &values)
            .map_err(|error| format!("result {i}: {error}"))?;
    }
    Ok(())
}
