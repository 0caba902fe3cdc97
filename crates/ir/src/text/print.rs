//! Program to text.

use std::collections::BTreeSet;
use std::fmt::Write;

use consort_types::GroupId;

use crate::diagnostic::LineMap;
use crate::index::{Index, SymbolFacts};
use crate::mesh::Mesh;
use crate::program::{Block, Func, Node, Program};

/// The column at which types begin, if the op is short enough.
const TYPE_COLUMN: usize = 52;

/// The program as text.
pub fn print(program: &Program) -> String {
    print_with_lines(program).0
}

/// The program as text, without the groups that none of its functions uses.
pub fn print_used(program: &Program) -> String {
    let used: BTreeSet<GroupId> = program.funcs.iter().flat_map(Func::groups).collect();
    print_groups(program, |id| used.contains(&id)).0
}

/// The program as text, and the line of every node.
pub fn print_with_lines(program: &Program) -> (String, LineMap) {
    print_groups(program, |_| true)
}

fn print_groups(program: &Program, is_used: impl Fn(GroupId) -> bool) -> (String, LineMap) {
    let mut printer = Printer { mesh: &program.mesh, out: String::new(), line: 1, map: LineMap::default() };
    let axes: Vec<String> =
        program.mesh.axes().iter().map(|(name, size)| format!("{name}: {size}")).collect();
    printer.line(&format!("mesh ({})", axes.join(", ")));
    let groups = program.mesh.groups().iter().zip(0..).filter(|(_, id)| is_used(GroupId(*id)));
    for (group, _) in groups {
        let lists = group.lists.iter().map(|list| {
            let ranks: Vec<String> = list.iter().map(|rank| rank.0.to_string()).collect();
            format!("[{}]", ranks.join(", "))
        });
        printer.line(&format!("group {} = [{}]", group.name, lists.collect::<Vec<_>>().join(", ")));
    }
    for func in &program.funcs {
        printer.line("");
        printer.func(func);
    }
    (printer.out, printer.map)
}

/// The node as text, without its blocks and its location.
pub fn node_text(node: &Node, func: &Func, mesh: &Mesh) -> String {
    let mut out = String::new();
    write_node(&mut out, node, func, mesh, 0);
    out
}

struct Printer<'a> {
    mesh: &'a Mesh,
    out: String,
    line: u32,
    map: LineMap,
}

impl Printer<'_> {
    fn line(&mut self, text: &str) {
        self.out.push_str(text);
        self.out.push('\n');
        self.line += 1;
    }

    fn func(&mut self, func: &Func) {
        self.map.funcs.push((self.line, Vec::new()));
        let mut head = format!("func @{}(", func.name);
        self.params(&mut head, func, &func.body);
        head.push(')');
        let results: Vec<String> = func.results.iter().map(|ty| ty.display(self.mesh).to_string()).collect();
        match results.as_slice() {
            [] => {}
            [one] => head.push_str(&format!(" -> {one}")),
            many => head.push_str(&format!(" -> ({})", many.join(", "))),
        }
        let declared = func.symbols.iter().map(|(sym, facts)| {
            format!("{}{}", Index::sym(*sym).display(self.mesh), symbol_text(facts, self.mesh))
        });
        let guards = func.guards.iter().map(|guard| guard.display(self.mesh).to_string());
        let conditions: Vec<String> = declared.chain(guards).collect();
        if !conditions.is_empty() {
            self.line(&head);
            head = format!("where {}", conditions.join(", "));
        }
        if let Some(plan) = &func.plan {
            self.line(&head);
            head = format!("plan (rank {}", plan.rank.0);
            for (sym, value) in &plan.symbols {
                let _ = write!(head, ", {} = {value}", Index::sym(*sym).display(self.mesh));
            }
            for (region, size) in &plan.regions {
                let _ = write!(head, ", {region}: {size:#x}");
            }
            head.push(')');
        }
        self.line(&format!("{head} {{"));
        self.nodes(func, &func.body, 4);
        self.line("}");
    }

    fn params(&self, out: &mut String, func: &Func, block: &Block) {
        let mut places = block.places.iter();
        for (i, param) in block.params.iter().enumerate() {
            let _ = write!(out, "{}{param}", if i == 0 { "" } else { ", " });
            if let Some(ty) = func.ty(*param) {
                let _ = write!(out, ": {}", ty.display(self.mesh));
                for place in places.by_ref().take(ty.tensors().len()) {
                    let _ = write!(out, " {place}");
                }
            }
            if func.plan.as_ref().is_some_and(|plan| plan.donated.contains(param)) {
                out.push_str(" donated");
            }
        }
        // More places than tensors is an error that the verifier reports.
        for place in places {
            let _ = write!(out, " {place}");
        }
    }

    fn nodes(&mut self, func: &Func, block: &Block, indent: usize) {
        for node in &block.nodes {
            self.mark();
            let start = self.out.len();
            self.out.extend(std::iter::repeat_n(' ', indent));
            write_node(&mut self.out, node, func, self.mesh, start);
            if !node.blocks.is_empty() {
                self.out.push_str(" {");
            }
            if let Some(site) = &node.site {
                let _ = write!(self.out, " ; {site}");
            }
            self.line("");
            for (block, label) in node.blocks.iter().zip(node.op.flow().labels()) {
                let mut head = format!("{:indent$}    {label}(", "");
                self.params(&mut head, func, block);
                self.line(&(head + ") {"));
                self.nodes(func, block, indent + 8);
                self.line(&format!("{:indent$}    }}", ""));
            }
            if !node.blocks.is_empty() {
                self.line(&format!("{:indent$}}}", ""));
            }
        }
        self.mark();
        let results: Vec<String> = block.results.iter().map(|value| format!(" {value}")).collect();
        self.line(&format!("{:indent$}return{}", "", results.join(",")));
    }

    fn mark(&mut self) {
        if let Some((_, lines)) = self.map.funcs.last_mut() {
            lines.push(self.line);
        }
    }
}

/// Writes a node, whose line began at byte `start`.
fn write_node(out: &mut String, node: &Node, func: &Func, mesh: &Mesh, start: usize) {
    for (i, result) in node.results.iter().enumerate() {
        let _ = write!(out, "{}{result}", if i == 0 { "" } else { ", " });
    }
    if !node.results.is_empty() {
        out.push_str(" = ");
    }
    out.push_str(node.op.info().name);
    node.op.write_attrs(out, mesh);
    for (i, arg) in node.args.iter().enumerate() {
        let _ = write!(out, "{}{arg}", if i == 0 { " " } else { ", " });
    }
    if !node.results.is_empty() {
        let width = out.len() - start;
        out.extend(std::iter::repeat_n(' ', TYPE_COLUMN.saturating_sub(width)));
        for (i, result) in node.results.iter().enumerate() {
            out.push_str(if i == 0 { " : " } else { ", " });
            if let Some(ty) = func.ty(*result) {
                let _ = write!(out, "{}", ty.display(mesh));
            }
        }
    }
    if let Some(plan) = &node.plan {
        let _ = write!(out, "{}", plan.display(mesh));
    }
}

fn symbol_text(facts: &SymbolFacts, mesh: &Mesh) -> String {
    let mut out = String::new();
    if !facts.varies.is_empty() {
        let _ = write!(out, "{{{}}}", mesh.axes_text(facts.varies));
    }
    let range = SymbolFacts { varies: facts.varies, ..SymbolFacts::default() };
    if *facts != range || out.is_empty() {
        let _ = write!(out, " in {}..", facts.min);
        if let Some(max) = facts.max {
            let _ = write!(out, "={max}");
        }
        if facts.multiple_of != 1 {
            let _ = write!(out, " by {}", facts.multiple_of);
        }
    }
    out
}
