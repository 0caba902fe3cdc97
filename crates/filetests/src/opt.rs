//! `test: opt PASS`: the functions after the pass are in comments below the program, under `; after opt PASS:`, and the
//! `; run:` lines hold before and after it. `; after opt PASS: no change` says that the pass does not change the
//! program. Without a name all passes run.

use consort_ir::ops::OpTable;
use consort_ir::text::print;
use consort_ir::verify::verify;
use consort_passes::{PASSES, PassCx, pass, simplify};

use crate::print::check_reads_back;
use crate::{Case, oracle};

const NO_CHANGE: &str = " no change";

pub(crate) fn run(case: &Case<'_>, options: &[&str]) -> Result<Option<String>, String> {
    let passes = match options {
        [] => PASSES,
        [name] => std::slice::from_ref(pass(name).ok_or_else(|| format!("no pass `{name}`"))?),
        _ => return Err("expected one pass or none".to_string()),
    };
    let parsed = case.program()?;
    if let Some(error) = verify(&parsed.program).first() {
        return Err(error.render("case", &case.text.lines().collect::<Vec<_>>(), &parsed.lines));
    }
    oracle::check_runs(case.text, &parsed.program)?;
    let simple =
        simplify(&parsed.program, passes, &mut PassCx::default()).map_err(|error| error.to_string())?;
    oracle::check_runs(case.text, &simple).map_err(|error| format!("after it, {error}"))?;
    check_reads_back(&simple, &OpTable::built_in())?;

    let head = format!("; after {}:", ["opt"].iter().chain(options).copied().collect::<Vec<_>>().join(" "));
    let got = if simple == parsed.program { NO_CHANGE.to_string() } else { comment(&print(&simple)) };
    let (before, expected, after) = section(case.text, &head);
    if expected == got {
        return Ok(None);
    }
    if case.bless {
        let gap = if before.is_empty() || before.ends_with("\n\n") { "" } else { "\n" };
        return Ok(Some(format!("{before}{gap}{head}{got}\n{after}")));
    }
    Err(format!("expected\n{head}{expected}\ngot\n{head}{got}\nCONSORT_BLESS=1 rewrites it"))
}

/// The functions of a printed program as comments, each line preceded by a line break.
pub(crate) fn comment(text: &str) -> String {
    let functions = text.lines().skip_while(|line| !line.starts_with("func"));
    functions.map(|line| format!("\n; {line}").trim_end().to_string()).collect()
}

/// The text before a heading, the section under it, and the rest: the comments after a heading are its section.
pub(crate) fn section<'a>(text: &'a str, head: &str) -> (&'a str, String, &'a str) {
    let Some(at) = text.find(&format!("\n{head}")).map(|at| at + 1) else { return (text, String::new(), "") };
    let rest = &text[at + head.len()..];
    let mut end = 0;
    for (i, line) in rest.split_inclusive('\n').enumerate() {
        if i > 0 && !line.starts_with(';') {
            break;
        }
        end += line.len();
    }
    (&text[..at], rest[..end].trim_end_matches('\n').to_string(), &rest[end..])
}
