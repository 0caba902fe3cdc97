//! `test: grad [ARGUMENT..] [sums=TYPE] [budget=BYTES]`: the gradient of the function by these arguments, or by all floats, is in comments
//! below the program, under `; after grad:`, with where it is summed and its warnings; or the error, if there is none. On the inputs of each `; run:` line it is compared
//! with differences of the loss, before and after all passes. Programs of f64 give exact enough differences.

use consort_ir::ops::OpTable;
use consort_ir::program::Program;
use consort_ir::text::{print, run_lines};
use consort_ir::verify::verify;
use consort_oracle::differences::check_gradient;
use consort_passes::{Gradient, PASSES, PassCx, Wanted, float_arguments, gradient, simplify};
use consort_types::Dtype;

use crate::opt::{comment, section};
use crate::print::check_reads_back;
use crate::{Case, oracle};

/// How far a gradient may be from differences, relative and at least absolute.
const TOLERANCE: f64 = 1e-6;

pub(crate) fn run(case: &Case<'_>, options: &[&str]) -> Result<Option<String>, String> {
    let parsed = case.program()?;
    if let Some(error) = verify(&parsed.program).first() {
        return Err(error.render("case", &case.text.lines().collect::<Vec<_>>(), &parsed.lines));
    }
    let program = &parsed.program;
    oracle::check_runs(case.text, program)?;
    let wanted = wanted(program, options)?;
    let func = program.funcs.first().ok_or("no function")?;
    let got = match gradient(program, &func.name, &wanted) {
        Ok(Gradient { program: made, sums, kept, warnings }) => {
            check(case.text, program, &made, &wanted.by)?;
            let sums = sums.iter().map(|one| format!("\n; {}", one.display(&program.mesh)));
            let warnings = warnings.iter().flat_map(|warning| {
                let text = format!("warning: {warning}");
                text.lines().map(|line| format!("\n; {line}")).collect::<Vec<_>>()
            });
            let kept = kept.map(|kept| format!("\n; {kept} bytes are kept for the backward"));
            comment(&print(&made)) + &sums.chain(kept).chain(warnings).collect::<String>()
        }
        Err(failure) => format!("error: {failure}").lines().map(|line| format!("\n; {line}")).collect(),
    };
    let head = format!("; after {}:", ["grad"].iter().chain(options).copied().collect::<Vec<_>>().join(" "));
    let (before, expected, after) = section(case.text, &head);
    if expected == got {
        return Ok(None);
    }
    if case.bless {
        let gap = if before.is_empty() || before.ends_with("\n\n") { "" } else { "\n" };
        return Ok(Some(format!("{before}{gap}{head}{got}\n{after}")));
    }
    Err(format!("expected\n{head}{expected}\ngot\n{head}{got}\nCONSORT_BLESS=1 rewrites it"))
}

/// The numbers of the arguments, without any those of all floats; `sums=TYPE` sets the element type of sums,
/// and `budget=BYTES` how much is kept.
fn wanted(program: &Program, options: &[&str]) -> Result<Wanted, String> {
    let mut wanted = Wanted::default();
    for word in options {
        if let Some(name) = word.strip_prefix("sums=") {
            wanted.sums = Some(Dtype::from_name(name).ok_or_else(|| format!("`{name}` is no element type"))?);
            continue;
        }
        if let Some(bytes) = word.strip_prefix("budget=") {
            wanted.budget = Some(bytes.parse().map_err(|_| format!("`{bytes}` is no number of bytes"))?);
            continue;
        }
        wanted.by.push(word.parse().map_err(|_| format!("`{word}` is no number of an argument"))?);
    }
    if wanted.by.is_empty() {
        wanted.by = float_arguments(program.funcs.first().ok_or("no function")?);
    }
    Ok(wanted)
}

fn check(text: &str, program: &Program, gradient: &Program, wrt: &[usize]) -> Result<(), String> {
    check_reads_back(gradient, &OpTable::built_in())?;
    let simple = simplify(gradient, PASSES, &mut PassCx::default()).map_err(|error| error.to_string())?;
    let func = &program.funcs[0].name;
    for line in run_lines(text).map_err(|error| error.to_string())?.iter().filter(|line| line.func == *func) {
        let inputs = line.inputs(program)?;
        for (gradient, when) in [(gradient, ""), (&simple, "after all passes, ")] {
            let compared = check_gradient(program, gradient, func, wrt, &inputs, TOLERANCE);
            let compared = compared
                .map_err(|error| format!("line {}: {when}{error}\n{}", line.line, print(gradient)))?;
            if compared == 0 {
                return Err(format!("line {}: no element could be compared", line.line));
            }
        }
    }
    Ok(())
}
