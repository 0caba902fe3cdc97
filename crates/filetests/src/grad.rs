//! `test: grad [ARGUMENT..]`: the gradient of the function by these arguments, or by all floats, is in comments below the
//! program, under `; after grad:`; or the error, if there is none. On the inputs of each `; run:` line it is compared
//! with differences of the loss, before and after all passes. Programs of f64 give exact enough differences.

use consort_ir::ops::OpTable;
use consort_ir::program::Program;
use consort_ir::text::{print, run_lines};
use consort_ir::verify::verify;
use consort_oracle::differences::check_gradient;
use consort_passes::{PASSES, PassCx, float_arguments, gradient, simplify};

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
    let wrt = arguments(program, options)?;
    let func = program.funcs.first().ok_or("no function")?;
    let got = match gradient(program, &func.name, &wrt) {
        Ok(gradient) => {
            check(case.text, program, &gradient, &wrt)?;
            comment(&print(&gradient))
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

/// The numbers of the arguments; without options, those of all floats.
fn arguments(program: &Program, options: &[&str]) -> Result<Vec<usize>, String> {
    if !options.is_empty() {
        let number = |word: &&str| word.parse().map_err(|_| format!("`{word}` is no number of an argument"));
        return options.iter().map(number).collect();
    }
    let func = program.funcs.first().ok_or("no function")?;
    Ok(float_arguments(func))
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
