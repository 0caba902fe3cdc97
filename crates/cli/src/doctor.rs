//! `consort doctor`: what this machine has for programs on several hosts.

use consort_comm::mpi::{Survey, survey};

use crate::report::Report;

/// Show which MPI a program would use here, or why none.
///
/// Run it as a program will be run, to see what it sees: `mpirun -n 1 consort doctor`.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> anyhow::Result<Report> {
    let Survey { tried, chosen } = survey();
    let names = tried.iter().map(|tried| tried.name.len()).max().unwrap_or(0);
    let mut text = String::from("MPI libraries:\n");
    for tried in &tried {
        let found = match &tried.found {
            Ok(library) => {
                format!("{}, {}\n  {:names$}  {}", library.version, library.abi.name(), "", library.path)
            }
            Err(error) => error.clone(),
        };
        text += &format!("  {:names$}  {found}\n", tried.name);
    }
    text += &match chosen {
        Ok(library) => format!("A program started like this uses {}.\n", library.path),
        Err(error) => {
            let failure = error.failure();
            let notes: String = failure.notes.iter().map(|note| format!("  note: {note}\n")).collect();
            format!("A program started like this uses none: {}\n{notes}", failure.title())
        }
    };
    Ok(Report::fine(text))
}
