//! The report of a demo, as text.

use std::fmt::Write;

use serde_json::Value;

use super::Which;
use crate::bench::size;

fn about(which: Which) -> [&'static str; 3] {
    match which {
        Which::Tp => [
            "a Llama-shaped model generates tokens, tensor parallel: its weights are sharded",
            "crates/examples/src/tp.rs and docs/tensor-parallel.md",
            "consort demo ring",
        ],
        Which::Ring => [
            "ring attention: causal attention over a sharded sequence; keys and values travel around the ring",
            "crates/examples/src/ring_attention.rs",
            "consort demo halo",
        ],
        Which::Halo => [
            "a five-point stencil on a sharded grid; halos are received in the grid itself",
            "crates/examples/src/halo.rs and docs/messages.md",
            "consort demo conv",
        ],
        Which::Conv => {
            ["a convolution of an image sharded by rows", "crates/examples/src/conv.rs", "consort demo moe"]
        }
        Which::Moe => [
            "a mixture of experts, one per rank; tokens go where a router sends them, and back",
            "crates/examples/src/moe.rs",
            "consort demo train",
        ],
        Which::Train => ["a model learns a text", "crates/cli/src/demo/train_rank.rs", "consort demo tp"],
    }
}

/// A table, the causes of graph breaks, and what to try next.
pub(super) fn text(which: Which, ranks: usize, found: &[Value]) -> String {
    let [title, source, next] = about(which);
    let number = |value: &Value, key: &str| value[key].as_f64();
    let first = &found[0];
    let (difference, allowed) =
        (number(first, "difference").unwrap_or(f64::INFINITY), number(first, "allowed"));
    let agree = allowed.is_some_and(|allowed| difference <= allowed);
    let who = if ranks == 1 { "1 rank, alone".to_string() } else { format!("{ranks} ranks, each a process") };
    let mut text = format!("{}: {title}\n{who}\n\n", which.name());
    let _ = match (which, agree) {
        (Which::Tp, true) => writeln!(text, "  ok      all modes generate the same tokens as a single rank"),
        (Which::Tp, false) => {
            writeln!(text, "  WRONG   {difference} tokens differ from those of a single rank")
        }
        (_, true) => writeln!(text, "  ok      all modes match a single rank within {difference:.1e}"),
        (_, false) => writeln!(text, "  WRONG   a mode differs from a single rank by {difference:.1e}"),
    };
    let per_second = |value: &Value| number(value, "per_second").unwrap_or(f64::NAN);
    let best = found.iter().map(per_second).fold(0.0, f64::max);
    let unit = first["unit"].as_str().unwrap_or("");
    let _ = writeln!(text, "\n  {:<8}{:>14} {:>7}  graphs  breaks     copied", "", format!("{unit}/s"), "");
    for value in found {
        let count = |key: &str| value[key].as_u64().map_or("-".to_string(), |count| count.to_string());
        let _ = writeln!(
            text,
            "  {:<8}{:>14.1} {:>6.2}x  {:>6}  {:>6}  {:>9}  {}",
            value["mode"].as_str().unwrap_or(""),
            per_second(value),
            per_second(value) / per_second(first),
            count("graphs"),
            count("breaks"),
            value["copied_bytes"].as_u64().map_or("-".to_string(), |bytes| size(bytes as usize)),
            "█".repeat((20.0 * per_second(value) / best).round().clamp(0.0, 20.0) as usize),
        );
    }
    let _ = writeln!(text, "\n  graphs, breaks and bytes copied for communication are per step.");
    for value in found {
        let mode = value["mode"].as_str().unwrap_or("");
        if mode == "traced" && (value["breaks"] != 0 || value["new_graphs"] != 0) {
            let _ = writeln!(text, "\n  WRONG   compiled mode needed more than one graph");
        }
        let lines = value["break_lines"].as_array().map_or(&[][..], Vec::as_slice);
        if !lines.is_empty() {
            let _ = writeln!(text, "\n  breaks of {mode}:");
            lines.iter().filter_map(Value::as_str).for_each(|line| {
                let _ = writeln!(text, "    {line}");
            });
        }
    }
    let _ = write!(
        text,
        "\n  the program: {source}\n  its plan:    CONSORT_LOG=plan consort demo {} (on the standard error)\n  next:        {next}\n",
        which.name()
    );
    text
}
