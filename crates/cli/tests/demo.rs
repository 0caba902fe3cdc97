//! `consort demo`: every program, with small sizes, on processes.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "../../consort/tests/processes/mpirun.rs"]
mod mpirun;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn demo(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_consort")).arg("demo").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The lines of a demo on two ranks.
fn lines(which: &str, more: &[&str]) -> Vec<Value> {
    let output = demo(&[&[which, "-n", "2", "--small", "--json"], more].concat());
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Checks the lines; `broken` is the number of breaks in a step with broken graphs, if the demo has that mode.
fn check(which: &str, broken: Option<u64>) {
    check_started(which, broken, &[]);
}

/// The same of ranks that are started in another way.
fn check_started(which: &str, broken: Option<u64>, more: &[&str]) {
    let lines = lines(which, more);
    let modes: Vec<&str> = lines.iter().map(|line| line["mode"].as_str().unwrap()).collect();
    let expected: &[&str] =
        if broken.is_some() { &["traced", "broken", "eager"] } else { &["traced", "eager"] };
    assert_eq!(modes, expected);
    for line in &lines {
        assert!(
            line["demo"] == which && line["ranks"] == 2 && line["per_second"].as_f64().unwrap() > 0.0,
            "{line}"
        );
        let (breaks, graphs) = match line["mode"].as_str().unwrap() {
            "traced" => (Some(0), Some(1)),
            "broken" => (broken, broken.map(|breaks| breaks + 1)),
            _ => (None, None),
        };
        assert_eq!((line["breaks"].as_u64(), line["graphs"].as_u64()), (breaks, graphs), "{line}");
        assert_eq!(line["break_lines"].as_array().unwrap().is_empty(), breaks.unwrap_or(0) == 0, "{line}");
    }
    assert_eq!(lines[0]["new_graphs"], 0, "{}", lines[0]);
}

#[test]
fn e3_a_model_in_three_modes() {
    // Two blocks with two all_reduces each, one for the embedding, and the gathered numbers.
    check("tp", Some(6));
}

#[test]
fn c4_ring() {
    check("ring", Some(1));
}

#[test]
fn c3_halo() {
    check("halo", Some(2));
    assert_eq!(lines("halo", &[])[0]["copied_bytes"], 0);
}

#[test]
fn c8_conv() {
    check("conv", Some(2));
}

#[test]
fn a7_experts() {
    check("moe", None);
}

#[test]
fn every_demo_runs_over_mpi() {
    for mpirun in mpirun::mpiruns() {
        for (which, broken) in
            [("tp", Some(6)), ("ring", Some(1)), ("halo", Some(2)), ("conv", Some(2)), ("moe", None)]
        {
            check_started(which, broken, &["--mpirun", mpirun]);
        }
        let lines = lines("train", &["--mpirun", mpirun]);
        let modes: Vec<&str> = lines.iter().map(|line| line["mode"].as_str().unwrap()).collect();
        assert_eq!(modes, ["dp", "zero", "tp"]);
        assert!(lines.iter().all(|line| line["killed"].is_null() && line["same"] == true), "{lines:?}");
    }
}

#[test]
fn an_mpirun_that_starts_another_number_of_ranks_is_refused() {
    for mpirun in mpirun::mpiruns() {
        let one = mpirun.replace("{ranks}", "1");
        for which in ["halo", "train"] {
            let output = demo(&[which, "--small", "--mpirun", &one]);
            assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(1), ""), "{one}");
            let expected = "error: demo: --mpirun: expected 2 ranks to start, got 1\n  note: write {ranks} for the \
                            number of ranks in the command, as in `mpirun -n {ranks}`\n";
            assert_eq!(text(&output.stderr), expected);
        }
    }
}

/// The lines of the training demo on two ranks, and a proof that it leaves nothing on the disk.
fn trained(kill: &str) -> Vec<Value> {
    let folder = std::env::temp_dir().join(format!("consort-demo-test-{}-{kill}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(["demo", "train", "--small", "--json", "--kill", kill]).env("TMPDIR", &folder);
    let output = command.output().unwrap();
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    fs::remove_dir(&folder).unwrap();
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn training_goes_on_with_the_same_losses_after_a_rank_was_killed() {
    let (whole, killed) = (trained("0"), trained("7"));
    for (which, (whole, killed)) in ["dp", "zero", "tp"].into_iter().zip(whole.iter().zip(&killed)) {
        assert!(whole["mode"] == which && killed["mode"] == which, "{killed}");
        // Killed after step 7, it resumes from step 4.
        assert!(whole["killed"].is_null() && killed["killed"] == 7 && killed["resumed"] == 4, "{killed}");
        assert!(killed["repeated"] == 3 && killed["same"] == true, "{killed}");
        assert_eq!(killed["losses"], whole["losses"]);
        let losses: Vec<f64> =
            whole["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
        assert!(losses.len() == 12 && losses[11] < 0.8 * losses[0], "{losses:?}");
        assert!(whole["graphs"] == 1 && whole["breaks"] == 0, "{whole}");
    }
    // Weights and states are divided, but for norms and counters along tp.
    let bytes = |place: usize| whole[place]["state_bytes"].as_u64().unwrap() as f64;
    assert!(bytes(1) <= 0.51 * bytes(0) && bytes(2) <= 0.51 * bytes(0), "{whole:?}");
}

#[test]
fn the_summary_of_training_shows_the_curves() {
    let output = demo(&["train", "-n", "3", "--small"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    let killed = "rank 2 killed after step 8, resumed from 4, 4 equal losses";
    for part in ["3 ranks", &format!("ok      zero: {killed}"), "█", "tokens/s", "received"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // In a terminal of 80 columns no line is broken.
    assert!(said.lines().all(|line| line.chars().count() <= 80), "{said}");
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn the_summary_says_what_was_found() {
    let output = demo(&["halo", "-n", "3", "--small"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    for part in [
        "halo: a five-point stencil",
        "3 ranks",
        "ok ",
        "steps/s",
        "traced",
        "broken",
        "eager",
        "crates/examples/src/halo.rs:",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // No progress bar without a terminal.
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn a_difference_is_an_exit_code() {
    for which in ["tp", "conv", "train"] {
        let output = demo(&[which, "--small", "--wrong"]);
        let said = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{said}{}", text(&output.stderr));
        assert!(said.contains("WRONG ") && !said.contains("  ok "), "{said}");
    }
}

/// The children of a process, and theirs.
fn descendants(of: u32) -> Vec<u32> {
    let tasks = fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    let children: Vec<u32> = tasks.split_whitespace().filter_map(|child| child.parse().ok()).collect();
    children.iter().flat_map(|child| [vec![*child], descendants(*child)].concat()).collect()
}

/// The CPU time of a process, in ticks.
fn ticks(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // After the name, which may contain anything.
    stat.rsplit(')').next().unwrap().split_whitespace().nth(11).unwrap().parse().unwrap()
}

#[test]
fn a_rank_that_is_killed_is_named() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(["demo", "halo"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    // The launcher, its watcher, and two ranks.
    let until = Instant::now() + Duration::from_secs(60);
    let mut all = Vec::new();
    while all.len() < 4 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
        all = descendants(child.id());
    }
    // After 20 ticks of a hundredth of a second they are in the middle of the work.
    while ticks(all[3]) < 20 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(Command::new("kill").args(["-9", &all[3].to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{said}");
    for part in ["error: demo: the ranks failed", "was killed by SIGKILL (signal 9)", "rank "] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // No process is left.
    assert!(all.iter().all(|process| !Path::new(&format!("/proc/{process}")).exists()), "{all:?}");
}

#[test]
fn wrong_arguments_are_refused() {
    for (args, expected) in [
        (&["nothing"][..], "invalid value 'nothing'"),
        (&["tp", "-n", "0"], "demo: -n: expected a number from 1 to 16, got 0"),
        (&["tp", "--kill", "3"], "demo: --kill: expected the demo `train`, got tp"),
        (&["tp", "--mpirun", " "], "demo: --mpirun: expected a command, got nothing"),
        (
            &["train", "--small", "--mpirun", "mpirun", "--kill", "3"],
            "demo: --kill: expected 0 with --mpirun, which ends all ranks with the first, got 3",
        ),
        (&["train", "-n", "9"], "demo: -n: expected a number from 1 to 8, got 9"),
        (&["train", "--small", "--kill", "12"], "demo: --kill: expected a step below 12, got 12"),
        (&["tp", "-n", "17"], "demo: -n: expected a number from 1 to 16, got 17"),
    ] {
        let output = demo(args);
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(1), ""), "{args:?}");
        assert!(text(&output.stderr).contains(expected), "{}", text(&output.stderr));
    }
}
