//! The commands of README.md and the guide, run as they stand there, and what the guide says that they print.
//!
//! `cargo` is a stand-in here: what it would build has been built with this test, so it runs that.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PAGES: [&str; 7] = [
    "README.md",
    "docs/getting-started.md",
    "docs/collectives.md",
    "docs/compile.md",
    "docs/tensor-parallel.md",
    "docs/messages.md",
    "docs/operating.md",
];

/// Runs what `cargo run` would run, and knows of what else was built whether it is there.
const CARGO: &str = r#"#!/bin/sh
case "$*" in
"run --release -- "*) shift 3; exec consort "$@" ;;
"build --release -p "*" --example "*)
    test -x "$EXAMPLES/$6" || { echo "no example $6: \`cargo test --workspace\` builds them" >&2; exit 99; } ;;
"install --path crates/cli" | "test --workspace") ;;
*) echo "what is cargo $*?" >&2; exit 99 ;;
esac
"#;

/// No command takes so long, in seconds.
const LIMIT: &str = "180";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The code blocks of a page that are of this kind.
fn blocks(page: &str, kind: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join(page)).unwrap();
    let fence = format!("```{kind}\n");
    text.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap().to_string()).collect()
}

/// A folder with the commands that a reader has.
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
        command.args([LIMIT, "sh", "-c", &line]).current_dir(root());
        command.env("PATH", path).env("EXAMPLES", built.join("examples")).output().unwrap()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn every_command_runs_as_it_stands() {
    let shell = Shell::new("commands");
    let mut ran = 0;
    for page in PAGES {
        for line in blocks(page, "sh").iter().flat_map(|block| block.lines()) {
            // `# exits with 1` says what a reader is to expect.
            let expected =
                line.split_once("# exits with ").map_or(0, |(_, code)| code.trim().parse().unwrap());
            let output = shell.run(line);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(expected), "{page}: {line}\n{said}");
            ran += 1;
        }
    }
    assert!(ran >= 20, "{ran}");
}

#[test]
fn programs_print_what_the_guide_says() {
    let shell = Shell::new("printed");
    for page in ["README.md", "docs/getting-started.md"] {
        for block in blocks(page, "text") {
            let Some((line, expected)) = block.strip_prefix("$ ").and_then(|block| block.split_once('\n'))
            else {
                continue;
            };
            let output = shell.run(line);
            let said =
                [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            let said = said.concat();
            // Ranks write when they please, each its own lines in order.
            for rank in ["[0]", "[1]"] {
                let mut lines = said.lines().filter(|line| line.starts_with(rank));
                for expected in expected.lines().filter(|line| line.starts_with(rank)) {
                    assert!(
                        lines.any(|line| line == expected),
                        "{page}: {line}: no line\n{expected}\nin\n{said}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_first_program_is_the_example() {
    let source = fs::read_to_string(root().join("crates/consort/examples/hello.rs")).unwrap();
    let code = source.split_once("\n\n").unwrap().1;
    assert_eq!(blocks("docs/getting-started.md", "rust"), [code]);
}
