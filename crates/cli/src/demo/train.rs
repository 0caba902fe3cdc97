//! `consort demo train`: trains one model in three ways to split the work, each of which loses a rank in the middle and goes on
//! from its last checkpoint. Shows the losses side by side.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::bail;
use serde_json::{Value, json};

use super::train_rank::{Length, Split, TRAIN};
use super::{Args, Bar, failed, run_ranks};
use crate::bench::{median, size};
use crate::report::{Report, wrong};

/// The most ranks: the number of heads of the model.
const MAX_RANKS: usize = 8;
/// By how much losses of two ways may differ, relative to them: rounding grows from step to step.
const ALLOWED: f64 = 1e-2;

/// A folder for checkpoints, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> anyhow::Result<Folder> {
        const NAME: &str = "consort-demo-train-";
        // A demo that was killed could not remove its own.
        for entry in std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let process = name.to_str().and_then(|name| name.strip_prefix(NAME)?.parse::<u32>().ok());
            if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
        let path = std::env::temp_dir().join(format!("{NAME}{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .map_err(|error| failed(&format!("cannot make the folder {}: {error}", path.display())))?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What ranks reported until they ended.
#[derive(Default)]
struct Ran {
    /// Steps with their losses.
    losses: Vec<(u64, f64)>,
    speeds: Vec<f64>,
    /// What was reported at the end; none if a rank was killed.
    end: Option<Value>,
    said: String,
}

/// Trains in each way, and compares.
pub(super) fn run(args: &Args) -> anyhow::Result<Report> {
    if args.ranks > MAX_RANKS {
        bail!(wrong("demo: -n", format!("a number from 1 to {MAX_RANKS}"), args.ranks));
    }
    let length = Length::new(args.small);
    let usual = if args.mpirun.is_some() { 0 } else { length.steps / 2 + length.save / 2 };
    let kill = args.kill.unwrap_or(usual);
    if kill > 0 && args.mpirun.is_some() {
        bail!(wrong("demo: --kill", "0 with --mpirun, which ends all ranks with the first", kill));
    }
    if kill >= length.steps {
        bail!(wrong("demo: --kill", format!("a step below {}", length.steps), kill));
    }
    let folder = Folder::new()?;
    let mut bar = Bar::new();
    let (mut found, mut notes): (Vec<Value>, String) = (Vec::new(), String::new());
    for (place, split) in Split::ALL.into_iter().enumerate() {
        bar.show(place as f64 / Split::ALL.len() as f64, &format!("{}: starting", split.name()));
        let mut show = |step: u64, loss: f64, speed: f64| {
            let done = (place as f64 + step as f64 / length.steps as f64) / Split::ALL.len() as f64;
            bar.show(done, &progress(split, step, length.steps, loss, speed));
        };
        let mut ran = Ran::default();
        let mut killed = None;
        if kill > 0 {
            ran = train(args, split, &folder.0, Some(kill), &mut show)?;
            killed = Some(ran.losses.last().map_or(0, |(step, _)| *step));
        }
        let rest = train(args, split, &folder.0, None, &mut show)?;
        notes += &rest.said;
        found.push(one(args, split, &ran, &rest, killed));
    }
    bar.clear();
    let first = losses(&found[0]);
    let mut good = true;
    for value in &mut found {
        let difference =
            first.iter().zip(losses(value)).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max);
        value["difference"] = json!(difference + f64::from(u8::from(args.wrong)));
        value["allowed"] = json!(ALLOWED);
        good &= is_good(value, length.steps);
    }
    let text = match args.json {
        true => found.iter().map(|value| format!("{value}\n")).collect(),
        false => text(args.ranks, &found, length),
    };
    Ok(Report { notes, ..Report::checked(text, good) })
}

/// What the bar says of a step.
fn progress(split: Split, step: u64, steps: u64, loss: f64, speed: f64) -> String {
    format!("{}: step {step} of {steps}, loss {loss:.3}, {speed:.0} tokens/s", split.name())
}

fn losses(value: &Value) -> Vec<f64> {
    value["losses"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

fn is_good(value: &Value, steps: u64) -> bool {
    value["same"] == true
        && value["difference"].as_f64().is_some_and(|difference| difference <= ALLOWED)
        && losses(value).len() as u64 == steps
}

/// Runs ranks until the end, or until one is killed.
fn train(
    args: &Args,
    split: Split,
    folder: &Path,
    kill: Option<u64>,
    show: &mut dyn FnMut(u64, f64, f64),
) -> anyhow::Result<Ran> {
    let (path, kill_text) = (folder.to_string_lossy().into_owned(), kill.map(|kill| kill.to_string()));
    let mut rank = vec![TRAIN, split.name(), "--folder", &path];
    rank.extend(args.small.then_some("--small"));
    rank.extend(kill_text.iter().flat_map(|kill| ["--kill", kill]));
    let mut ran = Ran::default();
    let (code, said) = run_ranks(&rank, args, |value| {
        let number = |key: &str| value[key].as_f64();
        match (value["step"].as_u64(), number("loss"), number("tokens_per_second")) {
            (Some(step), Some(loss), Some(speed)) => {
                show(step, loss, speed);
                ran.losses.push((step, loss));
                ran.speeds.push(speed);
            }
            _ => ran.end = Some(value),
        }
    })?;
    ran.said = said;
    let was_killed = kill.is_some() && ran.end.is_none() && ran.said.contains("SIGKILL");
    if !was_killed && (code != 0 || ran.end.is_none()) {
        return Err(failed(&format!("the ranks failed with exit code {code}\n{}", ran.said.trim_end())));
    }
    Ok(ran)
}

/// What is reported of one way: its losses, and whether those that were computed twice are the same.
fn one(args: &Args, split: Split, before: &Ran, after: &Ran, killed: Option<u64>) -> Value {
    let end = after.end.clone().unwrap_or_default();
    let resumed = after.losses.first().map_or(0, |(step, _)| step - 1);
    let twice = before.losses.iter().filter(|(step, _)| *step > resumed);
    let twice: Vec<bool> = twice.map(|both| after.losses.contains(both)).collect();
    let losses = before.losses.iter().filter(|(step, _)| *step <= resumed).chain(&after.losses);
    json!({
        "demo": "train", "mode": split.name(), "ranks": args.ranks,
        "losses": losses.map(|(_, loss)| *loss).collect::<Vec<_>>(),
        "tokens_per_second": median(after.speeds.iter().copied()),
        "killed": killed, "resumed": killed.map(|_| resumed), "repeated": twice.len(),
        "same": twice.iter().all(|same| *same),
        "state_bytes": end["state_bytes"], "step_bytes": end["step_bytes"],
        "wire_bytes": end["wire_bytes"], "copied_bytes": end["copied_bytes"], "copies": end["copies"],
        "graphs": end["graphs"], "breaks": end["breaks"],
    })
}

/// Curves, a table, and what was checked.
fn text(ranks: usize, found: &[Value], length: Length) -> String {
    let mut text = format!(
        "train: a Llama-shaped model learns a text, {} steps, split in three ways\n\
         {ranks} ranks, each a process\n\n",
        length.steps
    );
    for value in found {
        let mode = value["mode"].as_str().unwrap_or("");
        let _ = match value["killed"].as_u64() {
            _ if !is_good(value, length.steps) => writeln!(
                text,
                "  WRONG   {mode}: losses differ from those of dp by {}, and {} after the checkpoint",
                value["difference"],
                if value["same"] == true { "are the same" } else { "are others" },
            ),
            Some(killed) => writeln!(
                text,
                "  ok      {mode}: rank {} killed after step {killed}, resumed from {}, {} equal losses",
                ranks - 1,
                value["resumed"],
                value["repeated"],
            ),
            None => writeln!(text, "  ok      {mode}: its losses are those of dp"),
        };
    }
    text += "\n";
    text += &curves(found);
    let _ = writeln!(
        text,
        "\n  {:<6}{:>10} {:>10} {:>12} {:>12} {:>12} {:>10}",
        "", "loss", "tokens/s", "state", "a step", "received", "copied"
    );
    for value in found {
        let bytes = |key: &str| value[key].as_u64().map_or("-".to_string(), |bytes| size(bytes as usize));
        let _ = writeln!(
            text,
            "  {:<6}{:>10.3} {:>10.0} {:>12} {:>12} {:>12} {:>10}",
            value["mode"].as_str().unwrap_or(""),
            losses(value).last().copied().unwrap_or(f64::NAN),
            value["tokens_per_second"].as_f64().unwrap_or(f64::NAN),
            bytes("state_bytes"),
            bytes("step_bytes"),
            bytes("wire_bytes"),
            bytes("copied_bytes"),
        );
    }
    for value in found {
        text += &copies(value);
    }
    text += "\n  Of each rank: bytes of weights and of Adam's state, bytes that a step needs\n  \
             besides, bytes that it receives from other ranks, and bytes that it copies so\n  \
             that they can be sent. Equal losses are those of steps that were run again.\n\n  \
             the program: crates/cli/src/demo/train_rank.rs and docs/training.md\n  \
             next:        consort demo tp\n";
    text
}

/// The reasons of the copies of a way, each once, with the source line below it.
fn copies(value: &Value) -> String {
    let mut reasons: Vec<(&str, usize)> = Vec::new();
    for copy in value["copies"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        // Without the name of the value, which says nothing here.
        let reason = copy.split_once(": ").map_or(copy, |(_, reason)| reason);
        match reasons.iter_mut().find(|(other, _)| *other == reason) {
            Some((_, times)) => *times += 1,
            None => reasons.push((reason, 1)),
        }
    }
    let mode = value["mode"].as_str().unwrap_or("");
    let line = |(reason, times): (&str, usize)| {
        format!("  {mode} copies {times} times {}\n", reason.replace(" at ", "\n    at "))
    };
    reasons.into_iter().map(line).collect()
}

/// The losses of all ways, side by side, each on a scale from 0.
fn curves(found: &[Value]) -> String {
    // Within 80 columns.
    const WIDTH: usize = 22;
    const HEIGHT: usize = 8;
    const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let all: Vec<Vec<f64>> = found.iter().map(losses).collect();
    let top = all.iter().flatten().copied().fold(0.0, f64::max);
    let column = |losses: &[f64], place: usize| {
        let (from, to) = (place * losses.len() / WIDTH, ((place + 1) * losses.len()).div_ceil(WIDTH));
        let part = losses.get(from..to.min(losses.len())).unwrap_or(&[]);
        part.iter().sum::<f64>() / part.len().max(1) as f64
    };
    let mut text = String::new();
    for row in (0..HEIGHT).rev() {
        let scale = if row + 1 == HEIGHT { format!("{top:>5.2} ") } else { "      ".to_string() };
        text += &scale;
        for losses in &all {
            text.extend((0..WIDTH).map(|place| {
                let height = column(losses, place) / top * (HEIGHT * 8) as f64;
                LEVELS[(height - (row * 8) as f64).clamp(0.0, 8.0).round() as usize]
            }));
            text += "  ";
        }
        text = format!("{}\n", text.trim_end());
    }
    text += "      ";
    for value in found {
        let _ = write!(text, "{:^WIDTH$}  ", value["mode"].as_str().unwrap_or(""));
    }
    format!("{}\n", text.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_a_bar_and_its_speed_in_one_line() {
        let mut bar = Bar { out: Some(Vec::new()) };
        bar.show(0.5, &progress(Split::Zero, 41, 80, 1.23456, 10_239.7));
        let shown = String::from_utf8(bar.out.unwrap_or_default()).unwrap_or_default();
        assert_eq!(shown, "\r\x1b[K  ██████████░░░░░░░░░░ zero: step 41 of 80, loss 1.235, 10240 tokens/s");
        let longest = progress(Split::Zero, 80, 80, 12.3456, 1_234_567.0);
        assert!(2 + 20 + 1 + longest.len() <= 79, "{longest}");
    }

    #[test]
    fn equal_copies_are_one_line() {
        let [a, b] = ["v8: 96 bytes (needed), for `all_reduce` at a.rs:5", "v9: 4 bytes (const) at b.rs:1"];
        let value = json!({ "mode": "zero", "copies": [a, b, a.replace("v8", "v7")] });
        assert_eq!(
            copies(&value),
            "  zero copies 2 times 96 bytes (needed), for `all_reduce`\n    at a.rs:5\n  \
             zero copies 1 times 4 bytes (const)\n    at b.rs:1\n"
        );
    }
}
