//! Runs text programs that contain their own expectations.
//!
//! A case is a file `filetests/TOPIC/claim-as-name.csr`. Its comments name the commands to run
//! (`; test: verify`), and hold what is expected: `; error: ..` on the line that is wrong, `; run: ..` lines
//! for results. Every case that parses is also printed and read back. `CONSORT_BLESS=1` rewrites what a
//! command can rewrite; results of runs are never rewritten, because a person must have computed them.
//!
//! A command is one file and one line in [`COMMANDS`].
#![forbid(unsafe_code)]

mod bless;
pub mod fuzz;
mod grad;
mod hazards;
mod opt;
mod oracle;
mod plan;
mod print;
mod verify;

use std::path::{Path, PathBuf};

use consort_ir::ops::OpTable;
use consort_ir::text::{ParseError, Parsed, directives, parse};

pub use bless::{blessing, check_file};

/// Runs a command on a case: the error states what was expected; a returned text is the blessed file.
pub type Command = fn(&Case<'_>, &[&str]) -> Result<Option<String>, String>;

/// The commands, by the name that `; test:` lines use.
pub const COMMANDS: &[(&str, Command)] = &[
    ("verify", verify::run),
    ("print", print::run),
    ("oracle", oracle::run),
    ("opt", opt::run),
    ("grad", grad::run),
    ("plan", plan::run),
    ("hazards", hazards::run),
];

/// A case as its commands see it.
pub struct Case<'a> {
    /// The whole file.
    pub text: &'a str,
    /// The program, or the parse error.
    pub parsed: &'a Result<Parsed, ParseError>,
    /// Whether expectations are to be rewritten.
    pub bless: bool,
}

impl Case<'_> {
    /// The program; an error if it did not parse.
    pub fn program(&self) -> Result<&Parsed, String> {
        self.parsed.as_ref().map_err(|error| error.to_string())
    }
}

/// Runs the commands of one case. A returned text is the blessed file.
pub fn run_case(text: &str, ops: &OpTable, bless: bool) -> Result<Option<String>, String> {
    let tests = directives(text, "test");
    if tests.is_empty() {
        return Err("no `; test:` line says what to do".to_string());
    }
    let mut text = text.to_string();
    let original = text.clone();
    for (line, _, command) in tests {
        let words: Vec<&str> = command.split_whitespace().collect();
        let Some((_, run)) = COMMANDS.iter().find(|(name, _)| words.first() == Some(name)) else {
            let known: Vec<&str> = COMMANDS.iter().map(|(name, _)| *name).collect();
            return Err(format!("line {line}: unknown command `{command}`; known are {}", known.join(", ")));
        };
        let parsed = parse(&text, ops);
        if let Ok(parsed) = &parsed {
            print::check_reads_back(&parsed.program, ops)?;
        }
        let blessed = run(&Case { text: &text, parsed: &parsed, bless }, &words[1..])
            .map_err(|error| format!("test {command}: {error}"))?;
        if let Some(blessed) = blessed {
            text = blessed;
        }
    }
    Ok((text != original).then_some(text))
}

/// All cases below a folder, sorted.
pub fn cases(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "csr") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}
