//! Starting ranks of this binary with an mpirun that the user names.

use std::process::Command;

use anyhow::{Context, bail};
use consort_types::Failure;

use crate::report::{count, wrong};

/// This program, which may have been replaced since it started; not its path.
pub(crate) const SELF: &str = "/proc/self/exe";

/// The placeholder for the number of ranks in a command.
pub(crate) const RANKS: &str = "{ranks}";

/// The words of a command that an option names, with the number of ranks in it.
pub(crate) fn words(option: &str, command: &str, ranks: usize) -> anyhow::Result<Vec<String>> {
    let command = command.replace(RANKS, &ranks.to_string());
    let words: Vec<String> = command.split_whitespace().map(String::from).collect();
    if words.is_empty() {
        bail!(wrong(option.to_string(), "a command", "nothing"));
    }
    Ok(words)
}

/// The command of an mpirun that starts this binary, whose arguments follow. Its ranks use MPI, on one host too.
pub(crate) fn over_mpi(option: &str, mpirun: &str, ranks: usize) -> anyhow::Result<Command> {
    let words = words(option, mpirun, ranks)?;
    let mut command = Command::new(&words[0]);
    // By its path: in mpirun the other name is that of mpirun.
    let program = std::env::current_exe().context("cannot find this program")?;
    command.args(&words[1..]).arg(program).env("CONSORT_ENGINE", "mpi");
    Ok(command)
}

/// The failure of a command that started another number of ranks than it was asked for.
pub(crate) fn wrong_count(option: &'static str, expected: usize, got: u64) -> Box<Failure> {
    let note = format!("write {RANKS} for the number of ranks in the command, as in `mpirun -n {RANKS}`");
    wrong(option, format!("{} to start", count(expected, "rank")), got).note(note)
}
