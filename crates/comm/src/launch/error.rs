//! Why a job was not started.

use std::error::Error;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;

use super::MAX_RANKS;
use crate::control::Exit;
use crate::limits::way_out;

/// Why a job was not started, or a process did not become a rank.
#[derive(Debug)]
pub enum LaunchError {
    /// Too few or too many ranks.
    Ranks {
        /// How many were asked for.
        got: usize,
    },
    /// No program was given.
    NoProgram,
    /// The program was not found.
    NotFound {
        /// Its name.
        program: OsString,
        /// Whether a file of that name is in the current folder.
        here: bool,
    },
    /// The file's metadata cannot be read.
    Unreadable {
        /// The program.
        program: OsString,
        /// The system's error.
        error: io::Error,
    },
    /// The file is not a program, or we may not run it.
    NotExecutable {
        /// The program.
        program: OsString,
    },
    /// The kernel cannot run it.
    Exec {
        /// The program.
        program: OsString,
        /// The system's error.
        error: io::Error,
    },
    /// The process that started a rank or a watcher died before the child could bind itself to it.
    Orphan {
        /// That process.
        parent: u32,
    },
    /// The arguments of the entry are not those that a launcher passes.
    Entry,
    /// The watcher of the job is gone, and so are the ranks.
    Watcher {
        /// Its process.
        pid: u32,
        /// How it ended; `None` if the launcher killed it because it did not respond.
        exit: Option<Exit>,
    },
    /// A file for the ranks' output cannot be written.
    Tee {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A system call failed.
    Machine {
        /// What could not be done.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

impl LaunchError {
    /// Whether the machine is at fault, and not the arguments.
    pub fn is_machine(&self) -> bool {
        matches!(self, LaunchError::Machine { .. } | LaunchError::Orphan { .. } | LaunchError::Watcher { .. })
    }
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LaunchError::Ranks { got } => {
                write!(f, "run: expected 1 to {MAX_RANKS} ranks, got {got}")?;
                f.write_str("\n  note: -n N says how many")
            }
            LaunchError::NoProgram => f.write_str(
                "run: expected a program, got none\n  note: it comes after the options: run -n 2 -- PROGRAM",
            ),
            LaunchError::NotFound { program, here } => {
                let program = program.display();
                write!(f, "run: {program}: expected a program in PATH, got none")?;
                match here {
                    true => write!(f, "\n  note: for the file in this folder write ./{program}"),
                    false => f.write_str("\n  note: is the name right, and is it built?"),
                }
            }
            LaunchError::Unreadable { program, error } => {
                write!(f, "run: {}: expected a program, got: {error}", program.display())?;
                f.write_str("\n  note: is the path right, and is it built?")
            }
            LaunchError::NotExecutable { program } => {
                let program = program.display();
                write!(f, "run: {program}: expected a program, got a file that may not be executed")?;
                write!(f, "\n  note: if it is one, chmod +x {program}")
            }
            LaunchError::Exec { program, error } => {
                write!(f, "run: {}: cannot be executed: {error}", program.display())?;
                f.write_str(
                    "\n  note: is it built for this machine, or is the interpreter in its first line there?",
                )
            }
            LaunchError::Orphan { parent } => {
                write!(f, "run: process {parent}, which started this one, is gone")?;
                f.write_str("\n  note: ranks end with their launcher")
            }
            LaunchError::Entry => {
                f.write_str("run: expected the arguments of a launcher, got others")?;
                f.write_str("\n  note: start programs with `consort run`")
            }
            LaunchError::Watcher { pid, exit } => {
                write!(f, "run: the watcher of the job, process {pid}, ")?;
                match exit {
                    Some(exit) => exit.fmt(f)?,
                    None => f.write_str("did not end its processes in time and was killed")?,
                }
                f.write_str("\n  note: the ranks were ended with it; start the job again")
            }
            LaunchError::Tee { path, error } => {
                write!(
                    f,
                    "run: --tee: {}: {error}\n  note: name a folder that can be written",
                    path.display()
                )
            }
            LaunchError::Machine { what, error } => {
                write!(f, "run: cannot {what}: {error}\n  note: {}", way_out(error))
            }
        }
    }
}

impl Error for LaunchError {}
