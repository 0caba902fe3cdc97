//! `consort check FILE`: whether the communication of all ranks fits together, without running anything.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{anyhow, bail};
use consort_ir::index::Sym;
use consort_ir::joint::{Action, Script, check};
use consort_ir::program::{Func, Program};
use consort_types::{Rank, ranks_text};
use serde_json::json;

use crate::explain::sizes;
use crate::report::{MACHINE, Rendered, Report, count, exit_code, wrong};
use crate::source::Source;

const EXAMPLES: &str = "\
Every send must meet a receive (J1), the members of a group must make the same calls in the same
order (J2), and no ranks may wait for one another in a circle (J3). Without --role, each function is
checked as if all ranks ran it.

Examples:
  consort check ring.csr
  consort check pipeline.csr --role first=0,1 --role last=2,3
  consort check decode.csr --sizes s0=8";

/// The most ranks: each has a list of all members of its groups.
const MAX_RANKS: u32 = 8192;

/// Check that the communication of all ranks fits together, before they run
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The program, or - for the standard input
    file: PathBuf,
    /// A function, and the ranks that run it; every rank must have one
    #[arg(long, value_name = "FUNC=RANK,..")]
    role: Vec<String>,
    /// Values of symbols, the same on all ranks
    #[arg(long, value_name = "SYMBOL=N,..", default_value = "")]
    sizes: String,
    /// Print one JSON object: {"ok", "checked", "error"}
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    match checked(args) {
        // With --json even errors are printed as JSON, unless the machine failed.
        Err(error) if args.json && exit_code(&error) != MACHINE => {
            let object = json!({ "ok": false, "checked": [], "error": format!("{error:#}") });
            Ok(Report::checked(format!("{object}\n"), false))
        }
        Ok(lines) if args.json => {
            let object = json!({ "ok": true, "checked": lines, "error": null });
            Ok(Report::fine(format!("{object}\n")))
        }
        Ok(lines) => Ok(Report::fine(lines.iter().map(|line| format!("{line}\n")).collect())),
        Err(error) => Err(error),
    }
}

/// One line for each set of functions that was checked together.
fn checked(args: &Args) -> anyhow::Result<Vec<String>> {
    let source = Source::read(&args.file)?;
    let found = source.check();
    let lines = found.lines();
    let Some(parsed) = found.parsed.filter(|_| found.errors.is_empty()) else {
        return Err(Rendered(source.render(&found.errors, &lines)).into());
    };
    let program = parsed.program;
    let sizes = sizes(&args.sizes)?;
    if program.mesh.n_ranks() > MAX_RANKS {
        bail!(
            "{}: expected a mesh of at most {MAX_RANKS} ranks, got {}",
            source.name,
            program.mesh.n_ranks()
        );
    }
    if !args.role.is_empty() {
        let roles = roles(&program, &args.role)?;
        return Ok(vec![together(&program, &roles, &sizes)?]);
    }
    if program.funcs.is_empty() {
        bail!("{}: there is no function", source.name);
    }
    let all = |func| (0..program.mesh.n_ranks()).map(|_| func).collect::<Vec<&Func>>();
    program.funcs.iter().map(|func| together(&program, &all(func), &sizes)).collect()
}

/// The function of each rank.
fn roles<'a>(program: &'a Program, roles: &[String]) -> anyhow::Result<Vec<&'a Func>> {
    let n = program.mesh.n_ranks();
    let mut of: BTreeMap<u32, &Func> = BTreeMap::new();
    for role in roles {
        let unread =
            || anyhow!(wrong("--role", "a function and its ranks, such as first=0,1", format!("`{role}`")));
        let (name, ranks) = role.split_once('=').ok_or_else(unread)?;
        let name = name.trim().trim_start_matches('@');
        let func = program.func(name).ok_or_else(|| {
            let names: Vec<String> = program.funcs.iter().map(|func| format!("@{}", func.name)).collect();
            anyhow!(wrong("--role", format!("one of {}", names.join(", ")), format!("@{name}")))
        })?;
        for rank in ranks.split(',') {
            let rank: u32 = rank.trim().parse().map_err(|_| unread())?;
            if rank >= n {
                bail!(wrong("--role", format!("ranks below {n}"), rank));
            }
            if of.insert(rank, func).is_some() {
                bail!(wrong("--role", "one role for each rank", format!("two for rank {rank}")));
            }
        }
    }
    let missing: Vec<usize> =
        (0..n).filter(|rank| !of.contains_key(rank)).map(|rank| rank as usize).collect();
    if !missing.is_empty() {
        bail!(wrong("--role", "a role for every rank", format!("none for {}", ranks_text(&missing))));
    }
    Ok(of.into_values().collect())
}

/// Checks the functions of all ranks together, and says what was checked.
fn together(program: &Program, funcs: &[&Func], sizes: &BTreeMap<Sym, i64>) -> anyhow::Result<String> {
    let mut names: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, func) in funcs.iter().enumerate() {
        match names.iter_mut().find(|(name, _)| *name == func.name) {
            Some((_, ranks)) => ranks.push(rank),
            None => names.push((&func.name, vec![rank])),
        }
    }
    let names = names.iter().map(|(name, ranks)| format!("@{name} on {}", ranks_text(ranks)));
    let names = names.collect::<Vec<_>>().join(", ");
    let mut scripts = Vec::new();
    for (rank, func) in (0..).map(Rank).zip(funcs) {
        if let Some(sym) = func.bound_symbols().into_iter().find(|sym| !sizes.contains_key(sym)) {
            let name = consort_ir::index::Index::sym(sym).display(&program.mesh).to_string();
            bail!(wrong(format!("@{}: --sizes", func.name), format!("a value of {name}"), "none"));
        }
        let script = Script::of(&program.mesh, func, rank, sizes);
        scripts.push(script.map_err(|failure| anyhow!(failure.of(format!("@{}", func.name))))?);
    }
    check(&scripts).map_err(|failure| anyhow!(failure.of(names.clone())))?;
    let starts = |script: &Script| {
        script.events.iter().filter(|event| !matches!(event.action, Action::Wait(_))).count()
    };
    let groups: BTreeSet<&(String, Vec<u32>)> = scripts.iter().flat_map(|script| &script.groups).collect();
    let starts = count(scripts.iter().map(starts).sum(), "start");
    Ok(format!("{names}: fits together, {starts} on {}", count(groups.len(), "group")))
}
