//! Every case under `filetests/`, and what the cases must cover together.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::path::Path;

use consort_filetests::{blessing, cases, run_case};
use consort_ir::ops::{BUILT_IN, OpTable};
use consort_ir::text::parse;
use consort_ir::verify::{hazards, verify};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../filetests");

fn texts() -> Vec<(String, String)> {
    let paths = cases(Path::new(FOLDER)).unwrap();
    let read = |path: &std::path::PathBuf| {
        let name = path.strip_prefix(FOLDER).unwrap().display().to_string();
        (name, std::fs::read_to_string(path).unwrap())
    };
    paths.iter().map(read).collect()
}

#[test]
fn all_cases() {
    let ops = OpTable::built_in();
    let mut failed = Vec::new();
    let texts = texts();
    for (name, text) in &texts {
        match run_case(text, &ops, blessing()) {
            Ok(None) => {}
            Ok(Some(blessed)) => std::fs::write(Path::new(FOLDER).join(name), blessed).unwrap(),
            Err(error) => failed.push(format!("{name}: {error}")),
        }
    }
    println!("{} cases", texts.len());
    assert!(failed.is_empty(), "{} of {} cases failed\n{}", failed.len(), texts.len(), failed.join("\n\n"));
}

/// The rules that the cases break on purpose: `(op or empty, rule)`.
fn broken_rules() -> Vec<(String, String)> {
    let ops = OpTable::built_in();
    let mut broken = Vec::new();
    for (_, text) in texts() {
        let Ok(parsed) = parse(&text, &ops) else { continue };
        let mut errors = verify(&parsed.program);
        if errors.is_empty() {
            errors.extend(parsed.program.funcs.iter().flat_map(|func| hazards(&parsed.program.mesh, func)));
        }
        for error in errors {
            let op = error.message.split(':').next().unwrap_or("").to_string();
            broken.push((op, error.rule));
        }
    }
    broken
}

#[test]
fn every_op_every_constraint_and_every_invariant_has_a_case() {
    let broken = broken_rules();
    let ran: String =
        texts().into_iter().filter(|(_, t)| t.contains("; test: oracle")).map(|(_, t)| t).collect();
    let mut missing = Vec::new();
    for info in BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()) {
        let word = |before: &str| {
            ran.contains(&format!("{before}{} ", info.name))
                || ran.contains(&format!("{before}{}[", info.name))
        };
        if !word("= ") && !word("    ") {
            missing.push(format!("{}: no oracle case", info.name));
        }
        for (rule, text) in info.constraints() {
            // Checked when messages meet, not by the verifier: a run line shows it.
            let at_run = ran.contains(&format!("({rule})")) && text.contains("checked as they meet");
            if !at_run && !broken.iter().any(|(op, r)| op == info.name && *r == rule) {
                missing.push(format!("{}: no case breaks ({rule}) {text}", info.name));
            }
        }
    }
    // V4 cannot be written as text: the parser rejects axes that the mesh lacks. `ir/tests/in_memory.rs` breaks it.
    let invariants = ["V1", "V2", "V3", "V5", "V6", "V7", "V8", "V9", "V10", "V11", "P1", "P2", "P3"];
    let hazards = (1..=10).map(|number| format!("H{number}"));
    for rule in invariants.into_iter().map(str::to_string).chain(hazards) {
        if !broken.iter().any(|(_, r)| *r == rule) {
            missing.push(format!("no case breaks {rule}"));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}
