//! Reports on compilations: counters and explanations.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::rc::Rc;
use std::time::Duration;

use consort_ir::cost::{self, Estimate};
use consort_ir::index::Sym;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, call_name};
use consort_ir::program::{Block, Func, Node, Program};
use consort_ir::text::print_used;
use consort_passes::{Copy, PlanReport, report};
use consort_types::Failure;

use crate::grad::ExplainedGradient;
use crate::trace::Break;

use super::graph::Graph;
use super::log::log;

/// Counters of a compiled function, for tests.
///
/// [`Compiled::explain`](crate::Compiled::explain) has an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls.
    pub calls: u64,
    /// Programs that were compiled.
    pub graphs: u64,
    /// Graph breaks: places where a traced value was read on the host, in all compilations.
    pub breaks: u64,
    /// Compilations after the first.
    pub recompiles: u64,
    /// Plans that were made: one for each binding of sizes and set of donated arguments.
    pub plans: u64,
    /// Calls that traced the function again, because it has breaks.
    pub retraced: u64,
    /// Calls that ran the function uncompiled, because the compilation limit was reached.
    pub uncompiled: u64,
    /// Bytes that were copied so that they could take part in communication.
    pub copied_bytes: u64,
    /// Time that compilations took: trace, passes, agreement, plans.
    pub compiling: Duration,
    /// The part of that time spent on agreement with other ranks, waits included.
    pub agreeing: Duration,
}

/// Reasons for recompilation that are kept.
const REASONS: usize = 64;

/// The record of a function's compilations and calls.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) breaks: Vec<Break>,
    /// Reasons of the first recompilations, and how many recompilations there were.
    recompiles: Vec<Failure>,
    recompiled: u64,
    constants: Vec<(String, &'static Location<'static>)>,
    gradients: Vec<ExplainedGradient>,
    pub(crate) retraced: u64,
    pub(crate) compiling: Duration,
    pub(crate) agreeing: Duration,
    uncompiled: u64,
    limit: usize,
}

impl Log {
    /// Records a compilation.
    pub(crate) fn compiled<R>(
        &mut self,
        traced: &super::traced::Traced<R>,
        recompiled: Option<Box<Failure>>,
    ) {
        for graph in &traced.graphs {
            log("program", || graph.text.clone());
            log("guards", || graph.guards_text().join("\n"));
        }
        for one in &traced.breaks {
            log("breaks", || format!("{} at {}:{}", one.op, one.site.file(), one.site.line()));
        }
        if let Some(why) = &recompiled {
            log("recompiles", || why.to_string());
        }
        self.breaks.extend(traced.breaks.iter().cloned());
        self.gradients.extend(traced.gradients.iter().cloned());
        for constant in &traced.constants {
            if !self.constants.contains(constant) {
                self.constants.push(constant.clone());
            }
        }
        self.recompiled += u64::from(recompiled.is_some());
        // Bounded, so that a function that recompiles at every call does not exhaust memory.
        if self.recompiles.len() < REASONS {
            self.recompiles.extend(recompiled.map(|why| *why));
        }
    }

    pub(crate) fn past_limit(&mut self, limit: usize) {
        self.limit = limit;
        self.uncompiled += 1;
        if self.uncompiled == 1 {
            log("recompiles", || format!("it was compiled {limit} times, and runs as it is from now on"));
        }
    }

    pub(crate) fn stats(&self, calls: u64, graphs: &[Rc<Graph>]) -> Stats {
        let plans = || graphs.iter().flat_map(|graph| graph.plans());
        Stats {
            calls,
            graphs: graphs.len() as u64,
            breaks: self.breaks.len() as u64,
            recompiles: self.recompiled,
            plans: graphs.iter().map(|graph| graph.planned.get()).sum(),
            retraced: self.retraced,
            uncompiled: self.uncompiled,
            copied_bytes: plans().map(|plan| plan.copied_bytes()).sum(),
            compiling: self.compiling + graphs.iter().map(|graph| graph.planning.get()).sum(),
            agreeing: self.agreeing,
        }
    }

    pub(crate) fn explain(
        &self,
        (name, role): (String, Option<String>),
        stats: Stats,
        graphs: &[Rc<Graph>],
        last: Option<usize>,
    ) -> Explanation {
        let explained = |graph: &Rc<Graph>| {
            let mesh = graph.decided.mesh();
            let plans = graph.plans();
            let about = plans.iter().map(|plan| plan.about(mesh)).collect();
            let plan = plans.into_iter().next();
            let func = plan.as_ref().map(|plan| &plan.func).or(graph.func());
            let mut explained = func.map_or_else(ExplainedGraph::default, |func| {
                ExplainedGraph::new(mesh, graph.text.clone(), func)
            });
            explained.guards = graph.guards_text();
            explained.plans = about;
            if let Some(plan) = plan {
                explained.evaluated = plan.evaluated();
                for (param, bytes) in plan.packs() {
                    explained.copied_bytes += bytes;
                    explained.copies.push(format!("{param}: {bytes} bytes (gaps of the argument)"));
                }
            }
            explained
        };
        Explanation {
            name,
            role,
            stats,
            breaks: self.breaks.clone(),
            recompiles: self.recompiles.clone(),
            constants: self.constants.clone(),
            gradients: self.gradients.clone(),
            limit: (self.uncompiled > 0).then_some(self.limit),
            graphs: graphs.iter().map(explained).collect(),
            last,
        }
    }
}

/// What a call costs by the ops' own estimates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Arithmetic operations.
    pub flops: i64,
    /// Bytes of memory read and written.
    pub bytes: i64,
    /// Bytes received from other ranks.
    pub wire: i64,
}

/// What was compiled, why, and what it does.
///
/// [`Compiled::explain`](crate::Compiled::explain) has an example.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The name of the function.
    pub name: String,
    /// Its role on this rank, if it was declared with one.
    pub role: Option<String>,
    /// The counters.
    pub stats: Stats,
    /// Where traced values were read on the host.
    pub breaks: Vec<Break>,
    /// Why each compilation after the first was made: the guard that failed.
    pub recompiles: Vec<Failure>,
    /// Tensors that were captured, with the line that used them first: their elements are those of the first call.
    pub constants: Vec<(String, &'static Location<'static>)>,
    /// The gradients that it takes.
    pub gradients: Vec<ExplainedGradient>,
    /// The limit of compilations, if it was reached.
    pub limit: Option<usize>,
    /// The programs.
    pub graphs: Vec<ExplainedGraph>,
    /// The program that ran last, by its number; `None` if the function has breaks or was not called.
    pub last: Option<usize>,
}

/// A program that was compiled.
///
/// [`Compiled::explain`](crate::Compiled::explain) has an example.
#[derive(Clone, Debug, Default)]
pub struct ExplainedGraph {
    /// The program, as all ranks have it.
    pub program: String,
    /// How many ops it has, those in blocks included.
    pub ops: usize,
    /// How many of them start communication.
    pub starts: usize,
    /// The conditions on sizes under which it was compiled.
    pub guards: Vec<String>,
    /// The plan that ran last on this rank.
    pub plan: Option<String>,
    /// What each plan that is kept was made for, that one first: values of symbols, and arguments that it may write.
    pub plans: Vec<String>,
    /// Bytes that the plan needs besides its arguments.
    pub peak_bytes: u64,
    /// The largest sum of values that are alive at one time.
    pub live_bytes: u64,
    /// Bytes that each call copies so that they can take part in communication.
    pub copied_bytes: u64,
    /// The copies, with the reason for each.
    pub copies: Vec<String>,
    /// What a call costs by the ops' own estimates.
    pub cost: Cost,
    /// The estimates of data-dependent sizes that the cost uses.
    pub estimates: Vec<Estimate>,
    /// Additional bytes that the plan needs for tensors of data-dependent sizes.
    pub dynamic_bytes: u64,
    /// The ops without a kernel, which run by their reference evaluation.
    pub evaluated: Vec<&'static str>,
}

impl ExplainedGraph {
    /// Explains a program's text and a plan made of it, or an unplanned function.
    pub fn new(mesh: &Mesh, program: String, func: &Func) -> ExplainedGraph {
        ExplainedGraph::with_hints(mesh, program, func, &BTreeMap::new())
    }

    /// The same, with hints for data-dependent sizes.
    pub fn with_hints(
        mesh: &Mesh,
        program: String,
        func: &Func,
        hints: &BTreeMap<Sym, i64>,
    ) -> ExplainedGraph {
        let mut graph = ExplainedGraph { program, ..ExplainedGraph::default() };
        graph.count(&func.body);
        graph.guards = func.guards.iter().map(|guard| guard.display(mesh).to_string()).collect();
        if let Some(plan) = &func.plan {
            let PlanReport { peak_bytes, live_bytes, copied_bytes, copies } = report(mesh, func);
            (graph.peak_bytes, graph.live_bytes, graph.copied_bytes) = (peak_bytes, live_bytes, copied_bytes);
            let mut nodes = Vec::new();
            all_nodes(&func.body, &mut nodes);
            let copy = |copy: &Copy| {
                let of = nodes.get(copy.node).map_or_else(String::new, |node| of_node(node));
                format!("{}: {} bytes ({}){of}", copy.value, copy.bytes, copy.why.name())
            };
            graph.copies = copies.iter().map(copy).collect();
            let mut symbols = plan.symbols.iter().copied().collect();
            graph.estimates =
                cost::estimates(&EvalCx { mesh, rank: plan.rank, symbols: &symbols }, func, hints);
            symbols.extend(graph.estimates.iter().map(|one| (one.sym, one.value)));
            let sizes = EvalCx { mesh, rank: plan.rank, symbols: &symbols };
            let cost::Total { flops, bytes, wire, .. } = cost::total(&sizes, func, &func.body);
            let [flops, bytes, wire] = [flops, bytes, wire].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
            graph.cost = Cost { flops, bytes, wire };
            graph.dynamic_bytes = cost::dynamic_bytes(&sizes, func);
            graph.plan = Some(print_used(&Program { mesh: mesh.clone(), funcs: vec![func.clone()] }));
        }
        graph
    }

    fn count(&mut self, block: &Block) {
        for node in &block.nodes {
            self.ops += 1;
            self.starts += usize::from(node.op.effects().starts().is_some());
            node.blocks.iter().for_each(|block| self.count(block));
        }
    }
}

/// All nodes, those of a block after the node that has it.
fn all_nodes<'a>(block: &'a Block, all: &mut Vec<&'a Node>) {
    for node in &block.nodes {
        all.push(node);
        node.blocks.iter().for_each(|block| all_nodes(block, all));
    }
}

/// The call that a node is, and its source line.
fn of_node(node: &Node) -> String {
    let at = node.site.map_or_else(String::new, |site| format!(" at {site}"));
    format!(", for `{}`{at}", call_name(node.op.info().name))
}

impl fmt::Display for ExplainedGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { flops, bytes, wire } = self.cost;
        writeln!(f, "{}, {}", count(self.ops as u64, "op"), count(self.starts as u64, "start"))?;
        for guard in &self.guards {
            writeln!(f, "guard: {guard}")?;
        }
        if let [shown, others @ ..] = &self.plans[..]
            && !others.is_empty()
        {
            writeln!(f, "plans: for {}; below, which ran last: for {shown}", others.join("; for "))?;
        }
        writeln!(f, "cost: {flops} operations, {bytes} bytes moved, {wire} bytes received")?;
        for estimate in &self.estimates {
            writeln!(f, "  {estimate}")?;
        }
        write!(f, "memory: {} bytes, {} alive at once", self.peak_bytes, self.live_bytes)?;
        if self.dynamic_bytes > 0 {
            write!(f, ", and {} for sizes from data", self.dynamic_bytes)?;
        }
        writeln!(f)?;
        writeln!(f, "copied for communication: {} bytes", self.copied_bytes)?;
        for copy in &self.copies {
            writeln!(f, "  {copy}")?;
        }
        if !self.evaluated.is_empty() {
            writeln!(f, "without a kernel, evaluated slowly: {}", self.evaluated.join(", "))?;
        }
        f.write_str(self.plan.as_ref().unwrap_or(&self.program))
    }
}

pub(super) fn count(n: u64, word: &str) -> String {
    format!("{n} {word}{}", if n == 1 { "" } else { "s" })
}

impl Explanation {
    /// Why there are breaks and recompilations, line by line, the first ones of each.
    pub(super) fn reasons(&self) -> impl Iterator<Item = String> {
        /// How many of each.
        const FIRST: usize = 8;
        let first = |all: Vec<String>, word: &str| {
            let more = all.len().saturating_sub(FIRST);
            let more = (more > 0).then(|| format!("and {} more", count(more as u64, word)));
            all.into_iter().take(FIRST).chain(more).collect::<Vec<_>>()
        };
        let breaks = first(self.breaks.iter().map(reason_of).collect(), "break");
        let whys = self.recompiles.iter().map(|why| format!("recompile: {why}"));
        let recompiles = first(whys.collect(), "recompile");
        let lines = |reason: String| reason.lines().map(String::from).collect::<Vec<_>>();
        breaks.into_iter().chain(recompiles).flat_map(lines)
    }
}

/// The reason of a break. The line that prints is unknown; only that of the previous op is known.
fn reason_of(one: &Break) -> String {
    let at = if one.op == "print" { "after" } else { "at" };
    let (file, line) = (one.site.file(), one.site.line());
    format!("break: {} reads a traced tensor {at} {file}:{line}", one.op)
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stats { calls, graphs, breaks, recompiles, plans, .. } = self.stats;
        let counts = [
            (calls, "call"),
            (graphs, "graph"),
            (breaks, "break"),
            (recompiles, "recompile"),
            (plans, "plan"),
        ];
        let counts: Vec<String> = counts.into_iter().map(|(n, word)| count(n, word)).collect();
        let role = self.role.as_ref().map_or(String::new(), |role| format!(" as role `{role}`"));
        writeln!(f, "{}{role}: {}", self.name, counts.join(", "))?;
        if let Some(limit) = self.limit {
            writeln!(
                f,
                "  compiled {limit} times, the limit; since then {} ran eagerly",
                count(self.stats.uncompiled, "call")
            )?;
        }
        for one in &self.breaks {
            writeln!(f, "  {}", reason_of(one))?;
        }
        for why in &self.recompiles {
            writeln!(f, "  recompile: {}", why.to_string().replace('\n', "\n  "))?;
        }
        for (what, site) in &self.constants {
            writeln!(f, "  constant: {what} at {}:{}", site.file(), site.line())?;
        }
        for gradient in &self.gradients {
            writeln!(f, "  gradient: {}", gradient.to_string().replace('\n', "\n  "))?;
        }
        for (number, graph) in self.graphs.iter().enumerate() {
            let text = graph.to_string();
            for (line, text) in text.lines().enumerate() {
                match line {
                    0 if self.graphs.len() > 1 && self.last == Some(number) => {
                        writeln!(f, "  graph {number}, which ran last: {text}")?;
                    }
                    0 => writeln!(f, "  graph {number}: {text}")?,
                    _ => writeln!(f, "    {text}")?,
                }
            }
        }
        Ok(())
    }
}
