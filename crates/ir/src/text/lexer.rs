//! Text to tokens. Comments run from `;` to the end of the line; one that reads `FILE:LINE` after other
//! text on its line is a source location and is kept.

use crate::diagnostic::{Code, Diagnostic, Position};
use consort_types::{Failure, Headline, Site};

/// A syntax error: its position, and what was expected there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1.
    pub column: u32,
    /// What was expected and what there is, or what is wrong.
    pub headline: Headline,
    /// A suggested fix, if there is one.
    pub note: Option<String>,
}

impl std::fmt::Display for ParseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.headline)
    }
}

impl std::error::Error for ParseError {}

impl From<ParseError> for Diagnostic {
    fn from(error: ParseError) -> Diagnostic {
        let failure = Failure { notes: error.note.into_iter().collect(), ..*Failure::new(error.headline) };
        let at = Position::Text(error.line, error.column);
        Diagnostic { code: Code::Parse, at, failure: Box::new(failure) }
    }
}

/// A word, a number or a punctuation mark, by its position. Small, because a program has millions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    start: u32,
    end: u32,
    pub(super) line: u32,
}

/// The tokens of a text and the source locations by line.
pub(super) struct Tokens<'a> {
    text: &'a str,
    list: Vec<Token>,
    /// By rising line.
    sites: Vec<(u32, Site)>,
}

impl<'a> Tokens<'a> {
    pub(super) fn get(&self, at: usize) -> Option<Token> {
        self.list.get(at).copied()
    }

    /// The text of a token; empty past the end.
    pub(super) fn text(&self, at: usize) -> &'a str {
        self.list.get(at).map_or("", |token| &self.text[token.start as usize..token.end as usize])
    }

    /// Whether a token follows the one before it with nothing between.
    pub(super) fn glued(&self, at: usize) -> bool {
        at > 0 && self.list.get(at).is_some_and(|token| self.list[at - 1].end == token.start)
    }

    /// The line and the column of a token, or of the end of the text.
    pub(super) fn position(&self, at: usize) -> (u32, u32) {
        match self.list.get(at) {
            Some(token) => {
                let before = &self.text[..token.start as usize];
                let line = before.rfind('\n').map_or(0, |newline| newline + 1);
                (token.line, before[line..].chars().count() as u32 + 1)
            }
            None => self.after(at),
        }
    }

    /// The line and the column just after the token before this one.
    pub(super) fn after(&self, at: usize) -> (u32, u32) {
        match at.min(self.list.len()).checked_sub(1) {
            Some(before) => {
                let (line, column) = self.position(before);
                (line, column + self.text(before).chars().count() as u32)
            }
            None => (1, 1),
        }
    }

    /// The source location on a line.
    pub(super) fn site(&self, line: u32) -> Option<Site> {
        let at = self.sites.binary_search_by_key(&line, |(line, _)| *line).ok()?;
        Some(self.sites[at].1)
    }
}

const MARKS: [&str; 5] = ["..=", "->", "==", "<=", ".."];
const SINGLE: &str = "()[]{}<>,:=+-*/%@#|~!";

/// Splits a text into tokens.
pub(super) fn tokens(text: &str) -> Result<Tokens<'_>, ParseError> {
    let mut tokens = Tokens { text, list: Vec::with_capacity(text.len() / 8), sites: Vec::new() };
    if u32::try_from(text.len()).is_err() {
        return Err(ParseError {
            line: 1,
            column: 1,
            headline: "the text is longer than 4 GiB".into(),
            note: None,
        });
    }
    let mut line_start = 0;
    for (number, line_text) in text.split('\n').enumerate() {
        let line = number as u32 + 1;
        let first = tokens.list.len();
        let mut at = 0;
        while let Some(c) = line_text[at..].chars().next() {
            if c == ';' {
                if tokens.list.len() > first
                    && let Some(site) =
                        Site::parse(line_text[at + 1..].split(';').next().unwrap_or("").trim())
                {
                    tokens.sites.push((line, site));
                }
                break;
            }
            if c.is_whitespace() {
                at += c.len_utf8();
                continue;
            }
            let Some(length) = token_length(&line_text[at..]) else {
                let column = line_text[..at].chars().count() as u32 + 1;
                return Err(ParseError {
                    line,
                    column,
                    headline: format!("unexpected character {c:?}").into(),
                    note: None,
                });
            };
            let start = (line_start + at) as u32;
            tokens.list.push(Token { start, end: start + length as u32, line });
            at += length;
        }
        line_start += line_text.len() + 1;
    }
    Ok(tokens)
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
