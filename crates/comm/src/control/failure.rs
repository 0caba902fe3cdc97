//! The first failure in a job: which rank is to blame, what happened, and where.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use consort_types::{Failure, aligned, ranks_text};
use serde::{Deserialize, Serialize};

use crate::cause::Cause;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl Exit {
    /// Whether it ended with success.
    pub fn is_success(self) -> bool {
        self == Exit::Code(0)
    }

    /// The exit code by which a shell would report it.
    pub fn code(self) -> u8 {
        let code = match self {
            Exit::Code(code) => code & 0xff,
            Exit::Signal(signal) => 128 + (signal & 0x7f),
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Exit {
        match (status.code(), status.signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, signal) => Exit::Signal(signal.unwrap_or(0)),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Exit::Code(code) => write!(f, "exited with code {code}"),
            Exit::Signal(signal) => match signal_name(signal) {
                Some(name) => write!(f, "was killed by {name} (signal {signal})"),
                None => write!(f, "was killed by signal {signal}"),
            },
        }
    }
}

/// The name of a signal, by its number on Linux on the common architectures.
pub(crate) fn signal_name(signal: i32) -> Option<&'static str> {
    const NAMES: [&str; 31] = [
        "SIGHUP",
        "SIGINT",
        "SIGQUIT",
        "SIGILL",
        "SIGTRAP",
        "SIGABRT",
        "SIGBUS",
        "SIGFPE",
        "SIGKILL",
        "SIGUSR1",
        "SIGSEGV",
        "SIGUSR2",
        "SIGPIPE",
        "SIGALRM",
        "SIGTERM",
        "SIGSTKFLT",
        "SIGCHLD",
        "SIGCONT",
        "SIGSTOP",
        "SIGTSTP",
        "SIGTTIN",
        "SIGTTOU",
        "SIGURG",
        "SIGXCPU",
        "SIGXFSZ",
        "SIGVTALRM",
        "SIGPROF",
        "SIGWINCH",
        "SIGIO",
        "SIGPWR",
        "SIGSYS",
    ];
    NAMES.get(usize::try_from(signal.checked_sub(1)?).ok()?).copied()
}

/// The first failure of a job. Every rank is told the same one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFailure {
    /// The rank to blame; `None` for the launcher.
    pub rank: Option<usize>,
    /// What happened.
    pub what: What,
    /// Where: the call in which it was found, the last call of a rank that died, the source line of an abort. Empty if
    /// unknown.
    pub at: String,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// Its process ended without a goodbye.
    Ended(Exit),
    /// Its connection closed without a goodbye, and the state of its process is unknown.
    Lost,
    /// It said goodbye while others wait for it.
    Left,
    /// It aborted the job, for this reason.
    Aborted(String),
    /// A rank stopped for this reason, which it had published.
    Caused(Cause),
    /// These ranks did not arrive at a call before the deadline.
    Late(Vec<usize>),
    /// It made a different call than the others: each call, its source line, and the ranks that made it.
    Differs(Vec<(String, String, Vec<usize>)>),
}

impl JobFailure {
    /// The ranks known to be to blame.
    pub fn culprits(&self) -> Vec<usize> {
        match &self.what {
            What::Caused(cause) => cause.culprits.clone(),
            _ => self.rank.into_iter().collect(),
        }
    }

    /// The error as a [`Failure`], to which a caller adds its op and its source line.
    pub fn failure(&self) -> Box<Failure> {
        let who = self.rank.map_or("the launcher ".to_string(), |rank| format!("rank {rank} "));
        match &self.what {
            What::Caused(cause) if !cause.is_deadlock => {
                Failure::elsewhere(cause.by, cause.failure().to_string())
            }
            _ => self.of_subject(&who),
        }
    }

    /// The text in a line that names `rank` already, without the way out.
    pub(crate) fn told_of(&self, rank: usize) -> String {
        let failure = if self.rank == Some(rank) { self.of_subject("") } else { self.failure() };
        Failure { notes: Vec::new(), ..*failure }.to_string()
    }

    /// The facts, where `who` is the subject of what one rank did.
    fn of_subject(&self, who: &str) -> Box<Failure> {
        let after = if self.at.is_empty() { String::new() } else { format!(", after {}", self.at) };
        match &self.what {
            What::Ended(exit) if exit.is_success() => Failure::new(format!(
                "{who}{exit} without a goodbye{after}"
            ))
            .note(
                "a rank must make all calls that the others make, and drop its world or mesh, before it ends: return from \
                 `main` in place of `exit`",
            ),
            What::Ended(exit) => Failure::new(format!("{who}{exit}{after}")).note("its own output says why"),
            What::Lost => Failure::new(format!("{who}closed its connection without a goodbye{after}"))
                .note("its process died, or the program closed the descriptor of the control connection"),
            What::Left => Failure::new(format!("{who}said goodbye and does not come to {}", self.at))
                .note("a rank must make all calls that the others make before it drops its world or mesh"),
            What::Aborted(reason) => {
                let at = if self.at.is_empty() { String::new() } else { format!(" at {}", self.at) };
                Failure::new(format!("{who}aborted{at}: {reason}")).note("its own output may say more")
            }
            What::Caused(cause) => cause.failure(),
            What::Late(missing) => {
                Failure::new(format!("the deadline passed; missing: {}", ranks_text(missing)))
                    .of(self.at.clone())
                    .note("they are stopped, or busy for longer than the deadline, or do not make this call")
            }
            What::Differs(calls) => {
                let row = |(call, site, ranks): &(String, String, Vec<usize>)| {
                    [ranks_text(ranks), call.clone(), site.clone()]
                };
                Failure::new(("the same call on every rank", ""))
                    .of(self.at.clone())
                    .rows(aligned(&calls.iter().map(row).collect::<Vec<_>>()))
                    .note("the ranks took different branches; make the condition the same on all of them")
            }
        }
    }
}

impl fmt::Display for JobFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_have_the_codes_and_names_of_a_shell() {
        for (exit, code, text) in [
            (Exit::Code(0), 0, "exited with code 0"),
            (Exit::Code(3), 3, "exited with code 3"),
            (Exit::Signal(9), 137, "was killed by SIGKILL (signal 9)"),
            (Exit::Signal(15), 143, "was killed by SIGTERM (signal 15)"),
            (Exit::Signal(31), 159, "was killed by SIGSYS (signal 31)"),
            (Exit::Signal(40), 168, "was killed by signal 40"),
        ] {
            assert_eq!((exit.code(), exit.to_string().as_str()), (code, text));
        }
    }

    #[test]
    fn a_differing_call_is_told_with_ranks_grouped() {
        let calls = vec![
            ("barrier \"a\"".to_string(), "tp.rs:41".to_string(), vec![0, 1, 3]),
            ("parity".to_string(), "tp.rs:44".to_string(), vec![2]),
        ];
        let at = "call 3: barrier \"a\"".to_string();
        let failure = JobFailure { rank: Some(2), what: What::Differs(calls), at };
        let expected = "call 3: barrier \"a\": expected the same call on every rank
  ranks 0,1,3   barrier \"a\"   tp.rs:41
  rank 2        parity        tp.rs:44
  note: the ranks took different branches; make the condition the same on all of them";
        assert_eq!(failure.to_string(), expected);
    }
}
