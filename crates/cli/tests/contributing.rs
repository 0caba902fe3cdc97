//! The pages under docs/contributing quote the tree: every block of code is in the file that the line above it names.
//! And every pass is in the places that its page lists.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::fs;
use std::path::{Path, PathBuf};

use consort_passes::PASSES;

const PAGES: [&str; 3] = ["add-a-kernel.md", "add-a-pass.md", "add-an-op.md"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The paths of the tree that a text names in backticks.
fn paths(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    let spans: Vec<&str> = text.split('`').skip(1).step_by(2).collect();
    let is_path = |span: &&str| {
        let top = ["crates/", "docs/", "filetests/"].iter().any(|top| span.starts_with(top));
        top && !span.contains([' ', '*']) && !span.contains("..")
    };
    spans.into_iter().filter(is_path)
}

#[test]
fn the_pages_quote_the_tree() {
    let mut offences = Vec::new();
    let mut quoted = 0;
    for page in PAGES {
        let text = fs::read_to_string(root().join("docs/contributing").join(page)).unwrap();
        let parts: Vec<&str> = text.split("```").collect();
        assert!(parts.len() % 2 == 1, "{page}: a block does not end");
        for pair in parts.chunks(2) {
            offences.extend(
                paths(pair[0])
                    .filter(|path| !root().join(path).exists())
                    .map(|path| format!("{page}: there is no {path}")),
            );
            let Some((kind @ ("rust" | "csr"), code)) = pair.get(1).and_then(|block| block.split_once('\n'))
            else {
                continue;
            };
            let above = pair[0].trim_end().rsplit("\n\n").next().unwrap();
            let Some(path) = paths(above).next_back().filter(|_| above.ends_with("`:")) else {
                offences.push(format!("{page}: no line above this {kind} names its file:\n{code}"));
                continue;
            };
            quoted += 1;
            if !fs::read_to_string(root().join(path)).unwrap_or_default().contains(code) {
                offences.push(format!("{page}: not in {path}:\n{code}"));
            }
        }
    }
    assert!(offences.is_empty(), "{}", offences.join("\n"));
    assert!(quoted >= 20, "only {quoted} blocks are quoted");
}

#[test]
fn every_pass_is_in_its_places() {
    let page = fs::read_to_string(root().join("docs/passes.md")).unwrap();
    let cases = fs::read_dir(root().join("filetests/passes")).unwrap();
    let cases: Vec<String> =
        cases.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    let mut forgotten = Vec::new();
    for name in PASSES.iter().map(|pass| pass.name) {
        if !root().join(format!("crates/passes/src/{name}.rs")).exists() {
            forgotten.push(format!("{name}: crates/passes/src/{name}.rs: the pass has no file of its own"));
        }
        let section = page.split("\n## ").find_map(|section| section.strip_prefix(&format!("{name}\n")));
        let needed = [format!("; test: opt {name}"), "\nNever:".to_string()];
        for text in needed.iter().filter(|text| !section.is_some_and(|section| section.contains(*text))) {
            forgotten.push(format!("{name}: docs/passes.md: no section `{name}` with `{}`", text.trim()));
        }
        for verb in ["", "leaves-"] {
            let start = format!("{name}-{verb}");
            if !cases.iter().any(|case| case.starts_with(&start)) {
                forgotten.push(format!("{name}: filetests/passes: no case `{start}..`"));
            }
        }
    }
    assert!(forgotten.is_empty(), "forgotten places:\n{}", forgotten.join("\n"));
}
