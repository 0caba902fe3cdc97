//! `docs/ops.md`, written from the definitions.

use std::fmt::Write;

use consort_types::{Dtype, Reduce};

use super::{BUILT_IN, OpInfo};
use crate::tolerance::{Tolerance, of_runs, ulp};

/// The reference of all built-in ops as Markdown. A test of `cli` fails if the file in `docs/` differs. Kernels are not
/// known here, so `kernel` describes them.
pub fn ops_markdown(kernel: &dyn Fn(&OpInfo) -> String) -> String {
    let mut out = String::from(
        "# Ops\n\n\
         Generated from the definitions in `crates/ir/src/ops` by `CONSORT_BLESS=1 cargo test --workspace`.\n\
         Each example is a program that the tests run. The grammar is in [ir.md](ir.md).\n\n\
         Constraints are numbered, and errors cite the number. Pure ops differ between ranks wherever an operand\n\
         or an attribute does. Costs count arithmetic once per operation, every operand read and every result\n\
         written once, and as wire bytes what one rank must receive.\n\n\
         A kernel is named by its family (its file in `crates/runtime/src/kernels`) and by whether it may run in place,\n\
         over an operand; `view` needs a kernel only if the result cannot be a view, and `-` has none.\n",
    );
    for (kind, rows) in BUILT_IN {
        let _ = write!(out, "\n- {kind}: ");
        let names: Vec<String> = rows.iter().map(|info| format!("[`{0}`](#{0})", info.name)).collect();
        out.push_str(&names.join(", "));
    }
    out.push('\n');
    for (kind, rows) in BUILT_IN {
        let _ = write!(out, "\n## {kind}\n");
        rows.iter().for_each(|info| op(&mut out, info, &kernel(info)));
    }
    let _ = write!(
        out,
        "\n## Reductions\n\nWhich element types the reductions of collectives take.\n\n{}",
        reductions_markdown()
    );
    tolerances(&mut out);
    out
}

/// The reductions and the element types for which they are defined, as a table. Tests of `cli` fail if a page that
/// shows it differs.
pub fn reductions_markdown() -> String {
    let mut out = String::from("| reduction | element types | gives |\n| --- | --- | --- |\n");
    for reduce in Reduce::ALL {
        let _ = writeln!(out, "| `{}` | {} | {} |", reduce.name(), reduce.dtypes(), reduce.summary());
    }
    out
}

/// The ops whose kernels need not give the bits of the definition.
fn tolerances(out: &mut String) {
    out.push_str(
        "\n## Tolerances\n\n\
         How far a kernel may be from its op's definition. All other ops, and all types but floats, are bit-identical.\n\
         A rounding is half a unit in the last place of 1, in the type in which the kernel adds.\n\n",
    );
    let steps = |dtype| of_runs(dtype) / ulp(dtype, 1.0);
    let _ = write!(
        out,
        "Two runs of one program, compiled and eager or on many ranks and on one, may differ by {} ulp of the largest\n\
         element of a result, or of 1 if that is larger; f16 and bf16 by {}.\n\n\
         | op | may be off by |\n| --- | --- |\n",
        steps(Dtype::F32),
        steps(Dtype::F16),
    );
    for info in BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()) {
        let tolerance = info.example_op().map_or(Tolerance::Bits, |op| op.tolerance());
        if tolerance != Tolerance::Bits {
            let _ = writeln!(out, "| [`{0}`](#{0}) | {tolerance} |", info.name);
        }
    }
}

fn op(out: &mut String, info: &OpInfo, kernel: &str) {
    let mut args = info.args.join(", ");
    if info.variadic {
        args.push_str("..");
    }
    let attrs: Vec<String> = info.attrs.iter().map(|attr| format!("{}=..", attr.name)).collect();
    let attrs = if attrs.is_empty() { String::new() } else { format!("[{}]", attrs.join(", ")) };
    let line = format!("{}{attrs} {args}", info.name);
    let _ = write!(out, "\n### {}\n\n`{}`\n", info.name, line.trim_end());
    for paragraph in info.doc.split("\n\n") {
        let text = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
        match text.strip_prefix('(').and_then(|rest| rest.split_once(") ")) {
            Some((rule, text)) if rule.starts_with('C') => {
                let _ = write!(out, "\n- **{rule}** {text}");
            }
            _ => {
                let _ = write!(out, "\n{text}\n");
            }
        }
    }
    if !out.ends_with('\n') {
        out.push('\n');
    }
    if !info.attrs.is_empty() {
        out.push_str("\n| attribute | takes | meaning |\n| --- | --- | --- |\n");
        for attr in info.attrs {
            let _ = writeln!(out, "| `{}` | {} | {} |", attr.name, attr.kind, attr.doc.trim());
        }
    }
    let _ = write!(out, "\nKernel: {kernel}\n\n```\n{}```\n", info.example);
}
