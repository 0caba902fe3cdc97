//! docs/operating.md shows messages of failures: each of them must occur in the code.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.extension().and_then(|extension| extension.to_str()) {
            None if path.is_dir() => sources(&path, found),
            // Joins string literals that continue on the next line.
            Some("rs") => found.push_str(&fs::read_to_string(&path).unwrap().replace("\\\n", "")),
            _ => {}
        }
    }
}

#[test]
fn d12_every_failure_is_one_that_the_code_writes() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let guide = fs::read_to_string(root.join("docs/operating.md")).unwrap();
    let table = guide.split("## What failures look like").nth(1).unwrap();
    let mut code = String::new();
    for part in ["crates/comm/src", "crates/consort/src", "crates/ir/src"] {
        sources(&root.join(part), &mut code);
    }
    let mut n = 0;
    for row in table.lines().filter(|row| row.starts_with("| `")) {
        let first = row.split(" | ").next().unwrap();
        for text in first.split('`').skip(1).step_by(2) {
            // The text from `must be the same` on is constant.
            let written = text.find("must be the same").map_or(text, |at| &text[at..]);
            let is_written = |line: &str| written.split("..").all(|part| line.contains(part));
            assert!(code.lines().any(is_written), "nothing writes `{text}`");
            n += 1;
        }
    }
    assert!(n >= 10, "{n}");
}
