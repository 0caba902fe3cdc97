//! `consort ops [NAME]`: the ops that programs are written in, as a table, one at a time, or as JSON.
//!
//! Everything here comes from the definitions. Properties that depend on attributes and operands (cost, gradient,
//! expansion) are taken from the op's own example.

use std::fmt::Write;

use anyhow::anyhow;
use consort_ir::builder::expand;
use consort_ir::ops::{Attr, BUILT_IN, CostCx, OpInfo, OpTable, gradient_words};
use consort_ir::program::{Func, Node, Program};
use consort_ir::text::parse;
use consort_ir::types::Type;
use consort_runtime::kernels::{self, label};
use consort_types::{Dtype, Reduce};
use serde_json::{Value, json};

use crate::report::Report;

/// How wide a line may be.
const WIDTH: usize = 100;

/// List the ops that programs are written in, or explain one
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The op to explain
    name: Option<String>,
    /// Print one JSON array with an object for each op
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> anyhow::Result<Report> {
    let rows = match &args.name {
        Some(name) => vec![find(name)?],
        None => BUILT_IN.iter().flat_map(|(kind, rows)| rows.iter().map(move |info| (*kind, info))).collect(),
    };
    let text = match rows[..] {
        _ if args.json => {
            let array: Value = rows.iter().map(|(kind, info)| op_json(kind, info)).collect();
            format!("{array}\n")
        }
        [(kind, info)] => page(kind, info),
        _ => table(),
    };
    Ok(Report::fine(text))
}

fn find(name: &str) -> anyhow::Result<(&'static str, &'static OpInfo)> {
    let mut rows = BUILT_IN.iter().flat_map(|(kind, rows)| rows.iter().map(move |info| (*kind, info)));
    // The name is the argument of the command.
    rows.find(|(_, info)| info.name == name).ok_or_else(|| match OpTable::built_in().nearest(name) {
        Some(nearest) => anyhow!("no op `{name}`\n  note: there is an op `{nearest}`"),
        None => anyhow!("no op `{name}`\n  note: `consort ops` lists them"),
    })
}

/// The syntax of the op; each attribute is followed by `value`.
fn usage(info: &OpInfo, value: &str) -> String {
    let attrs: Vec<String> = info.attrs.iter().map(|attr| format!("{}{value}", attr.name)).collect();
    let attrs = if attrs.is_empty() { String::new() } else { format!("[{}]", attrs.join(", ")) };
    let args = info.args.join(", ") + if info.variadic { ".." } else { "" };
    format!("{}{attrs} {args}", info.name).trim_end().to_string()
}

/// All ops by kind, each with its kernel and the first sentence about it.
fn table() -> String {
    let mut out = String::new();
    for (kind, rows) in BUILT_IN {
        let _ = writeln!(out, "{kind}");
        let usages: Vec<String> = rows.iter().map(|info| usage(info, "")).collect();
        let width = usages.iter().map(String::len).max().unwrap_or(0);
        let beside = rows.iter().map(|info| label(info.name).len()).max().unwrap_or(0);
        for (usage, info) in usages.iter().zip(*rows) {
            let doc = paragraphs(info).into_iter().next().unwrap_or_default();
            let first = doc.split_inclusive(". ").next().unwrap_or_default().trim_end();
            write_beside(&mut out, &format!("  {usage:width$}  {:beside$}  ", label(info.name)), first);
        }
        out.push('\n');
    }
    out.push_str("`consort ops NAME` explains one.\n");
    out
}

/// The paragraphs of an op's docs that are not constraints.
fn paragraphs(info: &OpInfo) -> Vec<String> {
    let paragraphs = info.doc.split("\n\n").map(|p| p.split_whitespace().collect::<Vec<_>>().join(" "));
    let rules = info.constraints();
    let is_rule = |text: &String| rules.iter().any(|(rule, _)| text.starts_with(&format!("({rule}) ")));
    paragraphs.filter(|text| !is_rule(text)).collect()
}

/// Everything about one op.
fn page(kind: &str, info: &OpInfo) -> String {
    let mut out = format!("{}\n", usage(info, "=.."));
    for paragraph in paragraphs(info) {
        out.push('\n');
        write_beside(&mut out, "", &paragraph);
    }
    let heading = |out: &mut String, title: &str| {
        let _ = write!(out, "\n{title}\n");
    };
    if !info.constraints().is_empty() {
        heading(&mut out, "Constraints");
    }
    for (rule, text) in info.constraints() {
        write_beside(&mut out, &format!("  {rule}  "), &text);
    }
    if !info.attrs.is_empty() {
        heading(&mut out, "Attributes");
    }
    let width = info.attrs.iter().map(|attr| attr.name.len()).max().unwrap_or(0);
    for attr in info.attrs {
        write_beside(&mut out, &format!("  {:width$}  ", attr.name), &words(attr.doc));
        write_beside(&mut out, &format!("  {:width$}  takes ", ""), attr.kind);
    }
    if reduces(info) {
        heading(&mut out, "Reductions");
        let width = Reduce::ALL.map(|reduce| reduce.name().len()).into_iter().max().unwrap_or(0);
        for reduce in Reduce::ALL {
            write_beside(&mut out, &format!("  {:width$}  ", reduce.name()), reduce.summary());
            write_beside(&mut out, &format!("  {:width$}  takes ", ""), &reduce.dtypes());
        }
    }
    heading(&mut out, "Example");
    info.example.lines().for_each(|line| {
        let _ = writeln!(out, "{}", format!("  {line}").trim_end());
    });
    out.push('\n');
    write_beside(&mut out, "Kind       ", kind);
    write_beside(&mut out, "Kernel     ", &kernel_words(info));
    if let Some(example) = Example::of(info) {
        write_beside(&mut out, "Cost       ", &example.cost());
        write_beside(&mut out, "Gradient   ", &example.gradient());
        write_beside(&mut out, "Expansion  ", &example.expansion());
    }
    out
}

/// Whether the op has a reduction over the members of a group.
fn reduces(info: &OpInfo) -> bool {
    info.attrs.iter().any(|attr| attr.kind == <Reduce as Attr>::KIND)
}

/// The kernel of an op, in the words of its page.
fn kernel_words(info: &OpInfo) -> String {
    match label(info.name).as_str() {
        "-" => "none".to_string(),
        "view" => "none where the result is a view, else a copy".to_string(),
        other => other.to_string(),
    }
}

fn kernel_json(info: &OpInfo) -> Value {
    let kernel = |kernel: &kernels::Kernel| json!({ "family": kernel.family, "in_place": kernel.in_place, "view": kernel.family == "view" });
    kernels::find(info.name).map_or(Value::Null, kernel)
}

/// The element types of each reduction.
fn reductions_json() -> Value {
    let types = |reduce: Reduce| {
        Dtype::ALL.into_iter().filter(|dtype| reduce.takes(*dtype)).map(Dtype::name).collect::<Vec<_>>()
    };
    Reduce::ALL.into_iter().map(|reduce| (reduce.name().to_string(), json!(types(reduce)))).collect()
}

fn op_json(kind: &str, info: &OpInfo) -> Value {
    let attr = |attr: &consort_ir::ops::AttrSpec| json!({ "name": attr.name, "kind": attr.kind, "doc": words(attr.doc) });
    let rule = |(rule, text): (String, String)| json!({ "rule": rule, "text": text });
    json!({
        "name": info.name,
        "kind": kind,
        "args": info.args,
        "variadic": info.variadic,
        "attrs": info.attrs.iter().map(attr).collect::<Vec<_>>(),
        "doc": paragraphs(info).join("\n\n"),
        "constraints": info.constraints().into_iter().map(rule).collect::<Vec<_>>(),
        "example": info.example,
        "kernel": kernel_json(info),
        "gradient": Example::of(info).map(|example| example.gradient()),
        "reductions": if reduces(info) { reductions_json() } else { Value::Null },
    })
}

/// An op in its example.
struct Example {
    program: Program,
    func: usize,
    node: usize,
}

impl Example {
    fn of(info: &OpInfo) -> Option<Example> {
        let program = parse(info.example, &OpTable::built_in()).ok()?.program;
        // An example may also contain other ops.
        let uses = |node: &Node| node.op.info().name == info.name;
        let (func, node) = program
            .funcs
            .iter()
            .enumerate()
            .find_map(|(i, func)| Some((i, func.body.nodes.iter().position(uses)?)))?;
        Some(Example { program, func, node })
    }

    fn func(&self) -> &Func {
        &self.program.funcs[self.func]
    }

    fn node(&self) -> &Node {
        &self.func().body.nodes[self.node]
    }

    fn arg_types(&self) -> Vec<Type> {
        self.node().args.iter().filter_map(|value| self.func().ty(*value).cloned()).collect()
    }

    fn cost(&self) -> String {
        let results: Vec<Type> =
            self.node().results.iter().filter_map(|value| self.func().ty(*value).cloned()).collect();
        let mesh = &self.program.mesh;
        let cost = self.node().op.cost(&CostCx { mesh, args: &self.arg_types(), results: &results });
        format!(
            "{} flops, {} bytes of memory, {} bytes received, on each rank of the example",
            cost.flops.display(mesh),
            cost.bytes.display(mesh),
            cost.wire.display(mesh)
        )
    }

    fn gradient(&self) -> String {
        gradient_words(&self.program.mesh, &self.node().op, &self.arg_types())
    }

    fn expansion(&self) -> String {
        match expand(&self.program.mesh, &*self.node().op, &self.arg_types()) {
            None => "none".to_string(),
            Some(Err(failure)) => failure.headline().to_string(),
            Some(Ok(func)) => {
                func.body.nodes.iter().map(|node| node.op.info().name).collect::<Vec<_>>().join(", ")
            }
        }
    }
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Writes a text beside a label, wrapped at words and indented to its column.
fn write_beside(out: &mut String, label: &str, text: &str) {
    let indent = label.chars().count();
    let mut line = label.to_string();
    let mut length = indent;
    for word in text.split_whitespace() {
        let width = word.chars().count();
        if length > indent && length + 1 + width > WIDTH {
            let _ = writeln!(out, "{line}");
            (line, length) = (" ".repeat(indent), indent);
        }
        if length > indent {
            line.push(' ');
            length += 1;
        }
        line.push_str(word);
        length += width;
    }
    let _ = writeln!(out, "{}", line.trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_line_is_wider_than_the_page() {
        let pages = BUILT_IN.iter().flat_map(|(kind, rows)| rows.iter().map(|info| page(kind, info)));
        // Examples are not wrapped.
        let texts = pages.map(|page| page.split("\nExample\n").next().unwrap_or_default().to_string());
        for line in texts.chain([table()]).collect::<Vec<_>>().iter().flat_map(|text| text.lines()) {
            assert!(line.chars().count() <= WIDTH && line == line.trim_end(), "{line}");
        }
    }

    #[test]
    fn kernels_are_named() {
        let named = |name: &str| kernel_words(find(name).unwrap().1);
        assert_eq!(named("update_slice"), "movement, in place");
        assert_eq!(named("concat"), "movement");
        assert_eq!(named("permute"), "none where the result is a view, else a copy");
        assert_eq!(named("all_reduce_start"), "none");
        let (_, gather) = find("gather").unwrap();
        assert_eq!(kernel_json(gather), json!({ "family": "lookup", "in_place": false, "view": false }));
        assert_eq!(kernel_json(find("wait").unwrap().1), Value::Null);
    }

    #[test]
    fn reductions_say_which_element_types_they_take() {
        let (kind, all_reduce) = find("all_reduce_start").unwrap();
        let page = page(kind, all_reduce);
        assert!(
            page.contains(
                "\n  avg         the sum over the number of members\n              takes f32 f64 f16 bf16\n"
            ),
            "{page}"
        );
        let json = op_json(kind, all_reduce);
        assert_eq!(json["reductions"]["xor"], json!(["i32", "i64", "u8", "bool"]));
        assert_eq!(json["reductions"]["sum"].as_array().map(Vec::len), Some(Dtype::ALL.len()));
        let (kind, gather) = find("all_gather_start").unwrap();
        assert!(op_json(kind, gather)["reductions"].is_null());
    }

    #[test]
    fn text_stays_in_its_column() {
        let mut out = String::new();
        write_beside(&mut out, "  C1  ", &"four ".repeat(20));
        let expected = format!("  C1  {}\n      four\n", ["four"; 19].join(" "));
        assert_eq!(out, expected);
    }

    #[test]
    fn every_op_has_an_example_that_says_what_it_costs() {
        for (_, rows) in BUILT_IN {
            for info in *rows {
                assert!(Example::of(info).is_some(), "{}", info.name);
            }
        }
        let (_, softmax) = find("softmax").unwrap();
        let example = Example::of(softmax).unwrap();
        assert_eq!(
            example.cost(),
            "20 flops, 32 bytes of memory, 0 bytes received, on each rank of the example"
        );
        assert_eq!(example.expansion(), "max, broadcast, sub, exp, sum, broadcast, div");
    }
}
