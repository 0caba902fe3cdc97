//! Why MPI cannot be used: facts, and the words for them.

use std::error::Error;
use std::fmt;

use consort_types::{Failure, aligned};

use crate::CommError;
use crate::mpi::library::Tried;

/// Why MPI cannot be used, or why one of its calls failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MpiError {
    /// No library was found that belongs to the launcher.
    Missing {
        /// What started this process.
        launcher: String,
        /// What was tried.
        tried: Vec<Tried>,
    },
    /// Nothing tells which of several libraries the launcher belongs to.
    Ambiguous {
        /// What was tried.
        tried: Vec<Tried>,
    },
    /// The library that `CONSORT_MPI` names cannot be used.
    Named {
        /// The library, and why not.
        tried: Tried,
    },
    /// A function is missing.
    Symbol {
        /// The library.
        library: String,
        /// The name of the function.
        name: &'static str,
    },
    /// The library knows another number of ranks than the launcher, so the launcher belongs to another one.
    Count {
        /// The library.
        library: String,
        /// How many ranks the launcher started.
        launched: usize,
        /// How many the library knows.
        known: usize,
    },
    /// The library allows calls only on the thread that initialised it, and this is another.
    Thread {
        /// The library.
        library: String,
    },
    /// This process has called `init` before.
    Again,
    /// A message was longer than its receiver expected.
    Truncated,
    /// A call failed.
    Call {
        /// The function.
        call: &'static str,
        /// What the library says.
        text: String,
    },
}

const NAME_IT: &str = "CONSORT_MPI names the library: a path, or a name such as libmpi.so.40; `consort doctor` shows those \
                       that are found";

fn rows(tried: &[Tried]) -> Vec<String> {
    aligned(&tried.iter().map(|tried| [tried.name.clone(), tried.outcome()]).collect::<Vec<_>>())
}

impl MpiError {
    /// The error as a [`Failure`], to which a caller adds its op and its source line.
    pub fn failure(&self) -> Box<Failure> {
        let failure = match self {
            MpiError::Missing { launcher, tried } => {
                Failure::new(format!("found no MPI library that belongs to {launcher}"))
                    .rows(rows(tried))
                    .note(NAME_IT)
            }
            MpiError::Ambiguous { tried } => Failure::new(
                "several MPI libraries are installed, and the launcher does not say which is its own",
            )
            .rows(rows(tried))
            .note(NAME_IT),
            MpiError::Named { tried } => {
                Failure::new(format!("CONSORT_MPI names {}: {}", tried.name, tried.outcome())).note(NAME_IT)
            }
            MpiError::Symbol { library, name } => {
                Failure::new((format!("{name} in {library}"), "none")).note("MPI 3.1 or later is needed")
            }
            MpiError::Count { library, launched, known } => {
                let headline =
                    (format!("{launched} ranks, as many as the launcher started"), format!("{known}"));
                let other = format!(
                    "{library} is not the MPI of the launcher, or the launcher did not tell it of the \
                                     ranks: under Slurm, start with `srun --mpi=pmix`"
                );
                Failure::new(headline).note(other).note(NAME_IT)
            }
            MpiError::Thread { library } => Failure::new(("the thread that initialised MPI", "another one"))
                .note(format!(
                    "initialise {library} for MPI_THREAD_SERIALIZED, or call `init` on that thread"
                )),
            MpiError::Again => Failure::new(("the only `init` of this process", "a second one")).note(
                "a process is one rank, and calls MPI on the thread that called `init`: keep the first mesh there",
            ),
            MpiError::Truncated => Failure::new("a message is longer than its receiver expects"),
            MpiError::Call { call, text } => Failure::new(format!("{call}: {text}")),
        };
        failure.of("mpi")
    }
}

impl From<MpiError> for CommError {
    fn from(error: MpiError) -> CommError {
        CommError::Machine(error.failure())
    }
}

impl fmt::Display for MpiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl Error for MpiError {}
