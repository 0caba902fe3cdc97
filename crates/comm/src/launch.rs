//! Starts copies of a program as the ranks of a job on this host, and stays until all of them have ended.
//!
//! Three threads: this one starts ranks, waits for their ends and for signals; one forwards their output (`output.rs`),
//! so that a reader that has stopped reading delays no death notice; one is the job's coordinator.
//!
//! - A process of the launcher's own program, the watcher (`watcher.rs`), starts the ranks and ends what they leave
//!   behind, also when the launcher dies, however that happens. The two speak over a socket (`link.rs`).
//! - A rank is started through an entry of the launcher's own program (`entry.rs`) that asks the kernel to
//!   kill it when the watcher dies, and then becomes the program.
//! - Each rank leads a process group of its own, so that a signal from the terminal reaches it once, through
//!   the launcher, and so that what it started can be ended with it.
//! - When a rank fails, the coordinator tells the others; when a signal comes, it is sent to all ranks. Then they have
//!   a grace period to end by themselves, then SIGTERM, then as long again, then SIGKILL.
//! - What the ranks did last is read from their flight recorders, when one fails and when SIGUSR1 asks for it.

mod descendants;
mod entry;
mod error;
mod forward;
mod link;
mod output;
mod signals;
mod summary;
mod watcher;
mod watcher_handle;

pub use descendants::Orphans;
pub use entry::enter;
pub use error::LaunchError;
pub use forward::{Interrupted, forward_signals};
pub use output::Sink;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;

use crate::control::socket::timespec;
use crate::control::{Coordinator, Exit};
use crate::deadline::from_now;
use crate::flight_record::FlightRecord;
use crate::job::Job;
use crate::limits::check_open_files;
use crate::ticks::now_ns;
use link::Message;
use output::{Carrier, Output};
use signals::{ASKS, Signals};
use watcher_handle::{Gone, WatcherHandle};

/// The most ranks that one launcher starts.
pub const MAX_RANKS: usize = 1024;

/// What to start, and how to run it.
#[derive(Debug)]
pub struct Options {
    /// How many ranks.
    pub ranks: usize,
    /// The program and its arguments.
    pub program: Vec<OsString>,
    /// A command that calls `enter` with the arguments that are put after it, to become the watcher and the ranks.
    pub entry: Vec<OsString>,
    /// Where the output of each rank is also written, as `rank-N.out` and `rank-N.err`.
    pub tee: Option<PathBuf>,
    /// The rank whose standard output is written; `None` for all of them.
    pub only: Option<usize>,
    /// Where all that the flight recorders hold is written, as lines of JSON, on a failure and when asked.
    pub flight: Option<PathBuf>,
    /// The time after which the job is aborted.
    pub timeout: Option<Duration>,
    /// How long ranks may take to end by themselves after a failure or a signal; and as long again after SIGTERM, for
    /// them and for what they left behind.
    pub grace: Duration,
    /// The deadline of ranks that name none; `None` leaves them theirs.
    pub deadline: Option<Duration>,
}

impl Options {
    /// A job of this program that is aborted after `timeout`, with two seconds of grace.
    pub fn new(ranks: usize, program: Vec<OsString>, entry: Vec<OsString>, timeout: Duration) -> Options {
        let (tee, only, flight, deadline, timeout) = (None, None, None, None, Some(timeout));
        Options { ranks, program, entry, tee, only, flight, timeout, grace: Duration::from_secs(2), deadline }
    }
}

/// How a job ended.
#[derive(Debug)]
pub struct Outcome {
    /// The exit code of the rank that failed first, 128 plus the signal if one killed it, 124 after a timeout; 0 on
    /// success.
    pub code: u8,
    /// The first failure, as text; empty on success.
    pub summary: String,
    /// The first signal that the launcher forwarded to the ranks.
    pub interrupted: Option<Interrupted>,
}

/// The exit code of a job that timed out, as `timeout` has it.
const TIMED_OUT: u8 = 124;
/// The exit code of a successful job whose output could not be written.
const LOST: u8 = 2;
/// How long the file of the flight recorders may take to be written.
const DUMP: Duration = Duration::from_secs(5);
/// How long the watcher may take for what does not depend on other processes.
const ANSWER: Duration = Duration::from_secs(5);

/// Runs a job. Its ranks' output goes to the two sinks. Returns when every rank has ended, and leaves no process
/// behind.
pub fn launch(options: &Options, out: Sink, err: Sink) -> Result<Outcome, LaunchError> {
    entry::find(&options.program)?;
    if !(1..=MAX_RANKS).contains(&options.ranks) {
        return Err(LaunchError::Ranks { got: options.ranks });
    }
    let failed = |what: &'static str| move |error: io::Error| LaunchError::Machine { what, error };
    // For each rank two pipes and a connection; and what the launcher needs for itself.
    let files = options.ranks * if options.tee.is_some() { 5 } else { 3 } + 32;
    check_open_files(files).map_err(failed("open the files of all ranks"))?;
    let mut output = Output::new(options, out, err)?;
    let signals = Signals::take().map_err(failed("take over signals"))?;
    let job = Job::random().map_err(failed("draw random numbers"))?;
    // First, since it takes a while to start. After an error all processes of the job end with it.
    let mut watcher = WatcherHandle::start(options, &job).map_err(failed("start the watcher"))?;
    let coordinator =
        Coordinator::start(&job, options.ranks, true).map_err(failed("open the job's socket"))?;
    let mut ranks = Vec::new();
    for rank in 0..options.ranks {
        let pipe = || io::pipe().map_err(failed("open a pipe"));
        let ((out, to_out), (err, to_err)) = (pipe()?, pipe()?);
        let pid = watcher.start_rank(rank, to_out.into(), to_err.into())?;
        output.add((out.into(), err.into())).map_err(failed("open a pipe"))?;
        ranks.push(Rank { pid, end: None });
    }
    let carrier = output.start().map_err(failed("start a thread"))?;
    let mut watch = Watch {
        options,
        ranks,
        watcher,
        coordinator,
        carrier: &carrier,
        order: Vec::new(),
        killing: None,
        interrupts: 0,
        interrupted: None,
        failed_ns: None,
        timed_out: false,
    };
    let left = watch.run(&signals).and_then(|()| watch.end_what_is_left(&signals));
    // All ranks have ended, but the reader of our output may be slow. After a signal or a timeout that wait is limited.
    let hurry = (watch.interrupted.is_some() || watch.timed_out).then_some(options.grace);
    let Watch { ranks, mut watcher, mut coordinator, order, failed_ns, timed_out, interrupted, .. } = watch;
    let (tails, lost) = carrier.finish(&signals, hurry);
    coordinator.stop();
    let left = left.map_err(|Gone| watcher.gone())?;
    let ends = summary::Ends { ranks: &ranks, order: &order, timed_out, tails: &tails };
    let mut outcome = ends.outcome(coordinator.failure(), coordinator.strangers(), options);
    outcome.interrupted = interrupted;
    if outcome.code != 0 {
        let mut flight = coordinator.flight_record();
        flight.until_ns = failed_ns.unwrap_or(flight.until_ns);
        outcome.summary.insert_str(0, &record_flight(&flight, options));
    }
    if lost && outcome.code == 0 {
        outcome.code = LOST;
    }
    if left > 0 {
        outcome.summary +=
            &format!("note: processes that ranks started and that could not be ended: {left}\n");
    }
    Ok(outcome)
}

/// Writes the dump, if one is wanted; returns what to report of the ranks, in whole lines.
fn record_flight(flight: &FlightRecord, options: &Options) -> String {
    let mut lines = if flight.is_empty() { String::new() } else { format!("{flight}\n") };
    if let Some(path) = &options.flight {
        // On a thread of its own: an unread pipe or a hanging disk must not block the job.
        let (path, events) = (path.clone(), flight.json_lines());
        let (says, hears) = channel();
        let write = {
            let path = path.clone();
            move || drop(says.send(std::fs::write(path, events)))
        };
        let started = thread::Builder::new().name("consort flight".into()).spawn(write);
        let written = started.and_then(|_| match hears.recv_timeout(DUMP) {
            Ok(written) => written,
            Err(_) => Err(io::Error::other(format!("expected it to take the events within {DUMP:?}"))),
        });
        if let Err(error) = written {
            lines += &format!("error: run: --flight: {}: {error}\n", path.display());
        }
    }
    lines
}

/// A started rank.
#[derive(Debug)]
struct Rank {
    pid: u32,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug)]
struct End {
    exit: Exit,
    /// Whether it ended by itself, before the launcher sent it anything.
    by_itself: bool,
}

/// The stage of ending ranks that did not end by themselves.
#[derive(Clone, Copy, Debug)]
enum Killing {
    /// They were told; at this time they get a SIGTERM.
    Grace(Instant),
    /// They got SIGTERM; at this time they get a SIGKILL.
    Terminated(Instant),
    /// They got SIGKILL; at this time the watcher, which does not respond, is killed.
    Killed(Instant),
}

struct Watch<'a> {
    options: &'a Options,
    ranks: Vec<Rank>,
    watcher: WatcherHandle,
    coordinator: Coordinator,
    carrier: &'a Carrier,
    /// The ranks that have ended, in order.
    order: Vec<usize>,
    killing: Option<Killing>,
    /// How often a SIGINT came.
    interrupts: usize,
    /// The first signal that ends the job.
    interrupted: Option<Interrupted>,
    /// When the first failure was seen, on the clock of the flight recorders.
    failed_ns: Option<u64>,
    timed_out: bool,
}

impl Watch<'_> {
    /// Waits until every rank has ended.
    fn run(&mut self, signals: &Signals) -> Result<(), Gone> {
        let timeout = self.options.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        while self.order.len() < self.ranks.len() {
            let due = match self.killing {
                Some(Killing::Grace(at) | Killing::Terminated(at) | Killing::Killed(at)) => Some(at),
                None => timeout,
            };
            self.wait(signals, due);
            for message in self.watcher.receive()? {
                if let Message::Ended { rank, status } = message {
                    self.note_end(rank, ExitStatus::from_raw(status));
                }
            }
            for signal in signals.received() {
                if signal == ASKS {
                    self.tell_flight();
                    continue;
                }
                self.note_signal(signal);
                if self.interrupts > 1 {
                    // After a second interrupt, do not wait for handlers.
                    self.kill_ranks();
                } else {
                    self.watcher.signal(signal);
                    // Ranks may not receive the signal, or may ignore it.
                    self.begin_killing();
                }
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
        Ok(())
    }

    /// Ends what the ranks started and left behind; returns how many processes could not be ended.
    fn end_what_is_left(&mut self, signals: &Signals) -> Result<usize, Gone> {
        let grace = if matches!(self.killing, Some(Killing::Killed(_))) {
            Duration::ZERO
        } else {
            self.options.grace
        };
        self.watcher.end_all(grace);
        let mut due = from_now(grace.saturating_add(ANSWER));
        loop {
            self.wait(signals, Some(due));
            for message in self.watcher.receive()? {
                if let Message::Done { left } = message {
                    return Ok(left);
                }
            }
            for signal in signals.received().into_iter().filter(|signal| *signal != ASKS) {
                self.note_signal(signal);
                if self.interrupts > 1 {
                    self.watcher.end_all(Duration::ZERO);
                    due = due.min(from_now(ANSWER));
                }
            }
            if Instant::now() >= due {
                self.watcher.kill();
                due = from_now(ANSWER);
            }
        }
    }

    /// Blocks until the watcher sends a message, a signal comes, or `due`.
    fn wait(&self, signals: &Signals, due: Option<Instant>) {
        if self.watcher.has_read() {
            return;
        }
        let left = due.map(|due| timespec(due.saturating_duration_since(Instant::now())));
        let mut fds = vec![PollFd::new(&self.watcher, PollFlags::IN)];
        fds.extend(signals.poll_fds());
        // A signal may interrupt it, and is then found by `received`.
        let _ = poll(&mut fds, left.as_ref());
    }

    fn note_signal(&mut self, signal: Signal) {
        self.interrupted.get_or_insert(Interrupted::by(signal));
        self.interrupts += usize::from(signal == Signal::INT);
    }

    fn note_end(&mut self, rank: usize, status: ExitStatus) {
        let by_itself = !matches!(self.killing, Some(Killing::Terminated(_) | Killing::Killed(_)));
        let exit = Exit::from(status);
        self.ranks[rank].end = Some(End { exit, by_itself });
        self.order.push(rank);
        self.coordinator.ended(rank, exit);
        if !exit.is_success() {
            self.begin_killing();
        }
    }

    /// Reports what the ranks are doing.
    fn tell_flight(&self) {
        let flight = self.coordinator.flight_record();
        let nothing = if flight.is_empty() { "no rank has recorded an operation yet\n" } else { "" };
        self.carrier.note(&format!("{nothing}{}", record_flight(&flight, self.options)));
    }

    fn begin_killing(&mut self) {
        self.failed_ns.get_or_insert_with(now_ns);
        self.killing.get_or_insert_with(|| Killing::Grace(from_now(self.options.grace)));
    }

    fn go_on_killing(&mut self, now: Instant) {
        match self.killing {
            Some(Killing::Grace(at)) if now >= at => {
                self.watcher.signal(Signal::TERM);
                // A stopped rank does not handle it until it continues.
                self.watcher.signal(Signal::CONT);
                self.killing = Some(Killing::Terminated(from_now(self.options.grace)));
            }
            Some(Killing::Terminated(at)) if now >= at => self.kill_ranks(),
            Some(Killing::Killed(at)) if now >= at => {
                self.watcher.kill();
                self.killing = Some(Killing::Killed(from_now(ANSWER)));
            }
            _ => {}
        }
    }

    fn kill_ranks(&mut self) {
        self.failed_ns.get_or_insert_with(now_ns);
        self.watcher.signal(Signal::KILL);
        // After a second interrupt, do not wait long for a watcher that does not answer.
        let wait = if self.interrupts > 1 { Duration::from_secs(1) } else { ANSWER };
        let due = from_now(wait);
        self.killing = match self.killing {
            Some(Killing::Killed(before)) => Some(Killing::Killed(before.min(due))),
            _ => Some(Killing::Killed(due)),
        };
    }
}
