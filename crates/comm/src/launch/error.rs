//! Why a job was not started.

use std::error::Error;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;

use consort_types::Failure;

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

    /// The error as a [`Failure`], to which a caller adds its op and its source line.
    pub fn failure(&self) -> Box<Failure> {
        let program = |program: &OsString| format!("run: {}", program.display());
        match self {
            LaunchError::Ranks { got } => Failure::new((format!("1 to {MAX_RANKS} ranks"), got.to_string()))
                .of("run")
                .note("-n N says how many"),
            LaunchError::NoProgram => Failure::new(("a program", "none"))
                .of("run")
                .note("it comes after the options: run -n 2 -- PROGRAM"),
            LaunchError::NotFound { program: name, here } => {
                Failure::new(("a program in PATH", "none")).of(program(name)).note(match here {
                    true => format!("for the file in this folder write ./{}", name.display()),
                    false => "is the name right, and is it built?".to_string(),
                })
            }
            LaunchError::Unreadable { program: name, error } => {
                Failure::new(("a program", error.to_string()))
                    .of(program(name))
                    .note("is the path right, and is it built?")
            }
            LaunchError::NotExecutable { program: name } => {
                Failure::new(("a program", "a file that may not be executed"))
                    .of(program(name))
                    .note(format!("if it is one, chmod +x {}", name.display()))
            }
            LaunchError::Exec { program: name, error } => {
                Failure::new(format!("cannot be executed: {error}"))
                    .of(program(name))
                    .note("is it built for this machine, or is the interpreter in its first line there?")
            }
            LaunchError::Orphan { parent } => {
                Failure::new(format!("process {parent}, which started this one, is gone"))
                    .of("run")
                    .note("ranks end with their launcher")
            }
            LaunchError::Entry => Failure::new("this entry is internal to the launcher")
                .of("run")
                .note("start programs with `consort run`"),
            LaunchError::Watcher { pid, exit } => {
                let ended = match exit {
                    Some(exit) => exit.to_string(),
                    None => "did not end its processes in time and was killed".to_string(),
                };
                Failure::new(format!("the watcher of the job, process {pid}, {ended}"))
                    .of("run")
                    .note("the ranks were ended with it; start the job again")
            }
            LaunchError::Tee { path, error } => Failure::new(error.to_string())
                .of(format!("run: --tee: {}", path.display()))
                .note("name a folder that can be written"),
            LaunchError::Machine { what, error } => {
                Failure::new(format!("cannot {what}: {error}")).of("run").note(way_out(error))
            }
        }
    }
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl Error for LaunchError {}
