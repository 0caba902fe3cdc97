//! `test: plan`: the plans of the program's functions are in the file, each after a line `; plan OPTIONS:`, and they
//! verify and have no hazards. Options are `rank=1`, sizes as `s0=8`, and donated parameters: `donated=v0,v2`.

use std::collections::BTreeMap;

use consort_ir::index::Sym;
use consort_ir::program::Program;
use consort_ir::text::print;
use consort_ir::verify::{hazards, verify};
use consort_passes::{Binding, plan, report};
use consort_types::Rank;

use crate::Case;

/// The prefix of each line of a plan.
const MARK: &str = ";| ";

pub(crate) fn run(case: &Case<'_>, options: &[&str]) -> Result<Option<String>, String> {
    let got = planned(&case.program()?.program, options)?;
    let head = format!("; plan {}", options.join(" ")).trim_end().to_string() + ":";
    let lines: Vec<&str> = case.text.lines().collect();
    let at = lines.iter().position(|line| *line == head);
    let begin = at.map_or(lines.len(), |at| at + 1);
    let end = begin + lines[begin..].iter().take_while(|line| line.starts_with(MARK.trim_end())).count();
    let expected: Vec<&str> =
        lines[begin..end].iter().map(|line| line.get(MARK.len()..).unwrap_or("")).collect();
    if at.is_some() && got.lines().eq(expected.iter().copied()) {
        return Ok(None);
    }
    if case.bless {
        let shown = got.lines().map(|line| format!("{MARK}{line}").trim_end().to_string());
        let gap = at.is_none().then(|| format!("\n{head}"));
        let before = lines[..begin].iter().map(ToString::to_string).chain(gap);
        let after = lines[end..].iter().map(ToString::to_string);
        let lines: Vec<String> = before.chain(shown).chain(after).collect();
        return Ok(Some(lines.join("\n") + "\n"));
    }
    let differs = got.lines().zip(expected.iter().copied()).find(|(got, expected)| got != expected);
    let (got, expected) = differs.unwrap_or(("(its end)", "(its end)"));
    Err(format!("the plan differs; CONSORT_BLESS=1 rewrites it\n  file: {expected}\n  plan: {got}"))
}

fn planned(program: &Program, options: &[&str]) -> Result<String, String> {
    let (mut rank, mut symbols, mut donated) = (Rank(0), BTreeMap::new(), Vec::new());
    for option in options {
        let wrong = || format!("expected rank=N, s0=N or donated=v0,v1, got `{option}`");
        let (name, value) = option.split_once('=').ok_or_else(wrong)?;
        match name.strip_prefix('s').map(str::parse) {
            Some(Ok(number)) => {
                symbols.insert(Sym::Backed(number), value.parse().map_err(|_| wrong())?);
            }
            _ if name == "rank" => rank = Rank(value.parse().map_err(|_| wrong())?),
            _ if name == "donated" => donated = value.split(',').collect(),
            _ => return Err(wrong()),
        }
    }
    let mut text = String::new();
    for func in &program.funcs {
        let donated: Vec<bool> =
            func.body.params.iter().map(|param| donated.contains(&param.to_string().as_str())).collect();
        let binding = Binding { rank, symbols: &symbols, donated: &donated };
        let func = plan(&program.mesh, func, &binding).map_err(|error| error.to_string())?;
        let costs = report(&program.mesh, &func);
        let planned = Program { mesh: program.mesh.clone(), funcs: vec![func] };
        let errors = verify(&planned);
        if let Some(error) = errors.first().or(hazards(&planned.mesh, &planned.funcs[0]).first()) {
            return Err(format!("the plan is wrong: {}\n{}", error.headline(), print(&planned)));
        }
        let shown = print(&planned);
        text += shown.split_once("func @").map_or("", |(before, _)| &shown[before.len()..]);
        text += &format!(
            "copies {} bytes, takes {}, needs {}\n",
            costs.copied_bytes, costs.peak_bytes, costs.live_bytes
        );
    }
    Ok(text)
}
