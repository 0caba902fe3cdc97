//! Runs the commands of README.md and the guide, and compares their output with what these pages show.
//!
//! `cargo` is a stub here: it builds examples in the profile of this test, and runs the `consort` that was built with
//! it. A block of text after a block of commands shows their output. `..` matches the rest of a line, or any
//! lines; decimal numbers, process ids and bars may differ.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Pages that show the output of their commands.
const SHOWN: [&str; 3] = ["README.md", "docs/getting-started.md", "docs/tour.md"];
/// Pages whose commands are run.
const RUN: [&str; 6] = [
    "docs/collectives.md",
    "docs/compile.md",
    "docs/tensor-parallel.md",
    "docs/messages.md",
    "docs/pipeline.md",
    "docs/operating.md",
];

const CARGO: &str = r#"#!/bin/sh
case "$*" in
"run --release -- "*) shift 3; exec consort "$@" ;;
"build --release -p "*" --example "*) exec "$REAL_CARGO" build $PROFILE --target-dir "$TARGET" -p "$4" --example "$6" ;;
"install --path crates/cli" | "test --workspace" | "doc --no-deps -p consort") ;;
*) echo "what is cargo $*?" >&2; exit 99 ;;
esac
"#;

/// The time limit of a command, in seconds; building takes longest.
const LIMIT: &str = "900";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The code blocks of a page in their order, with their kinds.
fn blocks(page: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(root().join(page)).unwrap();
    let parts: Vec<&str> = text.split("```").collect();
    assert!(parts.len() % 2 == 1, "{page}: a block does not end");
    let block = |part: &&str| {
        let (kind, body) = part.split_once('\n').unwrap_or((part, ""));
        (kind.to_string(), body.to_string())
    };
    parts.iter().skip(1).step_by(2).map(block).collect()
}

/// The code blocks of a page that are of this kind.
fn of_kind(page: &str, kind: &str) -> Vec<String> {
    blocks(page).into_iter().filter(|(own, _)| own == kind).map(|(_, body)| body).collect()
}

/// A folder with a reader's commands.
struct Shell(PathBuf);

impl Shell {
    fn new(name: &str) -> Shell {
        let bin = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&bin);
        fs::create_dir_all(&bin).unwrap();
        symlink(env!("CARGO_BIN_EXE_consort"), bin.join("consort")).unwrap();
        fs::write(bin.join("cargo"), CARGO).unwrap();
        fs::set_permissions(bin.join("cargo"), fs::Permissions::from_mode(0o755)).unwrap();
        Shell(bin)
    }

    fn run(&self, line: &str) -> Output {
        let built = Path::new(env!("CARGO_BIN_EXE_consort")).parent().unwrap();
        let line = line.replace("target/release/", &format!("{}/", built.display()));
        let path = format!("{}:{}", self.0.display(), std::env::var("PATH").unwrap_or_default());
        let mut command = Command::new("timeout");
        command.args([LIMIT, "sh", "-c", &line]).current_dir(root()).env("PATH", path);
        let profile = if built.ends_with("release") { "--release" } else { "" };
        command.env("REAL_CARGO", env!("CARGO")).env("PROFILE", profile);
        command.env("TARGET", built.parent().unwrap()).output().unwrap()
    }

    /// Runs a line of a page, which must exit with the code stated beside it; returns its output.
    fn expect(&self, page: &str, line: &str) -> String {
        // `# exits with 1` states the expected exit code.
        let expected = line.split_once("# exits with ").map_or(0, |(_, code)| code.trim().parse().unwrap());
        let output = self.run(line);
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let said = said.concat();
        assert_eq!(output.status.code(), Some(expected), "{page}: {line}\n{said}");
        said
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A line with `#` in place of numbers that change from run to run, and without alignment.
fn masked(line: &str) -> String {
    let line = line.replace('█', "");
    let words: Vec<&str> = line.split_whitespace().collect();
    let mask = |(i, word): (usize, &&str)| {
        let number = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let fraction = number.split_once('.').is_some_and(|(whole, rest)| {
            let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            digits(whole) && digits(rest)
        });
        match i.checked_sub(1).map(|before| words[before]) {
            _ if fraction => word.replace(number, "#"),
            Some("process" | "(process") => "#".to_string(),
            _ => word.to_string(),
        }
    };
    words.iter().enumerate().map(mask).collect::<Vec<_>>().join(" ")
}

/// The rank that wrote a line, if the launcher prefixed it. Ranks write in any order, each its own lines in order.
fn writer(line: &str) -> Option<&str> {
    line.strip_prefix('[')?.split_once("] ").map(|(rank, _)| rank)
}

/// Checks that the lines shown on a page are among those printed, in order.
#[track_caller]
fn check_shown(place: &str, shown: &str, said: &str) {
    let lines: Vec<&str> =
        shown.lines().filter(|line| !line.trim().is_empty() && line.trim() != "..").collect();
    assert!(!lines.is_empty(), "{place}: it shows nothing");
    let mut writers: Vec<Option<&str>> = lines.iter().map(|line| writer(line)).collect();
    writers.sort_unstable();
    writers.dedup();
    for own in writers {
        let mut printed = said.lines().filter(|line| writer(line) == own).map(masked);
        for line in lines.iter().filter(|line| writer(line) == own) {
            let expected = masked(line);
            let fits = |line: String| match expected.strip_suffix(" ..") {
                Some(start) => line.starts_with(start),
                None => line == expected,
            };
            assert!(printed.any(fits), "{place}: no line\n{line}\nin\n{said}");
        }
    }
}

#[test]
fn every_command_runs_as_it_stands() {
    let shell = Shell::new("commands");
    let mut ran = 0;
    for page in RUN {
        for line in of_kind(page, "sh").iter().flat_map(|block| block.lines()) {
            shell.expect(page, line);
            ran += 1;
        }
    }
    assert!(ran >= 6, "{ran}");
}

/// Commands that only build something, so that their output is not shown.
fn is_silent(line: &str) -> bool {
    ["cargo build ", "cargo install ", "cargo test ", "cargo doc "]
        .iter()
        .any(|start| line.starts_with(start))
}

#[test]
fn commands_print_what_the_pages_show() {
    let shell = Shell::new("printed");
    let (mut ran, mut compared) = (0, 0);
    for page in SHOWN {
        let blocks = blocks(page);
        for (i, (kind, body)) in blocks.iter().enumerate() {
            match kind.as_str() {
                "sh" => {
                    let said: String = body.lines().map(|line| shell.expect(page, line)).collect();
                    ran += body.lines().count();
                    let next = blocks.get(i + 1).filter(|(kind, _)| kind == "text").map(|(_, text)| text);
                    let apart = body.lines().all(is_silent);
                    let Some(shown) = next.filter(|shown| !shown.starts_with("$ ") && !apart) else {
                        let below = next.is_some_and(|shown| shown.starts_with("$ "));
                        assert!(apart || below, "{page}: nothing shows what this prints\n{body}");
                        continue;
                    };
                    check_shown(&format!("{page}: {}", body.trim()), shown, &said);
                    compared += 1;
                }
                "text" if body.starts_with("$ ") => {
                    let (line, shown) = body["$ ".len()..].split_once('\n').unwrap();
                    let output = shell.run(line);
                    let said = [output.stdout, output.stderr].concat();
                    check_shown(&format!("{page}: {line}"), shown, &String::from_utf8_lossy(&said));
                    compared += 1;
                }
                _ => {}
            }
        }
    }
    assert!(ran >= 13 && compared >= 9, "{ran} commands, {compared} compared");
}

/// A page's first Rust block is an example of the workspace, without its header.
#[test]
fn the_first_programs_are_examples() {
    for (page, example) in [("README.md", "first"), ("docs/getting-started.md", "hello")] {
        let source = fs::read_to_string(root().join(format!("crates/examples/src/{example}.rs"))).unwrap();
        let code = source.split_once("\n\n").unwrap().1;
        assert_eq!(of_kind(page, "rust").first().map(String::as_str), Some(code), "{page}");
    }
}

/// The first screen has the program, the comparison, the gaps, and the links to the other pages.
#[test]
fn the_readme_is_one_screen() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let screen: Vec<&str> = readme.lines().take(80).collect();
    for head in ["## Beside PyTorch, JAX and MPI", "## Not yet", "## Where to go on"] {
        assert!(screen.contains(&head), "{head} is not within the first 80 lines");
    }
}

#[test]
fn the_tour_runs_every_command() {
    let help = Command::new(env!("CARGO_BIN_EXE_consort")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names: Vec<&str> = listed.map(|line| line.split_whitespace().next().unwrap()).collect();
    assert!(names.contains(&"check") && names.contains(&"run"), "{help}");
    let tour = of_kind("docs/tour.md", "sh").concat();
    for name in names.into_iter().filter(|name| *name != "help") {
        assert!(tour.contains(&format!("cargo run --release -- {name}")), "docs/tour.md: no `{name}`");
    }
}

/// Figures have one place; the README quotes it.
#[test]
fn figures_of_the_readme_are_among_the_benchmarks() {
    let text = |page: &str| fs::read_to_string(root().join(page)).unwrap();
    let (readme, benchmarks) = (text("README.md"), text("docs/benchmarks.md"));
    let words = |text: &str| -> Vec<String> {
        text.split_whitespace().map(|word| word.trim_matches(['(', ')', ',', ';']).to_string()).collect()
    };
    let (known, read) = (words(&benchmarks), words(&readme));
    // `83 us`, `286 to 346 ms`
    let is_number = |word: &str| word.parse::<f64>().is_ok();
    let figures: Vec<&String> = read
        .windows(2)
        .filter(|two| ["us", "ms", "to"].contains(&two[1].as_str()) && is_number(&two[0]))
        .map(|two| &two[0])
        .collect();
    assert!(figures.len() >= 10, "{figures:?}");
    let unknown: Vec<&&String> = figures.iter().filter(|figure| !known.contains(figure)).collect();
    assert!(unknown.is_empty(), "not in docs/benchmarks.md: {unknown:?}");
}
