//! `consort run --hosts` with an mpirun that is a shell script: what it is asked to run, and which of its lines are printed.

use std::process::{Command, Output};

/// Prints its arguments as rank 0, and a line of each stream of rank 1.
const MPIRUN: &str = r#"echo "[0] $*"
echo "[1] out"
echo "[1] err" >&2
echo "mpirun speaks"
"#;

fn on_hosts(name: &str, options: &[&str]) -> Output {
    let path = std::env::temp_dir().join(format!("consort-on-hosts-{name}-{}", std::process::id()));
    std::fs::write(&path, MPIRUN).unwrap();
    let mpirun = format!("sh {}  --flag value", path.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(["run", "--hosts", "a:1,b:1"]).args(options).args(["--", "train", "5"]);
    let output = command.env("CONSORT_MPIRUN", mpirun).output().unwrap();
    std::fs::remove_file(&path).unwrap();
    output
}

fn lines(text: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(text).lines().map(String::from).collect()
}

#[test]
fn the_flags_of_an_mpirun_come_first() {
    let ran = on_hosts("flags", &[]);
    let asked = "[0] --flag value -prepend-rank -hosts a:1,b:1 -n 2 train 5";
    assert_eq!(lines(&ran.stdout), [asked, "[1] out", "mpirun speaks"]);
    assert_eq!((lines(&ran.stderr), ran.status.code()), (vec!["[1] err".to_string()], Some(0)));
}

#[test]
fn the_output_of_one_rank_is_printed_and_the_errors_of_all() {
    let ran = on_hosts("only", &["--only", "0"]);
    assert_eq!(lines(&ran.stdout)[1..], ["mpirun speaks"]);
    assert!(ran.stdout.starts_with(b"[0] "));
    assert_eq!(lines(&ran.stderr), ["[1] err"]);
    let ran = on_hosts("none", &["--only", "2"]);
    assert_eq!(lines(&ran.stderr), ["error: run: --only: expected a rank below 2, got 2"]);
    assert_eq!(ran.status.code(), Some(1));
}
