//! `test: hazards`: a plan verifies, and every hazard is on its line as `; error: message (RULE)`. If there are `;
//! run:` lines, the plan oracle runs the plan on all ranks, as if it had been made for each of them: a plan without
//! hazards gives the results under every timing, one with hazards fails under some.

use std::collections::BTreeMap;

use consort_ir::diagnostic::Position;
use consort_ir::mesh::Mesh;
use consort_ir::program::Func;
use consort_ir::text::run_lines;
use consort_ir::verify::{hazards, verify};
use consort_oracle::plan::{Timing, run as run_plans};
use consort_types::Rank;

use crate::Case;
use crate::verify::expect;

pub(crate) fn run(case: &Case<'_>, _options: &[&str]) -> Result<Option<String>, String> {
    let parsed = case.program()?;
    let program = &parsed.program;
    if let Some(error) = verify(program).first() {
        return Err(error.render("case", &case.text.lines().collect::<Vec<_>>(), &parsed.lines));
    }
    let mut got: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    let mut hazardous = Vec::new();
    for (number, func) in program.funcs.iter().enumerate() {
        for error in hazards(&program.mesh, func) {
            let at = if let Position::Node(_, node) = error.at {
                Position::Node(number, node)
            } else {
                Position::Func(number)
            };
            let line = parsed.lines.line(at).unwrap_or(0);
            hazardous.push(&func.name);
            got.entry(line).or_default().push(error.message());
        }
    }
    let mut wrong = Vec::new();
    for line in run_lines(case.text).map_err(|error| error.to_string())? {
        let func = program.func(&line.func).ok_or_else(|| format!("no function @{}", line.func))?;
        let plans = on_every_rank(&program.mesh, func);
        let inputs = line.inputs(program)?;
        let clean = !hazardous.contains(&&func.name);
        let timings = [Timing::Earliest, Timing::Latest].into_iter().chain((0..12).map(Timing::Mixed));
        let failed: Vec<String> = timings
            .filter_map(|timing| {
                let outcome = run_plans(&program.mesh, &plans, &inputs, timing);
                line.check(program, &outcome).err().map(|error| format!("{timing:?}: {error}"))
            })
            .collect();
        match failed.first() {
            Some(error) if clean => wrong.push(format!("line {}: {error}", line.line)),
            None if !clean => wrong.push(format!("line {}: no timing shows the hazard", line.line)),
            _ => {}
        }
    }
    if !wrong.is_empty() {
        return Err(wrong.join("\n"));
    }
    expect(case, got)
}

/// The same plan for each rank.
fn on_every_rank(mesh: &Mesh, func: &Func) -> Vec<Func> {
    let of = |rank| {
        let mut func = func.clone();
        if let Some(head) = &mut func.plan {
            head.rank = Rank(rank);
        }
        func
    };
    (0..mesh.n_ranks()).map(of).collect()
}
