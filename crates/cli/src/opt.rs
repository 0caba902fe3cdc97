//! `consort opt FILE`: reads a program, checks it, and prints it in its canonical form.

use std::path::PathBuf;

use consort_ir::text::print;
use serde_json::{Value, json};

use crate::report::{MACHINE, Rendered, Report, exit_code};
use crate::source::{Source, diagnostic_json};

/// Check a text program and print it in its canonical form
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Comments are no part of a program and are left out, but for the source lines of nodes."
)]
pub(crate) struct Args {
    /// The program, or - for the standard input
    file: PathBuf,
    /// Print one JSON object: {"ok", "text", "errors"}
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    let source = match Source::read(&args.file) {
        // Who reads JSON gets JSON as long as anything can be said at all.
        Err(error) if args.json && exit_code(&error) != MACHINE => {
            return Ok(json_report(None, &[unread(&error)]));
        }
        other => other?,
    };
    if args.json { Ok(checked_json(&source)) } else { checked_text(&source) }
}

fn checked_text(source: &Source) -> anyhow::Result<Report> {
    let checked = source.check();
    match &checked.parsed {
        Some(parsed) if checked.errors.is_empty() => Ok(Report::fine(print(&parsed.program))),
        _ => Err(Rendered(source.render(&checked.errors, &checked.lines())).into()),
    }
}

fn checked_json(source: &Source) -> Report {
    let checked = source.check();
    let lines = checked.lines();
    let errors: Vec<Value> = checked.errors.iter().map(|error| diagnostic_json(error, &lines)).collect();
    json_report(checked.parsed.map(|parsed| print(&parsed.program)), &errors)
}

fn json_report(text: Option<String>, errors: &[Value]) -> Report {
    let ok = errors.is_empty();
    Report::checked(format!("{}\n", json!({ "ok": ok, "text": text, "errors": errors })), ok)
}

/// A file that cannot be read, in the form of the other errors.
fn unread(error: &anyhow::Error) -> Value {
    let message = format!("{error:#}");
    let none = Value::Null;
    json!({ "code": "input", "rule": none, "message": message, "line": none, "column": none, "loc": none, "note": none })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source { name: "p.csr".into(), text: text.into() }
    }

    #[test]
    fn a_wrong_program_is_printed_beside_its_errors_in_json() {
        let text = "mesh ()\n\nfunc @f(v0: f32[2]) -> f32[3] {\n    return v0\n}\n";
        let report = checked_json(&source(text));
        let got: Value = serde_json::from_str(&report.text).unwrap();
        assert_eq!((report.code, &got["ok"], &got["text"]), (1, &json!(false), &json!(text)));
        assert_eq!(got["errors"][0]["line"], json!(4));
        assert_eq!(got["errors"][0]["column"], Value::Null);
        assert!(checked_text(&source(text)).is_err());
    }
}
