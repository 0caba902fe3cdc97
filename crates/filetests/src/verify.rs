//! `test: verify`: every error is on its line as `; error: message (RULE)`, and there are no others. A parse
//! error is on its line with its column: `; error: 12: message`. With `notes` the suggested fix follows, after
//! `note:`.

use std::collections::BTreeMap;

use consort_ir::verify::verify;

use crate::Case;

const MARK: &str = "; error: ";
/// Separates several errors on one line.
const AND: &str = " && ";

pub(crate) fn run(case: &Case<'_>, options: &[&str]) -> Result<Option<String>, String> {
    let mut got: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    match case.parsed {
        Err(error) => {
            let text = format!("{}: {}{}", error.column, error.headline, note(error.note.as_ref(), options));
            got.insert(error.line, vec![text]);
        }
        Ok(parsed) => {
            for error in verify(&parsed.program) {
                let line = parsed.lines.line(error.at).unwrap_or(0);
                let text = error.message() + &note(error.failure.notes.first(), options);
                got.entry(line).or_default().push(text);
            }
        }
    }
    expect(case, got)
}

/// Checks that the errors, by line, are exactly those that the case states.
pub(crate) fn expect(case: &Case<'_>, mut got: BTreeMap<u32, Vec<String>>) -> Result<Option<String>, String> {
    if case.bless {
        return Ok(Some(blessed(case.text, &got)));
    }
    let mut wrong = Vec::new();
    for (number, line) in (1u32..).zip(case.text.lines()) {
        let expected: Vec<&str> = line.split_once(MARK).map_or(vec![], |(_, text)| text.split(AND).collect());
        let got = got.remove(&number).unwrap_or_default();
        if expected != got {
            wrong.push(format!("line {number}: expected {expected:?}\n          got {got:?}"));
        }
    }
    wrong.extend(got.into_iter().map(|(line, errors)| format!("line {line}: got {errors:?}")));
    if wrong.is_empty() { Ok(None) } else { Err(wrong.join("\n")) }
}

fn note(note: Option<&String>, options: &[&str]) -> String {
    match note {
        Some(note) if options == ["notes"] => format!(" note: {note}"),
        _ => String::new(),
    }
}

fn blessed(text: &str, got: &BTreeMap<u32, Vec<String>>) -> String {
    let lines = (1u32..).zip(text.lines()).map(|(number, line)| {
        let plain = line.split_once(MARK).map_or(line, |(plain, _)| plain).trim_end();
        match got.get(&number) {
            Some(errors) => format!("{plain} {MARK}{}\n", errors.join(AND)),
            None => format!("{plain}\n"),
        }
    });
    lines.collect()
}
