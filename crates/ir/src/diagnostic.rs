//! Errors about a program: the message, the position in the text, the user's source line, and a suggested fix.

use std::fmt::Write;

use consort_types::Failure;

/// The kind of check that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Code {
    /// The text does not follow the grammar of `docs/ir.md`.
    Parse,
    /// An op's own numbered constraint (C1..) does not hold.
    Type,
    /// An invariant of the verifier (V1.., P1.. for plans) does not hold.
    Verify,
}

impl Code {
    /// The word in brackets after `error`.
    pub fn name(self) -> &'static str {
        match self {
            Code::Parse => "parse",
            Code::Type => "type",
            Code::Verify => "verify",
        }
    }
}

/// A position in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Position {
    /// A line and a column of the text, both from 1.
    Text(u32, u32),
    /// A function's first line.
    Func(usize),
    /// A node or a `return` of a function, counted in the order in which they are printed.
    Node(usize, usize),
}

/// One error in a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The kind of check.
    pub code: Code,
    /// The position.
    pub at: Position,
    /// The op, the rule, what was expected and got, and the user's source line.
    pub failure: Box<Failure>,
}

/// The lines of all functions, nodes and returns in a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineMap {
    /// For each function, its first line and the lines of its nodes and returns, in printing order.
    pub funcs: Vec<(u32, Vec<u32>)>,
}

impl LineMap {
    /// The line of a position.
    pub fn line(&self, at: Position) -> Option<u32> {
        match at {
            Position::Text(line, _) => Some(line),
            Position::Func(func) => self.funcs.get(func).map(|(line, _)| *line),
            Position::Node(func, node) => self.funcs.get(func)?.1.get(node).copied(),
        }
    }
}

impl Diagnostic {
    /// The op first, expected before got, the rule in brackets.
    pub fn message(&self) -> String {
        self.failure.title()
    }

    /// The first line of the error, without position and note.
    pub fn headline(&self) -> String {
        format!("error[{}]: {}", self.code.name(), self.message())
    }

    /// The error with the lines around it. `lines` refers to the lines of `text`; `file` is the name to print.
    pub fn render(&self, file: &str, text: &[&str], lines: &LineMap) -> String {
        let mut out = self.headline() + "\n";
        if let Some(line) = lines.line(self.at) {
            let column =
                if let Position::Text(_, column) = self.at { format!(":{column}") } else { String::new() };
            let from = self.failure.site.map_or_else(String::new, |site| format!("  (from {site})"));
            let _ = writeln!(out, "  --> {file}:{line}{column}{from}");
            let first = line.saturating_sub(3).max(1);
            for (number, shown) in
                text.iter().enumerate().skip(first as usize - 1).take((line - first) as usize + 3)
            {
                let here = number as u32 + 1 == line;
                let _ = writeln!(out, "{} {:4} | {}", if here { '>' } else { ' ' }, number + 1, clip(shown));
                if let (true, Position::Text(_, column)) = (here, self.at) {
                    let _ = writeln!(out, "       | {}^", " ".repeat(column.min(CLIP as u32) as usize - 1));
                }
            }
        }
        for note in &self.failure.notes {
            let _ = writeln!(out, "  note: {note}");
        }
        out
    }
}

const CLIP: usize = 160;

/// A line short enough for a terminal; the constants of a program may be very long.
fn clip(line: &str) -> String {
    if line.chars().count() <= CLIP {
        line.to_string()
    } else {
        line.chars().take(CLIP).chain(" ..".chars()).collect()
    }
}
