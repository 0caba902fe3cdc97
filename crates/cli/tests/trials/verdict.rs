//! The expected outcome of a trial: which ranks have an error, which rank it names, when, and the launcher's report.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::job::Ended;
use super::plan::{Class, Fault, Plan};
use super::rank::{GUILTY, code};

/// How soon after its deadline an error must come, 99 times of 100.
const PROMISE: Duration = Duration::from_millis(100);

/// How soon it must always come: after its deadline, or after its cause. Up to 32 ranks share two cores with whatever
/// else this machine does, and on its way a notice wakes four threads (launcher, coordinator, the rank's listener, the
/// waiter), each of which may have to wait for the others' time slices. Still far below the deadline of the calls, so
/// that a lost notice is detected.
const WORST: Duration = Duration::from_secs(1);

/// An error as a rank reported it.
struct Error {
    rank: usize,
    began: u64,
    at: u64,
    over: i64,
    named: Vec<usize>,
    text: String,
}

/// How long after its cause each error came, if the trial went as expected.
pub(crate) fn judge(plan: &Plan, ended: &Ended) -> Result<Vec<Duration>, String> {
    let (guilty, class) = (plan.guilty, plan.fault.class());
    let all_done = (0..plan.ranks).all(|rank| ended.after(rank, "done").len() == 1);
    let all_well = all_done && ended.outcome.code == 0 && ended.outcome.summary.is_empty();
    if class == Class::Nothing {
        return if all_well { Ok(Vec::new()) } else { Err("expected no failure".into()) };
    }
    let mut errors = BTreeMap::new();
    for rank in 0..plan.ranks {
        let said: Vec<Error> =
            ended.after(rank, "error ").into_iter().map(|line| Error::read(rank, line)).collect();
        // A guilty rank that is late may find all calls made, or be ended by the launcher.
        let must_fail = rank != guilty || class == Class::Mismatch;
        let done = !ended.after(rank, "done").is_empty();
        if must_fail && (done || said.len() != 1) || said.len() > 1 {
            return Err(format!("rank {rank}: expected one error, got {} and done: {done}", said.len()));
        }
        errors.extend(said.into_iter().map(|error| (rank, error)));
    }
    for error in errors.values().filter(|error| error.rank != guilty) {
        if !error.named.contains(&guilty) {
            return Err(format!("rank {}: does not name rank {guilty}: {}", error.rank, error.text));
        }
    }
    judge_launcher(plan, ended)?;
    let faults = ended.all_after("fault ");
    let [fault] = faults[..] else { return Err(format!("expected one fault, got {faults:?}")) };
    let fault: u64 = fault.parse().unwrap();
    let mut delays = Vec::new();
    for error in errors.values().filter(|error| error.rank != guilty || class == Class::Mismatch) {
        let delay = match class {
            Class::Absence => u64::try_from(error.over).unwrap_or(0),
            // A rank cannot have its error before it waits.
            _ => error.at.saturating_sub(error.began.max(fault)),
        };
        let delay = Duration::from_micros(delay);
        if delay > WORST {
            return Err(format!("rank {}: its error came after {delay:?}", error.rank));
        }
        delays.push(delay);
    }
    Ok(delays)
}

fn judge_launcher(plan: &Plan, ended: &Ended) -> Result<(), String> {
    let (guilty, got) = (plan.guilty, i32::from(ended.outcome.code));
    let expected = match plan.fault {
        Fault::Killed | Fault::KilledByAnother => vec![128 + 9],
        Fault::Aborts => vec![128 + 6],
        Fault::Panics => vec![101],
        Fault::ExitsWithCode => vec![GUILTY],
        // It may learn at its end that the others made calls that it did not; no one handles that error.
        Fault::Leaves => (0..plan.ranks).map(code).chain([1]).collect(),
        // The guilty rank has no code, or the same as the others.
        _ => (0..plan.ranks).map(code).collect(),
    };
    if !expected.contains(&got) {
        return Err(format!("expected a code of {expected:?}, got {got}"));
    }
    let first =
        ended.outcome.summary.lines().find_map(|line| line.strip_prefix("error: run: first failure: "));
    let Some((who, _)) = first.and_then(|first| first.split_once(" (process")) else {
        return Err("the launcher does not say who failed first".to_string());
    };
    let named: Vec<&str> = who.trim_start_matches("ranks ").trim_start_matches("rank ").split(',').collect();
    // If two calls differ, it is unknown which one is wrong.
    let alone = plan.fault.class() == Class::Death && named.len() != 1;
    if alone || !named.contains(&&*guilty.to_string()) {
        return Err(format!("the launcher does not name rank {guilty}, but {who}"));
    }
    Ok(())
}

impl Error {
    fn read(rank: usize, line: &str) -> Error {
        let words: Vec<&str> = line.splitn(5, ' ').collect();
        let [began, at, over, named, text] = words[..] else { panic!("not an error: {line:?}") };
        Error {
            rank,
            began: began.parse().unwrap(),
            at: at.parse().unwrap(),
            over: over.parse().unwrap(),
            named: named.split(',').filter_map(|rank| rank.parse().ok()).collect(),
            text: text.to_string(),
        }
    }
}

/// The delays, by fault.
#[derive(Default)]
pub(crate) struct Times(BTreeMap<Fault, Row>);

#[derive(Default)]
struct Row {
    trials: usize,
    delays: Vec<Duration>,
}

impl Times {
    pub(crate) fn add(&mut self, fault: Fault, delays: Vec<Duration>) {
        let row = self.0.entry(fault).or_default();
        row.trials += 1;
        row.delays.extend(delays);
    }

    /// Whether errors come soon enough after their deadlines.
    pub(crate) fn check(&self) -> Result<(), String> {
        let absent = self.0.iter().filter(|(fault, _)| fault.class() == Class::Absence);
        let mut delays: Vec<Duration> = absent.flat_map(|(_, row)| row.delays.iter().copied()).collect();
        delays.sort();
        match delays.get(delays.len() * 99 / 100) {
            Some(late) if delays.len() >= 100 && *late > PROMISE => {
                Err(format!("of 100 errors one comes {late:?} or more after its deadline"))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:18} {:>6} {:>6} {:>9} {:>8} {:>8}",
            "cause", "trials", "errors", "median ms", "99% ms", "worst ms"
        )?;
        for (fault, Row { trials, delays }) in &self.0 {
            let mut delays: Vec<f64> = delays.iter().map(|delay| delay.as_secs_f64() * 1e3).collect();
            delays.sort_by(f64::total_cmp);
            let text = |ms: Option<&f64>| ms.map_or("-".to_string(), |ms| format!("{ms:.1}"));
            let [median, late] = [delays.len() / 2, delays.len() * 99 / 100].map(|at| text(delays.get(at)));
            let worst = text(delays.last());
            let (cause, errors) = (format!("{fault:?}"), delays.len());
            writeln!(f, "{cause:18} {trials:>6} {errors:>6} {median:>9} {late:>8} {worst:>8}")?;
        }
        Ok(())
    }
}
