//! `docs/ops.md`, written from the definitions.

use std::fmt::Write;

use super::{BUILT_IN, OpInfo};

/// The reference of all built-in ops as Markdown. A test of `cli` fails if the file in `docs/` differs. Kernels are not
/// known here, so `kernel` describes them.
pub fn ops_markdown(kernel: &dyn Fn(&OpInfo) -> String) -> String {
    let mut out = String::from(
        "# Ops\n\n\
         Written from the definitions in `crates/ir/src/ops`; `CONSORT_BLESS=1 cargo test --workspace` writes it anew.\n\
         Each example is a program that the tests run. The grammar is in [ir.md](ir.md).\n\n\
         Constraints are numbered, and errors cite the number. Pure ops differ between ranks wherever an operand\n\
         or an attribute does. Costs count arithmetic once per operation, every operand read and every result\n\
         written once, and as wire bytes what one rank must receive.\n\n\
         A kernel is named by its family (the file of `crates/runtime/src/kernels` that it is in) and by whether it may\n\
         write over an operand; `view` needs none where no element must move, and `-` has none.\n",
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
    out
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
