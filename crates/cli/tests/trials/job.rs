//! One trial as a job under the launcher, and the output of its ranks.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use consort_comm::launch::{Options, Outcome, Sink, launch};

use super::plan::Plan;
use super::said::Said;

/// A job that ended.
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
    out: String,
    err: String,
}

impl Ended {
    /// The lines of a rank with this beginning, without the beginning.
    pub(crate) fn after(&self, rank: usize, beginning: &str) -> Vec<&str> {
        let beginning = format!("[{rank}] {beginning}");
        self.out.lines().filter_map(|line| line.strip_prefix(&beginning)).collect()
    }

    /// The lines of all ranks with this beginning, without the beginning.
    pub(crate) fn all_after(&self, beginning: &str) -> Vec<&str> {
        let rest = |line: &'_ str| line.split_once("] ").map(|(_, rest)| rest.len());
        let lines = self.out.lines().filter_map(|line| Some(&line[line.len() - rest(line)?..]));
        lines.filter_map(|line| line.strip_prefix(beginning)).collect()
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  code {} after {:?}: {}", self.outcome.code, self.took, self.outcome.summary)?;
        for line in self.out.lines().chain(self.err.lines()).filter(|line| line.len() > 4) {
            writeln!(f, "  {line}")?;
        }
        Ok(())
    }
}

/// Runs a trial; temporary files would be created in this folder.
pub(crate) fn run(plan: &Plan, folder: &Path) -> Ended {
    let own = std::env::current_exe().unwrap();
    // Not through the environment of this process, which all concurrent trials share.
    let trial = format!("CONSORT_TRIAL={}", plan.seed);
    let temporary = format!("TMPDIR={}", folder.display());
    // Printing a backtrace takes longer than a panic may take to be reported.
    let environment = ["env", "-u", "RUST_BACKTRACE", &trial, &temporary];
    let arguments = [own.to_str().unwrap(), "--exact", "rank_program", "--nocapture", "--quiet"];
    let program = environment.iter().chain(&arguments).map(|word| word.into()).collect();
    let entry = vec![env!("CARGO_BIN_EXE_consort").into(), "__rank".into()];
    let mut options = Options::new(plan.ranks, program, entry, Duration::from_secs(30));
    // Longer than an error may take, so that no rank is ended before it has one.
    options.grace = Duration::from_millis(1500);
    let start = Instant::now();
    let (out, err) = (Said::default(), Said::default());
    let outcome = launch(&options, Sink::new(out.clone()), Sink::new(err.clone())).unwrap();
    Ended { outcome, took: start.elapsed(), out: out.text(), err: err.text() }
}
