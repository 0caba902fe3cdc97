//! Text to tokens. Comments run from `;` to the end of the line; one that reads `FILE:LINE` after other
//! text on its line is a source location and is kept.

use std::collections::BTreeMap;

use crate::diagnostic::{At, Code, Diagnostic};
use crate::program::Loc;

/// Where the text stops following the grammar, and what was expected there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1.
    pub column: u32,
    /// Expected before got.
    pub message: String,
    /// The way out, where there is one to name.
    pub note: Option<String>,
}

impl std::fmt::Display for ParseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.message)
    }
}

impl std::error::Error for ParseError {}

impl From<ParseError> for Diagnostic {
    fn from(error: ParseError) -> Diagnostic {
        Diagnostic {
            code: Code::Parse,
            rule: String::new(),
            message: error.message,
            at: At::Text(error.line, error.column),
            loc: None,
            note: error.note,
        }
    }
}

/// A word, a number or a punctuation mark.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token<'a> {
    pub(super) text: &'a str,
    pub(super) line: u32,
    pub(super) column: u32,
    /// Whether it follows the previous token with nothing between.
    pub(super) glued: bool,
}

/// The tokens of a text and the source locations by line.
pub(super) struct Tokens<'a> {
    pub(super) list: Vec<Token<'a>>,
    pub(super) locs: BTreeMap<u32, Loc>,
    /// Where the text ends, for errors about its end.
    pub(super) end: (u32, u32),
}

const MARKS: [&str; 5] = ["..=", "->", "==", "<=", ".."];
const SINGLE: &str = "()[]{}<>,:=+-*/%@#|~!";

/// Splits a text into tokens.
pub(super) fn tokens(text: &str) -> Result<Tokens<'_>, ParseError> {
    let mut list = Vec::with_capacity(text.len() / 4);
    let mut locs = BTreeMap::new();
    let mut end = (1, 1);
    for (number, line_text) in text.split('\n').enumerate() {
        let line = number as u32 + 1;
        let mut rest = line_text;
        let mut column = 1u32;
        let mut glued = false;
        let first = list.len();
        while let Some(c) = rest.chars().next() {
            if c == ';' {
                if list.len() > first
                    && let Some(loc) = Loc::parse(rest[1..].trim())
                {
                    locs.insert(line, loc);
                }
                break;
            }
            if c.is_whitespace() {
                rest = &rest[c.len_utf8()..];
                column += 1;
                glued = false;
                continue;
            }
            let length = token_length(rest).ok_or_else(|| ParseError {
                line,
                column,
                message: format!("unexpected character {c:?}"),
                note: None,
            })?;
            list.push(Token { text: &rest[..length], line, column, glued });
            rest = &rest[length..];
            column += length as u32;
            glued = true;
        }
        end = (line, column);
    }
    Ok(Tokens { list, locs, end })
}

/// The length of the token at the start of a text; tokens are ASCII.
fn token_length(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let run = |from: usize, f: fn(&u8) -> bool| from + bytes[from..].iter().take_while(|b| f(b)).count();
    let digit_at = |i: usize| bytes.get(i).is_some_and(u8::is_ascii_digit);
    if bytes[0].is_ascii_alphabetic() || bytes[0] == b'_' {
        return Some(run(0, |b| b.is_ascii_alphanumeric() || *b == b'_'));
    }
    if bytes[0].is_ascii_digit() {
        if text.starts_with("0x") {
            return Some(run(2, u8::is_ascii_hexdigit));
        }
        let mut end = run(0, u8::is_ascii_digit);
        if bytes.get(end) == Some(&b'.') && digit_at(end + 1) {
            end = run(end + 1, u8::is_ascii_digit);
        }
        if matches!(bytes.get(end), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            if digit_at(end + 1 + sign) {
                end = run(end + 1 + sign, u8::is_ascii_digit);
            }
        }
        return Some(end);
    }
    if let Some(mark) = MARKS.iter().find(|mark| text.starts_with(**mark)) {
        return Some(mark.len());
    }
    SINGLE.contains(bytes[0] as char).then_some(1)
}
