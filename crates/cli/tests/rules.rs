//! Every rule code that an error prints is described where it is checked and in docs/ir.md, and every code described is
//! printed. The table in docs/ir.md is written from the descriptions.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use consort_filetests::check_file;

/// The files whose first lines describe rules: `//! - **V1** ..`.
const DESCRIBED: [&str; 3] =
    ["crates/ir/src/verify/mod.rs", "crates/ir/src/verify/hazards/mod.rs", "crates/ir/src/joint/mod.rs"];

fn path(relative: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(relative)
}

/// A letter and a number: a rule of the verifier (V), of plans (P), a hazard (H), or of the joint check (J).
fn is_rule(word: &str) -> bool {
    let is_number = |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
    word.strip_prefix(['V', 'P', 'H', 'J']).is_some_and(is_number)
}

/// The rules that files describe, with their sentences.
fn described() -> Vec<(String, String)> {
    let mut rules: Vec<(String, String)> = Vec::new();
    for file in DESCRIBED {
        let text = fs::read_to_string(path(file)).unwrap();
        let mut is_open = false;
        for line in text.lines().map_while(|line| line.strip_prefix("//!")) {
            if let Some((rule, sentence)) = line.strip_prefix(" - **").and_then(|rest| rest.split_once("** "))
            {
                rules.push((rule.to_string(), sentence.to_string()));
                is_open = true;
            } else if let (true, Some(more)) = (is_open, line.strip_prefix("   ")) {
                let (_, sentence) = rules.last_mut().unwrap();
                sentence.push_str(&format!(" {more}"));
            } else {
                is_open = false;
            }
        }
    }
    // Links are those of the source.
    for (_, sentence) in &mut rules {
        *sentence = sentence.replace("[`crate::storage::", "`").replace("`]", "`");
    }
    rules
}

/// The rules that code names as `"V1"`.
fn named(folder: &Path, rules: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            named(&path, rules);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            rules.extend(text.split('"').filter(|word| is_rule(word)).map(String::from));
        }
    }
}

#[test]
fn every_rule_is_printed_and_described() {
    let mut printed = BTreeSet::new();
    for entry in fs::read_dir(path("crates")).unwrap().map(Result::unwrap) {
        let sources = entry.path().join("src");
        if sources.is_dir() {
            named(&sources, &mut printed);
        }
    }
    let rules = described();
    let described: BTreeSet<String> = rules.iter().map(|(rule, _)| rule.clone()).collect();
    assert_eq!(described.len(), rules.len(), "a rule is described twice");
    assert_eq!(printed, described, "left: the rules that code names; right: those that are described");
}

#[test]
fn the_table_of_rules_is_fresh() {
    let rows: String =
        described().iter().map(|(rule, sentence)| format!("| {rule} | {sentence} |\n")).collect();
    let (begin, end) = ("<!-- rules: begin -->\n", "<!-- rules: end -->");
    let page = fs::read_to_string(path("docs/ir.md")).unwrap();
    let (before, rest) = page.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    let table = format!("\n| rule | must hold |\n| --- | --- |\n{rows}\n");
    check_file(path("docs/ir.md"), &format!("{before}{begin}{table}{end}{after}"));
}
