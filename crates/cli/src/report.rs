//! What a subcommand hands back: text for the standard output, notes for the standard error, an exit code.
//!
//! Subcommands print nothing themselves, so that a test can check a report, and one place handles a
//! closed pipe or a full disk.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use consort_comm::launch::Interrupted;
use consort_types::Failure;

/// Success.
pub(crate) const FINE: u8 = 0;
/// The program, the check or the arguments are wrong.
pub(crate) const WRONG: u8 = 1;
/// consort or the machine failed.
pub(crate) const MACHINE: u8 = 2;

/// The report of a subcommand.
#[derive(Debug)]
pub(crate) struct Report {
    /// For the standard output.
    pub(crate) text: String,
    /// For the standard error: complete lines.
    pub(crate) notes: String,
    /// The exit code.
    pub(crate) code: u8,
}

impl Report {
    /// A success.
    pub(crate) fn fine(text: String) -> Report {
        Report { text, notes: String::new(), code: FINE }
    }

    /// A success or, if something is wrong, the same text with exit code 1.
    pub(crate) fn checked(text: String, ok: bool) -> Report {
        Report { code: if ok { FINE } else { WRONG }, ..Report::fine(text) }
    }

    /// The report of an error.
    pub(crate) fn failed(error: &anyhow::Error) -> Report {
        let head = if error.is::<Rendered>() { "" } else { "error: " };
        let notes = format!("{head}{}\n", format!("{error:#}").trim_end());
        Report { text: String::new(), notes, code: exit_code(error) }
    }
}

/// The exit code of an error: errors that are neither a signal's nor marked as the machine's are the user's.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(interrupted) = error.downcast_ref::<Interrupted>() {
        return interrupted.code();
    }
    if error.is::<Machine>() { MACHINE } else { WRONG }
}

/// The failure of an argument or an input: what it is of, what was expected, and what there is.
pub(crate) fn wrong(
    of: impl Into<Cow<'static, str>>,
    expected: impl Into<String>,
    got: impl fmt::Display,
) -> Box<Failure> {
    Failure::new((expected, got.to_string())).of(of)
}

/// A failure of consort or of the machine, not of the user's input.
#[derive(Debug)]
pub(crate) struct Machine(pub(crate) String);

/// An error that is already in its full form, such as rendered diagnostics: no prefix is added.
#[derive(Debug)]
pub(crate) struct Rendered(pub(crate) String);

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Rendered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Machine {}
impl Error for Rendered {}

/// `1 error`, `2 errors`.
pub(crate) fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}
