//! `consort exec FILE -n N`: runs a text program on the inputs of its `; run:` lines or on files, compiled and on a
//! process for each rank, or on the oracle.
//!
//! The verifier's errors are final, with one exception: communication under a condition that may differ (V9) is a
//! warning here. Such a program may complete, and where it does not, the oracle's verdict says which ranks wait
//! for what.

mod inputs;
mod limits;
mod rank;
mod ranks;
mod results;

pub(crate) use ranks::{EXEC, RankArgs, run_rank};

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::slice::Iter;
use std::time::Duration;

use anyhow::{anyhow, bail};
use consort_ir::diagnostic::Diagnostic;
use consort_ir::literal::Literal;
use consort_ir::program::{Block, Func, Program};
use consort_ir::text::{Expect, Parsed, RunLine, print, run_lines};
use consort_ir::tolerance;
use consort_oracle::OracleError;
use consort_types::Site;
use serde_json::{Value, json};

use crate::files;
use crate::report::{MACHINE, Rendered, Report, count, exit_code, wrong};
use crate::source::Source;
use results::Results;

const EXAMPLES: &str = "\
Without --input, every `; run:` line of the file is run and compared with its expected results.
With --input, the function is run on files; the results are printed, or written to --output.

Each rank is a process that plans the program and runs kernels. Kernels may round differently from
the definitions of ops, so floats are compared with the tolerance of the ops. --oracle evaluates the
definitions, slowly and in one process. If ranks fail, the oracle is run to find the cause.

A run that would exceed a limit is an error; if all sizes are known, before anything runs. Defaults
per rank: memory, its share of three quarters of the free memory and at most 32 GiB, for the plan
(see `consort explain`) and for arguments and results in transit (their bytes, plus 8 per element);
10^8 steps; 4*10^12 operations, counting arithmetic and bytes moved as `consort explain` does.
Defaults of the oracle: 8 GiB for all ranks; per rank 10^7 steps and 4*10^10 operations.

Examples:
  consort exec tp.csr -n 2                                     run the `; run:` lines of the file
  consort exec tp.csr -n 2 --oracle                            the same, by the ops' definitions
  consort exec tp.csr -n 2 --input x{rank}.npy                 x0.npy on rank 0, x1.npy on rank 1
  consort exec tp.csr -n 2 --input w.safetensors:up --input 8  a tensor of a file, and a size
  consort exec tp.csr -n 2 --input x.npy --output out          write out/result0.rank0.npy, ..";

/// Run a text program on all its ranks
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The program, or - for the standard input
    file: PathBuf,
    /// Number of ranks; must equal that of the program's mesh
    #[arg(short = 'n', value_name = "N", allow_negative_numbers = true)]
    ranks: u32,
    /// The function to run; required with --input if there are several
    #[arg(long, value_name = "NAME")]
    func: Option<String>,
    /// One per parameter: a file ({rank} is the rank), or an integer for a size
    #[arg(long, value_name = "PATTERN", allow_negative_numbers = true)]
    input: Vec<String>,
    /// Write the results to DIR/result{i}.rank{r}.npy
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Overwrite existing files in --output
    #[arg(long, requires = "output")]
    force: bool,
    /// Evaluate the definitions of the ops in this process: slow, for reference
    #[arg(long)]
    oracle: bool,
    /// Deadline of operations that wait for other ranks, in seconds
    #[arg(long, value_name = "SECS", default_value_t = 30.0, conflicts_with = "oracle")]
    timeout: f64,
    /// Print JSON: {"func", "ok", "ranks", "error"}; for run lines {"ok", "runs"}
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    limits: limits::LimitArgs,
}

impl Args {
    /// Bytes that the arguments of all ranks may have together.
    fn all_bytes(&self, program: &Program) -> u64 {
        let ranks = program.mesh.n_ranks();
        match self.oracle {
            true => self.limits.of_oracle().bytes,
            false => self.limits.of_ranks(ranks).bytes.saturating_mul(u64::from(ranks)),
        }
    }
}

/// One call and its outcome.
struct Call<'a> {
    func: &'a str,
    /// Its run line, if it has one.
    line: Option<&'a RunLine>,
    outcome: Result<Results, String>,
    /// Whether the outcome is as expected; otherwise the difference.
    verdict: Result<(), String>,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    match execute(args) {
        // With --json even errors are printed as JSON, unless the machine failed.
        Err(error) if args.json && exit_code(&error) != MACHINE => {
            let func = args.func.as_deref().map(|name| name.trim_start_matches('@'));
            let call = json!({ "func": func, "ok": false, "ranks": [], "error": format!("{error:#}") });
            Ok(Report::checked(format!("{call}\n"), false))
        }
        other => other,
    }
}

fn execute(args: &Args) -> anyhow::Result<Report> {
    let source = Source::read(&args.file)?;
    let checked = source.check();
    let lines = checked.lines();
    let (warnings, errors): (Vec<Diagnostic>, Vec<Diagnostic>) =
        checked.errors.into_iter().partition(|error| error.failure.rule == "V9");
    let Some(Parsed { mut program, .. }) = checked.parsed.filter(|_| errors.is_empty()) else {
        return Err(Rendered(source.render(&errors, &lines)).into());
    };
    for (func, (_, lines)) in program.funcs.iter_mut().zip(&lines.funcs) {
        locate(&mut func.body, &source.name, &mut lines.iter());
    }
    let ranks = program.mesh.n_ranks();
    if args.ranks != ranks {
        let mesh = mesh_text(&program);
        let got = format!("-n {}", args.ranks);
        bail!(wrong(source.name, format!("-n {ranks}, the ranks of {mesh}"), got));
    }
    let seconds = Duration::try_from_secs_f64(args.timeout);
    if !seconds.is_ok_and(|time| !time.is_zero() && time < Duration::from_secs(1 << 20)) {
        bail!(wrong("--timeout", "a number of seconds above 0", args.timeout));
    }
    // Checked before the inputs of all ranks are read.
    if ranks > consort_oracle::MAX_RANKS {
        bail!(wrong(source.name, format!("at most {} ranks", consort_oracle::MAX_RANKS), ranks));
    }
    let asked = args.func.as_deref().map(|name| chosen(&program, &source, name)).transpose()?;
    let only = asked.or(if let [only] = &program.funcs[..] { Some(only) } else { None });
    let run_lines =
        run_lines(&source.text).map_err(|error| Rendered(source.render(&[error.into()], &lines)))?;
    let run_lines: Vec<RunLine> =
        run_lines.into_iter().filter(|line| asked.is_none_or(|func| func.name == line.func)).collect();
    // A function without parameters needs no input to be run.
    let bare = only.is_some_and(|func| func.body.params.is_empty());
    let mut report = if args.input.is_empty() && !(bare && (run_lines.is_empty() || args.output.is_some())) {
        run_all(args, &source, &program, only, &run_lines)?
    } else {
        let Some(func) = only else {
            bail!(wrong(source.name, format!("--func with one of {}", func_names(&program)), "none"));
        };
        run_on_files(args, &program, func)?
    };
    let text: Vec<&str> = source.text.lines().collect();
    let warnings = warnings.iter().map(|warning| warning.render(&source.name, &text, &lines));
    let warnings: String = warnings.map(|text| text.replacen("error", "warning", 1)).collect();
    report.notes.insert_str(0, &warnings);
    Ok(report)
}

/// The function that `--func` names, with or without its `@`.
fn chosen<'a>(program: &'a Program, source: &Source, name: &str) -> anyhow::Result<&'a Func> {
    let name = name.strip_prefix('@').unwrap_or(name);
    program.func(name).ok_or_else(|| {
        anyhow!("{}: no function @{name}\n  note: it has {}", source.name, func_names(program))
    })
}

fn func_names(program: &Program) -> String {
    program.funcs.iter().map(|func| format!("@{}", func.name)).collect::<Vec<_>>().join(", ")
}

/// Gives nodes without a source line their line in the text, so that every error names one.
fn locate(block: &mut Block, file: &str, lines: &mut Iter<'_, u32>) {
    for node in &mut block.nodes {
        let line = lines.next();
        if node.site.is_none() {
            node.site = line.map(|line| Site::new(file, *line));
        }
        node.blocks.iter_mut().for_each(|inside| locate(inside, file, lines));
    }
    // The line of `return`.
    lines.next();
}

/// The mesh in the syntax of programs.
fn mesh_text(program: &Program) -> String {
    let axes: Vec<String> =
        program.mesh.axes().iter().map(|(name, size)| format!("{name}: {size}")).collect();
    format!("mesh ({})", axes.join(", "))
}

/// Runs all run lines and reports the outcome of each.
fn run_all(
    args: &Args,
    source: &Source,
    program: &Program,
    func: Option<&Func>,
    run_lines: &[RunLine],
) -> anyhow::Result<Report> {
    if run_lines.is_empty() {
        let of = args.func.as_ref().and(func).map_or(String::new(), |func| format!(" of @{}", func.name));
        let note = func.map_or("give --func, and --input for its parameters".to_string(), |func| {
            inputs::signature(program, func)
        });
        let expected = format!("a `; run:` line{of} or --input");
        bail!(wrong(source.name.clone(), expected, "neither").note(note));
    }
    if args.output.is_some() {
        bail!(wrong("--output", "--input", "none").note("the results of run lines are only printed"));
    }
    let by_name: BTreeMap<&str, &Func> =
        program.funcs.iter().rev().map(|func| (func.name.as_str(), func)).collect();
    let calls = run_lines.iter().map(|line| {
        let func = by_name.get(line.func.as_str()).map(|func| (*func).clone());
        run_line(args, &Program { mesh: program.mesh.clone(), funcs: func.into_iter().collect() }, line)
    });
    let calls = calls.collect::<anyhow::Result<Vec<Call<'_>>>>()?;
    let failed = calls.iter().filter(|call| call.verdict.is_err()).count();
    if args.json {
        let runs: Vec<Value> = calls.iter().map(|call| call_json(call, None)).collect();
        return Ok(Report::checked(format!("{}\n", json!({ "ok": failed == 0, "runs": runs })), failed == 0));
    }
    let mut report =
        Report::checked(calls.iter().map(|call| call_text(&source.name, call)).collect(), failed == 0);
    if failed > 0 {
        report.notes = format!("error: {failed} of {} failed\n", count(calls.len(), "run line"));
    }
    Ok(report)
}

/// Runs a run line on a program that contains only the function that it names, if there is one.
fn run_line<'a>(args: &Args, program: &Program, line: &'a RunLine) -> anyhow::Result<Call<'a>> {
    let outcome = match line.inputs_within(program, args.all_bytes(program)) {
        Ok(inputs) => run_func(args, program, &inputs)?,
        Err(error) => Err(error),
    };
    let mut expected = line.clone();
    if let (Expect::Results(_, tolerance), Some(func), false) =
        (&mut expected.expect, program.func(&line.func), args.oracle)
    {
        *tolerance = tolerance.max(tolerance::of_func(func));
    }
    let verdict = expected.check(program, &outcome);
    Ok(Call { func: &line.func, line: Some(line), outcome, verdict })
}

/// Runs the only function of a program: the results of all ranks, or the error.
fn run_func(
    args: &Args,
    program: &Program,
    inputs: &[Vec<Literal>],
) -> anyhow::Result<Result<Results, String>> {
    let Some(func) = program.funcs.first() else { bail!(wrong("exec", "a function", "none")) };
    if args.oracle {
        let outcome = consort_oracle::run_within(program, &func.name, inputs, &args.limits.of_oracle());
        return Ok(outcome.map_err(|error| limits::with_note(&error)));
    }
    let symbols = match consort_oracle::bind(&program.mesh, func, inputs) {
        Ok(symbols) => symbols,
        Err(error) => return Ok(Err(OracleError::Input(error).to_string())),
    };
    let timeout = Duration::from_secs_f64(args.timeout);
    let limits = args.limits.of_ranks(program.mesh.n_ranks());
    let outcome = ranks::run_on_processes(&print(program), &func.name, (inputs, &symbols), timeout, &limits)?;
    Ok(outcome.map_err(|failed| {
        // The oracle sees all ranks at once, so its errors say more, unless it exceeds its own limit.
        let asked = || consort_oracle::run(program, &func.name, inputs).err();
        let known = if failed.refused { None } else { asked() };
        known
            .filter(|error| !matches!(error, OracleError::Limit { .. }))
            .map_or(failed.text, |e| e.to_string())
    }))
}

/// The report of a call, as text.
fn call_text(file: &str, call: &Call<'_>) -> String {
    let mut out = call.line.map_or(String::new(), |line| format!("{file}:{}: ", line.line));
    let _ = match (&call.verdict, &call.outcome) {
        (Ok(()), Ok(results)) => write!(out, "@{}: ok\n{}", call.func, results::text(results)),
        (Ok(()), Err(error)) => write!(out, "@{}: ok, fails as expected\n{}", call.func, indented(error)),
        (Err(error), Ok(_)) if call.line.is_some_and(|line| matches!(line.expect, Expect::Results(..))) => {
            write!(out, "@{}: differs\n{}", call.func, indented(error))
        }
        (Err(error), _) => write!(out, "@{}: failed\n{}", call.func, indented(error)),
    };
    out
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

fn call_json(call: &Call<'_>, files: Option<&[Vec<PathBuf>]>) -> Value {
    let ranks = call.outcome.as_ref().map_or(json!([]), |results| results::to_json(results, files));
    let mut object = json!({ "func": call.func, "ok": call.verdict.is_ok(), "ranks": ranks });
    object["error"] = json!(call.verdict.as_ref().err());
    if let Some(line) = call.line {
        object["line"] = json!(line.line);
    }
    object
}

/// Runs a function on the files of `--input`.
fn run_on_files(args: &Args, program: &Program, func: &Func) -> anyhow::Result<Report> {
    let inputs = inputs::read(program, func, &args.input, args.all_bytes(program))?;
    let output = args.output.as_ref().map(|folder| (folder, results::paths(program, func, folder)));
    if let Some((_, paths)) = output.as_ref().filter(|_| !args.force) {
        // Checked before the run, which may take long.
        paths.iter().flatten().try_for_each(|path| files::require_free(path))?;
    }
    let alone = Program { mesh: program.mesh.clone(), funcs: vec![func.clone()] };
    let results = run_func(args, &alone, &inputs)?.map_err(Rendered)?;
    let (mut files, mut text, mut notes) = (None, None, String::new());
    if let Some((folder, paths)) = output {
        let (lines, of_writing) = results::write(&results, &paths, folder, args.force)?;
        (files, text, notes) = (Some(paths), Some(lines), of_writing);
    }
    let call = Call { func: &func.name, line: None, outcome: Ok(results), verdict: Ok(()) };
    let text = match text {
        _ if args.json => format!("{}\n", call_json(&call, files.as_deref())),
        Some(lines) => lines,
        None => call_text("", &call),
    };
    Ok(Report { notes, ..Report::fine(text) })
}
