//! An op is in five places: its definition, the list of ops, its kernel, its method, a filetest. This test names the
//! one that was forgotten. `docs/contributing/add-an-op.md` walks through them; everything else about an op (reference,
//! cases of tests, random programs, tolerance) follows from its definition.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use consort_ir::ops::{BUILT_IN, Effects, Flow, OpInfo, OpTable};
use consort_ir::program::Node;
use consort_ir::text::parse;
use consort_runtime::kernels::find;

/// All sources under a folder of the workspace, with their paths.
fn sources(folder: &str) -> Vec<(String, String)> {
    fn read(path: PathBuf, found: &mut Vec<(String, String)>) {
        if path.is_dir() {
            fs::read_dir(path).unwrap().for_each(|entry| read(entry.unwrap().path(), found));
        } else {
            found.push((path.display().to_string(), fs::read_to_string(&path).unwrap()));
        }
    }
    let mut found = Vec::new();
    read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder), &mut found);
    found.sort();
    found
}

/// The words of a text.
fn words(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// The ops that a source declares, as `Type("name")(x)` or as a row `Type("name") ..` of a macro.
fn declared(source: &str) -> Vec<(&str, &str)> {
    let declaration = |(at, _): (usize, &str)| {
        let (name, rest) = source[at + 2..].split_once("\")")?;
        let is_name = rest.starts_with(['(', ' '])
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        let ty = words(&source[..at]).next_back()?;
        let is_type = source[..at].ends_with(ty) && ty.starts_with(|c: char| c.is_ascii_uppercase());
        (is_name && is_type).then_some((ty, name))
    };
    source.match_indices("(\"").filter_map(declaration).collect()
}

/// Whether an op computes tensors on one rank, so that it needs a kernel. The executor itself handles all others:
/// communication, blocks and sizes.
fn computes(info: &OpInfo) -> bool {
    let program = parse(info.example, &OpTable::built_in()).unwrap().program;
    let func = &program.funcs[0];
    let node: &Node = func.body.nodes.iter().find(|node| node.op.info().name == info.name).unwrap();
    let tensors = node.results.iter().all(|result| func.ty(*result).unwrap().as_tensor().is_some());
    node.op.effects() == Effects::Pure && node.op.flow() == Flow::Straight && tensors
}

/// Whether programs have it and users do not call it: a tensor waits for itself and knows its sizes, gradients spread it,
/// begin again with it and take it back through attention, and `recompute` of a function keeps its result.
fn is_implicit(name: &str) -> bool {
    matches!(name, "wait" | "size_of" | "to_size" | "spread" | "keep" | "again" | "attention_backward")
}

#[test]
fn every_op_is_in_its_places() {
    let definitions = sources("crates/ir/src/ops");
    let declared: Vec<(&str, &str)> = definitions.iter().flat_map(|(_, text)| declared(text)).collect();
    let methods = sources("crates/consort/src");
    let called: BTreeSet<&str> = methods.iter().flat_map(|(_, text)| words(text)).collect();
    let filetests = sources("filetests").into_iter().map(|(_, text)| text);
    let run: String = filetests.filter(|text| text.contains("; test: oracle")).collect();
    // A node without results has its op first.
    let runs = |name: &str| {
        ["= ", "    "]
            .iter()
            .any(|before| [" ", "["].iter().any(|after| run.contains(&format!("{before}{name}{after}"))))
    };
    let infos: Vec<&OpInfo> = BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()).collect();
    assert!(
        declared.len() >= infos.len() && infos.len() >= 100,
        "{} ops, {} found",
        infos.len(),
        declared.len()
    );

    let mut forgotten = Vec::new();
    for (ty, name) in &declared {
        if infos.iter().all(|info| info.name != *name) {
            forgotten
                .push(format!("{name}: crates/ir/src/ops/mod.rs: no line `{ty}::INFO` in the list of ops"));
        }
        let own = infos.iter().any(|info| info.name == *name);
        if own && !called.contains(ty) && !is_implicit(name) {
            forgotten.push(format!("{name}: crates/consort/src: no method runs `ops::{ty}`"));
        }
    }
    for info in infos {
        let name = info.name;
        if computes(info) && find(name).is_none() {
            forgotten.push(format!("{name}: crates/runtime/src/kernels: no family lists a kernel for it"));
        }
        if !runs(name) {
            forgotten.push(format!("{name}: filetests: no case with `; test: oracle` uses it"));
        }
    }
    assert!(forgotten.is_empty(), "forgotten places:\n{}", forgotten.join("\n"));
}

/// Functions of `ir` that kernels call: places in tensors, and random numbers, whose bits are their definition.
const SHARED: [&str; 4] = ["element_number", "element_words", "normal", "unravel"];

#[test]
fn kernels_share_no_code_with_definitions() {
    let mut offences = Vec::new();
    for (path, text) in sources("crates/runtime/src/kernels") {
        let imports = text.split("use consort_ir::").skip(1).filter_map(|rest| rest.split(';').next());
        let imported = imports.flat_map(words);
        // A `$` begins a type that a macro names.
        let qualified = text.split("ops::").skip(1).filter(|rest| !rest.starts_with('$'));
        let items = imported.chain(qualified.filter_map(|rest| words(rest).next())).filter(|item| {
            let is_module = ["index", "ops", "random", "self", "literal"].contains(item);
            item.starts_with(|c: char| c.is_ascii_lowercase()) && !is_module && !SHARED.contains(item)
        });
        offences.extend(items.map(|item| format!("{path}: `{item}`")));
    }
    assert!(
        offences.is_empty(),
        "a kernel must not call what it is tested against; write it anew:\n{}",
        offences.join("\n")
    );
}

#[test]
fn declarations_are_found() {
    let source = "op! {\n    pub struct Concat(\"concat\")(parts..) {}\n}\nelementwise! {\n    Exp2(\"exp2\")(x) f;\n}\n\
                  reductions! {\n    Sum(\"sum\") NUMBERS;\n}\n";
    assert_eq!(declared(source), [("Concat", "concat"), ("Exp2", "exp2"), ("Sum", "sum")]);
    assert_eq!(declared("f(\"text\"); $name(\"x\")(y); Violation::new(\"C1\", g(1))"), []);
}
