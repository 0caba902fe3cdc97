//! `consort opt FILE`: reads a program, checks it, and prints it in its canonical form, after passes if they are
//! asked for.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use consort_ir::program::Program;
use consort_ir::text::print;
use consort_passes::{
    PASSES, Pass, PassCx, PassError, Stage, Wanted, float_arguments, gradient, pass, simplify,
};
use consort_types::Dtype;
use serde_json::{Value, json};

use crate::files;
use crate::report::{MACHINE, Machine, Rendered, Report, exit_code, wrong};
use crate::source::{Source, diagnostic_json};

const EXAMPLES: &str = "\
Comments are not part of a program and are dropped, except the source lines of nodes.

Examples:
  consort opt tp.csr                            check a program and print it
  consort opt tp.csr --passes                   print it simplified by all passes
  consort opt tp.csr --pass fold                print it after one pass
  consort opt tp.csr --passes --dump stages     write stages/00-input.csr, stages/01-fold.csr, ..
  consort opt tp.csr --passes --fuel 17         stop after 17 rewrites, to bisect a wrong one
  consort opt loss.csr --grad                   print it with the gradient of its first result
  consort opt loss.csr --grad=0,2               by arguments 0 and 2 alone
  consort opt loss.csr --grad --sums f32        sums of 16-bit gradients over ranks are in f32
  consort opt loss.csr --grad --budget 4096     keep at most 4096 bytes for the backward";

/// Check a text program and print it in its canonical form, or after passes
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The program, or - for the standard input
    #[arg(required_unless_present = "list")]
    file: Option<PathBuf>,
    /// Run all passes until a fixed point
    #[arg(long)]
    passes: bool,
    /// Run this pass only
    #[arg(long, value_name = "NAME", conflicts_with = "passes")]
    pass: Option<String>,
    /// Write the program as read, and after each pass that changed it, to a folder
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Overwrite existing dumps
    #[arg(long, requires = "dump")]
    force: bool,
    /// Stop after N rewrites
    #[arg(long, value_name = "N")]
    fuel: Option<u64>,
    /// Add the gradient of the first result, by all floats or by these
    #[arg(long, value_name = "ARG,..", num_args = 0..=1, require_equals = true, value_delimiter = ',')]
    grad: Option<Vec<usize>>,
    /// Sum the gradient over ranks in this element type, where its own is smaller
    #[arg(long, value_name = "TYPE", requires = "grad")]
    sums: Option<String>,
    /// Keep at most this much for the backward, if that is possible
    #[arg(long, value_name = "BYTES", requires = "grad")]
    budget: Option<u64>,
    /// List the passes
    #[arg(long, conflicts_with_all = ["file", "passes", "pass", "dump", "fuel", "grad"])]
    list: bool,
    /// Print one JSON object: {"ok", "text", "errors"}, and "passes" if any ran
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    let Some(file) = args.file.as_ref().filter(|_| !args.list) else { return Ok(list(args.json)) };
    let passes = chosen(args)?;
    let source = match Source::read(file) {
        // With --json even errors are printed as JSON, unless the machine failed.
        Err(error) if args.json && exit_code(&error) != MACHINE => {
            return Ok(json_report(None, None, &[unusable(&error)]));
        }
        other => other?,
    };
    let checked = source.check();
    let lines = checked.lines();
    let program = match checked.parsed {
        Some(parsed) if checked.errors.is_empty() => parsed.program,
        parsed if args.json => {
            let errors: Vec<Value> =
                checked.errors.iter().map(|error| diagnostic_json(error, &lines)).collect();
            return Ok(json_report(parsed.map(|parsed| print(&parsed.program)), None, &errors));
        }
        _ => return Err(Rendered(source.render(&checked.errors, &lines)).into()),
    };
    let (program, notes) = match differentiated(program, args) {
        Err(error) if args.json => return Ok(json_report(None, None, &[unusable(&error)])),
        other => other?,
    };
    let shown = |program: &Program| print(program) + &notes;
    let Some(passes) = passes else {
        let text = shown(&program);
        return Ok(if args.json { json_report(Some(text), None, &[]) } else { Report::fine(text) });
    };
    let mut ran = Vec::new();
    match simplified(&program, passes, args, &mut ran) {
        Ok(program) if args.json => Ok(json_report(Some(shown(&program)), Some(&ran), &[])),
        Ok(program) => Ok(Report::fine(shown(&program))),
        Err(error) if args.json && exit_code(&error) != MACHINE => {
            Ok(json_report(Some(shown(&program)), Some(&ran), &[unusable(&error)]))
        }
        Err(error) => Err(error),
    }
}

/// The first function with its gradient, if that was asked for, and comments on it: where it is summed over ranks, what a
/// budget keeps, and warnings.
fn differentiated(program: Program, args: &Args) -> anyhow::Result<(Program, String)> {
    let (Some(grad), Some(func)) = (&args.grad, program.funcs.first()) else {
        return Ok((program, String::new()));
    };
    let sums = match &args.sums {
        None => None,
        Some(name) => Some(
            Dtype::from_name(name)
                .filter(|dtype| dtype.is_float())
                .ok_or_else(|| anyhow!(wrong("--sums", "an element type of floats", format!("`{name}`"))))?,
        ),
    };
    let by = if grad.is_empty() { float_arguments(func) } else { grad.clone() };
    let wanted = Wanted { sums, budget: args.budget, ..Wanted::by(by) };
    let made = gradient(&program, &func.name, &wanted).map_err(|failure| anyhow!(failure))?;
    let sums = made.sums.iter().map(|one| format!("gradient by {}", one.display(&program.mesh)));
    let kept = made.kept.map(|kept| format!("{kept} bytes are kept for the backward"));
    let warnings = made.warnings.iter().map(|warning| format!("warning: {warning}"));
    let lines: Vec<String> = sums.chain(kept).chain(warnings).collect();
    let comments = lines
        .iter()
        .flat_map(|line| line.lines())
        .fold(String::from("\n"), |text, line| text + "; " + line + "\n");
    Ok((made.program, comments))
}

/// The passes selected by the arguments.
fn chosen(args: &Args) -> anyhow::Result<Option<&'static [Pass]>> {
    match &args.pass {
        Some(name) => {
            let pass = pass(name)
                .ok_or_else(|| anyhow!("no pass `{name}`\n  note: `consort opt --list` lists them"))?;
            Ok(Some(std::slice::from_ref(pass)))
        }
        None if args.passes => Ok(Some(PASSES)),
        None => {
            let option = if args.dump.is_some() { "--dump" } else { "--fuel" };
            if args.dump.is_some() || args.fuel.is_some() {
                let failure = wrong(option, "passes to run", "none");
                return Err(anyhow!(failure.note("--passes runs all, --pass NAME runs one")));
            }
            Ok(None)
        }
    }
}

/// The program after passes; `ran` gets the report of each.
fn simplified(
    program: &Program,
    passes: &'static [Pass],
    args: &Args,
    ran: &mut Vec<Value>,
) -> anyhow::Result<Program> {
    let mut dumped = Vec::new();
    if args.dump.is_some() {
        dumped.push(("input", print(program)));
    }
    let mut watch = |stage: Stage<'_>| {
        let Stage::Pass(stage) = stage else { return };
        ran.push(json!({ "name": stage.pass.name, "rewrites": stage.rewrites }));
        if args.dump.is_some() && stage.rewrites > 0 {
            dumped.push((stage.pass.name, print(stage.program)));
        }
    };
    let mut cx = PassCx::watched(&mut watch);
    cx.fuel = args.fuel.unwrap_or(u64::MAX);
    let result = simplify(program, passes, &mut cx);
    // Before the error, because one wants to see a program that a pass has broken.
    if let Some(folder) = &args.dump {
        dump(folder, &dumped, args.force)?;
    }
    result.map_err(|error| match error {
        PassError::Planned { .. } | PassError::UserOp(_) => anyhow!(error),
        PassError::Broken { .. } => Machine(error.to_string()).into(),
    })
}

fn dump(folder: &Path, stages: &[(&str, String)], force: bool) -> anyhow::Result<()> {
    files::create_folder(folder)?;
    for (number, (name, text)) in stages.iter().enumerate() {
        files::write(&folder.join(format!("{number:02}-{name}.csr")), text.as_bytes(), force)?;
    }
    Ok(())
}

/// The names of the passes and what they do.
fn list(as_json: bool) -> Report {
    if as_json {
        let rows: Value = PASSES.iter().map(|pass| json!({ "name": pass.name, "doc": pass.doc })).collect();
        return Report::fine(format!("{rows}\n"));
    }
    let width = PASSES.iter().map(|pass| pass.name.len()).max().unwrap_or(0);
    let mut out = String::new();
    for pass in PASSES {
        let _ = writeln!(out, "{:width$}  {}", pass.name, pass.doc);
    }
    Report::fine(out)
}

fn json_report(text: Option<String>, passes: Option<&[Value]>, errors: &[Value]) -> Report {
    let ok = errors.is_empty();
    let mut object = json!({ "ok": ok, "text": text, "errors": errors });
    if let Some(passes) = passes {
        object["passes"] = json!(passes);
    }
    Report::checked(format!("{object}\n"), ok)
}

/// An error about the arguments, not about a place in the program, in the form of the other errors.
fn unusable(error: &anyhow::Error) -> Value {
    let message = format!("{error:#}");
    let none = Value::Null;
    json!({ "code": "input", "rule": none, "message": message, "line": none, "column": none, "loc": none, "note": none })
}
