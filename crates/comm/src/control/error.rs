//! Why a call on the control plane gave no result.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use consort_types::{Failure, aligned, ranks_text};

use super::failure::JobFailure;
use super::parity::Differing;
use crate::CommError;

/// Why a call on the control plane gave no result. After the first error every later call gives the same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlError {
    /// The job failed.
    Failed {
        /// What this rank was doing, with its source line.
        during: String,
        /// The first failure, the same on every rank.
        failure: Box<JobFailure>,
    },
    /// The ranks do not have the same settings.
    Parity {
        /// The keys that differ.
        differing: Vec<Differing>,
    },
    /// No coordinator admitted this rank before the deadline.
    NotAdmitted {
        /// The deadline.
        deadline: Duration,
        /// How the last attempt ended.
        last: String,
    },
    /// The coordinator knows the job and rejects the claim.
    Refused {
        /// Why.
        reason: String,
    },
    /// The coordinator gave no answer by the deadline.
    Silent {
        /// What this rank was doing.
        during: String,
        /// The rank that runs the coordinator; none if the launcher does.
        host: Option<usize>,
    },
    /// This rank said goodbye before.
    Parted,
    /// An argument is too long to be sent.
    TooLong {
        /// The call.
        call: &'static str,
        /// Which argument.
        what: &'static str,
        /// Its limit, in bytes.
        limit: usize,
        /// Its length, in bytes.
        length: usize,
    },
    /// A call over MPI failed.
    Mpi(Box<CommError>),
    /// A system call failed.
    Machine {
        /// What this rank was doing.
        during: String,
        /// The system's error.
        error: String,
        /// What to do about it.
        note: String,
    },
}

impl ControlError {
    /// The error as a [`Failure`], to which a caller adds its op and its source line.
    pub fn failure(&self) -> Box<Failure> {
        match self {
            ControlError::Failed { during, failure } => {
                let failure = failure.failure();
                // A failure that was found in a call names that call.
                if failure.op.is_empty() { failure.of(during.clone()) } else { failure }
            }
            ControlError::Parity { differing } => {
                let rows: Vec<[String; 3]> = differing.iter().flat_map(parity_rows).collect();
                Failure::new(("equal values on every rank", ""))
                    .of("parity")
                    .rows(aligned(&rows))
                    .note("start every rank with the same program, options and environment")
            }
            ControlError::NotAdmitted { deadline, last } => {
                let expected = format!("a welcome from the coordinator within {deadline:?}");
                Failure::new((expected, last)).of("init").note(
                    "without `consort run` rank 0 runs the coordinator, and must have started; CONSORT_JOB and \
                     CONSORT_SECRET must be the same on all ranks, on one host, of one user",
                )
            }
            ControlError::Refused { reason } => {
                Failure::new(format!("the coordinator refuses this rank: {reason}"))
                    .of("init")
                    .note("each rank is one process; a program that a rank starts is not a rank")
            }
            ControlError::Silent { during, host } => {
                let host = host.map_or("the launcher".to_string(), |rank| format!("rank {rank}"));
                Failure::new((format!("an answer from {host} by the deadline"), "none"))
                    .of(during.clone())
                    .note("it runs the coordinator, and its process is stopped or overloaded")
            }
            ControlError::Parted => Failure::new("the control plane was called after this rank had left")
                .of("control")
                .note("keep the World until the last call"),
            ControlError::TooLong { call, what, limit, length } => {
                Failure::new((format!("at most {limit} bytes"), length.to_string()))
                    .of(format!("{call}: {what}"))
                    .note("the control plane carries names and settings; data goes over a group")
            }
            ControlError::Mpi(error) => error.failure(),
            ControlError::Machine { during, error, note } => {
                Failure::new(error.clone()).of(during.clone()).note(note.clone())
            }
        }
    }
}

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

fn parity_rows(differing: &Differing) -> Vec<[String; 3]> {
    let row = |(value, ranks): &(Option<String>, Vec<usize>)| {
        let value =
            value.as_ref().map_or("(not given)".to_string(), |value| value.escape_debug().to_string());
        [differing.key.escape_debug().to_string(), ranks_text(ranks), value]
    };
    differing.values.iter().map(row).collect()
}

impl Error for ControlError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parity_error_names_key_ranks_and_values() {
        let values = vec![
            (Some("flash".to_string()), vec![0, 2]),
            (Some("math".to_string()), vec![1]),
            (None, vec![3]),
        ];
        let error =
            ControlError::Parity { differing: vec![Differing { key: "attention".to_string(), values }] };
        let expected = "parity: expected equal values on every rank
  attention   ranks 0,2   flash
  attention   rank 1      math
  attention   rank 3      (not given)
  note: start every rank with the same program, options and environment";
        assert_eq!(error.to_string(), expected);
    }
}
