//! The text of a program, from a file or from the standard input (`-`), and its
//! errors.

use std::path::Path;

use anyhow::anyhow;
use consort_ir::diagnostic::{Diagnostic, LineMap, Position};
use consort_ir::ops::OpTable;
use consort_ir::text::{Parsed, parse};
use consort_ir::verify::verify;
use serde_json::{Value, json};

use crate::files;
use crate::report::{count, wrong};

/// A program's text and its name.
#[derive(Debug)]
pub(crate) struct Source {
    /// The file's name as the user gave it.
    pub(crate) name: String,
    /// The text.
    pub(crate) text: String,
}

/// The outcome of parsing and verifying a text.
#[derive(Debug)]
pub(crate) struct Checked {
    /// The program, if the text follows the grammar.
    pub(crate) parsed: Option<Parsed>,
    /// All errors in it.
    pub(crate) errors: Vec<Diagnostic>,
}

impl Source {
    /// Reads a file, or the standard input where its name is `-`.
    pub(crate) fn read(file: &Path) -> anyhow::Result<Source> {
        let stdin = file.as_os_str() == "-";
        let name = if stdin { "<stdin>".to_string() } else { file.display().to_string() };
        let bytes =
            if stdin { files::read_stdin(files::MAX_TEXT)? } else { files::read(file, files::MAX_TEXT)? };
        let text = String::from_utf8(bytes).map_err(|error| {
            let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = 1 + good.iter().filter(|byte| **byte == b'\n').count();
            let bad = error.as_bytes()[good.len()];
            anyhow!(wrong(format!("{name}:{line}"), "UTF-8 text", format!("byte {bad:#04x}")))
        })?;
        Ok(Source { name, text })
    }

    /// Parses and verifies.
    pub(crate) fn check(&self) -> Checked {
        match parse(&self.text, &OpTable::built_in()) {
            Ok(parsed) => Checked { errors: verify(&parsed.program), parsed: Some(parsed) },
            Err(error) => Checked { parsed: None, errors: vec![error.into()] },
        }
    }

    /// Errors with the lines around them, and their number.
    pub(crate) fn render(&self, errors: &[Diagnostic], lines: &LineMap) -> String {
        let text: Vec<&str> = self.text.lines().collect();
        let mut out: String =
            errors.iter().map(|error| error.render(&self.name, &text, lines) + "\n").collect();
        out.push_str(&count(errors.len(), "error"));
        out.push('\n');
        out
    }
}

impl Checked {
    /// The lines of the program's parts in the text; empty if it was not parsed.
    pub(crate) fn lines(&self) -> LineMap {
        self.parsed.as_ref().map(|parsed| parsed.lines.clone()).unwrap_or_default()
    }
}

/// An error in the form of `--json`.
pub(crate) fn diagnostic_json(error: &Diagnostic, lines: &LineMap) -> Value {
    let failure = &error.failure;
    let column = if let Position::Text(_, column) = error.at { Some(column) } else { None };
    json!({
        "code": error.code.name(),
        "rule": (!failure.rule.is_empty()).then_some(failure.rule),
        "message": failure.message(),
        "line": lines.line(error.at),
        "column": column,
        "loc": failure.site.map(|site| site.to_string()),
        "note": failure.notes.first(),
    })
}
