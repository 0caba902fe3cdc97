//! What the cases under `filetests/` must cover together.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::path::Path;

use consort_filetests::cases;
use consort_ir::ops::{BUILT_IN, OpTable};
use consort_ir::text::parse;
use consort_ir::verify::{hazards, verify};

fn texts() -> Vec<String> {
    let paths = cases(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../filetests"))).unwrap();
    paths.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

/// The rules that the cases break on purpose: `(op or empty, rule)`.
fn broken_rules() -> Vec<(String, String)> {
    let ops = OpTable::built_in();
    let mut broken = Vec::new();
    for text in texts() {
        let Ok(parsed) = parse(&text, &ops) else { continue };
        let mut errors = verify(&parsed.program);
        if errors.is_empty() {
            errors.extend(parsed.program.funcs.iter().flat_map(|func| hazards(&parsed.program.mesh, func)));
        }
        for error in errors {
            // An error may name a part of its op, as in `slice: dimension 0`.
            let op = error.failure.op.split(": ").next().unwrap_or_default();
            broken.push((op.to_string(), error.failure.rule.to_string()));
        }
    }
    broken
}

#[test]
fn every_constraint_and_every_invariant_has_a_case() {
    let broken = broken_rules();
    let ran: String = texts().into_iter().filter(|text| text.contains("; test: oracle")).collect();
    let mut missing = Vec::new();
    for info in BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()) {
        for (rule, text) in info.constraints() {
            // Checked when messages match, not by the verifier: a run line shows it.
            let at_run = ran.contains(&format!("({rule})")) && text.contains("checked when they match");
            if !at_run && !broken.iter().any(|(op, r)| op == info.name && *r == rule) {
                missing.push(format!("{}: filetests: no case breaks ({rule}) {text}", info.name));
            }
        }
    }
    // V4 cannot be written down: the parser knows no axis that the mesh lacks. `ir/tests/in_memory.rs` breaks it.
    let invariants = ["V1", "V2", "V3", "V5", "V6", "V7", "V8", "V9", "V10", "V11", "P1", "P2", "P3", "P4"];
    let hazards = (1..=10).map(|number| format!("H{number}"));
    for rule in invariants.into_iter().map(str::to_string).chain(hazards) {
        if !broken.iter().any(|(_, r)| *r == rule) {
            missing.push(format!("no case breaks {rule}"));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}
