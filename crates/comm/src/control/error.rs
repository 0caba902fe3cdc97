//! Why a call on the control plane gave no result.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use super::failure::{Failure, write_rows};
use super::parity::Differing;
use crate::ranks_text;

/// Why a call on the control plane gave no result. After the first error every later call gives the same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlError {
    /// The job failed.
    Failed {
        /// What this rank was doing, with its source line.
        during: String,
        /// The first failure, the same on every rank.
        failure: Failure,
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

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ControlError::Failed { failure, .. } if failure.names_its_call() => failure.fmt(f),
            ControlError::Failed { during, failure } => write!(f, "{during}: {failure}"),
            ControlError::Parity { differing } => {
                f.write_str("parity: expected equal values on every rank, got")?;
                let rows: Vec<[String; 3]> = differing.iter().flat_map(parity_rows).collect();
                write_rows(f, &rows)?;
                f.write_str("\n  note: start every rank with the same program, options and environment")
            }
            ControlError::NotAdmitted { deadline, last } => {
                write!(f, "init: expected a welcome from the coordinator within {deadline:?}, got {last}")?;
                f.write_str("\n  note: without `consort run` rank 0 runs the coordinator, and must have started; CONSORT_JOB and ")?;
                f.write_str("CONSORT_SECRET must be the same on all ranks, on one host, of one user")
            }
            ControlError::Refused { reason } => {
                write!(f, "init: the coordinator refuses this rank: {reason}")?;
                f.write_str("\n  note: each rank is one process; a program that a rank starts is not a rank")
            }
            ControlError::Silent { during, host } => {
                let host = host.map_or("the launcher".to_string(), |rank| format!("rank {rank}"));
                write!(f, "{during}: expected an answer from {host} by the deadline, got none")?;
                f.write_str("\n  note: it runs the coordinator, and its process is stopped or overloaded")
            }
            ControlError::Parted => {
                f.write_str("control: expected no call after the goodbye, got one")?;
                f.write_str("\n  note: keep the World until the last call")
            }
            ControlError::TooLong { call, what, limit, length } => {
                write!(f, "{call}: {what}: expected at most {limit} bytes, got {length}")?;
                f.write_str("\n  note: the control plane carries names and settings; data goes over a group")
            }
            ControlError::Machine { during, error, note } => {
                write!(f, "{during}: {error}\n  note: {note}")
            }
        }
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
        let expected = "parity: expected equal values on every rank, got
  attention   ranks 0,2   flash
  attention   rank 1      math
  attention   rank 3      (not given)
  note: start every rank with the same program, options and environment";
        assert_eq!(error.to_string(), expected);
    }
}
