//! Checks a program. All errors are collected; each cites the invariant it breaks.
//!
//! - **V1** Every value is defined once, before it is used, in the block that uses it.
//! - **V2** A node has the number and the kinds of operands, results and blocks that its op declares.
//! - **V3** The types written are the types inferred, and the op's own constraints (C1..) hold.
//! - **V4** Groups and axes exist in the mesh.
//! - **V5** Symbols have one definition, are mentioned only where they have a value, and what the `where`
//!   clause says of them does not contradict itself.
//! - **V6** A value differs at least wherever its sizes do, and what a function returns differs over no more
//!   axes than it declares.
//! - **V7** Every pending is waited for, returned or passed on exactly once on every path.
//! - **V8** Nothing but `wait` reads a pending.
//! - **V9** Communication over a group stands under no condition or loop length that may differ within the
//!   group: all members start the same operations in the same order.
//! - **V10** Starts on a group keep one order: in a plan, those on a queue are numbered 0, 1, 2, .. in line
//!   order, each on the queue of its own group.
//! - **V11** Functions have distinct names.
//!
//! Plans also keep, checked in `plan.rs`:
//!
//! - **P1** Every tensor that a parameter or a node defines has a place. Nothing that is not a plan has one.
//! - **P2** A place lies inside its region, aligned to its elements, and a value of unbacked size lies in `dyn`.
//! - **P3** `reuse` names tensors defined before in the same block, `copy` and `lease` operands of their own start,
//!   `release` starts before it, `donated` parameters; a `view` lies where its operand does.
//! - **P4** The tensors of a line lie in one space, except operands that a start copies; those that the host reads, sizes
//!   and conditions, lie in its memory.

mod hazards;
mod plan;

use std::collections::BTreeSet;

use consort_types::{Axes, Failure, Site};

use crate::builder::block_type;
use crate::diagnostic::{Code, Diagnostic, Position};
use crate::entity::{Value, ValueMap};
use crate::index::{Assumed, Facts, Index, Sym, Waiting};
use crate::infer::{fits, infer, same_type};
use crate::mesh::Mesh;
use crate::ops::{Digest, EqualOver, Flow, Takes, Trips, Undecided, count};
use crate::program::{Block, Func, Node, Program};
use crate::types::Type;

pub use hazards::hazards;

/// Everything that is wrong with a program, in the order of its text.
pub fn verify(program: &Program) -> Vec<Diagnostic> {
    let (mut errors, mut names) = (Vec::new(), BTreeSet::new());
    for (number, func) in program.funcs.iter().enumerate() {
        if !names.insert(&func.name) {
            let failure =
                Failure::rule("V11", ("distinct names of functions", format!("@{} twice", func.name)));
            errors.push(Diagnostic { code: Code::Verify, at: Position::Func(number), failure });
        }
        let facts = func.entry_facts(&program.mesh);
        let (waiting, ready) = Waiting::new(&func.guards, |sym| facts.get(sym).is_some());
        let mut checker = Checker {
            mesh: &program.mesh,
            func,
            number,
            facts,
            waiting,
            defined_symbols: BTreeSet::new(),
            values: ValueMap::default(),
            digests: ValueMap::default(),
            next_node: 0,
            next_block: 0,
            errors: &mut errors,
        };
        checker.func(&ready);
        plan::verify_plan(&program.mesh, func, number, &mut errors);
    }
    errors.sort_by_key(|error| match error.at {
        Position::Func(func) => (func, 0),
        Position::Node(func, node) => (func, node + 1),
        Position::Text(line, _) => (0, line as usize),
    });
    errors
}

/// The state of a value while its block is checked.
struct Defined {
    block: usize,
    /// Its definition, for errors.
    at: Position,
    /// Whether a pending has been waited for or passed on.
    consumed: bool,
    /// Whether an op other than `wait` read a pending: that is reported as V8, so the missing wait is not reported
    /// again.
    misread: bool,
}

/// A condition around a block: what it is, and the axes over which it may differ.
#[derive(Clone, Copy)]
struct Condition {
    varies: Axes,
    what: &'static str,
    /// The line that computes it, or else that of the op which has it.
    site: Option<Site>,
}

struct Checker<'a, 'e> {
    mesh: &'a Mesh,
    func: &'a Func,
    number: usize,
    facts: Facts,
    /// Guards that mention symbols without a value here.
    waiting: Waiting,
    /// Unbacked symbols that some block has defined.
    defined_symbols: BTreeSet<Sym>,
    values: ValueMap<Defined>,
    /// The results of `digest`.
    digests: ValueMap<()>,
    next_node: usize,
    next_block: usize,
    errors: &'e mut Vec<Diagnostic>,
}

impl<'a> Checker<'a, '_> {
    fn error(&mut self, at: Position, site: Option<Site>, op: &str, mut failure: Box<Failure>) {
        let code = if failure.rule.starts_with('C') { Code::Type } else { Code::Verify };
        failure.site = site;
        self.errors.push(Diagnostic { code, at, failure: failure.of(op.to_string()) });
    }

    fn func(&mut self, ready: &[usize]) {
        let at = Position::Func(self.number);
        self.symbols(at);
        self.assume_guards(ready, at);
        let conditions = Vec::new();
        let (end, _) = self.block(&self.func.body, at, &conditions);
        for ty in &self.func.results {
            self.check_type(end, None, "return", ty);
        }
        self.results(end);
        for guard in self.waiting.numbers().map(|number| &self.func.guards[number]).collect::<Vec<_>>() {
            let mut undefined = false;
            guard.symbols(&mut |sym| {
                undefined |= self.facts.get(sym).is_none() && !self.defined_symbols.contains(&sym);
            });
            if !undefined {
                continue;
            }
            let text = guard.display(self.mesh).to_string();
            self.error(
                at,
                None,
                "where",
                Failure::rule("V5", format!("`{text}` mentions a symbol that nothing defines")),
            );
        }
    }

    /// The `where` clause.
    fn symbols(&mut self, at: Position) {
        let bound: BTreeSet<Sym> = self.func.bound_symbols().into_iter().collect();
        let mut declared = BTreeSet::new();
        for (sym, facts) in &self.func.symbols {
            let text = Index::sym(*sym).display(self.mesh).to_string();
            if !declared.insert(*sym) {
                self.error(at, None, "where", Failure::rule("V5", format!("`{text}` is declared twice")));
            } else if !bound.contains(sym) {
                let violation =
                    Failure::rule("V5", format!("`{text}` is declared, but no parameter binds it"));
                self.error(at, None, "where", violation.note("a parameter binds s0 by a size that is s0 alone, or as size<s0>; `to_size` states the range of an unbacked symbol itself"));
            } else if facts.max.is_some_and(|max| max < facts.min) || facts.multiple_of < 1 {
                self.error(at, None, "where", Failure::rule("V5", format!("the range of `{text}` is empty")));
            } else if !facts.varies.is_subset(self.mesh.all_axes()) {
                self.error(
                    at,
                    None,
                    "where",
                    Failure::rule("V4", format!("`{text}` differs over an axis that the mesh does not have")),
                );
            }
        }
    }

    /// Assumes guards whose symbols all have a value now.
    fn assume_guards(&mut self, ready: &[usize], at: Position) {
        for guard in ready.iter().map(|number| &self.func.guards[*number]) {
            if let Assumed::Contradiction = self.facts.assume(guard.clone()) {
                let text = guard.display(self.mesh).to_string();
                self.error(
                    at,
                    None,
                    "where",
                    Failure::rule("V5", format!("`{text}` contradicts what is known")),
                );
            }
        }
    }

    /// A block has ended: its symbols lose their values, and guards on them wait for the next definition.
    fn leave(&mut self, symbols: &[Sym]) {
        self.waiting.leave(symbols);
        self.facts.forget(symbols);
    }

    /// Checks the results of a function against its declaration.
    fn results(&mut self, at: Position) {
        let (values, declared) = (&self.func.body.results, &self.func.results);
        if values.len() != declared.len() {
            let message = (count(declared.len(), "value"), values.len().to_string());
            self.error(at, None, "return", Failure::rule("V2", message));
            return;
        }
        for (value, declared) in values.iter().zip(declared) {
            let Some(ty) = self.func.ty(*value) else { continue };
            if fits(ty, declared, &self.facts) {
                continue;
            }
            let message = (
                declared.display(self.mesh).to_string(),
                format!("{value} of type {}", ty.display(self.mesh)),
            );
            let excess = ty.varies().minus(declared.varies());
            let mut violation = Failure::rule(if excess.is_empty() { "V3" } else { "V6" }, message);
            if !excess.is_empty() {
                let axes = self.mesh.axes_text(excess);
                let all = self.mesh.axes_text(ty.varies());
                violation = violation.note(format!(
                    "{value} may differ over {axes}: reduce or gather it over {axes}, or declare the result with {{{all}}}"
                ));
            }
            self.error(at, None, "return", violation);
        }
    }

    /// Checks a block; returns the position of its `return`, and the symbols it defined.
    fn block(&mut self, block: &'a Block, at: Position, conditions: &[Condition]) -> (Position, Vec<Sym>) {
        let id = self.next_block;
        self.next_block += 1;
        for param in &block.params {
            match self.func.ty(*param) {
                Some(ty) => self.check_type(at, None, "parameter", ty),
                None => {
                    self.error(at, None, "parameter", Failure::rule("V3", format!("{param} has no type")))
                }
            }
            self.define(*param, id, at);
        }
        let mut defined_symbols = Vec::new();
        for node in &block.nodes {
            defined_symbols.extend(self.node(node, id, conditions));
        }
        let end = self.mark();
        for value in &block.results {
            self.use_value(*value, id, end, None);
        }
        let defined = block.params.iter().chain(block.nodes.iter().flat_map(|node| &node.results));
        for value in defined {
            let pending = self.func.ty(*value).is_some_and(Type::is_pending);
            let Some(state) =
                self.values.get(*value).filter(|state| pending && !state.consumed && !state.misread)
            else {
                continue;
            };
            let at = state.at;
            let violation = Failure::rule("V7", format!("{value} is pending and is never waited for"));
            self.error(at, None, "", violation.note(format!("add `wait {value}`, or return {value}")));
        }
        (end, defined_symbols)
    }

    fn mark(&mut self) -> Position {
        self.next_node += 1;
        Position::Node(self.number, self.next_node - 1)
    }

    fn define(&mut self, value: Value, block: usize, at: Position) {
        if self.values.get(value).is_some() {
            self.error(at, None, "", Failure::rule("V1", format!("{value} is defined twice")));
            return;
        }
        self.values.insert(value, Defined { block, at, consumed: false, misread: false });
    }

    /// Checks a use of a value in a block; a pending is consumed by it.
    fn use_value(&mut self, value: Value, block: usize, at: Position, user: Option<&Node>) -> bool {
        let (op, site) = user.map_or(("return", None), |node| (node.op.info().name, node.site));
        let takes_pendings = user.is_none_or(|node| node.op.takes() != Takes::Tensors);
        let pending = self.func.ty(value).is_some_and(Type::is_pending);
        let violation = match self.values.get_mut(value) {
            None => Failure::rule("V1", format!("{value} is not defined before it is used")),
            Some(defined) if defined.block != block => {
                Failure::rule("V1", format!("{value} is defined in another block"))
                    .note(format!("blocks see only their parameters: pass {value} as an operand"))
            }
            Some(defined) if pending && !takes_pendings => {
                defined.misread = true;
                return true;
            }
            Some(defined) if pending && defined.consumed => {
                Failure::rule("V7", format!("{value} is waited for or passed on twice"))
                    .note("use the value that the first wait gives")
            }
            Some(defined) => {
                defined.consumed |= pending;
                return true;
            }
        };
        self.error(at, site, op, violation);
        false
    }

    /// Checks a node; returns the symbols it defines.
    fn node(&mut self, node: &'a Node, block: usize, conditions: &[Condition]) -> Vec<Sym> {
        let at = self.mark();
        let mut known = true;
        for arg in &node.args {
            known &= self.use_value(*arg, block, at, Some(node));
        }
        self.communication(node, at, conditions);
        let args: Option<Vec<Type>> = node.args.iter().map(|arg| self.func.ty(*arg).cloned()).collect();
        let site = node.site;
        let inner = match (node.op.flow(), args.as_deref().and_then(<[Type]>::first)) {
            (Flow::Cond, Some(condition)) => {
                Condition { varies: condition.varies(), what: "condition", site }
            }
            (Flow::Loop { trips: Trips::While { .. }, .. }, _) => {
                // The first carry is the condition, and may differ over more axes than its first value.
                let first = node.blocks.first().and_then(|block| self.func.ty(*block.params.first()?));
                let next = node.blocks.first().and_then(|block| {
                    let next = block.results.first()?;
                    block.nodes.iter().find(|node| node.results.contains(next))?.site
                });
                let varies = first.map_or(Axes::NONE, Type::varies);
                Condition { varies, what: "condition", site: next.or(site) }
            }
            (Flow::Loop { trips: Trips::Count(length), .. }, _) => {
                Condition { varies: self.facts.varies(length), what: "loop length", site }
            }
            _ => Condition { varies: Axes::NONE, what: "", site },
        };
        if !node.blocks.is_empty() {
            let inner: Vec<Condition> = conditions.iter().copied().chain([inner]).collect();
            for inside in &node.blocks {
                let (_, symbols) = self.block(inside, at, &inner);
                self.leave(&symbols);
            }
        }
        let mut symbols = Vec::new();
        if let (true, Some(args)) = (known, args) {
            symbols = self.types(node, &args, at);
        }
        for result in &node.results {
            self.define(*result, block, at);
            if node.op.info().name == Digest::INFO.name {
                self.digests.insert(*result, ());
            }
        }
        symbols
    }

    /// Checks that no communication is under a condition that differs within its group.
    fn communication(&mut self, node: &Node, at: Position, conditions: &[Condition]) {
        let Some(group) = node.op.effects().starts() else { return };
        if !self.mesh.has(group) {
            return;
        }
        for condition in conditions {
            let axes = condition.varies.intersect(self.mesh.group_axes(group));
            if axes.is_empty() {
                continue;
            }
            let (axes, group) = (self.mesh.axes_text(axes), self.mesh.group_text(group));
            let violation = Failure::rule(
                "V9",
                format!(
                    "stands under a {} that may differ over {axes}, within its group {group}",
                    condition.what
                ),
            );
            let note = format!(
                "make the {} equal over {axes}, for example by an all_reduce, or use optional peers in an exchange",
                condition.what
            );
            let line = condition.site.map(|site| format!("the {} is at {site}", condition.what));
            // A gather of digests is a part of `equal_over`, which is what the user called.
            let compares = node.args.first().is_some_and(|arg| self.digests.get(*arg).is_some());
            let op = if compares { EqualOver::INFO.name } else { node.op.info().name };
            self.error(at, node.site, op, violation.rows(line).note(note));
        }
    }

    /// Checks the types of a node's results; returns the symbols it defines.
    fn types(&mut self, node: &Node, args: &[Type], at: Position) -> Vec<Sym> {
        let (op, site) = (node.op.info().name, node.site);
        let blocks: Option<Vec<_>> = node.blocks.iter().map(|block| block_type(self.func, block)).collect();
        let Some(blocks) = blocks else { return Vec::new() };
        let inferred = match infer(&*node.op, self.mesh, args, &blocks, &mut self.facts, Undecided::Refuse) {
            Ok(inferred) => inferred,
            Err(violation) => {
                self.error(at, site, op, violation);
                return Vec::new();
            }
        };
        let mut symbols = Vec::new();
        for (sym, facts) in node.op.defines(args) {
            if self.facts.declare(sym, facts) {
                self.defined_symbols.insert(sym);
                symbols.push(sym);
            }
        }
        let ready = self.waiting.define(&symbols);
        self.assume_guards(&ready, at);
        if inferred.len() != node.results.len() {
            let message = (count(inferred.len(), "result"), node.results.len().to_string());
            self.error(at, site, op, Failure::rule("V2", message));
            return symbols;
        }
        for (value, inferred) in node.results.iter().zip(&inferred) {
            let written = self.func.ty(*value);
            if written.is_some_and(|written| same_type(written, inferred, &self.facts)) {
                written.into_iter().for_each(|written| self.check_type(at, site, op, written));
                continue;
            }
            let got = written.map_or("no type".to_string(), |ty| ty.display(self.mesh).to_string());
            let message = (format!("{value} to have type {}", inferred.display(self.mesh)), got.to_string());
            self.error(at, site, op, Failure::rule("V3", message));
        }
        symbols
    }

    /// Checks that a type mentions axes that exist and symbols that have a value, and differs wherever its sizes do.
    fn check_type(&mut self, at: Position, site: Option<Site>, op: &str, ty: &Type) {
        if !ty.varies().is_subset(self.mesh.all_axes()) {
            self.error(
                at,
                site,
                op,
                Failure::rule("V4", "a type mentions an axis that the mesh does not have"),
            );
        }
        let (mut unknown, mut invalid, mut needed, mut negative) = (None, false, Axes::NONE, false);
        ty.indices(&mut |index| {
            if index.as_const().is_some_and(|size| size >= 0) {
                return;
            }
            negative |= index.as_const().is_some();
            unknown = unknown.or(self.facts.unknown_symbol(index));
            invalid |= index.is_invalid();
            needed = needed.union(self.facts.varies(index));
        });
        let text = || ty.display(self.mesh).to_string();
        if let Some(sym) = unknown {
            let name = Index::sym(sym).display(self.mesh).to_string();
            let violation =
                Failure::rule("V5", format!("{} mentions {name}, which has no value here", text()));
            self.error(
                at,
                site,
                op,
                match sym {
                    Sym::Backed(_) => violation.note(format!(
                        "a parameter binds {name} by a size that is {name} alone, or as size<{name}>"
                    )),
                    _ => violation.note(format!("{name} needs a `to_size` before it in this block")),
                },
            );
        } else if invalid || negative && !matches!(ty, Type::Size(..)) {
            self.error(
                at,
                site,
                op,
                Failure::rule(
                    "V5",
                    format!("{} has a size that is negative or does not fit in 64 bits", text()),
                ),
            );
        } else if !needed.is_subset(ty.varies()) {
            let axes = self.mesh.axes_text(needed.minus(ty.varies()));
            let violation = Failure::rule(
                "V6",
                format!("{} has sizes that differ over {axes}, so it differs over {axes} too", text()),
            );
            self.error(at, site, op, violation);
        }
    }
}
