//! Checks the rules of the workspace: crate edges, how a source begins, forbidden words, file names, links of pages.
//!
//! One test walks the tree and lists every violation at once, so that a large change can be fixed in one pass.
//! Sources are read line by line, which is enough for formatted code and needs no parser; cargo reads
//! the manifests. Forbidden words are spelled with a `~` here, which `word` removes, because this file is
//! checked like any other.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Which crates of the workspace each one may use. Dependencies go one way: an edge that is not here is a
/// change of the architecture, not a line in a manifest.
const EDGES: [(&str, &[&str]); 12] = [
    ("types", &[]),
    ("ir", &["types"]),
    ("oracle", &["types", "ir"]),
    ("passes", &["types", "ir"]),
    ("comm", &["types"]),
    ("runtime", &["types", "ir", "comm"]),
    ("report", &[]),
    ("filetests", &["types", "ir", "oracle", "passes", "runtime"]),
    ("derive", &[]),
    ("consort", &["types", "ir", "passes", "comm", "runtime", "report", "derive"]),
    ("examples", &["consort"]),
    (
        "cli",
        &["types", "ir", "oracle", "passes", "comm", "runtime", "report", "filetests", "consort", "examples"],
    ),
];

/// The crates that the tests of every other crate may use.
const FOR_TESTS: [&str; 2] = ["oracle", "filetests"];

/// The files that may contain unsafe code.
const UNSAFE_FILES: [&str; 17] = [
    "crates/comm/src/exit.rs",
    "crates/comm/src/mpi/calls.rs",
    "crates/comm/src/mpi/comm.rs",
    "crates/comm/src/mpi/flight.rs",
    "crates/comm/src/mpi/library.rs",
    "crates/comm/src/mpi/span.rs",
    "crates/comm/src/mpi/user_ops.rs",
    "crates/comm/src/shm/fixed.rs",
    "crates/comm/src/shm/segment.rs",
    "crates/comm/src/shm/segment/model.rs",
    "crates/comm/src/shm/buffer.rs",
    "crates/comm/src/shm/members.rs",
    "crates/comm/src/shm/common_result.rs",
    "crates/comm/src/ticks.rs",
    "crates/comm/src/shm/probe.rs",
    "crates/runtime/src/kernels/gemm.rs",
    "crates/runtime/src/kernels/isa.rs",
];

/// The files that are tables, and so may be long.
const TABLES: [&str; 0] = [];

const MAX_LINES: usize = 800;

/// Names that say nothing about a file's contents.
const VAGUE_NAMES: [&str; 6] = ["utils.rs", "common.rs", "helpers.rs", "misc.rs", "base.rs", "manager.rs"];

/// A forbidden word, from a spelling that does not contain it.
fn word(spelling: &str) -> String {
    spelling.replace('~', "")
}

/// The files under a folder, as paths from the root with `/`; empty if there is no such folder.
fn files_under(root: &Path, folder: &str) -> Vec<String> {
    let mut files = Vec::new();
    for entry in fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
        let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files.extend(files_under(root, &path));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// A dependency, and whether only tests have it.
type Dependency = (String, bool);

/// The packages of the workspace, as cargo reads their manifests.
fn packages(root: &Path) -> Vec<Value> {
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let output = Command::new(env!("CARGO")).args(arguments).current_dir(root).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// What a registry asks of a package: a description, how to find it, and a version for each path.
fn check_package(package: &Value) -> Vec<String> {
    let name = package["name"].as_str().unwrap_or_default();
    let text = |key: &str| package[key].as_str().is_some_and(|text| !text.is_empty());
    let list = |key: &str| package[key].as_array().is_some_and(|list| (1..=5).contains(&list.len()));
    let texts = ["description", "license", "rust_version", "readme"].into_iter().filter(|key| !text(key));
    let lists = ["keywords", "categories"].into_iter().filter(|key| !list(key));
    let mut offences: Vec<String> =
        texts.chain(lists).map(|key| format!("{name}: its manifest has no {key}")).collect();
    let dependencies = package["dependencies"].as_array().into_iter().flatten();
    for dependency in dependencies.filter(|each| each["path"].is_string() && each["req"] == "*") {
        offences.push(format!("{name}: {} has a path and no version", dependency["name"]));
    }
    offences
}

/// The folder of each crate of the workspace, and all dependencies of the crate.
fn manifests(packages: &[Value]) -> Vec<(String, Vec<Dependency>)> {
    let read = |package: &Value| {
        let folder = Path::new(package["manifest_path"].as_str()?).parent()?.file_name()?.to_str()?;
        let dependencies = package["dependencies"].as_array()?.iter();
        let read = |each: &Value| Some((each["name"].as_str()?.to_string(), each["kind"] == "dev"));
        Some((folder.to_string(), dependencies.map(read).collect::<Option<Vec<_>>>()?))
    };
    packages.iter().map(|package| read(package).unwrap()).collect()
}

/// The folder under `crates/` of a crate of the workspace; `None` for an external crate.
fn workspace_crate(name: &str) -> Option<&str> {
    if name == "consort" { Some(name) } else { name.strip_prefix("consort-") }
}

fn check_edges(folder: &str, dependencies: &[Dependency]) -> Vec<String> {
    let Some((_, allowed)) = EDGES.iter().find(|(from, _)| *from == folder) else {
        return vec![format!("crates/{folder}: not in tidy's table of edges")];
    };
    let mut offences = Vec::new();
    for (name, dev) in dependencies {
        if let Some(to) = workspace_crate(name)
            && !allowed.contains(&to)
            && !(*dev && FOR_TESTS.contains(&to))
        {
            offences.push(format!("crates/{folder}/Cargo.toml: {folder} may not depend on {to}"));
        }
    }
    offences
}

fn check_source(path: &str, text: &str) -> Vec<String> {
    let mut offences = Vec::new();
    if VAGUE_NAMES.iter().any(|name| path.ends_with(&format!("/{name}"))) {
        offences.push(format!("{path}: name the file after what it holds"));
    }
    if !text.starts_with("//!") {
        offences.push(format!("{path}: the first line must be `//!` and say what the file is for"));
    }
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() > MAX_LINES && !TABLES.contains(&path) {
        offences.push(format!("{path}: {} lines, of {MAX_LINES} at most", lines.len()));
    }
    let mut in_tests = path.contains("/tests/") || path.ends_with("/tests.rs");
    for (i, line) in lines.iter().enumerate() {
        let mut offend = |what: String| offences.push(format!("{path}:{}: {what}", i + 1));
        let code = line.split("//").next().unwrap_or("");
        in_tests |= code.trim() == "mod tests {";
        for unfinished in ["TO~DO", "FIX~ME", "to~do!(", "#[ig~nore"].map(word) {
            if line.contains(&unfinished) {
                offend(format!("`{unfinished}`: finish it, or leave it out"));
            }
        }
        for hashed in ["Hash~Map", "Hash~Set"].map(word) {
            if !in_tests && code.contains(&hashed) {
                offend(format!("`{hashed}` has no fixed order: use a BTreeMap or a BTreeSet"));
            }
        }
        let unchecked =
            ["un~safe {", "un~safe fn", "un~safe impl", "un~safe trait", "un~safe extern"].map(word);
        if unchecked.iter().any(|word| code.contains(word)) {
            if !UNSAFE_FILES.contains(&path) {
                offend("unsafe code outside the files that tidy lists".to_string());
            }
            // The docs of an unsafe function state what its callers must ensure.
            let argued = |above: &&str| above.contains("SAFETY:") || above.contains("/// # Safety");
            if !lines[i.saturating_sub(3)..i].iter().any(argued) {
                offend("unsafe code without `SAFETY:` in the three lines above".to_string());
            }
        }
    }
    offences
}

/// The crates that have a row in the table of dependencies: the first word of each row.
fn documented(table: &str) -> BTreeSet<&str> {
    let cells = table.lines().filter_map(|line| line.strip_prefix('|')?.split('|').next());
    cells.filter_map(|cell| cell.trim().trim_matches('`').split(' ').next()).collect()
}

/// The rows of the specification that a source names: `fn b5_..`, `SPEC B5`.
fn rows(text: &str) -> BTreeSet<String> {
    let words =
        text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
    let pairs = words.clone().zip(words.skip(1));
    let row = |(before, word): (&str, &str)| {
        let row = match before {
            "fn" => word.split_once('_')?.0.to_ascii_uppercase(),
            "SPEC" => word.to_string(),
            _ => return None,
        };
        let number = row.strip_prefix(|letter: char| ('A'..='F').contains(&letter))?;
        number.parse::<u32>().ok().map(|_| row)
    };
    pairs.filter_map(row).collect()
}

/// Links of a page that lead to no file of the tree. Web addresses and places within a page are not followed.
fn broken_links(root: &Path, page: &str, text: &str) -> Vec<String> {
    let folder = Path::new(page).parent().unwrap();
    let prose = text.split("```").step_by(2);
    let links = prose.flat_map(|part| part.split("](").skip(1)).filter_map(|rest| rest.split(')').next());
    let paths = links.filter(|link| !link.contains("://") && !link.starts_with('#'));
    let broken = paths.filter(|link| !root.join(folder).join(link.split('#').next().unwrap()).exists());
    broken.map(|link| format!("{page}: the link {link} leads nowhere")).collect()
}

/// The first line in a fenced block that runs the tests.
fn test_command(readme: &str) -> Option<&str> {
    let blocks = readme.split("```").skip(1).step_by(2);
    blocks.flat_map(str::lines).map(str::trim).find(|line| line.starts_with("cargo test"))
}

#[test]
fn the_workspace_keeps_its_rules() {
    let root = &Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut offences = Vec::new();
    let mut unreadable = Vec::new();
    let mut read = |path: &str| {
        let text = fs::read_to_string(root.join(path));
        text.unwrap_or_else(|error| {
            unreadable.push(format!("{path}: {error}"));
            String::new()
        })
    };

    let spec = read("docs/spec.md");
    let specified = documented(&spec);
    for path in ["crates", "benches", "examples"].iter().flat_map(|folder| files_under(root, folder)) {
        if path.ends_with(".rs") {
            let text = read(&path);
            offences.extend(check_source(&path, &text));
            let named = if path.contains("/tests/") { rows(&text) } else { BTreeSet::new() };
            let unknown = named.into_iter().filter(|row| !specified.contains(row.as_str()));
            offences.extend(unknown.map(|row| format!("{path}: docs/spec.md has no row {row}")));
        }
    }

    let packages = packages(root);
    offences.extend(packages.iter().flat_map(check_package));
    let manifests = manifests(&packages);
    offences.extend(manifests.iter().flat_map(|(folder, dependencies)| check_edges(folder, dependencies)));
    let table = read("docs/dependencies.md");
    let documented = documented(&table);
    let used: BTreeSet<&str> =
        manifests.iter().flat_map(|(_, dependencies)| dependencies).map(|(name, _)| name.as_str()).collect();
    for name in used.iter().filter(|name| workspace_crate(name).is_none() && !documented.contains(*name)) {
        offences.push(format!("docs/dependencies.md: no row for {name}"));
    }
    for path in files_under(root, "filetests").iter().filter(|path| !path.ends_with(".csr")) {
        offences.push(format!("{path}: a filetest's name ends in .csr"));
    }
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(str::to_string);
    for page in
        top.into_iter().chain(files_under(root, "docs").into_iter().filter(|path| path.ends_with(".md")))
    {
        offences.extend(broken_links(root, &page, &read(&page)));
    }
    let (readme, ci) = (read("README.md"), read(".ci/run"));
    match test_command(&readme) {
        None => {
            offences.push("README.md: no fenced block has a line that starts with `cargo test`".to_string())
        }
        Some(command) if ci.lines().all(|line| line.trim() != command) => {
            offences.push(format!(".ci/run: does not run the README's `{command}`"));
        }
        Some(_) => {}
    }
    offences.extend(unreadable);
    assert!(offences.is_empty(), "{} offences:\n{}", offences.len(), offences.join("\n"));
}

#[test]
fn tidy_sees_each_offence_in_a_source() {
    let text = word(
        "fn f() { un~safe { g() } }\n// SAFETY: none\n\nun~safe impl Send for X {}\n// TO~DO\nuse Hash~Map;\n",
    );
    let text = text + &word("// Hash~Map\n    mod tests {\nuse Hash~Set;\n#[ig~nore]\n") + &"\n".repeat(800);
    let offences = check_source("crates/ir/src/utils.rs", &text);
    let offences: Vec<&str> = offences.iter().map(|o| &o["crates/ir/src/utils.rs:".len()..]).collect();
    let expected = [
        " name the file after what it holds",
        " the first line must be `//!` and say what the file is for",
        " 810 lines, of 800 at most",
        "1: unsafe code outside the files that tidy lists",
        "1: unsafe code without `SAFETY:` in the three lines above",
        "4: unsafe code outside the files that tidy lists",
        &word("5: `TO~DO`: finish it, or leave it out"),
        &word("6: `Hash~Map` has no fixed order: use a BTreeMap or a BTreeSet"),
        &word("10: `#[ig~nore`: finish it, or leave it out"),
    ];
    assert_eq!(offences, expected);
    assert!(check_source("crates/ir/src/mesh.rs", "//! The mesh.\n").is_empty());
}

#[test]
fn tidy_sees_links_that_lead_nowhere() {
    let root = &Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text =
        "[a](spec.md) [b](../README.md#not-yet) [c](https://example.org) [d](no.md)\n```\n[e](f.md)\n```\n";
    assert_eq!(broken_links(root, "docs/ops.md", text), ["docs/ops.md: the link no.md leads nowhere"]);
}

#[test]
fn tidy_sees_what_a_package_lacks() {
    let package = serde_json::json!({
        "name": "x", "description": "", "license": "MIT", "rust_version": "1.95", "keywords": [], "categories": ["science"],
        "dependencies": [{ "name": "y", "path": "/y", "req": "*" }, { "name": "z", "req": "*" }],
    });
    let lacks = |key| format!("x: its manifest has no {key}");
    let path = "x: \"y\" has a path and no version".to_string();
    assert_eq!(check_package(&package), [lacks("description"), lacks("readme"), lacks("keywords"), path]);
}

#[test]
fn tidy_sees_each_wrong_edge() {
    let dependencies = [
        ("half", false),
        ("consort-ir", false),
        ("consort-cli", false),
        ("consort-oracle", true),
        ("consort", true),
    ]
    .map(|(name, dev)| (name.to_string(), dev));
    let may_not = |to| format!("crates/passes/Cargo.toml: passes may not depend on {to}");
    assert_eq!(check_edges("passes", &dependencies), [may_not("cli"), may_not("consort")]);
    assert_eq!(check_edges("extra", &[]), ["crates/extra: not in tidy's table of edges"]);
}
