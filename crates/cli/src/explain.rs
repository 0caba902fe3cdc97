//! `consort explain FILE`: the stages of a program: its simplified form, its plan, and the cost.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{anyhow, bail};
use consort::ExplainedGraph;
use consort_ir::cost::sizes_from_data;
use consort_ir::index::{Index, Sym};
use consort_ir::mesh::Mesh;
use consort_ir::program::{Func, Program};
use consort_ir::symbols::check_symbols;
use consort_ir::text::print;
use consort_passes::{Binding, CompileError, PassCx, compile};
use consort_types::Rank;
use serde_json::{Value, json};

use crate::report::{MACHINE, Machine, Rendered, Report, exit_code, wrong};
use crate::source::Source;

const EXAMPLES: &str = "\
A plan is made for one rank and for given sizes. It may write to donated arguments in place.

Examples:
  consort explain tp.csr                        the plan of rank 0
  consort explain tp.csr --rank 1 --donate v0   the plan of rank 1, which may write to v0
  consort explain decode.csr --sizes s0=8,s1=4  for these sizes
  consort explain moe.csr --sizes s0=8,u0=3     u0 comes from data: its cost is estimated with 3

Without a hint, the cost of a size that comes from data is estimated with the largest value that its
range and the `where` clause allow, or 1024 if it is unbounded. The output says which: hint, range,
default.";

/// Show the plan of a text program, its memory, copies and cost
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The program, or - for the standard input
    file: PathBuf,
    /// The rank whose plan is shown
    #[arg(long, value_name = "R", default_value_t = 0)]
    rank: u32,
    /// The donated parameters: the plan may write to them
    #[arg(long, value_name = "VALUE,..", default_value = "")]
    donate: String,
    /// Values of symbols; for sizes that come from data, hints
    #[arg(long, value_name = "SYMBOL=N,..", default_value = "")]
    sizes: String,
    /// Print JSON: {"ok", "funcs", "error"}
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    let explained = match explain(args) {
        // With --json even errors are printed as JSON, unless the machine failed.
        Err(error) if args.json && exit_code(&error) != MACHINE => {
            let object = json!({ "ok": false, "funcs": [], "error": format!("{error:#}") });
            return Ok(Report::checked(format!("{object}\n"), false));
        }
        other => other?,
    };
    if args.json {
        let funcs: Vec<Value> = explained.iter().map(|(name, graph)| to_json(name, graph)).collect();
        let object = json!({ "ok": true, "funcs": funcs, "error": null });
        return Ok(Report::fine(format!("{object}\n")));
    }
    let texts: Vec<String> = explained.iter().map(|(name, graph)| format!("@{name}: {graph}")).collect();
    Ok(Report::fine(texts.join("\n")))
}

fn to_json(name: &str, graph: &ExplainedGraph) -> Value {
    let estimates: Vec<Value> = graph
        .estimates
        .iter()
        .map(|one| json!({ "symbol": name_of(one.sym), "value": one.value, "source": one.source.name() }))
        .collect();
    json!({
        "func": name, "ops": graph.ops, "starts": graph.starts, "guards": graph.guards,
        "flops": graph.cost.flops, "bytes": graph.cost.bytes, "wire": graph.cost.wire,
        "peak_bytes": graph.peak_bytes, "live_bytes": graph.live_bytes,
        "dynamic_bytes": graph.dynamic_bytes, "estimates": estimates, "copied_bytes": graph.copied_bytes, "copies": graph.copies,
        "program": graph.program, "plan": graph.plan,
    })
}

/// All functions of the program, by name.
fn explain(args: &Args) -> anyhow::Result<Vec<(String, ExplainedGraph)>> {
    let source = Source::read(&args.file)?;
    let checked = source.check();
    let lines = checked.lines();
    let Some(parsed) = checked.parsed.filter(|_| checked.errors.is_empty()) else {
        return Err(Rendered(source.render(&checked.errors, &lines)).into());
    };
    let program = parsed.program;
    let name = &source.name;
    if args.rank >= program.mesh.n_ranks() {
        let expected = format!("a rank below {}", program.mesh.n_ranks());
        bail!(wrong(format!("{name}: --rank"), expected, args.rank));
    }
    let sizes = sizes(&args.sizes)?;
    let from_data = |func: &Func| sizes_from_data(func).into_keys().collect::<Vec<_>>();
    let known: BTreeSet<Sym> =
        program.funcs.iter().flat_map(|func| [func.bound_symbols(), from_data(func)].concat()).collect();
    if let Some(sym) = sizes.keys().find(|sym| !known.contains(sym)) {
        bail!("{name}: --sizes: no function has a symbol {}", name_of(*sym));
    }
    let given: Vec<&str> = args.donate.split(',').map(str::trim).filter(|text| !text.is_empty()).collect();
    let is_param = |text: &str, func: &Func| func.body.params.iter().any(|param| param.to_string() == text);
    if let Some(text) = given.iter().find(|text| !program.funcs.iter().any(|func| is_param(text, func))) {
        bail!(wrong(format!("{name}: --donate"), "parameters such as v0", format!("`{text}`")));
    }
    // Passes keep the parameters, but may renumber values.
    let donated: Vec<Vec<bool>> = program
        .funcs
        .iter()
        .map(|func| {
            func.body.params.iter().map(|param| given.contains(&param.to_string().as_str())).collect()
        })
        .collect();
    let failed = |error: CompileError| match error.is_defect() {
        false => anyhow!("{name}: {error}"),
        true => Machine(error.to_string()).into(),
    };
    let decided = compile(&program, &mut PassCx::default()).map_err(failed)?;
    let program = decided.program();
    let explained = program.funcs.iter().zip(&donated).map(|(func, donated)| {
        let symbols = bound(program, func, &sizes, args.rank).map_err(|error| anyhow!("{name}: {error}"))?;
        let binding = Binding { rank: Rank(args.rank), symbols: &symbols, donated };
        let planned = decided.bind(&func.name, &binding, &mut PassCx::default()).map_err(failed)?;
        let text = print(&Program { mesh: program.mesh.clone(), funcs: vec![func.clone()] });
        Ok((func.name.clone(), ExplainedGraph::with_hints(&program.mesh, text, &planned, &sizes)))
    });
    explained.collect()
}

/// A symbol of a size in the syntax of programs; it does not depend on the mesh.
fn name_of(sym: Sym) -> String {
    Index::sym(sym).display(&Mesh::default()).to_string()
}

/// The symbols of `--sizes`.
pub(crate) fn sizes(text: &str) -> anyhow::Result<BTreeMap<Sym, i64>> {
    let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
    let size = |item: &str| {
        let (symbol, number) = item.split_once('=')?;
        let number: i64 = number.trim().parse().ok().filter(|number| *number >= 0)?;
        let (kind, id) = symbol.trim().split_at_checked(1)?;
        let id = id.parse().ok()?;
        Some((if kind == "s" { Sym::Backed(id) } else { Sym::Unbacked(id) }, number))
            .filter(|_| "su".contains(kind))
    };
    items
        .map(|item| {
            let unread = || anyhow!(wrong("--sizes", "items such as s0=8", format!("`{item}`")));
            size(item).ok_or_else(unread)
        })
        .collect()
}

/// The values of a function's symbols, if all are given and the function accepts them.
fn bound(
    program: &Program,
    func: &Func,
    sizes: &BTreeMap<Sym, i64>,
    rank: u32,
) -> Result<BTreeMap<Sym, i64>, String> {
    let (mesh, own) = (&program.mesh, func.bound_symbols());
    let missing: Vec<String> =
        own.iter().filter(|sym| !sizes.contains_key(sym)).map(|sym| name_of(*sym)).collect();
    if !missing.is_empty() {
        let example: Vec<String> = missing.iter().map(|sym| format!("{sym}=8")).collect();
        let expected = format!("a value for {}", missing.join(", "));
        let failure = wrong(format!("@{}", func.name), expected, "none");
        return Err(failure.note(format!("give --sizes {}", example.join(","))).to_string());
    }
    let bound: BTreeMap<Sym, i64> = own.iter().filter_map(|sym| Some((*sym, *sizes.get(sym)?))).collect();
    check_symbols(mesh, Rank(rank), func, &bound)
        .map_err(|error| format!("@{}: --sizes: {error}", func.name))?;
    for (sym, facts) in sizes_from_data(func) {
        if let Some(hint) = sizes.get(&sym).filter(|hint| !facts.allow(**hint)) {
            let (func, sym) = (&func.name, name_of(sym));
            return Err(format!("@{func}: --sizes: {sym} is {hint}, but the function declares {facts}"));
        }
    }
    Ok(bound)
}
