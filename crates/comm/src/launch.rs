//! Starts copies of a program as the ranks of a job on this host, and stays until all of them have ended.
//!
//! Three threads: this one starts ranks, waits for their ends and for signals; one carries their output
//! (`output.rs`), so that a reader who has stopped reading delays no death notice; one is the job's
//! coordinator.
//!
//! - A rank is started through an entry of the launcher's own program (`entry.rs`) that asks the kernel to
//!   kill it when the launcher dies, however that happens, and then becomes the program.
//! - Each rank leads a process group of its own, so that a signal from the terminal reaches it once, through
//!   the launcher, and so that what it started can be ended with it.
//! - When a rank fails, the coordinator tells the others. They have a grace period to end by themselves,
//!   then SIGTERM, then as long again, then SIGKILL.
//! - What the ranks did last is read from their flight recorders, when one fails and when SIGUSR1 asks for it.

mod entry;
mod error;
mod output;
mod signals;
mod summary;

pub use entry::become_rank;
pub use error::LaunchError;
pub use output::Sink;

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::control::socket::timespec;
use crate::control::{Coordinator, Exit};
use crate::flight::Flight;
use crate::job::Job;
use crate::ticks::now_ns;
use output::{Carrier, Output};
use signals::{ASKS, Signals};

/// The most ranks that one launcher starts.
pub const MAX_RANKS: usize = 1024;

/// What to start, and how.
#[derive(Debug)]
pub struct Options {
    /// How many ranks.
    pub ranks: usize,
    /// The program and its arguments.
    pub program: Vec<OsString>,
    /// The command that becomes a rank by `become_rank`; this process's id, then the program, are put after it.
    pub entry: Vec<OsString>,
    /// Where the output of each rank is also written, as `rank-N.out` and `rank-N.err`.
    pub tee: Option<PathBuf>,
    /// Where all that the flight recorders hold is written, as lines of JSON, on a failure and when asked.
    pub flight: Option<PathBuf>,
    /// When the job is given up.
    pub timeout: Option<Duration>,
    /// How long ranks may take to end by themselves, once one has failed.
    pub grace: Duration,
}

/// How a job ended.
#[derive(Debug)]
pub struct Outcome {
    /// The exit code of the rank that failed first, 128 and the signal where one killed it, 124 where the time
    /// was up; 0 if all is well.
    pub code: u8,
    /// What went wrong first, in lines; empty if all is well.
    pub summary: String,
}

/// The exit code of a job whose time was up, as `timeout` has it.
const TIMED_OUT: u8 = 124;

/// Runs a job. Its ranks' output goes to the two sinks. It returns when every rank has ended, and leaves
/// nothing behind.
pub fn launch(options: &Options, out: Sink, err: Sink) -> Result<Outcome, LaunchError> {
    entry::find(&options.program)?;
    if !(1..=MAX_RANKS).contains(&options.ranks) {
        return Err(LaunchError::Ranks { got: options.ranks });
    }
    let failed = |what: &'static str| move |error: io::Error| LaunchError::Machine { what, error };
    let mut output = Output::new(options.ranks, options.tee.as_deref(), out, err)?;
    let signals = Signals::take().map_err(failed("take over signals"))?;
    let job = Job::random().map_err(failed("draw random numbers"))?;
    let coordinator =
        Coordinator::start(&job, options.ranks, true).map_err(failed("open the job's socket"))?;
    let mut ranks = Ranks::default();
    for rank in 0..options.ranks {
        let started = start(options, &job, rank).and_then(|(rank, pipes)| output.add(pipes).map(|()| rank));
        // On an error the ranks that were started end with `ranks`.
        ranks.0.push(started.map_err(failed("start a rank"))?);
    }
    let carrier = output.start().map_err(failed("start a thread"))?;
    let mut watch = Watch {
        options,
        ranks,
        coordinator,
        carrier: &carrier,
        order: Vec::new(),
        killing: None,
        failed_ns: None,
        timed_out: false,
    };
    let signalled = watch.run(&signals);
    // All ranks have ended, but whoever reads our output may be slow. One who asked us to end, or limited our
    // time, does not wait for that.
    let hurry = (signalled || watch.timed_out).then_some(options.grace);
    let Watch { ranks, mut coordinator, order, failed_ns, timed_out, .. } = watch;
    let tails = carrier.finish(&signals, hurry);
    coordinator.stop();
    let ends = summary::Ends { ranks: &ranks.0, order: &order, timed_out, tails: &tails };
    let mut outcome = ends.outcome(coordinator.failure(), coordinator.strangers(), options);
    if outcome.code != 0 {
        let mut flight = coordinator.flight();
        flight.until_ns = failed_ns.unwrap_or(flight.until_ns);
        outcome.summary.insert_str(0, &record_flight(&flight, options));
    }
    Ok(outcome)
}

/// Writes the dump, where one is wanted: what there is to say of the ranks, in whole lines.
fn record_flight(flight: &Flight, options: &Options) -> String {
    let mut lines = if flight.is_empty() { String::new() } else { format!("{flight}\n") };
    if let Some(path) = &options.flight
        && let Err(error) = std::fs::write(path, flight.json_lines())
    {
        lines += &format!("error: run: --flight: {}: {error}\n", path.display());
    }
    lines
}

/// A started rank.
#[derive(Debug)]
struct Rank {
    child: Child,
    pid: u32,
    /// Becomes readable when the process ends.
    pidfd: OwnedFd,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug)]
struct End {
    exit: Exit,
    /// Whether it ended by itself, before the launcher sent it anything.
    by_itself: bool,
}

impl Rank {
    /// Sends a signal to the rank and what it started. Until the rank is waited for, its id is its own.
    fn kill(&self, signal: Signal) {
        if self.end.is_none()
            && let Ok(pid) = i32::try_from(self.pid)
            && let Some(pid) = Pid::from_raw(pid)
        {
            // It can only fail because nobody is left in the group.
            let _ = kill_process_group(pid, signal);
        }
    }

    /// Notes the end of the process, once there is one, and ends what it started and left behind.
    fn reap(&mut self, by_itself: bool) -> io::Result<Exit> {
        self.kill(Signal::KILL);
        let status = self.child.wait()?;
        let exit = match (status.code(), status.signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, signal) => Exit::Signal(signal.unwrap_or(0)),
        };
        self.end = Some(End { exit, by_itself });
        Ok(exit)
    }
}

/// The ranks. They do not outlive it.
#[derive(Debug, Default)]
struct Ranks(Vec<Rank>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in self.0.iter_mut().filter(|rank| rank.end.is_none()) {
            let _ = rank.reap(false);
        }
    }
}

/// Where a rank's output comes from.
type Pipes = (OwnedFd, OwnedFd);

fn start(options: &Options, job: &Job, rank: usize) -> io::Result<(Rank, Pipes)> {
    let [entry, arguments @ ..] = &options.entry[..] else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the entry is empty"));
    };
    let mut command = Command::new(entry);
    command.args(arguments).arg(std::process::id().to_string()).arg("--").args(&options.program);
    command.env("CONSORT_RANK", rank.to_string()).env("CONSORT_SIZE", options.ranks.to_string());
    command.env("CONSORT_JOB", &job.name).env("CONSORT_SECRET", job.secret.to_hex());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(io::Error::other("a rank has no pipes"));
    };
    let pid = child.id();
    let id = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pidfd = id.ok_or(rustix::io::Errno::INVAL).and_then(|id| pidfd_open(id, PidfdFlags::empty()));
    match pidfd {
        Ok(pidfd) => Ok((Rank { child, pid, pidfd, end: None }, (out.into(), err.into()))),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error.into())
        }
    }
}

/// How far the ending of ranks that did not end by themselves has come.
#[derive(Clone, Copy, Debug)]
enum Killing {
    /// They were told; at this moment they get a SIGTERM.
    Grace(Instant),
    /// They got it; at this moment they get a SIGKILL.
    Terminated(Instant),
    /// There is nothing more to send.
    Killed,
}

struct Watch<'a> {
    options: &'a Options,
    ranks: Ranks,
    coordinator: Coordinator,
    carrier: &'a Carrier,
    /// The ranks that have ended, in order.
    order: Vec<usize>,
    killing: Option<Killing>,
    /// When the first failure was seen, on the clock of the flight recorders.
    failed_ns: Option<u64>,
    timed_out: bool,
}

impl Watch<'_> {
    /// Waits until every rank has ended: whether a signal came meanwhile.
    fn run(&mut self, signals: &Signals) -> bool {
        let timeout = self.options.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let (mut signalled, mut interrupts) = (false, 0);
        while self.order.len() < self.ranks.0.len() {
            let due = match self.killing {
                Some(Killing::Grace(at) | Killing::Terminated(at)) => Some(at),
                Some(Killing::Killed) => None,
                None => timeout,
            };
            for rank in self.wait(signals, due) {
                self.note_end(rank);
            }
            for signal in signals.received() {
                if signal == ASKS {
                    self.tell_flight();
                    continue;
                }
                signalled = true;
                interrupts += usize::from(signal == Signal::INT);
                // One who asks twice does not want to wait for handlers.
                self.send(if interrupts > 1 { Signal::KILL } else { signal });
            }
            let now = Instant::now();
            if self.killing.is_none() && timeout.is_some_and(|timeout| now >= timeout) {
                self.timed_out = true;
                let limit = self.options.timeout.unwrap_or_default();
                self.coordinator.abort(format!("the job's time of {limit:?} is up"));
                self.begin_killing();
            }
            self.go_on_killing(now);
        }
        signalled
    }

    /// Sleeps until a rank ends, a signal comes, or a moment has come: the ranks that ended.
    fn wait(&self, signals: &Signals, due: Option<Instant>) -> Vec<usize> {
        let left = due.map(|due| timespec(due.saturating_duration_since(Instant::now())));
        let living: Vec<usize> =
            (0..self.ranks.0.len()).filter(|rank| self.ranks.0[*rank].end.is_none()).collect();
        let mut fds: Vec<PollFd<'_>> =
            living.iter().map(|rank| PollFd::new(&self.ranks.0[*rank].pidfd, PollFlags::IN)).collect();
        fds.extend(signals.poll_fds());
        // A signal may interrupt it, and is then found by `received`.
        let _ = poll(&mut fds, left.as_ref());
        let ended = living.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        ended.map(|(rank, _)| *rank).collect()
    }

    fn note_end(&mut self, rank: usize) {
        let by_itself = !matches!(self.killing, Some(Killing::Terminated(_) | Killing::Killed));
        // Waiting for one's own child that has ended does not fail; if it does, its state is unknown.
        let exit = self.ranks.0[rank].reap(by_itself).unwrap_or(Exit::Code(1));
        self.ranks.0[rank].end.get_or_insert(End { exit, by_itself });
        self.order.push(rank);
        self.coordinator.ended(rank, exit);
        if !exit.is_success() {
            self.begin_killing();
        }
    }

    /// Says what the ranks are doing.
    fn tell_flight(&self) {
        let flight = self.coordinator.flight();
        let nothing = if flight.is_empty() { "no rank has recorded an operation yet\n" } else { "" };
        self.carrier.note(&format!("{nothing}{}", record_flight(&flight, self.options)));
    }

    fn begin_killing(&mut self) {
        self.failed_ns.get_or_insert_with(now_ns);
        let at = Instant::now() + self.options.grace;
        self.killing.get_or_insert(Killing::Grace(at));
    }

    fn go_on_killing(&mut self, now: Instant) {
        match self.killing {
            Some(Killing::Grace(at)) if now >= at => {
                self.send(Signal::TERM);
                // A stopped rank does not act on it until it continues.
                self.send(Signal::CONT);
                self.killing = Some(Killing::Terminated(now + self.options.grace));
            }
            Some(Killing::Terminated(at)) if now >= at => {
                self.send(Signal::KILL);
                self.killing = Some(Killing::Killed);
            }
            _ => {}
        }
    }

    fn send(&self, signal: Signal) {
        self.ranks.0.iter().for_each(|rank| rank.kill(signal));
    }
}
