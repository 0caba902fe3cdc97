//! The mpiruns of this machine, by the names that Debian gives them.

use std::process::{Command, Stdio};

/// Each starts more ranks than there are cores, as root too. {ranks} stands for their number.
const ALL: [&str; 2] =
    ["mpirun.openmpi --allow-run-as-root --oversubscribe -n {ranks}", "mpirun.mpich -n {ranks}"];

/// Those that this machine has; prints which ones it lacks.
pub(crate) fn mpiruns() -> Vec<&'static str> {
    let program = |mpirun: &'static str| mpirun.split(' ').next().unwrap_or_default();
    let is_there = |mpirun: &&'static str| {
        let version = Command::new(program(mpirun)).arg("--version").stdout(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    };
    let (found, lacking): (Vec<_>, Vec<_>) = ALL.into_iter().partition(is_there);
    let lacking: Vec<&str> = lacking.into_iter().map(program).collect();
    println!("{} mpiruns, {} skipped: {}", found.len(), lacking.len(), lacking.join(", "));
    found
}
