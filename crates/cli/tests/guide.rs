//! The guide docs/collectives.md: its programs are those of the example, and print what it shows, on real processes.
//!
//! The ranks are this test program itself: started with GUIDE_PROGRAM in the environment, the test `rank_program` runs
//! that program and all other tests are filtered out.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, exit};

use consort_examples::collectives;
use consort_filetests::check_file;

/// The program of the ranks, if this process is one.
#[test]
fn rank_program() {
    let Ok(name) = std::env::var("GUIDE_PROGRAM") else { return };
    exit(match collectives::run(&name) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{error}");
            1
        }
    });
}

fn path(relative: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(relative)
}

/// The code blocks of the guide that are of this kind.
fn blocks<'a>(guide: &'a str, kind: &str) -> Vec<&'a str> {
    let fence = format!("```{kind}\n");
    guide.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// A program of the example, including its last line.
fn program<'a>(source: &'a str, name: &str) -> &'a str {
    let start =
        source.find(&format!("fn {name}() -> Result<()> {{")).unwrap_or_else(|| panic!("no fn {name}"));
    let end = source[start..].find("\n}\n").unwrap();
    &source[start..start + end + 3]
}

#[test]
fn the_code_of_the_guide_is_the_example() {
    if std::env::var_os("GUIDE_PROGRAM").is_some() {
        return;
    }
    let source = fs::read_to_string(path("crates/examples/src/collectives.rs")).unwrap();
    let guide = fs::read_to_string(path("docs/collectives.md")).unwrap();
    let shown = blocks(&guide, "rust");
    let mut new = guide.clone();
    for (name, _) in collectives::PROGRAMS {
        let code = program(&source, name);
        let begins = |block: &&&str| block.starts_with(&format!("fn {name}("));
        let block = shown.iter().find(begins).unwrap_or_else(|| panic!("the guide does not show {name}"));
        new = new.replace(*block, code);
    }
    check_file(path("docs/collectives.md"), &new);
    assert_eq!(
        shown.len(),
        collectives::PROGRAMS.len(),
        "the guide shows code that the example does not have"
    );
}

/// The table of reductions is that of the code.
#[test]
fn the_guide_says_which_element_types_reductions_take() {
    let guide = fs::read_to_string(path("docs/collectives.md")).unwrap();
    let table = consort_ir::ops::reductions_markdown();
    assert!(guide.contains(&table), "docs/collectives.md must have this table:\n{table}");
}

fn run(n: usize, name: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(["run", "-n", &n.to_string(), "--timeout", "50", "--"]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", "rank_program", "--quiet", "--nocapture"]);
    command.env("GUIDE_PROGRAM", name).output().unwrap()
}

/// The ranks' output, ordered by rank, without that of the test harness.
fn lines_of(bytes: &[u8], n: usize) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let of = |rank: usize| format!("[{rank}] ");
    let harness = |line: &&str| !line.ends_with("] ") && !line.ends_with("running 1 test");
    let mine = |rank: usize| text.lines().filter(harness).filter(move |line| line.starts_with(&of(rank)));
    (0..n).flat_map(mine).map(str::to_string).collect()
}

#[test]
fn the_programs_print_what_the_guide_says() {
    if std::env::var_os("GUIDE_PROGRAM").is_some() {
        return;
    }
    let guide = fs::read_to_string(path("docs/collectives.md")).unwrap();
    let mut ran = Vec::new();
    for text in blocks(&guide, "text") {
        for part in text.split("$ consort run -n ").skip(1) {
            let (command, expected) = part.split_once('\n').unwrap();
            let (n, name) = command.split_once(" -- collectives ").unwrap();
            let n: usize = n.parse().unwrap();
            // `[*]` means every rank.
            let (all, each): (Vec<&str>, Vec<&str>) =
                expected.lines().partition(|line| line.starts_with("[*] "));
            let all =
                (0..n).flat_map(|rank| all.iter().map(move |line| line.replacen('*', &rank.to_string(), 1)));
            let expected: Vec<String> = all.chain(each.iter().map(|line| line.to_string())).collect();
            let output = run(n, name);
            let got = match name {
                // The other ranks' errors name different ranks.
                "mismatch" => lines_of(&output.stderr, 1),
                _ => lines_of(&output.stdout, n),
            };
            assert_eq!(got, expected, "{command}: {}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(output.status.success(), name != "mismatch", "{command}");
            ran.push((name, n));
        }
    }
    for (name, _) in collectives::PROGRAMS.iter().filter(|(name, _)| *name != "mismatch") {
        for n in [2, 4] {
            assert!(ran.contains(&(*name, n)), "the guide does not say what {name} prints on {n} ranks");
        }
    }
}
