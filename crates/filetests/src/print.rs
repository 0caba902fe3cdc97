//! `test: print`: the file contains the program exactly as the printer writes it.

use consort_ir::ops::OpTable;
use consort_ir::program::Program;
use consort_ir::text::{parse, print};

use crate::Case;

pub(crate) fn run(case: &Case<'_>, _options: &[&str]) -> Result<Option<String>, String> {
    let printed = print(&case.program()?.program);
    let lines: Vec<&str> = case.text.lines().collect();
    let first = lines.iter().position(|line| line.starts_with("mesh")).unwrap_or(0);
    let last = lines.iter().rposition(|line| *line == "}").unwrap_or(0);
    let written = lines[first..=last].join("\n") + "\n";
    if written == printed {
        return Ok(None);
    }
    if case.bless {
        let before: String = lines[..first].iter().map(|line| format!("{line}\n")).collect();
        let after: String = lines[last + 1..].iter().map(|line| format!("{line}\n")).collect();
        return Ok(Some(before + &printed + &after));
    }
    let differs = written.lines().zip(printed.lines()).find(|(a, b)| a != b);
    let (a, b) = differs.unwrap_or(("(its end)", "(its end)"));
    Err(format!(
        "the printer writes it otherwise; CONSORT_BLESS=1 rewrites it\n  file:    {a}\n  printer: {b}"
    ))
}

/// Checks that the printed text parses to the same program and prints the same.
pub(crate) fn check_reads_back(program: &Program, ops: &OpTable) -> Result<(), String> {
    let text = print(program);
    let again = parse(&text, ops).map_err(|error| format!("printed text does not parse: {error}\n{text}"))?;
    if again.program != *program {
        return Err(format!("printed text reads back as another program\n{text}"));
    }
    if print(&again.program) != text {
        return Err(format!("printing twice differs\n{text}"));
    }
    Ok(())
}
