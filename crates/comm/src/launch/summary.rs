//! The final summary of a job: which rank failed first, how, and its last lines.

use std::fmt::Write;

use consort_types::ranks_text;

use super::{Options, Outcome, Rank, TIMED_OUT};
use crate::control::{Exit, JobFailure, What};

/// How the ranks of a job ended.
pub(super) struct Ends<'a> {
    pub(super) ranks: &'a [Rank],
    /// The ranks in the order of their ends.
    pub(super) order: &'a [usize],
    pub(super) timed_out: bool,
    /// The last lines of each rank's standard error.
    pub(super) tails: &'a [Vec<String>],
}

impl Ends<'_> {
    /// The job's exit code and the summary, given the first failure that the coordinator knows.
    pub(super) fn outcome(&self, failure: Option<JobFailure>, strangers: u64, options: &Options) -> Outcome {
        let first_bad = self.order.iter().copied().find(|rank| self.bad_exit(*rank).is_some());
        let mut summary = String::new();
        let code = if self.timed_out {
            let limit = options.timeout.unwrap_or_default();
            let _ = writeln!(summary, "error: run: the time of {limit:?} was up");
            let ended = self.order.iter().filter(|rank| !self.by_itself(**rank)).copied();
            self.write_ended(&mut summary, ended.collect());
            TIMED_OUT
        } else if let Some(first_bad) = first_bad {
            // The rank that the coordinator names failed first, even if a rank that failed because of it ended sooner.
            let named = match &failure {
                Some(failure) if !failure.culprits().is_empty() => failure.culprits(),
                _ => vec![first_bad],
            };
            let failed = |rank: &&usize| self.bad_exit(**rank).is_some() && self.by_itself(**rank);
            let counted = named.iter().find(failed).copied().unwrap_or(first_bad);
            self.write_failure(&mut summary, &named, failure.as_ref());
            if !named.contains(&counted) {
                self.write_failure(&mut summary, &[counted], None);
            }
            let ended = self.order.iter().filter(|rank| !self.by_itself(**rank)).copied();
            self.write_ended(&mut summary, ended.collect());
            self.bad_exit(counted).map_or(1, Exit::code)
        } else {
            0
        };
        if strangers > 0 {
            let _ = writeln!(summary, "note: {strangers} connections to the job's socket were turned away");
        }
        Outcome { code, summary, interrupted: None }
    }

    fn bad_exit(&self, rank: usize) -> Option<Exit> {
        self.ranks[rank].end.map(|end| end.exit).filter(|exit| !exit.is_success())
    }

    fn by_itself(&self, rank: usize) -> bool {
        self.ranks[rank].end.is_some_and(|end| end.by_itself)
    }

    /// Writes how ranks failed, and the last lines of the first of them.
    fn write_failure(&self, out: &mut String, ranks: &[usize], failure: Option<&JobFailure>) {
        let [rank, rest @ ..] = ranks else { return };
        let exit = self.ranks[*rank].end.map(|end| end.exit);
        let what = match (failure.filter(|failure| failure.what != What::Lost), exit) {
            (Some(failure), exit) => {
                let told = failure.told_of(*rank);
                match (exit, &failure.what) {
                    (_, What::Caused(cause)) if ranks == [cause.by] => told,
                    (_, What::Caused(cause)) => format!("{told}\n  found by rank {}", cause.by),
                    (Some(exit), what) if self.by_itself(*rank) && !matches!(what, What::Ended(_)) => {
                        format!("{told}; it {exit}")
                    }
                    _ => told,
                }
            }
            (None, Some(exit)) => exit.to_string(),
            (None, None) => "has not ended".to_string(),
        };
        let head = if failure.is_some() { "error: run: first failure: " } else { "  then " };
        let pids: Vec<String> = ranks.iter().map(|rank| self.ranks[*rank].pid.to_string()).collect();
        let processes = if rest.is_empty() { "process" } else { "processes" };
        let _ = writeln!(out, "{head}{} ({processes} {}): {what}", ranks_text(ranks), pids.join(","));
        let tail = self.tails.get(*rank).map(Vec::as_slice).unwrap_or_default();
        if !tail.is_empty() {
            let _ = writeln!(out, "  last lines of rank {rank} on the standard error:");
            for line in tail {
                let _ = writeln!(out, "    {line}");
            }
        }
    }

    fn write_ended(&self, out: &mut String, mut ranks: Vec<usize>) {
        ranks.sort();
        if !ranks.is_empty() {
            let _ = writeln!(out, "  note: did not end in time, and was ended: {}", ranks_text(&ranks));
        }
    }
}
